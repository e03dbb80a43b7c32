//! Refusals of dumps before anything is frozen.

use permafrost_store::StoreError;

use crate::LiveNode;

/// Returns the refusal of a dump that cannot become durable on the required number of nodes.
pub(super) fn too_few_nodes(
    needed: usize,
    counting: usize,
    live: &[LiveNode],
    failed: &str,
) -> StoreError {
    let is_volatile = |node: &&LiveNode| node.facts.volatile && !node.facts.counts();
    let volatile: Vec<&str> = live
        .iter()
        .filter(is_volatile)
        .map(|node| node.facts.name.as_str())
        .collect();
    let (media, hint) = if volatile.is_empty() {
        (
            String::new(),
            "see `permafrost node ls`; or dump with --durability local",
        )
    } else {
        (
            format!(
                "; copies on {} do not count, as their media do not outlast a power failure",
                volatile.join(", ")
            ),
            "put their regions on a medium that lasts, or start them with --count-volatile-copies; or dump with --durability local",
        )
    };
    let alive = live.len();
    StoreError::Unavailable {
        message: format!(
            "{needed} more nodes must keep a copy, and {counting} can ({alive} nodes are alive{media}{failed})"
        ),
        hint,
    }
}

#[cfg(test)]
mod tests {
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
        let refused = too_few_nodes(1, 0, &[node("a", true), node("b", true)], "");
        assert!(
            refused.to_string().contains("copies on a, b do not count"),
            "{refused}"
        );
        assert!(refused.hint().contains("--count-volatile-copies"));
        let refused = too_few_nodes(1, 0, &[node("a", false)], "; failed: a");
        let text = refused.to_string();
        assert!(text.ends_with("(1 nodes are alive; failed: a)"), "{text}");
        assert!(!refused.hint().contains("volatile"));
    }
}
