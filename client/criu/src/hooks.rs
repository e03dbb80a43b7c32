//! Hooks in CRIU's own configuration, by which it has `permafrost-action` store its dumps, whoever starts it.
//!
//! ```text
//! /etc/criu/permafrost-hook  ──▶ permafrost-action, which stores every dump under this name
//! /etc/criu/default.conf         action-script /etc/criu/permafrost-hook
//! ```
//!
//! CRIU reads `default.conf` for users, and for runc, crun and podman over RPC. Everything is read and judged before
//! anything is written, and nothing of others is changed.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Name of CRIU's configuration for everybody.
const CONFIGURATION: &str = "default.conf";

/// Name by which `permafrost-action` stores every dump.
const HOOK: &str = "permafrost-hook";

/// Line before the one that is added.
const BEGIN: &str = "# Begin: permafrost install-criu-hooks";

/// Line behind the one that is added.
const END: &str = "# End: permafrost install-criu-hooks";

/// Error of a change to CRIU's configuration.
#[derive(Debug, thiserror::Error)]
pub enum HooksError {
    /// A file or line belongs to others.
    #[error("{} {what}", path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// Description of what is there.
        what: String,
    },
    /// CRIU's configuration cannot name a path.
    #[error("CRIU's configuration cannot name {}", path.display())]
    Unnameable {
        /// Path of the hook.
        path: PathBuf,
    },
    /// Others may change or replace the program that CRIU would run.
    #[error("{} {what}", path.display())]
    Untrusted {
        /// Path of the program, or of a directory above it or above the hook.
        path: PathBuf,
        /// Description of the reason.
        what: &'static str,
    },
    /// An error of the file system.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// Verb of the operation that failed.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

impl HooksError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }

    fn foreign(path: &Path, what: impl Into<String>) -> Self {
        Self::Foreign {
            path: path.to_owned(),
            what: what.into(),
        }
    }
}

/// A change of a file that is due.
#[derive(Debug)]
pub struct ConfigurationChange {
    /// Path of the file.
    pub path: PathBuf,
    /// Description of the change.
    pub description: String,
    action: Action,
}

#[derive(Debug)]
enum Action {
    Link(PathBuf),
    Write(String),
    Remove,
}

impl ConfigurationChange {
    /// Carries it out.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn apply(&self) -> Result<(), HooksError> {
        let path = &self.path;
        let done = match &self.action {
            Action::Link(program) => {
                if let Some(directory) = path.parent() {
                    fs::create_dir_all(directory).map_err(HooksError::io("create", directory))?;
                    // Another user may have made it since the change was judged.
                    check_directories(directory)?;
                }
                symlink(program, path)
            }
            Action::Write(text) => replace(path, text),
            Action::Remove => fs::remove_file(path),
        };
        done.map_err(HooksError::io("change", path))
    }
}

/// Hooks in a directory of CRIU's configuration.
#[derive(Debug)]
pub struct CriuHooks {
    directory: PathBuf,
    /// Line that has CRIU call the hook.
    line: String,
}

impl CriuHooks {
    /// Returns the hooks in `directory`, an absolute path. Links on the way to it are resolved: CRIU's configuration
    /// names the directory itself.
    ///
    /// # Errors
    /// [`HooksError::Unnameable`]; an error of the file system.
    pub fn in_directory(directory: &Path) -> Result<Self, HooksError> {
        let directory = resolve(directory)?;
        Ok(Self {
            line: line(&directory)?,
            directory,
        })
    }

    /// Returns the changes that are due for CRIU to call `program`.
    ///
    /// # Errors
    /// Others may change or replace the program or the hook; or a file or line of others is in the way.
    pub fn to_install(&self, program: &Path) -> Result<Vec<ConfigurationChange>, HooksError> {
        let program = trusted(program)?;
        check_directories(&self.directory)?;
        let changes = [self.with_link(program)?, self.with_line()?];
        Ok(changes.into_iter().flatten().collect())
    }

    /// Returns the changes that are due for CRIU to call it no more.
    ///
    /// # Errors
    /// A file or line of others is in the way.
    pub fn to_remove(&self) -> Result<Vec<ConfigurationChange>, HooksError> {
        let changes = [self.without_line()?, self.without_link()?];
        Ok(changes.into_iter().flatten().collect())
    }

    fn link(&self) -> PathBuf {
        self.directory.join(HOOK)
    }

    fn configuration(&self) -> PathBuf {
        self.directory.join(CONFIGURATION)
    }

    fn block(&self) -> String {
        format!("{BEGIN}\n{}\n{END}\n", self.line)
    }

