//! A checkpoint that nodes hold, as an ordinary CRIU images directory.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use permafrost_protocol::control;
use permafrost_protocol::images::{pagemap_name, pages_name};
use permafrost_protocol::pageserver::SpaceId;

use super::directory::{ImagesDir, failed};
use crate::host::Progress;
use crate::remote::{MapDigest, ReadError, RemoteCheckpoint, Run};

const PAGE_BYTES: u64 = 4096;

/// Writes `checkpoint` into `directory`: the small images byte for byte, the pages in the files that CRIU would have
/// made, zero pages as holes.
pub(super) fn export(
    checkpoint: &RemoteCheckpoint,
    small_images_only: bool,
    directory: OwnedFd,
    progress: Progress<'_>,
) -> Result<control::Exported, control::Error> {
    let mut export = Export {
        checkpoint,
        directory: ImagesDir::new(directory)?,
        total_bytes: if small_images_only {
            0
        } else {
            checkpoint.record().memory_bytes
        },
        done_bytes: 0,
        written_bytes: 0,
        created: Vec::new(),
    };
    if let Err(error) = export.all(small_images_only, progress) {
        export.undo();
        return Err(error);
    }
    Ok(control::Exported {
        checkpoint: Some(checkpoint.record().clone()),
        files: export.created.len() as u64,
        bytes: export.written_bytes,
        origin: checkpoint.manifest().origin.clone(),
    })
}

struct Export<'a> {
    checkpoint: &'a RemoteCheckpoint,
    directory: ImagesDir,
    total_bytes: u64,
    done_bytes: u64,
    written_bytes: u64,
    /// Names of the files made.
    created: Vec<String>,
}

impl Export<'_> {
    fn all(
        &mut self,
        small_images_only: bool,
        progress: Progress<'_>,
    ) -> Result<(), control::Error> {
        // Nothing takes a directory without an inventory for images, so it comes when all else is there.
        let images = &self.checkpoint.manifest().images;
        let (last, first): (Vec<_>, Vec<_>) =
            (0..images.len()).partition(|place| images[*place].name == "inventory.img");
        for place in first {
            self.small_image(place)?;
        }
        if !small_images_only {
            for place in 0..self.checkpoint.manifest().spaces.len() {
                self.space(place, progress)?;
            }
        }
        for place in last {
            self.small_image(place)?;
        }
        Ok(())
    }

    /// Removes what was made: half a checkpoint must not be taken for a whole one.
    fn undo(&self) {
        for name in &self.created {
            if let Err(error) = self.directory.remove(name) {
                tracing::warn!(name, %error, "image not removed");
            }
        }
    }

    fn create(&mut self, name: &str) -> Result<File, control::Error> {
        let file = self.directory.create(name);
        let file = file.map_err(|error| failed(&format!("create image {name}"), &error))?;
        self.created.push(name.to_owned());
        Ok(file)
    }

    fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), control::Error> {
        self.create(name)?
            .write_all_at(bytes, 0)
            .map_err(|error| failed(&format!("write image {name}"), &error))?;
        self.written_bytes += bytes.len() as u64;
        Ok(())
    }

    fn small_image(&mut self, place: usize) -> Result<(), control::Error> {
        let bytes = self.checkpoint.image(place)?;
        let name = self.checkpoint.manifest().images[place].name.clone();
        self.write(&name, &bytes)
    }

    fn space(&mut self, place: usize, progress: Progress<'_>) -> Result<(), control::Error> {
        let checkpoint = self.checkpoint;
        let space = &checkpoint.manifest().spaces[place];
        let name = pagemap_name(SpaceId {
            space_type: space.space_type(),
            id: space.id,
        });
        self.write(&name, &checkpoint.pagemap(place)?)?;

        let name = pages_name(space.pages_id);
        let file = self.create(&name)?;
        let wrote = |error| failed(&format!("write image {name}"), &error);
        let mut at = 0;
        let written = checkpoint.pages(place, 0, MapDigest::default(), |run| {
            match run {
                Run::Pages { bytes, .. } => {
                    file.write_all_at(bytes, at)?;
                    at += bytes.len() as u64;
                }
                Run::Zero { pages, .. } => at += pages * PAGE_BYTES,
            }
            progress(self.done_bytes + at, self.total_bytes);
            Ok(())
        });
        written.map_err(|error| match error {
            ReadError::Holders(error) => error,
            ReadError::Taker(error) => wrote(error),
        })?;
        // Zero pages at the end are a hole, too.
        file.set_len(at).map_err(wrote)?;
        self.done_bytes += at;
        self.written_bytes += at;
        Ok(())
    }
}
