//! A cluster that is not there, behind the real HTTP API, and a client that counts.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_api_types::activity::ActivityAnswer;
use permafrost_api_types::events::ApiEvent;
use permafrost_api_types::figures::StartFigures;
use permafrost_api_types::nodes::NodeClass;
use permafrost_api_types::reserve::{Reservation, ReserveRequest};
use permafrost_http_api::caller::Caller;
use permafrost_http_api::source::{Activity, NodeEntry, QueueLength, Refusal, Source};
use permafrost_protocol::control::{Checkpoint, CheckpointContents, request};
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::NodeFigures;
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::{Figure, Missing};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use permafrost_scheduling::size::{DumpKind, JobId, KindId, Memory, Prediction, SizePredictor};
use permafrost_store::StoreError;
use tokio::sync::broadcast;

const GIB: u64 = 1 << 30;

/// Nodes and jobs by number. Each job has one checkpoint, on two nodes.
pub struct Simulated {
    nodes: u32,
    jobs: u32,
    sizes: SizePredictor,
    events: broadcast::Sender<ApiEvent>,
}

impl Simulated {
    /// Makes a cluster of `nodes` nodes and `jobs` jobs.
    #[must_use]
    pub fn new(nodes: u32, jobs: u32) -> Arc<Self> {
        Arc::new(Self {
            nodes,
            jobs,
            sizes: SizePredictor::new(1),
            events: broadcast::channel(16).0,
        })
    }

    fn node(&self, n: u32) -> NodeEntry {
        let rate = |gb_per_s: f64| {
            let rate = BytesPerSecond::new(gb_per_s * 1e9).unwrap_or(BytesPerSecond::MIN);
            SizedRates::uniform(Figure::given(rate))
        };
        let queue = |running| {
            Some(QueueLength {
                running,
                slots: 2,
                ..QueueLength::default()
            })
        };
        NodeEntry {
            class: if n % 4 == 3 {
                NodeClass::Transient
            } else {
                NodeClass::Reserved
            },
            zone: format!("z{}", n % 3),
            rack: format!("r{}", n / 20),
            age: Some(Duration::ZERO),
            tier: "pmem".to_owned(),
            capacity_bytes: 1024 * GIB,
            free_bytes: u64::from(100 + n % 900) * GIB,
            room_bytes: u64::from(100 + n % 900) * GIB,
            figures: NodeFigures {
                write: rate(0.5 + f64::from(n % 8) / 2.0),
                read: rate(1.0 + f64::from(n % 5)),
                write_queue: Figure::given(Bytes::mib(u64::from(n % 13) * 100)),
                read_queue: Figure::given(Bytes::mib(u64::from(n % 7) * 100)),
                dump_start: Figure::given(Seconds::from_millis(30)),
                restore_start: Figure::given(Seconds::from_millis(50)),
                ..NodeFigures::unknown(NodeId(n))
            },
            write_queue: queue(n % 13),
            read_queue: queue(n % 7),
            // Links to the nodes with which it exchanged pages lately.
            links: (1..8.min(self.nodes))
                .map(|other| (name(n.wrapping_add(other) % self.nodes), rate(1.2)))
                .collect(),
            ..NodeEntry::unknown(name(n))
        }
    }
}

fn name(node: u32) -> String {
    format!("n{node}")
}

impl Source for Simulated {
    fn own_name(&self) -> String {
        name(0)
    }

    fn nodes(&self) -> Vec<NodeEntry> {
        (0..self.nodes).map(|n| self.node(n)).collect()
    }

    fn checkpoints(&self) -> Result<Vec<Checkpoint>, StoreError> {
        let checkpoint = |n: u32| Checkpoint {
            job: format!("job-{n}"),
            generation: 1,
            id: format!("{n:032x}"),
            kind: "full".to_owned(),
            created_unix_ms: 1_700_000_000_000,
            memory_bytes: memory_of(n),
            added_bytes: memory_of(n),
            nodes: vec![name(n % self.nodes), name((n + 1) % self.nodes)],
            copies_wanted: 2,
            ..Checkpoint::default()
        };
        Ok((0..self.jobs).map(checkpoint).collect())
    }

    fn activity(&self) -> Activity {
        Activity {
            told: ActivityAnswer {
                answered_by: self.own_name(),
                ..ActivityAnswer::default()
            },
        }
    }

    fn contents(&self, _of: &request::Describe) -> Result<CheckpointContents, Refusal> {
        Err(unsimulated())
    }

