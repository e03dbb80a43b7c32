//! Id of the pagemap that a frame is about: the meaning of `dst_id`.

use std::fmt;

use serde::Serialize;

use crate::manifest::SpaceType;

/// An address space as the protocol names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct SpaceId {
    /// Process or shared memory.
    pub space_type: SpaceType,
    /// The pid in its namespace, or the shared-memory id.
    pub id: u64,
}

/// A `dst_id` whose type no CRIU release ever sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown pagemap type {space_type} in dst_id {dst_id:#x}")]
pub struct UnknownSpaceType {
    /// The whole `dst_id`.
    pub dst_id: u64,
    /// Low byte of `dst_id`.
    pub space_type: u8,
}

impl SpaceId {
    /// Largest id that `dst_id` has room for.
    pub const MAX_ID: u64 = u64::MAX >> 8;

    /// Returns the id of a process's memory.
    #[must_use]
    pub fn process(pid: u32) -> Self {
        Self {
            space_type: SpaceType::Process,
            id: u64::from(pid),
        }
    }

    /// Returns the id of a shared-memory segment; `None` above [`SpaceId::MAX_ID`].
    #[must_use]
    pub fn shared_memory(id: u64) -> Option<Self> {
        (id <= Self::MAX_ID).then_some(Self {
            space_type: SpaceType::SharedMemory,
            id,
        })
    }

    /// Decodes `dst_id`: the id in the upper 56 bits, the type in the lowest 8.
    ///
    /// Besides 1 and 2 these are the numbers that older releases sent, which leaked an enum of theirs
    /// (`decode_pm` in `criu/page-xfer.c`).
    ///
    /// # Errors The type is one that no release sent.
    pub fn from_dst_id(dst_id: u64) -> Result<Self, UnknownSpaceType> {
        let id = dst_id >> 8;
        let space_type = dst_id.to_le_bytes()[0];
        let space_type = match space_type {
            1 | 10 | 11 | 16 | 17 => SpaceType::Process,
            2 | 27 | 28 | 29 | 32 | 33 | 34 => SpaceType::SharedMemory,
            _ => return Err(UnknownSpaceType { dst_id, space_type }),
        };
        Ok(Self { space_type, id })
    }

    /// Encodes as current releases do.
    #[must_use]
    pub fn to_dst_id(self) -> u64 {
        let space_type = match self.space_type {
            SpaceType::Process => 1,
            SpaceType::SharedMemory => 2,
        };
        self.id << 8 | space_type
    }
}

impl fmt::Display for SpaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.space_type {
            SpaceType::Process => write!(f, "process {}", self.id),
            SpaceType::SharedMemory => write!(f, "shared memory {}", self.id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_a_release_sent_is_known_and_no_other() {
        let process = [1, 10, 11, 16, 17];
        let shared_memory = [2, 27, 28, 29, 32, 33, 34];
        for space_type in 0..=255_u8 {
            let dst_id = 77 << 8 | u64::from(space_type);
            let expected = if process.contains(&space_type) {
                Ok(SpaceId {
                    space_type: SpaceType::Process,
                    id: 77,
                })
            } else if shared_memory.contains(&space_type) {
                Ok(SpaceId {
                    space_type: SpaceType::SharedMemory,
                    id: 77,
                })
            } else {
                Err(UnknownSpaceType { dst_id, space_type })
            };
            assert_eq!(SpaceId::from_dst_id(dst_id), expected);
        }
    }

    #[test]
    fn dst_ids_round_trip() {
        for space in [
            SpaceId::process(1),
            SpaceId::process(u32::MAX),
            SpaceId::shared_memory(SpaceId::MAX_ID).unwrap(),
        ] {
            assert_eq!(SpaceId::from_dst_id(space.to_dst_id()), Ok(space));
        }
        assert_eq!(SpaceId::shared_memory(SpaceId::MAX_ID + 1), None);
    }
}
