//! The end of a process that was told to stop: never later than a few seconds, whatever is under way.

use std::process;
use std::thread;
use std::time::Duration;

/// Longest time that a stop takes. A stop that waits for a medium, a registry or a peer may take longer than anybody
/// waits; ended in the middle it costs no more than a crash does, which loses nothing that was sealed.
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
                seconds = patience.as_secs(),
                "the stop takes too long: ended as by a crash; the next start recovers the region"
            );
            process::exit(INCOMPLETE);
        });
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread to bound the time of the stop");
    }
}
