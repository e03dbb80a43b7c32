//! Tests of the capture: a fake CRIU at one end, a fake session at the other.

use std::io::{Read, Write, pipe};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::images::{Pagemap, PagemapEntry};
use permafrost_protocol::pageserver::{PE_LAZY, PE_PARENT, PE_PRESENT};
use permafrost_protocol::streamer::FileRequest;
use permafrost_transport::framing;
use prost::Message as _;

use super::{Capture, CaptureError, CaptureLimits};

/// Pages of 4 KiB that a session has received, and whether it was closed.
type Received = (Vec<(u64, Vec<u8>)>, bool);

/// Takes frames of the 32-byte dialect, and answers OPEN2 and CLOSE.
fn session(mut stream: UnixStream, status: i32) -> JoinHandle<Received> {
    thread::spawn(move || {
        let (mut pages, mut frame) = (Vec::new(), [0; 32]);
        while stream.read_exact(&mut frame).is_ok() {
            let word = |at: usize| u64::from_le_bytes(frame[at..at + 8].try_into().unwrap());
            match word(0) & 0xffff {
                4 => stream.write_all(&[0]).unwrap(),
                6 => {
                    let count = usize::try_from(word(8)).unwrap();
                    let mut bytes = vec![0; count * PAGE_SIZE];
                    if stream.read_exact(&mut bytes).is_err() {
                        break;
                    }
                    let each = bytes.chunks_exact(PAGE_SIZE).enumerate();
                    pages.extend(
                        each.map(|(at, page)| (word(16) + (at * PAGE_SIZE) as u64, page.to_vec())),
                    );
                }
                _ => {
                    stream.write_all(&status.to_le_bytes()).unwrap();
                    return (pages, true);
                }
            }
        }
        (pages, false)
    })
}

/// A fake CRIU and what takes its dump.
struct Dump {
    criu: UnixStream,
    capture: Capture,
    taken: JoinHandle<Result<(), Arc<CaptureError>>>,
    received: JoinHandle<Received>,
    images: tempfile::TempDir,
}

impl Dump {
    fn start(limits: CaptureLimits, status: i32) -> Self {
        let images = tempfile::tempdir().unwrap();
        let (criu, server) = UnixStream::pair().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let capture = Capture::new(images.path(), limits);
        let running = capture.clone();
        Self {
            criu,
            capture,
            taken: thread::spawn(move || running.run(&server, &ours)),
            received: session(theirs, status),
            images,
        }
    }

    /// Opens an image as CRIU does. `None` if the streamer has hung up.
    fn open(&self, name: &str) -> Option<impl Write + use<>> {
        let (reader, writer) = pipe().unwrap();
        self.hand_over(name, &OwnedFd::from(reader))
            .then_some(writer)
    }

    fn hand_over(&self, name: &str, fd: &OwnedFd) -> bool {
        let filename = name.to_owned();
        let sent = framing::send(&self.criu, &FileRequest { filename }, &[]);
        sent.is_ok() && send_fd(&self.criu, fd)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        if let Some(mut file) = self.open(name) {
            // A streamer that refuses the dump closes the pipe.
            let _ = file.write_all(bytes);
        }
    }

    /// Ends the connection; returns the outcome, and what the session has received.
    fn end(self) -> (Result<(), Arc<CaptureError>>, Received) {
        drop(self.criu);
        let outcome = self.taken.join().unwrap();
        (outcome, self.received.join().unwrap())
    }

    /// Checks that the dump is refused with that error, and that the session was not closed.
    #[track_caller]
    fn refused(self, words: &str) {
        let (outcome, (_, closed)) = self.end();
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(!closed, "{words}: the session must not be closed");
    }
}

/// Sends a byte with a descriptor.
fn send_fd(stream: &UnixStream, fd: &OwnedFd) -> bool {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [std::io::IoSlice::new(&[0])];
    sendmsg(stream, &bytes, &mut control, SendFlags::NOSIGNAL).is_ok()
}

fn page(seed: u8) -> Vec<u8> {
    vec![seed; PAGE_SIZE]
}

