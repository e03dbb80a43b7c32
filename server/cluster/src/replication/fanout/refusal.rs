//! Refusals of dumps before anything is frozen.

use crate::LiveNode;
use crate::error::TooFewNodes;

/// Returns the refusal of a dump that cannot become durable on the required number of nodes.
pub(super) fn too_few_nodes(
    needed: usize,
    counting: usize,
    live: &[LiveNode],
    failures: Vec<String>,
) -> TooFewNodes {
    let is_volatile = |node: &&LiveNode| node.facts.volatile && !node.facts.counts();
    let volatile = live.iter().filter(is_volatile);
    TooFewNodes {
        needed,
        counting,
        alive: live.len(),
        volatile: volatile.map(|node| node.facts.name.clone()).collect(),
        failures,
    }
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::ReportedError;

    use super::*;
    use crate::{MemberState, NodeFacts};

    #[test]
    fn a_refusal_for_volatile_media_says_whose_and_what_to_do() {
        let node = |name: &str, volatile| LiveNode {
            facts: NodeFacts {
                name: name.to_owned(),
                volatile,
                ..NodeFacts::default()
            },
            state: MemberState::Active,
            token: 1,
        };
        let refused = too_few_nodes(1, 0, &[node("a", true), node("b", true)], Vec::new());
        assert!(
            refused.to_string().contains("copies on a, b do not count"),
            "{refused}"
        );
        assert!(refused.hint().contains("--count-volatile-copies"));
        let refused = too_few_nodes(1, 0, &[node("a", false)], vec!["a".to_owned()]);
        let text = refused.to_string();
        assert!(text.ends_with("(1 nodes are alive; failed: a)"), "{text}");
        assert!(!refused.hint().contains("volatile"));
    }
}
