//! Runs the HTTP API on threads of its own.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use permafrost_audit::Audit;
use permafrost_http_api::refresh::{self, Refresher};
use permafrost_http_api::serve::{self, Limits, Rate, Server};
use permafrost_http_api::source::Source;
use permafrost_http_api::{Api, ApiConfig, kubernetes, router};
use permafrost_identity::ReloadingIdentity;
use permafrost_store::StoreError;
use permafrost_transport::peer::ApiServer;
use tokio::runtime::{Builder, Runtime};

use super::StartError;
use crate::config::ApiServerOptions;

/// Threads that read requests and write replies. All clients share them, however many there are: dumps have the rest
/// of the machine, and batches give way to dumps.
const THREADS: usize = 2;

/// Nice value of these threads above the rest of the daemon, for machines with too few processors: a frozen task
/// waits for its dump, whereas a scheduler can wait for a millisecond.
const NICE: i32 = 10;

/// Longest time that the daemon's start waits for the first snapshot.
const FIRST_LOOK: Duration = Duration::from_secs(1);

/// The running server of the HTTP API.
pub(super) struct Answers {
    /// `None` once it is stopped.
    runtime: Option<Runtime>,
    server: Option<Server>,
    _refresher: Refresher,
}

impl Answers {
    /// Begins to answer from `source`.
    pub(super) async fn start(
        options: &ApiServerOptions,
        run_dir: &Path,
        identity: Option<&ReloadingIdentity>,
        source: Arc<dyn Source>,
        audit: &Arc<Audit>,
    ) -> Result<Self, StartError> {
        let failed = StoreError::io("start the threads of the API");
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("api")
            .on_thread_start(yield_to_others)
            .enable_all()
            .build()
            .map_err(failed)?;
        let serving = serve::ServeOptions {
            run_dir: run_dir.to_owned(),
            listen: options.listen,
            identity: identity.cloned(),
            tokens: options.tokens.clone(),
            audit: Some(Arc::clone(audit)),
            limits: Limits {
                rate: Rate::of(options.rate_per_s),
                ..Limits::default()
            },
        };
        let begun = runtime.spawn(async move {
            let api = Api::new(source);
            let refresher = refresh::start(&api, ApiConfig::default())
                .map_err(StoreError::io("start a thread"))?;
            // A request right after the daemon's ready line must get an answer. A registry that does not answer must
            // not delay the start.
            api.looked_within(FIRST_LOOK).await;
            let server = serve::serve(serving, kubernetes::beside(router(api))).await?;
            Ok::<_, StartError>((server, refresher))
        });
        let begun = match begun.await {
            Ok(begun) => begun,
            Err(died) => Err(StoreError::io("start the API")(io::Error::other(died)).into()),
        };
        match begun {
            Ok((server, refresher)) => Ok(Self {
                runtime: Some(runtime),
                server: Some(server),
                _refresher: refresher,
            }),
            Err(error) => {
                // One that is dropped on a runtime panics.
                runtime.shutdown_background();
                Err(error)
            }
        }
    }

    /// Returns the TCP address of the API, if it is served over TCP.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.server.as_ref()?.address()
    }

    /// Returns the counter of requests for files of the page.
    pub(super) fn page_requests(&self) -> Option<Arc<AtomicU64>> {
        Some(self.server.as_ref()?.page_requests())
    }

    /// Replaces the rate limit of callers over TCP, requests per second.
    pub(super) fn set_rate(&self, per_s: u32) {
        if let Some(server) = &self.server {
            server.set_rate(Rate::of(per_s));
        }
    }

    /// Returns the API for requests of peers.
    pub(super) fn for_peers(&self) -> Option<Arc<dyn ApiServer>> {
        Some(self.server.as_ref()?.for_peers())
    }

    /// Answers the requests under way, and stops.
    pub(super) async fn stop(mut self) {
        if let Some(server) = self.server.take() {
            server.stop().await;
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Raises the nice value of the current thread.
fn yield_to_others() {
    // The kernel's 0 is the thread that calls.
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "the API's threads have the daemon's priority");
    }
}
