//! `pagemap-N.img`: the pages of an address space in order, and whether each is in its pages file
//! (`images/pagemap.proto`, `criu/pagemap.c`).

use prost::Message;

use super::magic::PAGEMAP_MAGIC;
use super::{Fields, Head, ImageError, ImageReader, ImageWriter, Record};
use crate::PAGE_BYTES;
use crate::pageserver::{MAX_ADDRESS, PE_LAZY, PE_PARENT, PE_PRESENT};

/// First pages id that CRIU's own page server gives out (`up_page_ids_base` in `criu/image.c`), so that its files
/// never collide with those that the dump itself writes.
pub const FIRST_SERVED_PAGES_ID: u32 = 0x1_0001;

#[derive(Clone, PartialEq, Message)]
struct HeadRecord {
    #[prost(uint32, required, tag = "1")]
    pages_id: u32,
}

/// Pagemap entry as encoded.
///
/// CRIU 4.2 writes and reads `nr_pages` and leaves `compat_nr_pages` 0; releases up to 4.1 know only the latter.
/// Before 3.5, `in_parent` took the place of the flags.
#[derive(Clone, PartialEq, Message)]
struct EntryRecord {
    #[prost(uint64, required, tag = "1")]
    vaddr: u64,
    #[prost(uint32, required, tag = "2")]
    compat_nr_pages: u32,
    #[prost(bool, optional, tag = "3")]
    in_parent: Option<bool>,
    #[prost(uint32, optional, tag = "4")]
    flags: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    nr_pages: Option<u64>,
}

/// A run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagemapEntry {
    /// Address of the first page.
    pub vaddr: u64,
    /// Number of pages.
    pub nr_pages: u64,
    /// `PE_*`. The pages file has the bytes of entries with `PE_PRESENT`, and of no others.
    pub flags: u16,
}

impl PagemapEntry {
    /// Returns the address behind the last page.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.vaddr
            .saturating_add(self.nr_pages.saturating_mul(PAGE_BYTES))
    }
}

/// A whole pagemap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pagemap {
    /// N of `pages-N.img`.
    pub pages_id: u32,
    /// Ascending by address; none overlap.
    pub entries: Vec<PagemapEntry>,
}

impl Pagemap {
    /// Reads a pagemap, written by any release from 1.1 to 4.2.
    ///
    /// # Errors
    /// The pagemap is damaged, or of a release with unknown fields.
    pub fn read(bytes: &[u8]) -> Result<Self, ImageError> {
        let reader = PagemapReader::new(bytes)?;
        let pages_id = reader.pages_id();
        Ok(Self {
            pages_id,
            entries: reader.collect::<Result<_, _>>()?,
        })
    }

    /// Writes a pagemap that any release reads.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let mut writer = PagemapWriter::new(self.pages_id);
        for entry in &self.entries {
            writer.push(*entry);
        }
        writer.finish()
    }
}

/// Reads a pagemap entry by entry. After an error it ends.
#[derive(Clone, Debug)]
pub struct PagemapReader<'a> {
    records: ImageReader<'a>,
    pages_id: u32,
    next_vaddr: u64,
    failed: bool,
}

impl<'a> PagemapReader<'a> {
    /// Reads the head.
    ///
    /// # Errors
    /// The file is not a pagemap.
    pub fn new(bytes: &'a [u8]) -> Result<Self, ImageError> {
        let mut records = ImageReader::new(bytes, Head::Common(PAGEMAP_MAGIC))?;
        let head = records.next_record()?.ok_or(ImageError::MissingRecord {
            record: "pagemap head",
        })?;
        refuse_unknown(&head, 1)?;
        let HeadRecord { pages_id } = head.decode()?;
        Ok(Self {
            records,
            pages_id,
            next_vaddr: 0,
            failed: false,
        })
    }

    /// Returns N of `pages-N.img`.
    #[must_use]
    pub fn pages_id(&self) -> u32 {
        self.pages_id
    }

