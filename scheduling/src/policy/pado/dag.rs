//! Dataflow of a job: which operators run on reserved nodes, and in which stages (paper 003, §3.1).

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::place::NodeClass;

/// Tasks of a child, and the tasks of a parent that each needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dependency {
    /// Each needs the one with its number.
    OneToOne,
    /// All need the same one: a broadcast.
    OneToMany,
    /// One needs all.
    ManyToOne,
    /// All need all: a shuffle.
    ManyToMany,
}

/// An operator of a dataflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataflowOperator {
    /// Number of its tasks.
    pub tasks: u32,
    /// True if it creates its data in memory, if it is a source; else it reads them from storage.
    pub creates: bool,
}

/// An edge of a dataflow, between operators by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edge {
    /// Operator whose output is taken.
    pub from: u32,
    /// Operator that takes it.
    pub to: u32,
    /// Tasks that need each other.
    pub dependency: Dependency,
}

/// Operators and edges without a cycle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Given")]
pub struct Dataflow {
    operators: Vec<DataflowOperator>,
    edges: Vec<Edge>,
    #[serde(skip)]
    order: Vec<u32>,
}

#[derive(Deserialize)]
struct Given {
    operators: Vec<DataflowOperator>,
    edges: Vec<Edge>,
}

impl TryFrom<Given> for Dataflow {
    type Error = BadDataflow;

    fn try_from(given: Given) -> Result<Self, BadDataflow> {
        Self::new(given.operators, given.edges)
    }
}

/// Error of a dataflow that cannot be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BadDataflow {
    /// An edge names an operator that is not there.
    #[error("an edge leads from operator {} to operator {}, and there are {operators}", .edge.from, .edge.to)]
    NoOperator {
        /// Edge with the operator that is missing.
        edge: Edge,
        /// Number of operators.
        operators: usize,
    },
    /// The edges lead in a circle.
    #[error("operator {0} depends on itself")]
    Cycle(u32),
}

/// Operators that run together: those on transient nodes, and the one that takes their output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Operators, the last one first.
    pub operators: Vec<u32>,
    /// Stages whose output it takes.
    pub parents: Vec<usize>,
}

impl Dataflow {
    /// Makes a dataflow. O(operators + edges).
    ///
    /// # Errors
    ///
    /// [`BadDataflow`].
    pub fn new(operators: Vec<DataflowOperator>, edges: Vec<Edge>) -> Result<Self, BadDataflow> {
        let mut missing = vec![0_usize; operators.len()];
        let count = operators.len();
        let index = |operator: u32| usize::try_from(operator).unwrap_or(usize::MAX);
        for edge in &edges {
            match missing.get_mut(index(edge.to)) {
                Some(missing) if index(edge.from) < count => *missing += 1,
                _ => {
                    return Err(BadDataflow::NoOperator {
                        edge: *edge,
                        operators: count,
                    });
                }
            }
        }
        let mut children: Vec<Vec<u32>> = vec![Vec::new(); count];
        for edge in &edges {
            if let Some(children) = children.get_mut(index(edge.from)) {
                children.push(edge.to);
            }
        }
        let ready = (0_u32..)
            .zip(&missing)
            .filter(|(_, missing)| **missing == 0);
        let mut order: Vec<u32> = ready.map(|(operator, _)| operator).collect();
        let mut next = 0;
        while let Some(operator) = order.get(next).copied() {
            next += 1;
            for child in children.get(index(operator)).into_iter().flatten() {
                if let Some(missing) = missing.get_mut(index(*child)) {
                    *missing -= 1;
                    if *missing == 0 {
                        order.push(*child);
                    }
                }
            }
        }
        let left = (0_u32..).zip(&missing).find(|(_, missing)| **missing > 0);
        match left {
            Some((operator, _)) => Err(BadDataflow::Cycle(operator)),
            None => Ok(Self {
                operators,
                edges,
                order,
            }),
        }
    }

    /// Returns the operators.
    #[must_use]
    pub fn operators(&self) -> &[DataflowOperator] {
        &self.operators
    }

    /// Returns the edges that lead to an operator.
    pub fn into(&self, operator: u32) -> impl Iterator<Item = &Edge> {
        self.edges.iter().filter(move |edge| edge.to == operator)
    }

    /// Returns the edges that lead from an operator.
    pub fn from(&self, operator: u32) -> impl Iterator<Item = &Edge> {
        self.edges.iter().filter(move |edge| edge.from == operator)
    }

    /// Places the operators, by Algorithm 1: on reserved nodes those whose loss would make many tasks run again, and
    /// those that take all their input from there. O(operators × edges).
    #[must_use]
    pub fn placement(&self) -> Vec<NodeClass> {
        let mut classes = vec![NodeClass::Transient; self.operators.len()];
        for operator in &self.order {
            let index = usize::try_from(*operator).unwrap_or(usize::MAX);
            let class = |operator: u32| {
                let index = usize::try_from(operator).unwrap_or(usize::MAX);
                classes.get(index).copied()
            };
            let gathers = |edge: &Edge| {
                matches!(
                    edge.dependency,
                    Dependency::ManyToMany | Dependency::ManyToOne
                )
            };
            let stays = |edge: &Edge| {
                edge.dependency == Dependency::OneToOne
                    && class(edge.from) == Some(NodeClass::Reserved)
            };
            let is_reserved = if self.into(*operator).next().is_none() {
                self.operators
                    .get(index)
                    .is_some_and(|operator| operator.creates)
            } else {
                self.into(*operator).any(gathers) || self.into(*operator).all(stays)
            };
            if let Some(class) = classes.get_mut(index)
                && is_reserved
            {
                *class = NodeClass::Reserved;
            }
        }
        classes
    }

