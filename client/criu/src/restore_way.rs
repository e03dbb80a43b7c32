//! Ways by which a restoring CRIU gets the pages, and the choice between them.

use permafrost_protocol::manifest::{Manifest, SpaceType};
use serde::Serialize;

/// Part of a checkpoint's pages that may not be placed, as a divisor: what must be there before CRIU maps the memory, and
/// what processes may share with the largest one.
pub const SMALL_PART: u64 = 8;

/// Way by which a restoring CRIU gets the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestoreWay {
    /// Permafrostd places them in the processes before they run, with `UFFDIO_COPY`.
    Place,
    /// CRIU reads all images from pipes (`--stream`).
    Stream,
    /// CRIU reads all images from a directory.
    Directory,
    /// They follow while the processes run (`--lazy`).
    Lazy,
}

/// Reason for the way by which a restoring CRIU gets the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestoreWayReason {
    /// It is the fastest one, and the options allow it.
    Fastest,
    /// An option asks for it.
    Requested,
    /// The permafrostd, or the agent, is of a release that places no pages.
    OldDaemon,
    /// Permafrost-action, for which CRIU waits, is not installed beside `permafrost`.
    NoActionProgram,
    /// The kernel has no userfaultfd with the events that CRIU asks for, or this user may not make one.
    NoUserfaultfd,
    /// Processes beside the largest one have more than an eighth of its pages: forked processes share memory, which CRIU
    /// restores only by itself.
    ForkedMemory,
    /// More than an eighth of the memory is shared or locked: it must be there before CRIU maps the rest.
    EagerMemory,
    /// A process has a shadow stack, which CRIU fills only by itself.
    ShadowStack,
    /// The path of the directory in memory is too long for the socket to which a streaming CRIU connects.
    LongPath,
}

/// Way of a restore, and the reason for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenRestoreWay {
    /// The way.
    pub way: RestoreWay,
    /// The reason for it.
    pub reason: RestoreWayReason,
}

impl ChosenRestoreWay {
    /// Returns the text for the restore's output.
    #[must_use]
    pub fn describe(self) -> String {
        let (way, option) = match self.way {
            RestoreWay::Place => ("placed in the processes", ""),
            RestoreWay::Stream => ("through pipes", " (--stream)"),
            RestoreWay::Directory => ("from an images directory", ""),
            RestoreWay::Lazy => ("while they run", ""),
        };
        let why = match self.reason {
            RestoreWayReason::Fastest => ", the fastest way",
            RestoreWayReason::Requested => option,
            RestoreWayReason::OldDaemon => ": this permafrostd places no pages",
            RestoreWayReason::NoActionProgram => {
                ": there is no permafrost-action beside this program"
            }
            RestoreWayReason::NoUserfaultfd => ": there is no userfaultfd here (permafrost doctor)",
            RestoreWayReason::ForkedMemory => ": forked processes share memory",
            RestoreWayReason::EagerMemory => ": much memory is shared or locked",
            RestoreWayReason::ShadowStack => ": a process has a shadow stack",
            RestoreWayReason::LongPath => {
                ": the path of the directory in memory is too long for --stream"
            }
        };
        format!("{way}{why}")
    }
}

/// Conditions on which the way of a restore depends.
#[derive(Clone, Copy, Debug)]
pub struct RestoreWayConditions<'a> {
    /// Way that an option asks for.
    pub requested: Option<RestoreWay>,
    /// True if the daemon, or the agent, places pages.
    pub daemon_places: bool,
    /// True if there is a `permafrost-action`.
    pub has_action_program: bool,
    /// True if a userfaultfd can be made.
    pub has_userfaultfd: bool,
    /// Manifest of the checkpoint.
    pub manifest: &'a Manifest,
}

