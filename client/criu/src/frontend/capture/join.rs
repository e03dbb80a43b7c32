//! Joins pages and their addresses, which arrive apart from each other.

use std::collections::VecDeque;

use permafrost_protocol::images::{PagemapEntry, PagemapStream};
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};
use permafrost_protocol::{PAGE_BYTES, PAGE_SIZE};

use super::CaptureError;

/// Most bytes of one frame's pages.
const FRAME_BYTES: usize = 256 << 10;

/// Pages and their addresses, which arrive apart from each other.
pub(super) struct Join {
    space: SpaceId,
    pages_id: u32,
    limit: usize,
    pagemap: PagemapStream,
    /// Runs whose pages have not all come.
    runs: VecDeque<PagemapEntry>,
    /// Pages that are not sent yet, from `sent` on.
    waiting: Vec<u8>,
    sent: usize,
}

impl Join {
    pub(super) fn new(space: SpaceId, pages_id: u32, limit: usize) -> Self {
        Self {
            space,
            pages_id,
            limit,
            pagemap: PagemapStream::default(),
            runs: VecDeque::new(),
            waiting: Vec::new(),
            sent: 0,
        }
    }

    pub(super) fn entries(&mut self, bytes: &[u8]) -> Result<(), CaptureError> {
        let space = self.space;
        let pagemap = |source| CaptureError::Pagemap { space, source };
        for entry in self.pagemap.push(bytes).map_err(pagemap)? {
            if entry.flags & PE_PRESENT == 0 {
                let vaddr = entry.vaddr;
                return Err(CaptureError::Withheld { space, vaddr });
            }
            self.runs.push_back(entry);
        }
        match self.pagemap.pages_id() {
            Some(named) if named != self.pages_id => Err(CaptureError::OtherPages {
                space,
                named,
                opened: self.pages_id,
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn pages(&mut self, bytes: &[u8]) -> Result<(), CaptureError> {
        if self.sent > 0 && self.sent == self.waiting.len() {
            self.waiting.clear();
            self.sent = 0;
        }
        if self.waiting.len() + bytes.len() > self.limit {
            // What was sent makes room first.
            self.waiting.drain(..self.sent);
            self.sent = 0;
        }
        if self.waiting.len() + bytes.len() > self.limit {
            let (space, limit) = (self.space, self.limit);
            return Err(CaptureError::TooFarAhead { space, limit });
        }
        self.waiting.extend_from_slice(bytes);
        Ok(())
    }

    /// Sends whole pages that have an address.
    pub(super) fn send(
        &mut self,
        mut send: impl FnMut(u64, u16, &[u8]) -> Result<(), CaptureError>,
    ) -> Result<(), CaptureError> {
        while let Some(run) = self.runs.front_mut() {
            let have = (self.waiting.len() - self.sent) / PAGE_SIZE * PAGE_SIZE;
            let wanted = usize::try_from(run.nr_pages.saturating_mul(PAGE_BYTES));
            let len = have.min(wanted.unwrap_or(usize::MAX)).min(FRAME_BYTES);
            if len == 0 {
                break;
            }
            send(
                run.vaddr,
                run.flags,
                &self.waiting[self.sent..self.sent + len],
            )?;
            self.sent += len;
            run.vaddr += len as u64;
            run.nr_pages -= len as u64 / PAGE_BYTES;
            if run.nr_pages == 0 {
                self.runs.pop_front();
            }
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Result<(), CaptureError> {
        let space = self.space;
        self.pagemap
            .finish()
            .map_err(|source| CaptureError::Pagemap { space, source })?;
        let missing = self.runs.iter().map(|run| run.nr_pages * PAGE_BYTES).sum();
        let extra = (self.waiting.len() - self.sent) as u64;
        match (missing, extra) {
            (0, 0) => Ok(()),
            _ => Err(CaptureError::PageCount {
                space,
                missing,
                extra,
            }),
        }
    }
}