    /// Divides the operators into stages, by Algorithm 2: one for each reserved operator and each sink, with its
    /// transient ancestors. A transient operator with several children is in the stage of the first. O(operators ×
    /// edges).
    #[must_use]
    pub fn stages(&self, placement: &[NodeClass]) -> Vec<Stage> {
        let class = |operator: u32| {
            let index = usize::try_from(operator).unwrap_or(usize::MAX);
            placement.get(index).copied()
        };
        let mut stage_of: Vec<Option<usize>> = vec![None; self.operators.len()];
        let mut stages: Vec<Stage> = Vec::new();
        for operator in &self.order {
            let ends = class(*operator) == Some(NodeClass::Reserved)
                || self.from(*operator).next().is_none();
            if !ends {
                continue;
            }
            let number = stages.len();
            let mut stage = Stage {
                operators: Vec::new(),
                parents: Vec::new(),
            };
            let mut add = vec![*operator];
            while let Some(operator) = add.pop() {
                let Some(of) = stage_of.get_mut(usize::try_from(operator).unwrap_or(usize::MAX))
                else {
                    continue;
                };
                match of {
                    None => *of = Some(number),
                    // Another stage has it, and runs first.
                    Some(other) => {
                        if *other != number && !stage.parents.contains(other) {
                            stage.parents.push(*other);
                        }
                        continue;
                    }
                }
                stage.operators.push(operator);
                add.extend(self.into(operator).map(|edge| edge.from));
            }
            stages.push(stage);
        }
        stages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(creates: &[bool], edges: &[(u32, u32, Dependency)]) -> Result<Dataflow, BadDataflow> {
        let operators = creates.iter().map(|creates| DataflowOperator {
            tasks: 1,
            creates: *creates,
        });
        let edges = edges.iter().map(|&(from, to, dependency)| Edge {
            from,
            to,
            dependency,
        });
        Dataflow::new(operators.collect(), edges.collect())
    }

    fn reserved(flow: &Dataflow) -> Vec<u32> {
        let classes = (0..).zip(flow.placement());
        let reserved = classes.filter(|(_, class)| *class == NodeClass::Reserved);
        reserved.map(|(operator, _)| operator).collect()
    }

    use Dependency::{ManyToMany, ManyToOne, OneToMany, OneToOne};

    #[test]
    fn map_reduce_is_one_stage_that_ends_on_reserved_nodes() {
        // Read, map, reduce (Figure 3a).
        let flow = flow(&[false; 3], &[(0, 1, OneToOne), (1, 2, ManyToMany)]).unwrap();
        assert_eq!(reserved(&flow), [2]);
        let stages = flow.stages(&flow.placement());
        assert_eq!(stages.len(), 1);
        assert_eq!(stages[0].operators, [2, 1, 0]);
    }

    #[test]
    fn logistic_regression_has_three_stages() {
        // Create 1st model, read training data, compute gradient, aggregate gradients, compute 2nd model (Figure 3b).
        let flow = flow(
            &[true, false, false, false, false],
            &[
                (0, 2, OneToMany),
                (1, 2, OneToOne),
                (2, 3, ManyToOne),
                (0, 4, OneToOne),
                (3, 4, OneToOne),
            ],
        )
        .unwrap();
        assert_eq!(reserved(&flow), [0, 3, 4]);
        let stages = flow.stages(&flow.placement());
        assert_eq!(stages.len(), 3);
        assert_eq!(
            (stages[0].operators.as_slice(), stages[0].parents.len()),
            ([0].as_slice(), 0)
        );
        assert_eq!(stages[1].parents, [0]);
        assert!(stages[1].operators.contains(&1) && stages[1].operators.contains(&2));
        assert_eq!(stages[2].operators, [4]);
    }

    #[test]
    fn alternating_least_squares_keeps_a_factor_on_the_nodes_of_its_input() {
        // Read, user data, item data, 1st item factor (one-to-one from reserved), user factor transient and gathered.
        let flow = flow(
            &[false; 5],
            &[
                (0, 1, ManyToMany),
                (0, 2, ManyToMany),
                (2, 3, OneToOne),
                (3, 4, OneToMany),
            ],
        )
        .unwrap();
        assert_eq!(reserved(&flow), [1, 2, 3]);
    }

    #[test]
    fn circles_and_unknown_operators_are_refused() {
        let circle = flow(&[false; 2], &[(0, 1, OneToOne), (1, 0, OneToOne)]).unwrap_err();
        assert_eq!(circle.to_string(), "operator 0 depends on itself");
        let unknown = flow(&[false; 2], &[(0, 7, OneToOne)]).unwrap_err();
        assert!(unknown.to_string().contains("there are 2"));
    }
}
