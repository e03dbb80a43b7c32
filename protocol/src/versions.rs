//! Versions of interfaces between neighbouring releases: what this build speaks, and what two ends have in common.
//!
//! A release raises the newest version of an interface when it changes its meaning, and the oldest one release later, so
//! that each release speaks with the one before it and the one after it (docs/upgrading.md).

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use prost::Message;
use serde::{Deserialize, Serialize};

/// Environment variable that limits what a program speaks, such as `wire=1,registry=1`: for tests of neighbours.
pub const SPEAK: &str = "PERMAFROST_SPEAK";

/// Release that this build is.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Interface whose version two processes agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Interface {
    /// Messages and frames between nodes, and between an agent and a node ([`crate::wire`]).
    Wire,
    /// Requests of `permafrost` to a daemon ([`crate::control`]).
    Control,
    /// Values in etcd that all nodes of a cluster read and change.
    Registry,
}

impl Interface {
    /// All interfaces, in the order in which they are shown.
    pub const ALL: [Self; 3] = [Self::Wire, Self::Control, Self::Registry];

    /// Returns the word for the interface in [`SPEAK`], in JSON and in messages.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Wire => "wire",
            Self::Control => "control",
            Self::Registry => "registry",
        }
    }

    /// Returns the versions that this build speaks.
    pub const fn built(self) -> VersionRange {
        let (Self::Wire | Self::Control | Self::Registry) = self;
        VersionRange {
            oldest: 1,
            newest: 2,
        }
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.word())
    }
}

/// Versions of one interface that a build speaks, from the oldest to the newest.
#[derive(Clone, Copy, PartialEq, Eq, Message, Serialize, Deserialize)]
pub struct VersionRange {
    /// Oldest version, at least 1.
    #[prost(uint32, tag = "1")]
    pub oldest: u32,
    /// Newest version, at most 65535.
    #[prost(uint32, tag = "2")]
    pub newest: u32,
}

impl VersionRange {
    /// Versions of a build that does not name them: one from before this message was made.
    pub const UNSAID: Self = Self {
        oldest: 1,
        newest: 1,
    };

    /// Returns a range that can be: of at least one version, the first of them 1.
    ///
    /// # Errors
    /// The range is empty, reversed, or has versions that cannot be.
    pub fn check(self) -> Result<Self, VersionsError> {
        if self.oldest == 0 || self.oldest > self.newest || self.newest > u32::from(u16::MAX) {
            return Err(VersionsError::BadRange(self));
        }
        Ok(self)
    }

    /// Returns true if the version is spoken.
    pub const fn contains(self, version: u32) -> bool {
        self.oldest <= version && version <= self.newest
    }

    /// Returns the newest version that both speak.
    pub fn common(self, other: Self) -> Option<u32> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oldest == self.newest {
            return write!(out, "{}", self.newest);
        }
        write!(out, "{} to {}", self.oldest, self.newest)
    }
}

/// Release of a process, and the versions that it speaks; 1 of an interface that its build did not name.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct SpokenVersions {
    /// Release of its software.
    #[prost(string, tag = "1")]
    pub release: String,
    /// Versions of the wire.
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wire: Option<VersionRange>,
    /// Versions of the control protocol.
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<VersionRange>,
    /// Versions of the values in the registry.
    #[prost(message, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registry: Option<VersionRange>,
}

impl SpokenVersions {
    /// Returns all that this build speaks.
    pub fn built() -> Self {
        Self {
            release: RELEASE.to_owned(),
            wire: Some(Interface::Wire.built()),
            control: Some(Interface::Control.built()),
            registry: Some(Interface::Registry.built()),
        }
    }

    /// Returns the versions of one interface.
    pub fn of(&self, interface: Interface) -> VersionRange {
        let said = match interface {
            Interface::Wire => self.wire,
            Interface::Control => self.control,
            Interface::Registry => self.registry,
        };
        said.unwrap_or(VersionRange::UNSAID)
    }

