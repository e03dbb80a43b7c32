//! `permafrost retention`: rules that say what is kept, and how much there may be.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use permafrost_agent::host::arguments::{parse_duration, parse_size};
use permafrost_protocol::control::{RetentionRule, RetentionRules, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_terminal::human;
use permafrost_terminal::names::namespace;
use permafrost_terminal::table::{Align, Table};

/// Help text behind the options of `permafrost retention`.
pub const RETENTION_EXAMPLES: &str = "\
A namespace has one rule, and its jobs may have others, by patterns of their names without the namespace. A job follows \
the most specific pattern that matches it: its keep options in place of the namespace's, or the namespace's if it has \
none. Limits of a namespace's rule are for all its jobs together, those of a pattern for each job.

A generation stays if one keep option keeps it. Without any keep option all stay. Whatever the rules say, these stay: \
what is pinned, what is being read, the newest generation of a job, and the newest that can be restored.

Examples:
    permafrost retention set --namespace team-a --keep-last 3 --keep-within 30d
    permafrost retention set --namespace team-a --job 'nightly-*' --keep-last 10
    permafrost retention set --namespace team-b --max-bytes 1T --over-quota remove-oldest
    permafrost prune --dry-run                 what these rules would remove
    permafrost retention show
    permafrost retention rm --namespace team-a --job 'nightly-*'
";

/// Arguments of `permafrost retention`.
#[derive(Debug, Args)]
pub struct RetentionArguments {
    #[command(subcommand)]
    command: RetentionCommand,
}

#[derive(Debug, Subcommand)]
enum RetentionCommand {
    /// Set the rule of a namespace, or of some of its jobs, in place of the one that is there.
    Set(SetArguments),
    /// Show the rules.
    Show(ShowArguments),
    /// Remove a rule. Checkpoints that only it kept may go then.
    #[command(visible_alias = "remove")]
    Rm(ScopeArguments),
}

#[derive(Debug, Args)]
struct ScopeArguments {
    /// Namespace of the rule.
    #[arg(long, value_name = "NS", default_value = "default", value_parser = namespace)]
    namespace: String,
    /// Pattern of the names of the jobs, without the namespace: * for any characters, ? for one. Without it the rule is
    /// the namespace's.
    #[arg(long, value_name = "GLOB", value_parser = glob)]
    job: Option<String>,
}

#[derive(Debug, Args)]
struct SetArguments {
    #[command(flatten)]
    scope: ScopeArguments,
    /// Keep the newest N generations of a job, of those that can be restored.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep_last: Option<u64>,
    /// Keep generations that are not older than this, such as 12h or 30d.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    keep_within: Option<Duration>,
    /// Keep all generations.
    #[arg(long, conflicts_with_all = ["keep_last", "keep_within"])]
    keep_all: bool,
    /// Most bytes of the namespace, or of each job of the pattern. Pages that generations share count once.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_bytes: Option<u64>,
    /// Most checkpoints of the namespace, or of each job of the pattern.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_checkpoints: Option<u64>,
    /// Fate of a dump for which those limits leave no room [default: refuse].
    #[arg(long, value_name = "WORD", value_enum)]
    over_quota: Option<OverQuota>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OverQuota {
    /// It is refused (exit code 6)
    Refuse,
    /// The oldest generations that may go are removed
    RemoveOldest,
}

#[derive(Debug, Args)]
struct ShowArguments {
    /// Only this namespace.
    #[arg(long, value_name = "NS", value_parser = namespace)]
    namespace: Option<String>,
}

/// Runs `permafrost retention`.
///
/// # Errors
/// The failure of the command.
pub fn retention(context: &Context, arguments: &RetentionArguments) -> Result<(), Failure> {
    let mut connection = context.connect()?;
    let rules = match &arguments.command {
        RetentionCommand::Set(set) => connection.call(request::SetRetention {
            rule: Some(set.rule()),
            remove: false,
        })?,
        RetentionCommand::Rm(scope) => connection.call(request::SetRetention {
            rule: Some(scope.rule()),
            remove: true,
        })?,
        RetentionCommand::Show(show) => connection.call(request::ShowRetention {
            namespace: show.namespace.clone().unwrap_or_default(),
        })?,
    };
    context.print(&rules, human_rules)
}

impl ScopeArguments {
    fn rule(&self) -> RetentionRule {
        RetentionRule {
            namespace: self.namespace.clone(),
            jobs: self.job.clone().unwrap_or_default(),
            ..RetentionRule::default()
        }
    }
}

impl SetArguments {
    fn rule(&self) -> RetentionRule {
        let over_quota = match self.over_quota {
            None => "",
            Some(OverQuota::Refuse) => "refuse",
            Some(OverQuota::RemoveOldest) => "remove-oldest",
        };
        RetentionRule {
            keep_all: self.keep_all,
            keep_last: self.keep_last,
            keep_within_s: self.keep_within.map(|age| age.as_secs()),
            max_bytes: self.max_bytes,
            max_checkpoints: self.max_checkpoints,
            over_quota: over_quota.to_owned(),
            ..self.scope.rule()
        }
    }
}

fn human_rules(rules: &RetentionRules) -> String {
    if rules.rules.is_empty() {
        return "no rules: everything is kept\n".to_owned();
    }
    let mut table = Table::new([
        ("NAMESPACE", Align::Left),
        ("JOBS", Align::Left),
        ("KEEPS", Align::Left),
        ("AT MOST", Align::Left),
        ("BEYOND", Align::Left),
    ]);
    for rule in &rules.rules {
        table.row([
            rule.namespace.clone(),
            rule.jobs.clone(),
            kept(rule),
            limits(rule),
            rule.over_quota.clone(),
        ]);
    }
    table.render()
}

fn kept(rule: &RetentionRule) -> String {
    let last = rule.keep_last.map(|last| format!("last {last}"));
    let within = rule.keep_within_s.map(|age_s| match age_s {
        age_s if age_s % 86_400 == 0 => format!("within {}d", age_s / 86_400),
        age_s => format!("within {age_s}s"),
    });
    let all = rule.keep_all.then(|| "all".to_owned());
    let words: Vec<String> = all.into_iter().chain(last).chain(within).collect();
    words.join(", ")
}

fn limits(rule: &RetentionRule) -> String {
    let bytes = rule.max_bytes.map(human::bytes);
    let checkpoints = rule
        .max_checkpoints
        .map(|most| human::count(most, "checkpoint", "checkpoints"));
    let words: Vec<String> = bytes.into_iter().chain(checkpoints).collect();
    words.join(", ")
}

/// Checks that a pattern can be one: the daemon checks the rest.
fn glob(pattern: &str) -> Result<String, String> {
    if pattern.is_empty() {
        return Err("empty: leave --job out for the whole namespace".to_owned());
    }
    Ok(pattern.to_owned())
}
