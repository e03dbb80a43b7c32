//! The file of tokens: `NAME SCOPE[,SCOPE] SHA256 [NAMESPACE[,NAMESPACE]]` a line.
//!
//! It is read again when it changes. If a line does not parse, the previous tokens stay valid, so that a typing
//! error locks nobody out; if the file is missing, or others can read or write it, no token is valid.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use permafrost_identity::{Namespaces, Scope, TokenHash};
use permafrost_quotas::private_file::{FileKind, PrivateFile, PrivateFileError, Unusable, lines};

use crate::caller::{Caller, every_namespace};

pub(super) use permafrost_quotas::private_file::LOOK_EVERY;

/// Longest name, bytes.
const MAX_NAME_BYTES: usize = 64;

/// Messages and parser for the file of tokens.
static TOKENS: FileKind<Callers> = FileKind {
    name: "tokens",
    line_hint: "a line is NAME SCOPE[,SCOPE] SHA256 [NAMESPACE[,NAMESPACE]], as `permafrost token new` prints it",
    missing_hint: "`permafrost token new` prints a token and its line",
    parse,
    unusable: Unusable::Forget,
};

type Callers = HashMap<TokenHash, Arc<Caller>>;

/// Tokens of a file, as it currently is.
#[derive(Debug)]
pub(super) struct Tokens(PrivateFile<Callers>);

impl Tokens {
    /// Reads the file of tokens.
    ///
    /// # Errors
    /// See [`PrivateFileError`].
    pub(super) fn load(path: &Path, look_every: Duration) -> Result<Self, PrivateFileError> {
        PrivateFile::load(&TOKENS, path, look_every).map(Self)
    }

    /// Returns the caller that a token belongs to.
    pub(super) fn caller(&self, token: &str) -> Option<Arc<Caller>> {
        self.0.contents().get(&TokenHash::of(token)).cloned()
    }
}

/// Parses the file.
///
/// # Errors
/// The number of the line that does not parse, and the reason.
fn parse(text: &str) -> Result<Callers, (usize, String)> {
    let mut callers = Callers::new();
    for (number, line) in lines(text) {
        let (hash, caller) = parse_line(line).map_err(|what| (number, what))?;
        if callers.insert(hash, Arc::new(caller)).is_some() {
            return Err((number, "the same token stands there twice".to_owned()));
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
        // A new file each time, as editors leave it.
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
        let read =
            |path: &Path| Tokens::load(path, Duration::ZERO).map(|tokens| tokens.0.contents());
        assert!(matches!(read(&path), Err(PrivateFileError::Read { .. })));
        for mode in [0o640, 0o604, 0o620] {
            write(&path, &line("a", "read", "x"), mode);
            assert!(
                matches!(read(&path), Err(PrivateFileError::Unsafe { .. })),
                "{mode:o}"
            );
        }
        assert!(matches!(
            read(dir.path()),
            Err(PrivateFileError::Unsafe { .. })
        ));
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
