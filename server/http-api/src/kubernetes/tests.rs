//! The extender over the API, with requests and answers written by hand after the Go types.

use std::sync::Arc;

use axum::body::to_bytes;
use permafrost_api_types::activity::ActivityAnswer;
use permafrost_api_types::events::ApiEvent;
use permafrost_api_types::figures::StartFigures;
use permafrost_api_types::reserve::{Reservation, ReserveRequest};
use permafrost_protocol::control::{Checkpoint, CheckpointContents, request};
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::NodeFigures;
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::{Estimate, Figure, Missing, What};
use permafrost_scheduling::quantity::{BytesPerSecond, Seconds};
use permafrost_scheduling::size::{Basis, DumpKind, Memory, Prediction};
use permafrost_store::StoreError;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::*;
use crate::source::{Activity, NodeEntry, Refusal, Source};
use crate::{Api, router};

const GIB: u64 = 1 << 30;

/// A cluster of three nodes: two of them hold the one checkpoint; of these one is slow, and one is gone if
/// `lost`.
pub(super) struct Three {
    pub(super) lost: bool,
}

impl Three {
    fn node(&self, name: &str, host: &str, mib_per_s: f64) -> NodeEntry {
        let rate = BytesPerSecond::new(mib_per_s * 1024.0 * 1024.0).unwrap();
        let rates = SizedRates::uniform(Figure::given(rate));
        let entry = NodeEntry::unknown(name);
        NodeEntry {
            host: host.to_owned(),
            live: !(self.lost && name != "n3"),
            figures: NodeFigures {
                write: rates,
                read: rates,
                write_queue: Figure::given(permafrost_scheduling::quantity::Bytes::ZERO),
                read_queue: Figure::given(permafrost_scheduling::quantity::Bytes::ZERO),
                dump_start: Figure::given(Seconds::ZERO),
                restore_start: Figure::given(Seconds::ZERO),
                ..NodeFigures::unknown(NodeId(0))
            },
            capacity_bytes: 64 * GIB,
            free_bytes: 64 * GIB,
            room_bytes: 62 * GIB,
            // Links between the nodes are as fast as their media.
            links: ["n1", "n2", "n3"]
                .map(|other| (other.to_owned(), rates))
                .into(),
            ..entry
        }
    }
}

impl Source for Three {
    fn own_name(&self) -> String {
        "n1".to_owned()
    }

    fn nodes(&self) -> Vec<NodeEntry> {
        vec![
            self.node("n1", "machine-1", 1024.0),
            self.node("n2", "machine-2", 256.0),
            self.node("n3", "machine-3", 1024.0),
        ]
    }

    fn checkpoints(&self) -> Result<Vec<Checkpoint>, StoreError> {
        Ok(vec![Checkpoint {
            job: "train".to_owned(),
            generation: 3,
            kind: "full".to_owned(),
            memory_bytes: 2 * GIB,
            nodes: vec!["n1".to_owned(), "n2".to_owned()],
            ..Checkpoint::default()
        }])
    }

    fn activity(&self) -> Activity {
        Activity {
            told: ActivityAnswer {
                answered_by: self.own_name(),
                ..ActivityAnswer::default()
            },
        }
    }

    fn contents(&self, _: &request::Describe) -> Result<CheckpointContents, Refusal> {
        Err(Refusal::Unavailable {
            message: "no scheduler asks for it".to_owned(),
        })
    }

    fn predict(
        &self,
        _: &str,
        _: &str,
        _: DumpKind,
        memory: &Memory,
    ) -> Result<Prediction, Missing> {
        let size = memory
            .resident
            .ok_or(Missing::NotGiven { what: What::Memory })?;
        Ok(Prediction {
            moved: Estimate::given(size),
            size: Estimate::given(size),
            basis: Basis::ResidentBound,
        })
    }

    fn reserve(&self, _: &Caller, _: &ReserveRequest) -> Result<Reservation, Refusal> {
        Err(Refusal::NoReservation)
    }

    fn cancel(&self, _: &str) -> Result<(), Refusal> {
        Err(Refusal::NoReservation)
    }

    fn install(&self, _: &StartFigures) -> Result<(), Refusal> {
        Ok(())
    }

    fn events(&self) -> broadcast::Receiver<ApiEvent> {
        broadcast::channel(1).1
    }
}

