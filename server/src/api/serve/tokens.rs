//! The file of tokens: `NAME SCOPE[,SCOPE] SHA256 [NAMESPACE[,NAMESPACE]]` a line.
//!
//! It is read again when it changes. With a line that makes no sense the tokens before stay, so that a slip of the
//! editor locks nobody out; a file that is gone, or that others can write or read, lets nobody in.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use permafrost_client::identity::{Namespaces, Scope, TokenHash};

use crate::api::caller::{Caller, every_namespace};

/// How often the file is looked at, at most: one `stat`, and only while tokens are shown.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A line has some 120 bytes.
const MOST_BYTES: u64 = 1 << 20;

/// Longest name.
const MAX_NAME_BYTES: usize = 64;

/// Why tokens cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// It is not there, or not readable.
    #[error("read tokens in {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Others can read or replace it, or it is no file.
    #[error("the file of tokens {} {what}", path.display())]
    Unsafe {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A line makes no sense.
    #[error("{}:{line}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
}

impl TokensError {
    /// What to do about it.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Read { .. } => "`permafrost token new` prints a token and its line",
            Self::Unsafe { .. } => {
                "chmod 600 it, and chown it to the user that permafrostd runs as"
            }
            Self::Line { .. } => {
                "a line is NAME SCOPE[,SCOPE] SHA256 [NAMESPACE[,NAMESPACE]], as `permafrost token new` prints it"
            }
        }
    }
}

/// Which state of the file this is.
type Stamp = (u64, u64, u64, i64, i64, i64, i64, u32);

type Callers = HashMap<TokenHash, Arc<Caller>>;

/// The tokens of a file, at this moment.
#[derive(Debug)]
pub(super) struct Tokens {
    path: PathBuf,
    look_every: Duration,
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    callers: Callers,
    looked: Instant,
    stamp: Option<Stamp>,
}

impl Tokens {
    /// # Errors
    /// See [`TokensError`].
    pub(super) fn load(path: &Path, look_every: Duration) -> Result<Self, TokensError> {
        let stamp = stamp(path);
        let known = Known {
            callers: read(path)?,
            looked: Instant::now(),
            stamp,
        };
        Ok(Self {
            path: path.to_owned(),
            look_every,
            known: Mutex::new(known),
        })
    }

    /// Whose token this is.
    pub(super) fn caller(&self, token: &str) -> Option<Arc<Caller>> {
        let hash = TokenHash::of(token);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.looked.elapsed() >= self.look_every {
            self.look(&mut known);
        }
        known.callers.get(&hash).cloned()
    }

    fn look(&self, known: &mut Known) {
        known.looked = Instant::now();
        // Before it is read: a change in between shows at the next look.
        let stamp = stamp(&self.path);
        if stamp == known.stamp {
            return;
        }
        known.stamp = stamp;
        match read(&self.path) {
            Ok(callers) => {
                tracing::info!(path = %self.path.display(), tokens = callers.len(), "tokens read again");
                known.callers = callers;
            }
            Err(error @ TokensError::Line { .. }) => {
                tracing::error!(%error, "the tokens before stay");
            }
            Err(error) => {
                tracing::error!(%error, "no token is taken until this is mended");
                known.callers.clear();
            }
        }
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let found = std::fs::metadata(path).ok()?;
    Some((
        found.dev(),
        found.ino(),
        found.size(),
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
        found.ctime_nsec(),
        found.mode(),
    ))
}

fn read(path: &Path) -> Result<Callers, TokensError> {
    let failed = |source| TokensError::Read {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    // Of the file that is open: no other can come between.
    let found = file.metadata().map_err(failed)?;
    let refused = |what: String| TokensError::Unsafe {
        path: path.to_owned(),
        what,
    };
    if !found.is_file() || found.size() > MOST_BYTES {
        let what = format!("is no regular file of at most {MOST_BYTES} bytes");
        return Err(refused(what));
    }
    if found.mode() & 0o077 != 0 {
        let mode = found.mode() & 0o7777;
        return Err(refused(format!("is open to others (mode {mode:04o})")));
    }
    let owner = found.uid();
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(refused(format!("belongs to user {owner}")));
    }
    let mut text = String::new();
    file.take(MOST_BYTES)
        .read_to_string(&mut text)
        .map_err(failed)?;
    parse(&text).map_err(|(line, what)| TokensError::Line {
        path: path.to_owned(),
        line,
        what,
    })
}

/// The line that makes no sense, and why.
fn parse(text: &str) -> Result<Callers, (usize, String)> {
    let mut callers = Callers::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (hash, caller) = parse_line(line).map_err(|what| (index + 1, what))?;
        if callers.insert(hash, Arc::new(caller)).is_some() {
            return Err((index + 1, "the same token stands there twice".to_owned()));
        }
    }
    Ok(callers)
}

