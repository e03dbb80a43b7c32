//! Tests of a small router behind the real server: sockets, TLS, tokens, limits.

mod audited;
mod client;
mod limits;
mod page;
mod reached;
mod stopping;
mod told;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Extension, Router};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::SendRequest;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use permafrost_api_types::problem::Problem;
use permafrost_identity::{
    Authority, CertificateOrder, Identity, Namespaces, ReloadingIdentity, Role, TokenHash,
};
use rustls::pki_types::ServerName;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::*;
use crate::caller::Caller;

const LOCALHOST: &str = "127.0.0.1:0";

/// Returns a router that names its caller, takes bodies, streams, and answers slowly.
fn router() -> Router {
    Router::new()
        .route("/who", get(who))
        .route("/length", post(async |body: Bytes| body.len().to_string()))
        .route("/never", get(std::future::pending::<()>))
        .route("/events", get(events))
        .route("/much", get(async || Body::from(vec![b'x'; 64 << 20])))
}

async fn who(Extension(caller): Extension<Caller>) -> String {
    let namespaces: Vec<&str> = caller.namespaces.iter().collect();
    format!("{} {} {}", caller.name, caller.scopes, namespaces.join(","))
}

/// Streams events without end.
async fn events() -> impl IntoResponse {
    let (kind, body) = ("text/event-stream", Body::new(Endless(0)));
    ([("content-type", kind)], body)
}

struct Endless(u8);

impl axum::body::HttpBody for Endless {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, io::Error>>> {
        if self.0 > 0 {
            return std::task::Poll::Pending;
        }
        self.0 = 1;
        let first = Bytes::from_static(b"data: 1\n\n");
        std::task::Poll::Ready(Some(Ok(hyper::body::Frame::data(first))))
    }
}

/// A directory with everything that a server needs.
struct Place {
    dir: TempDir,
    authority: Authority,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("ca"), "test", false).unwrap();
        std::fs::create_dir(dir.path().join("run")).unwrap();
        Self { dir, authority }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn options(&self) -> ServeOptions {
        ServeOptions {
            run_dir: self.path("run"),
            ..ServeOptions::default()
        }
    }

    /// Returns options for the loopback interface, with this file of tokens.
    fn with_tokens(&self, lines: &[(&str, &str, &str)]) -> ServeOptions {
        let path = self.path("tokens");
        let mut text = String::new();
        for (name, scopes, token) in lines {
            text += &format!("{name} {scopes} {}\n", TokenHash::of(token));
        }
        private(&path, &text);
        ServeOptions {
            listen: Some(LOCALHOST.parse().unwrap()),
            tokens: Some(path),
            ..self.options()
        }
    }

    fn issue(&self, name: &str, role: Role, namespaces: &[&str]) -> PathBuf {
        let place = self.path(name);
        let order = CertificateOrder {
            namespaces: Namespaces::new(namespaces.iter().copied()).unwrap(),
            hosts: vec!["localhost".to_owned(), "127.0.0.1".to_owned()],
            ..CertificateOrder::new(name, role)
        };
        self.authority.issue(&order, &place, true).unwrap();
        place
    }

    /// Returns the identity of a node that reloads its files at once.
    fn node(&self) -> ReloadingIdentity {
        let place = self.issue("n1", Role::Node, &[]);
        ReloadingIdentity::load_every(place, Duration::ZERO).unwrap()
    }

    fn with_tls(&self) -> ServeOptions {
        ServeOptions {
            listen: Some(LOCALHOST.parse().unwrap()),
            identity: Some(self.node()),
            ..self.options()
        }
    }
}

fn private(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, text).unwrap();
    std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::rename(&fresh, path).unwrap();
}

async fn start(options: ServeOptions) -> Server {
    serve_looking(options, router(), Duration::ZERO)
        .await
        .unwrap()
}

type Client = SendRequest<Full<Bytes>>;

async fn over<S>(stream: S) -> Client
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (client, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    client
}

async fn at_socket(server: &Server) -> Client {
    over(UnixStream::connect(server.socket()).await.unwrap()).await
}

async fn at_port(server: &Server) -> Client {
    over(TcpStream::connect(server.address().unwrap()).await.unwrap()).await
}

/// Makes a TLS handshake with the certificate in the directory, or without one; trusts the CA of `place`.
async fn by_tls(
    server: &Server,
    place: &Place,
    shown: Option<&Path>,
) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let config = match shown {
        Some(directory) => Identity::load(directory)
            .unwrap()
            .https_client_config()
            .unwrap(),
        None => permafrost_identity::https_client_trusting(&place.path("n1/ca.pem")).unwrap(),
    };
    let stream = TcpStream::connect(server.address().unwrap()).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

fn ask(path: &str, token: Option<&str>) -> Request<Full<Bytes>> {
    let mut request = Request::get(path).header("host", "localhost");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    request.body(Full::default()).unwrap()
}

fn send(path: &str, token: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("host", "localhost")
        .header("authorization", format!("Bearer {token}"))
        .body(Full::new(body.into()))
        .unwrap()
}

struct Said {
    status: StatusCode,
    headers: hyper::HeaderMap,
    text: String,
}

impl Said {
    fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    fn problem(&self) -> Problem {
        assert_eq!(self.header("content-type"), "application/problem+json");
        let problem: Problem = serde_json::from_str(&self.text).unwrap();
        assert_eq!(problem.status, self.status.as_u16());
        problem
    }
}

async fn said(client: &mut Client, request: Request<Full<Bytes>>) -> Said {
    client.ready().await.unwrap();
    let response = client.send_request(request).await.unwrap();
    let (status, headers) = (response.status(), response.headers().clone());
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    Said {
        status,
        headers,
        text: String::from_utf8(bytes.to_vec()).unwrap(),
    }
}
