//! Order of the frames of a dump: checks which frame may follow those taken so far. Checking changes nothing;
//! applying cannot fail.

use std::collections::BTreeSet;

use super::{MAX_IMAGES, ReceiverError};
use crate::manifest::is_plain_file_name;
use crate::pageserver::{MAX_SPACES, SpaceId};
use crate::wire::frame::{Header, Kind};

#[derive(Debug, Default)]
pub(super) struct Grammar {
    stage: Stage,
    opened: BTreeSet<SpaceId>,
    images: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// `Close` has not come yet.
    Spaces {
        /// Lowest page number that may still come for the open space; `None` before the first space.
        next_index: Option<u64>,
    },
    /// `Close` has come.
    Images {
        /// Bytes of the last image that are still to come.
        left_bytes: u64,
    },
    /// `Prepare` has come.
    Over,
}

impl Default for Stage {
    fn default() -> Self {
        Self::Spaces { next_index: None }
    }
}

impl Grammar {
    pub(super) fn check(&self, header: &Header) -> Result<(), ReceiverError> {
        let kind = header.kind;
        match (self.stage, kind) {
            (Stage::Spaces { .. }, Kind::Space) => self.check_space(header),
            (Stage::Spaces { next_index }, Kind::Pages | Kind::Zero | Kind::Parent) => {
                let expected = next_index.ok_or(ReceiverError::BeforeSpace { kind })?;
                if header.index < expected {
                    let index = header.index;
                    return Err(ReceiverError::NotAscending { index, expected });
                }
                Ok(())
            }
            (Stage::Spaces { .. }, Kind::Close) => Ok(()),
            (Stage::Spaces { .. }, _) => Err(ReceiverError::BeforeClose { kind }),
            (Stage::Images { left_bytes }, Kind::ImageData) => {
                if header.decoded_bytes() > left_bytes {
                    return Err(ReceiverError::TooMuchData {
                        decoded_bytes: header.decoded_bytes(),
                        left_bytes,
                    });
                }
                Ok(())
            }
            (Stage::Images { left_bytes: 0 }, Kind::Image) => {
                if self.images.len() >= MAX_IMAGES {
                    return Err(ReceiverError::TooManyImages);
                }
                Ok(())
            }
            (Stage::Images { left_bytes: 0 }, Kind::Prepare) => Ok(()),
            (Stage::Images { left_bytes }, Kind::Image | Kind::Prepare) => {
                Err(ReceiverError::Unfinished { left_bytes })
            }
            (Stage::Images { .. }, _) => Err(ReceiverError::AfterClose { kind }),
            (Stage::Over, _) => Err(ReceiverError::AfterPrepare { kind }),
        }
    }

    fn check_space(&self, header: &Header) -> Result<(), ReceiverError> {
        let space = header.space()?;
        if self.opened.contains(&space) {
            return Err(ReceiverError::OpenedTwice { space });
        }
        if self.opened.len() >= MAX_SPACES {
            return Err(ReceiverError::TooManySpaces);
        }
        Ok(())
    }

    pub(super) fn check_name<'a>(&self, payload: &'a [u8]) -> Result<&'a str, ReceiverError> {
        let name = std::str::from_utf8(payload)
            .ok()
            .filter(|name| is_plain_file_name(name));
        let Some(name) = name else {
            return Err(ReceiverError::BadName {
                name: String::from_utf8_lossy(payload).into_owned(),
            });
        };
        if self.images.contains(name) {
            return Err(ReceiverError::ImageTwice { name: name.into() });
        }
        Ok(name)
    }

    /// Applies a checked frame; `name` is the name of its image.
    pub(super) fn apply(&mut self, header: &Header, name: Option<String>) {
        match (&mut self.stage, header.kind) {
            (Stage::Spaces { next_index }, Kind::Space) => {
                *next_index = Some(0);
                self.opened.extend(header.space());
            }
            (Stage::Spaces { next_index }, Kind::Pages | Kind::Zero | Kind::Parent) => {
                // Their sum was found to lie in the address space.
                *next_index = Some(header.index.saturating_add(header.pages.into()));
            }
            (stage, Kind::Close) => *stage = Stage::Images { left_bytes: 0 },
            (Stage::Images { left_bytes }, Kind::Image) => {
                *left_bytes = header.index;
                self.images.extend(name);
            }
            (Stage::Images { left_bytes }, Kind::ImageData) => {
                *left_bytes = left_bytes.saturating_sub(header.decoded_bytes());
            }
            (stage, Kind::Prepare) => *stage = Stage::Over,
            // Checked frames are never of these kinds.
            _ => {}
        }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }
}
