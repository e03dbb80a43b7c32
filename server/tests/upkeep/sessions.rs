//! Operations that wait for each other when a session ends, and rounds of pre-copies that outlive their session.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_criu::frontend::PageSink;
use permafrost_protocol::control::{ErrorCode, ReportedError as _};
use permafrost_protocol::pageserver::PE_PRESENT;
use permafrost_store::SessionRequest;

use super::site::{LIMIT, Site, address, images, page, space};

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

/// Another node of a cluster may be in the middle of the pre-copy whose rounds are stored here.
#[test]
fn a_round_of_a_pre_copy_is_a_pre_dump() {
    let site = Site::clustered();
    let request = SessionRequest {
        pre_dump: false,
        ..round()
    };
    let refused = site.store.open_session(request).map(drop).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Invalid, "{refused}");
    assert!(refused.hint().contains("pre_dump"), "{refused}");
}

fn round() -> SessionRequest {
    SessionRequest {
        job: "job".to_owned(),
        pre_dump: true,
        pre_copy: true,
        seal_follows: true,
        origin: None,
        no_parent: false,
        parent_images: true,
        from_here: true,
        taken_by: "node".to_owned(),
    }
}

#[test]
fn a_round_that_nobody_removes_is_kept_for_as_long_as_an_idle_session() {
    let patient = Site::clustered();
    let impatient = Site::with(16 << 20, |parts| {
        parts.retention.idle_session = Duration::ZERO;
    });
    for (site, left) in [(patient, 2), (impatient, 1)] {
        site.dump("job", 0..4);
        let session = site.store.open_session(round()).unwrap();
        let mut sink = session.start(site.store.local(), Box::new(|| {})).unwrap();
        sink.open(space()).unwrap();
        sink.pages(address(9), PE_PRESENT, &page(9)).unwrap();
        sink.close().unwrap();
        let round = site.store.seal_session(&session.id, images()).unwrap();
        assert_eq!(round.kind, "pre-copy");
        site.store.expire();
        let listed = site.store.list(None).unwrap();
        assert_eq!(listed.len(), left, "{listed:?}");
        assert_eq!(listed[0].kind, "full");
    }
}