fn pagemap(pages_id: u32, runs: &[(u64, u64, u16)]) -> Vec<u8> {
    let entries = runs.iter().map(|&(vaddr, nr_pages, flags)| PagemapEntry {
        vaddr,
        nr_pages,
        flags,
    });
    let entries = entries.collect();
    Pagemap { pages_id, entries }.write()
}

const PRESENT: u16 = PE_PRESENT | PE_LAZY;

#[test]
fn a_dump_arrives_whole_whatever_comes_first() {
    // The pagemap's bytes come before its pages, after them, or in the middle, cut anywhere.
    for cut in [0, 1, 7, 12, 20, 30, 40, usize::MAX] {
        let dump = Dump::start(CaptureLimits::default(), 0);
        dump.write("core-7.img", b"registers");
        let map = pagemap(1, &[(0x1000, 2, PRESENT), (0x9000, 1, PE_PRESENT)]);
        let cut = cut.min(map.len());
        let mut entries = dump.open("pagemap-7.img").unwrap();
        let mut pages = dump.open("pages-1.img").unwrap();
        entries.write_all(&map[..cut]).unwrap();
        pages
            .write_all(&[page(1), page(2), page(3)].concat())
            .unwrap();
        entries.write_all(&map[cut..]).unwrap();
        drop((entries, pages));
        let shared = pagemap(2, &[(0, 1, PE_PRESENT)]);
        dump.write("pagemap-shmem-5.img", &shared);
        dump.refuse_nothing();
        dump.write("pages-2.img", &page(9));
        dump.write("inventory.img", b"inventory");
        // Asked in the post-dump script, before CRIU hangs up.
        dump.capture.outcome().unwrap();
        let core = std::fs::read(dump.images.path().join("core-7.img")).unwrap();
        assert_eq!(core, b"registers");
        let (outcome, (pages, closed)) = dump.end();
        assert!(outcome.is_ok() && closed);
        let expected = [(0x1000, 1), (0x2000, 2), (0x9000, 3), (0, 9)];
        let expected = expected.map(|(vaddr, seed)| (vaddr, page(seed)));
        assert!(pages == expected, "cut at {cut}");
    }
}

impl Dump {
    /// Checks that nothing is decided.
    fn refuse_nothing(&self) {
        assert!(!self.taken.is_finished());
    }
}

#[test]
fn names_that_leave_the_directory_or_come_twice_are_refused() {
    for name in ["../x", "/etc/passwd", "a/b", "..", "", "x\0y"] {
        let dump = Dump::start(CaptureLimits::default(), 0);
        dump.write(name, b"evil");
        dump.refused("no plain file name");
    }
    for name in ["core-7.img", "pagemap-7.img"] {
        let dump = Dump::start(CaptureLimits::default(), 0);
        dump.write(name, b"");
        dump.write(name, b"");
        dump.refused("a second time");
    }
    // A file that is there already: nothing is written over.
    let dump = Dump::start(CaptureLimits::default(), 0);
    let path = dump.images.path().join("there");
    std::fs::write(&path, "before").unwrap();
    dump.write("there", b"after");
    dump.refused("a second time");
}

#[test]
fn more_than_the_limits_is_refused() {
    let limits = CaptureLimits {
        small_bytes: 100_000,
        images: 3,
        waiting_bytes: 3 * PAGE_SIZE,
    };
    // As good as endless: the writer stops when its pipe is closed.
    let dump = Dump::start(limits, 0);
    let mut ghost = dump.open("ghost-file-1.img").unwrap();
    while ghost.write_all(&[1; 4096]).is_ok() {}
    drop(ghost);
    dump.refused("more than 100000 bytes");

    let dump = Dump::start(limits, 0);
    for number in 0..4 {
        dump.write(&format!("core-{number}.img"), b"");
    }
    dump.refused("more than 3 images");

    let dump = Dump::start(limits, 0);
    let _entries = dump.open("pagemap-7.img").unwrap();
    let mut pages = dump.open("pages-1.img").unwrap();
    while pages.write_all(&page(1)).is_ok() {}
    drop(pages);
    dump.refused("have no address yet");
}

