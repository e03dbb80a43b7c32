//! A tap between `permafrost` and a daemon: forwards the control socket and the page socket, and holds a dump at a
//! phase.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use parking_lot::Mutex;
use permafrost_protocol::control::{Reply, Request, reply, request};
use permafrost_transport::framing;

/// Point at which a dump is held. The task is frozen at each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Before the first frame of the page stream.
    Open,
    /// In the middle of the pages; of a stream, before the daemon takes the first ones.
    Pages,
    /// Before CRIU sends CLOSE; of a stream, before the daemon hears that all pages have come.
    Close,
    /// Before the request for the seal.
    Seal,
    /// After the daemon has sealed, before its reply.
    Sealed,
}

/// Bytes of pages before [`Phase::Pages`].
const SOME_PAGES: usize = 1 << 20;

/// First bytes of PS_IOV_FORCE_CLOSE, with which CRIU ends a stream over `--ps-socket`; a frame has 32 bytes.
const CLOSE: [u8; 8] = [0x24, 0x10, 0, 0, 0, 0, 0, 0];
const FRAME: usize = 32;

pub(crate) struct Tap {
    pub(crate) socket: PathBuf,
    held: Receiver<u32>,
    go_on: Sender<()>,
    hold: &'static Hold,
}

/// State that the threads of a tap share.
struct Hold {
    at: Phase,
    /// Sends the pid of the process that requested the seal, or 0.
    held: Sender<u32>,
    go_on: Mutex<Receiver<()>>,
    was_held: AtomicBool,
    /// Callers whose end the daemon's kernel does not know yet.
    callers: AtomicUsize,
}

impl Hold {
    /// Holds the dump here, if this is the configured phase, and the first time.
    fn reached(&self, phase: Phase, peer: u32) {
        if phase == self.at
            && !self.was_held.swap(true, Ordering::SeqCst)
            && self.held.send(peer).is_ok()
        {
            let _ = self.go_on.lock().recv();
        }
    }
}

impl Tap {
    /// Listens in `dir` for the daemon at `control`.
    pub(crate) fn start(dir: &Path, control: PathBuf, at: Phase) -> Self {
        let socket = dir.join("tap.sock");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let (held, is_held) = channel();
        let (go_on, goes_on) = channel();
        let hold = Hold {
            at,
            held,
            go_on: Mutex::new(goes_on),
            was_held: AtomicBool::new(false),
            callers: AtomicUsize::new(0),
        };
        let hold: &'static Hold = Box::leak(Box::new(hold));
        let pages = dir.join("pages.sock");
        thread::spawn(move || {
            for client in listener.incoming() {
                let daemon = UnixStream::connect(&control).unwrap();
                forward_control(client.unwrap(), daemon, hold, pages.clone());
            }
        });
        Self {
            socket,
            held: is_held,
            go_on,
            hold,
        }
    }

    /// Waits until the dump is held. Returns the pid of the process that requested the seal, or 0.
    pub(crate) fn await_held(&self) -> u32 {
        self.held.recv().unwrap()
    }

    /// Lets the dump go on.
    pub(crate) fn release(&self) {
        self.go_on.send(()).unwrap();
    }

    /// Returns true once the end of every caller's connection has been passed on. Between a caller and the daemon the
    /// kernel does that while the caller exits.
    pub(crate) fn callers_are_gone(&self) -> bool {
        self.hold.callers.load(Ordering::SeqCst) == 0
    }
}

fn forward_control(client: UnixStream, daemon: UnixStream, hold: &'static Hold, pages: PathBuf) {
    let peer = rustix::net::sockopt::socket_peercred(&client).unwrap().pid;
    let peer = u32::try_from(peer.as_raw_nonzero().get()).unwrap();
    let (from, to) = (client.try_clone().unwrap(), daemon.try_clone().unwrap());
    hold.callers.fetch_add(1, Ordering::SeqCst);
    thread::spawn(move || {
        while let Ok(Some((request, fds))) = framing::recv::<Request>(&from) {
            match request.body {
                Some(request::Body::TakeSpace(_)) => hold.reached(Phase::Pages, 0),
                Some(request::Body::EndPages(_)) => hold.reached(Phase::Close, 0),
                Some(request::Body::Seal(_)) => hold.reached(Phase::Seal, peer),
                _ => {}
            }
            let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            if framing::send(&to, &request, &fds).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        hold.callers.fetch_sub(1, Ordering::SeqCst);
    });
    thread::spawn(move || {
        while let Ok(Some((mut reply, _))) = framing::recv::<Reply>(&daemon) {
            match &mut reply.body {
                Some(reply::Body::SessionOpened(opened)) => {
                    let real =
                        std::mem::replace(&mut opened.socket, pages.to_str().unwrap().to_owned());
                    forward_pages(&pages, PathBuf::from(real), hold);
                }
                Some(reply::Body::Checkpoint(_)) => hold.reached(Phase::Sealed, peer),
                _ => {}
            }
            if framing::send(&client, &reply, &[]).is_err() {
                break;
            }
        }
        let _ = client.shutdown(Shutdown::Both);
    });
}

fn forward_pages(socket: &Path, real: PathBuf, hold: &'static Hold) {
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        let criu = listener.accept().unwrap().0;
        let daemon = UnixStream::connect(real).unwrap();
        let (from, to) = (daemon.try_clone().unwrap(), criu.try_clone().unwrap());
        thread::spawn(move || copy(from, to, |_, _| {}));
        copy(criu, daemon, |before, chunk| {
            if before == 0 {
                hold.reached(Phase::Open, 0);
            }
            if before < SOME_PAGES && before + chunk.len() >= SOME_PAGES {
                hold.reached(Phase::Pages, 0);
            }
            let last = chunk.len().saturating_sub(FRAME);
            if chunk[last..].starts_with(&CLOSE) {
                hold.reached(Phase::Close, 0);
            }
        });
    });
}

/// Copies one direction to its end, and then ends both; `look` sees the bytes before, and each chunk.
fn copy(mut from: UnixStream, mut to: UnixStream, mut look: impl FnMut(usize, &[u8])) {
    let mut chunk = vec![0; 64 << 10];
    let mut before = 0;
    while let Ok(len @ 1..) = from.read(&mut chunk) {
        look(before, &chunk[..len]);
        before += len;
        if to.write_all(&chunk[..len]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
