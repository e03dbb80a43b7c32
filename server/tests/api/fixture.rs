//! A daemon made of plain data, and requests to its API.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use parking_lot::{Condvar, Mutex};
use permafrost_api_types::activity::{
    ActivityAnswer, EndedTransfer, ListedStep, RepairActivity, RunningCopy,
};
use permafrost_api_types::events::ApiEvent;
use permafrost_api_types::figure::Figure as Said;
use permafrost_api_types::figures::StartFigures;
use permafrost_api_types::reserve::{Direction, Reservation, ReserveRequest};
use permafrost_http_api::caller::Caller;
use permafrost_http_api::source::{Activity, NodeEntry, QueueLength, Refusal, Source};
use permafrost_http_api::{Api, router};
use permafrost_protocol::control::{
    Checkpoint, CheckpointContents, ContentsImage, MappingContents, PageCounts, ProcessContents,
    request,
};
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::NodeFigures;
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::{Estimate, Figure, Missing, What};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};
use permafrost_scheduling::size::{Basis, DumpKind, Memory, Prediction};
use permafrost_store::{MissingObject, StoreError};
use serde_json::Value;
use tokio::sync::broadcast;
use tower::ServiceExt;

pub(crate) const GB: u64 = 1_000_000_000;

/// Stand-in for the daemon, as a source of the API.
pub(crate) struct Plain {
    pub(crate) nodes: Mutex<Vec<NodeEntry>>,
    pub(crate) checkpoints: Mutex<Vec<Checkpoint>>,
    pub(crate) events: broadcast::Sender<ApiEvent>,
    pub(crate) installed: Mutex<Option<StartFigures>>,
    pub(crate) reserved: Mutex<Vec<ReserveRequest>>,
    pub(crate) panics: AtomicBool,
    /// While set, the source does not answer.
    hangs: Mutex<bool>,
    goes_on: Condvar,
}

impl Plain {
    pub(crate) fn new(nodes: Vec<NodeEntry>, checkpoints: Vec<Checkpoint>) -> Arc<Self> {
        Arc::new(Self {
            nodes: Mutex::new(nodes),
            checkpoints: Mutex::new(checkpoints),
            events: broadcast::channel(16).0,
            installed: Mutex::new(None),
            reserved: Mutex::new(Vec::new()),
            panics: AtomicBool::new(false),
            hangs: Mutex::new(false),
            goes_on: Condvar::new(),
        })
    }

    pub(crate) fn hang(&self, hangs: bool) {
        *self.hangs.lock() = hangs;
        self.goes_on.notify_all();
    }

    fn block(&self) {
        let mut hangs = self.hangs.lock();
        self.goes_on.wait_while(&mut hangs, |hangs| *hangs);
        drop(hangs);
        assert!(!self.panics.load(Ordering::SeqCst), "as the test wants it");
    }
}

impl Source for Plain {
    fn own_name(&self) -> String {
        "a".into()
    }

    fn nodes(&self) -> Vec<NodeEntry> {
        self.block();
        self.nodes.lock().clone()
    }

    fn checkpoints(&self) -> Result<Vec<Checkpoint>, StoreError> {
        self.block();
        Ok(self.checkpoints.lock().clone())
    }

    /// Copies and repairs one checkpoint of each namespace.
    fn activity(&self) -> Activity {
        let names = ["sort@7", "team/k-means@2"].map(|name| Some(name.to_owned()));
        let copy = |checkpoint| RunningCopy {
            checkpoint,
            from: "b".into(),
            done_bytes: GB,
            moved_bytes: GB / 2,
            memory_bytes: 2 * GB,
            age_s: 1.0,
            background: true,
        };
        let step = |checkpoint| ListedStep {
            checkpoint,
            node: "b".into(),
            is_copy: true,
            is_running: false,
            memory_bytes: GB,
        };
        let ended = |checkpoint| EndedTransfer {
            direction: Direction::Write,
            checkpoint,
            bytes: GB,
            predicted_s: Some(1.0),
            measured_s: 2.0,
            age_s: 3.0,
        };
        Activity {
            told: ActivityAnswer {
                answered_by: "a".into(),
                transfers: Vec::new(),
                copies: names.clone().map(copy).into(),
                repair: Some(RepairActivity {
                    under_replicated: 2,
                    stranded: 0,
                    damaged: 0,
                    copies_made: 0,
                    copies_failed: 0,
                    copied_bytes: 0,
                    waiting: 2,
                    steps: names.clone().map(step).into(),
                }),
                ended: names.map(ended).into(),
                dump_time_error: None,
                restore_time_error: None,
            },
        }
    }

