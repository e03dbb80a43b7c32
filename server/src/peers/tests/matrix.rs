//! Every request × role × namespaces × odd name.
//!
//! The lists of requests are complete because they do not compile otherwise. The expected rights are stated here a
//! second time, so that a mistake in the table of rights does not go unnoticed.

use permafrost_identity::{Peer, Role};
use permafrost_protocol::control::{ErrorCode, RetentionRule, reply, request as local};
use permafrost_protocol::manifest::CheckpointRef;
use permafrost_protocol::wire::message::request as wire;

use super::site::Site;

/// Lists values of each variant of a request's body. A variant without a row does not compile.
macro_rules! every {
    ($module:ident: $($variant:ident => [$($value:expr),+ $(,)?]),+ $(,)?) => {{
        let _complete = |body: &$module::Body| match body {
            $($module::Body::$variant(_) => {})+
        };
        let every: Vec<$module::Body> = vec![$($($module::Body::$variant($value)),+),+];
        every
    }};
}

/// Namespaces with checkpoints.
const NAMESPACES: [&str; 3] = ["default", "team-a", "team-b"];

/// One job of each, and a parked session of it.
const JOBS: [(&str, &str); 3] = [
    ("default", "secret-default"),
    ("team-a", "team-a/secret-a"),
    ("team-b", "team-b/secret-b"),
];

fn names() -> Vec<String> {
    let long = |len_bytes: usize| format!("team-b/{}", "x".repeat(len_bytes - 7));
    let mut names: Vec<String> = [
        "",
        "/",
        "..",
        ".",
        "*",
        "@1",
        "-",
        "default",
        "team-a",
        "team-a/",
        "/team-b/secret-b",
        "team-a/../team-b/secret-b",
        "team-a//secret-a",
        "team-b/secret-b\0",
        "tëam-b/secret-b",
        "team-b/secret-b@1",
        "team-b/secret-b@0",
    ]
    .map(str::to_owned)
    .to_vec();
    names.extend(JOBS.map(|(_, job)| job.to_owned()));
    names.extend([long(200), long(201)]);
    names
}

fn control_requests(name: &str, sessions: &[String]) -> Vec<local::Body> {
    let text = || name.to_owned();
    let remove = |all_generations, force| local::Remove {
        checkpoint: text(),
        all_generations,
        force,
        last: true,
    };
    let prune = |namespace: &str, job: String, dry_run| local::Prune {
        namespace: namespace.to_owned(),
        job,
        dry_run,
    };
    let media = |action: &str| local::Media {
        action: action.to_owned(),
        medium: text(),
        ..Default::default()
    };
    let mut requests = every!(local:
        Open => [local::Open { job: text(), seal_follows: true, ..Default::default() }],
        Seal => [local::Seal { session: text() }],
        Abort => [local::Abort { session: text(), ..local::Abort::default() }],
        Adopt => [local::Adopt { job: text(), ..Default::default() }],
        List => [local::List { job: text(), ..local::List::default() }],
        Show => [local::Show { checkpoint: text() }],
        Describe => [
            local::Describe { checkpoint: text(), ..Default::default() },
            local::Describe { checkpoint: text(), before: text(), ..Default::default() },
        ],
        Remove => [remove(true, true), remove(false, true), remove(true, false), remove(false, false)],
        Pin => [local::Pin { checkpoint: text(), pinned: true }, local::Pin { checkpoint: text(), pinned: false }],
        Verify => [local::Verify { checkpoint: text(), cold: true }],
        Export => [local::Export { checkpoint: text(), ..Default::default() }],
        Import => [local::Import { job: text(), ..Default::default() }],
        Status => [local::Status {}],
        Stream => [local::Stream { checkpoint: text(), ..Default::default() }],
        Lend => [local::Lend { checkpoint: text() }],
        Thaw => [local::Thaw { checkpoint: text(), ..Default::default() }],
        TakeSpace => [local::TakeSpace { session: text(), ..Default::default() }],
        EndPages => [local::EndPages { session: text() }],
        Place => [local::Place { checkpoint: text(), ..Default::default() }],
        Nodes => [local::Nodes { name: text(), probe: true }],
        SetNode => [local::SetNode { name: text(), state: "drained".to_owned(), force: true }],
        SetLevel => [local::SetLevel { registry: 2 }],
        Rebuild => [local::Rebuild { dry_run: false, ..Default::default() }],
        Deny => [local::Deny { entries: vec![text()], take_back: false }, local::Deny::default()],
        Scrub => [local::Scrub { checkpoint: text(), cold: true }],
        Gc => [local::Gc { dry_run: true }, local::Gc { dry_run: false }],
        SetRetention => [
            local::SetRetention {
                rule: Some(RetentionRule { namespace: text(), keep_last: Some(1), ..Default::default() }),
                remove: false,
            },
            local::SetRetention {
                rule: Some(RetentionRule { namespace: text(), ..Default::default() }),
                remove: true,
            },
        ],
        ShowRetention => [local::ShowRetention { namespace: text() }],
        Prune => [
            prune("", text(), false),
            prune("", text(), true),
            prune(&text(), String::new(), false),
        ],
        Keys => [
            local::Keys { action: "ls".to_owned(), namespace: text() },
            local::Keys { action: "destroy".to_owned(), namespace: text() },
        ],
        Media => [media("ls"), media("add"), media("give-up"), media("cool"), media("warm")],
        Reserve => [local::Reserve { node: text(), direction: "write".to_owned(), ..Default::default() }],
        CancelReservation => [local::CancelReservation { token: text(), node: String::new() }],
        Took => [local::Took { checkpoint: text(), ..Default::default() }],
    );
    for session in sessions {
        let session = session.clone();
        requests.push(local::Body::Abort(local::Abort {
            session: session.clone(),
            ..local::Abort::default()
        }));
        requests.push(local::Body::Seal(local::Seal { session }));
    }
    requests
}

