//! Decisions of a policy, as text.

use permafrost_api_types::policy::{PolicyAction, PolicyDecision, PolicyScore, SecondChoice};
use permafrost_scheduling::policy::Name;
use permafrost_terminal::human;
use permafrost_terminal::table::{Align, Table};

use permafrost_terminal::words;

/// Returns the help of `--policy`, with the names of all policies.
pub(super) fn policy_help() -> String {
    let names: Vec<&str> = Name::ALL.iter().map(|name| name.as_str()).collect();
    format!(
        "Policy that decides what is done to whom; needs what is wanted: {} [default: adaptive]. docs/api.md says what \
         each goes by",
        names.join(", ")
    )
}

/// Formats decisions as a table, followed by their reasons.
pub(super) fn human(decisions: &[PolicyDecision<'_>]) -> String {
    let mut table = Table::new([
        ("TASK", Align::Left),
        ("NODE", Align::Left),
        ("ACTION", Align::Left),
        ("CHOSEN BY", Align::Left),
        ("COSTS", Align::Right),
        ("FREE IN", Align::Right),
        ("FREES", Align::Right),
        ("ELSE", Align::Left),
    ]);
    for decision in decisions {
        let cost = decision.cost.as_ref();
        table.row([
            decision.task.to_string(),
            decision.node.to_string(),
            action(&decision.action),
            score(decision.score),
            cost.map_or_else(String::new, |cost| words::spread(cost.overhead_s)),
            cost.map_or_else(String::new, |cost| words::spread(cost.delay_s)),
            words::resources(decision.frees.cpu_millis, decision.frees.memory_bytes),
            decision.runner_up.as_ref().map_or_else(String::new, second),
        ]);
    }
    let mut text = table.render();
    for decision in decisions {
        text.push_str(&format!("{}: {}\n", decision.task, decision.reason));
    }
    text
}

/// Formats an action: the API's name of a mechanism, `resize to 2 cpus, 1.0 GiB`, `restore from n1`.
pub(crate) fn action(action: &PolicyAction<'_>) -> String {
    match action {
        PolicyAction::Start => "start".to_owned(),
        PolicyAction::Restore(node) => format!("restore from {node}"),
        PolicyAction::Continue => "continue".to_owned(),
        PolicyAction::Preempt(mechanism) => words::name(*mechanism).to_owned(),
        PolicyAction::Resize(to) => {
            let to = words::resources(to.cpu_millis, to.memory_bytes);
            format!("resize to {to}")
        }
    }
}

/// Formats a score: `120 s lost`, `3 containers`.
fn score(score: PolicyScore) -> String {
    match score {
        PolicyScore::LostS(seconds) => format!("{} lost", human::seconds(seconds)),
        PolicyScore::LeftS(seconds) => format!("{} left", human::seconds(seconds)),
        PolicyScore::LaterS(seconds) => format!("{} later", human::seconds(seconds)),
        PolicyScore::Order(order) => format!("order {order}"),
        PolicyScore::MovedBytes(bytes) => format!("{} moved", human::bytes(bytes)),
        PolicyScore::Containers(count) => format!("{count} containers"),
    }
}

/// Formats the second best decision: `4711 kill, 12.0 s lost`.
fn second(next: &SecondChoice<'_>) -> String {
    format!(
        "{} {}, {}",
        next.task,
        action(&next.action),
        score(next.score)
    )
}

#[cfg(test)]
mod tests {
    use permafrost_api_types::cost::Mechanism;
    use permafrost_api_types::preempt::Total;

    use super::*;

    fn decision(action: PolicyAction<'static>, score: PolicyScore) -> PolicyDecision<'static> {
        PolicyDecision {
            task: "4242".into(),
            action,
            node: "n1".into(),
            score,
            runner_up: None,
            reason: "its job has most containers".to_owned(),
            frees: Total {
                cpu_millis: 500,
                memory_bytes: 1 << 30,
            },
            cost: None,
        }
    }

    fn line(decision: PolicyDecision<'_>) -> String {
        let text = human(&[decision]);
        let line = text.lines().find(|line| line.starts_with("4242 ")).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_decision_is_a_line_with_its_runner_up() {
        let mut one = decision(
            PolicyAction::Preempt(Mechanism::Kill),
            PolicyScore::Containers(3),
        );
        one.runner_up = Some(SecondChoice {
            task: "7".into(),
            action: PolicyAction::Preempt(Mechanism::FullDump),
            score: PolicyScore::Containers(2),
        });
        assert!(human(&[one.clone()]).ends_with("4242: its job has most containers\n"));
        assert_eq!(
            line(one),
            "4242 n1 kill 3 containers 0.5 cpus, 1.0 GiB 7 full_dump, 2 containers"
        );
        let to = Total {
            cpu_millis: 2_000,
            memory_bytes: 4 << 30,
        };
        let resized = decision(PolicyAction::Resize(to), PolicyScore::LeftS(5.0));
        assert_eq!(
            line(resized),
            "4242 n1 resize to 2 cpus, 4.0 GiB 5.00 s left 0.5 cpus, 1.0 GiB"
        );
    }

    #[test]
    fn the_help_names_all_policies() {
        let help = policy_help();
        for name in Name::ALL {
            assert!(help.contains(name.as_str()), "{name}");
        }
    }
}
