//! Time of a simulation: a part of Google's synthetic day under several policies, and the making of the whole day.

use divan::Bencher;
use divan::counter::ItemsCount;
use permafrost_scheduling::policy::{Name, PolicySettings};
use permafrost_simulation::engine::{EngineConfig, run};
use permafrost_simulation::medium::StorageMedium;
use permafrost_simulation::workload::{Google, google};

fn main() {
    divan::main();
}

#[divan::bench(args = ["wait", "kill", "basic", "li2015", "adaptive"], sample_count = 10)]
fn a_tenth_of_googles_day(bencher: Bencher<'_, '_>, policy: &str) {
    let workload = google(&Google::default().part(10));
    let config = EngineConfig::with("nvm".parse::<StorageMedium>().expect("a medium"));
    let name: Name = policy.parse().expect("a policy");
    bencher
        .counter(ItemsCount::new(workload.tasks().count()))
        .bench_local(|| {
            let mut policy = name.build(&PolicySettings::default());
            run(&workload, &mut *policy, &config, None).expect("an outcome")
        });
}

#[divan::bench(sample_count = 10)]
fn making_googles_day() -> usize {
    google(&Google::default()).jobs.len()
}