    /// Describes a checkpoint of the list, with one process of three mappings.
    fn contents(&self, of: &request::Describe) -> Result<CheckpointContents, Refusal> {
        self.block();
        let checkpoints = self.checkpoints.lock();
        let name = |one: &Checkpoint| format!("{}@{}", one.job, one.generation);
        let missing = || StoreError::NotFound(MissingObject::Checkpoint(of.checkpoint.clone()));
        let found = checkpoints.iter().find(|one| name(one) == of.checkpoint);
        let checkpoint = found.cloned().ok_or_else(missing)?;
        let counts = PageCounts {
            pages: 4,
            zero: 1,
            equal: Some(2),
            changed: Some(1),
            only_here: Some(1),
        };
        let mapping = |start: u64| MappingContents {
            start,
            end: start + 0x4000,
            permissions: "rw-p".into(),
            kind: "anonymous".into(),
            pages: Some(counts),
            ..MappingContents::default()
        };
        let process = ProcessContents {
            pid: 7,
            program: "train".into(),
            threads: 2,
            pages: Some(counts),
            // The last one is beyond what a number of JSON is exact for.
            mappings: vec![
                mapping(0x1000),
                mapping(0x8000),
                mapping(0xffff_ffff_ff60_0000),
            ],
            ..ProcessContents::default()
        };
        if of.pid != 0 && of.pid != process.pid {
            return Err(Refusal::Store(StoreError::NotFound(
                MissingObject::Checkpoint(format!("process {}", of.pid)),
            )));
        }
        let parent = checkpoints.iter().find(|one| {
            one.job == checkpoint.job && one.generation == checkpoint.parent_generation
        });
        Ok(CheckpointContents {
            processes: vec![process],
            compared_with: parent.cloned(),
            images: vec![ContentsImage {
                name: "core-7.img".into(),
                len_bytes: 900,
            }],
            checkpoint: Some(checkpoint),
            ..CheckpointContents::default()
        })
    }

    /// Predicts a dump that moves all of the memory, and stores half of it, or all of the dirty pages.
    fn predict(
        &self,
        _job: &str,
        _program: &str,
        dump: DumpKind,
        memory: &Memory,
    ) -> Result<Prediction, Missing> {
        let dirty = memory.dirty.filter(|_| dump == DumpKind::Incremental);
        if let Some(dirty) = dirty {
            let bytes = Estimate::given(dirty);
            return Ok(Prediction {
                size: bytes,
                moved: bytes,
                basis: Basis::DirtyPages,
            });
        }
        let what = What::Memory;
        let resident = memory.resident.ok_or(Missing::NotGiven { what })?;
        Ok(Prediction {
            size: Estimate::given(Bytes::new(resident.count() / 2)),
            moved: Estimate::given(resident),
            basis: Basis::Job,
        })
    }

    fn reserve(&self, _: &Caller, wanted: &ReserveRequest) -> Result<Reservation, Refusal> {
        self.block();
        self.reserved.lock().push(wanted.clone());
        Ok(Reservation {
            token: "t1".into(),
            node: wanted.node.clone().unwrap_or_else(|| self.own_name()),
            direction: wanted.direction,
            bytes_before: 2 * GB,
            starts_in_s: Said::unknown("not measured"),
            lapses_in_s: 300.0,
        })
    }

    fn cancel(&self, token: &str) -> Result<(), Refusal> {
        self.block();
        if token == "t1" {
            Ok(())
        } else {
            Err(Refusal::NoReservation)
        }
    }

    fn install(&self, figures: &StartFigures) -> Result<(), Refusal> {
        *self.installed.lock() = Some(figures.clone());
        Ok(())
    }

    fn events(&self) -> broadcast::Receiver<ApiEvent> {
        self.events.subscribe()
    }
}

pub(crate) fn rate(gb_per_s: f64) -> SizedRates {
    SizedRates::uniform(Figure::given(BytesPerSecond::new(gb_per_s * 1e9).unwrap()))
}

