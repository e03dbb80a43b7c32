//! `mm-N.img`: a process's mappings (`images/mm.proto`, `images/vma.proto`).

use prost::Message;

use super::magic::MM_MAGIC;
use super::{Head, ImageError, ImageReader, ImageWriter};

/// Only record of the image, as far as it is needed.
#[derive(Clone, PartialEq, Message)]
struct MmRecord {
    #[prost(uint32, tag = "12")]
    executable: u32,
    #[prost(message, repeated, tag = "14")]
    mappings: Vec<Mapping>,
}

/// Memory mapping, as far as it is needed.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Mapping {
    /// First address of the mapping.
    #[prost(uint64, required, tag = "1")]
    pub start: u64,
    /// The address behind it.
    #[prost(uint64, required, tag = "2")]
    pub end: u64,
    /// Place of the first byte in the file or the shared memory, bytes.
    #[prost(uint64, tag = "3")]
    pub offset_bytes: u64,
    /// Id of the shared memory; of a mapped file its number in `files.img`.
    #[prost(uint64, tag = "4")]
    pub shared_id: u64,
    /// PROT_READ, PROT_WRITE and PROT_EXEC.
    #[prost(uint32, tag = "5")]
    pub protection: u32,
    /// Flags of mmap(2).
    #[prost(uint32, tag = "6")]
    pub flags: u32,
    /// Kind of the mapping, as bits (`criu/include/image.h`).
    #[prost(uint32, tag = "7")]
    pub status: u32,
}

impl Mapping {
    /// Returns the kind of the mapping: a word of [`MappingContents`](crate::control::MappingContents).
    #[must_use]
    pub fn kind(&self) -> &'static str {
        /// MAP_GROWSDOWN, which CRIU keeps where it sets no bit for a stack.
        const GROWS_DOWN: u32 = 0x100;
        if self.flags & GROWS_DOWN != 0 {
            return "stack";
        }
        // The first bit that is set decides: heap and stack are private anonymous memory, too.
        const KINDS: [(u32, &str); 13] = [
            (1 << 1, "stack"),
            (1 << 2, "vsyscall"),
            (1 << 3, "vdso"),
            (1 << 12, "vvar"),
            (1 << 5, "heap"),
            (1 << 10, "sysv"),
            (1 << 11, "socket"),
            (1 << 13, "aio"),
            (1 << 14, "memfd"),
            (1 << 6, "file"),
            (1 << 7, "file"),
            (1 << 8, "shared"),
            (1 << 9, "anonymous"),
        ];
        let set = |(bit, _): &&(u32, &str)| self.status & bit != 0;
        KINDS.iter().find(set).map_or("other", |(_, kind)| kind)
    }

    /// Returns true if changes reach other processes, or the file (MAP_SHARED).
    #[must_use]
    pub const fn is_shared(&self) -> bool {
        self.flags & 1 != 0
    }

    /// Returns true for a shadow stack: return addresses that the processor keeps.
    #[must_use]
    pub const fn is_shadow_stack(&self) -> bool {
        self.status & (1 << 15) != 0
    }

    /// Returns true if CRIU restores the mapping without its pages when they come later (`vma_entry_can_be_lazy` in
    /// `criu/include/vma.h`): private anonymous memory that is not locked and has no huge pages of its own.
    #[must_use]
    pub const fn can_be_lazy(&self) -> bool {
        /// MAP_PRIVATE and MAP_ANONYMOUS.
        const NEEDED: u32 = 0x2 | 0x20;
        /// MAP_LOCKED and MAP_HUGETLB.
        const EXCLUDED: u32 = 0x2000 | 0x4_0000;
        /// Vsyscall, vDSO and its data, which are the kernel's.
        const KERNEL: u32 = 1 << 2 | 1 << 3 | 1 << 12;
        self.flags & NEEDED == NEEDED && self.flags & EXCLUDED == 0 && self.status & KERNEL == 0
    }

    /// Returns the permissions as `/proc/PID/maps` writes them.
    #[must_use]
    pub fn permissions(&self) -> String {
        let bit = |bit, letter| {
            if self.protection & bit != 0 {
                letter
            } else {
                '-'
            }
        };
        let kind = if self.is_shared() { 's' } else { 'p' };
        [bit(1, 'r'), bit(2, 'w'), bit(4, 'x'), kind]
            .iter()
            .collect()
    }

    /// Returns the number of the mapped file in `files.img`.
    #[must_use]
    pub fn file_id(&self) -> Option<u32> {
        const FILES: u32 = 1 << 6 | 1 << 7 | 1 << 14;
        let id = (self.status & FILES != 0).then_some(self.shared_id)?;
        u32::try_from(id).ok()
    }

    /// Returns the id of the shared memory that is mapped.
    #[must_use]
    pub fn shared_memory(&self) -> Option<u64> {
        const SHARED: u32 = 1 << 8 | 1 << 10;
        (self.status & SHARED != 0).then_some(self.shared_id)
    }
}

