//! `permafrost restore --trust`: the origins whose checkpoints may be restored. A restored process runs with
//! the rights that its image specifies, so the taker of the dump decides what runs.

use std::str::FromStr;

use crate::failure::{Code, Failure};
use permafrost_protocol::control::Detail;
use permafrost_protocol::manifest::{TakenBy, namespace_of};

/// A kind of trusted origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rule {
    /// `any`: every checkpoint that this user may read.
    Any,
    /// `node`: dumps and imports of root or the daemon's user on a storage node.
    Node,
    /// `agent:NAME`: dumps of that agent.
    Agent(String),
    /// `uid:UID`: dumps of that user of a storage node.
    User(u32),
    /// `namespace:NAME`: every job of that namespace.
    Namespace(String),
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown =
            || format!("{text:?} is not one of any, node, agent:NAME, uid:UID and namespace:NAME");
        match text.split_once(':') {
            None if text == "any" => Ok(Self::Any),
            None if text == "node" => Ok(Self::Node),
            Some(("agent", name)) if !name.is_empty() => Ok(Self::Agent(name.to_owned())),
            Some(("uid", uid)) => Ok(Self::User(uid.parse().map_err(|_| unknown())?)),
            Some(("namespace", name)) if !name.is_empty() => Ok(Self::Namespace(name.to_owned())),
            _ => Err(unknown()),
        }
    }
}

impl Rule {
    fn trusts(&self, taken_by: &TakenBy, job: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Node => matches!(taken_by, TakenBy::Node(_)),
            Self::Agent(name) => matches!(taken_by, TakenBy::Agent(agent) if agent == name),
            Self::User(uid) => matches!(taken_by, TakenBy::User(user) if user == uid),
            Self::Namespace(name) => namespace_of(job).is_ok_and(|namespace| namespace == name),
        }
    }
}

/// Checks that the rules trust the taker of the dump. Without rules a storage node trusts the nodes, and an
/// agent trusts everything that its certificate lets it read.
///
/// # Errors
/// The rules do not trust the taker.
pub fn check(rules: &[Rule], name: &str, detail: &Detail) -> Result<(), Failure> {
    let default = if detail.agent.is_empty() {
        Rule::Node
    } else {
        Rule::Any
    };
    let rules = if rules.is_empty() {
        std::slice::from_ref(&default)
    } else {
        rules
    };
    let recorded = detail.manifest.as_ref();
    let taken_by = TakenBy::parse(recorded.map_or("", |manifest| &manifest.taken_by));
    let job = detail
        .checkpoint
        .as_ref()
        .map_or("", |checkpoint| &checkpoint.job);
    if rules.iter().any(|rule| rule.trusts(&taken_by, job)) {
        return Ok(());
    }
    let wanted = match &taken_by {
        TakenBy::Agent(agent) => format!("agent:{agent}"),
        TakenBy::Node(_) => "node".to_owned(),
        TakenBy::User(uid) => format!("uid:{uid}"),
        TakenBy::Other(_) => "any".to_owned(),
    };
    Err(Failure::new(
        Code::Denied,
        format!("{name} was dumped by {taken_by}, which is not trusted here: a restore runs what its dump contains"),
    )
    .hint(format!(
        "restore it on a compute node, or, if you trust who dumped it, with --trust {wanted} (PERMAFROST_TRUST sets it for all)"
    )))
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::Checkpoint;
    use permafrost_protocol::manifest::Manifest;

    use super::*;

    fn detail(taken_by: &str, through_agent: &str) -> Detail {
        Detail {
            checkpoint: Some(Checkpoint {
                job: "team/train".into(),
                ..Checkpoint::default()
            }),
            manifest: Some(Manifest {
                taken_by: taken_by.into(),
                ..Manifest::default()
            }),
            agent: through_agent.into(),
            ..Detail::default()
        }
    }

    #[test]
    fn a_storage_node_trusts_nodes_and_asks_before_it_runs_what_agents_dumped() {
        for node in ["node", "node n1"] {
            assert!(check(&[], "train@1", &detail(node, "")).is_ok(), "{node}");
        }
        for (client, rule) in [
            ("agent c7", "agent:c7"),
            ("uid 1000", "uid:1000"),
            ("", "any"),
            ("operator x", "any"),
        ] {
            let refused = check(&[], "train@1", &detail(client, "")).unwrap_err();
            assert_eq!(refused.code, Code::Denied);
            assert!(
                refused.hint.contains(&format!("--trust {rule}")),
                "{refused:?}"
            );
            let rule = rule.parse().unwrap();
            assert!(check(&[rule], "train@1", &detail(client, "")).is_ok());
        }
    }

    #[test]
    fn an_agent_trusts_what_its_certificate_lets_it_read_unless_rules_say_less() {
        let shown = detail("agent c7", "c8");
        assert!(check(&[], "train@1", &shown).is_ok());
        for (rule, trusted) in [
            ("agent:c7", true),
            ("agent:c8", false),
            ("node", false),
            ("namespace:team", true),
            ("namespace:default", false),
            ("any", true),
        ] {
            let rule = rule.parse().unwrap();
            assert_eq!(
                check(std::slice::from_ref(&rule), "train@1", &shown).is_ok(),
                trusted,
                "{rule:?}"
            );
        }
        assert!("agent:".parse::<Rule>().is_err());
        assert!("uid:root".parse::<Rule>().is_err());
        assert!("everyone".parse::<Rule>().is_err());
    }
}
