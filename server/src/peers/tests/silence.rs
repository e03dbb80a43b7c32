//! An agent that falls silent in the middle of a dump: the node discards the dump completely.

use permafrost_identity::Role;
use permafrost_protocol::control::{ErrorCode, reply, request};

use super::site::Site;

#[test]
fn a_dump_whose_agent_falls_silent_gives_its_space_and_its_job_back() {
    let site = Site::new();
    let agent = site.peer("c7", Role::Agent, &["team-a"]);
    let free = site.store.local().region_status().free_bytes;
    // In the middle of its pages, and before its commit.
    for closes in [false, true] {
        let open = request::Open {
            job: "team-a/train".to_owned(),
            seal_follows: true,
            ..request::Open::default()
        };
        let opened = site.ask(&agent, request::Body::Open(open)).unwrap();
        let reply::Body::SessionOpened(session) = opened else {
            panic!("{opened:?}");
        };
        let ended = site.fall_silent(&agent, &session.session, 40, closes);
        assert_eq!(ended.code(), ErrorCode::SessionFailed, "{ended:?}");
        assert!(ended.message.contains("in time"), "{ended:?}");
        assert_eq!(site.store.local().region_status().free_bytes, free);
        assert!(site.stored().is_empty());
    }
    site.dump("team-a/train");
}