pub(super) async fn posted(lost: bool, verb: &str, body: &str) -> (u16, Value) {
    let router = beside(router(Api::looked_once(Arc::new(Three { lost }))));
    let mut request = Request::new(Body::from(body.to_owned()));
    *request.method_mut() = hyper::Method::POST;
    *request.uri_mut() = format!("/v1/kubernetes/{verb}").parse().unwrap();
    request.extensions_mut().insert(Caller::local("root"));
    use hyper::service::Service as _;
    let response = TowerToHyperService::new(router)
        .call(request)
        .await
        .unwrap();
    let status = response.status().as_u16();
    let bytes = to_bytes(response.into_body(), 1 << 20).await.unwrap();
    (status, serde_json::from_slice(&bytes).unwrap())
}

async fn asked(verb: &str, body: &Value) -> Value {
    let (status, answer) = posted(false, verb, &body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

pub(super) fn pod(annotations: Value) -> Value {
    json!({
        "metadata": {"name": "p", "namespace": "default", "uid": "7", "annotations": annotations},
        "spec": {"containers": [{"name": "c", "resources": {}}]},
        "status": {}
    })
}

fn node(name: &str) -> Value {
    json!({"metadata": {"name": name, "labels": {"a": "b"}}, "status": {"x": [1, 2]}})
}

#[tokio::test]
async fn nodes_are_scored_by_when_the_checkpoint_runs_there() {
    // nodeCacheCapable: true.
    let names = json!(["n1", "machine-2", "machine-3", "elsewhere"]);
    let answer = asked(
        "prioritize",
        &json!({"Pod": pod(json!({"permafrost.io/job": "train"})), "Nodes": null, "NodeNames": names}),
    )
    .await;
    // 2 GiB: 2 s from the medium of n1, 8 s from that of n2, and over the network to n3, 2 s or more.
    let score = |at: usize| answer[at]["Score"].as_i64().unwrap();
    assert_eq!(answer[0], json!({"Host": "n1", "Score": 10}));
    assert_eq!(answer[1]["Host"], "machine-2");
    assert!((1..=3).contains(&score(1)), "{answer}");
    assert!(score(2) > score(1) && score(2) < 10, "{answer}");
    assert_eq!(answer[3], json!({"Host": "elsewhere", "Score": 0}));
    // nodeCacheCapable: false.
    let nodes = json!({"metadata": {}, "items": [node("n2"), node("n1")]});
    let answer = asked(
        "prioritize",
        &json!({"Pod": pod(json!({"permafrost.io/job": "train@3"})), "Nodes": nodes, "NodeNames": null}),
    )
    .await;
    assert_eq!(answer[1], json!({"Host": "n1", "Score": 10}));
    assert_eq!(answer.as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn where_there_is_nothing_to_resume_no_node_is_better() {
    for annotations in [
        Value::Null,
        json!({}),
        json!({"permafrost.io/job": ""}),
        json!({"permafrost.io/job": "unheard-of"}),
        json!({"permafrost.io/job": "no job at all"}),
    ] {
        let names = json!(["n1", "n2"]);
        let body = json!({"Pod": pod(annotations), "NodeNames": names});
        let answer = asked("prioritize", &body).await;
        assert_eq!(
            answer,
            json!([{"Host": "n1", "Score": 0}, {"Host": "n2", "Score": 0}])
        );
    }
}

#[tokio::test]
async fn filter_lets_all_pass_unless_the_pod_must_resume_and_cannot() {
    let required = json!({"permafrost.io/job": "train", "permafrost.io/resume": "required"});
    let preferred = json!({"permafrost.io/job": "train"});
    let lost = json!({"permafrost.io/job": "gone", "permafrost.io/resume": "required"});
    let names = json!(["n1", "elsewhere"]);
    let arguments = |annotations: &Value| json!({"Pod": pod(annotations.clone()), "Nodes": null, "NodeNames": names});
    let passed = json!({
        "Nodes": null, "NodeNames": names, "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""
    });
    assert_eq!(asked("filter", &arguments(&required)).await, passed);
    assert_eq!(asked("filter", &arguments(&preferred)).await, passed);
    // The checkpoint's holders are gone.
    let (_, answer) = posted(true, "filter", &arguments(&preferred).to_string()).await;
    assert_eq!(answer, passed);
    let (status, answer) = posted(true, "filter", &arguments(&required).to_string()).await;
    assert_eq!(status, 200);
    let why = "no node that is there holds train@3: n1, n2 did";
    assert_eq!(
        answer,
        json!({
            "Nodes": null, "NodeNames": [], "FailedNodes": {},
            "FailedAndUnresolvableNodes": {"n1": why, "elsewhere": why}, "Error": ""
        })
    );
    // There never was a checkpoint.
    let answer = asked("filter", &arguments(&lost)).await;
    let why = &answer["FailedAndUnresolvableNodes"]["n1"];
    assert_eq!(why, "there is no checkpoint of gone to resume");
    // An old generation that does not exist any more.
    let old = json!({"permafrost.io/job": "train@2", "permafrost.io/resume": "required"});
    let answer = asked("filter", &arguments(&old)).await;
    assert_eq!(answer["NodeNames"], json!([]));
}

#[tokio::test]
async fn a_pod_names_jobs_of_its_own_namespace_only() {
    let names = json!(["n1", "n2"]);
    let of = |namespace: &str, job: &str, verb: &'static str| {
        let annotations = json!({"permafrost.io/job": job, "permafrost.io/resume": "required"});
        let mut pod = pod(annotations);
        pod["metadata"]["namespace"] = json!(namespace);
        let body = json!({"Pod": pod, "NodeNames": names});
        async move { asked(verb, &body).await }
    };
    let nothing = json!([{"Host": "n1", "Score": 0}, {"Host": "n2", "Score": 0}]);
    for (namespace, job) in [
        ("team-b", "train"),
        ("team-b", "default/train"),
        ("", "train"),
        ("*", "train@3"),
    ] {
        assert_eq!(of(namespace, job, "prioritize").await, nothing);
        // The answer does not depend on the existence of the job.
        for job in [job, "default/unheard-of"] {
            let answer = of(namespace, job, "filter").await;
            let why = format!("{job} is not a job of the pod's namespace {namespace}");
            assert_eq!(answer["FailedAndUnresolvableNodes"]["n1"], why);
        }
    }
    assert_ne!(of("default", "train", "prioritize").await, nothing);
    // A victim that names another tenant's job counts as one without a job.
    let mut thief = victim("b", LONG_AGO, 0, Some("train"));
    thief["metadata"]["namespace"] = json!("team-b");
    let kept = preempted(json!({
        "n1": {"Pods": [victim("a", LONG_AGO, 0, None)], "NumPDBViolations": 0},
        "n2": {"Pods": [thief], "NumPDBViolations": 0},
    }))
    .await;
    assert_eq!(kept, ["n1", "n2"]);
}

#[tokio::test]
async fn whole_nodes_come_back_as_they_went() {
    let nodes = json!({"metadata": {"resourceVersion": "7"}, "items": [node("n1"), node("n2")]});
    let body = json!({"Pod": pod(json!({})), "Nodes": nodes, "NodeNames": null});
    let answer = asked("filter", &body).await;
    assert_eq!(answer["Nodes"], nodes);
    assert_eq!(answer["NodeNames"], Value::Null);
    let required = json!({"permafrost.io/job": "gone", "permafrost.io/resume": "required"});
    let body = json!({"Pod": pod(required), "Nodes": nodes, "NodeNames": null});
    let answer = asked("filter", &body).await;
    assert_eq!(
        answer["Nodes"],
        json!({"metadata": {"resourceVersion": "7"}, "items": []})
    );
    assert_eq!(
        answer["FailedAndUnresolvableNodes"]
            .as_object()
            .unwrap()
            .len(),
        2
    );
}

/// Returns a victim that was started long ago.
pub(super) fn victim(uid: &str, started: &str, priority: i64, job: Option<&str>) -> Value {
    let annotations = job.map_or(json!({}), |job| json!({"permafrost.io/job": job}));
    json!({
        "metadata": {"name": uid, "namespace": "default", "uid": uid, "annotations": annotations},
        "spec": {
            "priority": priority,
            "containers": [{"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}]
        },
        "status": {"startTime": started}
    })
}

async fn preempted(victims: Value) -> Vec<String> {
    let body =
        json!({"Pod": pod(json!({})), "NodeNameToVictims": victims, "NodeNameToMetaVictims": null});
    let answer = asked("preempt", &body).await;
    let kept = answer["NodeNameToMetaVictims"].as_object().unwrap();
    kept.keys().cloned().collect()
}

const LONG_AGO: &str = "2020-01-01T00:00:00Z";
const LATER: &str = "2025-01-01T00:00:00Z";

#[tokio::test]
async fn costly_victims_are_spared() {
    let on = |pods: Value, violations: i64| json!({"Pods": pods, "NumPDBViolations": violations});
    // A pod that can be dumped loses seconds, one that cannot loses years.
    let kept = preempted(json!({
        "n1": on(json!([victim("a", LONG_AGO, 0, None)]), 0),
        "machine-2": on(json!([victim("b", LONG_AGO, 0, Some("train"))]), 0),
    }))
    .await;
    assert_eq!(kept, ["machine-2"]);
    // Of two pods that are killed, the younger is preferred, whatever machine it is on.
    let kept = preempted(json!({
        "n1": on(json!([victim("a", LONG_AGO, 0, None)]), 0),
        "elsewhere": on(json!([victim("b", LATER, 0, None)]), 0),
    }))
    .await;
    assert_eq!(kept, ["elsewhere"]);
    // Nodes of equal cost are left to the scheduler.
    let kept = preempted(json!({
        "n1": on(json!([victim("a", LONG_AGO, 0, None)]), 0),
        "n2": on(json!([victim("b", LONG_AGO, 0, None)]), 0),
    }))
    .await;
    assert_eq!(kept, ["n1", "n2"]);
    // A pod of unknown cost is not cheap; if it is the only one, it is kept.
    let unknown = json!({"metadata": {"uid": "u"}, "spec": {}, "status": {}});
    let kept = preempted(json!({
        "n1": on(json!([victim("a", LONG_AGO, 0, None)]), 0),
        "n2": on(json!([unknown]), 0),
    }))
    .await;
    assert_eq!(kept, ["n1"]);
    let kept =
        preempted(json!({"n2": on(json!([unknown]), 0), "n3": on(json!([unknown]), 0)})).await;
    assert_eq!(kept, ["n2", "n3"]);
}

#[tokio::test]
async fn a_dump_that_does_not_fit_the_grace_period_saves_nothing() {
    // 1 GiB takes a second on n1 and four on machine-2.
    let with = |uid: &str, started: &str, grace: Value| {
        let mut pod = victim(uid, started, 0, Some("other"));
        pod["spec"]["terminationGracePeriodSeconds"] = grace;
        json!({"Pods": [pod], "NumPDBViolations": 0})
    };
    let kept = |grace: Value| async {
        preempted(json!({
            "n1": with("a", LATER, json!(0)),
            "machine-2": with("b", LONG_AGO, grace),
        }))
        .await
    };
    assert_eq!(kept(json!(5)).await, ["machine-2"]);
    // The default of 30 s.
    assert_eq!(kept(Value::Null).await, ["machine-2"]);
    // One pod loses years, the other one fewer.
    assert_eq!(kept(json!(3)).await, ["n1"]);
    assert_eq!(kept(json!(0)).await, ["n1"]);
    // A negative period counts as one second.
    assert_eq!(kept(json!(-7)).await, ["n1"]);
}

/// Returns the time of RFC 3339 that was so many seconds ago, to the second.
pub(super) fn ago(seconds: u64) -> String {
    let now = permafrost_store::clock::unix_ms() / 1000 - seconds;
    let (days, of_day) = (now / 86_400, now % 86_400);
    let (mut year, mut day) = (1970, days);
    let length = |year: u64| {
        let is_leap =
            year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
        (365 + u64::from(is_leap), 28 + u64::from(is_leap))
    };
    while day >= length(year).0 {
        day -= length(year).0;
        year += 1;
    }
    let months = [31, length(year).1, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for days in months {
        if day < days {
            break;
        }
        day -= days;
        month += 1;
    }
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!(
        "{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z",
        day + 1
    )
}

/// Makes pods of 10 GiB that have worked for 22 minutes, and have 30 s to end.
pub(super) fn six(of: &str, grace: Value) -> Value {
    let pods = (0..6).map(|n| {
        let mut pod = victim(&format!("{of}-{n}"), &ago(1320), 0, Some("other"));
        pod["spec"]["containers"] = json!([{"resources": {"requests": {"memory": "10Gi"}}}]);
        pod["spec"]["terminationGracePeriodSeconds"] = grace.clone();
        pod
    });
    json!({"Pods": pods.collect::<Vec<_>>(), "NumPDBViolations": 0})
}

#[tokio::test]
async fn the_victims_of_a_node_wait_for_each_others_dumps() {
    let victims = json!({"n1": six("a", json!(30)), "n3": six("b", json!(3600)), "elsewhere": six("c", json!(30))});
    let victims = serde_json::from_value(victims).unwrap();
    let service =
        TowerToHyperService::new(router(Api::looked_once(Arc::new(Three { lost: false }))));
    let inner = Inner::new(service, Caller::local("root"));
    let Ok(losses) = super::preempt::losses(&inner, None, &victims).await else {
        panic!("refused");
    };
    let lost = |machine: &str, expected: f64| {
        let lost = losses[machine];
        // Their ages are of the second in which they were made.
        assert!(
            (expected..expected + 30.0).contains(&lost),
            "{machine}: {lost}"
        );
    };
    // 10 s a dump: those that end after 10, 20 and 30 s lose 20 + 30 + 40 s, the other three all they had done.
    lost("n1", 4_050.0);
    // With an hour all are dumped: 20 + 30 + … + 70 s.
    lost("n3", 270.0);
    // This machine's dumps go to n1, but not behind those of n1's own victims: only one of them is preempted.
    lost("elsewhere", 4_050.0);
    let kept = preempted(json!({
        "n1": six("a", json!(30)),
        "n2": {"Pods": [victim("a", &ago(3000), 0, None)], "NumPDBViolations": 0},
    }));
    assert_eq!(kept.await, ["n2"]);
}

#[tokio::test]
async fn budgets_and_priorities_go_before_costs() {
    let dear = || victim("a", LONG_AGO, 0, None);
    let cheap = |priority| victim("b", LATER, priority, Some("train"));
    for (violations, priority) in [(1, 0), (0, 100)] {
        let kept = preempted(json!({
            "n1": {"Pods": [dear()], "NumPDBViolations": 0},
            "n2": {"Pods": [cheap(priority)], "NumPDBViolations": violations},
        }))
        .await;
        // The scheduler takes n1 by its own criteria.
        assert_eq!(kept, ["n1", "n2"]);
    }
}

#[tokio::test]
async fn victims_are_told_by_their_uids() {
    let body = json!({
        "Pod": pod(json!({})),
        "NodeNameToVictims": {
            "n1": {"Pods": [victim("a", LONG_AGO, 0, None), victim("b", LONG_AGO, 0, None)], "NumPDBViolations": 2}
        },
        "NodeNameToMetaVictims": null
    });
    let expected = json!({
        "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "a"}, {"UID": "b"}], "NumPDBViolations": 2}}
    });
    assert_eq!(asked("preempt", &body).await, expected);
    // nodeCacheCapable: nothing is known of the pods, and the answer equals the request.
    let body = json!({
        "Pod": pod(json!({})),
        "NodeNameToVictims": null,
        "NodeNameToMetaVictims": expected["NodeNameToMetaVictims"]
    });
    assert_eq!(asked("preempt", &body).await, expected);
}

#[tokio::test]
async fn what_is_no_request_is_refused_in_words() {
    for (body, status) in [
        ("", 400),
        ("{", 400),
        (r#"{"NodeNames": 7}"#, 422),
        (r#"{"Pod": {"metadata": {"annotations": []}}}"#, 422),
    ] {
        let (answered, problem) = posted(false, "filter", body).await;
        assert_eq!(answered, status, "{body}: {problem}");
        assert_eq!(problem["status"], status);
    }
    // A request without any content.
    assert_eq!(asked("prioritize", &json!({})).await, json!([]));
}

#[tokio::test]
async fn it_takes_the_scope_read() {
    for verb in ["filter", "prioritize", "preempt"] {
        for under in ["", "policies/kill/", "policies/mr+srt/"] {
            let router = beside(router(Api::looked_once(Arc::new(Three { lost: false }))));
            let mut request = Request::new(Body::from("{}"));
            *request.method_mut() = hyper::Method::POST;
            *request.uri_mut() = format!("/v1/kubernetes/{under}{verb}").parse().unwrap();
            let mut caller = Caller::local("token x");
            caller.scopes = crate::caller::Scopes::NONE;
            request.extensions_mut().insert(caller);
            use hyper::service::Service as _;
            let response = TowerToHyperService::new(router)
                .call(request)
                .await
                .unwrap();
            assert_eq!(response.status(), 403, "{under}{verb}");
        }
    }
}
