//! Values of options: types that clap has no parser for.

use std::time::Duration;

use permafrost_agent::host::arguments::parse_duration;
use permafrost_cluster::ClusterConfig;
use permafrost_cluster::FailureDomain;
use permafrost_clustered::Durability;
use permafrost_protocol::control::ReportedError as _;

/// Concurrency limit, or `None` for `auto`. A wrapper, because clap gives an `Option` a meaning of its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct AtOnce(pub(super) Option<usize>);

pub(super) fn parse_at_once(text: &str) -> Result<AtOnce, String> {
    match text {
        "auto" => Ok(AtOnce(None)),
        number => match number.parse() {
            Ok(number @ 1..=1024) => Ok(AtOnce(Some(number))),
            _ => Err(format!(
                "{text:?} is neither a number from 1 to 1024 nor auto"
            )),
        },
    }
}

/// Checks the URL of a registry, and returns it as it is.
pub(super) fn parse_catalog(url: &str) -> Result<String, String> {
    let Err(error) = ClusterConfig::parse(url) else {
        return Ok(url.to_owned());
    };
    // The defect itself: what is around it repeats the URL, in which there may be a password.
    let mut defect: &dyn std::error::Error = &error;
    while let Some(cause) = defect.source() {
        defect = cause;
    }
    Err(format!("{defect}; {}", error.hint()))
}

/// Period, or `None` for never. A wrapper, because clap gives an `Option` a meaning of its own.
#[derive(Clone, Copy)]
pub(super) struct Period(pub(super) Option<Duration>);

pub(super) fn parse_period(text: &str) -> Result<Period, String> {
    match text {
        "off" => Ok(Period(None)),
        "0" => Err("say `off` for never".to_owned()),
        time => parse_duration(time).map(|time| Period(Some(time))),
    }
}

/// A percentage, or `off`.
#[derive(Clone, Copy)]
pub(super) struct Percent(pub(super) Option<u8>);

pub(super) fn parse_percent(text: &str) -> Result<Percent, String> {
    if text == "off" {
        return Ok(Percent(None));
    }
    let percent = text.parse().ok().filter(|percent| *percent <= 100);
    let percent = percent.ok_or("say a number of 0 to 100, or `off`")?;
    Ok(Percent(Some(percent)))
}

pub(super) fn parse_durability(word: &str) -> Result<Durability, String> {
    match Durability::parse(word) {
        Ok(Some(durability)) => Ok(durability),
        _ => Err("say local, quorum or all".to_owned()),
    }
}

/// Parses one of the words that an enum has in the registry.
pub(super) fn parse_word<T: serde::de::DeserializeOwned>(word: &str) -> Result<T, String> {
    serde_json::from_value(word.into()).map_err(|error| error.to_string())
}

/// Parses `HOST`, `RACK/HOST` or `ZONE/RACK/HOST`.
pub(super) fn parse_domain(text: &str) -> Result<FailureDomain, String> {
    let mut parts = text.rsplit('/').map(str::to_owned);
    let mut next = || parts.next().unwrap_or_default();
    let (host, rack, zone) = (next(), next(), next());
    if parts.next().is_some() {
        return Err(format!("{text:?} has more than zone, rack and host"));
    }
    Ok(FailureDomain { host, rack, zone })
}

#[cfg(test)]
mod tests {
    use permafrost_cluster::{NodeClass, Tier};

    use super::*;

    #[test]
    fn a_failure_domain_ends_with_the_host() {
        let domain = |host: &str, rack: &str, zone: &str| {
            Ok(FailureDomain {
                host: host.into(),
                rack: rack.into(),
                zone: zone.into(),
            })
        };
        assert_eq!(parse_domain(""), domain("", "", ""));
        assert_eq!(parse_domain("h"), domain("h", "", ""));
        assert_eq!(parse_domain("z/r/h"), domain("h", "r", "z"));
        assert!(parse_domain("a/b/c/d").is_err());
    }

    #[test]
    fn a_scrub_period_of_nothing_is_off() {
        assert!(parse_period("off").is_ok_and(|period| period.0.is_none()));
        assert_eq!(
            parse_period("0").map(drop),
            Err("say `off` for never".to_owned())
        );
    }

    #[test]
    fn words_are_the_registry_s() {
        assert_eq!(parse_word("transient"), Ok(NodeClass::Transient));
        assert_eq!(parse_word("pmem"), Ok(Tier::Pmem));
        assert!(parse_word::<Tier>("floppy").is_err());
    }
}
