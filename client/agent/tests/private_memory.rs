//! The only test of this program, because it changes the whole process.

#![allow(missing_docs)]

use permafrost_agent::host::keep_memory_private;
use rustix::process::{DumpableBehavior, Resource, dumpable_behavior, getrlimit};

#[test]
fn a_daemon_writes_no_core_file_and_is_not_traced_by_others() {
    assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::Dumpable);
    keep_memory_private();
    assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
    let core = getrlimit(Resource::Core);
    assert_eq!((core.current, core.maximum), (Some(0), Some(0)));
    // The process can still read its own `/proc` entries, as a daemon that is not root has to.
    assert!(std::fs::read_link("/proc/self/fd/0").is_ok());
}
