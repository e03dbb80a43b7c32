//! Tests of directories of certificates, valid and invalid ones.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// Copies the files of `place` into a directory of their own, as plain files.
fn copy(place: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for name in ["ca.pem", "cert.pem", "key.pem"] {
        fs::copy(place.join(name), to.join(name)).unwrap();
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o777
}

#[test]
fn keys_are_their_owners_alone() {
    let cluster = Cluster::new();
    let place = cluster.issue("n1", Role::Node);
    assert_eq!(mode(&place.join("key.pem")), 0o600);
    assert_eq!(mode(&cluster.place("ca").join("ca-key.pem")), 0o600);
    for bad in [0o644, 0o640, 0o604, 0o620, 0o601] {
        fs::set_permissions(place.join("key.pem"), Permissions::from_mode(bad)).unwrap();
        let error = Identity::load(&place).unwrap_err();
        assert!(
            matches!(error, IdentityError::ReadableKey { mode, .. } if mode == bad),
            "{error}"
        );
    }
    fs::set_permissions(place.join("key.pem"), Permissions::from_mode(0o400)).unwrap();
    Identity::load(&place).unwrap();
    // Only root can give files away.
    if rustix::process::geteuid().is_root() {
        chown(place.join("key.pem"), Some(4711), None).unwrap();
        let error = Identity::load(&place).unwrap_err();
        assert!(
            matches!(error, IdentityError::ForeignKey { owner: 4711, .. }),
            "{error}"
        );
    }
    let ca_key = cluster.place("ca").join("ca-key.pem");
    fs::set_permissions(ca_key, Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(
        Authority::open(&cluster.place("ca")),
        Err(IdentityError::ReadableKey { .. })
    ));
}

#[test]
fn certificates_that_cannot_work_are_refused_with_words() {
    let cluster = Cluster::new();
    let expired = cluster.issue_between("old", Role::Node, -7200, -3600);
    let error = Identity::load(expired).unwrap_err();
    assert!(matches!(error, IdentityError::Expired { .. }));
    assert!(error.to_string().contains("1 hours ago"), "{error}");

    let early = cluster.issue_between("early", Role::Node, 3600, 7200);
    assert!(matches!(
        Identity::load(early),
        Err(IdentityError::NotYetValid { .. })
    ));

    let (one, two) = (
        cluster.issue("n1", Role::Node),
        cluster.issue("n2", Role::Node),
    );
    let mixed = cluster.place("mixed");
    copy(&one, &mixed);
    Identity::load(&mixed).unwrap();
    fs::copy(two.join("key.pem"), mixed.join("key.pem")).unwrap();
    assert!(matches!(
        Identity::load(&mixed),
        Err(IdentityError::Mismatch { .. })
    ));

    let others = Cluster::new();
    copy(&one, &mixed);
    fs::copy(others.place("ca").join("ca.pem"), mixed.join("ca.pem")).unwrap();
    assert!(matches!(
        Identity::load(&mixed),
        Err(IdentityError::Untrusted { .. })
    ));

    for (name, contents) in [
        ("cert.pem", &b""[..]),
        (
            "ca.pem",
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ),
        ("key.pem", b"\xff\xfe"),
    ] {
        copy(&one, &mixed);
        write(&mixed.join(name), contents);
        let error = Identity::load(&mixed).unwrap_err();
        assert!(
            matches!(&error, IdentityError::Pem { path, .. } if path.ends_with(name)),
            "{error}"
        );
    }
    fs::remove_file(mixed.join("cert.pem")).unwrap();
    assert!(matches!(
        Identity::load(&mixed),
        Err(IdentityError::Io { .. })
    ));
    fs::create_dir(mixed.join("cert.pem")).unwrap();
    assert!(matches!(
        Identity::load(&mixed),
        Err(IdentityError::NotAFile { .. })
    ));
}

#[test]
fn a_volume_that_switches_by_data_is_read() {
    let cluster = Cluster::new();
    let volume = cluster.place("volume");
    copy(&cluster.issue("n1", Role::Node), &volume.join("..1"));
    symlink("..1", volume.join("..data")).unwrap();
    assert_eq!(Identity::load(&volume).unwrap().name(), "n1");
}

#[test]
fn a_certificate_says_what_was_ordered_and_is_backdated() {
    let cluster = Cluster::new();
    let order = CertificateOrder {
        namespaces: Namespaces::new(["*", "team-a"]).unwrap(),
        hosts: vec![
            "10.0.0.7".to_owned(),
            "fe80::1".to_owned(),
            "Host.Example".to_owned(),
        ],
        days: 7,
        ..CertificateOrder::new("a-1.rack2", Role::Agent)
    };
    let place = cluster.place("a1");
    let issued = cluster.authority.issue(&order, &place, false).unwrap();
    let identity = Identity::load(&place).unwrap();
    assert_eq!(identity.subject(), &issued.subject);
    assert_eq!(
        (identity.name(), identity.role()),
        ("a-1.rack2", Role::Agent)
    );
    assert_eq!(identity.namespaces(), &order.namespaces);
    assert_eq!(
        issued.subject.hosts,
        ["10.0.0.7", "fe80::1", "host.example"]
    );
    let backdated = SystemTime::now()
        .duration_since(issued.subject.not_before)
        .unwrap();
    assert!(backdated >= DAY && backdated < DAY * 2, "{backdated:?}");
    let left = identity
        .not_after()
        .duration_since(SystemTime::now())
        .unwrap();
    assert!(left > DAY * 6 && left <= DAY * 7, "{left:?}");
}

#[test]
fn nonsense_is_not_issued_and_nothing_is_replaced() {
    let cluster = Cluster::new();
    let place = cluster.issue("n1", Role::Node);
    let before = fs::read(place.join("cert.pem")).unwrap();
    let good = CertificateOrder::new("n1", Role::Node);
    assert!(matches!(
        cluster.authority.issue(&good, &place, false),
        Err(IdentityError::Exists { .. })
    ));
    for bad in [
        CertificateOrder {
            name: "N1".to_owned(),
            ..good.clone()
        },
        CertificateOrder {
            days: 0,
            ..good.clone()
        },
        CertificateOrder {
            days: MAX_DAYS + 1,
            ..good.clone()
        },
        CertificateOrder {
            hosts: vec!["x.node.permafrost".to_owned()],
            ..good.clone()
        },
    ] {
        cluster.authority.issue(&bad, &place, true).unwrap_err();
    }
    assert_eq!(fs::read(place.join("cert.pem")).unwrap(), before);
    cluster.authority.issue(&good, &place, true).unwrap();
    assert_ne!(fs::read(place.join("cert.pem")).unwrap(), before);

    let ca = cluster.place("ca");
    assert!(matches!(
        Authority::create(&ca, "test", false),
        Err(IdentityError::Exists { .. })
    ));
    Authority::create(&ca, "test", true).unwrap();
    // Certificates of the previous CA are not made valid by this one.
    assert!(matches!(
        Authority::open(&ca).unwrap().reissue(&place, None),
        Err(IdentityError::Untrusted { .. })
    ));
}

#[test]
fn a_certificate_is_issued_anew_with_another_key_even_when_it_is_over() {
    let cluster = Cluster::new();
    let order = CertificateOrder {
        namespaces: Namespaces::new(["team-a"]).unwrap(),
        hosts: vec!["10.0.0.7".to_owned()],
        days: 7,
        ..CertificateOrder::new("a1", Role::Agent)
    };
    let place = cluster.place("a1");
    cluster.authority.issue(&order, &place, false).unwrap();
    let key = fs::read(place.join("key.pem")).unwrap();
    let issued = cluster.authority.reissue(&place, None).unwrap();
    assert_ne!(fs::read(place.join("key.pem")).unwrap(), key);
    let left = issued
        .subject
        .not_after
        .duration_since(SystemTime::now())
        .unwrap();
    assert!(
        left > DAY * 6 && left <= DAY * 7,
        "as long as before: {left:?}"
    );
    assert_eq!(issued.subject.namespaces, order.namespaces);
    assert_eq!(issued.subject.hosts, order.hosts);

    let old = cluster.issue_between("old", Role::Agent, -7200, -3600);
    cluster.authority.reissue(&old, Some(3)).unwrap();
    assert_eq!(Identity::load(&old).unwrap().name(), "old");
    let versions = fs::read_dir(old.join("versions")).unwrap().count();
    assert_eq!(versions, 2, "the one before is kept, and no others");
}

#[test]
fn a_ca_is_never_overwritten_with_an_identity() {
    let cluster = Cluster::new();
    let ca = cluster.place("ca");
    let order = CertificateOrder::new("n1", Role::Node);
    for replace in [false, true] {
        assert!(matches!(
            cluster.authority.issue(&order, &ca, replace),
            Err(IdentityError::Occupied { .. })
        ));
        let place = cluster.place("n1");
        cluster.authority.issue(&order, &place, true).unwrap();
        assert!(matches!(
            Authority::create(&place, "test", replace),
            Err(IdentityError::Occupied { .. })
        ));
    }
    Authority::open(&ca).unwrap();
}

#[test]
fn a_copied_directory_can_be_rotated() {
    let cluster = Cluster::new();
    let place = cluster.issue("n1", Role::Node);
    let copied = cluster.place("copied");
    copy(&place, &copied);
    copy(&place, &copied.join("current"));
    copy(&place, &copied.join("versions/a"));
    Identity::load(&copied).unwrap();
    for _ in 0..2 {
        let before = fs::read(copied.join("cert.pem")).unwrap();
        cluster.authority.reissue(&copied, None).unwrap();
        assert_ne!(fs::read(copied.join("cert.pem")).unwrap(), before);
        assert_eq!(Identity::load(&copied).unwrap().name(), "n1");
    }
}

#[test]
fn a_reader_never_finds_a_key_of_another_certificate() {
    let cluster = Cluster::new();
    let place = cluster.issue("n1", Role::Node);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut loads = 0_u32;
            while !done.load(Ordering::Relaxed) {
                Identity::load(&place).unwrap();
                loads += 1;
            }
            loads
        });
        for _ in 0..50 {
            cluster.authority.reissue(&place, None).unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
        done.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 10, "the reader had no chance");
    });
}

