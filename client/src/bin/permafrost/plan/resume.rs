//! `permafrost plan resume`: ranks nodes for the restore of checkpoints.

use clap::{Args, ValueEnum};
use permafrost_api_types::resume::{Preference, Ranked, Resume, ResumeAnswer, Resumption};
use permafrost_scheduling::policy::Name;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::table::{Align, Table};

use crate::api::{self, ApiArguments};
use crate::nodes::as_of;
use permafrost_terminal::words;

pub(super) const EXAMPLES: &str = "\
The best node of each checkpoint comes first. With --node those nodes are ranked; without, those that hold a copy, and \
the quickest of the others.

Exit codes: 0 when each can be resumed somewhere, 3 when one has no checkpoint (start its task anew), 11 when too \
little is known of the nodes of one.

Examples:
    permafrost plan resume train
    permafrost plan resume train@3 build --node n1 --node n2 --prefer local
    permafrost plan resume train --policy basic+remote
";

/// Preferred kind of node for the restore of a task.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Prefer {
    /// Where its checkpoint lies
    Local,
    /// Elsewhere
    Remote,
}

#[derive(Debug, Args)]
pub(super) struct ResumeArguments {
    /// JOB or JOB@GEN.
    #[arg(value_name = "JOB[@GEN]", required = true)]
    checkpoints: Vec<String>,
    /// A node that has room for it. Repeatable.
    #[arg(long = "node", value_name = "NODE")]
    nodes: Vec<String>,
    /// What goes before all costs [default: nothing].
    #[arg(long, value_enum)]
    prefer: Option<Prefer>,
    /// Policy that restores what it has stored, such as `local`, `remote` or `cheaper`: its preference counts.
    #[arg(long, value_name = "POLICY", conflicts_with = "prefer")]
    policy: Option<Name>,
    #[command(flatten)]
    api: ApiArguments,
}

pub(super) fn resume(context: &Context, arguments: &ResumeArguments) -> Result<(), Failure> {
    let client = arguments.api.client(context)?;
    let texts = |list: &[String]| list.iter().cloned().map(Into::into).collect();
    let answer = client.post(
        "/v1/resume",
        &Resume {
            checkpoints: texts(&arguments.checkpoints),
            nodes: (!arguments.nodes.is_empty()).then(|| texts(&arguments.nodes)),
            preference: match arguments.prefer {
                None => Preference::None,
                Some(Prefer::Local) => Preference::Local,
                Some(Prefer::Remote) => Preference::Remote,
            },
            policy: arguments.policy.map(|policy| policy.as_str().into()),
            ..Resume::default()
        },
    )?;
    let plan: ResumeAnswer<'_> = answer.read()?;
    api::print(context, &answer, || human_plan(&plan))?;
    judge(&plan)
}

/// Returns the failure for the exit code, if a checkpoint cannot be resumed or has no node.
fn judge(plan: &ResumeAnswer<'_>) -> Result<(), Failure> {
    let mut nowhere = None;
    for answer in &plan.answers {
        match answer {
            Resumption::Restart(restart) => {
                let message = format!("{} cannot be resumed: {}", restart.checkpoint, restart.why);
                return Err(Failure::new(Code::NotFound, message).hint("start its task anew"));
            }
            Resumption::Ranked(ranked) if ranked.nodes.is_empty() => {
                nowhere = nowhere.or(Some(ranked));
            }
            Resumption::Ranked(_) => {}
        }
    }
    let Some(ranked) = nowhere else {
        return Ok(());
    };
    let why = ranked.unknown.first();
    let why = why.map_or_else(
        || "no node was named".to_owned(),
        |one| format!("{}: {}", one.node, one.why),
    );
    let message = format!("no node is known to resume {} on: {why}", ranked.checkpoint);
    Err(Failure::new(Code::Unavailable, message))
}

