//! Several media as one: each has a span of the offsets.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::convert::to_usize;
use crate::{Flushed, Guarantee, LostPage, Medium, PAGE_SIZE};

/// Most media of a set.
pub const MAX_MEDIA: usize = 16;

/// Offsets of each medium of a set: that of number n begins at n times this.
pub const MEDIUM_SPAN: u64 = 1 << 44;

/// A first medium, and others that come and go. An offset of a medium that is not there is a [`LostPage`].
pub struct MediumSet {
    first: Arc<dyn Medium>,
    /// Number 1 and up.
    others: [RwLock<Option<Arc<dyn Medium>>>; MAX_MEDIA - 1],
}

impl MediumSet {
    /// Makes a set of one medium, which has number 0.
    #[must_use]
    pub fn new(first: Arc<dyn Medium>) -> Self {
        Self {
            first,
            others: Default::default(),
        }
    }

    /// Returns the first medium.
    #[must_use]
    pub fn first(&self) -> &Arc<dyn Medium> {
        &self.first
    }

    /// Returns the medium with this number, if it is there.
    #[must_use]
    pub fn get(&self, number: usize) -> Option<Arc<dyn Medium>> {
        match number.checked_sub(1) {
            None => Some(Arc::clone(&self.first)),
            Some(index) => self.others.get(index)?.read().clone(),
        }
    }

    /// Adds a medium under a number, from 1 on, that has none.
    pub fn insert(&self, number: usize, medium: Arc<dyn Medium>) {
        let place = number.checked_sub(1).and_then(|n| self.others.get(n));
        if let Some(place) = place {
            place.write().get_or_insert(medium);
        }
    }

    /// Takes a medium out.
    ///
    /// # Safety
    /// No bytes and no file that were lent from it are used any more.
    pub unsafe fn remove(&self, number: usize) -> Option<Arc<dyn Medium>> {
        self.others.get(number.checked_sub(1)?)?.write().take()
    }

    /// Returns the file behind an offset, for reading only, and the offset in it, as [`Medium::file`] does.
    #[must_use]
    pub fn file_at(&self, at: u64) -> Option<(BorrowedFd<'_>, u64)> {
        let (number, offset) = split(at);
        if number == 0 {
            return Some((self.first.file()?, offset));
        }
        let medium = self.get(number)?;
        let file = medium.file()?;
        // SAFETY: the medium stays in the set while the file is used: see `remove`.
        let file = unsafe { BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&file)) };
        Some((file, offset))
    }

    /// Calls `access` with the medium of an offset, and the offset in it.
    fn at<T>(
        &self,
        at: u64,
        access: impl FnOnce(&dyn Medium, u64) -> io::Result<T>,
    ) -> io::Result<T> {
        let (number, offset) = split(at);
        if number == 0 {
            return access(&*self.first, offset);
        }
        let Some(medium) = self.get(number) else {
            return Err(LostPage { at }.into());
        };
        access(&*medium, offset).map_err(|error| in_set(error, number))
    }
}

/// Returns the number of the medium that an offset is in, and the offset there.
fn split(at: u64) -> (usize, u64) {
    (to_usize(at / MEDIUM_SPAN), at % MEDIUM_SPAN)
}

/// Converts the offset in an error of a medium to that in the set.
fn in_set(error: io::Error, number: usize) -> io::Error {
    let base = crate::convert::to_u64(number).saturating_mul(MEDIUM_SPAN);
    match LostPage::of(&error) {
        Some(lost) => LostPage { at: base + lost.at }.into(),
        None => error,
    }
}

impl Medium for MediumSet {
    /// Of the first one.
    fn capacity_bytes(&self) -> u64 {
        self.first.capacity_bytes()
    }

    /// Of the first one.
    fn guarantee(&self) -> &Guarantee {
        self.first.guarantee()
    }

    fn lost_pages(&self) -> u64 {
        let media = (0..MAX_MEDIA).filter_map(|number| self.get(number));
        media.map(|medium| medium.lost_pages()).sum()
    }