fn wire_requests(name: &str, ids: &[String], sessions: &[String]) -> Vec<wire::Body> {
    let adopt = |session: &str| wire::Dump {
        session: vec![1; 16],
        adopt: Some(local::Adopt {
            session: session.to_owned(),
            job: name.to_owned(),
            origin: None,
            ..local::Adopt::default()
        }),
        ..Default::default()
    };
    let mut requests = every!(wire:
        Dump => [
            wire::Dump { session: vec![1; 16], job: name.to_owned(), ..Default::default() },
            adopt(""),
        ],
        Fetch => [wire::Fetch { checkpoint: "0".repeat(32), listed_as: name.to_owned(), ..Default::default() }],
        Publish => [wire::Publish { checkpoint: ids[0].clone() }],
        Rollback => [wire::Rollback { checkpoint: ids[0].clone() }],
        Inventory => [wire::Inventory { after: String::new() }],
        Ping => [wire::Ping {}],
        // Tried by themselves.
        Control => [Default::default()],
        Pull => [wire::Pull { checkpoint: ids[0].clone(), ..Default::default() }],
        Verify => [wire::Verify { checkpoints: ids.to_vec(), within_s: 60 }],
        Api => [wire::Api::default()],
    );
    for session in sessions {
        requests.push(wire::Body::Dump(adopt(session)));
    }
    for id in ids {
        for parent in ids.iter().map(String::as_str).chain([""]) {
            requests.push(wire::Body::Fetch(wire::Fetch {
                checkpoint: id.clone(),
                parent: parent.to_owned(),
                listed_as: name.to_owned(),
                ..Default::default()
            }));
        }
        // Positions and checksums say of pages what they are.
        for (proof, pages) in [(false, 0), (true, 0), (true, 8)] {
            requests.push(wire::Body::Fetch(wire::Fetch {
                checkpoint: id.clone(),
                listed_as: name.to_owned(),
                space: 1,
                outline_only: true,
                proof,
                pages,
                ..Default::default()
            }));
        }
    }
    requests
}

/// Right that a request needs, according to the documents.
enum Needs {
    Dump,
    Read,
    Delete,
    Govern,
    Operate,
    Nothing,
}

