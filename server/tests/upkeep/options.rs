//! Options that a dump would have a restore repeat, and the client that it is recorded to come from.

use permafrost_criu::frontend::PageSink;
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::manifest::Origin;
use permafrost_protocol::pageserver::PE_PRESENT;
use permafrost_store::{Adoption, SessionRequest};

use super::adopting::{open, write_images};
use super::site::{Site, address, images, page, space};

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
        pre_copy: false,
        seal_follows: true,
        origin: asking_for("--config=/tmp/c"),
        no_parent: false,
        parent_images: false,
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

#[test]
fn an_adoption_keeps_allowed_options_and_the_client_that_brought_the_pages() {
    let site = Site::new();
    // Who brought the pages, who adopts them, and who is recorded.
    for (at, (brought, adopter, recorded)) in [
        (None, "node n1", "node n1"),
        (None, "agent c7", "agent c7"),
        (Some("agent c7"), "node n1", "agent c7"),
        (Some("agent c7"), "agent c8", "agent c8"),
        (Some("agent c7"), "", "agent c7"),
        (Some("uid 1000"), "node", "uid 1000"),
        (Some(""), "node", ""),
    ]
    .into_iter()
    .enumerate()
    {
        let request = SessionRequest {
            job: String::new(),
            pre_dump: false,
            pre_copy: false,
            seal_follows: false,
            origin: None,
            no_parent: true,
            parent_images: false,
            from_here: true,
            taken_by: "node".to_owned(),
        };
        let session = site.store.open_session(request).unwrap();
        let mut sink = session.start(site.store.local(), Box::new(|| {})).unwrap();
        if let Some(client) = brought {
            session.brought_by(client.to_owned());
        }
        let salt = at as u64;
        sink.open(space()).unwrap();
        sink.pages(address(salt), PE_PRESENT, &page(salt)).unwrap();
        sink.close().unwrap();

        let job = format!("job-{at}");
        let adoption = Adoption {
            session: &session.id,
            origin: asking_for("--tcp-established"),
            ignore_times: true,
            taken_by: adopter,
            ..Adoption::into_job(&job)
        };
        let dir = tempfile::tempdir().unwrap();
        write_images(dir.path(), salt..salt + 1, "core");
        site.store.adopt(&adoption, open(dir.path())).unwrap();
        let manifest = site.store.show(&job).unwrap().manifest.unwrap();
        assert_eq!(
            manifest.origin.unwrap().restore_options,
            ["--shell-job", "--tcp-established"]
        );
        assert_eq!(manifest.taken_by, recorded, "{brought:?}, {adopter}");
    }
}
