//! Writes the pages of a checkpoint into a pipe to a restoring CRIU, without a copy in between.

use std::io::{self, Write};

use permafrost_criu::frontend::Pipe;
use permafrost_pmem::RunKind;

use super::reader::{LocalCheckpoint, ReadError};
use permafrost_protocol::PAGE_BYTES;

/// Minimum size of a run of pages that is spliced. Shorter runs are copied into the pipe together: a splice of
/// each would cost more, and wake CRIU up each time.
const SPLICED_BYTES: u64 = 64 << 10;

impl LocalCheckpoint {
    /// Writes the pages of an address space into a pipe; `next_index` is the index after the last page written,
    /// damaged or not.
    pub(super) fn write_pipe(
        &self,
        place: usize,
        pipe: &mut Pipe,
        next_index: &mut u64,
    ) -> Result<(), ReadError> {
        let space = &self.manifest.spaces[place];
        let map = self.map(space)?;
        let total = space.pages * PAGE_BYTES;
        let mut written = 0;
        for run in map.runs() {
            let run = run.map_err(|source| self.corrupt(space, *next_index, source))?;
            let bytes = u64::from(run.pages) * PAGE_BYTES;
            written += bytes;
            // Spliced pages are the region's own, which may be reused once the checkpoint is released. So the last
            // pages, a pipe full, are copied: when they are in the pipe, CRIU has read all spliced ones.
            let is_last = total.saturating_sub(written) < pipe.capacity_bytes();
            let spliced = if bytes >= SPLICED_BYTES && !is_last {
                map.splice_source(&run)
            } else {
                Ok(None)
            };
            let read = match spliced {
                Ok(Some((file, at))) => {
                    let mut next = at;
                    if let Err(error) = pipe.splice(file, &mut next, at + bytes) {
                        let given = next - at;
                        *next_index = run.first_index + given / PAGE_BYTES;
                        // A page was lost since it was verified; the ones before it are in the pipe, whole.
                        return Err(match map.read_range(&run, *next_index, 1) {
                            Err(source) if given.is_multiple_of(PAGE_BYTES) => {
                                self.corrupt(space, *next_index, source).into()
                            }
                            _ => error.into(),
                        });
                    }
                    *next_index = run.end_index();
                    continue;
                }
                Ok(None) => map.read(&run),
                Err(source) => Err(source),
            };
            match read {
                Ok(_) if matches!(run.kind, RunKind::Zero) => pipe.write_zeros(bytes)?,
                Ok(pages) if is_last => {
                    // Copied first, because no step after it can fail.
                    let pages = pages.into_owned();
                    let kept = map.confirm(&run, run.first_index, run.pages);
                    kept.map_err(|source| self.corrupt(space, *next_index, source))?;
                    pipe.write_all(&pages)?;
                }
                Ok(pages) => {
                    let written = pipe.write_all(&pages);
                    // The pipe may contain zeros in place of lost pages, so the image ends here, and the restore fails.
                    map.confirm(&run, run.first_index, run.pages)
                        .map_err(|source| {
                            io::Error::other(self.corrupt(space, *next_index, source))
                        })?;
                    written?;
                }
                Err(source) => {
                    let (damaged_index, intact) = Self::before_damage(&map, &run, &source);
                    pipe.write_all(&intact)?;
                    *next_index = damaged_index;
                    return Err(self.corrupt(space, damaged_index, source).into());
                }
            }
            *next_index = run.end_index();
        }
        Ok(())
    }
}
