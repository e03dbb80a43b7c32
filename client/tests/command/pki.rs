//! Tests of making, rotating and showing certificates.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::fake::{assert_exit, json, stderr, stdout};

/// Runs `permafrost pki` in `directory`; it needs no daemon.
fn pki(directory: &Path, arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_permafrost"))
        .current_dir(directory)
        .arg("--socket=/nonexistent/socket")
        .arg("pki")
        .args(arguments.split_whitespace())
        .output()
        .unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_certificate_is_issued_and_shown() {
    let scratch = tempfile::tempdir().unwrap();
    let here = scratch.path();
    assert_exit(&pki(here, "init --dir ca --name blue"), 0);
    assert_eq!(mode(&here.join("ca/ca-key.pem")), 0o600);
    let output = pki(
        here,
        "issue --dir ca --name a1 --role agent --namespace team-a --namespace default --host 10.0.0.7 --days 7 --out a1",
    );
    assert_exit(&output, 0);
    assert_eq!(mode(&here.join("a1/key.pem")), 0o600);
    let shown = stdout(&pki(here, "show a1"));
    assert!(shown.starts_with("agent a1\n"), "{shown}");
    for part in ["default, team-a", "10.0.0.7", "(in 6 d 23 h)", "blue CA "] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let shown = json(&pki(here, "show a1 --json").stdout);
    assert_eq!(shown["role"], "agent");
    assert_eq!(
        shown["namespaces"],
        serde_json::json!(["default", "team-a"])
    );
    let valid_ms =
        shown["expires_unix_ms"].as_u64().unwrap() - shown["valid_from_unix_ms"].as_u64().unwrap();
    assert_eq!(valid_ms, 8 * 86_400_000, "seven days, and one before now");

    // Without --out, the certificate is beside the CA.
    assert_exit(&pki(here, "issue --dir ca --name n1 --role node"), 0);
    assert!(here.join("ca/issued/n1/cert.pem").exists());
}

#[test]
fn nothing_is_replaced_unasked() {
    let scratch = tempfile::tempdir().unwrap();
    let here = scratch.path();
    assert_exit(&pki(here, "init --dir ca"), 0);
    let ca = fs::read(here.join("ca/ca.pem")).unwrap();
    let output = pki(here, "init --dir ca");
    assert_exit(&output, 4);
    assert!(stderr(&output).contains("hint: add another CA"));
    assert_eq!(fs::read(here.join("ca/ca.pem")).unwrap(), ca);
    let issue = "issue --dir ca --name n1 --role node --out n1";
    assert_exit(&pki(here, issue), 0);
    assert_exit(&pki(here, issue), 4);
    assert_exit(&pki(here, &format!("{issue} --force")), 0);
    // A CA is never overwritten with an identity, whatever the options.
    let into_ca = "issue --dir ca --name n1 --role node --out ca --force";
    assert_exit(&pki(here, into_ca), 4);
    assert_exit(&pki(here, "init --dir n1 --force"), 4);
    assert_eq!(fs::read(here.join("ca/ca.pem")).unwrap(), ca);
    assert_exit(&pki(here, "init --dir ca --force"), 0);
    assert_ne!(fs::read(here.join("ca/ca.pem")).unwrap(), ca);
    // A certificate of the CA that is gone.
    assert_exit(&pki(here, "rotate --dir ca --out n1"), 9);
}

#[test]
fn nonsense_is_refused_with_words() {
    let scratch = tempfile::tempdir().unwrap();
    let here = scratch.path();
    assert_exit(&pki(here, "init --dir ca"), 0);
    for (arguments, code, says) in [
        ("issue --dir ca --name N1 --role node", 2, "lower-case"),
        ("issue --dir ca --name ../x --role node", 2, "no name"),
        ("issue --dir ca --name n1 --role root", 2, "no role"),
        (
            "issue --dir ca --name n1 --role node --days 0",
            2,
            "1 to 825",
        ),
        ("issue --dir ca --name n1 --role node --days -1", 2, "error"),
        (
            "issue --dir ca --name n1 --role agent --namespace a/b",
            2,
            "no namespace",
        ),
        (
            "issue --dir ca --name a1 --role agent --host n1.node.permafrost",
            2,
            "host",
        ),
        (
            "issue --dir nowhere --name n1 --role node",
            3,
            "there is no CA in nowhere",
        ),
        ("issue --dir ca --name n1", 2, "--role"),
        ("rotate --dir ca", 2, "--out"),
        ("rotate --dir ca --out nowhere", 3, "nowhere"),
        ("rotate --dir ca --ca --retire", 2, "cannot be used"),
        ("rotate --dir ca --ca --out x", 2, "cannot be used"),
        ("init --dir other --name a_b", 2, "no name"),
        ("show nowhere", 3, "nowhere"),
    ] {
        let output = pki(here, arguments);
        assert_exit(&output, code);
        assert!(
            stderr(&output).contains(says),
            "{arguments}: {}",
            stderr(&output)
        );
    }
    // None of the failed commands has left a file.
    assert!(!here.join("ca/issued").exists() && !here.join("other").exists());
    let error = json(&pki(here, "issue --dir ca --name n1 --role root --json").stderr);
    assert_eq!(error["error"]["code"], "invalid");
    // A file in the way of a directory.
    fs::write(here.join("file"), "").unwrap();
    assert_exit(&pki(here, "init --dir file"), 2);
}

#[test]
fn a_rotation_keeps_the_holder_and_changes_the_key() {
    let scratch = tempfile::tempdir().unwrap();
    let here = scratch.path();
    assert_exit(&pki(here, "init --dir ca"), 0);
    assert_exit(
        &pki(
            here,
            "issue --dir ca --name r1 --role reader --namespace * --out r1",
        ),
        0,
    );
    let key = fs::read(here.join("r1/key.pem")).unwrap();
    let output = pki(here, "rotate --dir ca --out r1 --days 5 --json");
    assert_exit(&output, 0);
    let rotated = json(&output.stdout);
    assert_eq!(
        (&rotated["name"], &rotated["role"]),
        (&"r1".into(), &"reader".into())
    );
    assert_eq!(rotated["namespaces"], serde_json::json!(["*"]));
    assert_ne!(fs::read(here.join("r1/key.pem")).unwrap(), key);

    assert_exit(&pki(here, "rotate --dir ca --ca --name green"), 0);
    let shown = json(&pki(here, "show ca --json").stdout);
    assert_eq!(shown["authorities"].as_array().unwrap().len(), 2);
    let shown = json(&pki(here, "rotate --dir ca --out r1 --json").stdout);
    assert_eq!(shown["authorities"].as_array().unwrap().len(), 2);
    assert_exit(&pki(here, "rotate --dir ca --retire"), 0);
    let shown = json(&pki(here, "rotate --dir ca --out r1 --json").stdout);
    let authorities = shown["authorities"].as_array().unwrap();
    assert_eq!(authorities.len(), 1);
    assert!(
        authorities[0]["name"]
            .as_str()
            .unwrap()
            .starts_with("green CA ")
    );
    assert_exit(&pki(here, "show r1"), 0);
}

#[test]
fn what_cannot_be_used_is_shown_and_the_exit_code_says_so() {
    let scratch = tempfile::tempdir().unwrap();
    let here = scratch.path();
    assert_exit(&pki(here, "init --dir ca"), 0);
    assert_exit(
        &pki(here, "issue --dir ca --name n1 --role node --out n1"),
        0,
    );
    fs::set_permissions(here.join("n1/key.pem"), Permissions::from_mode(0o644)).unwrap();
    let output = pki(here, "show n1");
    assert_exit(&output, 9);
    assert!(stdout(&output).starts_with("node n1\n"));
    assert!(stderr(&output).contains("chmod 600"));
    fs::set_permissions(here.join("ca/ca-key.pem"), Permissions::from_mode(0o640)).unwrap();
    assert_exit(&pki(here, "issue --dir ca --name n2 --role node"), 9);
}

#[test]
fn certificates_are_denied_beside_one_and_taken_back() {
    let scratch = tempfile::tempdir().unwrap();
    let here = scratch.path();
    assert_exit(&pki(here, "init --dir ca"), 0);
    for (name, role) in [("n1", "node"), ("c7", "agent")] {
        let issue = format!("issue --dir ca --name {name} --role {role} --out {name}");
        assert_exit(&pki(here, &issue), 0);
    }
    let serial = json(&pki(here, "show c7 --json").stdout)["serial"].clone();
    let serial = serial.as_str().unwrap();
    assert!(stdout(&pki(here, "show c7")).contains(serial));
    let denied = json(
        &pki(
            here,
            "deny --certificate c7 --holder node/n9 --identity n1 --json",
        )
        .stdout,
    );
    let entries = serde_json::json!([format!("serial {serial}"), "name node n9"]);
    assert_eq!(denied["entries"], entries);
    assert_eq!(denied["changed"], 2);
    assert_eq!(mode(&here.join("n1/denied")), 0o600);
    let again = json(
        &pki(
            here,
            &format!("deny --serial 00{serial} --identity n1 --json"),
        )
        .stdout,
    );
    assert_eq!(again["changed"], 0, "the same number");
    // A rotation leaves the list alone.
    assert_exit(&pki(here, "rotate --dir ca --out n1"), 0);
    assert!(stdout(&pki(here, "denied --identity n1")).contains("name node n9"));
    let undo = format!("undeny --serial {serial} --holder node/n9 --identity n1");
    assert_exit(&pki(here, &undo), 0);
    assert!(stdout(&pki(here, "denied --identity n1")).contains("no certificate"));
    for nonsense in [
        "deny --identity n1",
        "deny --serial xyz --identity n1",
        "deny --holder n9 --identity n1",
        "deny --holder boss/n9 --identity n1",
        "deny --serial 1 --identity ca",
    ] {
        assert!(!pki(here, nonsense).status.success(), "{nonsense}");
    }
}
