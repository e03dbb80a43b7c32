//! Any number of dumps at once: they share the region and nothing else.

mod common;

use common::*;
use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::daemon::{Daemon, Options};

#[test]
fn forty_dumps_at_once_keep_their_pages_apart() {
    const DUMPS: u8 = 40;
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let contents = |n: u8| pages(n + 1, 256 + usize::from(n) * 7);
    std::thread::scope(|scope| {
        for n in 0..DUMPS {
            let (daemon, work) = (&daemon, work.path());
            scope.spawn(move || {
                let job = format!("crowd/{n}");
                let opened = daemon.json(&["open", "--job", &job]).unwrap();
                let dialect = if n % 2 == 0 {
                    Dialect::V24
                } else {
                    Dialect::V32
                };
                let mut peer = if n % 3 == 0 {
                    Peer::tcp(opened["address"].as_str().unwrap(), dialect)
                } else {
                    Peer::unix(opened["socket"].as_str().unwrap().as_ref(), dialect)
                };
                assert!(!peer.open());
                for (at, chunk) in contents(n).chunks(64 * PAGE_SIZE).enumerate() {
                    peer.pages(0x5000_0000 + at as u64 * 0x100_0000, chunk);
                }
                let images = work.join(format!("images-{n}"));
                fake_images(&images);
                assert_eq!(peer.close(), Some(0));
                peer.leave();
                let session = opened["session"].as_str().unwrap();
                daemon
                    .json(&[
                        "adopt",
                        "--job",
                        &job,
                        "--images-dir",
                        images.to_str().unwrap(),
                        session,
                    ])
                    .unwrap();
            });
        }
    });
    assert_eq!(listing(&daemon).len(), usize::from(DUMPS));
    for n in 0..DUMPS {
        assert!(
            exported_pages(&daemon, work.path(), &format!("crowd/{n}")) == contents(n),
            "dump {n}"
        );
    }
}

#[test]
fn jobs_of_a_namespace_share_pages_if_the_operator_says_so() {
    let work = tempfile::tempdir().unwrap();
    let options = Options {
        extra: vec!["--share-pages".into(), "lab".into()],
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let memory = pages(1, 1000);
    let dump = |job: &str, vaddr: u64| {
        let opened = daemon.json(&["open", "--job", job]).unwrap();
        let mut peer = Peer::tcp(opened["address"].as_str().unwrap(), Dialect::V32);
        peer.open();
        peer.pages(vaddr, &memory);
        let images = work.path().join("images");
        fake_images(&images);
        assert_eq!(peer.close(), Some(0));
        let (images, session) = (
            images.to_str().unwrap(),
            opened["session"].as_str().unwrap(),
        );
        daemon
            .json(&["adopt", "--job", job, "--images-dir", images, session])
            .unwrap();
        let shown = daemon.json(&["show", job]).unwrap();
        let space = &shown["manifest"]["spaces"][0];
        assert_eq!(exported_pages(&daemon, work.path(), job), memory, "{job}");
        ["stored_pages", "shared_pages"].map(|field| space[field].as_u64().unwrap())
    };
    assert_eq!(dump("lab/a", 0x40_0000), [1000, 0]);
    let [stored, shared] = dump("lab/b", 0x7000_0000);
    assert!(stored + shared == 1000 && shared > 600, "{shared} shared");
    assert_eq!(dump("other/a", 0x40_0000), [1000, 0]);
}

#[test]
fn pages_equal_to_the_parents_and_zero_pages_are_not_stored() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut memory = pages(1, 1000);
    memory[100 * PAGE_SIZE..300 * PAGE_SIZE].fill(0);
    let dump = |memory: &[u8], holes: bool| {
        let opened = daemon
            .json(&["open", "--job", "delta", "--prev-images"])
            .unwrap();
        let mut peer = Peer::tcp(opened["address"].as_str().unwrap(), Dialect::V32);
        peer.open();
        if holes {
            peer.hole(0x40_0000, 500);
            peer.pages(
                0x40_0000 + 500 * PAGE_SIZE as u64,
                &memory[500 * PAGE_SIZE..],
            );
        } else {
            peer.pages(0x40_0000, memory);
        }
        let images = work.path().join("images");
        fake_images(&images);
        assert_eq!(peer.close(), Some(0));
        peer.leave();
        let session = opened["session"].as_str().unwrap();
        daemon
            .json(&[
                "adopt",
                "--job",
                "delta",
                "--images-dir",
                images.to_str().unwrap(),
                session,
            ])
            .unwrap();
        let shown = daemon.json(&["show", "delta"]).unwrap();
        let space = &shown["manifest"]["spaces"][0];
        ["pages", "stored_pages", "zero_pages", "parent_pages"]
            .map(|field| space[field].as_u64().unwrap())
    };
    assert_eq!(dump(&memory, false), [1000, 800, 200, 0]);
    memory[700 * PAGE_SIZE] ^= 1;
    assert_eq!(dump(&memory, false), [1000, 1, 200, 799]);
    // The same by CRIU's word: the first half is left out, and holes over zero pages are the parent's zero pages.
    memory[800 * PAGE_SIZE] ^= 1;
    let [pages, stored, zero, parent] = dump(&memory, true);
    assert_eq!((pages, stored, zero + parent), (1000, 1, 999));
    assert!(exported_pages(&daemon, work.path(), "delta@3") == memory);
    // Flat: ancestors may go.
    daemon.run(&["rm", "delta@1"]).unwrap();
    daemon.run(&["rm", "delta@2"]).unwrap();
    assert!(exported_pages(&daemon, work.path(), "delta") == memory);
}
