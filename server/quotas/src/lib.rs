//! Quotas of namespaces on this node: a file with a line for each.
//!
//! ```text
//! *       bytes=100G checkpoints=1000 sessions=8 reservations=4 priority=5
//! team-a  bytes=1T priority=11
//! ```

mod error;
pub mod private_file;

use std::collections::BTreeMap;
use std::path::Path;

use parking_lot::RwLock;

use permafrost_agent::host::arguments::parse_size;
use permafrost_identity::{ALL_NAMESPACES, Namespaces};

pub use self::error::QuotaError;
use crate::private_file::{FileKind, LOOK_EVERY, PrivateFile, PrivateFileError, Unusable, lines};

/// Highest priority that a quota can allow.
const MAX_PRIORITY: u64 = 11;

/// Limits of a namespace; `None` for an unlimited quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Bytes that its checkpoints may take in this node's region; shared pages count once.
    pub bytes: Option<u64>,
    /// Checkpoints on this node, parked ones included.
    pub checkpoints: Option<u64>,
    /// Dumps that may be open at once.
    pub sessions: Option<u64>,
    /// Reservations that may be held in the queues at once.
    pub reservations: Option<u64>,
    /// Highest priority of a dump, a restore or a reservation.
    pub priority: Option<u64>,
}

/// Resources of this node that a namespace uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaUsage {
    /// Bytes used, counted as in [`Quota::bytes`].
    pub bytes: u64,
    /// Checkpoints, counted as in [`Quota::checkpoints`].
    pub checkpoints: u64,
    /// Open dumps, counted as in [`Quota::sessions`].
    pub sessions: u64,
    /// Reservations held, counted as in [`Quota::reservations`].
    pub reservations: u64,
}

impl Quota {
    /// Checks that `more` may be added to the use of `namespace`. Only quantities that are not zero in `more` are
    /// checked.
    ///
    /// # Errors
    /// The first limit that would be exceeded.
    pub fn check(
        &self,
        namespace: &str,
        used: &QuotaUsage,
        more: &QuotaUsage,
    ) -> Result<(), QuotaError> {
        let limits = [
            ("bytes", self.bytes, used.bytes, more.bytes),
            (
                "checkpoints",
                self.checkpoints,
                used.checkpoints,
                more.checkpoints,
            ),
            ("sessions", self.sessions, used.sessions, more.sessions),
            (
                "reservations",
                self.reservations,
                used.reservations,
                more.reservations,
            ),
        ];
        for (what, limit, used, more) in limits {
            if let Some(limit) = limit
                && more > 0
                && used.saturating_add(more) > limit
            {
                return Err(QuotaError::Exceeded {
                    namespace: namespace.to_owned(),
                    what,
                    limit,
                    used,
                });
            }
        }
        Ok(())
    }

    /// Checks that `namespace` may have `priority`.
    ///
    /// # Errors
    /// The priority is too high.
    pub fn check_priority(&self, namespace: &str, priority: u32) -> Result<(), QuotaError> {
        match self.priority {
            Some(limit) if u64::from(priority) > limit => Err(QuotaError::Priority {
                namespace: namespace.to_owned(),
                limit,
                priority,
            }),
            _ => Ok(()),
        }
    }
}

/// Settings of a line: `None` for a setting that it does not mention, `Some(None)` for `unlimited`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Line {
    limits: BTreeMap<&'static str, Option<u64>>,
}

const KEYS: [&str; 5] = [
    "bytes",
    "checkpoints",
    "sessions",
    "reservations",
    "priority",
];

#[derive(Debug, Default)]
struct Table(BTreeMap<String, Line>);

impl Table {
    fn of(&self, namespace: &str) -> Quota {
        let own = self.0.get(namespace);
        let others = self.0.get(ALL_NAMESPACES);
        let limit = |key: &str| {
            let said = |line: Option<&Line>| line.and_then(|line| line.limits.get(key).copied());
            said(own).or_else(|| said(others)).flatten()
        };
        Quota {
            bytes: limit("bytes"),
            checkpoints: limit("checkpoints"),
            sessions: limit("sessions"),
            reservations: limit("reservations"),
            priority: limit("priority"),
        }
    }
}