    fn predict(
        &self,
        _job: &str,
        _program: &str,
        dump: DumpKind,
        memory: &Memory,
    ) -> Result<Prediction, Missing> {
        let now = Moment::from_micros(1);
        self.sizes.predict(JobId(0), KindId(0), dump, memory, now)
    }

    fn reserve(&self, _caller: &Caller, _wanted: &ReserveRequest) -> Result<Reservation, Refusal> {
        Err(unsimulated())
    }

    fn cancel(&self, _token: &str) -> Result<(), Refusal> {
        Err(unsimulated())
    }

    fn install(&self, _figures: &StartFigures) -> Result<(), Refusal> {
        Err(unsimulated())
    }

    fn events(&self) -> broadcast::Receiver<ApiEvent> {
        self.events.subscribe()
    }
}

fn unsimulated() -> Refusal {
    Refusal::Unavailable {
        message: "the node is simulated".to_owned(),
    }
}

fn memory_of(n: u32) -> u64 {
    (100 + u64::from(n * 37 % 3900)) << 20
}

/// Kind of request that the bench sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Question {
    /// Free a tenth of the processors that the candidates hold.
    Preempt,
    /// Estimate a full dump of each candidate on its node.
    Estimate,
    /// Rank the nodes on which the newest checkpoint of each job is best resumed.
    Resume,
    /// Place dumps, and one copy of each.
    Place,
}

impl Question {
    /// Returns the path of the route.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Preempt => "/v1/preempt",
            Self::Estimate => "/v1/estimate",
            Self::Resume => "/v1/resume",
            Self::Place => "/v1/place",
        }
    }

    /// Returns a body about `candidates` candidates on `nodes` nodes.
    #[must_use]
    pub fn body(self, candidates: u32, nodes: u32) -> String {
        let list = |item: &dyn Fn(u32) -> String| {
            let items: Vec<String> = (0..candidates).map(item).collect();
            items.join(",")
        };
        let task = |n: u32| {
            format!(
                r#"{{"id":"task-{n}","node":"n{}","job":"job-{n}","resident_bytes":{},"progress_s":{},"holds":{{"cpu_millis":1000,"memory_bytes":{}}}}}"#,
                n % nodes,
                memory_of(n),
                1 + n * 7 % 600,
                memory_of(n)
            )
        };
        match self {
            Self::Preempt => format!(
                r#"{{"wanted":{{"cpu_millis":{},"memory_bytes":0}},"candidates":[{}]}}"#,
                (candidates * 100).max(1000),
                list(&task)
            ),
            Self::Estimate => format!(
                r#"{{"mechanisms":["full_dump"],"detail":"totals","tasks":[{}]}}"#,
                list(&task)
            ),
            Self::Resume => format!(
                r#"{{"detail":"totals","limit":3,"checkpoints":[{}]}}"#,
                list(&|n| format!(r#""job-{n}""#))
            ),
            Self::Place => format!(
                r#"{{"placements":[{}]}}"#,
                list(&|n| format!(r#"{{"size_bytes":{},"copies":2}}"#, memory_of(n)))
            ),
        }
    }
}

/// Connection that sends one request after another.
pub struct LoadClient {
    stream: BufReader<TcpStream>,
    answer: Vec<u8>,
}

impl LoadClient {
    /// Connects.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::with_capacity(256 << 10, stream),
            answer: Vec::new(),
        })
    }

    /// Sends a request. Returns the time until the whole reply was there.
    ///
    /// # Errors The connection breaks, or the status of the reply is not 200.
    pub fn ask(&mut self, request: &[u8]) -> std::io::Result<Duration> {
        let begun = Instant::now();
        self.stream.get_mut().write_all(request)?;
        let (mut status, mut length) = (String::new(), 0);
        self.stream.read_line(&mut status)?;
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line)?;
            let line = line.trim_end().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        self.answer.resize(length, 0);
        self.stream.read_exact(&mut self.answer)?;
        let took = begun.elapsed();
        if status.split(' ').nth(1) == Some("200") {
            return Ok(took);
        }
        let said = String::from_utf8_lossy(&self.answer);
        Err(std::io::Error::other(format!("{status}{said}")))
    }

    /// Returns the length of the last reply, bytes.
    #[must_use]
    pub fn answer_bytes(&self) -> usize {
        self.answer.len()
    }
}

/// Returns a request with its head around the body.
#[must_use]
pub fn request(question: Question, body: &str, token: &str) -> Vec<u8> {
    let (path, length) = (question.path(), body.len());
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}
