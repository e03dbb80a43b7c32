//! The action script, which dumps have CRIU run to seal, and restores to wait for their memory.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::failure::{Code, Failure};

/// Name of its program, next to this one.
const PROGRAM: &str = "permafrost-action";

/// Returns the program: the one that is named, or the one next to this program.
pub fn program(named: Option<&Path>) -> Result<PathBuf, Failure> {
    let path = match named {
        Some(path) => path.to_owned(),
        None => std::env::current_exe()
            .map(|program| program.with_file_name(PROGRAM))
            .map_err(|error| Failure::new(Code::Internal, format!("find this program: {error}")))?,
    };
    let path = std::path::absolute(&path).unwrap_or(path);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 => Ok(path),
        Ok(_) => Err(Failure::new(
            Code::Invalid,
            format!("{} is not a program", path.display()),
        )),
        Err(error) => Err(Failure::io("find", &path, &error)
            .hint("CRIU runs it to seal the checkpoint; install permafrost-action next to permafrost, or name it with PERMAFROST_ACTION")),
    }
}
