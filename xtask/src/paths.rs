//! Where things lie in the workspace.

use std::path::{Path, PathBuf};

/// The workspace's root.
pub(crate) fn workspace() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// Where fetched things are kept: the default target directory, whatever CARGO_TARGET_DIR says, so that
/// they are found again from anywhere.
pub(crate) fn target() -> PathBuf {
    workspace().join("target")
}