    /// Checks every range that is there.
    ///
    /// # Errors
    /// A range is empty, reversed, or has versions that cannot be.
    pub fn check(&self) -> Result<(), VersionsError> {
        for interface in Interface::ALL {
            self.of(interface).check()?;
        }
        Ok(())
    }

    /// Returns the newest version of an interface that two ends both speak, each given with its name.
    ///
    /// # Errors
    /// There is none: the error names both, and who has to be upgraded.
    pub fn common(
        interface: Interface,
        one: (&str, &Self),
        other: (&str, &Self),
    ) -> Result<u32, VersionsError> {
        let (first, second) = (one.1.of(interface), other.1.of(interface));
        first.common(second).ok_or_else(|| {
            let [one, other] = [one, other].map(|(name, spoken)| Speaker {
                name: name.to_owned(),
                release: spoken.release.chars().take(32).collect(),
                range: spoken.of(interface),
            });
            VersionsError::NothingInCommon(Box::new(Strangers {
                interface,
                one,
                other,
            }))
        })
    }
}

impl FromStr for SpokenVersions {
    type Err = VersionsError;

    // A limit: `wire=1,control=1-2`. Interfaces that are not named are not limited.
    fn from_str(text: &str) -> Result<Self, VersionsError> {
        let bad = || VersionsError::BadLimit {
            text: text.chars().take(64).collect(),
        };
        let mut limited = Self::built();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (word, versions) = part.split_once('=').ok_or_else(bad)?;
            let (oldest, newest) = versions.split_once('-').unwrap_or((versions, versions));
            let range = VersionRange {
                oldest: oldest.parse().map_err(|_| bad())?,
                newest: newest.parse().map_err(|_| bad())?,
            };
            let interface = Interface::ALL
                .into_iter()
                .find(|interface| interface.word() == word)
                .ok_or_else(bad)?;
            let built = interface.built();
            let newest = range.check()?.common(built).ok_or_else(bad)?;
            let oldest = range.oldest.max(built.oldest);
            *match interface {
                Interface::Wire => &mut limited.wire,
                Interface::Control => &mut limited.control,
                Interface::Registry => &mut limited.registry,
            } = Some(VersionRange { oldest, newest });
        }
        Ok(limited)
    }
}

/// Versions that are not spoken, or make no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VersionsError {
    /// A range of versions that cannot be.
    #[error("versions {} to {} are no range: it begins at 1 or later and ends at 65535 or earlier", .0.oldest, .0.newest)]
    BadRange(VersionRange),
    /// The value of [`SPEAK`] cannot be read, or leaves nothing that this build speaks.
    #[error(
        "{SPEAK}={text:?}: expected INTERFACE=VERSION or INTERFACE=OLDEST-NEWEST, separated by commas; interfaces are wire, control and registry"
    )]
    BadLimit {
        /// First characters of the value.
        text: String,
    },
    /// Two ends have no version in common.
    #[error(transparent)]
    NothingInCommon(Box<Strangers>),
}

/// Two ends that have no version of an interface in common.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no common version of {interface}: {one}, {other}; upgrade {}, one release at a time (docs/upgrading.md)", self.older())]
pub struct Strangers {
    interface: Interface,
    one: Speaker,
    other: Speaker,
}

impl Strangers {
    /// Returns the name of the end that must be upgraded.
    pub fn older(&self) -> &str {
        if self.one.range.newest < self.other.range.oldest {
            &self.one.name
        } else {
            &self.other.name
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Speaker {
    name: String,
    /// Empty if it did not say.
    release: String,
    range: VersionRange,
}

impl fmt::Display for Speaker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let release = match self.release.as_str() {
            "" => String::new(),
            release => format!(" (release {release})"),
        };
        write!(out, "{}{release} speaks {}", self.name, self.range)
    }
}

static OWN: OnceLock<SpokenVersions> = OnceLock::new();

/// Limits what this process speaks to what [`SPEAK`] says, if it is set, before anything is spoken.
///
/// # Errors
/// The value is no limit.
pub fn limit_by_environment() -> Result<(), VersionsError> {
    if let Some(text) = std::env::var_os(SPEAK) {
        let limited: SpokenVersions = text.to_string_lossy().parse()?;
        OWN.get_or_init(|| limited);
    }
    Ok(())
}

/// Returns what this process speaks: all that its build does, unless it was [limited](limit).
#[must_use]
pub fn own() -> &'static SpokenVersions {
    OWN.get_or_init(SpokenVersions::built)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(oldest: u32, newest: u32) -> VersionRange {
        VersionRange { oldest, newest }
    }

