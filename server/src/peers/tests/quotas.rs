//! Quotas of namespaces, at each operation that uses them.

use std::sync::Arc;

use permafrost_identity::Role;
use permafrost_metering::queues::{Owner, Queues, QueuesOptions, Reservations};
use permafrost_protocol::control::{ErrorCode, ReportedError, reply, request};
use permafrost_store::Adoption;

use super::site::{Site, load_quotas};

#[test]
fn a_namespace_stores_no_more_checkpoints_than_it_may() {
    let site = Site::limited("* checkpoints=2\nteam-b checkpoints=unlimited\n");
    site.dump("team-a/x");
    site.park("team-a/y");
    let refused = site.try_dump("team-a/z").unwrap_err();
    assert_eq!(refused.code(), ErrorCode::NoSpace);
    let said = refused.to_reply();
    assert!(
        said.message.contains("team-a may have 2 checkpoints") && said.message.contains("has 2"),
        "{said:?}"
    );
    assert!(said.hint.contains("--quotas"), "{said:?}");
    // Others go on, and so does this one once it has made room.
    for _ in 0..3 {
        site.dump("team-b/x");
    }
    site.store
        .remove(&permafrost_protocol::control::request::Remove {
            checkpoint: "team-a/x".to_owned(),
            all_generations: true,
            ..Default::default()
        })
        .unwrap();
    site.dump("team-a/z");
}

#[test]
fn what_a_dump_really_takes_is_known_at_its_seal() {
    let taken = {
        let site = Site::new();
        site.dump("team-a/before");
        site.store.local().usage_of("team-a").bytes
    };
    assert!(taken >= 8 * 4096);
    let site = Site::limited(&format!("team-a bytes={}\n", taken + 100));
    site.dump("team-a/before");
    let free = site.store.local().region_status().free_bytes;
    let refused = site.try_dump("team-a/after").unwrap_err();
    assert_eq!(refused.code(), ErrorCode::NoSpace);
    assert_eq!(site.stored().len(), 1);
    assert_eq!(site.store.local().region_status().free_bytes, free);
    // An adoption takes pages of another namespace into this one.
    let parked = site.park("");
    let adoption = Adoption {
        session: &parked,
        // The images are older than these pages: they were written for the dump before.
        ignore_times: true,
        ..Adoption::into_job("team-a/after")
    };
    let adopted = site.store.adopt(&adoption, site.images());
    assert_eq!(adopted.unwrap_err().code(), ErrorCode::NoSpace);
    assert!(site.stored().iter().any(|stored| stored.2 == parked));
}

#[test]
fn an_agents_sessions_and_priorities_are_within_the_quota() {
    let site = Site::limited("team-a sessions=1 priority=5\n");
    let agent = site.peer("a", Role::Agent, &["team-a", "team-b"]);
    let open = |job: &str, priority: u32| {
        let open = request::Open {
            job: job.to_owned(),
            seal_follows: true,
            priority,
            ..request::Open::default()
        };
        match site.ask(&agent, request::Body::Open(open)) {
            Ok(reply::Body::SessionOpened(opened)) => Ok(opened.session),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.code()),
        }
    };
    assert_eq!(open("team-a/x", 6), Err(ErrorCode::Denied));
    let first = open("team-a/x", 5).unwrap();
    assert_eq!(open("team-a/y", 0), Err(ErrorCode::Unavailable));
    open("team-b/y", 11).unwrap();
    site.store.local().drop_session(&first);
    open("team-a/y", 0).unwrap();
}

#[test]
fn places_are_bounded_for_a_namespace_and_for_each_caller() {
    let dir = tempfile::tempdir().unwrap();
    let quotas = load_quotas(dir.path(), "team-a reservations=2 priority=5\n");
    let queues = Queues::new(QueuesOptions::default());
    let places = Reservations::here(Arc::clone(&queues), 1 << 30).within(Arc::new(quotas));
    let reserve = |owner: &str, namespace: &str, priority: u32| {
        let reserve = request::Reserve {
            direction: "write".to_owned(),
            bytes: 1,
            priority,
            namespace: namespace.to_owned(),
            ..request::Reserve::default()
        };
        let reserved = places.reserve(Owner::named(owner), &reserve);
        reserved
            .map(|kept| kept.token)
            .map_err(|error| error.code())
    };
    assert_eq!(reserve("agent a", "team-a", 6), Err(ErrorCode::Denied));
    let first = reserve("agent a", "team-a", 5).unwrap();
    reserve("agent b", "team-a", 0).unwrap();
    assert_eq!(reserve("agent c", "team-a", 0), Err(ErrorCode::Unavailable));
    let cancel = request::CancelReservation {
        token: first,
        node: String::new(),
    };
    places.cancel(&cancel).unwrap();
    reserve("agent c", "team-a", 0).unwrap();
    assert_eq!(places.kept_for("team-a"), 2);

    let kept = (0..100).take_while(|_| reserve("agent d", "team-b", 0).is_ok());
    let kept = kept.count();
    assert!((1..100).contains(&kept), "{kept}");
    reserve("agent e", "team-b", 0).unwrap();
    let all: u32 = queues.report().iter().map(|report| report.reserved).sum();
    assert!(all < 256, "others find room");
}

#[test]
fn a_peer_sees_what_its_own_namespaces_use() {
    let site = Site::limited("team-a bytes=1G\nteam-b bytes=1G\n");
    site.dump("team-a/x");
    site.dump("team-b/x");
    let agent = site.peer("a", Role::Agent, &["team-a"]);
    let asked = site.ask(&agent, request::Body::Status(request::Status {}));
    let Ok(reply::Body::Status(status)) = asked else {
        panic!("{asked:?}");
    };
    let [own] = &status.namespaces[..] else {
        panic!("{:?}", status.namespaces);
    };
    assert_eq!((own.namespace.as_str(), own.checkpoints), ("team-a", 1));
    assert_eq!(own.bytes_limit, Some(1 << 30));
}
