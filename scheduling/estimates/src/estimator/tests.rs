use super::*;

const NODE: Channel = Channel::Medium {
    node: NodeId(1),
    tier: MediumTier::Nvm,
    direction: Direction::Write,
};

fn second(n: u64) -> Moment {
    Moment::from_micros(n * 1_000_000)
}

/// Makes a transfer of `mib` MiB in one second, at second `n`.
fn one_second(n: u64, mib: u64) -> Transfer {
    Transfer {
        at: second(n),
        bytes: Bytes::mib(mib),
        elapsed: Seconds::from_millis(1000),
    }
}

fn measured() -> Estimator {
    let mut estimator = Estimator::default();
    for n in 1..=20 {
        estimator
            .transferred(NODE, second(n), one_second(n, 2048))
            .unwrap();
    }
    estimator
}

#[test]
fn a_bandwidth_has_its_age_and_its_number_of_samples() {
    let figure = measured()
        .rates(NODE, second(25))
        .of(Bytes::mib(4096))
        .known()
        .unwrap();
    assert!((figure.p50.value() / Bytes::mib(2048).count() as f64 - 1.0).abs() < 1e-6);
    assert!(figure.p95 < figure.p50);
    assert_eq!(
        (figure.age, figure.samples),
        (Seconds::from_millis(5000), 20)
    );
}

#[test]
fn a_size_without_samples_takes_its_neighbours_with_a_wider_spread() {
    let rates = measured().rates(NODE, second(20));
    let own = rates.of(Bytes::mib(4096)).known().unwrap();
    let next = rates.of(Bytes::mib(100)).known().unwrap();
    assert_eq!(own.p50, next.p50);
    assert!(next.p95.value() <= own.p95.value() / 2.0);
}

#[test]
fn what_was_never_measured_and_what_is_too_old_are_told_apart() {
    let estimator = measured();
    let other = Channel::Link {
        from: NodeId(1),
        to: NodeId(2),
    };
    assert_eq!(
        estimator.rates(other, second(1)).sustained().known(),
        Err(Missing::NotMeasured {
            what: What::LinkBandwidth
        })
    );
    let late = estimator
        .rates(NODE, second(20 + 3601))
        .sustained()
        .known()
        .unwrap_err();
    assert!(matches!(late, Missing::TooOld { age, .. } if age.value() == 3601.0));
    assert_eq!(
        estimator.latency(NODE, second(20)).known(),
        Err(Missing::NotMeasured {
            what: What::Latency
        })
    );
}

#[test]
fn a_node_that_lies_is_refused_then_distrusted_then_forgiven() {
    let mut estimator = measured();
    let honest = estimator.rates(NODE, second(30));
    let lie = |bytes, millis, at| Transfer {
        at: second(at),
        bytes: Bytes::new(bytes),
        elapsed: Seconds::from_millis(millis),
    };
    let now = second(30);
    let nothing = estimator.transferred(NODE, now, lie(0, 1000, 30));
    assert!(matches!(nothing, Err(Refused::NoRate(_))));
    let everything = estimator.transferred(NODE, now, lie(u64::MAX / 10, 1000, 30));
    assert!(
        matches!(
            everything,
            Err(Refused::Implausible { .. } | Refused::NoRate(_))
        ),
        "{everything:?}"
    );
    // Two lies change nothing.
    assert_eq!(estimator.rates(NODE, now), honest);
    let past = estimator.transferred(NODE, now, one_second(2, 1));
    assert!(matches!(past, Err(Refused::Backwards { by }) if by.value() == 18.0));
    assert_eq!(
        estimator.rates(NODE, now).sustained().known(),
        Err(Missing::NotBelieved {
            what: What::WriteBandwidth,
            refused: 3
        })
    );
    assert_eq!(estimator.refused(NODE), 3);
    estimator
        .transferred(NODE, now, one_second(30, 2048))
        .unwrap();
    assert!(estimator.rates(NODE, now).sustained().known().is_ok());
}

#[test]
fn what_is_kept_gives_the_same_figures_again() {
    let mut estimator = measured();
    for n in 1..=5 {
        let small = Transfer {
            bytes: Bytes::new(4096),
            ..one_second(20 + n, 1)
        };
        estimator.transferred(NODE, second(40), small).unwrap();
        let latency = Seconds::from_millis(n);
        estimator
            .answered(NODE, second(40), second(20 + n), latency)
            .unwrap();
    }
    let mut again = Estimator::default();
    let kept = estimator.kept(NODE);
    assert_eq!((kept.transfers.len(), kept.latencies.len()), (25, 5));
    for transfer in kept.transfers {
        again.transferred(NODE, second(40), transfer).unwrap();
    }
    for (at, latency) in kept.latencies {
        again.answered(NODE, second(40), at, latency).unwrap();
    }
    let rates = |estimator: &Estimator| estimator.rates(NODE, second(41));
    for ((_, one), (_, other)) in rates(&estimator).by_class().zip(rates(&again).by_class()) {
        let (one, other) = (one.known().unwrap(), other.known().unwrap());
        assert!((one.p50.value() / other.p50.value() - 1.0).abs() < 1e-9);
        assert_eq!((one.age, one.samples), (other.age, other.samples));
    }
    let of_nobody = Channel::Link {
        from: NodeId(8),
        to: NodeId(9),
    };
    assert_eq!(estimator.kept(of_nobody), SavedMeasurements::default());
}

#[test]
fn a_report_from_the_future_is_refused() {
    let refused = Estimator::default().transferred(NODE, second(1), one_second(2, 1));
    assert!(matches!(refused, Err(Refused::Future { .. })));
}

#[test]
fn a_node_that_was_forgotten_may_begin_its_clock_anew() {
    let mut estimator = measured();
    estimator.forget(NodeId(1));
    assert!(
        estimator
            .transferred(NODE, second(30), one_second(1, 1))
            .is_ok()
    );
}

#[test]
fn the_number_of_channels_is_bounded() {
    let mut estimator = Estimator::new(EstimatorConfig {
        channels: 1,
        ..EstimatorConfig::default()
    });
    let link = Channel::Link {
        from: NodeId(1),
        to: NodeId(2),
    };
    assert!(
        estimator
            .transferred(NODE, second(9), one_second(1, 1))
            .is_ok()
    );
    assert_eq!(
        estimator.answered(link, second(9), second(9), Seconds::ZERO),
        Err(Refused::TooManyChannels { limit: 1 })
    );
    assert!(
        estimator
            .answered(NODE, second(9), second(9), Seconds::ZERO)
            .is_ok()
    );
    let latency = estimator.latency(NODE, second(9)).known().unwrap();
    assert!(latency.p50.value() > 0.0 && latency.p95 > latency.p50);
}
