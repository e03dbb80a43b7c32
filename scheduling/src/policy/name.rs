//! Names of the policies.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::asked::ChooseVictims;
use super::base::{Base, Order};
use super::pado::Pado;
use super::priority::ByPriority;
use super::reclaim::{JobRule, Reclaim, TaskRule};
use super::resume::Resume;
use super::shrink::{NOT_RESERVED, Shrink};
use super::suspend::Suspend;
use super::victims::Victims;
use super::{Composed, Never, Policy, Preempt};
use crate::bigc::{DELAYED_RESUMPTION, GRACEFUL_STEP};
use crate::cost::TaskResources;
use crate::preempt::Terms;
use crate::quantity::{Ratio, Seconds};
use crate::resume::Preference;

/// Name of a policy. Written and read as in [`Name::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(&'static str);

impl Name {
    /// All policies, by their full names.
    pub const ALL: &'static [Self] = &[
        Self("wait"),
        Self("kill"),
        Self("basic+local"),
        Self("basic+remote"),
        Self("basic+cheaper"),
        Self("li2015+local"),
        Self("li2015+remote"),
        Self("li2015+cheaper"),
        Self("adaptive+local"),
        Self("adaptive+remote"),
        Self("adaptive+cheaper"),
        Self("mr+srt"),
        Self("mr+lrt"),
        Self("mr+random"),
        Self("lr+srt"),
        Self("lr+lrt"),
        Self("lr+random"),
        Self("pr+srt"),
        Self("pr+lrt"),
        Self("pr+random"),
        Self("mdf+edf"),
        Self("mlf+llf"),
        Self("suspend"),
        Self("ip"),
        Self("gp"),
        Self("reserve"),
        Self("pado"),
    ];

    /// Returns the name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.0
    }

    /// Returns the kind of node on which the policy restores what it has stored; none for one that does not choose by
    /// where a checkpoint is and what a restore costs.
    #[must_use]
    pub fn preference(self) -> Option<Preference> {
        match self.0.split_once('+')?.1 {
            "local" => Some(Preference::Local),
            "remote" => Some(Preference::Remote),
            "cheaper" => Some(Preference::None),
            _ => None,
        }
    }
}

/// Shorter names, and the full ones that they stand for.
const SHORT: [(&str, &str); 11] = [
    ("basic", "basic+cheaper"),
    ("li2015", "li2015+cheaper"),
    ("adaptive", "adaptive+cheaper"),
    ("local", "adaptive+local"),
    ("remote", "adaptive+remote"),
    ("cheaper", "adaptive+cheaper"),
    ("mr", "mr+srt"),
    ("lr", "lr+srt"),
    ("pr", "pr+srt"),
    ("mdf", "mdf+edf"),
    ("mlf", "mlf+llf"),
];

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0.to_owned()
    }
}

impl TryFrom<String> for Name {
    type Error = UnknownPolicy;

    fn try_from(name: String) -> Result<Self, UnknownPolicy> {
        name.parse()
    }
}

impl FromStr for Name {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let short = SHORT.iter().find(|(short, _)| *short == name);
        let full = short.map_or(name, |(_, full)| full);
        let found = Self::ALL.iter().find(|known| known.0 == full);
        found.copied().ok_or_else(|| UnknownPolicy {
            name: name.to_owned(),
            why: why_not(name),
        })
    }
}

/// Returns why a pair of known names is no policy.
fn why_not(name: &str) -> &'static str {
    match name.split_once('+') {
        Some(("mdf" | "mlf", "edf" | "llf")) => {
            ": what evicts by deadlines must resume by deadlines, and by laxity what evicts by laxity, else they undo \
             each other's decisions"
        }
        Some(("wait" | "kill", "local" | "remote" | "cheaper")) => {
            ": it stores nothing that could be resumed"
        }
        _ => "",
    }
}

/// Error of a name that no policy has.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("there is no policy {name:?}{why}; there are {}", all())]
pub struct UnknownPolicy {
    /// The name that was given.
    pub name: String,
    why: &'static str,
}

fn all() -> String {
    let short = SHORT.iter().map(|(short, _)| *short);
    let full = Name::ALL.iter().map(|name| name.0);
    let mut all: Vec<&str> = full.chain(short).collect();
    all.sort_unstable();
    all.join(", ")
}

/// Parameters that a policy is built with, besides its name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicySettings {
    /// Seed of what is drawn. The same events with the same seed lead to the same decisions.
    pub seed: u64,
    /// Terms by which `adaptive` compares mechanisms.
    pub terms: Terms,
    /// True if an index of what can be preempted is kept between decisions. Without it, each preemption visits all
    /// nodes; the decisions are the same. Default: true.
    pub index: bool,
    /// Time between the heartbeats of a node: `suspend`'s commands go with them. Default: Hadoop's 3 s.
    pub heartbeat: Seconds,
    /// Work below which `suspend` kills a task (001, §V: "freshly started"). Default: 6 s, two heartbeats.
    pub fresh: Seconds,
    /// Work left below which `suspend` waits for a task (001, §V: "very close to completion"). Default: 6 s.
    pub nearly_done: Seconds,
    /// Time that a task suspended in memory declines other nodes before it begins again on one (001, §V: "a fixed
    /// amount of time"). Default: 15 s, which the paper that it cites for that uses.
    pub patience: Seconds,
    /// Times that a container under `ip` or `gp` asks in vain to get back what was taken (004, §4.3). Default: 3.
    pub resumption_delay: u32,
    /// Resources that `gp` takes of a container at once (004, §5.3). Default: 2 processors, 4 GB.
    pub graceful_step: TaskResources,
}

