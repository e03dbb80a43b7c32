//! The leader's state: since when nodes are gone and checkpoints are listed, and which steps failed. It plans
//! the next steps. It reads no clock, and makes no calls.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use permafrost_clustered::Registered;
use permafrost_metering::copying::RepairStep;
use permafrost_protocol::control::Checkpoint;
use permafrost_store::ContentDigest;

use super::plan::{RepairAction, RepairNode, copies_that_count, plan, wanted_copies};
use super::timing::Timing;
use crate::placement::{CopiesWanted, place};
use crate::{LiveNode, MemberState, NodesView};

/// Maximum number of copies planned at once for each node.
const COPIES_A_NODE: usize = 64;

/// Longest pause of a checkpoint whose copies fail, as a multiple of the first pause.
const LONGEST_PAUSE: u32 = 64;

/// A step that one node is to take.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Job {
    pub(super) checkpoint: Checkpoint,
    /// Name of the node that is to pull or drop the copy.
    pub(super) node: String,
    pub(super) task: Task,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Task {
    Copy {
        from: Vec<String>,
        /// Id of the checkpoint's parent; empty if that is not listed.
        parent: String,
        content_digest: ContentDigest,
    },
    Drop {
        live: bool,
        keepers: Vec<String>,
        /// Content digest that the keepers' copies must have.
        content_digest: ContentDigest,
    },
}

impl Job {
    /// Returns the step for those who look at it.
    pub(super) fn told(&self, is_running: bool) -> RepairStep {
        RepairStep {
            node: self.node.clone(),
            job: self.checkpoint.job.clone(),
            generation: self.checkpoint.generation,
            memory_bytes: self.checkpoint.memory_bytes,
            is_copy: matches!(self.task, Task::Copy { .. }),
            is_running,
        }
    }
}

/// Planned steps, and the state of the cluster.
#[derive(Debug, Default)]
pub(super) struct Planned {
    pub(super) jobs: Vec<Job>,
    pub(super) under_replicated: usize,
    pub(super) stranded: usize,
    /// Number of copies that are known to be damaged.
    pub(super) damaged: usize,
    /// True if a step is planned, or waits for its time.
    pub(super) is_busy: bool,
}

struct Seen {
    /// Time since which the node has been gone.
    gone_since: Option<Duration>,
    /// True if its copies count towards durability, as far as known.
    counts: bool,
}

#[derive(Default)]
pub(super) struct Planner {
    timing: Timing,
    seen: HashMap<String, Seen>,
    /// Listed checkpoints, and since when they are listed, as far as this leader knows.
    listed_since: HashMap<String, Duration>,
    /// Damaged copies, by checkpoint and node, and since when they are damaged, as far as this leader knows.
    damaged_since: HashMap<(String, String), Duration>,
    /// Checkpoints whose copies failed: the number of failures, and the time until which they wait.
    failed: HashMap<String, (u32, Duration)>,
    /// Nodes that do not answer, or are full, and the time until which they get no steps.
    resting: HashMap<String, Duration>,
    /// Stranded checkpoints that were already reported.
    told: HashSet<String>,
}

impl Planner {
    pub(super) fn new(timing: Timing) -> Self {
        Self {
            timing,
            ..Self::default()
        }
    }

    /// Records the end of a step. If it failed, the checkpoint waits, and so does its node if `node_failed`.
    pub(super) fn ended(&mut self, now: Duration, job: &Job, done: bool, node_failed: bool) {
        if done {
            self.failed.remove(&job.checkpoint.id);
            return;
        }
        let pause = self.timing.pause;
        let failed = self.failed.entry(job.checkpoint.id.clone()).or_default();
        let times = 2_u32.saturating_pow(failed.0).min(LONGEST_PAUSE);
        *failed = (failed.0.saturating_add(1), now + pause * times);
        if node_failed {
            self.resting.insert(job.node.clone(), now + pause * 3);
        }
    }

