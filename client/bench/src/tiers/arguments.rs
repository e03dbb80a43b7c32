//! The command line of `bench tiers`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::workload::Contents;

pub(crate) const EXAMPLES: &str = "\
For every tier, size and kind of copies: a process with so much memory is dumped, restored and checked; then some of \
its memory is written anew and it is dumped and restored again. The processes are real, and so is CRIU; permafrostd is \
one of the benchmark's own, in DIR/permafrost-bench, and goes with it. Run it as root on a machine with nothing else \
to do.

A tier that you do not have can be emulated on one that you have (faster, best tmpfs): hdd, ssd and nvm are as fast as \
those of Li et al. (Middleware '15, Table 3). Every line, file and picture of such a tier says \"emulated\".

--out gets results.json, results.csv, pictures (SVG) and a journal. A run that was cut off goes on where it stopped \
when the same command is given again.

Exit codes: 0 done; 2 the command line makes no sense; 4 --out holds another run; 5 CRIU failed; 7 a restored process \
was not what it had been; 9 not root; 130 interrupted.

Examples:
    permafrost bench tiers --tier nvm=/dev/shm --tier ssd=/var/lib/bench
    permafrost bench tiers --tier hdd=/dev/shm --emulate hdd --sizes 64M,512M --copies local
    permafrost bench tiers --tier disk=/dev/shm --emulate disk=200M:210M:8ms:cached
    permafrost bench tiers --tier nvm=/dev/shm --sensitivity --job-seconds 60 --job-size 5G
    permafrost bench tiers --model                    the paper's experiment, calculated
";

#[derive(Debug, Args)]
pub(crate) struct TiersArguments {
    /// A tier and a directory on it. Repeatable.
    #[arg(long = "tier", value_name = "NAME=DIR", value_parser = parse_tier, required_unless_present = "model")]
    pub(super) tiers: Vec<(String, PathBuf)>,
    /// Memory of the processes.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "64M,512M,2G,5G", value_parser = parse_size)]
    pub(super) sizes: Vec<u64>,
    /// Percent of the memory that is written anew before each further dump.
    #[arg(long, value_name = "PERCENTS", value_delimiter = ',', default_value = "1,10,50", value_parser = clap::value_parser!(u64).range(0..=100))]
    pub(super) dirty: Vec<u64>,
    /// How often each is measured; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) runs: u32,
    /// local: on one node. replicated: durable on a second one too, which takes etcd.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Copies::Local, Copies::Replicated])]
    pub(super) copies: Vec<Copies>,
    /// Slow a tier down to a device: hdd, ssd or nvm for the tier of that name, or NAME=DEVICE for any, where DEVICE is
    /// hdd, ssd, nvm or WRITE:READ:LATENCY[:cached]. Repeatable.
    #[arg(long, value_name = "NAME[=DEVICE]", value_delimiter = ',', value_parser = parse_emulation)]
    pub(super) emulate: Vec<(String, String)>,
    /// Where results and the journal go.
    #[arg(long, value_name = "DIR", default_value = "permafrost-bench-tiers")]
    pub(super) out: PathBuf,
    /// What fills the memory.
    #[arg(long, value_enum, default_value = "random")]
    pub(super) contents: Contents,
    /// Resume at once, with what the page cache still has of the dump. Otherwise the node forgets it first, as it will
    /// have when a task was away for long.
    #[arg(long)]
    pub(super) warm: bool,
    /// Discard what --out holds of an earlier run.
    #[arg(long)]
    pub(super) restart: bool,
    /// Measure also how two jobs fare under each policy of preemption, against the bandwidth of checkpoints (emulated
    /// on the first tier).
    #[arg(long, requires = "tiers")]
    pub(super) sensitivity: bool,
    /// Calculate the same for the paper's jobs, a minute and 5 GB each. Needs no tier, and starts nothing.
    #[arg(long)]
    pub(super) model: bool,
    /// Time that each job takes by itself.
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub(super) job_seconds: u64,
    /// Memory of each job.
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    pub(super) job_size: u64,
    /// Bandwidths of the checkpoints, bytes a second in units of 1000.
    #[arg(long, value_name = "RATES", value_delimiter = ',', default_value = "8M,32M,128M,512M,2G", value_parser = parse_rate)]
    pub(super) bandwidths: Vec<u64>,
    /// What the machine draws idle and busy, watts, for the energy. Otherwise that is the processors' busy time; in the
    /// model, the time until both jobs have ended.
    #[arg(long, value_name = "IDLE:BUSY", value_parser = parse_power)]
    pub(super) power: Option<(f64, f64)>,
    /// CRIU program.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_CRIU")]
    pub(super) criu: Option<PathBuf>,
    /// permafrostd; next to this program unless told otherwise.
    #[arg(long, value_name = "PATH", hide = true)]
    pub(super) permafrostd: Option<PathBuf>,
}

/// Number of nodes on which a dump has to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Copies {
    /// On one node
    Local,
    /// On two
    Replicated,
}