impl Default for PolicySettings {
    fn default() -> Self {
        Self {
            seed: 0,
            terms: Terms::default(),
            index: true,
            heartbeat: Seconds::from_millis(3000),
            fresh: Seconds::from_millis(6000),
            nearly_done: Seconds::from_millis(6000),
            patience: Seconds::from_millis(15_000),
            resumption_delay: DELAYED_RESUMPTION,
            graceful_step: GRACEFUL_STEP,
        }
    }
}

impl Name {
    /// Builds the policy.
    #[must_use]
    pub fn build(self, settings: &PolicySettings) -> Box<dyn Policy> {
        self.built(settings, None)
    }

    pub(super) fn built(
        self,
        settings: &PolicySettings,
        other: Option<Box<dyn ChooseVictims>>,
    ) -> Box<dyn Policy> {
        if self.0 == "pado" {
            return Box::new(Pado::default());
        }
        let (first, second) = self.0.split_once('+').unwrap_or((self.0, ""));
        let resume = match second {
            "local" => Resume::Local,
            "remote" => Resume::Remote,
            _ => Resume::Cheaper,
        };
        if let Some(preempt) = reclaim(first, second, settings.seed) {
            let order = match second {
                "edf" => Order::deadline(),
                "llf" => Order::laxity(),
                _ => Order::Priority,
            };
            let base = Base::new(order, Resume::HostRackAny);
            return Box::new(Composed::new(self.0, base, Box::new(preempt)));
        }
        let by_priority = |victims| ByPriority::new(victims, settings.index).asking(other);
        let preempt: Box<dyn Preempt> = match first {
            "kill" => Box::new(by_priority(Victims::Kill)),
            "basic" => Box::new(by_priority(Victims::Basic)),
            "li2015" => Box::new(by_priority(Victims::Li2015)),
            "adaptive" => Box::new(by_priority(Victims::Adaptive(settings.terms))),
            "suspend" => {
                let victims = Victims::InMemory {
                    fresh: settings.fresh,
                    nearly_done: settings.nearly_done,
                };
                let (heartbeat, patience) = (settings.heartbeat, settings.patience);
                Box::new(Suspend::new(victims, settings.index, heartbeat, patience))
            }
            "ip" => Box::new(Shrink::new(None, settings.resumption_delay)),
            "gp" => {
                let step = Some(settings.graceful_step);
                Box::new(Shrink::new(step, settings.resumption_delay))
            }
            _ => Box::new(Never),
        };
        let base = match first {
            "reserve" => Base::new(Order::Priority, resume).limited(Ratio::clamped(NOT_RESERVED)),
            _ => Base::new(Order::Priority, resume),
        };
        Box::new(Composed::new(self.0, base, preempt))
    }
}

/// Builds one of paper 002's.
fn reclaim(first: &str, second: &str, seed: u64) -> Option<Reclaim> {
    let job = match first {
        "mr" => JobRule::Most,
        "lr" => JobRule::Least,
        "pr" => JobRule::Proportional,
        "mdf" => JobRule::LatestDeadline,
        "mlf" => JobRule::GreatestLaxity,
        _ => return None,
    };
    let task = match second {
        "lrt" => TaskRule::Longest,
        "random" => TaskRule::Random,
        _ => TaskRule::Shortest,
    };
    Some(Reclaim::new(job, task, seed))
}

/// Builds what no name builds, eviction by deadline with resumption by laxity, to show why: it evicts what it has just
/// resumed (002, §4).
#[must_use]
pub fn mismatched_deadlines(settings: &PolicySettings) -> Box<dyn Policy> {
    let preempt = Reclaim::new(JobRule::LatestDeadline, TaskRule::Shortest, settings.seed);
    let base = Base::new(Order::laxity(), Resume::HostRackAny);
    Box::new(Composed::new("mdf+llf", base, Box::new(preempt)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_as_it_is_written_and_builds_its_policy() {
        for name in Name::ALL {
            assert_eq!(name.to_string().parse(), Ok(*name));
            assert_eq!(name.build(&PolicySettings::default()).name(), name.as_str());
        }
        for (short, full) in SHORT {
            assert_eq!(short.parse::<Name>().unwrap().as_str(), full);
        }
    }

    #[test]
    fn policies_that_store_have_a_preference_of_nodes() {
        let preference = |name: &str| name.parse::<Name>().unwrap().preference();
        assert_eq!(preference("local"), Some(Preference::Local));
        assert_eq!(preference("basic+remote"), Some(Preference::Remote));
        assert_eq!(preference("li2015"), Some(Preference::None));
        assert_eq!(preference("kill"), None);
        assert_eq!(preference("mr+srt"), None);
    }

    #[test]
    fn unknown_names_and_pairs_that_cannot_be_are_refused_with_what_there_is() {
        let refused = |name: &str| name.parse::<Name>().unwrap_err().to_string();
        assert!(
            refused("fifo")
                .starts_with("there is no policy \"fifo\"; there are adaptive, adaptive+cheaper")
        );
        assert!(refused("mdf+llf").contains("undo"));
        assert!(refused("kill+local").contains("stores nothing"));
    }
}
