//! Bitmap of the pages that a packed segment stores.

use permafrost_medium::convert::to_usize;

use crate::STORED_WORDS;

/// Bitmap of pages of a segment, by their place in it. The header, page 0, is never one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredPages(pub [u64; STORED_WORDS]);

impl StoredPages {
    /// Adds consecutive pages.
    pub fn insert(&mut self, page: u32, pages: u32) {
        for page in page..page.saturating_add(pages) {
            if let Some(word) = self.0.get_mut(to_usize(u64::from(page / 64))) {
                *word |= 1 << (page % 64);
            }
        }
    }

    /// Removes a page.
    pub fn remove(&mut self, page: u32) {
        if let Some(word) = self.0.get_mut(to_usize(u64::from(page / 64))) {
            *word &= !(1 << (page % 64));
        }
    }

    /// Returns true if a page is stored.
    #[must_use]
    pub fn contains(&self, page: u32) -> bool {
        let word = self.0.get(to_usize(u64::from(page / 64)));
        word.is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// Returns the number of stored pages.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns the pages, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let pages = u32::try_from(self.0.len() * 64).unwrap_or(0);
        (0..pages).filter(|&page| self.contains(page))
    }

    /// Returns the number of stored pages before `page`, if it and the `pages - 1` after it are stored.
    #[must_use]
    pub fn rank(&self, page: u32, pages: u32) -> Option<u32> {
        if !(page..page.checked_add(pages)?).all(|page| self.contains(page)) {
            return None;
        }
        let word = to_usize(u64::from(page / 64));
        let before: u32 = self.0[..word].iter().map(|word| word.count_ones()).sum();
        let below = (1 << (page % 64)) - 1;
        Some(before + (self.0[word] & below).count_ones())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_ranked_among_the_stored_ones() {
        let mut stored = StoredPages::default();
        stored.insert(1, 2);
        stored.insert(63, 3);
        stored.insert(511, 1);
        assert_eq!(stored.iter().collect::<Vec<_>>(), [1, 2, 63, 64, 65, 511]);
        assert_eq!(stored.count(), 6);
        assert_eq!(stored.rank(1, 2), Some(0));
        assert_eq!(stored.rank(64, 2), Some(3));
        assert_eq!(stored.rank(511, 1), Some(5));
        assert_eq!(stored.rank(2, 2), None);
        assert_eq!(stored.rank(512, 1), None);
        assert_eq!(stored.rank(u32::MAX, 2), None);
    }
}
