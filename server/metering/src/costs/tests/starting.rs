use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::TierRoom;
use permafrost_scheduling::figure::{Missing, What};
use permafrost_scheduling::quantity::Seconds;

use super::*;

fn sample(what: StartWhat, mib: u64, millis: u64, age_s: u64) -> StartSample {
    StartSample {
        what,
        tier: String::new(),
        bytes: mib * MIB,
        elapsed: Seconds::from_millis(millis),
        age: Seconds::from_millis(age_s * 1000),
    }
}

fn written(directory: &std::path::Path) -> CostsConfig {
    CostsConfig {
        figures: Some(directory.join("figures.json")),
        ..CostsConfig::default()
    }
}

/// Median, MiB/s, age and samples of full dumps of 1000 MiB.
fn writing(costs: &Costs) -> Result<(f64, f64, u32), Missing> {
    let known = costs.report().write.of(Bytes::mib(1000)).known()?;
    let rate = known.p50.value() / MIB as f64;
    Ok((rate, known.age.value(), known.samples))
}

#[test]
fn what_was_measured_is_there_after_a_restart_with_its_age() {
    let directory = tempfile::tempdir().unwrap();
    let first = Costs::new(written(directory.path()));
    for _ in 0..7 {
        first.dumped(&dump("job", 1000));
    }
    first.copied("b", 100 * MIB, Duration::from_millis(100));
    let kept = first.kept();
    assert_eq!(kept.samples.len(), 4 * 7 + 1);
    first.save().unwrap();
    let second = Costs::new(written(directory.path()));
    let (rate, age, samples) = writing(&second).unwrap();
    assert!(close(rate, 1000.0) && age < 60.0 && samples == 7);
    let start = second.report().dump_start.known().unwrap();
    assert!(close(start.p50.value(), 0.5));
    assert!(second.report().links.contains_key("b"));
    let again = second.kept();
    let things = |figures: &SavedFigures| -> Vec<_> {
        let mut all: Vec<_> = figures
            .samples
            .iter()
            .map(|one| (one.what.clone(), one.bytes))
            .collect();
        all.sort();
        all
    };
    assert_eq!(things(&again), things(&kept));
}

#[test]
fn lazy_restores_have_figures_of_their_own_which_hold_for_long() {
    let directory = tempfile::tempdir().unwrap();
    let config = written(directory.path());
    let first = Costs::new(config.clone());
    let unknown = first.report().lazy.sustained().known().unwrap_err();
    assert!(matches!(
        unknown,
        Missing::NotMeasured {
            what: What::LazyBandwidth
        }
    ));
    for _ in 0..3 {
        first.brought(1000 * MIB, Duration::from_millis(500));
        first.ran_lazily(Duration::from_millis(100));
    }
    // A restore of which nothing was missing says nothing.
    first.brought(0, Duration::ZERO);
    assert!(first.report().read.sustained().known().is_err());
    first.save().unwrap();
    // Written two hours ago.
    let path = config.figures.clone().unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let mut file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let then = file["written_unix_ms"].as_u64().unwrap() - 7_200_000;
    file["written_unix_ms"] = then.into();
    std::fs::write(&path, file.to_string()).unwrap();
    let report = Costs::new(config).report();
    let rate = report.lazy.of(Bytes::mib(1000)).known().unwrap();
    assert!(close(rate.p50.value() / MIB as f64, 2000.0) && rate.samples == 3);
    let start = report.lazy_start.known().unwrap();
    assert!(close(start.p50.value(), 0.1) && start.age.value() >= 7200.0);
    // Other nodes believe it for as long.
    let told = believe(None, &report, Duration::from_secs(60), NodeId(1));
    assert!(told.figures.lazy.sustained().known().is_ok());
    assert!(told.figures.lazy_start.known().is_ok());
}

#[test]
fn figures_of_a_run_that_is_long_over_do_not_hold() {
    let directory = tempfile::tempdir().unwrap();
    let config = written(directory.path());
    let path = config.figures.clone().unwrap();
    let first = Costs::new(config.clone());
    first.dumped(&dump("job", 1000));
    first.save().unwrap();
    // Written two hours ago.
    let text = std::fs::read_to_string(&path).unwrap();
    let mut file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let then = file["written_unix_ms"].as_u64().unwrap() - 7_200_000;
    file["written_unix_ms"] = then.into();
    std::fs::write(&path, file.to_string()).unwrap();
    let old = writing(&Costs::new(config)).unwrap_err();
    assert!(
        matches!(old, Missing::TooOld { age, .. } if age.value() >= 7200.0),
        "{old}"
    );
}