fn needs(body: &local::Body) -> Needs {
    use local::Body;
    match body {
        Body::Open(_) | Body::Adopt(_) | Body::Pin(_) | Body::Import(_) => Needs::Dump,
        Body::List(_)
        | Body::Show(_)
        | Body::Describe(_)
        | Body::Verify(_)
        | Body::Export(_)
        | Body::Stream(_)
        | Body::Lend(_)
        | Body::Thaw(_)
        | Body::Place(_) => Needs::Read,
        Body::Remove(_) => Needs::Delete,
        Body::SetRetention(_) => Needs::Govern,
        Body::ShowRetention(_) => Needs::Read,
        Body::Prune(prune) if prune.dry_run => Needs::Read,
        Body::Prune(prune) if prune.job.is_empty() && prune.namespace.is_empty() => Needs::Operate,
        Body::Prune(_) => Needs::Delete,
        Body::Deny(deny) if deny.entries.is_empty() => Needs::Nothing,
        Body::Media(media) if media.action == "ls" => Needs::Nothing,
        Body::SetNode(_)
        | Body::Rebuild(_)
        | Body::SetLevel(_)
        | Body::Deny(_)
        | Body::Scrub(_)
        | Body::Media(_)
        | Body::Keys(_)
        | Body::Gc(_) => Needs::Operate,
        Body::Seal(_)
        | Body::TakeSpace(_)
        | Body::EndPages(_)
        | Body::Abort(_)
        | Body::Status(_)
        | Body::Nodes(_)
        | Body::Reserve(_)
        | Body::CancelReservation(_)
        | Body::Took(_) => Needs::Nothing,
    }
}

struct Asker {
    peer: Peer,
    namespaces: Vec<&'static str>,
    delete: bool,
}

impl Asker {
    fn all(site: &Site) -> Vec<Self> {
        let mut askers = Vec::new();
        for role in Role::ALL {
            for (name, namespaces) in [
                ("none", &[][..]),
                ("default", &["default"]),
                ("a", &["team-a"]),
                ("both", &["default", "team-a"]),
                ("all", &["*"]),
            ] {
                for delete in [false, true] {
                    if delete && !matches!(role, Role::Agent | Role::Operator) {
                        continue;
                    }
                    askers.push(Self {
                        peer: site.peer_who_may(name, role, namespaces, delete),
                        namespaces: namespaces.to_vec(),
                        delete,
                    });
                }
            }
        }
        askers
    }

    fn lists(&self, namespace: &str) -> bool {
        self.namespaces
            .iter()
            .any(|own| *own == "*" || *own == namespace)
    }

    fn reads(&self, namespace: &str) -> bool {
        self.peer.role() == Role::Node || self.lists(namespace)
    }

    fn dumps(&self, namespace: &str) -> bool {
        match self.peer.role() {
            Role::Node => true,
            Role::Agent => self.lists(namespace),
            Role::Reader | Role::Operator => false,
        }
    }

    fn deletes(&self, namespace: &str) -> bool {
        self.delete && self.lists(namespace)
    }

    fn may(&self, needs: &Needs, namespace: &str) -> bool {
        match needs {
            Needs::Dump => self.dumps(namespace),
            Needs::Read => self.reads(namespace),
            Needs::Delete => self.deletes(namespace),
            Needs::Govern => self.peer.role() == Role::Operator && self.deletes(namespace),
            Needs::Operate => self.peer.role() == Role::Operator,
            Needs::Nothing => true,
        }
    }
}

/// A node that undoes the changes of a peer after each request.
struct Kept {
    site: Site,
    parked: Vec<(&'static str, String)>,
    ids: Vec<String>,
    whole: Vec<(String, u64, String, bool)>,
}

impl Kept {
    fn new() -> Self {
        let mut kept = Self {
            site: Site::new(),
            parked: Vec::new(),
            ids: Vec::new(),
            whole: Vec::new(),
        };
        kept.fill();
        kept
    }

