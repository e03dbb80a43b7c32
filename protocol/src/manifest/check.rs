//! Rules that every manifest satisfies that is written or read.

use std::collections::BTreeSet;

use prost::Message;

use super::taken::is_recordable;
use super::{
    AddressSpace, JobNameError, Kind, Manifest, RestoreOptionError, SpaceType, VERSION,
    check_job_name, check_restore_options,
};
use crate::images::{pagemap_name, pages_name};
use crate::pageserver::SpaceId;

/// Length of an encoded map root (docs/format.md), bytes.
pub const MAP_ROOT_BYTES: usize = 32;

/// Longest file name, bytes (`NAME_MAX`).
pub const MAX_FILE_NAME_BYTES: usize = 255;

/// Maximum number of small images of a checkpoint: CRIU writes one for each thread and about ten for each process.
pub const MAX_SMALL_IMAGES: usize = 128 << 10;

/// Longest encoded manifest that is written, bytes: it fits a message of the control protocol, with room for the rest
/// of the message.
pub const MAX_MANIFEST_BYTES: usize = 15 << 20;

/// Error in a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The manifest does not decode.
    #[error("the manifest does not decode")]
    Undecodable(#[from] prost::DecodeError),
    /// Written by a newer Permafrost.
    #[error(
        "the manifest has version {version}, this build reads up to {VERSION}: use a newer Permafrost"
    )]
    NewerVersion {
        /// Version that the manifest has.
        version: u32,
    },
    /// The manifest has no version.
    #[error("the manifest has no version")]
    NoVersion,
    /// A kind of checkpoint that does not exist.
    #[error("unknown kind of checkpoint {kind}")]
    UnknownKind {
        /// Number of the kind.
        kind: i32,
    },
    /// The name of its job breaks the rules.
    #[error("job name")]
    JobName(#[from] JobNameError),
    /// The checkpoint is parked but numbered, or numbered 0 but not parked, or numbered before its parent.
    #[error(
        "generation {generation} with parent generation {parent_generation} does not fit kind {kind:?}"
    )]
    Generation {
        /// Generation of the checkpoint.
        generation: u64,
        /// Generation of its parent.
        parent_generation: u64,
        /// Kind of the checkpoint.
        kind: Kind,
    },
    /// The session id is not 32 hexadecimal digits.
    #[error("session id {session:?} is not 32 hexadecimal digits")]
    SessionId {
        /// The session id.
        session: String,
    },
    /// An image whose name is no plain file name.
    #[error("image name {name:?} is no plain file name")]
    ImageName {
        /// Name of the image.
        name: String,
    },
    /// Two files would have one name in an exported images directory.
    #[error("two images are named {name}")]
    DuplicateFile {
        /// Name that both files would have.
        name: String,
    },
    /// A space that no pagemap can be named for.
    #[error("there is no address space of type {space_type} with id {id}")]
    BadSpace {
        /// Number of the space's type.
        space_type: i32,
        /// Id of the space.
        id: u64,
    },
    /// A map root of another length.
    #[error("the map root of {of} has {len_bytes} bytes, not {MAP_ROOT_BYTES}")]
    MapRoot {
        /// Name of the file whose map root it is.
        of: String,
        /// Length of the map root, bytes.
        len_bytes: usize,
    },
    /// The manifest asks a restore to repeat an option that no manifest may record.
    #[error(transparent)]
    RestoreOption(#[from] RestoreOptionError),
    /// The client that it came from is too long a text, or has control characters.
    #[error("the client {client:?} that the dump came from is no name")]
    TakenBy {
        /// Recorded name of the client.
        client: String,
    },
    /// The manifest does not fit a message.
    #[error(
        "the manifest takes {len_bytes} bytes, more than {MAX_MANIFEST_BYTES}: dump subtrees of the process as jobs of their own"
    )]
    TooLong {
        /// Length of the encoded manifest, bytes.
        len_bytes: usize,
    },
}

impl Manifest {
    /// Encodes a manifest that keeps the rules, and records only options that a restore may repeat.
    ///
    /// # Errors
    /// The rule it breaks.
    pub fn encode_checked(&self) -> Result<Vec<u8>, ManifestError> {
        self.check()?;
        if let Some(origin) = &self.origin {
            check_restore_options(&origin.restore_options)?;
        }
        let len_bytes = self.encoded_len();
        if len_bytes > MAX_MANIFEST_BYTES {
            return Err(ManifestError::TooLong { len_bytes });
        }
        let mut encoded = self.clone();
        // Images that are packed into one map follow each other, and only the first one names it.
        let mut named: &[u8] = &[];
        for (image, encoded) in self.images.iter().zip(&mut encoded.images) {
            if image.map_root == named {
                encoded.map_root.clear();
            }
            named = &image.map_root;
        }
        Ok(encoded.encode_to_vec())
    }