fn parse_line(line: &str) -> Result<(TokenHash, Caller), String> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (name, scopes, hash, namespaces) = match fields.as_slice() {
        [name, scopes, hash] => (*name, *scopes, *hash, None),
        [name, scopes, hash, namespaces] => (*name, *scopes, *hash, Some(*namespaces)),
        _ => return Err(format!("{} words, 3 or 4 were expected", fields.len())),
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.len() > MAX_NAME_BYTES || !name.bytes().all(plain) {
        return Err(format!(
            "{name:?} is no name: up to {MAX_NAME_BYTES} letters, digits and . _ -"
        ));
    }
    let scopes = scopes
        .split(',')
        .map(str::parse::<Scope>)
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())?;
    let hash = hash
        .parse::<TokenHash>()
        .map_err(|error| error.to_string())?;
    let namespaces = match namespaces {
        None => every_namespace(),
        Some(namespaces) => {
            Namespaces::new(namespaces.split(',')).map_err(|error| error.to_string())?
        }
    };
    let name = format!("token {name}");
    let caller = Caller {
        name,
        scopes,
        namespaces,
    };
    Ok((hash, caller))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn line(name: &str, scopes: &str, token: &str) -> String {
        format!("{name} {scopes} {}\n", TokenHash::of(token))
    }

    fn write(path: &Path, text: &str, mode: u32) {
        // A file of its own each time, as editors leave it.
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, text).unwrap();
        std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::rename(&fresh, path).unwrap();
    }

    fn name(tokens: &Tokens, token: &str) -> Option<String> {
        tokens.caller(token).map(|caller| caller.name.clone())
    }

    #[test]
    fn lines_say_who_may_what() {
        let text = format!(
            "# schedulers\n\n{}{} team-a,team-b\n",
            line("slurm", "read,reserve", "one"),
            line("view", "read", "two").trim()
        );
        let callers = parse(&text).unwrap();
        let slurm = &callers[&TokenHash::of("one")];
        assert_eq!(slurm.name, "token slurm");
        assert!(slurm.may(Scope::Reserve) && !slurm.may(Scope::Operate) && slurm.sees("any/x"));
        let view = &callers[&TokenHash::of("two")];
        assert!(view.may(Scope::Read) && !view.may(Scope::Reserve));
        assert!(view.sees("team-b/x") && !view.sees("train"));
    }

    #[test]
    fn a_line_without_sense_is_named() {
        let good = line("a", "read", "x");
        for (bad, word) in [
            ("a read\n".to_owned(), "2 words"),
            (line("a", "write", "y"), "no scope"),
            (line("a", "read,", "y"), "no scope"),
            (line("a/b", "read", "y"), "no name"),
            ("a read 12ab\n".to_owned(), "64 hex digits"),
            (
                format!("{} a/b\n", line("a", "read", "y").trim()),
                "no namespace",
            ),
            (good.clone(), "twice"),
        ] {
            let (number, what) = parse(&format!("{good}{bad}")).unwrap_err();
            assert!(number == 2 && what.contains(word), "{bad}: {what}");
        }
    }

    #[test]
    fn a_file_open_to_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        assert!(matches!(read(&path), Err(TokensError::Read { .. })));
        for mode in [0o640, 0o604, 0o620] {
            write(&path, &line("a", "read", "x"), mode);
            assert!(
                matches!(read(&path), Err(TokensError::Unsafe { .. })),
                "{mode:o}"
            );
        }
        assert!(matches!(read(dir.path()), Err(TokensError::Unsafe { .. })));
        write(&path, &line("a", "read", "x"), 0o600);
        assert_eq!(read(&path).unwrap().len(), 1);
    }

    #[test]
    fn a_change_is_followed_and_a_slip_locks_nobody_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        write(&path, &line("a", "read", "x"), 0o600);
        let tokens = Tokens::load(&path, Duration::ZERO).unwrap();
        assert_eq!(name(&tokens, "x").as_deref(), Some("token a"));
        assert_eq!(name(&tokens, "y"), None);

        write(&path, &line("b", "read", "y"), 0o600);
        assert_eq!(name(&tokens, "y").as_deref(), Some("token b"));
        assert_eq!(name(&tokens, "x"), None);

        write(&path, "half a li", 0o600);
        assert_eq!(name(&tokens, "y").as_deref(), Some("token b"));

        write(&path, &line("b", "read", "y"), 0o644);
        assert_eq!(name(&tokens, "y"), None);
        write(&path, &line("b", "read", "y"), 0o600);
        assert_eq!(name(&tokens, "y").as_deref(), Some("token b"));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(name(&tokens, "y"), None);
    }
}
