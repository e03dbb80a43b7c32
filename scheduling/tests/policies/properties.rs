//! What holds for every policy and any events.

use permafrost_scheduling::NodeId;
use permafrost_scheduling::policy::{Name, PolicySettings, TaskView};
use permafrost_scheduling::quantity::Bytes;
use permafrost_scheduling::size::JobId;
use proptest::prelude::*;

use crate::world::{World, at, cpus, seconds};

#[derive(Clone, Debug)]
struct Asked {
    at: u32,
    cpus: u64,
    mib: u64,
    work: u32,
    priority: u8,
    job: u64,
}

fn asked() -> impl Strategy<Value = Asked> {
    (
        0_u32..200,
        1_u64..5,
        1_u64..800,
        1_u32..120,
        0_u8..3,
        0_u64..5,
    )
        .prop_map(|(at, cpus, mib, work, priority, job)| Asked {
            at,
            cpus,
            mib,
            work,
            // The tasks of a job have one priority.
            priority: if priority == 2 && job == 0 {
                0
            } else {
                u8::try_from(job % 3).unwrap_or(0)
            },
            job,
        })
}

fn settings(seed: u64) -> PolicySettings {
    PolicySettings {
        seed,
        ..PolicySettings::default()
    }
}

fn run(name: Name, nodes: u32, asked: &[Asked], lost: Option<u32>, seed: u64) -> World {
    run_with(name, nodes, asked, lost, &settings(seed))
}

fn run_with(
    name: Name,
    nodes: u32,
    asked: &[Asked],
    lost: Option<u32>,
    settings: &PolicySettings,
) -> World {
    let mut world = World::new(name.build(settings), nodes, cpus(4, 1000));
    for job in 0..5_u32 {
        world.view.add_job(Some(at(300.0 + f64::from(job) * 50.0)));
    }
    for asked in asked {
        let mut task = TaskView::new(
            JobId(asked.job),
            at(f64::from(asked.at)),
            cpus(asked.cpus, asked.mib),
        );
        task.priority = asked.priority;
        task.work = Some(seconds(f64::from(asked.work)));
        task.memory = Bytes::mib(asked.mib / 2);
        world.submit(task);
    }
    if let Some(when) = lost {
        world.lose(NodeId(0), at(f64::from(when)));
    }
    world.run(at(40_000.0));
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn no_task_is_lost_or_run_twice_and_work_is_conserved(
        asked in prop::collection::vec(asked(), 1..40),
        nodes in 2_u32..5,
        lost in prop::option::of(0_u32..200),
        seed in any::<u64>(),
    ) {
        for name in Name::ALL {
            let world = run(*name, nodes, &asked, lost, seed);
            prop_assert_eq!(world.ended.len(), asked.len(), "{} loses tasks", name);
            let done: f64 = asked.iter().map(|asked| f64::from(asked.work)).sum();
            prop_assert!(
                (done + world.wasted - world.worked).abs() < 1e-2,
                "{}: {} done and {} wasted of {}", name, done, world.wasted, world.worked
            );
        }
    }

    #[test]
    fn the_same_seed_leads_to_the_same_decisions(
        asked in prop::collection::vec(asked(), 1..30),
        seed in any::<u64>(),
    ) {
        for name in Name::ALL {
            let one = run(*name, 2, &asked, None, seed).log;
            let other = run(*name, 2, &asked, None, seed).log;
            prop_assert_eq!(one, other, "{}", name);
        }
    }

    #[test]
    fn an_index_decides_as_a_visit_of_all_nodes_does(
        asked in prop::collection::vec(asked(), 1..80),
        nodes in 1_u32..12,
        lost in prop::option::of(0_u32..200),
    ) {
        for name in ["kill", "basic", "li2015", "adaptive", "suspend"] {
            let name: Name = name.parse().unwrap();
            let without = PolicySettings {
                index: false,
                ..settings(0)
            };
            let with = run(name, nodes, &asked, lost, 0);
            let without = run_with(name, nodes, &asked, lost, &without);
            prop_assert_eq!(&with.log, &without.log, "{}", name);
        }
    }
}
