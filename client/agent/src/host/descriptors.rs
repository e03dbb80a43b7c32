//! The number of descriptors that a daemon may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open descriptors to what is allowed: a lazily restored process takes one, and a service gets
/// 1,024 unless more are asked for. A failure is logged.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(event = "descriptor-limit-not-raised", %error, "limit of open descriptors not raised");
    }
}