    fn fill(&mut self) {
        for (_, job) in JOBS {
            if self.site.store.list(Some(&job.parse().unwrap())).is_err() {
                self.site.dump(job);
                self.site.store.pin(job, true).unwrap();
            }
        }
        let left = self.sessions();
        self.parked.retain(|(_, session)| left.contains(session));
        for (namespace, job) in JOBS {
            if self.parked.iter().all(|(parked, _)| *parked != namespace) {
                let session = self.site.park(&format!("{job}-parked"));
                self.parked.push((namespace, session));
            }
        }
        let listed = self.site.store.list(None).unwrap();
        self.ids = listed.into_iter().map(|record| record.id).collect();
        self.whole = self.site.stored();
    }

    fn sessions(&self) -> Vec<String> {
        let stored = self.site.stored().into_iter();
        stored.map(|(_, _, session, _)| session).collect()
    }

    /// Returns the namespace of a checkpoint by its id.
    fn namespace_of_id(&self, id: &str) -> Option<String> {
        let listed = self.site.store.list(None).unwrap().into_iter();
        let mut jobs = listed.filter(|record| record.id == id);
        namespace_of(&jobs.next()?.job)
    }

    /// Checks that nothing has changed in a namespace that `asker` may not change.
    fn check(&mut self, asker: &Asker, what: &str) {
        let now = self.site.stored();
        if now == self.whole {
            return;
        }
        for namespace in NAMESPACES {
            let of = |all: &[(String, u64, String, bool)]| {
                let own = |job: &str| {
                    let job = job.split_once('/').map_or("default", |(own, _)| own);
                    job == namespace
                };
                let those = all.iter().filter(|(job, ..)| own(job));
                those.cloned().collect::<Vec<_>>()
            };
            if !asker.dumps(namespace) && !asker.deletes(namespace) {
                assert_eq!(of(&now), of(&self.whole), "{what}: {namespace}");
            }
            if !asker.deletes(namespace) {
                let kept = |whole: &(String, u64, String, bool)| {
                    now.iter().any(|(_, _, session, _)| *session == whole.2)
                };
                assert!(of(&self.whole).iter().all(kept), "{what}: {namespace}");
            }
        }
        self.fill();
    }

