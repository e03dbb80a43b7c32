//! Keys of namespaces: what is destroyed with one cannot be read any more, whichever way it came.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use permafrost_criu::frontend::PageSink as _;
use permafrost_keys::{KeyStore, Wrapper};
use permafrost_protocol::control::{ErrorCode, KeyList, ReportedError, request};
use permafrost_store::{Adoption, StoreError};

use super::adopting::{open, write_images};
use super::site::Site;

/// Makes a site that encrypts.
fn encrypted(keys_dir: &tempfile::TempDir) -> (Site, Arc<KeyStore>) {
    let kek = keys_dir.path().join("kek");
    std::fs::write(&kek, [7; 32]).unwrap();
    std::fs::set_permissions(&kek, Permissions::from_mode(0o600)).unwrap();
    let keys = KeyStore::open(&keys_dir.path().join("keys"), &Wrapper::File(kek), None);
    let keys = Arc::new(keys.unwrap());
    let site = Site::with(16 << 20, |parts| {
        keys.attach(&parts.region);
        let keys: Arc<KeyStore> = Arc::clone(&keys);
        parts.keys = Some(keys);
    });
    (site, keys)
}

fn ask(site: &Site, action: &str, namespace: &str) -> Result<KeyList, StoreError> {
    let request = request::Keys {
        action: action.to_owned(),
        namespace: namespace.to_owned(),
    };
    site.store.local().keys(&request, true, &mut |_, _| {})
}

/// Makes a parked dump, and adopts it for a job if one is given.
fn bare_dump(site: &Site, salts: std::ops::Range<u64>, job: &str) {
    let images = tempfile::tempdir().unwrap();
    let (session, mut sink) = site.begin_bare(salts.clone());
    write_images(images.path(), salts, job);
    sink.close().unwrap();
    if !job.is_empty() {
        let adoption = Adoption {
            session: &session,
            ignore_times: true,
            ..Adoption::into_job(job)
        };
        site.store.adopt(&adoption, open(images.path())).unwrap();
    }
}

#[test]
fn adopted_dumps_cannot_be_read_once_the_keys_of_their_namespace_are_destroyed() {
    let dir = tempfile::tempdir().unwrap();
    let (site, keys) = encrypted(&dir);
    bare_dump(&site, 0..4, "team/adopted");
    bare_dump(&site, 10..14, "other/adopted");
    bare_dump(&site, 20..24, "");
    let before = keys.list();
    assert_eq!(before.len(), 3);

    let done = ask(&site, "destroy", "team").unwrap();
    assert_eq!(done.removed_checkpoints, 1);
    assert!(done.moved_segments > 0);
    // None of the keys that its pages were under is left.
    let after = keys.list();
    let other = |key: &&permafrost_store::NamespaceKey| key.namespace == "other";
    for key in before.iter().filter(|key| !other(key)) {
        assert!(after.iter().all(|left| left.id != key.id), "{key:?}");
    }
    assert_eq!(before.iter().find(other), after.iter().find(other));
    // What is not of the namespace is as it was.
    for held in site.store.local().everything().unwrap() {
        let checked = site.store.local().check(&held, None, &mut |_, _| true);
        assert_eq!(checked.unwrap().damage, Vec::<String>::new());
    }
    assert_eq!(site.store.local().everything().unwrap().len(), 2);
}

#[test]
fn a_key_that_a_dump_under_way_shares_with_adopted_ones_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (site, keys) = encrypted(&dir);
    bare_dump(&site, 0..4, "team/adopted");
    let (_, mut sink) = site.begin_bare(30..34);
    let refused = ask(&site, "destroy", "team").unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Conflict);
    assert!(refused.to_string().contains("are erased, but"), "{refused}");
    assert!(keys.list().iter().all(|key| key.namespace.is_empty()));
    sink.close().unwrap();
    ask(&site, "rotate", "").unwrap();
    assert_eq!(keys.list().len(), 1);
}
