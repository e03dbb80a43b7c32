//! Tests of the stored data keys.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use super::*;

struct Setup {
    dir: tempfile::TempDir,
}

impl Setup {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let setup = Self { dir };
        for number in [1, 2] {
            let path = setup.key_file(number);
            std::fs::write(&path, [number; 32]).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        }
        setup
    }

    fn key_file(&self, number: u8) -> PathBuf {
        self.dir.path().join(format!("kek-{number}"))
    }

    fn wrapper(&self, number: u8) -> Wrapper {
        Wrapper::File(self.key_file(number))
    }

    fn keys(&self) -> PathBuf {
        self.dir.path().join("keys")
    }

    fn open(&self, number: u8, old: Option<u8>) -> Result<KeyStore, KeysError> {
        let old = old.map(|old| self.wrapper(old));
        KeyStore::open(&self.keys(), &self.wrapper(number), old.as_ref())
    }
}

#[test]
fn keys_are_kept_rotated_and_destroyed() {
    let setup = Setup::new();
    let keys = setup.open(1, None).unwrap();
    let (a, b) = (keys.key_for("a").unwrap(), keys.key_for("b").unwrap());
    assert_eq!(keys.key_for("a").unwrap(), a);
    let next = keys.rotate("a").unwrap();
    assert!(next != a && keys.key_for("a").unwrap() == next);
    assert!(matches!(keys.rotate("c"), Err(KeysError::NoKey { .. })));
    // The current one stays.
    keys.retire(next).unwrap();
    let listed = keys.list();
    assert_eq!(listed.len(), 3);
    drop(keys);
    let keys = setup.open(1, None).unwrap();
    assert_eq!(keys.list(), listed);
    keys.retire(a).unwrap();
    assert_eq!(keys.destroy("b").unwrap(), [b]);
    assert!(matches!(keys.destroy("b"), Err(KeysError::NoKey { .. })));
    drop(keys);
    let left = setup.open(1, None).unwrap().list();
    assert_eq!(left.iter().map(|key| key.id).collect::<Vec<_>>(), [next]);
    // Names of namespaces are not readable either.
    let keys = setup.open(1, None).unwrap();
    keys.key_for("secret-customer").unwrap();
    for name in COPIES {
        let bytes = std::fs::read(setup.keys().join(name)).unwrap();
        assert!(!bytes.windows(8).any(|part| part == b"customer"));
    }
}

#[test]
fn another_key_is_refused_and_the_old_one_wraps_anew() {
    let setup = Setup::new();
    let id = setup.open(1, None).unwrap().key_for("a").unwrap();
    assert!(matches!(
        setup.open(2, None),
        Err(KeysError::OtherKey { .. })
    ));
    assert_eq!(setup.open(2, Some(1)).unwrap().key_for("a").unwrap(), id);
    assert!(matches!(
        setup.open(1, None),
        Err(KeysError::OtherKey { .. })
    ));
    // Given once too often.
    assert_eq!(setup.open(2, Some(1)).unwrap().key_for("a").unwrap(), id);
    let echo = Wrapper::Command("cat; :".to_owned());
    let old = setup.wrapper(2);
    let keys = KeyStore::open(&setup.keys(), &echo, Some(&old)).unwrap();
    assert_eq!(keys.key_for("a").unwrap(), id);
    drop(keys);
    let failing = Wrapper::Command("exit 4; :".to_owned());
    let refused = KeyStore::open(&setup.keys(), &failing, None);
    assert!(matches!(refused, Err(KeysError::Command { .. })));
    assert!(KeyStore::open(&setup.keys(), &echo, None).is_ok());
}

/// Replaces a copy by a directory, which nothing can be written to.
fn block(setup: &Setup, name: &str) -> Vec<u8> {
    let path = setup.keys().join(name);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    bytes
}

