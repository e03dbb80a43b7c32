//! Options that a dump would have a restore repeat, and the client that it is recorded to come from.

use permafrost_client::frontend::PageSink;
use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::manifest::Origin;
use permafrost_server::store::{Adoption, SessionRequest};

use super::site::{Site, images};

fn asking_for(option: &str) -> Option<Origin> {
    Some(Origin {
        host: "far".to_owned(),
        restore_options: vec!["--shell-job".to_owned(), option.to_owned()],
        ..Origin::default()
    })
}

#[test]
fn an_adopted_dump_cannot_bring_an_action_script() {
    let site = Site::new();
    let (session, mut sink) = site.begin_bare(0..3);
    sink.close().unwrap();
    let with = |origin| Adoption {
        session: &session,
        origin,
        ignore_times: true,
        taken_by: "agent c7",
        ..Adoption::into_job("job")
    };
    for option in ["--action-script=/tmp/evil", "--libdir=/tmp", "--root=/srv"] {
        let refused = site.store.adopt(&with(asking_for(option)), images());
        let error = refused.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Invalid);
        assert!(error.to_string().contains(option), "{error}");
        assert!(error.hint().contains("permafrost restore"), "{error}");
    }
    let listed = site.store.list(None).unwrap();
    assert!(listed.iter().any(|parked| parked.session == session));
}

#[test]
fn a_dump_that_would_record_such_an_option_is_refused_while_its_task_runs() {
    let site = Site::new();
    let request = SessionRequest {
        job: "job".to_owned(),
        pre_dump: false,
        seal_follows: true,
        origin: asking_for("--config=/tmp/c"),
        no_parent: false,
        parent_images: false,
        durability: None,
        from_here: true,
        taken_by: "agent c7".to_owned(),
    };
    let Err(error) = site.store.open_session(request) else {
        panic!("it is open");
    };
    assert_eq!(error.code(), ErrorCode::Invalid);
    assert!(error.to_string().contains("--config=/tmp/c"), "{error}");
    site.dump("job", 0..1);
    let manifest = site.store.show("job").unwrap().manifest.unwrap();
    assert_eq!(manifest.taken_by, "node");
}