    /// Plans the steps at `now`; none for the checkpoints in `under_way`, which have steps under way.
    pub(super) fn plan(
        &mut self,
        now: Duration,
        entries: &[Registered],
        view: &NodesView,
        under_way: &HashSet<String>,
    ) -> Planned {
        self.resting.retain(|_, until| *until > now);
        let nodes = self.states(now, view);
        let mut planned = Planned {
            is_busy: nodes.values().any(|node| node.absent),
            ..Planned::default()
        };
        let healing = self.healing(now, entries, &nodes);
        planned.damaged = self.damaged_since.len();
        planned.is_busy |= !healing.is_empty();
        let mut ready = Vec::new();
        let mut listed = HashMap::with_capacity(entries.len());
        for entry in entries {
            let id = &entry.checkpoint.id;
            let since = self.listed_since.get(id).copied().unwrap_or(now);
            listed.insert(id.clone(), since);
            let mut waits = under_way.contains(id);
            if copies_that_count(entry, &nodes) < wanted_copies(entry) {
                planned.under_replicated += 1;
                // Its dump may still be making the copies. A checkpoint that was complete before lacks them for
                // another reason.
                waits |= now < since + self.timing.patience;
            }
            waits |= self.failed.get(id).is_some_and(|(_, until)| *until > now);
            planned.is_busy |= waits;
            if !waits {
                ready.push(entry.clone());
            }
        }
        self.failed.retain(|id, _| listed.contains_key(id));
        self.listed_since = listed;

        let mut choice = Choice::new(entries, view, &nodes, &self.resting);
        let heals = |id: &str, node: &str| healing.contains(&(id.to_owned(), node.to_owned()));
        let actions = plan(&ready, &nodes, heals, |checkpoint, holders| {
            choice.choose(checkpoint, holders)
        });
        let mut stranded = HashSet::new();
        for action in actions {
            match action {
                RepairAction::Copy {
                    checkpoint,
                    to,
                    from,
                } => {
                    let parent = choice.parent(&checkpoint);
                    planned.jobs.push(Job {
                        task: Task::Copy {
                            from,
                            parent: parent.map_or_else(String::new, |p| p.checkpoint.id.clone()),
                            content_digest: choice.digest(&checkpoint.id),
                        },
                        checkpoint,
                        node: to,
                    });
                }
                RepairAction::Drop {
                    checkpoint,
                    node,
                    live,
                    keepers,
                } => planned.jobs.push(Job {
                    task: Task::Drop {
                        live,
                        keepers,
                        content_digest: choice.digest(&checkpoint.id),
                    },
                    checkpoint,
                    node,
                }),
                RepairAction::Stranded {
                    checkpoint,
                    holders,
                } => {
                    if !self.told.contains(&checkpoint.id) {
                        let (job, generation) = (&checkpoint.job, checkpoint.generation);
                        tracing::error!(event = "checkpoint-stranded", id = %checkpoint.id, job, generation, holders = holders.join(", "), "no live node has this checkpoint undamaged");
                    }
                    stranded.insert(checkpoint.id);
                }
            }
        }
        planned.stranded = stranded.len();
        self.told = stranded;
        planned.is_busy |= !planned.jobs.is_empty();
        planned
    }

    /// Returns the damaged copies whose live holders may still be healing them.
    fn healing(
        &mut self,
        now: Duration,
        entries: &[Registered],
        nodes: &BTreeMap<String, RepairNode>,
    ) -> HashSet<(String, String)> {
        let damaged = entries.iter().flat_map(|entry| {
            let id = &entry.checkpoint.id;
            entry.damaged.iter().map(|node| (id.clone(), node.clone()))
        });
        let since: HashMap<_, _> = damaged
            .map(|copy| {
                let since = self.damaged_since.get(&copy).copied().unwrap_or(now);
                (copy, since)
            })
            .collect();
        self.damaged_since = since;
        let heals = |((_, node), since): &(&(String, String), &Duration)| {
            let live = nodes.get(node).is_some_and(|node| node.live);
            live && now < **since + self.timing.healing
        };
        let healing = self.damaged_since.iter().filter(heals);
        healing.map(|(copy, _)| copy.clone()).collect()
    }

    /// Returns the state of every node that counts: the live ones, and those that may come back.
    fn states(&mut self, now: Duration, view: &NodesView) -> BTreeMap<String, RepairNode> {
        let mut states = BTreeMap::new();
        let live: HashMap<&str, &LiveNode> = view
            .nodes
            .iter()
            .map(|node| (node.facts.name.as_str(), node))
            .collect();
        for node in &view.nodes {
            let seen = Seen {
                gone_since: None,
                counts: node.facts.counts(),
            };
            self.seen.insert(node.facts.name.clone(), seen);
            let leaving = node.state != MemberState::Active || !node.facts.counts();
            states.insert(
                node.facts.name.clone(),
                RepairNode {
                    live: true,
                    absent: false,
                    leaving,
                    free_bytes: node.facts.free_bytes,
                },
            );
        }
        for member in &view.members {
            // Nodes that must not come back are forgotten; their copies do not count.
            if live.contains_key(member.name.as_str()) || member.state == MemberState::Removed {
                continue;
            }
            let seen = self.seen.entry(member.name.clone()).or_insert(Seen {
                gone_since: Some(now),
                counts: true,
            });
            let gone_since = *seen.gone_since.get_or_insert(now);
            states.insert(
                member.name.clone(),
                RepairNode {
                    live: false,
                    absent: now < gone_since + self.timing.grace,
                    leaving: member.state != MemberState::Active || !seen.counts,
                    free_bytes: 0,
                },
            );
        }
        self.seen.retain(|name, _| states.contains_key(name));
        states
    }
}

