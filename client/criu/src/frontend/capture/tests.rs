//! Tests of the capture: a fake CRIU at one end, a fake session at the other.

use std::io::{Write, pipe};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use permafrost_protocol::control::{self, Reply, Request, reply, request};
use permafrost_protocol::images::{Pagemap, PagemapEntry};
use permafrost_protocol::pageserver::{PE_LAZY, PE_PARENT, PE_PRESENT, SpaceId};
use permafrost_protocol::streamer::FileRequest;
use permafrost_protocol::{PAGE_BYTES, PAGE_SIZE};
use permafrost_transport::control::Connection;
use permafrost_transport::framing;
use prost::Message as _;

use super::super::sink::{PageSink, SinkError};
use super::super::space::{PipeRoom, SpaceLimits, SpacePipes};
use super::{Capture, CaptureError, CaptureLimits};

/// Pages of 4 KiB that a session has received, and whether it was closed.
type Received = (Vec<(u64, Vec<u8>)>, bool);

/// Takes pages, and refuses CLOSE if it is to.
#[derive(Default)]
struct Session {
    received: Received,
    refuses: bool,
}

impl PageSink for Session {
    fn open(&mut self, _: SpaceId) -> Result<bool, SinkError> {
        Ok(false)
    }

    fn has_parent(&mut self, _: SpaceId) -> Result<bool, SinkError> {
        Ok(false)
    }

    fn pages(&mut self, vaddr: u64, _: u16, bytes: &[u8]) -> Result<(), SinkError> {
        let each = bytes.chunks_exact(PAGE_SIZE).enumerate();
        let each = each.map(|(at, page)| (vaddr + (at * PAGE_SIZE) as u64, page.to_vec()));
        self.received.0.extend(each);
        Ok(())
    }

    fn hole(&mut self, _: u64, _: u64) -> Result<(), SinkError> {
        Ok(())
    }

    fn close(&mut self) -> Result<(), SinkError> {
        let (message, status) = ("the region is full".to_owned(), 28);
        if self.refuses {
            return Err(SinkError { message, status });
        }
        self.received.1 = true;
        Ok(())
    }

    fn abort(&mut self, _: &str) {}
}

