//! An etcd that authenticates its clients: certificates, users and passwords, and the errors when they do not fit.

use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::control::ReportedError as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use etcd_client::{Certificate, Client, ConnectOptions, Identity, Permission, TlsOptions};
use permafrost_cluster::{ClusterConfig, TlsFiles};
use permafrost_clustered::Registry as _;
use permafrost_identity::{Authority, CertificateOrder, Role};
use permafrost_tests::etcd::{EtcdCluster, ServerTls};

use crate::support::{Bench, LIMIT, entry, until};

/// A private CA, as `permafrost pki` makes them.
struct Ca {
    authority: Authority,
    dir: tempfile::TempDir,
}

impl Ca {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("ca"), "test", false).unwrap();
        Self { authority, dir }
    }

    /// Issues a certificate into a directory with `ca.pem`, `cert.pem` and `key.pem`.
    fn issue(&self, name: &str) -> PathBuf {
        let out = self.dir.path().join(name);
        let order = CertificateOrder {
            hosts: vec!["127.0.0.1".to_owned()],
            ..CertificateOrder::new(name, Role::Node)
        };
        self.authority.issue(&order, &out, false).unwrap();
        out
    }
}

fn files(dir: &Path) -> TlsFiles {
    TlsFiles {
        ca: dir.join("ca.pem"),
        identity: Some((dir.join("cert.pem"), dir.join("key.pem"))),
    }
}

/// Returns the error of a node that cannot join. It must come soon, and must not claim that etcd is unreachable.
fn refused(bench: &Bench, config: &ClusterConfig) -> String {
    let begun = Instant::now();
    let joined = bench.try_join(config, "stranger", "r");
    assert!(begun.elapsed() < LIMIT);
    match joined {
        Err(error) if error.code() == ErrorCode::Unavailable => {
            format!("{error} ({})", error.hint())
        }
        Err(other) => panic!("{other}"),
        Ok(cluster) => panic!("joined: {:?}", cluster.fence().check()),
    }
}

