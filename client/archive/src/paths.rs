//! Paths and links of an archive's members. Nothing is unpacked under them here; but whoever unpacks the archive that
//! comes out of the store must be as safe as with the one that went in.

use std::collections::HashMap;
use std::rc::Rc;

use tar::EntryType;

use crate::ArchiveError;

/// Longest path or link target, bytes: `PATH_MAX` of Linux.
const MAX_PATH_BYTES: usize = 4096;

/// Most components of a path or a link target.
const MAX_DEPTH: usize = 128;

/// Most bytes that are remembered for the paths of all members and their parents.
const MAX_TOTAL_BYTES: usize = 64 << 20;

/// Bytes counted for each remembered path beside its own.
const ENTRY_BYTES: usize = 64;

/// Members so far.
#[derive(Default)]
pub(crate) struct Paths {
    /// Normal paths of all members, with their kinds.
    all: HashMap<String, EntryType>,
    /// Directories that members are in, each with one of these members.
    parents: HashMap<String, Rc<str>>,
    /// Bytes remembered so far.
    total_bytes: usize,
}

impl Paths {
    /// Adds a member, and returns its path without `.` components. The path of the archive's own directory is empty.
    pub(crate) fn add(&mut self, path: &[u8], kind: EntryType) -> Result<String, ArchiveError> {
        check_length(path)?;
        let shown = String::from_utf8_lossy(path);
        let normal = match std::str::from_utf8(path).ok().and_then(normal) {
            Some(normal) => normal,
            None => {
                return Err(ArchiveError::OutsidePath {
                    path: shown.into_owned(),
                });
            }
        };
        self.count(normal.len() + shown.len())?;
        if self.all.contains_key(&normal) {
            return Err(ArchiveError::Twice {
                path: shown.into_owned(),
            });
        }
        let shown: Rc<str> = shown.into();
        for (at, _) in normal.match_indices('/') {
            let parent = &normal[..at];
            if self.all.get(parent) == Some(&EntryType::Symlink) {
                return Err(ArchiveError::BeneathLink {
                    path: shown.as_ref().to_owned(),
                    link: parent.to_owned(),
                });
            }
            if !self.parents.contains_key(parent) {
                self.count(parent.len())?;
                self.parents.insert(parent.to_owned(), shown.clone());
            }
        }
        if kind == EntryType::Symlink
            && let Some(beneath) = self.parents.get(&normal)
        {
            return Err(ArchiveError::BeneathLink {
                path: beneath.as_ref().to_owned(),
                link: shown.as_ref().to_owned(),
            });
        }
        self.all.insert(normal.clone(), kind);
        Ok(normal)
    }

    fn count(&mut self, bytes: usize) -> Result<(), ArchiveError> {
        self.total_bytes += bytes + ENTRY_BYTES;
        if self.total_bytes > MAX_TOTAL_BYTES {
            return Err(ArchiveError::Paths {
                limit: MAX_TOTAL_BYTES,
            });
        }
        Ok(())
    }

    /// Checks the target of a hard link: an earlier regular file. A hard link to a symbolic link is a symbolic link
    /// itself, and leads elsewhere from its own directory.
    pub(crate) fn check_hard_link(&self, path: &str, target: &[u8]) -> Result<(), ArchiveError> {
        check_target(path, target, 0)?;
        let file = std::str::from_utf8(target).ok().and_then(normal);
        if file.and_then(|file| self.all.get(&file)) == Some(&EntryType::Regular) {
            return Ok(());
        }
        Err(ArchiveError::HardLink {
            path: path.to_owned(),
            target: String::from_utf8_lossy(target).into_owned(),
        })
    }
}

