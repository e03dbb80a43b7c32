//! Standard streams of the task: files that can be opened again when it is resumed.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use permafrost_terminal::failure::{Code, Failure};

use super::RunArguments;

/// Output files of the task.
#[derive(Debug)]
pub(super) struct Streams {
    pub(super) output: File,
    pub(super) error: File,
}

impl Streams {
    /// Opens the files named, or else those that Slurm has opened for the job.
    ///
    /// # Errors
    /// A file cannot be opened, or could not be opened again by its name.
    pub(super) fn open(arguments: &RunArguments) -> Result<Self, Failure> {
        let open = |named: Option<&Path>, number: u32, option: &str| match named {
            Some(path) => append(path),
            None => again(number, option),
        };
        Ok(Self {
            output: open(arguments.output.as_deref(), 1, "--output")?,
            error: open(arguments.error.as_deref(), 2, "--error")?,
        })
    }
}

/// Opens a file for appending: CRIU then does not require that the file has the size it had, and later output
/// of others stays.
fn append(path: &Path) -> Result<File, Failure> {
    File::options()
        .append(true)
        .create(true)
        .open(path)
        .map_err(|error| Failure::io("open", path, &error))
}

/// Opens the file of a descriptor again by its name: the descriptor's own file lies in the mounts outside,
/// which CRIU does not see.
fn again(number: u32, option: &str) -> Result<File, Failure> {
    let link = PathBuf::from(format!("/proc/self/fd/{number}"));
    let path = fs::read_link(&link).map_err(|error| Failure::io("read", &link, &error))?;
    let unusable = |what: &str| {
        Failure::new(
            Code::Invalid,
            format!(
                "{} {what}, and cannot be opened again when the job is resumed",
                path.display()
            ),
        )
        .hint(format!("name a file with {option}"))
    };
    let there = fs::metadata(&link).map_err(|error| Failure::io("look at", &link, &error))?;
    let null = there.file_type().is_char_device() && path == Path::new("/dev/null");
    if !(there.is_file() || null) {
        return Err(unusable("is no file"));
    }
    match fs::metadata(&path) {
        Ok(named) if (named.dev(), named.ino()) == (there.dev(), there.ino()) => append(&path),
        _ => Err(unusable("is not there any more")),
    }
}
