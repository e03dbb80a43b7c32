//! Support for the benches: a region in memory, pages that are worth storing, a bare quinn pair, and a simulated
//! cluster behind the HTTP API.
#![forbid(unsafe_code)]

pub mod api;
pub mod bare;

use std::sync::Arc;

use permafrost_pmem::{FormatOptions, PAGE_SIZE, Region, create_medium_in_memory};

/// Makes an empty region of `capacity_bytes` in memory, every page of it mapped, so that no bench times a page fault.
///
/// # Panics
/// If there is not enough memory.
#[must_use]
pub fn region(capacity_bytes: u64, options: &FormatOptions) -> Arc<Region> {
    let medium = create_medium_in_memory(capacity_bytes).expect("memory for the region");
    Region::format(Arc::clone(&medium), options).expect("format region");
    Region::open(medium).expect("open region").0
}

/// Returns `count` pages of noise, equal in each run: no page is zero, and no two are equal.
#[must_use]
pub fn noise(count: usize) -> Vec<u8> {
    let mut numbers = Numbers::default();
    let mut pages = vec![0; count * PAGE_SIZE];
    for word in pages.as_chunks_mut::<8>().0 {
        *word = numbers.draw().to_le_bytes();
    }
    pages
}

/// Generator of pseudo-random numbers, deterministic in each run (SplitMix64).
#[derive(Debug, Default)]
pub struct Numbers(u64);

impl Numbers {
    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
