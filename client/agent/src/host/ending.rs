//! Bounds the time in which a process that was told to stop ends, whatever is under way.

use std::process;
use std::thread;
use std::time::Duration;

/// Time limit of a stop. A stop may wait for a medium, a registry or a peer for longer than its caller waits; a
/// stop that is cut off costs no more than a crash, which loses nothing that was sealed.
pub const STOPPING: Duration = Duration::from_secs(8);

/// Exit code of a process that was ended before its stop was complete.
const INCOMPLETE: i32 = 1;

/// Ends the process after `patience`, unless it has ended by then.
pub fn end_within(patience: Duration) {
    let spawned = thread::Builder::new()
        .name("stop-deadline".to_owned())
        .spawn(move || {
            thread::sleep(patience);
            tracing::error!(
                event = "stop-timed-out",
                seconds = patience.as_secs(),
                "the stop takes too long: ended as by a crash; the next start recovers the region"
            );
            process::exit(INCOMPLETE);
        });
    if let Err(error) = spawned {
        tracing::warn!(event = "stop-not-bounded", %error, "no thread to bound the time of the stop");
    }
}
