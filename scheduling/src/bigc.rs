//! BIG-C's policy (paper 004): how much to reclaim from long jobs, from which containers, and when to give it back.
//!
//! BIG-C shrinks containers in steps and never kills or dumps them. This module expresses the paper's changes to
//! YARN's queues as a few functions over numbers.

use serde::{Deserialize, Serialize};

use crate::TaskId;
use crate::cost::TaskResources;
use crate::quantity::{Bytes, Seconds};
use crate::size::JobId;

/// Resources that a suspended container keeps so that its heartbeat lives on: 1 % of a processor, 64 MB (004, §3.2).
pub const MINIMAL_FOOTPRINT: TaskResources = TaskResources {
    cpu_millis: 10,
    memory: Bytes::mib(64),
};

/// A step of graceful preemption: 2 processors, 4 GB (004, §5.3).
pub const GRACEFUL_STEP: TaskResources = TaskResources {
    cpu_millis: 2000,
    memory: Bytes::mib(4096),
};

/// Number of requests for resumption that a preempted container makes in vain before it is resumed (004, §5.3).
pub const DELAYED_RESUMPTION: u32 = 3;

/// Maximum number of steps in which one container is emptied: bounds the running time for any figures.
pub const MOST_STEPS: u64 = 1000;

/// Returns the resources of the long jobs to be preempted for a request of the short ones, by Algorithm 1:
///
/// ```text
/// f_l = (C × φ_l, M × φ_l)
/// a = r_l − f_l
/// if r_s < a then p = r_s else p = COMPUTEDR(r_s, a)
/// ```
///
/// `allocated` is r_l, `fair` f_l, `request` r_s.
#[must_use]
pub fn to_be_preempted(
    allocated: TaskResources,
    fair: TaskResources,
    request: TaskResources,
) -> TaskResources {
    let over_provisioned = allocated.less(fair);
    if over_provisioned.covers(request) {
        request
    } else {
        compute_dr(request, over_provisioned)
    }
}

/// `COMPUTEDR`: returns all of the over-provisioned resource that is dominant in the request (the one of which the
/// request is the larger multiple), and of the other resource in proportion to the request.
///
/// Lines 14 and 16 of the paper's listing multiply the *other* resource by the request's proportion (15 GB × 10/20);
/// its worked example in §4.3 multiplies the dominant one (10 CPU × 10 GB/20 CPU = 5 GB), "in proportion to the
/// reclaimed dominant resource". This function follows the example, because the listing's units do not agree. It
/// never returns more of the other resource than is over-provisioned.
#[must_use]
pub fn compute_dr(request: TaskResources, over_provisioned: TaskResources) -> TaskResources {
    let (a, r) = (over_provisioned, request);
    if is_cpu_dominant(r, a) {
        let memory = scaled(a.cpu_millis, r.memory.count(), r.cpu_millis);
        TaskResources {
            cpu_millis: a.cpu_millis,
            memory: Bytes::new(memory).min(a.memory),
        }
    } else {
        let cpu_millis = scaled(a.memory.count(), r.cpu_millis, r.memory.count());
        TaskResources {
            cpu_millis: cpu_millis.min(a.cpu_millis),
            memory: a.memory,
        }
    }
}

/// Returns true if r_cpu/a_cpu > r_mem/a_mem, multiplied out: without over-provisioned resources the fractions would
/// divide by zero.
fn is_cpu_dominant(r: TaskResources, a: TaskResources) -> bool {
    u128::from(r.cpu_millis) * u128::from(a.memory.count())
        > u128::from(r.memory.count()) * u128::from(a.cpu_millis)
}

/// Returns `value` × `numerator` ÷ `denominator`, rounded down; 0 if `denominator` is 0.
fn scaled(value: u64, numerator: u64, denominator: u64) -> u64 {
    let product = u128::from(value) * u128::from(numerator);
    let quotient = product.checked_div(u128::from(denominator)).unwrap_or(0);
    u64::try_from(quotient).unwrap_or(u64::MAX)
}

/// A container of a long job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// The task in it.
    pub task: TaskId,
    /// Resources of the container; [`r_c`](container_preemption) of Algorithm 2.
    pub holds: TaskResources,
    /// True if the container swaps: then it is frozen and no more is taken of it (004, §4.3).
    pub swapping: bool,
}

/// A long job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongJob {
    /// Id of the job.
    pub job: JobId,
    /// Time to its end.
    pub remaining: Seconds,
    /// Containers of the job.
    pub containers: Vec<Container>,
}

/// Resources taken of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shrunk {
    /// Job of the container.
    pub job: JobId,
    /// Task in the container.
    pub task: TaskId,
    /// Resources that are taken of the container.
    pub taken: TaskResources,
}