fn human_plan(plan: &ResumeAnswer<'_>) -> String {
    let mut table = Table::new([
        ("CHECKPOINT", Align::Left),
        ("SIZE", Align::Right),
        ("NODE", Align::Left),
        ("COPY", Align::Left),
        ("RUNS IN", Align::Right),
        ("OF THAT", Align::Left),
    ]);
    for answer in &plan.answers {
        if let Resumption::Ranked(ranked) = answer {
            for node in &ranked.nodes {
                table.row([
                    name(ranked),
                    human::bytes(ranked.size_bytes),
                    node.node.to_string(),
                    (if node.local { "here" } else { "elsewhere" }).to_owned(),
                    words::spread(node.cost.until_running_s),
                    words::parts(&node.cost),
                ]);
            }
        }
    }
    let mut text = table.render();
    for answer in &plan.answers {
        match answer {
            Resumption::Restart(restart) => {
                let (name, why) = (&restart.checkpoint, &restart.why);
                text.push_str(&format!("{name}: start anew: {why}\n"));
            }
            Resumption::Ranked(ranked) => {
                for one in &ranked.unknown {
                    text.push_str(&format!(
                        "{}: not {}: {}\n",
                        name(ranked),
                        one.node,
                        one.why
                    ));
                }
            }
        }
    }
    text.push_str(&as_of(&plan.answered_by, plan.age_s));
    text
}

/// Returns the checkpoint's name, with the generation that a bare job name stands for.
fn name(ranked: &Ranked<'_>) -> String {
    let asked = ranked.checkpoint.as_str();
    if asked.contains('@') {
        return asked.to_owned();
    }
    format!("{asked}@{}", ranked.generation)
}

#[cfg(test)]
mod tests {
    use permafrost_api_types::cost::{Cost, Spread};
    use permafrost_api_types::resume::{RankedNode, Restart, UnknownNode};

    use super::*;

    fn ranked(nodes: &[&'static str]) -> Resumption<'static> {
        let spread = Spread { p50: 0.5, p95: 0.5 };
        let node = |name: &&'static str| RankedNode {
            node: (*name).into(),
            local: *name == "n1",
            cost: Cost {
                overhead_s: spread,
                delay_s: Spread::default(),
                until_running_s: spread,
                parts: None,
                age_s: 1.0,
                omits: None,
                reason: None,
            },
        };
        Resumption::Ranked(Ranked {
            checkpoint: "train".into(),
            generation: 3,
            size_bytes: 1 << 30,
            nodes: nodes.iter().map(node).collect(),
            unknown: vec![UnknownNode {
                node: "n9".into(),
                why: "its read bandwidth is not known".to_owned(),
            }],
        })
    }

    fn answer(answers: Vec<Resumption<'static>>) -> ResumeAnswer<'static> {
        ResumeAnswer {
            answered_by: "n1".into(),
            age_s: 0.0,
            answers,
        }
    }

    #[test]
    fn nodes_are_in_order_and_others_named_with_why_not() {
        let text = human_plan(&answer(vec![ranked(&["n2", "n1"])]));
        let lines: Vec<_> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(lines[1], "train@3 1.0 GiB n2 elsewhere 500.0 ms");
        assert_eq!(lines[2], "train@3 1.0 GiB n1 here 500.0 ms");
        assert!(text.contains("train@3: not n9: its read bandwidth is not known"));
    }

    #[test]
    fn the_exit_code_tells_restart_from_ignorance() {
        assert!(judge(&answer(vec![ranked(&["n1"])])).is_ok());
        let unknown = judge(&answer(vec![ranked(&["n1"]), ranked(&[])])).unwrap_err();
        assert_eq!(unknown.code, Code::Unavailable);
        assert!(unknown.message.contains("n9: its read bandwidth"));
        let restart = Resumption::Restart(Restart {
            checkpoint: "build".into(),
            restart: true,
            why: "it has none".to_owned(),
        });
        // Whatever else is unknown, that task has to start anew.
        let failure = judge(&answer(vec![ranked(&[]), restart])).unwrap_err();
        assert_eq!(failure.code, Code::NotFound);
        assert!(
            failure
                .message
                .contains("build cannot be resumed: it has none")
        );
    }
}
