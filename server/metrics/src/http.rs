//! HTTP server of the metrics: `/metrics`, `/healthz` (the process answers) and `/readyz` (it takes dumps).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::{JoinHandle, JoinSet};

use super::Metrics;

/// Media type of the text, as Prometheus expects it.
const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Scrapes answered at once. Each reads the catalog.
const SCRAPES: usize = 2;

/// Longest time that a scrape waits until it may begin.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections served at once; others wait.
const CONNECTIONS: usize = 64;

/// Longest duration of a connection.
const CONNECTION: Duration = Duration::from_secs(30);

/// Pause before the next `accept` when the process had no free file descriptor.
const ACCEPT_AGAIN: Duration = Duration::from_millis(200);

/// Readiness check. `Err` gives the reason why the node takes no dumps; `Ok` lists the faults of a node that takes
/// dumps. Must not block.
pub type Ready = Box<dyn Fn() -> Result<Vec<String>, String> + Send + Sync>;

/// The metrics cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("listen for metrics on {listen}")]
pub struct MetricsListenError {
    /// Address that was to be bound.
    pub listen: SocketAddr,
    /// Error of the operating system.
    pub source: std::io::Error,
}

/// HTTP server of the metrics. It ends when it is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl MetricsServer {
    /// Returns the address on which the server listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Shared {
    metrics: Arc<Metrics>,
    ready: Ready,
    scrapes: Semaphore,
}

/// Serves the metrics to every client: they contain numbers, but no names of jobs. Must be called on a tokio
/// runtime; port 0 takes any free port.
///
/// # Errors
/// The address is in use, or does not belong to this machine.
pub async fn serve(
    listen: SocketAddr,
    metrics: Metrics,
    ready: impl Fn() -> Result<Vec<String>, String> + Send + Sync + 'static,
) -> Result<MetricsServer, MetricsListenError> {
    let failed = |source| MetricsListenError { listen, source };
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let shared = Arc::new(Shared {
        metrics: Arc::new(metrics),
        ready: Box::new(ready),
        scrapes: Semaphore::new(SCRAPES),
    });
    let router = Router::new()
        .route("/metrics", get(numbers))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(is_ready))
        .with_state(shared);
    let task = tokio::spawn(accept(listener, router));
    Ok(MetricsServer { address, task })
}

/// Serves each connection for one request and a bounded time. Ends them all when it is dropped.
async fn accept(listener: TcpListener, router: Router) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    let mut serving = JoinSet::new();
    loop {
        while serving.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "accept for metrics");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(router.clone());
        serving.spawn(async move {
            let served = http1::Builder::new()
                .keep_alive(false)
                // The whole connection has a limit.
                .header_read_timeout(None)
                .serve_connection(TokioIo::new(stream), service);
            if let Ok(Err(error)) = tokio::time::timeout(CONNECTION, served).await {
                tracing::debug!(%error, "metrics not told");
            }
            drop(permit);
        });
    }
}

async fn numbers(State(shared): State<Arc<Shared>>) -> Response {
    let Some(_turn) = turn(&shared.scrapes).await else {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "too many scrapes at once\n",
        )
            .into_response();
    };
    let metrics = Arc::clone(&shared.metrics);
    match tokio::task::spawn_blocking(move || metrics.text()).await {
        Ok(Ok(text)) => ([(CONTENT_TYPE, TEXT)], text).into_response(),
        failed => {
            tracing::error!(event = "metrics-failed", ?failed, "metrics are not told");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

async fn turn(scrapes: &Semaphore) -> Option<SemaphorePermit<'_>> {
    let turn = tokio::time::timeout(PATIENCE, scrapes.acquire());
    turn.await.ok()?.ok()
}

async fn is_ready(State(shared): State<Arc<Shared>>) -> Response {
    match (shared.ready)() {
        Ok(amiss) => {
            let lines = ["ready".to_owned()].into_iter().chain(amiss);
            let text: String = lines.map(|line| line + "\n").collect();
            text.into_response()
        }
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}
