//! The experiment of paper 000, Figures 4 and 6, replayed by the simulator, equals its closed form in
//! `scheduling::sensitivity`: the deployed policies decide, and the times are those by hand.

use permafrost_scheduling::policy::{Name, PolicySettings};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Ratio, Seconds};
use permafrost_scheduling::sensitivity::{Jobs, Policy, Power, simulate};
use permafrost_simulation::engine::{EngineConfig, Outcome, run};
use permafrost_simulation::medium::StorageMedium;
use permafrost_simulation::workload::{Band, two_jobs};
use proptest::prelude::*;

fn replay(policy: &str, jobs: &Jobs, medium: &StorageMedium) -> Outcome {
    let workload = two_jobs(jobs);
    let config = EngineConfig {
        power: Power::TIME,
        check: true,
        ..EngineConfig::with(medium.clone())
    };
    let mut policy = policy
        .parse::<Name>()
        .unwrap()
        .build(&PolicySettings::default());
    run(&workload, &mut *policy, &config, None).unwrap().outcome
}

fn assert_equal(policy: Policy, name: &str, jobs: &Jobs, medium: &StorageMedium) {
    let model = simulate(policy, jobs, &medium.storage).unwrap();
    let ours = replay(name, jobs, medium);
    let mean = |band| ours.band(band).map_or(0.0, |of| of.mean_s);
    let pairs = [
        ("high", mean(Band::High), model.high_response.value()),
        ("low", mean(Band::Low), model.low_response.value()),
        ("makespan", ours.makespan_s, model.makespan.value()),
        (
            "energy",
            ours.energy_kwh * 3.6e6,
            model.energy_j(&Power::TIME),
        ),
        (
            "computing",
            (ours.done_core_h + ours.lost_core_h) * 3600.0,
            model.computing.value(),
        ),
        (
            "checkpointing",
            (ours.starting_core_h + ours.leaving_core_h) * 3600.0,
            model.checkpointing.value(),
        ),
    ];
    for (what, ours, model) in pairs {
        // Timestamps are whole microseconds, rounded up.
        assert!(
            (ours - model).abs() < 1e-4,
            "{what} under {name}: {ours} is not {model}"
        );
    }
}

const POLICIES: [(Policy, &str); 4] = [
    (Policy::Wait, "wait"),
    (Policy::Kill, "kill"),
    (Policy::Checkpoint, "basic"),
    (Policy::Adaptive, "li2015"),
];

#[test]
fn the_papers_jobs_take_on_its_media_what_the_model_says() {
    for medium in StorageMedium::of_the_paper() {
        for (policy, name) in POLICIES {
            assert_equal(policy, name, &Jobs::PAPER, &medium);
        }
    }
}

#[test]
fn by_hand_a_dump_on_nvm_delays_one_job_by_2_92_and_the_other_by_5_84_seconds() {
    let [_, _, nvm] = StorageMedium::of_the_paper();
    let outcome = replay("basic", &Jobs::PAPER, &nvm);
    let mean = |band| outcome.band(band).map_or(0.0, |of| of.mean_s);
    assert!((mean(Band::High) - 62.92).abs() < 1e-4);
    assert!((mean(Band::Low) - 125.84).abs() < 1e-4);
    assert_eq!(outcome.counts.full_dumps, 1);
    assert_eq!(outcome.counts.local_restores, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Replays any two jobs on any bandwidth.
    #[test]
    fn any_two_jobs_take_what_the_model_says(
        work in 1.0..1e4_f64,
        part in 0.0..0.95_f64,
        mebibytes in 1_u64..1 << 16,
        exponent in 6.0..11.0_f64,
    ) {
        let jobs = Jobs {
            work: Seconds::new(work).unwrap(),
            arrival: Seconds::new(work).unwrap().times(Ratio::new(part).unwrap()),
            size: Bytes::mib(mebibytes),
        };
        let medium = StorageMedium::with_bandwidth(BytesPerSecond::new(10_f64.powf(exponent)).unwrap());
        // Where both cost the same to a microsecond, rounding decides.
        let overhead = 2.0 * jobs.size.at(medium.storage.write).value();
        prop_assume!((overhead - jobs.arrival.value()).abs() > 1e-3);
        for (policy, name) in POLICIES {
            assert_equal(policy, name, &jobs, &medium);
        }
    }
}