#[test]
fn pages_that_do_not_fit_their_pagemap_are_refused() {
    let cases: [(&str, Vec<u8>, usize, &str); 7] = [
        (
            "pages-1.img",
            pagemap(1, &[(0x1000, 2, PRESENT)]),
            1,
            "4096 bytes too few",
        ),
        (
            "pages-1.img",
            pagemap(1, &[(0x1000, 1, PRESENT)]),
            2,
            "4096 too many",
        ),
        (
            "pages-2.img",
            pagemap(1, &[(0x1000, 1, PRESENT)]),
            1,
            "in pages-1.img",
        ),
        (
            "pages-1.img",
            pagemap(1, &[(0x1000, 1, PE_PARENT)]),
            0,
            "not in the images",
        ),
        (
            "pages-1.img",
            pagemap(1, &[(0x1000, 1, PE_LAZY)]),
            0,
            "not in the images",
        ),
        ("pages-1.img", b"garbage!garbage!".to_vec(), 0, "pagemap of"),
        (
            "core-1.img",
            pagemap(1, &[]),
            0,
            "does not follow its pagemap",
        ),
    ];
    for (name, map, count, words) in cases {
        let dump = Dump::start(CaptureLimits::default(), 0);
        if let Some(mut entries) = dump.open("pagemap-7.img") {
            let _ = entries.write_all(&map);
            dump.write(name, &page(1).repeat(count));
        }
        dump.write("inventory.img", b"inventory");
        dump.refused(words);
    }
    let dump = Dump::start(CaptureLimits::default(), 0);
    dump.write("pages-1.img", &page(1));
    dump.refused("does not follow its pagemap");
}

#[test]
fn a_client_that_disappears_or_sends_garbage_completes_nothing() {
    // Before the inventory, and in the middle of the pages.
    let dump = Dump::start(CaptureLimits::default(), 0);
    dump.write("core-7.img", b"registers");
    dump.refused("gave the dump up");
    let dump = Dump::start(CaptureLimits::default(), 0);
    let mut entries = dump.open("pagemap-7.img").unwrap();
    entries
        .write_all(&pagemap(1, &[(0x1000, 2, PRESENT)]))
        .unwrap();
    dump.write("pages-1.img", &page(1));
    drop(entries);
    dump.refused("too few");
    // A length beyond any, a message that is none, a name without a pipe, and a file in its place.
    let garbage: [&[u8]; 3] = [
        &[0xff; 64],
        &[3, 0, 0, 0, 0xff, 0xff, 0xff],
        &[200, 0, 0, 0],
    ];
    for bytes in garbage {
        let dump = Dump::start(CaptureLimits::default(), 0);
        (&dump.criu).write_all(bytes).unwrap();
        dump.refused("CRIU's request");
    }
    let dump = Dump::start(CaptureLimits::default(), 0);
    let filename = "core-7.img".to_owned();
    let mut message = FileRequest { filename }.encode_to_vec();
    message.splice(0..0, u32::try_from(message.len()).unwrap().to_le_bytes());
    message.push(0);
    (&dump.criu).write_all(&message).unwrap();
    dump.refused("without a pipe");
    let dump = Dump::start(CaptureLimits::default(), 0);
    let file = std::fs::File::open(Path::new("/dev/null")).unwrap();
    dump.hand_over("core-7.img", &file.into());
    dump.refused("without a pipe");
}

#[test]
fn a_session_that_refuses_the_pages_refuses_the_dump() {
    let dump = Dump::start(CaptureLimits::default(), 28);
    dump.write("inventory.img", b"inventory");
    let error = dump.capture.outcome().unwrap_err();
    assert!(
        matches!(*error, CaptureError::Refused { status: 28 }),
        "{error}"
    );
    let (outcome, _) = dump.end();
    assert!(outcome.is_err());
}

#[test]
fn a_dump_that_is_given_up_hangs_up() {
    let dump = Dump::start(CaptureLimits::default(), 0);
    dump.write("core-7.img", b"registers");
    dump.capture.give_up();
    dump.refused("gave the dump up");
}
