//! Identity of etcd's data. A random id is made with the data. A node remembers the id of the data in which its
//! checkpoints were listed, and accepts only from that data that they are no longer listed.

use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use permafrost_store::StoreError;

/// Name of the file in the data directory.
const FILE: &str = "cluster";

/// Identity and revision of etcd's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataMark {
    /// Id that was made with the data.
    pub id: String,
    /// etcd's revision: it grows with every change, and goes back only when an older copy of the data is restored.
    pub revision: u64,
}

/// Relation of etcd's data to the data that a node remembers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acquaintance {
    /// The data in which this node's checkpoints were listed: unlisted checkpoints may be dropped.
    Known,
    /// This node remembers no data. Its checkpoints may have been listed elsewhere, so no published one may be
    /// dropped.
    New,
    /// Other data, or an older copy: no published checkpoint may be dropped. The text describes the difference.
    Different(String),
}

/// A node's record of etcd's data: `DATA_DIR/cluster`, a line with the id and the last revision seen.
#[derive(Clone, Debug)]
pub struct KnownData {
    path: PathBuf,
}

impl KnownData {
    /// Returns the record in the daemon's data directory, which must exist.
    #[must_use]
    pub fn new(data_dir: &Path) -> Self {
        Self {
            path: data_dir.join(FILE),
        }
    }

    /// Compares `mark` with the recorded data. Must be called before each sweep, whose list must then be that of
    /// `EtcdRegistry::bound_to` with the same mark. A later revision of the known data is recorded;
    /// anything else is logged.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn check(&self, mark: &DataMark) -> Result<Acquaintance, StoreError> {
        let text = match std::fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                tracing::info!(
                    event = "registry-data-new",
                    cluster = mark.id,
                    "the registry's data is new to this node"
                );
                return Ok(Acquaintance::New);
            }
            Err(error) if error.kind() == ErrorKind::InvalidData => String::new(),
            Err(error) => return Err(self.failed("read")(error)),
        };
        let mut words = text.split_whitespace();
        let known = words
            .next()
            .zip(words.next().and_then(|word| word.parse::<u64>().ok()));
        let why = match known {
            Some((id, revision)) if id == mark.id && revision <= mark.revision => {
                if revision < mark.revision {
                    self.accept(mark)?;
                }
                return Ok(Acquaintance::Known);
            }
            Some((id, revision)) if id == mark.id => format!(
                "it is an older copy: its revision is {}, and was {revision}",
                mark.revision
            ),
            Some((id, _)) => format!("it is of cluster {}, and was of {id}", mark.id),
            None => format!("{} is not readable", self.path.display()),
        };
        tracing::error!(
            event = "registry-data-lost",
            why,
            "the registry does not have the data that this node's checkpoints were listed in: nothing of them is dropped. Run `permafrost node rebuild` to list them again"
        );
        Ok(Acquaintance::Different(why))
    }

    /// Records `mark` as the known data: everything that is published here was found listed in it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn accept(&self, mark: &DataMark) -> Result<(), StoreError> {
        let directory = self.path.parent().unwrap_or(Path::new("."));
        let write = || {
            // Readable for its owner alone, as all files in the directory.
            let mut file = tempfile::NamedTempFile::new_in(directory)?;
            writeln!(file, "{} {}", mark.id, mark.revision)?;
            file.as_file().sync_all()?;
            file.persist(&self.path).map_err(|error| error.error)?;
            std::fs::File::open(directory)?.sync_all()
        };
        write().map_err(self.failed("write"))
    }

    fn failed(&self, verb: &str) -> impl FnOnce(std::io::Error) -> StoreError + use<> {
        StoreError::io(format!("{verb} {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn mark(id: &str, revision: u64) -> DataMark {
        DataMark {
            id: id.to_owned(),
            revision,
        }
    }

    #[test]
    fn data_is_known_once_it_was_accepted_and_as_long_as_it_only_grows() {
        let dir = tempfile::tempdir().unwrap();
        let known = KnownData::new(dir.path());
        assert_eq!(known.check(&mark("a", 5)).unwrap(), Acquaintance::New);
        assert_eq!(
            known.check(&mark("a", 5)).unwrap(),
            Acquaintance::New,
            "looking is not accepting"
        );
        known.accept(&mark("a", 5)).unwrap();
        assert_eq!(known.check(&mark("a", 5)).unwrap(), Acquaintance::Known);
        assert_eq!(known.check(&mark("a", 9)).unwrap(), Acquaintance::Known);
        let Acquaintance::Different(why) = known.check(&mark("a", 8)).unwrap() else {
            panic!("an older copy was taken for the same data");
        };
        assert!(why.contains("older"), "{why}");
        let Acquaintance::Different(why) = known.check(&mark("b", 100)).unwrap() else {
            panic!("other data was taken for the same");
        };
        assert!(why.contains('a') && why.contains('b'), "{why}");
        // Repeated checks do not make it known.
        assert_ne!(known.check(&mark("b", 101)).unwrap(), Acquaintance::Known);
        known.accept(&mark("b", 101)).unwrap();
        assert_eq!(known.check(&mark("b", 101)).unwrap(), Acquaintance::Known);

        let file = dir.path().join(FILE);
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_damaged_file_makes_nothing_known() {
        let dir = tempfile::tempdir().unwrap();
        let known = KnownData::new(dir.path());
        for text in [&b""[..], b"a", b"a b", b"\xff\xfe", b"5 a"] {
            std::fs::write(dir.path().join(FILE), text).unwrap();
            let found = known.check(&mark("a", 5)).unwrap();
            assert!(matches!(found, Acquaintance::Different(_)), "{text:?}");
        }
        std::fs::remove_file(dir.path().join(FILE)).unwrap();
        std::fs::create_dir(dir.path().join(FILE)).unwrap();
        assert!(known.check(&mark("a", 5)).is_err());
    }
}
