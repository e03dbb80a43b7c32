//! Pages that are handed over in pipes, as `permafrost dump --stream` hands over those of CRIU.

use std::io::{PipeWriter, Write as _, pipe};
use std::os::fd::{AsFd as _, OwnedFd};
use std::thread;

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::{Done, SessionOpened, request};
use permafrost_protocol::images::{Pagemap, PagemapEntry};
use permafrost_protocol::pageserver::PE_PRESENT;
use permafrost_transport::control::{Connection, ControlError};

use super::PID;

/// Number in the name of the pages file.
pub const PAGES_ID: u32 = 1;

/// Opens a session, which ends with the connection. Returns its id.
pub fn open(connection: &mut Connection, job: &str) -> String {
    open_for(connection, job, 0).session
}

/// Opens a session that reserves room in pipes for so many bytes. It ends with the connection.
pub fn open_for(connection: &mut Connection, job: &str, pipe_bytes: u64) -> SessionOpened {
    let open = request::Open {
        pipe_bytes,
        job: job.to_owned(),
        seal_follows: true,
        bound_to_connection: true,
        ..request::Open::default()
    };
    connection.call(open).unwrap()
}

/// Makes the request for the process of the fake images.
pub fn take(session: &str) -> request::TakeSpace {
    request::TakeSpace {
        session: session.to_owned(),
        space_type: 0,
        space: PID.into(),
        pages_id: PAGES_ID,
    }
}

/// Returns a pagemap of one run.
pub fn pagemap(vaddr: u64, nr_pages: u64) -> Vec<u8> {
    let entries = vec![PagemapEntry {
        vaddr,
        nr_pages,
        flags: PE_PRESENT,
    }];
    let pages_id = PAGES_ID;
    Pagemap { pages_id, entries }.write()
}

/// Hands two descriptors over, and waits for the reply.
pub fn hand_over(
    connection: &mut Connection,
    take: request::TakeSpace,
    [pagemap, pages]: [OwnedFd; 2],
) -> Result<Done, ControlError> {
    connection.call_with_all(take, &[pagemap.as_fd(), pages.as_fd()])
}

/// Hands the memory over of which the pagemap comes last, as CRIU's does.
pub fn hand_over_memory(
    connection: &mut Connection,
    session: &str,
    vaddr: u64,
    memory: &[u8],
) -> Result<Done, ControlError> {
    let (entries_out, mut entries_in) = pipe().unwrap();
    let (pages_out, pages_in) = pipe().unwrap();
    let map = pagemap(vaddr, memory.len() as u64 / PAGE_BYTES);
    thread::scope(|scope| {
        scope.spawn(move || {
            write(pages_in, memory);
            // Ended by a refusal.
            let _ = entries_in.write_all(&map);
        });
        let pipes = [entries_out.into(), pages_out.into()];
        hand_over(connection, take(session), pipes)
    })
}

fn write(mut to: PipeWriter, bytes: &[u8]) {
    let _ = to.write_all(bytes);
}
