//! Certificates that are refused before they expire: a file of serial numbers and names.
//!
//! ```text
//! # comment
//! serial 5f3a90c1…         one certificate
//! name agent c7            every certificate of this holder, those issued later included
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::role::Role;
use super::subject::{Subject, check_name};
use super::{IdentityError, files};

/// Name of the file beside a certificate, and in a daemon's data directory.
pub const DENIED: &str = "denied";

/// Most entries of a list: every check searches two trees, and a list travels in one value of etcd.
pub const MAX_DENIALS: usize = 4096;

/// Longest serial number, hex digits: RFC 5280 allows 20 bytes, and a zero byte before them.
const MAX_SERIAL_DIGITS: usize = 42;

/// A certificate, or a holder of certificates, that is refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Denial {
    /// The certificate with this serial number: lower-case hex digits without leading zeros.
    Serial(String),
    /// Every certificate of this holder.
    Holder {
        /// Name of the holder's role, as returned by [`Role::name`]: names are unique within a role.
        role: &'static str,
        /// Name of the holder.
        name: String,
    },
}

impl Denial {
    /// Parses a serial number, with or without colons and leading zeros.
    ///
    /// # Errors
    /// The text is not a hexadecimal number of at most 20 bytes.
    pub fn serial(text: &str) -> Result<Self, IdentityError> {
        let digits: String = text.chars().filter(|letter| *letter != ':').collect();
        let sound = !digits.is_empty()
            && digits.len() <= MAX_SERIAL_DIGITS
            && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !sound {
            return Err(IdentityError::Denial {
                text: text.to_owned(),
            });
        }
        Ok(Self::Serial(normalized(&digits)))
    }

    /// Returns the denial of a holder by role and name.
    ///
    /// # Errors
    /// The name is not valid in a certificate.
    pub fn holder(role: Role, name: &str) -> Result<Self, IdentityError> {
        check_name(name)?;
        Ok(Self::Holder {
            role: role.name(),
            name: name.to_owned(),
        })
    }

    /// Returns true if the denial refuses this certificate.
    #[must_use]
    pub fn matches(&self, subject: &Subject) -> bool {
        match self {
            Self::Serial(serial) => subject.serial == *serial,
            Self::Holder { role, name } => subject.role.name() == *role && subject.name == *name,
        }
    }
}

/// Normalises a serial number for comparison: lower case, without leading zeros.
pub(super) fn normalized(digits: &str) -> String {
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() { "0" } else { digits }.to_ascii_lowercase()
}

impl fmt::Display for Denial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Serial(serial) => write!(formatter, "serial {serial}"),
            Self::Holder { role, name } => write!(formatter, "name {role} {name}"),
        }
    }
}

impl FromStr for Denial {
    type Err = IdentityError;

    fn from_str(line: &str) -> Result<Self, IdentityError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["serial", serial] => Self::serial(serial),
            ["name", role, name] => Self::holder(role.parse()?, name),
            _ => Err(IdentityError::Denial {
                text: line.to_owned(),
            }),
        }
    }
}

/// A set of [`Denial`]s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DenyList(BTreeSet<Denial>);

