//! Facts that this node publishes about itself.

use std::net::SocketAddr;
use std::path::Path;

use permafrost_cluster::{NodeClass, NodeFacts, Tier};
use permafrost_pmem::MediumKind;
use permafrost_protocol::versions::{self, RELEASE};
use permafrost_store::{Store, StoreError};

use crate::config::ClusterOptions;
use crate::error::SetupError;

/// Magic number of tmpfs in statfs(2).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Name of a machine that has none.
const NAMELESS: &str = "localhost";

/// Returns the facts of a node without a cluster. Only the node itself uses them.
pub(super) fn alone(store: &Store) -> NodeFacts {
    let system = rustix::system::uname();
    let name = system.nodename().to_string_lossy();
    NodeFacts {
        name: if name.is_empty() {
            NAMELESS.to_owned()
        } else {
            name.into_owned()
        },
        tier: tier_of(store),
        ..of_region(store)
    }
}

/// Returns the facts that a node publishes to its cluster.
///
/// # Errors
/// The advertised address is not reachable for other nodes.
pub(super) fn facts(
    options: &ClusterOptions,
    name: &str,
    address: SocketAddr,
    store: &Store,
) -> Result<NodeFacts, StoreError> {
    let advertised = options.advertise.unwrap_or(address);
    if advertised.ip().is_unspecified() || advertised.port() == 0 {
        return Err(SetupError::Unreachable {
            address: advertised,
        }
        .into());
    }
    let facts = NodeFacts {
        name: name.to_owned(),
        address: advertised.to_string(),
        tier: options.tier.unwrap_or_else(|| tier_of(store)),
        class: options.class,
        counts_although_volatile: options.count_volatile_copies,
        domain: options.domain.clone(),
        ..of_region(store)
    };
    if facts.volatile && !facts.counts() && facts.class == NodeClass::Reserved {
        tracing::warn!(
            event = "region-volatile", region = %store.place().path.display(),
            "the region's medium does not outlast a power failure, so copies on this node do not count towards quorum and all: use another medium, or say --count-volatile-copies"
        );
    }
    Ok(facts)
}

fn of_region(store: &Store) -> NodeFacts {
    let region = store.region_status();
    NodeFacts {
        capacity_bytes: region.capacity_bytes,
        free_bytes: region.free_bytes,
        region: region.uuid,
        volatile: region.volatile,
        region_file: file_of(&store.place().path),
        version: RELEASE.to_owned(),
        speaks: Some(versions::own().clone()),
        ..NodeFacts::default()
    }
}

/// Returns device and inode number of a file, which a copy does not share. Empty if the file cannot be examined.
fn file_of(path: &Path) -> String {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(path).map_or_else(
        |_| String::new(),
        |file| format!("{:x}:{:x}", file.dev(), file.ino()),
    )
}

fn tier_of(store: &Store) -> Tier {
    let place = store.place();
    match place.guarantee.kind {
        MediumKind::Dax => Tier::Pmem,
        _ if is_in_memory(&place.path) => Tier::Memory,
        _ => Tier::File,
    }
}

fn is_in_memory(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|fs| u64::try_from(fs.f_type) == Ok(TMPFS_MAGIC))
}