    /// Decodes a manifest and checks that it keeps the rules.
    ///
    /// # Errors
    /// The manifest does not decode, is of a newer version, or breaks a rule.
    pub fn decode_checked(bytes: &[u8]) -> Result<Self, ManifestError> {
        let mut manifest = Self::decode(bytes)?;
        let mut named: Vec<u8> = Vec::new();
        for image in &mut manifest.images {
            if image.map_root.is_empty() {
                image.map_root.clone_from(&named);
            } else {
                named.clone_from(&image.map_root);
            }
        }
        manifest.check()?;
        Ok(manifest)
    }

    /// Checks the rules. Cost: O(n log n) in images and spaces.
    ///
    /// # Errors
    /// The first rule it breaks.
    pub fn check(&self) -> Result<(), ManifestError> {
        match self.version {
            0 => return Err(ManifestError::NoVersion),
            1..=VERSION => {}
            version => return Err(ManifestError::NewerVersion { version }),
        }
        self.check_names()?;
        if !is_recordable(&self.taken_by) {
            return Err(ManifestError::TakenBy {
                client: self.taken_by.chars().take(80).collect(),
            });
        }
        let mut files = BTreeSet::new();
        let mut add = |name: String| {
            if files.contains(&name) {
                return Err(ManifestError::DuplicateFile { name });
            }
            files.insert(name);
            Ok(())
        };
        for image in &self.images {
            if !is_plain_file_name(&image.name) {
                return Err(ManifestError::ImageName {
                    name: image.name.clone(),
                });
            }
            check_map_root(&image.name, &image.map_root)?;
            add(image.name.clone())?;
        }
        for space in &self.spaces {
            let name = pagemap_name(space.space_id()?);
            check_map_root(&name, &space.map_root)?;
            add(name)?;
            add(pages_name(space.pages_id))?;
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), ManifestError> {
        let kind = Kind::try_from(self.kind)
            .map_err(|_| ManifestError::UnknownKind { kind: self.kind })?;
        let Self {
            generation,
            parent_generation,
            ..
        } = *self;
        let parked = kind == Kind::Parked;
        // A parked one may know the job it was meant for, but has no number in it.
        if !(parked && self.job.is_empty()) {
            check_job_name(&self.job)?;
        }
        let is_numbered = generation > 0 && parent_generation < generation;
        if if parked {
            generation != 0
        } else {
            !is_numbered
        } {
            return Err(ManifestError::Generation {
                generation,
                parent_generation,
                kind,
            });
        }
        let is_id =
            self.session.len() == 32 && self.session.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !self.session.is_empty() && !is_id {
            return Err(ManifestError::SessionId {
                session: self.session.clone(),
            });
        }
        Ok(())
    }
}

impl AddressSpace {
    /// Returns the space's id for the page-server protocol and file names.
    ///
    /// # Errors
    /// There is no space of this type and id.
    pub fn space_id(&self) -> Result<SpaceId, ManifestError> {
        let bad = ManifestError::BadSpace {
            space_type: self.space_type,
            id: self.id,
        };
        match SpaceType::try_from(self.space_type) {
            Ok(SpaceType::Process) => u32::try_from(self.id).ok().map(SpaceId::process).ok_or(bad),
            Ok(SpaceType::SharedMemory) => SpaceId::shared_memory(self.id).ok_or(bad),
            Err(_) => Err(bad),
        }
    }
}

fn check_map_root(of: &str, map_root: &[u8]) -> Result<(), ManifestError> {
    match map_root.len() {
        MAP_ROOT_BYTES => Ok(()),
        len_bytes => Err(ManifestError::MapRoot {
            of: of.to_owned(),
            len_bytes,
        }),
    }
}

/// Returns true if a file of this name stays in its directory. Callers that write files check this again, but a
/// manifest with any other name is refused as a whole.
#[must_use]
pub fn is_plain_file_name(name: &str) -> bool {
    (1..=MAX_FILE_NAME_BYTES).contains(&name.len())
        && name != "."
        && name != ".."
        && !name
            .chars()
            .any(|character| character == '/' || character.is_control())
}
