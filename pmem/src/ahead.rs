//! Pages that are stored before their indices are known: a sender may bring a page first and its address later.

use std::collections::VecDeque;

use crate::PAGE_SIZE;
use crate::error::ShadowError;
use crate::ids::PageNo;
use crate::map::{Kept, MapWriter};
use crate::shadow::Shadow;

/// Pages of one object that a shadow has taken and that have no index yet, in their order. 16 bytes of DRAM a page.
#[derive(Default)]
pub struct PagesAhead(VecDeque<PageAhead>);

enum PageAhead {
    Zero,
    Stored { location: PageNo, crc: u32 },
}

const _: () = assert!(size_of::<PageAhead>() == 16);

impl Shadow {
    /// Returns true if the pages of an object without a parent would be compared with nothing: the indices by which
    /// other pages are found need not be known then before a page is stored.
    #[must_use]
    pub fn compares_nothing(&self) -> bool {
        self.others.is_none() && self.written.is_empty()
    }

    /// Stores whole pages whose indices follow with [`place`](Self::place). A zero page is not stored. Equal pages are not
    /// looked for: meant for where [`compares_nothing`](Self::compares_nothing) is true. As for
    /// [`append`](Self::append), the buffer should still be in the cache.
    ///
    /// # Errors
    /// [`ShadowError`]; the shadow can then only be dropped.
    pub fn append_ahead(
        &mut self,
        ahead: &mut PagesAhead,
        pages: &[u8],
    ) -> Result<(), ShadowError> {
        let (whole, rest) = pages.as_chunks::<PAGE_SIZE>();
        if !rest.is_empty() {
            return Err(ShadowError::NotPages {
                len_bytes: pages.len(),
            });
        }
        for page in whole {
            ahead.0.push_back(if permafrost_medium::is_zero(page) {
                PageAhead::Zero
            } else {
                let crc = crc32fast::hash(page);
                let location = self.out.append(page, crc)?;
                PageAhead::Stored { location, crc }
            });
        }
        Ok(())
    }

    /// Gives the first of the pages that were stored ahead their indices: the first has index `first_index`, the others
    /// follow.
    ///
    /// # Errors
    /// [`ShadowError::NotAhead`] if there are fewer; others as for [`append`](Self::append).
    pub fn place(
        &mut self,
        w: &mut MapWriter,
        ahead: &mut PagesAhead,
        first_index: u64,
        flags: u16,
        pages: u64,
    ) -> Result<(), ShadowError> {
        w.admit(first_index, pages)?;
        for index in first_index..first_index + pages {
            match ahead.0.pop_front() {
                Some(PageAhead::Zero) => {
                    w.stats.zero += 1;
                    w.push_zero(&mut self.out, index, flags, 1)?;
                    w.note(index, 1, flags, Kept::Zero);
                }
                Some(PageAhead::Stored { location, crc }) => {
                    w.stats.stored += 1;
                    w.push_stored(&mut self.out, index, flags, location, crc)?;
                    w.note(index, 1, flags, Kept::Stored);
                }
                None => return Err(ShadowError::NotAhead { index }),
            }
        }
        Ok(())
    }
}

impl PagesAhead {
    /// Returns true if all pages have their index.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
