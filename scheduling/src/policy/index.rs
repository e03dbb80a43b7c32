//! Index of the tasks that can be preempted, kept between decisions.
//!
//! For each priority a binary tree over the nodes has, in each place, lower bounds for what making room costs on the
//! nodes below, with tasks of at most that priority. A kill becomes dearer by a second each second, and no mechanism
//! becomes cheaper while the figures of its node stay, so a bound holds until something happens on the node. The
//! search visits the place with the lowest bound first, and ends when no bound is below the best cost that was found.
//! A node is first bounded by its candidates one by one, which is much cheaper than the cost of making room there, and
//! leaves few nodes for which that is calculated. The tasks of a job come at once and ask for the same: what was found
//! for one of them holds for the next, but for the nodes on which something has happened since.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::base::Base;
use super::bound::{Bound, Rates};
use super::victims::{Chosen, Victims};
use super::{SchedulerView, TaskState};
use crate::cost::TaskResources;
use crate::quantity::{Moment, Seconds};
use crate::{NodeId, TaskId};

/// Bounds that hold for all nodes below a place.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Summary {
    /// Most that can be had: room to come, and all that candidates hold.
    most: TaskResources,
    /// Most room to come.
    room: TaskResources,
    /// Most that one candidate holds.
    largest: TaskResources,
    /// Least bound that does not change with time, seconds.
    fixed: f64,
    /// Bound for each thousandth of a processor, and for each byte.
    fixed_per_cpu: f64,
    fixed_per_byte: f64,
    /// Latest time since when a bound grows, microseconds; may lie before the origin.
    since: i64,
}

impl Summary {
    const NOTHING: Self = Self {
        most: TaskResources::ZERO,
        room: TaskResources::ZERO,
        largest: TaskResources::ZERO,
        fixed: f64::MAX,
        fixed_per_cpu: f64::MAX,
        fixed_per_byte: f64::MAX,
        since: i64::MIN,
    };

    fn joined(self, other: Self) -> Self {
        Self {
            most: most(self.most, other.most),
            room: most(self.room, other.room),
            largest: most(self.largest, other.largest),
            fixed: self.fixed.min(other.fixed),
            fixed_per_cpu: self.fixed_per_cpu.min(other.fixed_per_cpu),
            fixed_per_byte: self.fixed_per_byte.min(other.fixed_per_byte),
            since: self.since.max(other.since),
        }
    }

    fn with(self, candidate: &Candidate) -> Self {
        let per = |count: u64| match count {
            0 => f64::MAX,
            count => candidate.bound.fixed.value() / count as f64,
        };
        Self {
            most: self.most.plus(candidate.holds),
            room: self.room,
            largest: most(self.largest, candidate.holds),
            fixed: self.fixed.min(candidate.bound.fixed.value()),
            fixed_per_cpu: self.fixed_per_cpu.min(per(candidate.holds.cpu_millis)),
            fixed_per_byte: self.fixed_per_byte.min(per(candidate.holds.memory.count())),
            since: self.since.max(since(&candidate.bound)),
        }
    }

    /// Returns a lower bound of what it costs to make room; none if there cannot be as much.
    fn least(&self, asks: TaskResources, now: Moment) -> Option<f64> {
        if !self.most.covers(asks) {
            return None;
        }
        let wanted = asks.less(self.room);
        if wanted.is_none() {
            return Some(0.0);
        }
        // As the time since a moment is calculated.
        let age = micros(now).saturating_sub(self.since).max(0) as f64 / 1e6;
        let per = |wanted: u64, fixed: f64, largest: u64| match wanted {
            0 => 0.0,
            // Quotients and sums of rounded times may be a little less.
            wanted => {
                let least = fixed.min(age / largest.max(1) as f64) * wanted as f64;
                (least * (1.0 - 1e-9) - 1e-5).max(0.0)
            }
        };
        let by_cpu = per(
            wanted.cpu_millis,
            self.fixed_per_cpu,
            self.largest.cpu_millis,
        );
        let memory = (wanted.memory.count(), self.largest.memory.count());
        let by_memory = per(memory.0, self.fixed_per_byte, memory.1);
        Some(self.fixed.min(age).max(by_cpu).max(by_memory))
    }
}