    fn check(&self, at: u64, len_bytes: u64) -> io::Result<()> {
        self.at(at, |medium, at| medium.check(at, len_bytes))
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.at(at, |medium, at| medium.read(at, into))
    }

    unsafe fn bytes(&self, at: u64, len: usize) -> io::Result<&[u8]> {
        self.at(at, |medium, at| {
            // SAFETY: the caller's promise.
            let bytes = unsafe { medium.bytes(at, len)? };
            // SAFETY: the medium stays in the set while the bytes are used: see `remove`.
            Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) })
        })
    }

    unsafe fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        self.at(at, |medium, at| unsafe { medium.write(at, from) })
    }

    unsafe fn write_streaming(&self, at: u64, from: &[u8]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        self.at(at, |medium, at| unsafe { medium.write_streaming(at, from) })
    }

    fn flush(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        match split(at).0 {
            0 => self.first.flush(at, len_bytes, flushed),
            number => self.at(at, |medium, at| {
                medium.flush(at, len_bytes, flushed.of(number))
            }),
        }
    }

    fn flush_streamed(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        match split(at).0 {
            0 => self.first.flush_streamed(at, len_bytes, flushed),
            number => self.at(at, |medium, at| {
                medium.flush_streamed(at, len_bytes, flushed.of(number))
            }),
        }
    }

    fn fence(&self, flushed: &mut Flushed) -> io::Result<()> {
        let mut others = flushed.take_others();
        others.retain(|(_, other)| !other.is_empty());
        let mut result = Ok(());
        if others.is_empty() || !flushed.is_empty() {
            result = self.first.fence(flushed);
        }
        for (number, mut other) in others {
            if result.is_ok() {
                // One that was taken out has nothing that anybody still refers to.
                result = self.get(number).map_or(Ok(()), |medium| {
                    let fenced = medium.fence(&mut other);
                    fenced.map_err(|error| in_set(error, number))
                });
            }
            if result.is_err() {
                flushed.put_back(number, other);
            }
        }
        result
    }

    unsafe fn rewrite_page(&self, at: u64, page: &[u8; PAGE_SIZE]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        self.at(at, |medium, at| unsafe { medium.rewrite_page(at, page) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{MediumEvent, SimMedium};

    #[test]
    fn each_medium_has_its_span_and_its_fences() {
        let media = SimMedium::several(&[(&[0; 8192], 8192), (&[0; 8192], 4096)]);
        let [first, second] = <[_; 2]>::try_from(media).ok().unwrap().map(Arc::new);
        let set = MediumSet::new(Arc::clone(&first) as Arc<dyn Medium>);
        let at = 3 * MEDIUM_SPAN;
        let missing = set.read(at, &mut [0]).unwrap_err();
        assert_eq!(LostPage::of(&missing), Some(LostPage { at }));
        set.insert(3, Arc::clone(&second) as Arc<dyn Medium>);
        let mut flushed = Flushed::new();
        // SAFETY: no one else has the media.
        unsafe { set.write(at + 8, &[7; 8]).unwrap() };
        set.flush(at + 8, 8, &mut flushed).unwrap();
        assert!(!flushed.is_empty());
        set.fence(&mut flushed).unwrap();
        assert!(flushed.is_empty());
        let fences: Vec<_> = first.take_log().into_iter().skip(2).collect();
        assert_eq!(fences, [MediumEvent::Fence(vec![(8200, 8208)])]);
        assert_eq!(second.image()[8..16], [7; 8]);
        assert!(set.read(at + 4096, &mut [0]).is_err());
        second.grow(8192).unwrap();
        assert!(second.grow(8193).is_err());
        set.read(at + 4096, &mut [0]).unwrap();
        second.lose(4096, 1);
        let lost = set.check(at + 4096, 1).unwrap_err();
        assert_eq!(LostPage::of(&lost), Some(LostPage { at: at + 4096 }));
        assert_eq!(set.lost_pages(), 1);
        // SAFETY: nothing is lent.
        unsafe { set.remove(3) };
        assert!(set.check(at, 1).is_err());
    }
}