#[test]
fn certificates_users_and_passwords_open_the_registry_and_nothing_else_does() {
    let (ca, other_ca) = (Ca::new(), Ca::new());
    let (server, own) = (ca.issue("etcd"), ca.issue("n1"));
    let stranger = other_ca.issue("n1");
    let tls = ServerTls {
        certificate: server.join("cert.pem"),
        key: server.join("key.pem"),
        ca: server.join("ca.pem"),
    };
    let Some(mut bench) = Bench::over("cluster security", |etcd| {
        EtcdCluster::start_secure(etcd, tls).unwrap()
    }) else {
        return;
    };
    let right = ClusterConfig {
        tls: Some(files(&own)),
        ..bench.config()
    };
    let node = bench.try_join(&right, "n1", "r1").unwrap();
    node.fence().check().unwrap();
    node.registry().publish(&entry("j", 1, "x"), None).unwrap();
    bench.runtime.block_on(node.leave());

    let with = |tls: TlsFiles| ClusterConfig {
        tls: Some(tls),
        ..right.clone()
    };
    // etcd is not of the authority that we trust.
    let wrong_ca = refused(&bench, &with(files(&stranger)));
    println!("wrong CA: {wrong_ca}");
    assert!(
        wrong_ca.contains("certificate") && wrong_ca.contains("127.0.0.1"),
        "{wrong_ca}"
    );
    // We are not of the one that etcd trusts.
    let mixed = TlsFiles {
        ca: own.join("ca.pem"),
        ..files(&stranger)
    };
    let unknown = refused(&bench, &with(mixed));
    println!("a stranger's certificate: {unknown}");
    assert!(unknown.contains("certificate"), "{unknown}");
    let without = TlsFiles {
        ca: own.join("ca.pem"),
        identity: None,
    };
    let nobody = refused(&bench, &with(without));
    println!("no certificate: {nobody}");
    assert!(nobody.contains("certificate"), "{nobody}");
    let missing = bench
        .try_join(&with(files(Path::new("/nowhere"))), "n1", "r1")
        .err()
        .unwrap();
    assert!(missing.to_string().contains("/nowhere/ca.pem"), "{missing}");

    // etcd asks for users, too.
    let address = bench.etcd.addresses()[0].clone();
    let read = |name: &str| std::fs::read(own.join(name)).unwrap();
    let admin = ConnectOptions::new().with_tls(
        TlsOptions::new()
            .ca_certificate(Certificate::from_pem(read("ca.pem")))
            .identity(Identity::from_pem(read("cert.pem"), read("key.pem"))),
    );
    bench.runtime.block_on(async {
        let mut admin = Client::connect([address], Some(admin)).await.unwrap();
        admin.role_add("root").await.unwrap();
        admin.user_add("root", "rootpw", None).await.unwrap();
        admin.user_grant_role("root", "root").await.unwrap();
        admin.role_add("permafrost").await.unwrap();
        let permission = Permission::read_write("/permafrost/v1/").with_prefix();
        admin
            .role_grant_permission("permafrost", permission)
            .await
            .unwrap();
        admin.user_add("permafrost", "secret", None).await.unwrap();
        admin
            .user_grant_role("permafrost", "permafrost")
            .await
            .unwrap();
        admin.auth_enable().await.unwrap();
    });
    let dir = tempfile::tempdir().unwrap();
    let as_user = |line: &str| {
        let file = dir.path().join(line.len().to_string());
        std::fs::write(&file, format!("{line}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        ClusterConfig {
            user_file: Some(file),
            ..right.clone()
        }
    };
    let wrong = refused(&bench, &as_user("permafrost:wrong!"));
    println!("wrong password: {wrong}");
    assert!(wrong.contains("password"), "{wrong}");
    let nobody = refused(&bench, &right);
    println!("no user: {nobody}");
    assert!(nobody.contains("user"), "{nobody}");
    let user = as_user("permafrost:secret");
    let elsewhere = refused(
        &bench,
        &ClusterConfig {
            prefix: "/elsewhere".to_owned(),
            ..user.clone()
        },
    );
    println!("no right: {elsewhere}");
    assert!(elsewhere.contains("permission denied"), "{elsewhere}");

    let node = bench.try_join(&user, "n1", "r1").unwrap();
    let registry = node.registry();
    registry.publish(&entry("j", 2, "y"), None).unwrap();
    until("the watch sees it", || node.nodes().live().nodes.len() == 1);
    // A restart of etcd forgets its tokens; nodes get new ones by themselves.
    bench.etcd.kill(0).unwrap();
    bench.etcd.restart(0).unwrap();
    bench.etcd.wait_ready().unwrap();
    until("it goes on", || {
        registry.publish(&entry("j", 3, "z"), None).is_ok()
    });
    until("its registration lives", || node.fence().check().is_ok());
    assert_eq!(registry.list("").unwrap().len(), 3);
    std::thread::sleep(bench.config().lease_ttl);
    node.fence().check().unwrap();
    until("the watch is back", || {
        node.nodes().live().age < std::time::Duration::from_secs(3)
    });
}

#[test]
fn only_what_a_node_has_signed_lets_a_copy_go() {
    let Some(bench) = Bench::new("cluster removals", 1) else {
        return;
    };
    let (ca, others) = (Ca::new(), Ca::new());
    let one = bench.join_as("n1", &ca.issue("n1"));
    let two = bench.join_as("n2", &ca.issue("n2"));
    let (one, two) = (one.registry(), two.registry());
    let [x, y] = ["x", "y"].map(|id| entry("j", if id == "x" { 1 } else { 2 }, id));
    for entry in [&x, &y] {
        one.publish(entry, None).unwrap();
    }
    one.withdraw(&x.checkpoint).unwrap();
    assert!(two.is_withdrawn(&x.checkpoint).unwrap());
    assert!(!two.is_withdrawn(&y.checkpoint).unwrap());
    // Under another name than it had it was somebody else's.
    let renamed = entry("k", 1, "x").checkpoint;
    assert!(!two.is_withdrawn(&renamed).unwrap());

    // Whoever has etcd's password, and no node's key.
    let address = bench.etcd.addresses()[0].clone();
    let etcd = |key: &str, value: Option<Vec<u8>>| {
        let (address, key) = (address.clone(), format!("/permafrost/v1/{key}"));
        bench.runtime.block_on(async move {
            let mut client = Client::connect([address], None).await.unwrap();
            match value {
                Some(value) => {
                    client.put(key, value, None).await.unwrap();
                    Vec::new()
                }
                None => client.get(key, None).await.unwrap().kvs()[0]
                    .value()
                    .to_vec(),
            }
        })
    };
    let said = etcd("withdrawn/x", None);
    let key = "/permafrost/v1/checkpoints/j/00000000000000000002";
    let unsigned = format!(r#"{{"v":1,"key":"{key}","signed":null}}"#);
    // Of another CA, but a node's.
    let stranger = bench.join_as("n3", &others.issue("n3"));
    stranger.registry().withdraw(&y.checkpoint).unwrap();
    let strangers = etcd("withdrawn/y", None);
    for forged in [b"removed".to_vec(), unsigned.into_bytes(), said, strangers] {
        etcd("withdrawn/y", Some(forged));
        assert!(!two.is_withdrawn(&y.checkpoint).unwrap());
    }

    // An operator may say it of what is not listed any more, and of nothing else.
    let listed = entry("j", 3, "z");
    one.publish(&listed, None).unwrap();
    assert!(one.discard("z").unwrap_err().to_string().contains("j@3"));
    one.discard("y").unwrap();
    assert!(two.is_withdrawn(&y.checkpoint).unwrap());
}