impl DenyList {
    /// Reads a list; an empty one where there is no file.
    ///
    /// # Errors
    /// The file cannot be read, others may write it, or a line is invalid.
    pub fn load(path: &Path) -> Result<Self, IdentityError> {
        let bytes = match files::read_ours(path) {
            Ok(bytes) => bytes,
            Err(IdentityError::Io { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                return Ok(Self::default());
            }
            Err(error) => return Err(error),
        };
        let text = String::from_utf8_lossy(&bytes);
        let mut list = Self::default();
        for line in text.lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                list.insert(line.parse()?)?;
            }
        }
        Ok(list)
    }

    /// Writes the list atomically in the place of the old file, with mode 0600.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn store(&self, path: &Path) -> Result<(), IdentityError> {
        let directory = path.parent().unwrap_or(Path::new("."));
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(directory)?;
            writeln!(
                file,
                "# Certificates that are refused (permafrost pki deny): `serial HEX` or `name ROLE NAME`."
            )?;
            for denial in &self.0 {
                writeln!(file, "{denial}")?;
            }
            file.as_file().sync_all()?;
            file.persist(path).map_err(|error| error.error)?;
            std::fs::File::open(directory)?.sync_all()
        };
        write().map_err(files::io_error("write", path))
    }

    /// Adds a denial. Returns false if the list contains it already.
    ///
    /// # Errors
    /// The list has [`MAX_DENIALS`] entries already.
    pub fn insert(&mut self, denial: Denial) -> Result<bool, IdentityError> {
        if self.0.len() >= MAX_DENIALS && !self.0.contains(&denial) {
            return Err(IdentityError::TooManyDenials { limit: MAX_DENIALS });
        }
        Ok(self.0.insert(denial))
    }

    /// Adds another list, whatever its length.
    pub(super) fn merge(&mut self, other: &Self) {
        self.0.extend(other.0.iter().cloned());
    }

    /// Returns true if every certificate of this node is denied.
    pub(super) fn denies_node(&self, name: &str) -> bool {
        self.0.contains(&Denial::Holder {
            role: Role::Node.name(),
            name: name.to_owned(),
        })
    }

    /// Removes a denial. Returns false if the list does not contain it.
    pub fn remove(&mut self, denial: &Denial) -> bool {
        self.0.remove(denial)
    }

    /// Returns the entry that refuses a certificate.
    #[must_use]
    pub fn refuses(&self, subject: &Subject) -> Option<&Denial> {
        self.0.iter().find(|denial| denial.matches(subject))
    }

    /// Returns true if the denial is on the list.
    #[must_use]
    pub fn contains(&self, denial: &Denial) -> bool {
        self.0.contains(denial)
    }

    /// Iterates over the denials in their sort order.
    pub fn iter(&self) -> impl Iterator<Item = &Denial> {
        self.0.iter()
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if the list has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Files of denied certificates that an identity uses: one beside the certificate, managed by the user, and one
/// that the daemon writes itself. A certificate in either is refused.
#[derive(Clone, Debug)]
pub(super) struct DenyFiles {
    beside: PathBuf,
    own: Option<PathBuf>,
}

impl DenyFiles {
    pub(super) fn new(directory: &Path) -> Self {
        Self {
            beside: directory.join(DENIED),
            own: None,
        }
    }

    /// Adds the daemon's own list.
    pub(super) fn keep(&mut self, path: PathBuf) {
        self.own = Some(path);
    }

    /// Returns the path of the list that this program writes.
    pub(super) fn written(&self) -> &Path {
        self.own.as_deref().unwrap_or(&self.beside)
    }

    pub(super) fn paths(&self) -> [Option<&Path>; 2] {
        [Some(&self.beside), self.own.as_deref()]
    }

    /// Returns the union of the lists.
    pub(super) fn load(&self) -> Result<DenyList, IdentityError> {
        let mut all = DenyList::default();
        for path in self.paths().into_iter().flatten() {
            all.0.extend(DenyList::load(path)?.0);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_and_serial_numbers_are_compared_as_numbers() {
        for (line, shown) in [
            ("serial 00:AB:cd", "serial abcd"),
            ("  serial   0 ", "serial 0"),
            ("name agent c7", "name agent c7"),
        ] {
            let denial: Denial = line.parse().unwrap();
            assert_eq!(denial.to_string(), shown);
            assert_eq!(shown.parse::<Denial>().unwrap(), denial);
        }
        let long = format!("serial {}", "a".repeat(43));
        for line in [
            "serial",
            "serial xyz",
            "serial :",
            "serial 1 2",
            "name c7",
            "name admin c7",
            "name agent C7",
            "c7",
            &long,
        ] {
            assert!(line.parse::<Denial>().is_err(), "{line:?}");
        }
    }

    #[test]
    fn a_list_is_written_whole_and_one_that_makes_no_sense_is_not_read_as_empty() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(DENIED);
        assert!(DenyList::load(&path).unwrap().is_empty());
        let mut list = DenyList::default();
        assert!(list.insert("name node n3".parse().unwrap()).unwrap());
        assert!(!list.insert("name node n3".parse().unwrap()).unwrap());
        list.store(&path).unwrap();
        assert_eq!(DenyList::load(&path).unwrap(), list);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();
        assert!(matches!(
            DenyList::load(&path),
            Err(IdentityError::OpenList { .. })
        ));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, "name node n3 # stolen\nnonsense\n").unwrap();
        assert!(DenyList::load(&path).is_err());
    }

    #[test]
    fn a_list_has_an_end() {
        let mut list = DenyList::default();
        for number in 0..MAX_DENIALS {
            let denial = Denial::serial(&format!("{number:x}")).unwrap();
            list.insert(denial).unwrap();
        }
        assert!(list.insert(Denial::serial("ffff").unwrap()).is_err());
        assert!(!list.insert(Denial::serial("1").unwrap()).unwrap());
    }
}