/// Reads the mappings of `mm-N.img`, ascending. Empty before CRIU 1.6, which kept them elsewhere.
///
/// Guards (MADV_GUARD_INSTALL) are left out: CRIU 4.2 lists them behind the mappings that they are in
/// (`VMA_AREA_GUARD` in `criu/include/image.h`).
///
/// # Errors
/// The image is damaged.
pub fn read_mappings(bytes: &[u8]) -> Result<Vec<Mapping>, ImageError> {
    const GUARD: u32 = 1 << 16;
    let mut mappings = read_record(bytes)?.mappings;
    mappings.retain(|mapping| mapping.status & GUARD == 0);
    mappings.sort_by_key(|mapping| mapping.start);
    Ok(mappings)
}

/// Reads the number of the program's file in `files.img`.
///
/// # Errors
/// The image is damaged.
pub fn read_executable(bytes: &[u8]) -> Result<u32, ImageError> {
    Ok(read_record(bytes)?.executable)
}

fn read_record(bytes: &[u8]) -> Result<MmRecord, ImageError> {
    ImageReader::new(bytes, Head::Common(MM_MAGIC))?
        .only_record("memory entry")?
        .decode()
}

/// Writes an `mm-N.img` with these mappings and nothing else: enough to be read here, not by CRIU.
#[must_use]
pub fn write_mappings(mappings: &[Mapping]) -> Vec<u8> {
    let mut image = ImageWriter::new(Head::Common(MM_MAGIC));
    image.message(&MmRecord {
        executable: 0,
        mappings: mappings.to_vec(),
    });
    image.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_anonymous_memory_can_be_lazy() {
        let can_be_lazy = |flags, status| {
            let mapping = Mapping {
                flags,
                status,
                ..Mapping::default()
            };
            mapping.can_be_lazy()
        };
        // A heap, a stack, and what mmap gives.
        for (flags, status) in [(0x22, 1 << 9 | 1 << 5 | 1), (0x122, 1 << 9 | 1), (0x22, 1)] {
            assert!(can_be_lazy(flags, status), "{flags:#x} {status:#x}");
        }
        // A private and a shared file, shared memory, locked memory, huge pages, the vDSO.
        for (flags, status) in [
            (0x2, 1 << 6 | 1),
            (0x1, 1 << 7 | 1),
            (0x21, 1 << 8 | 1),
            (0x2022, 1 << 9 | 1),
            (0x4_0022, 1 << 9 | 1),
            (0x22, 1 << 3 | 1 << 9 | 1),
        ] {
            assert!(!can_be_lazy(flags, status), "{flags:#x} {status:#x}");
        }
    }

    #[test]
    fn mappings_round_trip_and_damage_is_an_error() {
        let mappings =
            [(0x1000, 0x3000), (0x7f00_0000_0000, 0x7f00_0000_1000)].map(|(start, end)| Mapping {
                start,
                end,
                ..Mapping::default()
            });
        let bytes = write_mappings(&mappings);
        assert_eq!(read_mappings(&bytes).unwrap(), mappings);
        assert_eq!(read_mappings(&write_mappings(&[])).unwrap(), []);
        for len in 0..bytes.len() {
            assert!(read_mappings(&bytes[..len]).is_err(), "{len}");
        }
        let guard = Mapping {
            start: 0x1000,
            end: 0x2000,
            status: 1 << 16,
            ..Mapping::default()
        };
        let bytes = write_mappings(&[mappings[1], mappings[0], guard]);
        assert_eq!(read_mappings(&bytes).unwrap(), mappings);
    }
}