    fn entry(&mut self, record: Record<'_>) -> Result<PagemapEntry, ImageError> {
        let offset = record.offset;
        refuse_unknown(&record, 5)?;
        let EntryRecord {
            vaddr,
            compat_nr_pages,
            in_parent,
            flags,
            nr_pages,
        } = record.decode()?;
        // As init_compat_pagemap_entry in criu/pagemap.c.
        let flags = match (in_parent, flags) {
            (Some(true), flags) => flags.unwrap_or(0) | u32::from(PE_PARENT),
            (_, Some(flags)) => flags,
            (_, None) => u32::from(PE_PRESENT),
        };
        let nr_pages = nr_pages.unwrap_or(u64::from(compat_nr_pages));
        let flags = u16::try_from(flags)
            .ok()
            .filter(|flags| flags & !(PE_PARENT | PE_LAZY | PE_PRESENT) == 0)
            .filter(|flags| flags & (PE_PARENT | PE_PRESENT) != PE_PARENT | PE_PRESENT)
            .ok_or(ImageError::BadFlags { offset, flags })?;
        let end = nr_pages
            .checked_mul(PAGE_BYTES)
            .and_then(|len_bytes| vaddr.checked_add(len_bytes));
        let Some(end) =
            end.filter(|end| nr_pages > 0 && vaddr % PAGE_BYTES == 0 && *end <= MAX_ADDRESS)
        else {
            return Err(ImageError::BadRange {
                offset,
                vaddr,
                nr_pages,
            });
        };
        if vaddr < self.next_vaddr {
            return Err(ImageError::NotAscending {
                offset,
                vaddr,
                expected: self.next_vaddr,
            });
        }
        self.next_vaddr = end;
        Ok(PagemapEntry {
            vaddr,
            nr_pages,
            flags,
        })
    }
}

impl Iterator for PagemapReader<'_> {
    type Item = Result<PagemapEntry, ImageError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let entry = match self.records.next_record() {
            Ok(record) => self.entry(record?),
            Err(error) => Err(error),
        };
        self.failed = entry.is_err();
        Some(entry)
    }
}

/// Reads a pagemap that arrives in pieces.
#[derive(Debug, Default)]
pub struct PagemapStream {
    /// Bytes of a head or a record that is not complete.
    rest: Vec<u8>,
    reader: Option<PagemapReader<'static>>,
}

/// Length of a pagemap's two magic words.
const MAGIC_BYTES: usize = 8;

/// Longest record that is taken, bytes: an entry has at most 40.
const MAX_RECORD_BYTES: usize = 4096;

impl PagemapStream {
    /// Returns N of `pages-N.img`, once the head has come.
    #[must_use]
    pub fn pages_id(&self) -> Option<u32> {
        self.reader.as_ref().map(PagemapReader::pages_id)
    }

    /// Takes the next bytes. Returns the entries that they complete.
    ///
    /// # Errors
    /// The pagemap is damaged.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<PagemapEntry>, ImageError> {
        self.rest.extend_from_slice(bytes);
        let mut entries = Vec::new();
        let mut done = 0;
        loop {
            let begin = match self.reader {
                Some(_) => done,
                None => done + MAGIC_BYTES,
            };
            let Some(len_bytes) = self.record_len(begin)? else {
                break;
            };
            let end = begin + size_of::<u32>() + len_bytes;
            if end > self.rest.len() {
                break;
            }
            match &mut self.reader {
                None => {
                    let head = PagemapReader::new(&self.rest[done..end])?;
                    self.reader = Some(PagemapReader {
                        records: ImageReader::empty(),
                        ..head
                    });
                }
                Some(reader) => {
                    let offset = begin;
                    let bytes = &self.rest[begin + size_of::<u32>()..end];
                    entries.push(reader.entry(Record { offset, bytes })?);
                }
            }
            done = end;
        }
        self.rest.drain(..done);
        Ok(entries)
    }

    /// Returns the length of the record that begins there, if that has come.
    fn record_len(&self, begin: usize) -> Result<Option<usize>, ImageError> {
        let word = self.rest.get(begin..begin + size_of::<u32>());
        let Some(len) = word.and_then(|word| word.try_into().ok()) else {
            return Ok(None);
        };
        let len_bytes = usize::try_from(u32::from_le_bytes(len)).unwrap_or(usize::MAX);
        if len_bytes > MAX_RECORD_BYTES {
            return Err(ImageError::Truncated {
                offset: begin,
                missing_bytes: len_bytes,
            });
        }
        Ok(Some(len_bytes))
    }

    /// Ends the pagemap.
    ///
    /// # Errors
    /// It has no head, or ends inside a record.
    pub fn finish(self) -> Result<(), ImageError> {
        if self.reader.is_none() {
            return Err(ImageError::MissingRecord {
                record: "pagemap head",
            });
        }
        match self.rest.len() {
            0 => Ok(()),
            _ => Err(ImageError::Truncated {
                offset: 0,
                missing_bytes: 1,
            }),
        }
    }
}