/// Makes a node that writes and reads so many GB/s, with so many GB queued in each direction.
pub(crate) fn node(
    name: &str,
    (write, read): (f64, f64),
    (writes, reads): (u64, u64),
) -> NodeEntry {
    NodeEntry {
        address: format!("{name}:7118"),
        zone: "z".into(),
        rack: format!("r-{name}"),
        version: "0.1.0".into(),
        age: Some(Duration::from_millis(500)),
        tier: "memory".into(),
        capacity_bytes: 100 * GB,
        free_bytes: 50 * GB,
        room_bytes: 48 * GB,
        figures: NodeFigures {
            write: rate(write),
            read: rate(read),
            write_queue: Figure::given(Bytes::new(writes * GB)),
            read_queue: Figure::given(Bytes::new(reads * GB)),
            ..NodeFigures::unknown(NodeId(99))
        },
        write_queue: Some(QueueLength {
            running: 1,
            waiting: 2,
            reserved: 3,
            slots: 4,
        }),
        read_queue: Some(QueueLength::default()),
        ..NodeEntry::unknown(name)
    }
}

pub(crate) fn linked(mut node: NodeEntry, to: &str, gb_per_s: f64) -> NodeEntry {
    node.links.insert(to.into(), rate(gb_per_s));
    node
}

pub(crate) fn checkpoint(job: &str, generation: u64, gb: u64, nodes: &[&str]) -> Checkpoint {
    Checkpoint {
        job: job.into(),
        generation,
        id: format!("{generation:032x}"),
        kind: "full".into(),
        created_unix_ms: now_unix_ms() - 12_000,
        memory_bytes: gb * GB,
        added_bytes: gb * GB / 2,
        processes: 1,
        parent_generation: generation - 1,
        nodes: nodes.iter().map(|&name| name.to_owned()).collect(),
        copies_wanted: 2,
        ..Checkpoint::default()
    }
}

pub(crate) fn now_unix_ms() -> u64 {
    let now = std::time::SystemTime::now();
    let since = now.duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(since.as_millis()).unwrap()
}

/// Three nodes: `a` is busy, `b` has another rack and a link to `a`, `c` does not live.
///
/// | | write GB/s | read GB/s | write queue GB | read queue GB |
/// | a | 0.5 | 1 | 2 | 1 |
/// | b | 1 | 2 | 0 | 0 |
pub(crate) fn three_nodes() -> Arc<Plain> {
    let mut c = node("c", (9.0, 9.0), (0, 0));
    c.live = false;
    let b = linked(node("b", (1.0, 2.0), (0, 0)), "a", 0.25);
    let nodes = vec![node("a", (0.5, 1.0), (2, 1)), b, c];
    let mut pre_dump = checkpoint("team/k-means", 3, 5, &["a"]);
    pre_dump.kind = "pre-dump".into();
    let mut second = checkpoint("team/k-means", 2, 5, &["a"]);
    second.parent_bytes = 4 * GB;
    let parked = Checkpoint::default();
    let checkpoints = vec![
        checkpoint("sort", 7, 8, &["a", "b"]),
        checkpoint("team/k-means", 1, 5, &["b"]),
        second,
        pre_dump,
        parked,
    ];
    Plain::new(nodes, checkpoints)
}

/// A node with one snapshot, and requests from root.
pub(crate) struct Asked {
    pub(crate) api: Arc<Api>,
    router: Router,
    pub(crate) caller: Option<Caller>,
}

pub(crate) fn asked(source: Arc<Plain>) -> Asked {
    Asked::new(Api::looked_once(source))
}

impl Asked {
    pub(crate) fn new(api: Arc<Api>) -> Self {
        Self {
            router: router(Arc::clone(&api)),
            api,
            caller: Some(Caller::local("root")),
        }
    }

    pub(crate) async fn send(&self, mut request: Request<Body>) -> Response<Body> {
        if let Some(caller) = &self.caller {
            request.extensions_mut().insert(caller.clone());
        }
        self.router.clone().oneshot(request).await.unwrap()
    }