static QUOTAS: FileKind<Table> = FileKind {
    name: "quotas",
    line_hint: "a line is NAMESPACE KEY=VALUE…, keys bytes, checkpoints, sessions, reservations and priority; the namespace * is for all without a line",
    missing_hint: "docs/security.md, \"Quotas\", has an example",
    parse,
    unusable: Unusable::Keep,
};

/// Quotas of a node: those of its file, and those of the policies of retention. The lower one counts.
#[derive(Debug, Default)]
pub struct Quotas {
    file: Option<PrivateFile<Table>>,
    /// Limits of bytes and checkpoints that policies of retention refuse dumps by.
    policies: RwLock<BTreeMap<String, Quota>>,
}

impl Quotas {
    /// Reads the file at `path`, which is read again when it changes. While it is missing or accessible to others,
    /// the last quotas read stay in force.
    ///
    /// # Errors
    /// See [`PrivateFileError`].
    pub fn load(path: &Path) -> Result<Self, PrivateFileError> {
        PrivateFile::load(&QUOTAS, path, LOOK_EVERY).map(|file| Self {
            file: Some(file),
            ..Self::default()
        })
    }

    /// Sets the limits of namespaces that come from policies of retention.
    pub fn set_policies(&self, limits: BTreeMap<String, Quota>) {
        *self.policies.write() = limits;
    }

    /// Returns true if there is a file, or a policy limits a namespace.
    #[must_use]
    pub fn are_set(&self) -> bool {
        self.file.is_some() || !self.policies.read().is_empty()
    }

    /// Returns the limits of a namespace.
    #[must_use]
    pub fn of(&self, namespace: &str) -> Quota {
        let file = self.file.as_ref();
        let mut quota = file.map_or_else(Quota::default, |file| file.contents().of(namespace));
        if let Some(policy) = self.policies.read().get(namespace) {
            let lower = |own: Option<u64>, other: Option<u64>| match (own, other) {
                (Some(own), Some(other)) => Some(own.min(other)),
                (own, other) => own.or(other),
            };
            quota.bytes = lower(quota.bytes, policy.bytes);
            quota.checkpoints = lower(quota.checkpoints, policy.checkpoints);
        }
        quota
    }

    /// Returns the namespaces that have a line of their own, or a policy that limits them.
    #[must_use]
    pub fn namespaces(&self) -> Vec<String> {
        let mut all: Vec<String> = self.policies.read().keys().cloned().collect();
        if let Some(file) = &self.file {
            let table = file.contents();
            let named = table.0.keys().filter(|name| *name != ALL_NAMESPACES);
            all.extend(named.cloned());
        }
        all
    }
}

fn parse(text: &str) -> Result<Table, (usize, String)> {
    let mut table = Table::default();
    for (number, line) in lines(text) {
        let (namespace, line) = parse_line(line).map_err(|what| (number, what))?;
        if table.0.insert(namespace.clone(), line).is_some() {
            return Err((number, format!("{namespace} has two lines")));
        }
    }
    Ok(table)
}

fn parse_line(line: &str) -> Result<(String, Line), String> {
    let mut words = line.split_whitespace();
    let namespace = words.next().unwrap_or_default();
    Namespaces::new([namespace]).map_err(|error| error.to_string())?;
    let mut parsed = Line::default();
    for word in words {
        let (key, value) = word
            .split_once('=')
            .ok_or_else(|| format!("{word:?} is not KEY=VALUE"))?;
        let key = KEYS
            .into_iter()
            .find(|known| *known == key)
            .ok_or_else(|| format!("there is no quota {key:?}"))?;
        let limit = match value {
            "unlimited" => None,
            _ => Some(parse_limit(key, value)?),
        };
        if parsed.limits.insert(key, limit).is_some() {
            return Err(format!("{key} stands there twice"));
        }
    }
    Ok((namespace.to_owned(), parsed))
}

