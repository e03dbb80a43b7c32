//! Figures that a policy goes by, and what becomes of the tasks that it preempts: for callers that cannot give every figure, or
//! carry out every action.

use std::fmt;

use super::victims::algorithm_1_figures;
use super::{Name, SchedulerView, TaskState};
use crate::TaskId;
use crate::figure::Missing;
use crate::quantity::Moment;

/// Figure without which a policy cannot decide about a task that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredFigure {
    /// Job of the scheduler that the task belongs to.
    Job,
    /// Deadline of that job.
    Deadline,
    /// Time to the end of the task.
    Remaining,
    /// Work that it has done.
    Progress,
    /// Its memory.
    Memory,
    /// Memory and swap of its machine.
    Swap,
}

impl RequiredFigure {
    /// Returns the field of a task in `POST /v1/preempt` that has it; `swaps` is one of the request.
    #[must_use]
    pub const fn field(self) -> &'static str {
        match self {
            Self::Job => "group",
            Self::Deadline => "deadline_s",
            Self::Remaining => "remaining_s",
            Self::Progress => "progress_s",
            Self::Memory => "resident_bytes",
            Self::Swap => "swaps",
        }
    }
}

impl fmt::Display for RequiredFigure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.field())
    }
}

/// Fate of the tasks from which a policy takes resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VictimFate {
    /// No task is preempted.
    Untouched,
    /// They leave their node, killed or stored.
    Leaves,
    /// They stay in the memory of their node, or run on with less.
    Stays,
}

impl Name {
    /// Returns the parts of the name; the second one is empty where there is none.
    fn parts(self) -> (&'static str, &'static str) {
        self.as_str().split_once('+').unwrap_or((self.as_str(), ""))
    }

    /// Returns true for a policy that takes for each task the way that costs least, by the caller's terms.
    #[must_use]
    pub fn is_adaptive(self) -> bool {
        self.parts().0 == "adaptive"
    }

    /// Returns true for a policy that chooses the job first whose task is preempted.
    #[must_use]
    pub fn chooses_job(self) -> bool {
        matches!(self.parts().0, "mr" | "lr" | "pr" | "mdf" | "mlf")
    }

    /// Returns the figures that every task that runs must have.
    pub fn required(self) -> impl Iterator<Item = RequiredFigure> {
        let (first, second) = self.parts();
        let shrinks = matches!(first, "ip" | "gp");
        let by_rest = matches!(second, "srt" | "lrt" | "llf") || shrinks;
        let by_progress = matches!(first, "kill" | "basic" | "li2015" | "suspend") || by_rest;
        let all = [
            (self.chooses_job() || shrinks, RequiredFigure::Job),
            (matches!(first, "mdf" | "mlf"), RequiredFigure::Deadline),
            (by_rest, RequiredFigure::Remaining),
            (by_progress, RequiredFigure::Progress),
            (
                matches!(first, "li2015" | "suspend"),
                RequiredFigure::Memory,
            ),
            (first == "suspend", RequiredFigure::Swap),
        ];
        all.into_iter()
            .filter_map(|(required, figure)| required.then_some(figure))
    }

    /// Returns what becomes of the tasks from which it takes resources. `adaptive` lets one stay only on a machine
    /// whose swap is given.
    #[must_use]
    pub fn victims(self) -> VictimFate {
        match self.parts().0 {
            "wait" | "reserve" | "pado" => VictimFate::Untouched,
            "suspend" | "ip" | "gp" => VictimFate::Stays,
            _ => VictimFate::Leaves,
        }
    }

    /// Returns the running tasks about which the policy does not decide, with the figure of their node that is missing:
    /// Algorithm 1 (000, §4.1) has no size ÷ bandwidth without one.
    #[must_use]
    pub fn undecided(self, now: Moment, view: &SchedulerView) -> Vec<(TaskId, Missing)> {
        if self.parts().0 != "li2015" {
            return Vec::new();
        }
        let running = (0..view.tasks()).map(TaskId).filter(|id| {
            let task = view.task(*id);
            task.is_some_and(|task| task.state == TaskState::Running)
        });
        let missing = |id| Some((id, algorithm_1_figures(now, view, id)?.err()?));
        running.filter_map(missing).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Name {
        name.parse().unwrap()
    }

    #[test]
    fn each_policy_names_the_fields_that_it_goes_by() {
        let fields = |name: &str| {
            let fields = named(name).required().map(RequiredFigure::field);
            fields.collect::<Vec<_>>().join(" ")
        };
        for (name, expected) in [
            ("wait", ""),
            ("adaptive+local", ""),
            ("kill", "progress_s"),
            ("li2015", "progress_s resident_bytes"),
            ("mr+random", "group"),
            ("pr+srt", "group remaining_s progress_s"),
            ("mdf", "group deadline_s"),
            ("mlf", "group deadline_s remaining_s progress_s"),
            ("gp", "group remaining_s progress_s"),
            ("suspend", "progress_s resident_bytes swaps"),
        ] {
            assert_eq!(fields(name), expected, "{name}");
        }
    }

    #[test]
    fn each_policy_says_what_becomes_of_its_victims() {
        let fates: Vec<VictimFate> = Name::ALL.iter().map(|name| name.victims()).collect();
        let count = |fate| fates.iter().filter(|is| **is == fate).count();
        assert_eq!(count(VictimFate::Untouched), 3);
        assert_eq!(count(VictimFate::Stays), 3);
        assert_eq!(named("remote").victims(), VictimFate::Leaves);
        assert_eq!(named("mlf").victims(), VictimFate::Leaves);
    }
}
