//! The order in which a restored process accessed its pages, kept for the next restore of the checkpoint.

use std::collections::HashSet;

/// Most pages whose order is kept: 64 MiB of accesses, of which a restore brings the neighbours, too.
const MAX_PAGES: usize = 16_384;

/// First bytes of a written order, which name its version.
const MAGIC: [u8; 8] = *b"pftouch1";

/// Size of a written page, bytes.
const ENTRY_BYTES: usize = 12;

/// Pages in the order in which they were accessed first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TouchedPages(Vec<TouchedPage>);

/// A page that was accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TouchedPage {
    /// Pid of the process when it was dumped.
    pub pid: u32,
    /// Index of the page when it was dumped.
    pub index: u64,
}

impl TouchedPages {
    /// Adds a page, unless there are too many already.
    pub fn push(&mut self, page: TouchedPage) {
        if self.0.len() < MAX_PAGES {
            self.0.push(page);
        }
    }

    /// Adds the pages of a later restore that are not here yet.
    pub fn extend(&mut self, later: &Self) {
        let known: HashSet<_> = self.0.iter().copied().collect();
        let new = later.0.iter().filter(|page| !known.contains(page));
        new.for_each(|page| self.push(*page));
    }

    /// Returns the pages in order.
    #[must_use]
    pub fn pages(&self) -> &[TouchedPage] {
        &self.0
    }

    /// Encodes the order.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for page in &self.0 {
            bytes.extend_from_slice(&page.pid.to_le_bytes());
            bytes.extend_from_slice(&page.index.to_le_bytes());
        }
        bytes
    }

    /// Decodes an order. It only speeds restores up, so one that is damaged is as good as none.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Self {
        let pages = bytes.strip_prefix(&MAGIC).unwrap_or_default();
        let (pages, _) = pages.as_chunks::<ENTRY_BYTES>();
        let page = |entry: &[u8; ENTRY_BYTES]| {
            let (pid, index) = entry.split_first_chunk()?;
            Some(TouchedPage {
                pid: u32::from_le_bytes(*pid),
                index: u64::from_le_bytes(index.try_into().ok()?),
            })
        };
        Self(pages.iter().take(MAX_PAGES).filter_map(page).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(pages: &[(u32, u64)]) -> TouchedPages {
        let mut order = TouchedPages::default();
        for (pid, index) in pages {
            order.push(TouchedPage {
                pid: *pid,
                index: *index,
            });
        }
        order
    }

    #[test]
    fn an_order_is_written_and_read_and_damage_is_no_order() {
        let written = order(&[(7, 1), (7, u64::MAX), (1, 3)]);
        let bytes = written.encode();
        assert_eq!(TouchedPages::decode(&bytes), written);
        assert_eq!(
            TouchedPages::decode(&bytes[..bytes.len() - 1])
                .pages()
                .len(),
            2
        );
        assert_eq!(TouchedPages::decode(&bytes[1..]).pages(), []);
        assert_eq!(TouchedPages::decode(&[]).pages(), []);
    }

    #[test]
    fn later_accesses_come_last_and_an_order_is_bounded() {
        let mut first = order(&[(1, 5), (1, 2)]);
        first.extend(&order(&[(1, 2), (1, 9), (2, 5)]));
        assert_eq!(first, order(&[(1, 5), (1, 2), (1, 9), (2, 5)]));
        for index in 0..2 * MAX_PAGES as u64 {
            first.push(TouchedPage { pid: 3, index });
        }
        assert_eq!(first.pages().len(), MAX_PAGES);
        let endless = TouchedPages::decode(&[&MAGIC[..], &vec![1; 1 << 20]].concat());
        assert_eq!(endless.pages().len(), MAX_PAGES);
    }
}
