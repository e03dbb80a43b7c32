//! Writes the pages of a checkpoint into a pipe to a restoring CRIU, without a copy in between.

use std::borrow::Cow;
use std::io::{self, ErrorKind, IoSlice, Write};

use permafrost_criu::frontend::Pipe;
use permafrost_pmem::{PageMap, RunKind, StoredRun, refer_to_memory};

use super::reader::{LocalCheckpoint, ReadError};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::manifest::AddressSpace;

/// Minimum size of a run of pages that is spliced. The pipe refers to shorter runs together: a splice of each would cost
/// more, and wake CRIU up each time.
const SPLICED_BYTES: u64 = 64 << 10;

/// Bytes of short runs that the pipe refers to at once: CRIU takes these while the next ones are verified.
const GATHERED_BYTES: u64 = 256 << 10;

/// Zeros that a pipe refers to, a page or a few at a time.
#[repr(align(4096))]
struct Zeros([u8; 64 << 10]);

static ZEROS: Zeros = Zeros([0; 64 << 10]);

const _: () = assert!(size_of::<Zeros>() as u64 >= SPLICED_BYTES);

/// Short runs, verified, that the pipe is to refer to.
#[derive(Default)]
struct Gathered<'m> {
    runs: Vec<StoredRun>,
    pieces: Vec<&'m [u8]>,
    bytes: u64,
}

impl<'m> Gathered<'m> {
    fn add(&mut self, run: StoredRun, piece: &'m [u8]) {
        self.runs.push(run);
        self.pieces.push(piece);
        self.bytes += piece.len() as u64;
    }

    /// Lets the pipe refer to all of it, or copies what it cannot refer to.
    fn put(&mut self, pipe: &mut Pipe) -> io::Result<()> {
        let mut slices: Vec<_> = self
            .pieces
            .iter()
            .map(|piece| IoSlice::new(piece))
            .collect();
        let mut left = &mut slices[..];
        while !left.is_empty() {
            match pipe.refer(|end| refer_to_memory(end, left)) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => IoSlice::advance_slices(&mut left, bytes),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Err(error),
                Err(_) => {
                    for piece in std::mem::take(&mut left) {
                        pipe.write_all(piece)?;
                    }
                }
            }
        }
        Ok(())
    }
}

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
        let mut gathered = Gathered::default();
        for run in map.runs() {
            if gathered.bytes >= GATHERED_BYTES {
                self.put(space, &map, &mut gathered, pipe, next_index)?;
            }
            let run = match run {
                Ok(run) => run,
                Err(source) => {
                    self.put(space, &map, &mut gathered, pipe, next_index)?;
                    return Err(self.corrupt(space, *next_index, source).into());
                }
            };
            let bytes = u64::from(run.pages) * PAGE_BYTES;
            written += bytes;
            // The pipe refers to the region's own pages, which may be reused once the checkpoint is released. So the last
            // pages, a pipe full, are copied: when they are in the pipe, CRIU has read all others.
            let is_last = total.saturating_sub(written) < pipe.capacity_bytes();
            let is_zero = matches!(run.kind, RunKind::Zero);
            let mut short = None;
            if !is_last && bytes < SPLICED_BYTES {
                match map.read(&run) {
                    // Between decrypted pages, which are written, they are written, too.
                    Ok(_) if is_zero && !gathered.runs.is_empty() => {
                        let zeros = usize::try_from(bytes)
                            .ok()
                            .and_then(|len| ZEROS.0.get(..len));
                        gathered.add(run, zeros.unwrap_or_default());
                        continue;
                    }
                    Ok(Cow::Borrowed(pages)) if !is_zero => {
                        gathered.add(run, pages);
                        continue;
                    }
                    // Decrypted or fetched: written, as anything else.
                    read => short = Some(read),
                }
            }
            self.put(space, &map, &mut gathered, pipe, next_index)?;
            let spliced = if bytes >= SPLICED_BYTES && !is_last {
                map.splice_source(&run)
            } else {
                Ok(None)
            };
            let read = match spliced {
                _ if short.is_some() => short.unwrap_or_else(|| map.read(&run)),
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
                Ok(_) if is_zero => pipe.write_zeros(bytes)?,
                Ok(pages) if is_last => {
                    // Copied first, because no step after it can fail.
                    let pages = pages.into_owned();
                    let kept = map.confirm(&run, run.first_index, run.pages);
                    kept.map_err(|source| self.corrupt(space, *next_index, source))?;
                    pipe.write_all(&pages)?;
                }
                Ok(pages) => {
                    let written = pipe.write_all(&pages);
                    self.confirm(space, &map, &[run], *next_index)?;
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
        self.put(space, &map, &mut gathered, pipe, next_index)
    }

    /// Puts gathered runs into the pipe.
    fn put(
        &self,
        space: &AddressSpace,
        map: &PageMap,
        gathered: &mut Gathered<'_>,
        pipe: &mut Pipe,
        next_index: &mut u64,
    ) -> Result<(), ReadError> {
        let Some(last) = gathered.runs.last() else {
            return Ok(());
        };
        let end_index = last.end_index();
        let put = gathered.put(pipe);
        self.confirm(space, map, &gathered.runs, *next_index)?;
        put?;
        *next_index = end_index;
        *gathered = Gathered::default();
        Ok(())
    }

    /// Fails if a page of runs that were put into a pipe was lost meanwhile: the pipe may contain zeros in its place, so
    /// the image ends here, and the restore fails.
    fn confirm(
        &self,
        space: &AddressSpace,
        map: &PageMap,
        runs: &[StoredRun],
        next_index: u64,
    ) -> Result<(), ReadError> {
        let mut runs = runs.iter();
        let confirmed = runs.try_for_each(|run| map.confirm(run, run.first_index, run.pages));
        let lost = |source| io::Error::other(self.corrupt(space, next_index, source));
        Ok(confirmed.map_err(lost)?)
    }
}