/// Result of Algorithm 2.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reclaimed {
    /// The set C with the resources taken of each container, in the order in which they were chosen.
    pub containers: Vec<Shrunk>,
    /// Sum of the resources that are taken.
    pub taken: TaskResources,
    /// True if enough of the dominant resource is taken: then p counts as satisfied (004, §4.3).
    pub satisfied: bool,
}

/// Runs Algorithm 2, with graceful preemption's changes:
///
/// ```text
/// AGAIN:
/// Choose a job with the longest remaining time
/// while p > (0, 0) do
///   Choose a container c from the job
///   C ← c
///   p = p − r_GP, r_c = r_c − r_GP
///   if c is empty or swapping, remove c
///   if job has no container left and p > (0, 0) then goto AGAIN
/// end while
/// PREEMPT(C)
/// ```
///
/// The steps alternate between the containers of a job, to spread the load over many of them. A step takes no more
/// than is still needed and no more than the container has above [`MINIMAL_FOOTPRINT`]: a container that holds no
/// more than that is empty. With a step as large as the largest container this is immediate preemption. A step of 0
/// takes nothing; a step that would empty a container in more than [`MOST_STEPS`] is enlarged.
///
/// `request` determines the dominant resource, `preempted` is p of Algorithm 1.
#[must_use]
pub fn container_preemption(
    jobs: &[LongJob],
    request: TaskResources,
    over_provisioned: TaskResources,
    preempted: TaskResources,
    step: TaskResources,
) -> Reclaimed {
    let by_cpu = is_cpu_dominant(request, over_provisioned);
    let is_satisfied = |left: TaskResources| match by_cpu {
        true => left.cpu_millis == 0,
        false => left.memory == Bytes::ZERO,
    };
    let mut left = preempted;
    let mut reclaimed = Reclaimed::default();
    let mut order: Vec<&LongJob> = jobs.iter().collect();
    order.sort_by(|a, b| (b.remaining.cmp(&a.remaining)).then(a.job.cmp(&b.job)));
    for job in order {
        if is_satisfied(left) {
            break;
        }
        // Resources that can be taken of each container, and those that were taken.
        let mut containers: Vec<(TaskId, TaskResources, TaskResources)> = (job.containers.iter())
            .filter(|container| !container.swapping)
            .map(|c| (c.task, c.holds.less(MINIMAL_FOOTPRINT), TaskResources::ZERO))
            .collect();
        let step = no_smaller(step, &containers);
        loop {
            let before = left;
            for (_, spare, taken) in &mut containers {
                if is_satisfied(left) {
                    break;
                }
                let now = spare.least(step).least(left);
                left = left.less(now);
                *spare = spare.less(now);
                *taken = taken.plus(now);
            }
            if left == before {
                break;
            }
        }
        for (task, _, taken) in containers {
            if !taken.is_none() {
                let job = job.job;
                reclaimed.taken = reclaimed.taken.plus(taken);
                reclaimed.containers.push(Shrunk { job, task, taken });
            }
        }
    }
    reclaimed.satisfied = is_satisfied(left);
    reclaimed
}

/// Returns the step, or the one with which the largest container is emptied in [`MOST_STEPS`].
fn no_smaller(
    step: TaskResources,
    containers: &[(TaskId, TaskResources, TaskResources)],
) -> TaskResources {
    let raised = |step: u64, of: fn(TaskResources) -> u64| {
        let largest = containers.iter().map(|&(_, spare, _)| of(spare)).max();
        match step {
            0 => 0,
            step => step.max(largest.unwrap_or(0).div_ceil(MOST_STEPS)),
        }
    };
    TaskResources {
        cpu_millis: raised(step.cpu_millis, |r| r.cpu_millis),
        memory: Bytes::new(raised(step.memory.count(), |r| r.memory.count())),
    }
}

/// Delayed resumption: a preempted container has to ask a number of times before it is resumed (004, §4.3), so that a
/// burst of short jobs does not preempt it again at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelayedResumption {
    in_vain: u32,
}

impl Default for DelayedResumption {
    fn default() -> Self {
        Self::new(DELAYED_RESUMPTION)
    }
}

impl DelayedResumption {
    /// Makes a delay of `times` requests in vain; 0 resumes at once.
    #[must_use]
    pub const fn new(times: u32) -> Self {
        Self { in_vain: times }
    }

