//! Retention in etcd: the last one is not withdrawn, and rules are believed of nodes alone.

use std::sync::Arc;

use permafrost_clustered::{PolicyKeeper as _, Registry as _};
use permafrost_identity::{Authority, CertificateOrder, Namespaces, ReloadingIdentity, Role};
use permafrost_protocol::control::{ErrorCode, ReportedError as _};
use permafrost_server::daemon::SignedPolicies;

use crate::support::{Bench, entry};

#[test]
fn a_checkpoint_goes_only_while_the_one_that_stays_is_listed() {
    let Some(bench) = Bench::new("cluster retention", 1) else {
        return;
    };
    let (one, two) = (bench.join("n1"), bench.join("n2"));
    let (one, two) = (one.registry(), two.registry());
    let [first, second, third] = [(1, "x"), (2, "y"), (3, "z")].map(|(generation, id)| {
        let entry = entry("a/b", generation, id);
        one.publish(&entry, None).unwrap();
        entry.checkpoint
    });
    // Both have decided by the same list; the other was faster.
    two.withdraw_while(&third, &second).unwrap();
    let refused = one.withdraw_while(&second, &third).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Conflict, "{refused}");
    // Nor while another checkpoint has its place.
    let other = entry("a/b", 2, "other").checkpoint;
    assert!(one.withdraw_while(&first, &other).is_err());
    one.withdraw_while(&first, &second).unwrap();
    one.withdraw_while(&first, &second).unwrap();
    let left = two.list("a/b").unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].checkpoint.id, "y");
}

#[test]
fn rules_are_the_same_on_all_nodes_and_believed_of_nodes_alone() {
    let Some(bench) = Bench::new("cluster retention rules", 1) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let issue = |ca: &str, name: &str, role: Role| {
        let path = dir.path().join(ca);
        let authority = match path.exists() {
            true => Authority::open(&path),
            false => Authority::create(&path, ca, false),
        };
        let mut order = CertificateOrder::new(name, role);
        if role == Role::Agent {
            order.namespaces = Namespaces::new(["*"]).unwrap();
        }
        let out = dir.path().join(format!("{ca}-{name}"));
        authority.unwrap().issue(&order, &out, false).unwrap();
        Arc::new(ReloadingIdentity::load(&out).unwrap())
    };
    let (one, two) = (bench.join("n1"), bench.join("n2"));
    let first = SignedPolicies::new(one.registry(), issue("ca", "n1", Role::Node));
    let second = SignedPolicies::new(two.registry(), issue("ca", "n2", Role::Node));
    assert_eq!(first.read().unwrap(), None);
    assert!(first.replace(None, b"rules").unwrap());
    assert_eq!(second.read().unwrap().as_deref(), Some(&b"rules"[..]));
    assert!(
        !second.replace(None, b"others").unwrap(),
        "there are some by now"
    );
    assert!(second.replace(Some(b"rules"), b"others").unwrap());
    assert!(!first.replace(Some(b"rules"), b"lost").unwrap());
    assert_eq!(first.read().unwrap().as_deref(), Some(&b"others"[..]));

    // Whoever can write to etcd has no node's key.
    let raw = || one.registry().retention().unwrap();
    let signed = raw().unwrap();
    let own = second.read().unwrap();
    for (ca, role) in [("ca", Role::Agent), ("another-ca", Role::Node)] {
        let thief = SignedPolicies::new(one.registry(), issue(ca, "thief", role));
        one.registry().replace_retention(raw(), Vec::new()).unwrap();
        let forged = thief.sign(b"keep nothing").unwrap();
        assert!(one.registry().replace_retention(raw(), forged).unwrap());
        let refused = second.read().unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Conflict, "{refused}");
        assert!(refused.to_string().contains("not believed"), "{refused}");
        assert!(second.replace(own.as_deref(), b"mine").is_err());
    }
    let changed = String::from_utf8(signed.clone())
        .unwrap()
        .replace("others", "nothing");
    for wrong in [changed.as_bytes(), b"{", b"{\"v\":2}", &signed[..100]] {
        assert!(
            one.registry()
                .replace_retention(raw(), wrong.to_vec())
                .unwrap()
        );
        assert!(second.read().is_err());
    }
    assert!(one.registry().replace_retention(raw(), signed).unwrap());
    assert_eq!(second.read().unwrap(), own);
}
