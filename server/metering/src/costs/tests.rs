//! Tests of measuring, predicting and reporting together.

mod believing;
mod measuring;
mod starting;

use std::sync::Arc;
use std::time::Duration;

use permafrost_scheduling::quantity::Bytes;
use permafrost_scheduling::size::{DumpKind, Memory};
use permafrost_store::{Beginning, DumpDone, Transferred};

use super::*;

const MIB: u64 = 1 << 20;

fn memory(mib: u64) -> Memory {
    Memory {
        resident: Some(Bytes::mib(mib)),
        dirty: None,
    }
}

/// Returns a dump of `mib` MiB that had the node to itself, at 1 MiB per millisecond, and took half a second
/// besides.
fn dump(job: &str, mib: u64) -> DumpDone<'_> {
    let elapsed = Duration::from_millis(mib);
    DumpDone {
        job,
        program: "p",
        generation: 1,
        id: "00",
        kind: DumpKind::Full,
        copied: false,
        tier: 0,
        moved_bytes: mib * MIB,
        stored_bytes: mib * MIB / 2,
        memory: memory(mib),
        transferred: Transferred {
            elapsed,
            waited: Duration::ZERO,
            all_bytes: mib * MIB,
        },
        whole: Some(elapsed + Duration::from_millis(500)),
        expected: None,
    }
}

fn beginning(job: &str, mib: u64) -> Beginning<'_> {
    Beginning {
        job,
        program: "p",
        kind: DumpKind::Full,
        copied: false,
        memory: memory(mib),
        moved: Arc::default(),
    }
}

fn measured() -> Arc<Costs> {
    let costs = Costs::new(CostsConfig::default());
    for _ in 0..10 {
        costs.dumped(&dump("job", 1000));
    }
    costs
}

/// Returns true if two numbers are equal but for rounding.
fn close(one: f64, other: f64) -> bool {
    (one / other - 1.0).abs() < 1e-3
}