#[test]
fn a_damaged_file_is_ignored_and_left_where_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let config = written(directory.path());
    let path = config.figures.clone().unwrap();
    let good = r#"{"v":1,"written_unix_ms":1,"figures":{"samples":[]}}"#;
    let newer = r#"{"v":2,"written_unix_ms":1,"figures":{"samples":[]}}"#;
    let negative = good.replace("[]", r#"[{"what":"write","bytes":1,"elapsed":-1,"age":0}]"#);
    for damaged in ["", "{", "[]", newer, &negative, &good[..30]] {
        std::fs::write(&path, damaged).unwrap();
        let costs = Costs::new(config.clone());
        assert!(writing(&costs).is_err(), "{damaged}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), damaged);
    }
    // A sample that cannot be true is left out, and the others are kept.
    let samples = r#"[{"what":"write","bytes":1,"elapsed":1000,"age":0},
        {"what":"write","bytes":1048576000,"elapsed":1,"age":0}]"#;
    let mixed = good
        .replace("[]", samples)
        .replace(":1,\"figures", &format!(":{},\"figures", u64::MAX));
    std::fs::write(&path, mixed).unwrap();
    let (rate, _, samples) = writing(&Costs::new(config)).unwrap();
    assert!(close(rate, 1000.0) && samples == 1);
}

#[test]
fn what_is_installed_takes_the_place_of_what_was_measured_and_is_written_down() {
    let directory = tempfile::tempdir().unwrap();
    let costs = Costs::new(written(directory.path()));
    for _ in 0..20 {
        costs.dumped(&dump("job", 1000));
    }
    let figures = SavedFigures {
        samples: vec![
            sample(StartWhat::Write, 1000, 500, 10),
            sample(StartWhat::Read, 1000, 250, 20),
            sample(StartWhat::Link("b".to_owned()), 100, 100, 5),
            sample(StartWhat::Read, 0, 300, 20),
        ],
        emulated: Some("hdd".to_owned()),
    };
    costs.install(&figures).unwrap();
    let (rate, age, samples) = writing(&costs).unwrap();
    assert!(close(rate, 2000.0) && age >= 10.0 && samples == 1);
    let again = Costs::new(written(directory.path())).report();
    let read = again.read.of(Bytes::mib(1000)).known().unwrap();
    assert!(close(read.p50.value() / MIB as f64, 4000.0) && read.age.value() >= 20.0);
    assert!(close(again.restore_start.known().unwrap().p50.value(), 0.3));
    assert_eq!(again.emulated.as_deref(), Some("hdd"));
    // The fixed time of a dump was not among the figures: it stays.
    assert!(close(
        costs.report().dump_start.known().unwrap().p50.value(),
        0.5
    ));
}

#[test]
fn one_sample_that_cannot_be_true_refuses_them_all() {
    let costs = measured();
    let figures = SavedFigures {
        samples: vec![
            sample(StartWhat::Write, 1000, 100, 0),
            sample(StartWhat::Read, 1000, 0, 0),
        ],
        emulated: None,
    };
    let refused = costs.install(&figures).unwrap_err();
    assert!(
        matches!(refused, InstallError::Implausible { place: 1, .. }),
        "{refused}"
    );
    assert!(close(writing(&costs).unwrap().0, 1000.0));
}

#[test]
fn a_place_that_cannot_be_written_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let costs = Costs::new(written(&directory.path().join("is not there")));
    assert!(matches!(costs.save(), Err(InstallError::Write { .. })));
}

#[test]
fn each_tier_has_its_figures_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let rooms = |nvm: u64| {
        let room = |tier: &str, free_bytes| TierRoom {
            tier: tier.to_owned(),
            capacity_bytes: MIB,
            free_bytes,
            cold: false,
        };
        vec![room("nvm", nvm), room("hdd", MIB)]
    };
    let first = Costs::new(written(directory.path()));
    // It ends while the fast tier is full.
    first.set_tiers(move || rooms(0));
    for _ in 0..7 {
        first.dumped(&dump("job", 1000));
    }
    let slow = writing(&first).unwrap().0;
    first.save().unwrap();
    let again = Costs::new(written(directory.path()));
    again.set_tiers(move || rooms(MIB));
    writing(&again).unwrap_err();
    let full = Costs::new(written(directory.path()));
    full.set_tiers(move || rooms(0));
    assert!(close(writing(&full).unwrap().0, slow));
}
