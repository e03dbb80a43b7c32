//! Memory whose every page can be generated again from a seed.

use std::io;

use permafrost_protocol::PAGE_SIZE;

use super::Contents;

/// Number of pages that are rewritten together: 64 KiB, as objects that change lie near each other.
const BLOCK_PAGES: u64 = 16;

pub(super) struct Memory {
    bytes: Vec<u8>,
    /// Offset of the first whole page.
    start: usize,
    contents: Contents,
    seed: u64,
    generation: u32,
    /// Generation in which each page was last written.
    generations: Vec<u32>,
}

impl Memory {
    pub(super) fn filled(size_bytes: u64, contents: Contents, seed: u64) -> io::Result<Self> {
        let too_large = |_| io::Error::from(io::ErrorKind::OutOfMemory);
        let pages = usize::try_from(size_bytes).map_err(too_large)? / PAGE_SIZE;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact((pages + 1) * PAGE_SIZE)
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        bytes.resize((pages + 1) * PAGE_SIZE, 0);
        let start = bytes.as_ptr().align_offset(PAGE_SIZE);
        let mut memory = Self {
            bytes,
            start,
            contents,
            seed,
            generation: 0,
            generations: vec![0; pages],
        };
        for index in 0..pages {
            memory.write(index);
        }
        Ok(memory)
    }

    /// Returns the whole memory.
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes
            .get(self.start..self.start + self.generations.len() * PAGE_SIZE)
            .unwrap_or_default()
    }

    pub(super) fn pages(&self) -> u64 {
        self.generations.len() as u64
    }

    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    /// Rewrites `percent` of the blocks, spread evenly, and others every time.
    pub(super) fn dirty(&mut self, percent: u64) {
        self.generation += 1;
        let shift = u64::from(self.generation) * 37;
        for index in 0..self.generations.len() {
            let block = index as u64 / BLOCK_PAGES + shift;
            // One step of a line of that slope: exactly `percent` of any hundred blocks.
            if (block + 1) * percent / 100 > block * percent / 100 {
                if let Some(generation) = self.generations.get_mut(index) {
                    *generation = self.generation;
                }
                self.write(index);
            }
        }
    }

    pub(super) fn bad_pages(&self) -> u64 {
        let pages = self.bytes().chunks_exact(PAGE_SIZE).enumerate();
        let bad = pages.filter(|(index, page)| *page != self.expected(*index));
        bad.count() as u64
    }

    fn write(&mut self, index: usize) {
        let page = self.expected(index);
        let at = self.start + index * PAGE_SIZE;
        if let Some(place) = self.bytes.get_mut(at..at + PAGE_SIZE) {
            place.copy_from_slice(&page);
        }
    }

    fn expected(&self, index: usize) -> [u8; PAGE_SIZE] {
        let generation = self.generations.get(index).copied().unwrap_or_default();
        let key = self.seed ^ mix(index as u64) ^ mix(u64::from(generation) << 32 | 0x5eed);
        page(self.contents, mix(key))
    }
}

/// Applies SplitMix64's finaliser (Steele, Lea, Flood 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn page(contents: Contents, mut state: u64) -> [u8; PAGE_SIZE] {
    let mut draw = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(state)
    };
    let mut page = [0; PAGE_SIZE];
    let sort = match contents {
        Contents::Random => 15,
        Contents::Heap => draw() % 16,
    };
    let words = page.as_chunks_mut::<8>().0;
    match sort {
        // A page that is not used yet: all zeros.
        0 | 1 => {}
        // Objects: a count, a type, a pointer, a small number.
        2..=8 => {
            for (index, word) in words.iter_mut().enumerate() {
                let drawn = draw();
                *word = match index % 4 {
                    0 => 1 + (drawn & 7),
                    1 => 0x55d0_c3a1_0000 + (drawn & 31) * 0x1a0,
                    2 => 0x7f3a_5000_0000 + (drawn & 0x1f_ffff) * 32,
                    _ => drawn & 0xff,
                }
                .to_le_bytes();
            }
        }
        // Text.
        9..=11 => {
            const WORDS: [[u8; 8]; 8] = [
                *b"frozen  ",
                *b"process ",
                *b"keeps a ",
                *b"page of ",
                *b"memory, ",
                *b"and it  ",
                *b"thaws   ",
                *b"again.\n ",
            ];
            for word in words {
                let which = usize::try_from(draw() % 8).unwrap_or_default();
                *word = WORDS.get(which).copied().unwrap_or_default();
            }
        }
        // Numbers near each other.
        12..=14 => {
            let mut last = draw() & 0xffff;
            for word in words {
                last += draw() & 15;
                *word = last.to_le_bytes();
            }
        }
        _ => {
            for word in words {
                *word = draw().to_le_bytes();
            }
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(contents: Contents) -> Memory {
        Memory::filled(400 * BLOCK_PAGES * PAGE_SIZE as u64, contents, 7).unwrap()
    }

    #[test]
    fn what_was_filled_is_found_again_and_what_was_changed_is_not() {
        for contents in [Contents::Random, Contents::Heap] {
            let mut memory = memory(contents);
            assert_eq!(memory.bad_pages(), 0);
            memory.dirty(10);
            assert_eq!(memory.bad_pages(), 0);
            let at = memory.start + 5 * PAGE_SIZE + 9;
            memory.bytes[at] ^= 1;
            assert_eq!(memory.bad_pages(), 1);
        }
    }

    #[test]
    fn as_much_is_dirtied_as_is_asked_for_and_elsewhere_each_time() {
        for percent in [0, 1, 10, 50, 100] {
            let mut memory = memory(Contents::Random);
            let before = memory.bytes().to_vec();
            memory.dirty(percent);
            let dirtied = |memory: &Memory| -> Vec<usize> {
                let generation = memory.generation;
                let all = memory.generations.iter().enumerate();
                all.filter(|(_, of)| **of == generation)
                    .map(|(index, _)| index)
                    .collect()
            };
            let first = dirtied(&memory);
            assert_eq!(first.len() as u64, 400 * BLOCK_PAGES * percent / 100);
            let changed = before
                .chunks(PAGE_SIZE)
                .zip(memory.bytes().chunks(PAGE_SIZE))
                .filter(|(old, new)| old != new);
            assert_eq!(changed.count(), first.len());
            memory.dirty(percent);
            assert_eq!(dirtied(&memory) == first, percent == 0 || percent == 100);
        }
    }

    #[test]
    fn a_heap_compresses_and_random_does_not() {
        let packed = |contents| {
            let memory = memory(contents);
            let packed = zstd::bulk::compress(memory.bytes(), 1).unwrap();
            memory.bytes().len() as f64 / packed.len() as f64
        };
        assert!((2.0..5.0).contains(&packed(Contents::Heap)));
        assert!(packed(Contents::Random) < 1.01);
    }
}
