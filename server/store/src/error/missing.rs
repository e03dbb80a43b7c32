//! Objects that were looked up and do not exist.

use std::collections::BTreeSet;

/// An object that does not exist.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message explains its variant and fields")]
pub enum MissingObject {
    #[error("checkpoint {0}")]
    Checkpoint(String),
    #[error("checkpoint {0} in the registry")]
    Listed(String),
    #[error("job {0}")]
    Job(String),
    #[error("session {0}")]
    Session(String),
    #[error("parked session {0}")]
    ParkedSession(String),
    #[error(
        "parked dump that these images of the processes {processes:?} belong to{}",
        listed(misfits)
    )]
    ParkedDump {
        processes: BTreeSet<u64>,
        /// Reason why each parked session does not match.
        misfits: Vec<String>,
    },
    #[error("image {name} of {checkpoint}")]
    Image { name: String, checkpoint: String },
    #[error("image {0}")]
    ImageName(String),
    #[error("address space {number}")]
    AddressSpace {
        /// Place in the manifest, from 1.
        number: usize,
    },
    #[error("{object} of checkpoint {checkpoint}")]
    Object { object: String, checkpoint: String },
    #[error("copy of {checkpoint} on this node{}", held_by(holders))]
    Copy {
        checkpoint: String,
        /// Nodes that hold a copy, if they are known.
        holders: Vec<String>,
    },
}

/// Formats the reasons why parked sessions do not match: the first few of them.
fn listed(misfits: &[String]) -> String {
    const SHOWN: usize = 5;
    match misfits.len() {
        0 => String::new(),
        count => format!(
            " ({}{})",
            misfits[..count.min(SHOWN)].join("; "),
            if count > SHOWN { "; and others" } else { "" }
        ),
    }
}

fn held_by(holders: &[String]) -> String {
    if holders.is_empty() {
        return String::new();
    }
    format!(" (held by {})", holders.join(", "))
}
