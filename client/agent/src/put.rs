//! Stores images directories of this host as checkpoints of the nodes: a dump whose pages come from files.

use std::os::fd::OwnedFd;

use permafrost_criu::ProgressReceiver;
use permafrost_criu::directory::{ImagesDir, PagesReader, PagesTarget};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::{self, request};
use permafrost_protocol::pageserver::SpaceId;
use permafrost_transport::peer::DumpSender;

use super::backend::{Remote, bytes_of, check_waits};
use super::images::Served;
use super::nodes::{odd_answer, refusal};
use super::session::send_pages;
use crate::host::Waits;

impl Remote {
    /// Sends a directory to a node and has the node seal it.
    ///
    /// # Errors
    /// An error of the directory or of the node.
    pub(super) fn put(
        &self,
        import: &request::Import,
        directory: OwnedFd,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Checkpoint, control::Error> {
        let images = ImagesDir::new(directory)?;
        let pages = PagesReader::open(&images)?;
        // A dump describes its tasks in core-N.img, a pre-dump has none.
        let is_whole = (images.files()?.iter()).any(|name| name.starts_with("core-"));
        let durability = if import.durability.is_empty() {
            &self.durability
        } else {
            &import.durability
        };
        let open = request::Open {
            job: import.job.clone(),
            pre_dump: !is_whole,
            seal_follows: true,
            no_parent: import.no_parent,
            bound_to_connection: true,
            durability: durability.clone(),
            expected_bytes: pages.total_bytes(),
            ..request::Open::default()
        };
        let (node, opened) = self.await_turn(open, waits)?;
        let Some(id) = bytes_of(&opened.session) else {
            return Err(odd_answer(&node));
        };
        let mut sending = Sending {
            sender: self.sender(&node, &id, &import.job, None)?,
            served: Served::default(),
            done_bytes: 0,
            total_bytes: pages.total_bytes(),
            progress,
        };
        let until = || self.nodes.until();
        let sent = pages.read(&mut sending).and_then(|()| {
            let closed = sending.sender.close(until());
            closed.map(drop).map_err(|error| refusal(&error))
        });
        let Sending { sender, served, .. } = sending;
        if let Err(error) = sent {
            sender.abort();
            return Err(error);
        }
        self.conclude(sender, &opened.session, &images, &served, || {
            check_waits(&*waits)
        })
    }
}

struct Sending<'p> {
    sender: DumpSender,
    served: Served,
    done_bytes: u64,
    total_bytes: u64,
    progress: ProgressReceiver<'p>,
}

impl PagesTarget for Sending<'_> {
    type Error = control::Error;

    fn space(&mut self, space: SpaceId, pages_id: u32) -> Result<(), control::Error> {
        let space_type = u16::try_from(i32::from(space.space_type)).unwrap_or(u16::MAX);
        let begun = self.sender.space(space_type, space.id, pages_id);
        begun.map_err(|error| refusal(&error))?;
        self.served.spaces.push((space, pages_id));
        Ok(())
    }

    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), control::Error> {
        let sent = send_pages(&mut self.sender, vaddr / PAGE_BYTES, flags, bytes);
        sent.map_err(|error| refusal(&error))?;
        self.done_bytes += bytes.len() as u64;
        (self.progress)(self.done_bytes, self.total_bytes);
        Ok(())
    }
}