fn parse_limit(key: &str, value: &str) -> Result<u64, String> {
    if key == "bytes" {
        return parse_size(value);
    }
    let number: u64 = value
        .parse()
        .map_err(|_| format!("{key}={value} is no number"))?;
    if key == "priority" && number > MAX_PRIORITY {
        return Err(format!("the highest priority is {MAX_PRIORITY}"));
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::{ErrorCode, ReportedError};

    use super::*;

    const FILE: &str = "# tenants\n\n* bytes=1G checkpoints=3 sessions=1 priority=5\nteam-a bytes=2K sessions=unlimited\n";

    #[test]
    fn a_line_says_its_limits_and_the_default_line_the_others() {
        let table = parse(FILE).unwrap();
        assert_eq!(
            table.of("team-a"),
            Quota {
                bytes: Some(2048),
                checkpoints: Some(3),
                sessions: None,
                reservations: None,
                priority: Some(5),
            }
        );
        assert_eq!(table.of("team-b").bytes, Some(1 << 30));
        assert_eq!(parse("").unwrap().of("team-b"), Quota::default());
        assert_eq!(Quotas::default().of("team-a"), Quota::default());
    }

    #[test]
    fn the_lower_limit_of_file_and_policy_counts() {
        let quotas = Quotas::default();
        assert!(!quotas.are_set());
        let policy = |bytes| Quota {
            bytes: Some(bytes),
            ..Quota::default()
        };
        quotas.set_policies([("a".to_owned(), policy(7))].into());
        assert!(quotas.are_set());
        assert_eq!(
            (quotas.of("a"), quotas.of("b")),
            (policy(7), Quota::default())
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "* bytes=5 sessions=1\na bytes=9\n").unwrap();
        let quotas = Quotas::load(file.path()).unwrap();
        quotas.set_policies([("a".to_owned(), policy(7)), ("b".to_owned(), policy(7))].into());
        assert_eq!(quotas.of("a").bytes, Some(7));
        assert_eq!(quotas.of("b").bytes, Some(5));
        assert_eq!(quotas.of("a").sessions, Some(1));
    }

    #[test]
    fn a_line_without_sense_is_named() {
        for (bad, word) in [
            ("a/b bytes=1G", "no namespace"),
            ("a bytes", "KEY=VALUE"),
            ("a byte=1", "no quota"),
            ("a bytes=much", "no unit"),
            ("a sessions=-1", "no number"),
            ("a priority=12", "highest priority"),
            ("a bytes=1 bytes=2", "twice"),
            ("b\nb", "two lines"),
        ] {
            let (_, what) = parse(&format!("ok bytes=1\n{bad}\n")).unwrap_err();
            assert!(what.contains(word), "{bad}: {what}");
        }
    }

    #[test]
    fn a_limit_may_be_reached_and_not_exceeded() {
        let quota = parse(FILE).unwrap().of("team-a");
        let used = QuotaUsage {
            bytes: 2000,
            checkpoints: 2,
            ..QuotaUsage::default()
        };
        let more = |bytes, checkpoints| QuotaUsage {
            bytes,
            checkpoints,
            ..QuotaUsage::default()
        };
        quota.check("team-a", &used, &more(48, 1)).unwrap();
        let refused = quota.check("team-a", &used, &more(49, 1)).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::NoSpace);
        assert!(quota.check("team-a", &used, &more(0, 2)).is_err());
        // Over the limit since it was lowered: requests that need no more are allowed.
        let over = QuotaUsage {
            bytes: 5000,
            ..used
        };
        quota.check("team-a", &over, &more(0, 1)).unwrap();
        quota.check_priority("team-a", 5).unwrap();
        let refused = quota.check_priority("team-a", 6).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Denied);
    }
}