/// Chooses nodes for copies, and remembers the copies that they are going to get.
struct Choice<'a> {
    by_id: HashMap<&'a str, &'a Registered>,
    by_number: HashMap<(&'a str, u64), &'a Registered>,
    nodes: Vec<LiveNode>,
    /// Nodes that copies are moved away from: a copy on them does not block its failure domain.
    leaving: BTreeSet<String>,
    /// Nodes that get no copies.
    without: Vec<String>,
    /// Nodes that are going to hold a checkpoint.
    going_to: HashMap<String, Vec<String>>,
    /// Number of copies that may still be chosen; the rest is planned again later.
    left: usize,
}

impl<'a> Choice<'a> {
    fn new(
        entries: &'a [Registered],
        view: &NodesView,
        states: &BTreeMap<String, RepairNode>,
        resting: &HashMap<String, Duration>,
    ) -> Self {
        let number = |entry: &'a Registered| {
            let checkpoint = &entry.checkpoint;
            (checkpoint.job.as_str(), checkpoint.generation)
        };
        let leaving: BTreeSet<_> = states
            .iter()
            .filter(|(_, state)| state.live && state.leaving)
            .map(|(name, _)| name.clone())
            .collect();
        Self {
            by_id: entries
                .iter()
                .map(|entry| (entry.checkpoint.id.as_str(), entry))
                .collect(),
            by_number: entries
                .iter()
                .filter(|entry| entry.checkpoint.generation > 0)
                .map(|entry| (number(entry), entry))
                .collect(),
            nodes: view.nodes.clone(),
            without: leaving.iter().chain(resting.keys()).cloned().collect(),
            leaving,
            going_to: HashMap::new(),
            left: view.nodes.len() * COPIES_A_NODE,
        }
    }

    fn digest(&self, id: &str) -> ContentDigest {
        self.by_id
            .get(id)
            .map_or([0; 32], |entry| entry.content_digest)
    }

    fn parent(&self, checkpoint: &Checkpoint) -> Option<&'a Registered> {
        let number = (checkpoint.job.as_str(), checkpoint.parent_generation);
        self.by_number.get(&number).copied()
    }

    /// Returns a node for one more copy: preferably one that has the parent, where the copy takes little room and
    /// little time.
    fn choose(&mut self, checkpoint: &Checkpoint, holders: &[String]) -> Option<String> {
        self.left = self.left.checked_sub(1)?;
        let with_parent: Vec<String> = self.parent(checkpoint).map_or_else(Vec::new, |parent| {
            let going = self.going_to.get(&parent.checkpoint.id);
            let held = parent.nodes.iter().chain(going.into_iter().flatten());
            held.cloned().collect()
        });
        let whole = checkpoint
            .memory_bytes
            .saturating_sub(checkpoint.zero_bytes);
        let beside = checkpoint.added_bytes.min(whole);
        let chosen = self
            .place(beside, holders, Some(&with_parent))
            .map(|node| (node, beside))
            .or_else(|| Some((self.place(whole, holders, None)?, whole)));
        let (chosen, bytes) = chosen?;
        for node in &mut self.nodes {
            if node.facts.name == chosen {
                node.facts.queued_bytes = node.facts.queued_bytes.saturating_add(bytes);
            }
        }
        let going = self.going_to.entry(checkpoint.id.clone()).or_default();
        going.push(chosen.clone());
        Some(chosen)
    }

    fn place(
        &self,
        size_bytes: u64,
        holders: &[String],
        only: Option<&[String]>,
    ) -> Option<String> {
        let stays = |name: &String| !self.leaving.contains(name);
        let holders: Vec<String> = holders.iter().filter(|name| stays(name)).cloned().collect();
        let mut without = self.without.clone();
        if let Some(only) = only {
            if only.is_empty() {
                return None;
            }
            let others = self.nodes.iter().map(|node| &node.facts.name);
            without.extend(others.filter(|name| !only.contains(name)).cloned());
        }
        let holding = |node: &&LiveNode| holders.contains(&node.facts.name);
        let placement = place(
            &self.nodes,
            &CopiesWanted {
                local: "",
                copies: self.nodes.iter().filter(holding).count() + 1,
                size_bytes,
                holders: &holders,
                without: &without,
            },
        );
        placement.nodes.into_iter().next()
    }
}