impl RestoreWayConditions<'_> {
    /// Chooses the way: placement, which is faster (docs/performance.md), unless something stands against it. A CRIU that
    /// can stream has lazy pages, which came earlier.
    #[must_use]
    pub fn choose(&self) -> ChosenRestoreWay {
        if let Some(way) = self.requested {
            let reason = RestoreWayReason::Requested;
            return ChosenRestoreWay { way, reason };
        }
        let sizes = Sizes::of(self.manifest);
        let against = [
            (!self.daemon_places, RestoreWayReason::OldDaemon),
            (!self.has_action_program, RestoreWayReason::NoActionProgram),
            (!self.has_userfaultfd, RestoreWayReason::NoUserfaultfd),
            (
                sizes.others > sizes.largest / SMALL_PART,
                RestoreWayReason::ForkedMemory,
            ),
            (
                sizes.shared > sizes.all() / SMALL_PART,
                RestoreWayReason::EagerMemory,
            ),
        ];
        let against = against.into_iter().find(|(is_so, _)| *is_so);
        let (way, reason) = match against {
            Some((_, reason)) => (RestoreWay::Stream, reason),
            None => (RestoreWay::Place, RestoreWayReason::Fastest),
        };
        ChosenRestoreWay { way, reason }
    }
}

/// Numbers of pages of a checkpoint.
#[derive(Default)]
struct Sizes {
    /// Pages of the process that has most.
    largest: u64,
    /// Pages of the other processes.
    others: u64,
    /// Pages of shared memory.
    shared: u64,
}

impl Sizes {
    fn of(manifest: &Manifest) -> Self {
        let mut sizes = Self::default();
        for space in &manifest.spaces {
            match space.space_type() {
                SpaceType::SharedMemory => sizes.shared += space.pages,
                SpaceType::Process => {
                    sizes.others += space.pages.min(sizes.largest);
                    sizes.largest = sizes.largest.max(space.pages);
                }
            }
        }
        sizes
    }

    fn all(&self) -> u64 {
        self.largest + self.others + self.shared
    }
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::manifest::AddressSpace;

    use super::*;

    fn manifest(processes: &[u64], shared: u64) -> Manifest {
        let space = |space_type: SpaceType, pages| AddressSpace {
            space_type: space_type.into(),
            pages,
            ..AddressSpace::default()
        };
        let processes = processes
            .iter()
            .map(|pages| space(SpaceType::Process, *pages));
        let shared = std::iter::once(space(SpaceType::SharedMemory, shared));
        Manifest {
            spaces: processes.chain(shared).collect(),
            ..Manifest::default()
        }
    }

    #[test]
    fn pages_are_placed_unless_something_stands_against_it() {
        let (one, tree) = (manifest(&[800], 100), manifest(&[3, 800, 96, 1], 0));
        let free = RestoreWayConditions {
            requested: None,
            daemon_places: true,
            has_action_program: true,
            has_userfaultfd: true,
            manifest: &one,
        };
        let chosen = |conditions: &RestoreWayConditions<'_>| {
            let ChosenRestoreWay { way, reason } = conditions.choose();
            (way, reason)
        };
        let fastest = (RestoreWay::Place, RestoreWayReason::Fastest);
        assert_eq!(chosen(&free), fastest);
        let small_tree = RestoreWayConditions {
            manifest: &tree,
            ..free
        };
        assert_eq!(chosen(&small_tree), fastest);
        let (forked, shared) = (manifest(&[101, 800], 0), manifest(&[800], 115));
        for (conditions, reason) in [
            (
                RestoreWayConditions {
                    daemon_places: false,
                    ..free
                },
                RestoreWayReason::OldDaemon,
            ),
            (
                RestoreWayConditions {
                    has_action_program: false,
                    ..free
                },
                RestoreWayReason::NoActionProgram,
            ),
            (
                RestoreWayConditions {
                    has_userfaultfd: false,
                    ..free
                },
                RestoreWayReason::NoUserfaultfd,
            ),
            (
                RestoreWayConditions {
                    manifest: &forked,
                    ..free
                },
                RestoreWayReason::ForkedMemory,
            ),
            (
                RestoreWayConditions {
                    manifest: &shared,
                    ..free
                },
                RestoreWayReason::EagerMemory,
            ),
        ] {
            assert_eq!(chosen(&conditions), (RestoreWay::Stream, reason));
        }
        let requested = RestoreWayConditions {
            requested: Some(RestoreWay::Stream),
            ..free
        };
        let expected = (RestoreWay::Stream, RestoreWayReason::Requested);
        assert_eq!(chosen(&requested), expected);
    }
}
