//! Operations that wait for each other when a session ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_criu::frontend::PageSink;

use super::site::{LIMIT, Site};

/// The release of a job's lock asks the registry, which may be slow. Queries of the sessions do not wait for it, and
/// so neither do other dumps.
#[test]
fn a_registry_that_hangs_holds_up_nobody_who_looks_at_sessions() {
    for ending in ["abort", "dropped", "seal fails"] {
        let (entered, enters) = mpsc::channel();
        let (go_on, goes_on) = mpsc::channel::<()>();
        let goes_on = Mutex::new(goes_on);
        let first = AtomicBool::new(true);
        let site = Site::clustered_with(Some(Arc::new(move || {
            if first.swap(false, Ordering::Relaxed) {
                entered.send(()).unwrap();
                let _ = goes_on.lock().recv_timeout(LIMIT);
            }
        })));
        let (session, mut sink) = site.begin("job", 0..4);
        std::thread::scope(|scope| {
            let store = &site.store;
            let ended = scope.spawn(move || match ending {
                "abort" => store.abort_session(&session).unwrap(),
                "dropped" => drop(sink),
                _ => {
                    sink.close().unwrap();
                    // No images directory at all.
                    let nothing = std::fs::File::open("/dev/null").unwrap();
                    store.seal_session(&session, nothing.into()).unwrap_err();
                }
            });
            enters.recv_timeout(LIMIT).unwrap();
            let (answer, answers) = mpsc::channel();
            scope.spawn(move || {
                let states = store.local().session_states();
                let receiving = store.local().is_receiving();
                let _ = answer.send((states.len(), receiving));
            });
            let answered = answers.recv_timeout(Duration::from_secs(20));
            go_on.send(()).unwrap();
            ended.join().unwrap();
            let (sessions, receiving) = answered.expect(ending);
            assert_eq!((sessions, receiving), (1, false), "{ending}");
        });
    }
}
