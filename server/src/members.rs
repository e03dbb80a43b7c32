//! Files of a region beside its first.

use std::path::{Path, PathBuf};

use permafrost_agent::host::arguments::in_full;
use permafrost_pmem::{FoundMember, OpenOptions, RegionMember, member_uuid, open_medium};

/// Opens the file of a medium: where it was, or one of `others` with its name inside. A file that is not there is not
/// made.
pub(crate) fn find(
    member: &RegionMember,
    others: &[PathBuf],
    options: &OpenOptions,
) -> Result<FoundMember, String> {
    let is_it = |path: &Path| matches!(member_uuid(path), Ok(Some(uuid)) if uuid == member.uuid);
    let mut candidates = std::iter::once(&member.path).chain(others);
    let path = candidates.find(|path| is_it(path)).ok_or_else(|| {
        let path = member.path.display();
        match member_uuid(&member.path) {
            Err(error) => format!("{path}: {error}"),
            Ok(_) => format!("{path} is another file, or its header is damaged"),
        }
    })?;
    let path = path.canonicalize().map_err(|error| error.to_string())?;
    let medium = if permafrost_cold::is_cold(&path) {
        permafrost_cold::open_cold(&path, options, &permafrost_objects::connect)
            .map_err(|error| in_full(&error))?
    } else {
        open_medium(&path, 0, options).map_err(|error| in_full(&error))?
    };
    Ok(FoundMember { medium, path })
}
