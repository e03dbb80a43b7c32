//! CRIU's own TLS on the page-server port: `criu dump --page-server --tls` with certificates of `permafrost pki`.

mod common;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use permafrost_tests::cluster::pki;
use permafrost_tests::criu::{self, Criu};
use permafrost_tests::daemon::{Daemon, Options, tail};
use permafrost_tests::net;
use permafrost_tests::workload::{self, Workload};

use common::listing;

/// An authority and its certificates.
struct Authority(PathBuf);

impl Authority {
    fn new(dir: &Path) -> Self {
        pki(&["init", "--dir", text(dir)]).unwrap();
        Self(dir.to_owned())
    }

    fn issue(&self, name: &str, arguments: &[&str]) -> PathBuf {
        let out = self.0.with_extension(name);
        let mut all = vec!["issue", "--dir", text(&self.0), "--name", name];
        all.extend(["--out", text(&out)]);
        all.extend(arguments);
        pki(&all).unwrap();
        out
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs `criu dump`. Returns true if CRIU reports success, and the log.
fn dump(
    criu: &Criu,
    pid: u32,
    images: &Path,
    address: &str,
    identity: Option<&Path>,
) -> (bool, String) {
    std::fs::create_dir_all(images).unwrap();
    let address: SocketAddr = address.parse().unwrap();
    let mut command = Command::new(&criu.path);
    command.args(["dump", "-t", &pid.to_string(), "--images-dir"]);
    command.arg(images).args(["--page-server", "--address"]);
    command.args([&address.ip().to_string(), "--port"]);
    command.args([&address.port().to_string(), "-o", "dump.log", "-v4"]);
    if let Some(identity) = identity {
        command.arg("--tls");
        for (option, file) in [
            ("--tls-cacert", "ca.pem"),
            ("--tls-cert", "cert.pem"),
            ("--tls-key", "key.pem"),
        ] {
            command.arg(option).arg(identity.join(file));
        }
    }
    let status = command.status().unwrap();
    (status.success(), tail(&images.join("dump.log")))
}

/// A daemon with a certificate, listening on `address`.
fn start(dir: &Path, identity: &Path, address: &str) -> Daemon {
    let options = Options {
        listen: format!("{address}:0"),
        extra: vec!["--identity".to_owned(), text(identity).to_owned()],
        ..Options::default()
    };
    Daemon::start(dir, &options).unwrap()
}

#[test]
fn a_dump_over_criu_tls_is_parked_adopted_and_restored() {
    let test = "a_dump_over_criu_tls_is_parked_adopted_and_restored";
    let Some(criu) = criu::for_test(test) else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let ours = Authority::new(&work.path().join("ca"));
    let node = ours.issue("node", &["--role", "node", "--host", "127.0.0.1"]);
    let daemon = start(work.path(), &node, "127.0.0.1");
    let options = workload::Options {
        size_mib: 32,
        ..workload::Options::default()
    };
    let mut task = Workload::start(work.path(), &options).unwrap();
    let before = task.verify().unwrap();
    let images = |name: &str| work.path().join(name);

    // Strangers, and those who may not dump here, are told off, and the task lives.
    let foreign = Authority::new(&work.path().join("foreign"));
    let role = ["--role", "agent", "--namespace", "default"];
    let stranger = foreign.issue("stranger", &role);
    let reader = ours.issue("reader", &["--role", "reader", "--namespace", "default"]);
    let nothing = ours.issue("nothing", &["--role", "agent"]);
    for refused in [&stranger, &reader, &nothing] {
        let dir = images(&format!("refused-{}", listing(&daemon).len()));
        let (dumped, log) = dump(&criu, task.pid(), &dir, daemon.address(), Some(refused));
        assert!(!dumped, "{}:\n{log}", refused.display());
        assert!(listing(&daemon).is_empty());
        std::fs::remove_dir_all(dir).unwrap();
    }
    assert!(task.verify().unwrap().is_sound());

    let agent = ours.issue("agent", &role);
    let dir = images("images");
    let (dumped, log) = dump(&criu, task.pid(), &dir, daemon.address(), Some(&agent));
    assert!(dumped, "{log}\n{}", tail(&daemon.log()));
    task.wait_until_gone().unwrap();
    assert_eq!(listing(&daemon)[0]["kind"], "parked");
    let adopt = ["adopt", "--job", "over-tls", "--images-dir", text(&dir)];
    daemon.json(&adopt).unwrap();
    // Root has adopted it, and has not made its pages.
    let refused = daemon.try_run(&["restore", "over-tls"]).unwrap();
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(9), "{told}");
    assert!(told.contains("--trust agent:agent"), "{told}");
    daemon
        .run(&["restore", "over-tls", "--trust", "agent:agent"])
        .unwrap();
    let after = task.verify().unwrap();
    assert!(after.is_sound(), "{after:?}");
    assert_eq!(after.checksum_kept, before.checksum_kept);
}

#[test]
fn another_host_dumps_with_tls_or_not_at_all() {
    let test = "another_host_dumps_with_tls_or_not_at_all";
    let (Some(criu), Some(hosts)) = (criu::for_test(test), net::for_test(test, 2, 1500)) else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let ours = Authority::new(&work.path().join("ca"));
    let address = hosts[0].address().to_string();
    let node = ours.issue("node", &["--role", "node", "--host", &address]);
    let agent = ours.issue("agent", &["--role", "agent", "--namespace", "default"]);
    let daemon = hosts[0]
        .run(|| Ok(start(work.path(), &node, &address)))
        .unwrap();
    let options = workload::Options::default();
    let mut task = hosts[1]
        .run(|| Workload::start(work.path(), &options))
        .unwrap();
    let from_there = |name: &str, identity: Option<&Path>| {
        let images = work.path().join(name);
        let pid = task.pid();
        hosts[1]
            .run(|| Ok(dump(&criu, pid, &images, daemon.address(), identity)))
            .unwrap()
    };

    let (dumped, log) = from_there("plain", None);
    assert!(!dumped, "{log}");
    assert!(listing(&daemon).is_empty());
    assert!(task.verify().unwrap().is_sound());

    let (dumped, log) = from_there("tls", Some(&agent));
    assert!(dumped, "{log}\n{}", tail(&daemon.log()));
    task.wait_until_gone().unwrap();
    assert_eq!(listing(&daemon)[0]["kind"], "parked");
}
