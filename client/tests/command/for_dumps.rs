//! Shared parts of the tests that dump: the daemon for them, the scripts, and checks of requests and leftovers.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_criu::verdict::Verdict;
use permafrost_protocol::control::{
    Done, ErrorCode, Exported, ServerStatus, SessionOpened, reply, request,
};
use permafrost_protocol::manifest::Origin;

use crate::fake::{Daemon, checkpoint, detail, refusal};

/// Starts a daemon for dumps of `train`, whose newest checkpoint is `parent`.
pub(crate) fn for_dumps(
    parent: Option<(u64, Origin)>,
    seal: reply::Body,
) -> (Daemon, Arc<Mutex<String>>) {
    for_dumps_into(0, parent, seal)
}

/// Starts a daemon for dumps of `train` that has pipes for so many bytes of pages.
pub(crate) fn for_dumps_into(
    pipe_bytes: u64,
    parent: Option<(u64, Origin)>,
    seal: reply::Body,
) -> (Daemon, Arc<Mutex<String>>) {
    let pages = Arc::new(Mutex::new(String::new()));
    let endpoint = pages.clone();
    let daemon = Daemon::start(move |request| {
        vec![match request {
            request::Body::Show(show) if show.checkpoint == "train" => match &parent {
                Some((generation, origin)) => detail(*generation, Some(origin.clone())),
                None => refusal(ErrorCode::NotFound),
            },
            request::Body::Show(_) => refusal(ErrorCode::NotFound),
            request::Body::Open(_) => reply::Body::SessionOpened(SessionOpened {
                session: "5e55".to_owned(),
                pipe_bytes,
                socket: endpoint.lock().clone(),
                parent_generation: parent.as_ref().map_or(0, |(generation, _)| *generation),
                ..SessionOpened::default()
            }),
            request::Body::Seal(_) => seal.clone(),
            request::Body::Export(_) => reply::Body::Exported(Exported::default()),
            request::Body::Abort(_) => reply::Body::Done(Done { count: 1 }),
            request::Body::Status(_) => reply::Body::Status(ServerStatus::default()),
            other => panic!("{other:?}"),
        }]
    });
    *pages.lock() = daemon
        .path()
        .join("pages.sock")
        .to_str()
        .unwrap()
        .to_owned();
    let verdict = Verdict::sealed(&checkpoint("train", 7), Duration::from_micros(812));
    fs::write(daemon.path().join("sealed"), verdict.encode()).unwrap();
    (daemon, pages)
}

pub(crate) fn sealed() -> reply::Body {
    reply::Body::Checkpoint(checkpoint("train", 7))
}

pub(crate) fn names(daemon: &Daemon) -> Vec<&'static str> {
    daemon
        .requests()
        .iter()
        .map(|(request, _)| match request {
            request::Body::Show(_) => "show",
            request::Body::Open(_) => "open",
            request::Body::Seal(_) => "seal",
            request::Body::Abort(_) => "abort",
            request::Body::Export(_) => "export",
            request::Body::Status(_) => "status",
            _ => "other",
        })
        .collect()
}

pub(crate) fn opened(daemon: &Daemon) -> request::Open {
    daemon
        .requests()
        .into_iter()
        .find_map(|(request, _)| match request {
            request::Body::Open(open) => Some(open),
            _ => None,
        })
        .unwrap()
}

/// Returns the scratch directories that dumps of the test have left.
pub(crate) fn left_behind(daemon: &Daemon) -> Vec<PathBuf> {
    let job = job_of(daemon);
    let uid = rustix::process::geteuid().as_raw();
    let parents = [
        format!("/run/permafrost-{uid}"),
        format!("/dev/shm/permafrost-{uid}"),
        "/dev/shm".to_owned(),
    ];
    parents
        .iter()
        .filter_map(|parent| fs::read_dir(parent).ok())
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_str().unwrap().contains(&job))
        .collect()
}

/// Returns a job name that no other test uses.
pub(crate) fn job_of(daemon: &Daemon) -> String {
    daemon
        .path()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .replace('.', "")
}

pub(crate) const SEALS: &str = r#"test "$PERMAFROST_SESSION" = 5e55 || exit 9
echo "$PERMAFROST_SOCKET" >@HERE@/action-socket
cp @HERE@/sealed "$PERMAFROST_VERDICT""#;

pub(crate) const DUMPS: &str = r#"test -d "$images" || exit 8
stat -c %a "$images" >@HERE@/mode
test -S /proc/self/fd/0 || exit 7
CRTOOLS_SCRIPT_ACTION=post-dump CRTOOLS_IMAGE_DIR="$images" "$PERMAFROST_ACTION""#;