fn micros(moment: Moment) -> i64 {
    i64::try_from(moment.micros()).unwrap_or(i64::MAX)
}

/// Returns the time since when a bound would have grown from 0 on, rounded up.
fn since(bound: &Bound) -> i64 {
    bound.grows.map_or(i64::MIN, |(done, since)| {
        let before = Moment::default().after(done);
        // What is added is rounded up, too: a task that has done nothing is as old as it runs.
        let rounding = i64::from(done > Seconds::ZERO);
        (micros(since) + 2 * rounding).saturating_sub(micros(before))
    })
}

fn most(a: TaskResources, b: TaskResources) -> TaskResources {
    TaskResources {
        cpu_millis: a.cpu_millis.max(b.cpu_millis),
        memory: a.memory.max(b.memory),
    }
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    task: TaskId,
    priority: u8,
    holds: TaskResources,
    bound: Bound,
}

/// A node: its room to come, and who can be preempted there, by number.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaf {
    room: TaskResources,
    candidates: Vec<Candidate>,
    rates: Rates,
}

/// Part of what is wanted that a candidate frees, and the lower bound of its cost.
#[derive(Clone, Copy, Debug)]
struct Piece {
    least: f64,
    frees: TaskResources,
}

impl Leaf {
    /// Returns the room that the node will have when all have left that leave it, without what is promised.
    pub(super) const fn room(&self) -> TaskResources {
        self.room
    }

    /// Returns the tasks that can be preempted, of a priority of at most `most`, by number.
    pub(super) fn candidates(&self, most: u8) -> Vec<TaskId> {
        let low = |candidate: &&Candidate| candidate.priority <= most;
        let low = self.candidates.iter().filter(low);
        low.map(|candidate| candidate.task).collect()
    }

    /// Returns a lower bound of what it costs to free `wanted`, as the lesser of two: by one candidate that frees it
    /// alone, or by several. None if all together do not.
    fn least(
        &self,
        now: Moment,
        level: u8,
        wanted: TaskResources,
        pieces: &mut Vec<Piece>,
    ) -> Option<f64> {
        pieces.clear();
        let (mut alone, mut two) = (f64::MAX, [f64::MAX; 2]);
        let mut all = TaskResources::ZERO;
        for candidate in &self.candidates {
            let frees = candidate.holds.least(wanted);
            if candidate.priority > level || frees.is_none() {
                continue;
            }
            let least = candidate.bound.at(now).value();
            if frees == wanted {
                alone = alone.min(least);
            }
            let [first, second] = two;
            two = [first.min(least), second.min(least.max(first))];
            all = all.plus(frees);
            pieces.push(Piece { least, frees });
        }
        if !all.covers(wanted) {
            return None;
        }
        let [first, second] = two;
        let several = first + second;
        if alone <= several {
            return Some(alone);
        }
        let by_cpu = parts(pieces, wanted.cpu_millis, |frees| frees.cpu_millis);
        let by_memory = parts(pieces, wanted.memory.count(), |frees| frees.memory.count());
        Some(alone.min(several.max(by_cpu).max(by_memory)))
    }

    fn summary(&self, level: u8) -> Summary {
        let room = Summary {
            most: self.room,
            room: self.room,
            ..Summary::NOTHING
        };
        let low = self
            .candidates
            .iter()
            .filter(|candidate| candidate.priority <= level);
        low.fold(room, Summary::with)
    }
}

/// Returns the least cost of freeing so much of one resource, if parts of candidates could be taken: the cheapest for
/// what they free first.
fn parts(pieces: &mut [Piece], wanted: u64, of: impl Fn(TaskResources) -> u64) -> f64 {
    if wanted == 0 {
        return 0.0;
    }
    let per = |piece: &Piece| piece.least / of(piece.frees) as f64;
    pieces.sort_unstable_by(|a, b| per(a).total_cmp(&per(b)));
    let (mut left, mut cost) = (wanted, 0.0);
    for piece in pieces.iter() {
        let frees = of(piece.frees);
        if frees >= left {
            cost += piece.least * (left as f64 / frees as f64);
            break;
        }
        cost += piece.least;
        left -= frees;
    }
    // Sums of rounded times may be a little less.
    (cost * (1.0 - 1e-9) - 1e-5).max(0.0)
}