    /// Asks for resumption, when there is room for it; returns true if the container is resumed.
    pub const fn ask(&mut self) -> bool {
        match self.in_vain.checked_sub(1) {
            Some(less) => {
                self.in_vain = less;
                false
            }
            None => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn resources(cpus: u64, gib: u64) -> TaskResources {
        TaskResources {
            cpu_millis: cpus * 1000,
            memory: Bytes::new(gib * GIB),
        }
    }

    /// Makes a job of `count` containers, each with `spare` above the minimal footprint.
    fn job(id: u64, remaining: u64, count: u64, spare: TaskResources) -> LongJob {
        let container = |n| Container {
            task: TaskId(id * 100 + n),
            holds: spare.plus(MINIMAL_FOOTPRINT),
            swapping: false,
        };
        LongJob {
            job: JobId(id),
            remaining: Seconds::from_millis(remaining * 1000),
            containers: (0..count).map(container).collect(),
        }
    }

    fn taken(reclaimed: &Reclaimed) -> Vec<(u64, u64, u64)> {
        let of = |shrunk: &Shrunk| {
            let gib = shrunk.taken.memory.count() / GIB;
            (shrunk.task.0, shrunk.taken.cpu_millis / 1000, gib)
        };
        reclaimed.containers.iter().map(of).collect()
    }

    #[test]
    fn the_papers_example_takes_ten_processors_and_five_gigabytes() {
        let p = compute_dr(resources(20, 10), resources(10, 15));
        assert_eq!(p, resources(10, 5));
        // Repeats the example through Algorithm 1, the long jobs having 15 CPU and 25 GB where 5 and 10 are fair.
        let p = to_be_preempted(resources(15, 25), resources(5, 10), resources(20, 10));
        assert_eq!(p, resources(10, 5));
    }

    #[test]
    fn memory_can_be_dominant_too() {
        // 10/10 against 30/15.
        assert_eq!(
            compute_dr(resources(10, 30), resources(10, 15)),
            resources(5, 15)
        );
    }

    #[test]
    fn a_request_that_fits_is_taken_as_it_is() {
        let p = to_be_preempted(resources(20, 40), resources(5, 10), resources(3, 4));
        assert_eq!(p, resources(3, 4));
    }

    #[test]
    fn nothing_over_provisioned_is_nothing_taken() {
        let none = to_be_preempted(resources(1, 1), resources(5, 5), resources(9, 9));
        assert_eq!(none, TaskResources::ZERO);
        assert_eq!(
            compute_dr(TaskResources::ZERO, resources(5, 5)).cpu_millis,
            0,
            "a request of nothing has no proportion"
        );
    }

    #[test]
    fn steps_go_round_the_containers_of_the_longest_job() {
        let jobs = [
            job(1, 10, 4, resources(8, 16)),
            job(2, 99, 3, resources(8, 16)),
        ];
        let (request, a) = (resources(20, 10), resources(10, 15));
        let reclaimed = container_preemption(&jobs, request, a, resources(10, 5), GRACEFUL_STEP);
        // 2 CPU at a time: first, second, third, first, second; the 5 GB are had after two steps.
        assert_eq!(taken(&reclaimed), [(200, 4, 4), (201, 4, 1), (202, 2, 0)]);
        assert!(reclaimed.satisfied);
        assert_eq!(reclaimed.taken, resources(10, 5));
    }

    #[test]
    fn the_next_job_follows_when_the_first_has_nothing_left() {
        let mut jobs = [
            job(1, 10, 4, resources(8, 16)),
            job(2, 99, 2, resources(2, 4)),
        ];
        jobs[1].containers[1].swapping = true;
        let (request, a) = (resources(20, 10), resources(10, 15));
        let reclaimed = container_preemption(&jobs, request, a, resources(4, 2), GRACEFUL_STEP);
        assert_eq!(taken(&reclaimed), [(200, 2, 2), (100, 2, 0)]);
    }

    #[test]
    fn a_step_as_large_as_a_container_is_immediate_preemption() {
        let jobs = [job(1, 10, 3, resources(8, 16))];
        let (request, a) = (resources(20, 10), resources(10, 15));
        let reclaimed = container_preemption(&jobs, request, a, resources(10, 5), resources(8, 16));
        assert_eq!(taken(&reclaimed), [(100, 8, 5), (101, 2, 0)]);
    }

    #[test]
    fn what_is_not_there_is_not_satisfied_and_the_loop_ends() {
        let jobs = [job(1, 10, 1, resources(1, 1))];
        let (request, a) = (resources(20, 10), resources(10, 15));
        for step in [GRACEFUL_STEP, TaskResources::ZERO] {
            let reclaimed = container_preemption(&jobs, request, a, resources(10, 5), step);
            assert!(!reclaimed.satisfied);
        }
    }

    #[test]
    fn a_tiny_step_and_huge_containers_are_answered_soon() {
        let jobs = [job(1, 10, 3, resources(1 << 40, 1 << 33))];
        let request = resources(1 << 42, 1 << 33);
        let one = TaskResources {
            cpu_millis: 1,
            memory: Bytes::new(1),
        };
        let reclaimed = container_preemption(&jobs, request, request, request, one);
        assert!(reclaimed.satisfied);
        assert_eq!(reclaimed.taken.memory, request.memory);
    }

    #[test]
    fn the_fourth_time_of_asking_resumes() {
        let mut asking = DelayedResumption::default();
        assert_eq!([asking.ask(), asking.ask(), asking.ask()], [false; 3]);
        assert!(asking.ask());
        assert!(DelayedResumption::new(0).ask());
    }
}
