//! Keeps a daemon's memory out of core files, and out of reach of other processes of its user.

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

/// Makes this process write no core file, and lets only root trace it or read it through `/proc`: pages of
/// other processes and private keys pass through it. Must be called first; a step that fails is logged.
pub fn keep_memory_private() {
    // Since prctl(2) speaks for itself alone, a limit is set beside it: it holds for handlers of core files, too.
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(event = "process-traceable", %error, "this process can be traced by others of its user");
    }
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    if let Err(error) = setrlimit(Resource::Core, none) {
        tracing::warn!(event = "core-files-possible", %error, "this process may write core files");
    }
}
