//! Moving blocks to the object store and back, and what is there.

use std::collections::HashMap;
use std::io;

use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{ColdIdentity, ColdStore, FetchedPages, PAGE_SIZE};

use super::{ColdMedium, InFlight, PAGE_BYTES};
use crate::index::{Entry, Header, MAX_PAGES, Pages};
use crate::marker::MARKER;
use crate::object::{BlockPages, encode};

impl ColdStore for ColdMedium {
    fn address(&self) -> &str {
        self.objects.address()
    }

    fn adopt(
        &self,
        identity: ColdIdentity,
        generation: u32,
        is_listed: &dyn Fn([u8; 16]) -> bool,
    ) -> io::Result<()> {
        self.mark(identity, is_listed)?;
        self.index.set_header(Header {
            identity,
            generation,
        })
    }

    fn attach(&self, identity: ColdIdentity, generation: u32) -> io::Result<()> {
        self.check_header(identity, generation).map_err(|problem| {
            io::Error::other(format!(
                "{problem}. Put the file's own newest index back (FILE.index beside FILE); if it is lost, accept that \
                 with `permafrost region rm MEDIUM --lost --yes`"
            ))
        })?;
        let _ = self.identity.set(identity);
        Ok(())
    }

    fn set_generation(&self, generation: u32) -> io::Result<()> {
        match self.identity.get() {
            Some(&identity) => self.index.set_header(Header {
                identity,
                generation,
            }),
            None => Ok(()),
        }
    }

    fn release(&self) -> io::Result<()> {
        self.check_marker()?;
        let deleted = self.objects.delete(MARKER);
        Ok(deleted.map_err(|source| self.away(source))?)
    }

    fn move_out(&self, at: u64, len_bytes: u64, kept: &[u32], out: &[u32]) -> io::Result<u64> {
        let (block, page) = self.place(at);
        if len_bytes != self.block_bytes || page != 0 || !at.is_multiple_of(PAGE_BYTES) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let pages = Pages::of(out.iter().copied());
        let mut bytes = vec![0; to_usize(u64::from(pages.count())) * PAGE_SIZE];
        let all = (0..MAX_PAGES).filter(|page| pages.has(*page));
        for (page, into) in all.zip(bytes.chunks_exact_mut(PAGE_SIZE)) {
            self.file.read(at + u64::from(page) * PAGE_BYTES, into)?;
        }
        // Where nothing is mounted, nothing is written.
        self.check_marker_again()?;
        // 1. The object, under a name that was never used. A crash here leaves one that no entry names.
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(io::Error::other)?;
        let id = self.id(block, u64::from_le_bytes(number).max(1));
        let own = (block, id.number);
        self.in_flight.lock().insert(own);
        let _in_flight = InFlight {
            all: &self.in_flight,
            own,
        };
        let object = encode(&id, &BlockPages { pages, bytes });
        let stored_bytes = to_u64(object.len());
        let put = self.objects.put(&self.object_name(&id), object);
        put.map_err(|source| {
            // It may be there all the same.
            self.give_up(block, id.number);
            self.away(source)
        })?;
        // It went to this store, and not to where the store was mounted until now.
        self.check_marker_again()?;
        // 2. The entry, which names it. Not before the object is durable. A crash here leaves an entry of a block that
        //    nothing refers to.
        let entry = Entry {
            object: id.number,
            kept: Pages::of(kept.iter().copied()),
            out: pages,
            stored_bytes,
        };
        self.set_entry(block, entry)?;
        // 3. The holes. Not before the entry is durable: pages of the file would read as zeros.
        self.punch(block, &entry.kept);
        Ok(stored_bytes)
    }

    fn is_out(&self, at: u64) -> bool {
        let (block, _) = self.place(at);
        // One that cannot be read is not in the file for sure.
        self.index
            .get(block)
            .map_or(true, |entry| entry.object != 0)
    }

    fn blocks_out(&self) -> io::Result<Vec<u64>> {
        let mut out = Vec::new();
        for block in 0..self.index.len()? {
            if self.index.get(block)?.object != 0 {
                out.push(block * self.block_bytes);
            }
        }
        Ok(out)
    }

    fn fetch_block(&self, at: u64) -> io::Result<FetchedPages> {
        let (block, _) = self.place(at);
        let entry = self.index.get(block)?;
        if entry.object == 0 {
            return Ok(Box::new(()));
        }
        Ok(Box::new(self.fetch(block, entry.object)?))
    }

    fn forget(&self, at: u64) -> io::Result<()> {
        let (block, _) = self.place(at);
        self.set_entry(block, Entry::default())?;
        self.punch(block, &Pages::default());
        Ok(())
    }

    fn unneeded(&self, list: bool) -> io::Result<Vec<String>> {
        let mut names = self.given_up.lock().clone();
        if names.is_empty() && !list {
            return Ok(Vec::new());
        }
        self.check_marker()?;
        if list {
            let listed = self.objects.list(&self.directory());
            let listed = listed.map_err(|source| self.away(source))?;
            names.extend(listed.into_iter().map(|object| object.name));
        }
        let mut unneeded = Vec::new();
        for name in names {
            // Others are not this program's.
            if let Some((block, number)) = self.parse_name(&name)
                && !self.is_needed(block, number)?
            {
                unneeded.push(name);
            }
        }
        Ok(unneeded)
    }

    fn remove(&self, unneeded: &[String]) -> io::Result<u64> {
        let mut removed = 0;
        for name in unneeded {
            // Numbers are never used twice: what nothing names or writes now, nothing will name.
            if let Some((block, number)) = self.parse_name(name)
                && !self.is_needed(block, number)?
            {
                let deleted = self.objects.delete(name);
                deleted.map_err(|source| self.away(source))?;
                self.given_up.lock().remove(name);
                removed += 1;
            }
        }
        Ok(removed)
    }

    fn absent(&self) -> io::Result<Vec<u64>> {
        // The entries before the list, and again after it: objects come and go meanwhile.
        let mut named = Vec::new();
        for at in self.blocks_out()? {
            let (block, _) = self.place(at);
            named.push((block, self.index.get(block)?));
        }
        self.check_marker()?;
        let listed = self.objects.list(&self.directory());
        let listed = listed.map_err(|source| self.away(source))?.into_iter();
        let sizes: HashMap<String, u64> = listed.map(|o| (o.name, o.len_bytes)).collect();
        let mut absent = Vec::new();
        for (block, entry) in named {
            let size = sizes.get(&self.object_name(&self.id(block, entry.object)));
            let is_there = size == Some(&entry.stored_bytes);
            if !is_there && self.index.get(block)?.object == entry.object {
                absent.push(block * self.block_bytes);
            }
        }
        Ok(absent)
    }
}