#[test]
fn a_statement_is_believed_of_whom_the_ca_knows_and_of_nobody_else() {
    let (cluster, others) = (Cluster::new(), Cluster::new());
    let load = |cluster: &Cluster, name: &str| {
        ReloadingIdentity::load(cluster.issue(name, Role::Node)).unwrap()
    };
    let (one, two) = (load(&cluster, "n1"), load(&cluster, "n2"));
    let signed = one.sign(b"gone").unwrap();
    let signer = two.signer(b"gone", &signed).unwrap();
    assert_eq!((signer.name.as_str(), signer.role), ("n1", Role::Node));
    assert!(two.signer(b"here", &signed).is_err(), "another statement");
    // The signature under another certificate, or of another CA.
    let posing = Signed {
        chain: two.sign(b"gone").unwrap().chain,
        ..signed.clone()
    };
    assert!(two.signer(b"gone", &posing).is_err());
    let strangers = load(&others, "n1").sign(b"gone").unwrap();
    assert!(two.signer(b"gone", &strangers).is_err());
    for nonsense in [
        Signed {
            chain: Vec::new(),
            ..signed.clone()
        },
        Signed {
            chain: vec!["00".to_owned(); 9],
            ..signed.clone()
        },
        Signed {
            signature: "xy".to_owned(),
            ..signed.clone()
        },
        Signed {
            scheme: 1,
            ..signed.clone()
        },
    ] {
        assert!(two.signer(b"gone", &nonsense).is_err());
    }
    // Statements of a node are no longer trusted once its certificates are denied.
    two.deny([&Denial::holder(Role::Node, "n1").unwrap()])
        .unwrap();
    assert!(two.signer(b"gone", &signed).is_err());
}