impl std::fmt::Display for Copies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Replicated => "replicated",
        })
    }
}

/// Parses a name that can be part of a file's name.
fn parse_name(name: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > 32 || !name.chars().all(plain) {
        return Err(format!(
            "{name:?} is no name of a tier: up to 32 letters, digits, - and _"
        ));
    }
    Ok(name.to_owned())
}

fn parse_tier(text: &str) -> Result<(String, PathBuf), String> {
    let (name, directory) = text
        .split_once('=')
        .ok_or("say NAME=DIR, such as ssd=/var/lib/bench")?;
    Ok((parse_name(name)?, directory.into()))
}

fn parse_emulation(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, device)) => Ok((parse_name(name)?, device.to_owned())),
        None if ["hdd", "ssd", "nvm"].contains(&text) => Ok((text.to_owned(), text.to_owned())),
        None => Err("say hdd, ssd, nvm, or NAME=WRITE:READ:LATENCY".to_owned()),
    }
}

/// Parses a size like `64M` or `5G`, in units of 1024.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    scaled(text, 1024)
        .filter(|size| (1 << 20..=1 << 42).contains(size))
        .ok_or_else(|| format!("{text:?} is no size from 1M to 4T, such as 64M or 5G"))
}

/// Parses a rate like `8M` or `2G`, in units of 1000.
fn parse_rate(text: &str) -> Result<u64, String> {
    scaled(text, 1000)
        .filter(|rate| (1000..=1_000_000_000_000).contains(rate))
        .ok_or_else(|| format!("{text:?} is no rate from 1k to 1000G, such as 8M or 2G"))
}

fn scaled(text: &str, unit: u64) -> Option<u64> {
    let (number, power) = match text.bytes().last()?.to_ascii_uppercase() {
        b'K' => (&text[..text.len() - 1], 1),
        b'M' => (&text[..text.len() - 1], 2),
        b'G' => (&text[..text.len() - 1], 3),
        b'T' => (&text[..text.len() - 1], 4),
        _ => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(unit.pow(power))
}

fn parse_power(text: &str) -> Result<(f64, f64), String> {
    let refuse = || format!("{text:?} is no pair of watts such as 120:280, the first no larger");
    let (idle, busy) = text.split_once(':').ok_or_else(refuse)?;
    let watts = |text: &str| text.parse::<f64>().ok().filter(|w| (0.0..=1e6).contains(w));
    let (idle, busy) = watts(idle).zip(watts(busy)).ok_or_else(refuse)?;
    if idle > busy {
        return Err(refuse());
    }
    Ok((idle, busy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_is_checked() {
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("5g"), Ok(5 << 30));
        for bad in ["", "1K", "5T", "1.5G", "-1M", "99999999999T", "é"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_rate("8M"), Ok(8_000_000));
        assert!(parse_rate("0").is_err());
        assert_eq!(
            parse_tier("ssd=/a=b"),
            Ok(("ssd".to_owned(), "/a=b".into()))
        );
        assert!(parse_tier("s/d=/a").is_err());
        assert!(parse_tier("/a").is_err());
        assert_eq!(parse_emulation("hdd"), Ok(("hdd".into(), "hdd".into())));
        assert_eq!(
            parse_emulation("x=1M:1M:0"),
            Ok(("x".into(), "1M:1M:0".into()))
        );
        assert!(parse_emulation("x").is_err());
        assert_eq!(parse_power("100:200"), Ok((100.0, 200.0)));
        for bad in ["200:100", "-1:1", "NaN:1", "1", "1:inf"] {
            assert!(parse_power(bad).is_err(), "{bad}");
        }
    }
}