/// Refuses a record with fields above `last_known`. Pagemaps are rewritten from page maps, not edited: an unknown
/// field would be lost, and the pages that it concerns (compression, say) would be served wrongly.
fn refuse_unknown(record: &Record<'_>, last_known: u32) -> Result<(), ImageError> {
    // What does not parse is reported by the decoder.
    let fields = Fields::parse(record.bytes).unwrap_or_default();
    match fields.iter().find(|field| field.number > last_known) {
        Some(field) => Err(ImageError::UnknownField {
            offset: record.offset,
            field: field.number,
        }),
        None => Ok(()),
    }
}

/// Most pages of an entry whose pages are not in the pages file: 1 GiB. `criu lazy-pages` makes a buffer for the
/// longest such entry, and keeps its length in an `int` (`collect_iovs` in `criu/uffd.c`).
const MAX_LAZY_PAGES: u64 = 1 << 18;

/// Writes a pagemap into memory: about 24 bytes an entry.
#[derive(Clone, Debug)]
pub struct PagemapWriter {
    image: ImageWriter,
    pending: Option<PagemapEntry>,
}

impl PagemapWriter {
    /// Makes a pagemap without entries, whose pages are in `pages-{pages_id}.img`.
    #[must_use]
    pub fn new(pages_id: u32) -> Self {
        let mut image = ImageWriter::new(Head::Common(PAGEMAP_MAGIC));
        image.message(&HeadRecord { pages_id });
        Self {
            image,
            pending: None,
        }
    }

    /// Appends a run. Runs must ascend; a run that continues the previous one with the same flags is merged with it.
    pub fn push(&mut self, entry: PagemapEntry) {
        match &mut self.pending {
            Some(last)
                if last.end() == entry.vaddr
                    && last.flags == entry.flags
                    && (entry.flags != PE_LAZY
                        || last.nr_pages + entry.nr_pages <= MAX_LAZY_PAGES) =>
            {
                last.nr_pages += entry.nr_pages
            }
            _ => {
                self.flush();
                self.pending = Some(entry);
            }
        }
    }