/// Place in a search: bound, first node, and where in the tree.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    least: f64,
    first: usize,
    place: usize,
    width: usize,
}

impl Eq for Step {}

impl PartialOrd for Step {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Step {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let place = self
            .first
            .cmp(&other.first)
            .then(self.place.cmp(&other.place));
        self.least.total_cmp(&other.least).then(place)
    }
}

/// Findings about a node in the search with this number, and in those after it for the same resources at the same
/// time.
#[derive(Clone, Debug, Default)]
struct Found {
    search: u64,
    /// Bound by its candidates one by one; none if they free too little.
    least: Option<f64>,
    /// Cost of making room, if it was calculated; none if no room can be made.
    cost: Option<Option<Chosen>>,
}

/// Tree of one priority, and the findings by node.
#[derive(Clone, Debug, Default)]
struct Level {
    places: Vec<Summary>,
    found: Vec<Found>,
}

/// Candidates by node, and a tree for each priority that a candidate has had.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    leaves: Vec<Leaf>,
    width: usize,
    levels: BTreeMap<u8, Level>,
    /// Time and resources of the last search, and the number of the first one for them.
    last: Option<(Moment, TaskResources)>,
    search: u64,
}

impl Index {
    /// Takes in what has changed since the last time.
    pub(super) fn sync(
        &mut self,
        now: Moment,
        base: &mut Base,
        victims: &Victims,
        view: &SchedulerView,
    ) {
        // A node that is lost takes checkpoints of tasks on other nodes with it, which no event names.
        if base.take_lost() {
            self.last = None;
        }
        for node in base.take_dirty() {
            let index = usize::try_from(node.0).unwrap_or(usize::MAX);
            if index >= self.leaves.len() {
                self.leaves.resize_with(index + 1, Leaf::default);
            }
            let before = self.leaves.get_mut(index).map(std::mem::take);
            let leaf = leaf(now, base, node, victims, view, before.unwrap_or_default());
            for candidate in &leaf.candidates {
                self.levels.entry(candidate.priority).or_default();
            }
            if let Some(at) = self.leaves.get_mut(index) {
                *at = leaf;
            }
            self.write(index);
        }
    }

    /// Writes a node into the trees, and builds those that are new or too small.
    fn write(&mut self, index: usize) {
        self.levels.entry(0).or_default();
        self.width = self.leaves.len().next_power_of_two();
        for (level, Level { places, found }) in &mut self.levels {
            found.resize_with(self.leaves.len(), Found::default);
            if let Some(found) = found.get_mut(index) {
                *found = Found::default();
            }
            if places.len() != 2 * self.width {
                *places = vec![Summary::NOTHING; 2 * self.width];
                for (at, leaf) in places.iter_mut().skip(self.width).zip(&self.leaves) {
                    *at = leaf.summary(*level);
                }
                for place in (1..self.width).rev() {
                    join(places, place);
                }
                continue;
            }
            let Some(leaf) = self.leaves.get(index) else {
                continue;
            };
            let mut place = self.width + index;
            let summary = leaf.summary(*level);
            match places.get_mut(place) {
                Some(at) if *at != summary => *at = summary,
                _ => continue,
            }
            while place > 1 {
                place /= 2;
                if !join(places, place) {
                    break;
                }
            }
        }
    }

    /// Finds the node where room costs least, on the lowest level below `priority` where there can be any; `cost` is
    /// what it costs on a node with tasks of at most a priority.
    pub(super) fn cheapest(
        &mut self,
        now: Moment,
        asks: TaskResources,
        priority: u8,
        cost: impl Fn(NodeId, &Leaf, u8) -> Option<Chosen>,
    ) -> Option<(NodeId, Chosen)> {
        if self.last != Some((now, asks)) {
            self.last = Some((now, asks));
            self.search += 1;
        }
        let (leaves, width, search) = (&self.leaves, self.width, self.search);
        let mut levels = self.levels.range_mut(..priority);
        levels.find_map(|(number, level)| {
            let wanted = Search {
                now,
                asks,
                search,
                level: *number,
            };
            let cost = |node, leaf: &Leaf| cost(node, leaf, *number);
            level.cheapest(leaves, width, &wanted, cost)
        })
    }
}

