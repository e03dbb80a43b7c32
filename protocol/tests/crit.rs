//! Compares images with CRIU's own image tool: it accepts the images that we write, and reads equal content from
//! them.
//!
//! Takes the tool from `PERMAFROST_CRIT`, else `crit` on PATH (Debian: package `python3-pycriu`; the `crit` on PyPI
//! is something else). Without the tool the test is skipped with a message; with `PERMAFROST_REQUIRE_CRIT=1` it
//! fails.

use std::io::Write;
use std::process::{Command, Stdio};

use permafrost_protocol::images::{Inventory, Pagemap, PagemapEntry, Process, write_pstree};

/// Returns the command of the tool, if it exists and is CRIU's.
fn crit() -> Option<String> {
    let tool = std::env::var("PERMAFROST_CRIT").unwrap_or_else(|_| "crit".into());
    let help = Command::new(&tool).arg("--help").output();
    if help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("CRiu Image Tool")) {
        return Some(tool);
    }
    assert!(
        std::env::var_os("PERMAFROST_REQUIRE_CRIT").is_none(),
        "{tool} is not CRIU's image tool"
    );
    eprintln!(
        "\n*** SKIPPED: no crit. Install python3-pycriu, or name the tool in PERMAFROST_CRIT. ***\n"
    );
    None
}

fn run(tool: &str, verb: &str, input: &[u8]) -> Vec<u8> {
    let mut child = Command::new(tool)
        .arg(verb)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start crit");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    let input = input.to_vec();
    let feeder = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().expect("wait for crit");
    feeder.join().expect("feed crit").expect("write to crit");
    assert!(output.status.success(), "crit {verb} failed");
    output.stdout
}

/// Returns crit's decoded form without spaces, so that it can be compared as text.
fn decoded(tool: &str, image: &[u8]) -> String {
    let text = String::from_utf8(run(tool, "decode", image)).expect("crit prints UTF-8");
    text.split_whitespace().collect()
}

#[test]
fn crit_reads_our_pagemap_and_its_own_reads_back() {
    let Some(tool) = crit() else { return };
    let pagemap = Pagemap {
        pages_id: 65_537,
        entries: vec![
            PagemapEntry {
                vaddr: 0x40_0000,
                nr_pages: 3,
                flags: 4,
            },
            PagemapEntry {
                vaddr: 0x7fff_0000_0000,
                nr_pages: 1024,
                flags: 6,
            },
            PagemapEntry {
                vaddr: 0x7fff_1000_0000,
                nr_pages: 2,
                flags: 1,
            },
        ],
    };
    let image = pagemap.write();
    let expected = concat!(
        r#"{"magic":"PAGEMAP","entries":[{"pages_id":65537},"#,
        r#"{"vaddr":4194304,"compat_nr_pages":3,"flags":4,"nr_pages":3},"#,
        r#"{"vaddr":140733193388032,"compat_nr_pages":1024,"flags":6,"nr_pages":1024},"#,
        r#"{"vaddr":140733461823488,"compat_nr_pages":2,"flags":1,"nr_pages":2}]}"#,
    );
    assert_eq!(decoded(&tool, &image), expected);
    // CRIU's library encodes the decoded form to the original file.
    assert_eq!(run(&tool, "encode", &run(&tool, "decode", &image)), image);
}

#[test]
fn crit_reads_our_inventory_and_process_tree() {
    let Some(tool) = crit() else { return };
    let inventory = Inventory {
        img_version: 2,
        dump_uptime: Some(77),
        ..Inventory::default()
    };
    let expected = r#"{"magic":"INVENTORY","entries":[{"img_version":2,"dump_uptime":77}]}"#;
    assert_eq!(decoded(&tool, &inventory.write()), expected);
    let process = Process {
        pid: 5,
        ppid: 0,
        pgid: 5,
        sid: 5,
        threads: vec![5, 6],
    };
    let expected =
        r#"{"magic":"PSTREE","entries":[{"pid":5,"ppid":0,"pgid":5,"sid":5,"threads":[5,6]}]}"#;
    assert_eq!(decoded(&tool, &write_pstree(&[process])), expected);
}
