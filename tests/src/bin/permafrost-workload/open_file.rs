//! A file that stays open, half read: its descriptor, flags and position have to come back.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Length of the file, bytes; it never changes, as CRIU compares it at a restore.
const LEN_BYTES: u64 = 4096;
/// Position of the descriptor in the file, bytes.
const POSITION: u64 = 1234;

pub(crate) struct OpenFile {
    file: File,
}

impl OpenFile {
    pub(crate) fn create(dir: &Path) -> Result<Self> {
        let path = dir.join("workload.open");
        let contents: Vec<u8> = (0..LEN_BYTES).map(byte_at).collect();
        std::fs::write(&path, contents).context("write the open file")?;
        let mut file = File::open(&path).context("open the open file")?;
        file.seek(SeekFrom::Start(POSITION))
            .context("seek in the open file")?;
        Ok(Self { file })
    }

    pub(crate) fn verify(&mut self) -> Result<()> {
        let at = self
            .file
            .stream_position()
            .context("ask for the position")?;
        ensure!(at == POSITION, "stands at {at} instead of {POSITION}");
        let mut byte = [0];
        self.file.read_exact(&mut byte).context("read")?;
        self.file
            .seek(SeekFrom::Start(POSITION))
            .context("seek back")?;
        ensure!(
            byte[0] == byte_at(POSITION),
            "reads {} instead of {}",
            byte[0],
            byte_at(POSITION)
        );
        Ok(())
    }
}

fn byte_at(position: u64) -> u8 {
    // 251: prime, so that no power of two repeats the pattern.
    u8::try_from(position % 251).unwrap_or(0)
}