    #[test]
    fn the_newest_common_version_is_chosen() {
        assert_eq!(range(1, 2).common(range(1, 1)), Some(1));
        assert_eq!(range(1, 2).common(range(2, 3)), Some(2));
        assert_eq!(range(1, 4).common(range(2, 3)), Some(3));
        assert_eq!(range(1, 2).common(range(3, 4)), None);
    }

    #[test]
    fn a_limit_leaves_the_other_interfaces_alone() {
        let limited: SpokenVersions = "wire=1,registry=1".parse().unwrap();
        assert_eq!(limited.of(Interface::Wire), range(1, 1));
        assert_eq!(limited.of(Interface::Registry), range(1, 1));
        assert_eq!(limited.of(Interface::Control), Interface::Control.built());
        assert_eq!("".parse(), Ok(SpokenVersions::built()));
        let wider: SpokenVersions = "wire=1-99".parse().unwrap();
        assert_eq!(wider.of(Interface::Wire), Interface::Wire.built());
        for bad in ["wire", "wire=", "wire=x", "etcd=1", "wire=1-", "wire=-1"] {
            let refused = bad.parse::<SpokenVersions>();
            assert!(
                matches!(refused, Err(VersionsError::BadLimit { .. })),
                "{bad}"
            );
        }
        for bad in ["wire=0", "wire=2-1", "wire=1-65536"] {
            let refused = bad.parse::<SpokenVersions>();
            assert!(matches!(refused, Err(VersionsError::BadRange(_))), "{bad}");
        }
        let refused = "wire=7".parse::<SpokenVersions>().unwrap_err();
        assert!(matches!(refused, VersionsError::BadLimit { .. }));
    }

    #[test]
    fn nothing_in_common_says_who_must_be_upgraded() {
        let of = |release: &str, wire| SpokenVersions {
            release: release.to_owned(),
            wire: Some(wire),
            ..SpokenVersions::default()
        };
        let (old, new) = (of("0.1.0", range(1, 2)), of("0.4.0", range(3, 4)));
        let common = |one, other| SpokenVersions::common(Interface::Wire, one, other);
        let refused = common(("n1", &old), ("n2", &new)).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "no common version of wire: n1 (release 0.1.0) speaks 1 to 2, n2 (release 0.4.0) speaks 3 to 4; \
             upgrade n1, one release at a time (docs/upgrading.md)"
        );
        let refused = common(("n2", &new), ("n1", &old)).unwrap_err();
        assert!(refused.to_string().contains("; upgrade n1, "), "{refused}");
        // A build that does not say what it speaks, speaks version 1.
        let unsaid = SpokenVersions::default();
        assert_eq!(common(("n1", &old), ("n3", &unsaid)), Ok(1));
        let refused = common(("n2", &new), ("n3", &unsaid)).unwrap_err();
        assert!(
            refused.to_string().contains("n3 speaks 1; upgrade n3"),
            "{refused}"
        );
    }

    proptest! {
        #[test]
        fn what_two_have_in_common_both_speak(a in 0_u32..9, b in 0_u32..9, c in 0_u32..9, d in 0_u32..9) {
            let (one, other) = (range(a, b), range(c, d));
            prop_assert_eq!(one.common(other), other.common(one));
            if let (Ok(one), Ok(other)) = (one.check(), other.check()) {
                let common = one.common(other);
                let both = |version: &u32| one.contains(*version) && other.contains(*version);
                prop_assert_eq!(common, (0..9).rev().find(both));
            }
        }
    }
}