    /// Returns the finished file.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.flush();
        self.image.finish()
    }

    fn flush(&mut self) {
        let Some(PagemapEntry {
            mut vaddr,
            mut nr_pages,
            flags,
        }) = self.pending.take()
        else {
            return;
        };
        // Older releases count in 32 bits; more than that (16 TiB) becomes several entries.
        while nr_pages > 0 {
            let compat_nr_pages = u32::try_from(nr_pages).unwrap_or(u32::MAX);
            let written = u64::from(compat_nr_pages);
            let flags = Some(u32::from(flags));
            self.image.message(&EntryRecord {
                vaddr,
                compat_nr_pages,
                in_parent: None,
                flags,
                nr_pages: Some(written),
            });
            vaddr += written * PAGE_BYTES;
            nr_pages -= written;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(records: &[EntryRecord]) -> Vec<u8> {
        let mut image = ImageWriter::new(Head::Common(PAGEMAP_MAGIC));
        image.message(&HeadRecord { pages_id: 1 });
        for record in records {
            image.message(record);
        }
        image.finish()
    }

    #[test]
    fn entries_of_every_release_are_read() {
        let record = |vaddr, compat_nr_pages, in_parent, flags, nr_pages| EntryRecord {
            vaddr,
            compat_nr_pages,
            in_parent,
            flags,
            nr_pages,
        };
        let bytes = image(&[
            record(0x1000, 1, None, None, None),             // before 2.0
            record(0x2000, 2, Some(true), None, None),       // before 3.5, a hole
            record(0x4000, 3, None, Some(6), None),          // 3.5 to 4.1
            record(0x7000, 0, None, Some(4), Some(4)),       // 4.2
            record(0xb000, 5, None, Some(1), Some(5)),       // ours
            record(0x1_0000, 1, Some(false), None, Some(1)), // nothing said means present
        ]);
        let entries: Vec<_> = Pagemap::read(&bytes)
            .unwrap()
            .entries
            .iter()
            .map(|e| (e.vaddr, e.nr_pages, e.flags))
            .collect();
        assert_eq!(
            entries,
            [
                (0x1000, 1, 4),
                (0x2000, 2, 1),
                (0x4000, 3, 6),
                (0x7000, 4, 4),
                (0xb000, 5, 1),
                (0x1_0000, 1, 4)
            ]
        );
    }

    #[test]
    fn entries_carry_both_numbers_and_huge_ones_are_split() {
        let huge = u64::from(u32::MAX) + 7;
        let mut writer = PagemapWriter::new(9);
        writer.push(PagemapEntry {
            vaddr: 0,
            nr_pages: huge,
            flags: 4,
        });
        let bytes = writer.finish();
        let records: Vec<EntryRecord> = ImageReader::new(&bytes, Head::Common(PAGEMAP_MAGIC))
            .unwrap()
            .skip(1)
            .map(|record| record.unwrap().decode().unwrap())
            .collect();
        let numbers: Vec<_> = records
            .iter()
            .map(|r| (r.vaddr, r.compat_nr_pages, r.nr_pages))
            .collect();
        assert_eq!(
            numbers,
            [
                (0, u32::MAX, Some(u32::MAX.into())),
                (u64::from(u32::MAX) * 4096, 7, Some(7))
            ]
        );
        let read: u64 = Pagemap::read(&bytes)
            .unwrap()
            .entries
            .iter()
            .map(|entry| entry.nr_pages)
            .sum();
        assert_eq!(read, huge);
    }

    #[test]
    fn neighbours_with_the_same_flags_become_one_entry() {
        let mut writer = PagemapWriter::new(1);
        for (vaddr, nr_pages, flags) in [
            (0x1000, 1, 4),
            (0x2000, 2, 4),
            (0x4000, 1, 6),
            (0x6000, 1, 6),
        ] {
            writer.push(PagemapEntry {
                vaddr,
                nr_pages,
                flags,
            });
        }
        let entries = Pagemap::read(&writer.finish()).unwrap().entries;
        assert_eq!(
            entries
                .iter()
                .map(|e| (e.vaddr, e.nr_pages))
                .collect::<Vec<_>>(),
            [(0x1000, 3), (0x4000, 1), (0x6000, 1)]
        );
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = EntryRecord {
            vaddr: 0x1000,
            compat_nr_pages: 1,
            in_parent: None,
            flags: Some(4),
            nr_pages: Some(1),
        };
        // Head 8 bytes, pagemap head 4 + 2.
        let offset = 14;
        for flags in [5, 8, 0x1_0004] {
            let bytes = image(&[EntryRecord {
                flags: Some(flags),
                ..good.clone()
            }]);
            assert_eq!(
                Pagemap::read(&bytes),
                Err(ImageError::BadFlags { offset, flags })
            );
        }
        for (vaddr, nr_pages) in [
            (0x1001, 1),
            (0x1000, 0),
            (MAX_ADDRESS, 1),
            (0x1000, u64::MAX),
            (0, 1 << 52),
        ] {
            let bytes = image(&[EntryRecord {
                vaddr,
                nr_pages: Some(nr_pages),
                ..good.clone()
            }]);
            assert_eq!(
                Pagemap::read(&bytes),
                Err(ImageError::BadRange {
                    offset,
                    vaddr,
                    nr_pages
                })
            );
        }
        let bytes = image(&[
            EntryRecord {
                nr_pages: Some(3),
                ..good.clone()
            },
            EntryRecord {
                vaddr: 0x3000,
                ..good.clone()
            },
        ]);
        assert!(matches!(
            Pagemap::read(&bytes),
            Err(ImageError::NotAscending {
                vaddr: 0x3000,
                expected: 0x4000,
                ..
            })
        ));
        let mut unknown = good.encode_to_vec();
        unknown.extend([6 << 3, 1]);
        let mut writer = ImageWriter::new(Head::Common(PAGEMAP_MAGIC));
        writer.message(&HeadRecord { pages_id: 1 });
        writer.encoded(&unknown);
        assert_eq!(
            Pagemap::read(&writer.finish()),
            Err(ImageError::UnknownField { offset, field: 6 })
        );
        let headless = ImageWriter::new(Head::Common(PAGEMAP_MAGIC)).finish();
        assert_eq!(
            Pagemap::read(&headless),
            Err(ImageError::MissingRecord {
                record: "pagemap head"
            })
        );
    }
}
