//! Parked sessions: their owners, and the peers that may adopt or discard them.

use permafrost_identity::Role;
use permafrost_protocol::control::{ErrorCode, request};

use super::site::Site;

#[test]
fn a_parked_session_is_adopted_by_who_may_have_its_job() {
    let site = Site::new();
    let agents = site.agents();
    let theirs = site.park("team-b/secret");
    let agent = |name: &str, namespaces: &[&str]| site.peer(name, Role::Agent, namespaces);
    let adopt = |peer: &_, session: &str| {
        let opened = Site::opens_adoption(&agents, peer, session, "team-a/stolen");
        opened.map_err(|error| error.code())
    };
    assert_eq!(
        adopt(&agent("a", &["team-a"]), &theirs),
        Err(ErrorCode::Denied)
    );
    assert_eq!(
        adopt(&agent("b", &["team-b"]), &theirs),
        Err(ErrorCode::Denied)
    );
    assert_eq!(adopt(&agent("ab", &["team-a", "team-b"]), &theirs), Ok(()));

    // Of no job: its own, and nobody else is told that there is one.
    let nameless = site.park("");
    let (own, other) = (agent("a", &["team-a"]), agent("other", &["*"]));
    assert_eq!(adopt(&own, &nameless), Ok(()));
    assert_eq!(adopt(&other, &nameless), Err(ErrorCode::NotFound));
    assert_eq!(adopt(&own, &"0".repeat(32)), Err(ErrorCode::NotFound));
    // As after a restart of the node.
    let again = Site::opens_adoption(&site.agents(), &own, &nameless, "team-a/again");
    assert!(again.is_ok(), "{again:?}");
}

#[test]
fn a_freeze_limit_that_an_agent_reports_is_counted() {
    let site = Site::new();
    let report = |role: Role, freeze_limit_reached: bool| {
        let peer = site.peer("a", role, &["team-a"]);
        let abort = request::Abort {
            // The session has ended with its conversation.
            session: "0".repeat(32),
            freeze_limit_reached,
        };
        site.ask(&peer, request::Body::Abort(abort)).unwrap_err();
        let counters = site.store.local().counters();
        counters.freeze_limits_reached.value()
    };
    assert_eq!(report(Role::Agent, false), 0);
    assert_eq!(report(Role::Agent, true), 1);
    assert_eq!(report(Role::Reader, true), 1);
}

#[test]
fn discarding_a_parked_session_takes_the_right_to_delete() {
    let site = Site::new();
    let parked = site.park("team-a/x");
    let abort = |delete: bool| {
        let agent = site.peer_who_may("a", Role::Agent, &["team-a"], delete);
        let session = parked.clone();
        let asked = site.ask(
            &agent,
            request::Body::Abort(request::Abort {
                session,
                ..request::Abort::default()
            }),
        );
        asked.map(drop).map_err(|error| (error.code(), error.hint))
    };
    let (code, hint) = abort(false).unwrap_err();
    assert!(
        code == ErrorCode::Denied && hint.contains("--delete"),
        "{hint}"
    );
    assert_eq!(site.stored().len(), 1);
    abort(true).unwrap();
    assert!(site.stored().is_empty());
}