/// Refuses a path or a link target that is too long or too deep.
fn check_length(path: &[u8]) -> Result<(), ArchiveError> {
    let parts = path.split(|byte| *byte == b'/');
    let depth = parts
        .filter(|part| !part.is_empty() && *part != b".")
        .count();
    if path.len() > MAX_PATH_BYTES || depth > MAX_DEPTH {
        let begin = &path[..path.len().min(64)];
        return Err(ArchiveError::LongPath {
            begin: String::from_utf8_lossy(begin).into_owned(),
            limit: MAX_PATH_BYTES,
            depth: MAX_DEPTH,
        });
    }
    Ok(())
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

fn check_target(path: &str, target: &[u8], depth: usize) -> Result<(), ArchiveError> {
    check_length(target)?;
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
        assert_eq!(paths.add(b"./a//b/", EntryType::Regular).unwrap(), "a/b");
        assert_eq!(paths.add(b"./", EntryType::Regular).unwrap(), "");
        for path in [&b"/etc/x"[..], b"../x", b"a/../x", b"a/..", b"\xff"] {
            let added = paths.add(path, EntryType::Regular);
            assert!(
                matches!(added, Err(ArchiveError::OutsidePath { .. })),
                "{path:?}"
            );
        }
        let twice = paths.add(b"a/./b", EntryType::Regular);
        assert!(matches!(twice, Err(ArchiveError::Twice { .. })));
    }

    #[test]
    fn nothing_goes_through_a_link_whichever_comes_first() {
        let beneath = |added| matches!(added, Err(ArchiveError::BeneathLink { .. }));
        let mut paths = Paths::default();
        paths.add(b"x", EntryType::Symlink).unwrap();
        assert!(beneath(paths.add(b"x/y/z", EntryType::Regular)));
        paths.add(b"d/e/f", EntryType::Regular).unwrap();
        assert!(beneath(paths.add(b"d/e", EntryType::Symlink)));
        assert!(beneath(paths.add(b"d", EntryType::Symlink)));
        paths.add(b"d/g", EntryType::Symlink).unwrap();
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
    }

    #[test]
    fn a_hard_link_names_an_earlier_file() {
        let mut paths = Paths::default();
        paths.add(b"a/c", EntryType::Regular).unwrap();
        paths.add(b"a/h", EntryType::Link).unwrap();
        paths.add(b"a/s", EntryType::Symlink).unwrap();
        paths.add(b"a/d/", EntryType::Directory).unwrap();
        paths.check_hard_link("a/b", b"./a/c").unwrap();
        let outside = paths.check_hard_link("a/b", b"../c");
        assert!(matches!(outside, Err(ArchiveError::OutsideLink { .. })));
        for target in ["a/later", "a/h", "a/s", "a/d", "a"] {
            let refused = paths.check_hard_link("a/b", target.as_bytes());
            assert!(
                matches!(refused, Err(ArchiveError::HardLink { .. })),
                "{target}"
            );
        }
    }

    #[test]
    fn long_and_deep_paths_are_refused() {
        let long = |added| matches!(added, Err(ArchiveError::LongPath { .. }));
        let mut paths = Paths::default();
        let mut add = |path: &str| paths.add(path.as_bytes(), EntryType::Regular);
        add(&["a"; MAX_DEPTH].join("/")).unwrap();
        assert!(long(add(&["b"; MAX_DEPTH + 1].join("/"))));
        add(&"n".repeat(MAX_PATH_BYTES)).unwrap();
        assert!(long(add(&"m".repeat(MAX_PATH_BYTES + 1))));
        let target = ["t"; MAX_DEPTH + 1].join("/");
        assert!(check_symlink("l", target.as_bytes()).is_err());
        assert!(check_symlink("l", "t".repeat(MAX_PATH_BYTES + 1).as_bytes()).is_err());
    }

    #[test]
    fn the_paths_of_all_members_are_bounded() {
        let mut paths = Paths::default();
        // Each component of each path is a directory that no other member is in.
        let deep = |number: usize| {
            let parts = (0..MAX_DEPTH).map(|depth| format!("{number:05}-{depth:03}-{:020}", 0));
            parts.collect::<Vec<_>>().join("/")
        };
        let refused = (0..1000)
            .find_map(|number| paths.add(deep(number).as_bytes(), EntryType::Regular).err());
        assert!(matches!(refused, Some(ArchiveError::Paths { .. })));
        let remembered = |(path, _): (&String, &Rc<str>)| path.len();
        assert!(paths.parents.iter().map(remembered).sum::<usize>() < MAX_TOTAL_BYTES);
    }
}
