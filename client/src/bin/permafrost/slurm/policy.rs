//! Policy of a batch job: whether it can be carried out here, and whether what it goes by is known.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use permafrost_scheduling::policy::{Name, RequiredFigure, VictimFate};
use permafrost_terminal::failure::{Code, Failure};

use super::RunArguments;
use super::job::Job;

/// Returns the help of `--policy`, with the names of the policies that can be carried out.
pub(super) fn help() -> String {
    let possible = Name::ALL
        .iter()
        .filter(|name| name.victims() != VictimFate::Stays);
    let names: Vec<&str> = possible.map(|name| name.as_str()).collect();
    format!(
        "Policy that decides how COMMAND is preempted: {} [default: adaptive]. docs/slurm.md says what each goes by",
        names.join(", ")
    )
}

/// Checks that the policy can be carried out under Slurm, and that what it goes by is known. slurmctld is asked only
/// for a policy that goes by deadlines.
///
/// # Errors
/// [`Code::Invalid`], with the name of the missing field.
pub(super) fn check(arguments: &RunArguments, job: &Job) -> Result<(), Failure> {
    let deadline = || job.state().ok().and_then(|state| state.deadline_unix_s);
    check_known(arguments.policy, arguments.work, deadline)
}

fn check_known(
    policy: Option<Name>,
    work: Option<Duration>,
    deadline: impl Fn() -> Option<u64>,
) -> Result<(), Failure> {
    let Some(policy) = policy else {
        return Ok(());
    };
    if policy.victims() == VictimFate::Stays {
        let message = format!(
            "the policy {policy} lets tasks stay on their node, and Slurm takes the node when the grace time is over"
        );
        let hint = "permafrost suspend and permafrost shrink do it by hand (docs/preemption.md)";
        return Err(Failure::new(Code::Invalid, message).hint(hint));
    }
    for figure in policy.required() {
        let missing = match figure {
            RequiredFigure::Remaining => work
                .is_none()
                .then_some("say with --work how long COMMAND works altogether"),
            RequiredFigure::Deadline => deadline()
                .is_none()
                .then_some("submit the job with sbatch --deadline"),
            // The job, its work and its memory are read when it is preempted.
            RequiredFigure::Job
            | RequiredFigure::Progress
            | RequiredFigure::Memory
            | RequiredFigure::Swap => None,
        };
        if let Some(hint) = missing {
            let message = format!("the policy {policy} goes by {figure}, and it is not known");
            return Err(Failure::new(Code::Invalid, message).hint(hint));
        }
    }
    Ok(())
}

/// Returns the time from now to a deadline; none left if it is past.
pub(super) fn until(deadline_unix_s: u64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Duration::from_secs(deadline_unix_s).saturating_sub(now.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(policy: &str, work: Option<u64>, deadline: Option<u64>) -> Option<String> {
        let policy = Some(policy.parse().unwrap());
        let work = work.map(Duration::from_secs);
        let refused = check_known(policy, work, || deadline).err()?;
        Some(format!("{}; {}", refused.message, refused.hint))
    }

    #[test]
    fn a_policy_that_lacks_a_figure_is_refused_with_the_name_of_the_field() {
        for (policy, work, deadline, expected) in [
            ("mr+srt", None, None, "goes by remaining_s"),
            ("mdf", Some(7), None, "goes by deadline_s"),
            ("mlf+llf", None, Some(7), "goes by remaining_s"),
            ("suspend", Some(7), Some(7), "stay on their node"),
            ("gp", Some(7), Some(7), "stay on their node"),
        ] {
            let refused = refused(policy, work, deadline).unwrap();
            assert!(refused.contains(expected), "{policy}: {refused}");
        }
        for (policy, work, deadline) in [
            ("adaptive", None, None),
            ("basic+remote", None, None),
            ("wait", None, None),
            ("mr+random", None, None),
            ("pr+lrt", Some(7), None),
            ("mlf", Some(7), Some(7)),
        ] {
            assert_eq!(refused(policy, work, deadline), None, "{policy}");
        }
        assert!(check_known(None, None, || None).is_ok());
    }

    #[test]
    fn the_help_has_the_policies_that_can_be_carried_out() {
        let help = help();
        assert!(help.contains("basic+local") && help.contains("mlf+llf"));
        assert!(!help.contains("gp") && !help.contains("suspend"), "{help}");
    }
}