    /// Sends a request with this body, and checks the answer against the document.
    pub(crate) async fn raw(&self, method: &str, path: &str, body: Vec<u8>) -> (StatusCode, Value) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .body(Body::from(body))
            .unwrap();
        let response = self.send(request).await;
        let status = response.status();
        let content_type = response.headers().get("content-type").cloned();
        let body = axum::body::to_bytes(response.into_body(), usize::MAX)
            .await
            .unwrap();
        let body: Value = if body.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&body).unwrap()
        };
        let content_type = content_type.map(|value| value.to_str().unwrap().to_owned());
        documented(method, path, status, content_type.as_deref(), &body);
        (status, body)
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        self.raw("POST", path, serde_json::to_vec(body).unwrap())
            .await
    }

    /// Posts a request that must succeed, and returns the body of the reply.
    pub(crate) async fn ok(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body).await;
        assert_eq!(status, StatusCode::OK, "{answer:#}");
        answer
    }

    pub(crate) async fn get(&self, path: &str) -> (StatusCode, Value) {
        self.raw("GET", path, Vec::new()).await
    }
}

/// The OpenAPI document that the API serves.
pub(crate) static DOCUMENT: LazyLock<Value> =
    LazyLock::new(|| serde_json::to_value(permafrost_http_api::openapi::openapi()).unwrap());

/// Checks that the document contains this answer, and that the answer conforms to it.
fn documented(
    method: &str,
    path: &str,
    status: StatusCode,
    content_type: Option<&str>,
    body: &Value,
) {
    let path = path.split('?').next().unwrap();
    let paths = DOCUMENT["paths"].as_object().unwrap();
    let item = paths.iter().find(|(template, _)| fits(template, path));
    let Some(operation) = item.and_then(|(_, item)| item.get(method.to_lowercase())) else {
        // No such route.
        assert!(status == 404 || status == 405, "{method} {path}: {status}");
        return;
    };
    let responses = operation["responses"].as_object().unwrap();
    let response = responses.get(status.as_str());
    let response =
        response.unwrap_or_else(|| panic!("{method} {path} does not document {status}: {body:#}"));
    let Some(content) = response.get("content").and_then(Value::as_object) else {
        assert_eq!(body, &Value::Null);
        return;
    };
    let content_type = content_type.expect("an answer says what it is");
    let schema = content
        .get(content_type)
        .and_then(|content| content.get("schema"));
    let schema = schema.unwrap_or_else(|| panic!("{method} {path} {status} is not {content_type}"));
    let errors = errors(schema, body);
    assert!(
        errors.is_empty(),
        "{method} {path} {status}: {errors:#?}\n{body:#}"
    );
}

fn fits(template: &str, path: &str) -> bool {
    let (template, path): (Vec<_>, Vec<_>) =
        (template.split('/').collect(), path.split('/').collect());
    template.len() == path.len()
        && (template.iter().zip(path)).all(|(part, given)| *part == given || part.starts_with('{'))
}

/// Returns the violations of a schema of the document by a value.
pub(crate) fn errors(schema: &Value, value: &Value) -> Vec<String> {
    let mut root = schema.as_object().unwrap().clone();
    root.insert("components".into(), DOCUMENT["components"].clone());
    let validator = jsonschema::draft202012::new(&Value::Object(root)).unwrap();
    let errors = validator.iter_errors(value);
    errors
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect()
}

/// Returns the pointers of a problem.
pub(crate) fn pointers(problem: &Value) -> Vec<&str> {
    let errors = problem["errors"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    errors
        .iter()
        .map(|error| error["pointer"].as_str().unwrap())
        .collect()
}

/// Compares a number with one worked out by hand.
#[track_caller]
pub(crate) fn close(value: &Value, expected: f64) {
    let value = value
        .as_f64()
        .unwrap_or_else(|| panic!("{value} is no number"));
    assert!(
        (value - expected).abs() < 1e-6 * expected.abs().max(1.0),
        "{value} is not {expected}"
    );
}

pub(crate) fn seconds(value: f64) -> Seconds {
    Seconds::new(value).unwrap()
}

/// Returns equal links between nodes of which nothing else is known.
pub(crate) fn links(names: &[&str]) -> BTreeMap<String, SizedRates> {
    names
        .iter()
        .map(|&name| (name.to_owned(), rate(1.0)))
        .collect()
}
