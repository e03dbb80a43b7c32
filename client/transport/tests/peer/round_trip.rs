//! Round trips: the receiver gets exactly what was sent, at its own pace.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use permafrost_transport::peer::{Compression, DumpSender, PeerError, PeerOptions};

use super::site::{
    Event, LONG, Random, Site, commit, content, deadline, dump_request, finish, ping, send,
    send_all,
};

#[test]
fn a_dump_arrives_as_it_was_sent_compressed_or_not() {
    for (session, compression) in [Compression::Off, Compression::Adaptive, Compression::Always]
        .into_iter()
        .enumerate()
    {
        let session = u8::try_from(session).unwrap();
        let site = Site::new(PeerOptions {
            compression,
            ..PeerOptions::default()
        });
        let network = site.network();
        let events = content(20 + u64::from(session), 200);
        let dump = send_all(&network, session, &events);
        assert!(dump.has_parent());
        let taken = site.recorder.wait(&[session; 16]);
        assert!(taken.events == events, "{compression:?}: not what was sent");
        assert_eq!(taken.commit, Some(commit()));
        assert_eq!(taken.end, Some(Ok(())));

        let progress = dump.progress();
        assert_eq!(progress.conversations, 1);
        if compression == Compression::Always {
            assert!(
                progress.sent_bytes < progress.raw_bytes * 9 / 10,
                "{progress:?}"
            );
        }
        if compression == Compression::Off {
            assert!(progress.sent_bytes >= progress.raw_bytes, "{progress:?}");
        }
    }
}

#[test]
fn calls_and_refusals_are_answered() {
    let site = Site::new(PeerOptions::default());
    let network = site.network();
    let done = network.call("there", ping(), deadline()).unwrap();
    assert!(format!("{done:?}").contains("42"), "{done:?}");

    let mut request = dump_request(1);
    request.job = "refused".to_owned();
    match DumpSender::open(&network, "there", request, deadline()) {
        Err(PeerError::Refused { node, error }) => {
            assert_eq!(
                (node.as_str(), error.message.as_str()),
                ("there", "this job is refused")
            );
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was taken"),
    }
    // Another node than the called one answers, as its certificate shows.
    let soon = Instant::now() + Duration::from_millis(500);
    assert!(network.call("elsewhere", ping(), soon).is_err());
    let nowhere = network.call("nowhere", ping(), soon).unwrap_err();
    assert!(matches!(
        nowhere,
        PeerError::NoAddress { .. } | PeerError::Unreachable { .. }
    ));
    // A resume of an unknown session.
    let mut request = dump_request(2);
    request.resume = true;
    let unknown = DumpSender::open(&network, "there", request, deadline()).err();
    assert!(
        matches!(unknown, Some(PeerError::Refused { .. })),
        "{unknown:?}"
    );
}

#[test]
fn a_slow_receiver_slows_the_sender_instead_of_filling_its_memory() {
    const WINDOW: usize = 4 << 20;
    // quinn's own windows are small here, so that the dump's is what holds it.
    let site = Site::new(PeerOptions {
        dump_window_bytes: WINDOW,
        ..PeerOptions::default()
    });
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let at_gate = Arc::clone(&gate);
    *site.recorder.before_frame.lock() = Some(Box::new(move |_| {
        let (open, opened) = &*at_gate;
        opened.wait_while_for(&mut open.lock(), |open| !*open, LONG);
    }));
    let network = site.network();
    let mut random = Random(77);
    let events: Vec<_> = std::iter::once(Event::Space(1, 1, 1))
        .chain((0..200).map(|run| Event::Pages(run * 64, 0, random.bytes(64 * 4096))))
        .chain([Event::Close])
        .collect();
    let dump = DumpSender::open(&network, "there", dump_request(5), deadline()).unwrap();
    let dump = Arc::new(Mutex::new(dump));
    std::thread::scope(|scope| {
        let pushing = scope.spawn(|| {
            for event in &events {
                send(&mut dump.lock(), std::slice::from_ref(event)).unwrap();
            }
        });
        // The sender stops by itself, with 50 MiB still to go.
        std::thread::sleep(Duration::from_millis(1500));
        assert!(!pushing.is_finished());
        assert!(dump.try_lock().is_none(), "the sender waits for room");
        let (open, opened) = &*gate;
        *open.lock() = true;
        opened.notify_all();
        pushing.join().unwrap();
    });
    let mut dump = Arc::into_inner(dump).unwrap().into_inner();
    finish(&mut dump);
    assert!(site.recorder.wait(&[5; 16]).events == events);
    let progress = dump.progress();
    assert!(progress.peak_window_bytes <= WINDOW as u64, "{progress:?}");
    assert!(
        progress.peak_window_bytes > WINDOW as u64 / 2,
        "{progress:?}"
    );
}

#[test]
fn a_handler_that_gives_up_half_way_is_heard_by_whoever_pushes() {
    let site = Site::new(PeerOptions::default());
    let network = site.network();
    let mut request = dump_request(7);
    request.job = "full".to_owned();
    let mut dump = DumpSender::open(&network, "there", request, deadline()).unwrap();
    let mut random = Random(78);
    let pages = random.bytes(64 * 4096);
    dump.space(1, 1, 1).unwrap();
    let mut pushed = (0..).map(|run| dump.pages(run * 64, 0, &pages));
    let error = pushed.find_map(Result::err).unwrap();
    assert!(error.to_string().contains("the region is full"), "{error}");
}