/// Takes spaces out of their pipes as permafrostd does.
fn session(stream: UnixStream, limits: SpaceLimits, refuses: bool) -> JoinHandle<Received> {
    thread::spawn(move || {
        let mut sink = Session {
            refuses,
            ..Session::default()
        };
        while let Ok(Some((request, fds))) = framing::recv::<Request>(&stream) {
            let taken = match request.body.unwrap() {
                request::Body::TakeSpace(take) => {
                    let [pagemap, pages] = fds.try_into().unwrap();
                    let pipes = SpacePipes {
                        space: SpaceId {
                            space_type: take.space_type.try_into().unwrap(),
                            id: take.space,
                        },
                        pages_id: take.pages_id,
                        pagemap,
                        pages,
                        room: Arc::new(PipeRoom::unreserved()),
                    };
                    let taken = pipes.take(&mut sink, &limits, stream.as_fd());
                    taken.map_err(|error| error.to_string())
                }
                request::Body::EndPages(_) => sink.close().map_err(|error| error.to_string()),
                other => panic!("{other:?}"),
            };
            let body = match taken {
                Ok(()) => reply::Body::Done(control::Done { count: 1 }),
                Err(message) => reply::Body::Error(control::Error {
                    code: control::ErrorCode::SessionFailed.into(),
                    message,
                    hint: String::new(),
                }),
            };
            if framing::send(&stream, &Reply { body: Some(body) }, &[]).is_err() {
                break;
            }
        }
        sink.received
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
    fn start(limits: CaptureLimits) -> Self {
        Self::start_into(limits, SpaceLimits::default(), false)
    }

    fn start_into(limits: CaptureLimits, spaces: SpaceLimits, refuses: bool) -> Self {
        let images = tempfile::tempdir().unwrap();
        let (criu, server) = UnixStream::pair().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut connection = Connection::from_stream(ours);
        let capture = Capture::new(images.path(), limits, connection.canceller().unwrap());
        let running = capture.clone();
        Self {
            criu,
            capture,
            taken: thread::spawn(move || running.run(&server, "s", &mut connection)),
            received: session(theirs, spaces, refuses),
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
        // It can end the session's connection, and so keeps it open.
        drop(self.capture);
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
        let dump = Dump::start(CaptureLimits::default());
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
        let dump = Dump::start(CaptureLimits::default());
        dump.write(name, b"evil");
        dump.refused("no plain file name");
    }
    for name in ["core-7.img", "pagemap-7.img"] {
        let dump = Dump::start(CaptureLimits::default());
        dump.write(name, b"");
        dump.write(name, b"");
        dump.refused("a second time");
    }
    // A file that is there already: nothing is written over.
    let dump = Dump::start(CaptureLimits::default());
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
    };
    // As good as endless: the writer stops when its pipe is closed.
    let dump = Dump::start(limits);
    let mut ghost = dump.open("ghost-file-1.img").unwrap();
    while ghost.write_all(&[1; 4096]).is_ok() {}
    drop(ghost);
    dump.refused("more than 100000 bytes");

    let dump = Dump::start(limits);
    for number in 0..4 {
        dump.write(&format!("core-{number}.img"), b"");
    }
    dump.refused("more than 3 images");

    let spaces = SpaceLimits {
        waiting_bytes: 3 * PAGE_BYTES,
        ..SpaceLimits::default()
    };
    let dump = Dump::start_into(limits, spaces, false);
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
        let dump = Dump::start(CaptureLimits::default());
        if let Some(mut entries) = dump.open("pagemap-7.img") {
            let _ = entries.write_all(&map);
            dump.write(name, &page(1).repeat(count));
        }
        dump.write("inventory.img", b"inventory");
        dump.refused(words);
    }
    let dump = Dump::start(CaptureLimits::default());
    dump.write("pages-1.img", &page(1));
    dump.refused("does not follow its pagemap");
}

#[test]
fn a_client_that_disappears_or_sends_garbage_completes_nothing() {
    // Before the inventory, and in the middle of the pages.
    let dump = Dump::start(CaptureLimits::default());
    dump.write("core-7.img", b"registers");
    dump.refused("gave the dump up");
    let dump = Dump::start(CaptureLimits::default());
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
        let dump = Dump::start(CaptureLimits::default());
        (&dump.criu).write_all(bytes).unwrap();
        dump.refused("CRIU's request");
    }
    let dump = Dump::start(CaptureLimits::default());
    let filename = "core-7.img".to_owned();
    let mut message = FileRequest { filename }.encode_to_vec();
    message.splice(0..0, u32::try_from(message.len()).unwrap().to_le_bytes());
    message.push(0);
    (&dump.criu).write_all(&message).unwrap();
    dump.refused("without a pipe");
    let dump = Dump::start(CaptureLimits::default());
    let file = std::fs::File::open(Path::new("/dev/null")).unwrap();
    dump.hand_over("core-7.img", &file.into());
    dump.refused("without a pipe");
}

#[test]
fn a_session_that_refuses_the_pages_refuses_the_dump() {
    let dump = Dump::start_into(CaptureLimits::default(), SpaceLimits::default(), true);
    dump.write("inventory.img", b"inventory");
    let error = dump.capture.outcome().unwrap_err();
    assert!(error.is_of_session(), "{error}");
    dump.refused("the region is full");
}

#[test]
fn a_dump_that_is_given_up_hangs_up() {
    let dump = Dump::start(CaptureLimits::default());
    dump.write("core-7.img", b"registers");
    dump.capture.give_up();
    dump.refused("gave the dump up");
}
