//! Pages in pipes through an agent, and processes that do not read theirs.

use std::io::{IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use permafrost_protocol::control::{self, request};
use permafrost_protocol::images::FIRST_SERVED_PAGES_ID;
use permafrost_protocol::pageserver::{Dialect, SpaceId};
use permafrost_protocol::streamer::{FileReply, FileRequest};
use permafrost_transport::control::Connection;
use permafrost_transport::framing;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::common::*;
use super::{Site, text};

#[test]
fn pages_in_pipes_go_through_an_agent() {
    let site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    let mut memory = pages(3, 700);
    memory[100 * PAGE_SIZE..300 * PAGE_SIZE].fill(0);
    let mut connection = Connection::connect(&agent.control()).unwrap();
    let session = piped::open(&mut connection, "team/piped");
    piped::hand_over_memory(&mut connection, &session, 0x40_0000, &memory).unwrap();
    let end = request::EndPages {
        session: session.clone(),
    };
    connection.call(end).unwrap();
    let images = site.path("images");
    fake_images(&images);
    let images = std::fs::File::open(images).unwrap();
    let seal = request::Seal { session };
    let sealed = connection.call_with(seal, Some(images.as_fd()), &mut |_| {});
    assert_eq!(sealed.unwrap().generation, 1);
    let node = site.nodes[0].as_ref().unwrap();
    assert!(exported_pages(node, site.work(), "team/piped") == memory);
}

/// Requests a file like CRIU. Returns the end of the pipe to read it from.
fn ask_for(criu: &UnixStream, name: &str) -> std::io::PipeReader {
    let request = FileRequest {
        filename: name.to_owned(),
    };
    framing::send(criu, &request, &[]).unwrap();
    let (reply, _) = framing::recv::<FileReply>(criu).unwrap().unwrap();
    assert!(reply.exists, "{name}");
    let (reader, writer) = std::io::pipe().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [writer.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let byte = [IoSlice::new(&[0])];
    rustix::net::sendmsg(criu, &byte, &mut control, SendFlags::empty()).unwrap();
    reader
}

#[test]
fn processes_that_do_not_read_yet_hold_up_nobody() {
    // Each is more than the connection's windows would hold for one that is not read.
    const PROCESSES: u8 = 6;
    const PAGES: usize = 48 << 8;
    let site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    let mut peer = Peer::anonymous(&agent, Dialect::V32);
    let images = site.path("images");
    fake_images(&images);
    for n in 0..PROCESSES {
        let pid = PID + u32::from(n);
        peer.space = SpaceId::process(pid);
        peer.open();
        for (at, chunk) in pages(n + 1, PAGES).chunks(64 * PAGE_SIZE).enumerate() {
            peer.pages((0x40_0000 + at * 64 * PAGE_SIZE) as u64, chunk);
        }
        std::fs::write(images.join(format!("core-{pid}.img")), "not really").unwrap();
        fake_mappings(&images, pid);
    }
    assert_eq!(peer.close(), Some(0));
    peer.leave();
    agent
        .run(&["adopt", "--job", "tree", "--images-dir", text(&images)])
        .unwrap();

    let socket = site.work().join("streamer.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let control = agent.control();
    let streaming = std::thread::spawn(move || {
        let mut connection = Connection::connect(&control).unwrap();
        let stream = control::request::Stream {
            checkpoint: "tree".to_owned(),
            ..Default::default()
        };
        connection.call_with(stream, Some(listener.as_fd()), &mut |_| {})
    });
    let criu = UnixStream::connect(&socket).unwrap();
    let mut readers: Vec<_> = (0..u32::from(PROCESSES))
        .map(|n| ask_for(&criu, &format!("pages-{}.img", FIRST_SERVED_PAGES_ID + n)))
        .collect();
    // The others get as far as they can.
    std::thread::sleep(Duration::from_secs(2));
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for n in (0..PROCESSES).rev() {
            let mut bytes = Vec::new();
            readers.pop().unwrap().read_to_end(&mut bytes).unwrap();
            done.send(bytes == pages(n + 1, PAGES)).unwrap();
        }
    });
    for n in (0..PROCESSES).rev() {
        let same = finished.recv_timeout(Duration::from_secs(60));
        assert!(same.expect("pages of the one that reads"), "process {n}");
    }
    drop(criu);
    let served = streaming.join().unwrap().unwrap();
    assert_eq!(served.files, u64::from(PROCESSES));
}
