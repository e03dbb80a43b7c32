//! Memory shared by the tree: a memfd mapped by every process. Its pages name their own generation, so
//! that each process can check all of them. The first page holds a token that goes round.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _};

use anyhow::{Context, Result, anyhow};
use permafrost_protocol::PAGE_SIZE;
use permafrost_tests::contents::{Contents, fill};
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes as _, FileOffset, VolatileMemory as _};

/// A mapping of the shared memory. Other processes write to it, so bytes are copied in and out.
pub(crate) struct Shared {
    file: File,
    region: MmapRegion<()>,
    seed: u64,
    pages: u64,
    generation: u32,
}

impl Shared {
    /// Makes and fills it. The descriptor passes on to processes started from here.
    pub(crate) fn create(size_bytes: usize, seed: u64) -> Result<Self> {
        let fd = rustix::fs::memfd_create("permafrost-workload", rustix::fs::MemfdFlags::empty())
            .context("create a memfd")?;
        rustix::fs::ftruncate(&fd, u64::try_from(size_bytes)?).context("size the memfd")?;
        let mut shared = Self::map(File::from(fd), size_bytes, seed)?;
        for index in 1..shared.pages {
            shared.write(index)?;
        }
        Ok(shared)
    }

    /// Maps the one that the parent has passed on.
    pub(crate) fn inherited(fd: u32, seed: u64) -> Result<Self> {
        // Opened anew, as a number is not an owned descriptor; the same memory all the same.
        let file = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{fd}"))
            .context("open the shared memory")?;
        let size_bytes =
            usize::try_from(file.metadata().context("look at the shared memory")?.len())?;
        Self::map(file, size_bytes, seed)
    }

    fn map(file: File, size_bytes: usize, seed: u64) -> Result<Self> {
        let offset = FileOffset::new(file.try_clone().context("duplicate the memfd")?, 0);
        let region = MmapRegion::from_file(offset, size_bytes)
            .map_err(|error| anyhow!("map the shared memory: {error}"))?;
        Ok(Self {
            file,
            region,
            seed,
            pages: u64::try_from(size_bytes / PAGE_SIZE)?,
            generation: 0,
        })
    }

    pub(crate) fn fd(&self) -> i32 {
        self.file.as_fd().as_raw_fd()
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    pub(crate) fn modify(&mut self, percent: u64) -> Result<()> {
        self.generation += 1;
        let count = (self.pages - 1) * percent / 100;
        let first = 1 + u64::from(self.generation) * 31 % (self.pages - count);
        for index in first..(first + count).min(self.pages) {
            self.write(index)?;
        }
        Ok(())
    }

    /// Counts pages that are not what they say they are.
    pub(crate) fn verify(&self) -> Result<u64> {
        let mut bad = 0;
        for index in 1..self.pages {
            let mut page = [0; PAGE_SIZE];
            self.slice_at(index)
                .and_then(|at| Ok(self.region.as_volatile_slice().read_slice(&mut page, at)?))?;
            let generation = u32::from_le_bytes([page[0], page[1], page[2], page[3]]);
            bad += u64::from(page != self.expected(index, generation));
        }
        Ok(bad)
    }

    pub(crate) fn set_token(&self, token: u64) -> Result<()> {
        self.region
            .as_volatile_slice()
            .write_slice(&token.to_le_bytes(), 0)
            .context("write the token")
    }

    pub(crate) fn token(&self) -> Result<u64> {
        let mut token = [0; 8];
        self.region
            .as_volatile_slice()
            .read_slice(&mut token, 0)
            .context("read the token")?;
        Ok(u64::from_le_bytes(token))
    }

    fn write(&mut self, index: u64) -> Result<()> {
        let page = self.expected(index, self.generation);
        let at = self.slice_at(index)?;
        self.region
            .as_volatile_slice()
            .write_slice(&page, at)
            .context("write shared memory")
    }

    fn expected(&self, index: u64, generation: u32) -> [u8; PAGE_SIZE] {
        let mut page = [0; PAGE_SIZE];
        fill(Contents::Random, !self.seed, index, generation, &mut page);
        page[..4].copy_from_slice(&generation.to_le_bytes());
        page
    }

    fn slice_at(&self, index: u64) -> Result<usize> {
        usize::try_from(index)
            .ok()
            .and_then(|index| index.checked_mul(PAGE_SIZE))
            .context("an index past the address space")
    }
}