    fn with_link(&self, program: PathBuf) -> Result<Option<ConfigurationChange>, HooksError> {
        let path = self.link();
        match fs::read_link(&path) {
            Ok(target) if target == program => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Some(ConfigurationChange {
                    path,
                    description: format!("link to {}", program.display()),
                    action: Action::Link(program),
                }))
            }
            // Another program, or something that is no link.
            _ => Err(HooksError::foreign(
                &path,
                format!("is no link to {}", program.display()),
            )),
        }
    }

    fn without_link(&self) -> Result<Option<ConfigurationChange>, HooksError> {
        let path = self.link();
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(HooksError::io("read", &path)(error)),
            Ok(metadata) if metadata.is_symlink() => Ok(Some(ConfigurationChange {
                path,
                description: "remove".to_owned(),
                action: Action::Remove,
            })),
            Ok(_) => Err(HooksError::foreign(&path, "is no link")),
        }
    }

    fn with_line(&self) -> Result<Option<ConfigurationChange>, HooksError> {
        let path = self.configuration();
        let Some(text) = read(&path)? else {
            return Ok(Some(self.write(path, "create with", self.block())));
        };
        if self.find_block(&path, &text)?.is_some() {
            return Ok(None);
        }
        // Two scripts that seal, one of them unknown to this program and to --undo.
        let other = text.lines().find(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some("action-script") && words.any(|word| word.contains("permafrost"))
        });
        if let Some(other) = other {
            return Err(HooksError::foreign(
                &path,
                format!("has the line {other:?} already"),
            ));
        }
        let end = if text.is_empty() || text.ends_with('\n') {
            ""
        } else {
            "\n"
        };
        let text = format!("{text}{end}{}", self.block());
        Ok(Some(self.write(path, "add", text)))
    }

    fn without_line(&self) -> Result<Option<ConfigurationChange>, HooksError> {
        let path = self.configuration();
        let Some(text) = read(&path)? else {
            return Ok(None);
        };
        let Some(at) = self.find_block(&path, &text)? else {
            return Ok(None);
        };
        let rest = format!("{}{}", &text[..at], &text[at + self.block().len()..]);
        if rest.is_empty() {
            return Ok(Some(ConfigurationChange {
                path,
                description: "remove".to_owned(),
                action: Action::Remove,
            }));
        }
        Ok(Some(self.write(path, "remove", rest)))
    }

    /// Returns the place of the lines that were added before.
    fn find_block(&self, path: &Path, text: &str) -> Result<Option<usize>, HooksError> {
        let block = self.block();
        let marked = text.matches(BEGIN).count().max(text.matches(END).count());
        match (text.find(&block), marked) {
            (None, 0) => Ok(None),
            (Some(at), 1) => Ok(Some(at)),
            _ => Err(HooksError::foreign(
                path,
                "has lines of an earlier call that were changed since",
            )),
        }
    }

    fn write(&self, path: PathBuf, verb: &str, text: String) -> ConfigurationChange {
        ConfigurationChange {
            path,
            description: format!("{verb} {:?}", self.line),
            action: Action::Write(text),
        }
    }
}

/// Returns the line for CRIU's configuration, which splits lines at blanks.
fn line(directory: &Path) -> Result<String, HooksError> {
    let hook = directory.join(HOOK);
    let plain = |path: &&str| {
        !path.contains(|c: char| c.is_whitespace() || c.is_control() || "#\"'\\".contains(c))
    };
    match hook.to_str().filter(plain) {
        Some(path) => Ok(format!("action-script {path}")),
        None => Err(HooksError::Unnameable { path: hook }),
    }
}

/// Returns a configuration; `None` if there is none. A link is not followed: what it leads to belongs to others.
fn read(path: &Path) -> Result<Option<String>, HooksError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(HooksError::io("read", path)(error)),
        Ok(metadata) if !metadata.is_file() => {
            return Err(HooksError::foreign(path, "is no ordinary file"));
        }
        Ok(_) => {}
    }
    let text = fs::read_to_string(path);
    text.map(Some).map_err(HooksError::io("read", path))
}

/// Writes a file beside `path` and gives it its name, with the mode of the file that it replaces: a CRIU that starts
/// meanwhile reads one or the other. The file is a new one: a link in its place would lead to another file.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("conf.permafrost");
    let mode = fs::metadata(path).map_or(0o644, |metadata| metadata.permissions().mode() & 0o777);
    match fs::remove_file(&new) {
        // An earlier call was killed.
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)?;
    let mut written = || -> io::Result<()> {
        file.write_all(text.as_bytes())?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    written().inspect_err(|_| {
        // The error is the one above.
        let _ = fs::remove_file(&new);
    })
}

/// Returns the absolute path of a program that root's CRIU may run: others must not be able to change it, nor to put
/// another one in its place.
fn trusted(program: &Path) -> Result<PathBuf, HooksError> {
    let path = fs::canonicalize(program).map_err(HooksError::io("find", program))?;
    let metadata = fs::metadata(&path).map_err(HooksError::io("stat", &path))?;
    let mode = metadata.mode();
    if !(is_own(&metadata) && metadata.is_file() && mode & 0o022 == 0 && mode & 0o111 != 0) {
        return Err(HooksError::Untrusted {
            path,
            what: "may be changed by others, or is no program",
        });
    }
    check_directories(path.parent().unwrap_or(&path))?;
    Ok(path)
}

/// Checks that no other user may rename or replace anything in a directory, nor in those above it; those that do not
/// exist yet are passed over. Others may write to a directory with the sticky bit: they cannot rename what is not theirs.
fn check_directories(directory: &Path) -> Result<(), HooksError> {
    for path in directory.ancestors() {
        let metadata = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            metadata => metadata.map_err(HooksError::io("stat", path))?,
        };
        let mode = metadata.mode();
        let is_closed = mode & 0o022 == 0 || mode & 0o1000 != 0;
        if !(is_own(&metadata) && metadata.is_dir() && is_closed) {
            return Err(HooksError::Untrusted {
                path: path.to_owned(),
                what: "is no directory, or other users may replace what is in it",
            });
        }
    }
    Ok(())
}

/// Returns true for a file of root's or of the caller's.
fn is_own(metadata: &fs::Metadata) -> bool {
    let owner = metadata.uid();
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

/// Resolves the links of an absolute path as far as it exists.
fn resolve(path: &Path) -> Result<PathBuf, HooksError> {
    for existing in path.ancestors() {
        match fs::canonicalize(existing) {
            Ok(resolved) => {
                let rest = path.strip_prefix(existing).unwrap_or(Path::new(""));
                return Ok(resolved.components().chain(rest.components()).collect());
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(HooksError::io("find", existing)(error)),
        }
    }
    Ok(path.to_owned())
}