fn unblock(setup: &Setup, name: &str, bytes: &[u8]) {
    let path = setup.keys().join(name);
    std::fs::remove_dir(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
}

#[test]
fn after_a_failed_write_memory_has_what_a_restart_reads_or_dumps_are_refused() {
    for name in COPIES {
        let setup = Setup::new();
        let keys = setup.open(1, None).unwrap();
        let (a, b) = (keys.key_for("a").unwrap(), keys.key_for("b").unwrap());
        let blocked = block(&setup, name);
        assert!(matches!(keys.destroy("a"), Err(KeysError::Io { .. })));
        // What would be written now might be under a key that a restart does not find.
        let refused = keys.key_for("a").unwrap_err();
        assert!(refused.to_string().contains("namespace \"a\""), "{refused}");
        assert!(keys.list().iter().all(|key| key.namespace != "a"));
        assert_eq!(keys.key_for("b").unwrap(), b);

        unblock(&setup, name, &blocked);
        // The failed one is completed, and erases the key from both copies.
        assert!(keys.destroy("a").unwrap().is_empty());
        assert!(matches!(keys.destroy("a"), Err(KeysError::NoKey { .. })));
        let next = keys.key_for("a").unwrap();
        assert_ne!(next, a);

        let blocked = block(&setup, name);
        assert!(keys.rotate("a").is_err() && keys.key_for("a").is_err());
        assert!(keys.key_for("new").is_err());
        unblock(&setup, name, &blocked);
        assert_eq!(keys.key_for("a").unwrap(), next);
        let listed = keys.list();
        drop(keys);
        for lost in COPIES {
            let aside = block(&setup, lost);
            std::fs::remove_dir(setup.keys().join(lost)).unwrap();
            assert_eq!(setup.open(1, None).unwrap().list(), listed, "{lost}");
            std::fs::write(setup.keys().join(lost), aside).unwrap();
        }
    }
}

#[test]
fn no_write_tears_the_only_intact_copy() {
    let setup = Setup::new();
    let keys = setup.open(1, None).unwrap();
    keys.key_for("a").unwrap();
    let [first, second] = COPIES.map(|name| setup.keys().join(name));
    let blocked = block(&setup, COPIES[1]);
    assert!(keys.rotate("a").is_err());
    let intact = std::fs::read(&first).unwrap();
    // The second copy is still the torn one: it is written first, and the other not before it is whole.
    assert!(keys.rotate("a").is_err());
    assert_eq!(std::fs::read(&first).unwrap(), intact);
    unblock(&setup, COPIES[1], &blocked[..blocked.len() / 2]);
    drop(keys);
    // A start repairs the one that is torn, and leaves the other one alone.
    let file = std::fs::File::options().write(true).open(&first).unwrap();
    file.set_modified(UNIX_EPOCH).unwrap();
    drop(setup.open(1, None).unwrap());
    let modified = std::fs::metadata(&first).unwrap().modified().unwrap();
    assert_eq!(modified, UNIX_EPOCH);
    assert_eq!(std::fs::read(&second).unwrap()[..16], intact[..16]);
}

#[test]
fn a_first_start_that_is_cut_anywhere_goes_on_or_begins_afresh() {
    let made = Setup::new();
    drop(made.open(1, None).unwrap());
    let whole = std::fs::read(made.keys().join(COPIES[0])).unwrap();
    let mut left: Vec<_> = std::fs::read_dir(made.keys()).unwrap().collect();
    left.retain(|entry| !COPIES.contains(&entry.as_ref().unwrap().file_name().to_str().unwrap()));
    assert!(left.is_empty(), "{left:?}");
    let cut_at = [0, 1, whole.len() / 2, whole.len() - 1, whole.len()];
    // Each copy is written beside its place, whole or cut, and then renamed.
    let beside = |complete: &[&str], cut: Option<usize>| {
        let setup = Setup::new();
        std::fs::create_dir(setup.keys()).unwrap();
        for name in complete {
            std::fs::write(setup.keys().join(name), &whole).unwrap();
        }
        if let Some(cut) = cut {
            std::fs::write(setup.keys().join("keys.new"), &whole[..cut]).unwrap();
        }
        let had_keys = KeyStore::exists(&setup.keys());
        assert_eq!(had_keys, !complete.is_empty());
        let id = setup.open(1, None).unwrap().key_for("a").unwrap();
        assert_eq!(setup.open(1, None).unwrap().key_for("a").unwrap(), id);
        assert!(COPIES.iter().all(|name| setup.keys().join(name).exists()));
    };
    for complete in [&[][..], &COPIES[..1], &COPIES[..]] {
        beside(complete, None);
        for cut in cut_at {
            beside(complete, Some(cut));
        }
    }
}

#[test]
fn a_copy_that_is_not_there_appears_whole() {
    let setup = Setup::new();
    // A directory in the way of the file beside it: nothing has appeared under the name itself.
    std::fs::create_dir_all(setup.keys().join("keys.new")).unwrap();
    assert!(setup.open(1, None).is_err());
    assert!(!KeyStore::exists(&setup.keys()));
    std::fs::remove_dir(setup.keys().join("keys.new")).unwrap();
    setup.open(1, None).unwrap().key_for("a").unwrap();
}

#[test]
fn a_crash_between_the_copies_leaves_one_state_and_a_damaged_copy_is_repaired() {
    let setup = Setup::new();
    let keys = setup.open(1, None).unwrap();
    let a = keys.key_for("a").unwrap();
    let [first, second] = COPIES.map(|name| setup.keys().join(name));
    let before = std::fs::read(&second).unwrap();
    keys.destroy("a").unwrap();
    drop(keys);
    // The second copy is not written yet: the key is destroyed, there too.
    std::fs::write(&second, &before).unwrap();
    assert!(setup.open(1, None).unwrap().list().is_empty());
    assert_eq!(
        std::fs::read(&second).unwrap(),
        std::fs::read(&first).unwrap()
    );
    // The first copy is torn: the state before.
    std::fs::write(&first, &before[..40]).unwrap();
    std::fs::write(&second, &before).unwrap();
    assert_eq!(setup.open(1, None).unwrap().key_for("a").unwrap(), a);
    std::fs::remove_file(&second).unwrap();
    assert_eq!(setup.open(1, None).unwrap().key_for("a").unwrap(), a);
    assert!(second.exists());
    for path in [&first, &second] {
        std::fs::write(path, b"damaged").unwrap();
    }
    assert!(matches!(
        setup.open(1, None),
        Err(KeysError::Damaged { .. })
    ));
}
