//! Claims of paper 000 about its Figures 4 and 6, checked for any jobs and any storage.

use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Ratio, Seconds};
use permafrost_scheduling::sensitivity::{
    Jobs, Policy, Power, SimulatedOutcome, Storage, simulate,
};
use proptest::prelude::*;

/// Sums of floats in another order differ in their last digits.
fn no_more(a: f64, b: f64) -> bool {
    a <= b * (1.0 + 1e-9) + 1e-6
}

fn seconds(most: f64) -> impl Strategy<Value = Seconds> {
    (0.0..most).prop_map(|value| Seconds::new(value).unwrap())
}

fn rate() -> impl Strategy<Value = BytesPerSecond> {
    // By magnitude: 1 kB/s to 1 TB/s.
    (3.0_f64..12.0).prop_map(|exponent| BytesPerSecond::new(10_f64.powf(exponent)).unwrap())
}

prop_compose! {
    fn storage()(
        write in rate(),
        read in rate(),
        dump_start in seconds(10.0),
        restore_start in seconds(10.0),
    ) -> Storage {
        Storage { write, read, dump_start, restore_start }
    }
}

prop_compose! {
    /// Generates jobs of which the second arrives at some part of the first's time.
    fn jobs(latest: f64)(
        work in seconds(1e4),
        part in 0.0..latest,
        size in 0_u64..1 << 40,
    ) -> Jobs {
        Jobs { work, arrival: work.times(Ratio::new(part).unwrap()), size: Bytes::new(size) }
    }
}

prop_compose! {
    fn power()(idle_w in 0.0..500.0, more_w in 0.0..500.0, part in 0.0..=1.0) -> Power {
        Power { idle_w, busy_w: idle_w + more_w, checkpointing: Ratio::new(part).unwrap() }
    }
}

fn outcome(policy: Policy, jobs: &Jobs, storage: &Storage) -> SimulatedOutcome {
    simulate(policy, jobs, storage).unwrap()
}

proptest! {
    /// Checks §4.2.2: "the performance of the high priority job is never worse than the wait approach". That holds
    /// for a job that arrives no later than half time, as the paper's does: past that the remaining time may be
    /// shorter than a dump.
    #[test]
    fn adaptive_is_no_worse_than_waiting(jobs in jobs(0.5), storage in storage()) {
        let adaptive = outcome(Policy::Adaptive, &jobs, &storage);
        let wait = outcome(Policy::Wait, &jobs, &storage);
        prop_assert!(no_more(adaptive.high_response.value(), wait.high_response.value()));
    }

    /// Checks §4.2.2: "the energy consumption of the adaptive policy is never worse than the kill policy".
    #[test]
    fn adaptive_takes_no_more_energy_than_killing(
        jobs in jobs(1.0), storage in storage(), power in power(),
    ) {
        let adaptive = outcome(Policy::Adaptive, &jobs, &storage);
        let kill = outcome(Policy::Kill, &jobs, &storage);
        prop_assert!(no_more(adaptive.energy_j(&power), kill.energy_j(&power)));
        prop_assert!(no_more(adaptive.low_response.value(), kill.low_response.value()));
    }

    /// Checks §3.3.3: killing is best for the high-priority job, waiting for energy.
    #[test]
    fn killing_is_fastest_for_the_one_and_waiting_wastes_nothing(
        jobs in jobs(1.0), storage in storage(), power in power(),
    ) {
        for policy in Policy::ALL {
            let other = outcome(policy, &jobs, &storage);
            let kill = outcome(Policy::Kill, &jobs, &storage);
            let wait = outcome(Policy::Wait, &jobs, &storage);
            prop_assert!(no_more(kill.high_response.value(), other.high_response.value()));
            prop_assert!(no_more(wait.energy_j(&power), other.energy_j(&power)));
        }
    }

    /// Checks that more bandwidth makes a checkpoint no slower, for either job.
    #[test]
    fn bandwidth_helps(jobs in jobs(1.0), storage in storage(), factor in 1.0..100.0) {
        let faster = Storage {
            write: BytesPerSecond::new(storage.write.value() * factor).unwrap(),
            read: BytesPerSecond::new(storage.read.value() * factor).unwrap(),
            ..storage
        };
        let slow = outcome(Policy::Checkpoint, &jobs, &storage);
        let fast = outcome(Policy::Checkpoint, &jobs, &faster);
        prop_assert!(no_more(fast.high_response.value(), slow.high_response.value()));
        prop_assert!(no_more(fast.low_response.value(), slow.low_response.value()));
        // Algorithm 1 compares only the victim's loss; a smaller loss never makes it lose more.
        let slow = outcome(Policy::Adaptive, &jobs, &storage);
        let fast = outcome(Policy::Adaptive, &jobs, &faster);
        prop_assert!(no_more(fast.low_response.value(), slow.low_response.value()));
    }
}
