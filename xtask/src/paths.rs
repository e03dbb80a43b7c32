//! Paths in the workspace.

use std::path::{Path, PathBuf};

/// Returns the root of the workspace.
pub(crate) fn workspace() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// Returns the directory for fetched things: the default target directory, whatever CARGO_TARGET_DIR says, so that
/// every caller finds them there.
pub(crate) fn target() -> PathBuf {
    workspace().join("target")
}