    /// Checks that a reply names no job of a namespace that `asker` may not read.
    fn check_said(asker: &Asker, what: &str, said: &str) {
        for (namespace, job) in JOBS {
            let secret = job.rsplit('/').next().unwrap();
            assert!(
                asker.reads(namespace) || !said.contains(secret),
                "{what} was told of {job}: {said}"
            );
        }
    }
}

/// Returns true if a request names a namespace, and no job.
fn names_namespace(body: &local::Body) -> bool {
    match body {
        local::Body::SetRetention(_) | local::Body::ShowRetention(_) => true,
        local::Body::Prune(prune) => prune.job.is_empty(),
        _ => false,
    }
}

fn namespace_of(name: &str) -> Option<String> {
    let named: CheckpointRef = name.parse().ok()?;
    Some(named.job.namespace().to_owned())
}

#[test]
fn no_control_request_reaches_into_another_namespace() {
    let mut kept = Kept::new();
    for asker in Asker::all(&kept.site) {
        for name in names() {
            for body in control_requests(&name, &kept.sessions()) {
                let what = format!("{} {:?} {body:?}", asker.peer.role(), asker.namespaces);
                let needs = needs(&body);
                let answer = kept.site.ask(&asker.peer, body.clone());
                if let Ok(reply::Body::SessionOpened(opened)) = &answer {
                    kept.site.store.local().drop_session(&opened.session);
                }
                kept.check(&asker, &what);
                let code = answer.as_ref().err().map(|error| error.code());
                match &answer {
                    // What it asked for with its own words may be repeated to it.
                    Err(error) if error.code() == ErrorCode::Invalid => {}
                    answer if !name.contains("secret") => {
                        Kept::check_said(&asker, &what, &format!("{answer:?}"));
                    }
                    Ok(answer) => Kept::check_said(&asker, &what, &format!("{answer:?}")),
                    Err(_) => {}
                }
                let named = !matches!(needs, Needs::Nothing | Needs::Operate);
                if matches!(needs, Needs::Operate) && !asker.may(&needs, "") {
                    assert!(
                        matches!(code, Some(ErrorCode::Denied | ErrorCode::Invalid)),
                        "{what}: {answer:?}"
                    );
                }
                if !named {
                    continue;
                }
                let namespace = if names_namespace(&body) {
                    let is_one = namespace_of(&name).is_some() && !name.contains(['/', '@']);
                    is_one.then(|| name.clone())
                } else {
                    namespace_of(&name)
                };
                match (name.as_str(), namespace) {
                    // All that one may read, and a dump of which nobody knows the job.
                    ("", _)
                        if matches!(
                            body,
                            local::Body::List(_)
                                | local::Body::Verify(_)
                                | local::Body::Open(_)
                                | local::Body::ShowRetention(_)
                                | local::Body::Prune(_)
                        ) => {}
                    (_, None) => assert_eq!(code, Some(ErrorCode::Invalid), "{what}: {answer:?}"),
                    (_, Some(namespace)) if !asker.may(&needs, &namespace) => {
                        assert!(
                            matches!(code, Some(ErrorCode::Denied | ErrorCode::Invalid)),
                            "{what}: {answer:?}"
                        );
                    }
                    (..) => assert_ne!(code, Some(ErrorCode::Denied), "{what}: {answer:?}"),
                }
            }
        }
    }
}

#[test]
fn no_request_between_hosts_reaches_into_another_namespace() {
    let mut kept = Kept::new();
    for asker in Asker::all(&kept.site) {
        for name in names() {
            for body in wire_requests(&name, &kept.ids, &kept.sessions()) {
                let what = format!("{} {:?} {body:?}", asker.peer.role(), asker.namespaces);
                let asked = kept.site.ask_wire(&asker.peer, body.clone());
                kept.check(&asker, &what);
                Kept::check_said(&asker, &what, &asked.said);
                let code = asked.refused.as_ref().map(|error| error.code());
                let between_nodes = matches!(
                    body,
                    wire::Body::Publish(_)
                        | wire::Body::Rollback(_)
                        | wire::Body::Inventory(_)
                        | wire::Body::Pull(_)
                        | wire::Body::Verify(_)
                );
                if between_nodes {
                    assert_eq!(code, Some(ErrorCode::Denied), "{what}");
                }
                if let wire::Body::Fetch(fetch) = &body
                    && let Some(namespace) = kept.namespace_of_id(&fetch.checkpoint)
                    && !asker.reads(&namespace)
                {
                    // Also positions, checksums and proofs of them.
                    let is_refused = matches!(code, Some(ErrorCode::Denied | ErrorCode::Invalid));
                    assert!(is_refused, "{what}: {code:?}");
                }
                if let wire::Body::Dump(_) = body {
                    assert!(code.is_some(), "{what}");
                    let odd = namespace_of(&name).is_none() && !name.is_empty();
                    assert!(!odd || code == Some(ErrorCode::Invalid), "{what}: {code:?}");
                }
            }
        }
    }
}

#[test]
fn an_empty_job_is_never_everything() {
    let kept = Kept::new();
    for namespaces in [&["default"][..], &["*"]] {
        let agent = kept.site.peer_who_may("c7", Role::Agent, namespaces, true);
        for force in [false, true] {
            let remove = local::Body::Remove(local::Remove {
                checkpoint: String::new(),
                all_generations: true,
                force,
                last: true,
            });
            let refused = kept.site.ask(&agent, remove).unwrap_err();
            assert_eq!(refused.code(), ErrorCode::Invalid, "{refused:?}");
        }
    }
    // Nor in the store.
    assert!(
        kept.site
            .store
            .remove(&local::Remove {
                all_generations: true,
                force: true,
                ..Default::default()
            })
            .is_err()
    );
    assert_eq!(kept.site.stored(), kept.whole);
}
