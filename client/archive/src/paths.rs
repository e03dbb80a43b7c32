//! Paths and links of an archive's members. Nothing is unpacked under them here; but whoever unpacks the archive that
//! comes out of the store must be as safe as with the one that went in.

use std::collections::{HashMap, HashSet};

use crate::ArchiveError;

/// Members so far.
#[derive(Default)]
pub(crate) struct Paths {
    /// Normal paths of all members.
    all: HashSet<String>,
    /// Normal paths of the symbolic links.
    links: HashSet<String>,
    /// Directories that members are in, each with one of these members.
    parents: HashMap<String, String>,
}

impl Paths {
    /// Adds a member, and returns its path without `.` components. The path of the archive's own directory is empty.
    pub(crate) fn add(&mut self, path: &[u8], is_symlink: bool) -> Result<String, ArchiveError> {
        let shown = String::from_utf8_lossy(path).into_owned();
        let normal = match std::str::from_utf8(path).ok().and_then(normal) {
            Some(normal) => normal,
            None => return Err(ArchiveError::OutsidePath { path: shown }),
        };
        if !self.all.insert(normal.clone()) {
            return Err(ArchiveError::Twice { path: shown });
        }
        for (at, _) in normal.match_indices('/') {
            let parent = &normal[..at];
            if self.links.contains(parent) {
                return Err(ArchiveError::BeneathLink {
                    path: shown,
                    link: parent.to_owned(),
                });
            }
            if !self.parents.contains_key(parent) {
                self.parents.insert(parent.to_owned(), shown.clone());
            }
        }
        if is_symlink {
            if let Some(beneath) = self.parents.get(&normal) {
                return Err(ArchiveError::BeneathLink {
                    path: beneath.clone(),
                    link: shown,
                });
            }
            self.links.insert(normal.clone());
        }
        Ok(normal)
    }
}

/// Returns a relative path without `.` components; `None` if it is absolute or leads upwards.
fn normal(path: &str) -> Option<String> {
    if path.starts_with('/') || path.contains('\0') {
        return None;
    }
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => return None,
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Checks the target of a symbolic link at a normal path: it is relative, and has `..` at its beginning only, no more
/// than lead to the archive's directory. Behind another link in the target, `..` would lead anywhere.
pub(crate) fn check_symlink(path: &str, target: &[u8]) -> Result<(), ArchiveError> {
    let depth = path.matches('/').count();
    check_target(path, target, depth)
}

/// Checks the target of a hard link: the path of another member.
pub(crate) fn check_hard_link(path: &str, target: &[u8]) -> Result<(), ArchiveError> {
    check_target(path, target, 0)
}

fn check_target(path: &str, target: &[u8], depth: usize) -> Result<(), ArchiveError> {
    let text = std::str::from_utf8(target).ok();
    let inside = text.is_some_and(|target| {
        let mut rest = target;
        let mut up = 0;
        while let Some(after) = rest.strip_prefix("..") {
            if !after.is_empty() && !after.starts_with('/') {
                break;
            }
            up += 1;
            rest = after.trim_start_matches('/');
        }
        up <= depth && !target.is_empty() && !target.starts_with('/') && normal(rest).is_some()
    });
    if inside {
        Ok(())
    } else {
        Err(ArchiveError::OutsideLink {
            path: path.to_owned(),
            target: String::from_utf8_lossy(target).into_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_inside() {
        let mut paths = Paths::default();
        assert_eq!(paths.add(b"./a//b/", false).unwrap(), "a/b");
        assert_eq!(paths.add(b"./", false).unwrap(), "");
        for path in [&b"/etc/x"[..], b"../x", b"a/../x", b"a/..", b"\xff"] {
            let added = paths.add(path, false);
            assert!(
                matches!(added, Err(ArchiveError::OutsidePath { .. })),
                "{path:?}"
            );
        }
        let twice = paths.add(b"a/./b", false);
        assert!(matches!(twice, Err(ArchiveError::Twice { .. })));
    }

    #[test]
    fn nothing_goes_through_a_link_whichever_comes_first() {
        let beneath = |added| matches!(added, Err(ArchiveError::BeneathLink { .. }));
        let mut paths = Paths::default();
        paths.add(b"x", true).unwrap();
        assert!(beneath(paths.add(b"x/y/z", false)));
        paths.add(b"d/e/f", false).unwrap();
        assert!(beneath(paths.add(b"d/e", true)));
        assert!(beneath(paths.add(b"d", true)));
        paths.add(b"d/g", true).unwrap();
    }

    #[test]
    fn links_stay_inside() {
        for (path, target) in [
            ("a", "b"),
            ("checkpoint/parent", "../pre-checkpoint"),
            ("a", "..x/y"),
            ("a/b", "./c"),
        ] {
            check_symlink(path, target.as_bytes()).unwrap();
        }
        for (path, target) in [
            ("a", ".."),
            ("a", "../x"),
            ("a/b", "../../x"),
            ("a/b", "c/../d"),
            ("a/b", ".././.."),
            ("a", "/etc"),
            ("a", ""),
        ] {
            assert!(
                check_symlink(path, target.as_bytes()).is_err(),
                "{path} {target}"
            );
        }
        check_hard_link("a/b", b"a/c").unwrap();
        assert!(check_hard_link("a/b", b"../c").is_err());
    }
}