/// A search on one level.
struct Search {
    now: Moment,
    asks: TaskResources,
    search: u64,
    level: u8,
}

impl Level {
    fn cheapest(
        &mut self,
        leaves: &[Leaf],
        width: usize,
        wanted: &Search,
        cost: impl Fn(NodeId, &Leaf) -> Option<Chosen>,
    ) -> Option<(NodeId, Chosen)> {
        let Self { places, found } = self;
        let Search { now, asks, .. } = *wanted;
        let step = |place: usize, first: usize, width: usize| {
            let least = places.get(place)?.least(asks, now)?;
            Some(Reverse(Step {
                least,
                first,
                place,
                width,
            }))
        };
        let mut best: Option<(NodeId, Chosen)> = None;
        let mut pieces = Vec::new();
        let mut heap: BinaryHeap<Reverse<Step>> = step(1, 0, width).into_iter().collect();
        while let Some(Reverse(next)) = heap.pop() {
            if let Some((node, found)) = &best {
                // Of two nodes where it costs the same the first one is taken.
                let first = usize::try_from(node.0).unwrap_or(usize::MAX);
                let total = found.total.value();
                if next.least > total || (next.least == total && next.first > first) {
                    break;
                }
            }
            if next.width > 1 {
                let half = next.width / 2;
                heap.extend(step(2 * next.place, next.first, half));
                heap.extend(step(2 * next.place + 1, next.first + half, half));
                continue;
            }
            let (Ok(node), Some(leaf), Some(found)) = (
                u32::try_from(next.first),
                leaves.get(next.first),
                found.get_mut(next.first),
            ) else {
                continue;
            };
            if found.search != wanted.search {
                let short = asks.less(leaf.room);
                *found = Found {
                    search: wanted.search,
                    least: match short.is_none() {
                        true => Some(0.0),
                        false => leaf.least(now, wanted.level, short, &mut pieces),
                    },
                    cost: None,
                };
            }
            let Some(least) = found.least else { continue };
            if least > next.least {
                heap.push(Reverse(Step { least, ..next }));
                continue;
            }
            let cost = || cost(NodeId(node), leaf);
            if let Some(chosen) = found.cost.get_or_insert_with(cost) {
                let is_better = best
                    .as_ref()
                    .is_none_or(|(than, best)| (chosen.total, NodeId(node)) < (best.total, *than));
                if is_better {
                    best = Some((NodeId(node), chosen.clone()));
                }
            }
        }
        best
    }
}

/// Joins the two places below; returns true if that changed something.
fn join(places: &mut [Summary], place: usize) -> bool {
    let (Some(left), Some(right)) = (places.get(2 * place), places.get(2 * place + 1)) else {
        return false;
    };
    let joined = left.joined(*right);
    match places.get_mut(place) {
        Some(at) if *at != joined => {
            *at = joined;
            true
        }
        _ => false,
    }
}

fn leaf(
    now: Moment,
    base: &Base,
    id: NodeId,
    victims: &Victims,
    view: &SchedulerView,
    before: Leaf,
) -> Leaf {
    let Some(node) = view.node(id).filter(|node| !node.capacity.is_none()) else {
        return Leaf::default();
    };
    let mut rates = before.rates;
    let bounds = victims.bounds(now, view, id, &mut rates);
    let old = |task: TaskId| {
        let found = (before.candidates).binary_search_by_key(&task, |candidate| candidate.task);
        found.ok().and_then(|at| before.candidates.get(at))
    };
    let candidate = |id: &TaskId| {
        let task = view.task(*id)?;
        let can = task.state == TaskState::Running && base.can_be_preempted(*id, view);
        can.then(|| Candidate {
            task: *id,
            priority: task.priority,
            holds: task.holds,
            bound: bounds.of(*id, old(*id).map(|old| &old.bound)),
        })
    };
    let mut candidates: Vec<Candidate> = node.tasks.iter().filter_map(candidate).collect();
    candidates.sort_unstable_by_key(|candidate| candidate.task);
    Leaf {
        room: base.room_to_come(id, view),
        candidates,
        rates,
    }
}
