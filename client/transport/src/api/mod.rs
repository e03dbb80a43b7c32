//! A client of a node's HTTP API, for programs without a runtime of their own.
//!
//! Uses one connection, made when it is needed and kept. A reply keeps the body it came in, as texts of batches
//! are borrowed from it.

mod error;
mod target;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, DATE, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request, Response, StatusCode, body::Incoming};
use parking_lot::Mutex;
use permafrost_api_types::problem::Problem;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

pub use error::ApiError;
use target::Target;

/// Name of the API's socket, which lies beside the control socket.
pub const SOCKET: &str = "api.sock";

/// Environment variable that names the API.
pub const URL_VARIABLE: &str = "PERMAFROST_API";

/// Environment variable with a token for the API.
pub const TOKEN_VARIABLE: &str = "PERMAFROST_API_TOKEN";

/// Time limit for a connection with its handshake.
const CONNECT: Duration = Duration::from_secs(10);

/// Time limit for a reply; a node gives up sooner.
const ANSWER: Duration = Duration::from_secs(60);

/// Largest reply, bytes: 200,000 costs with all their parts and reasons are a third of it.
const MOST_BYTES: usize = 512 << 20;

/// Number of characters shown of a reply that does not come from Permafrost's API.
const EXCERPT: usize = 200;

/// Address of the API, and the credentials to use.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Path of the API's socket, if no URL is given.
    pub socket: PathBuf,
    /// URL of the API: `http://HOST:PORT` or `https://HOST:PORT`.
    pub url: Option<String>,
    /// Token for the Authorization header.
    pub token: Option<String>,
    /// File with the CAs that may have issued the node's certificate.
    pub ca: Option<PathBuf>,
    /// Directory with the certificate to show and its CA.
    pub identity: Option<PathBuf>,
    /// Name of the node in its certificate, if that does not contain the URL's host.
    pub node: Option<String>,
}

impl ApiOptions {
    /// Returns the options for the socket beside the control socket `control`, as the current user.
    pub fn beside(control: &Path) -> Self {
        Self {
            socket: control.with_file_name(SOCKET),
            url: None,
            token: None,
            ca: None,
            identity: None,
            node: None,
        }
    }
}

/// A client of the API. Calls block.
pub struct ApiClient {
    target: Target,
    token: Option<HeaderValue>,
    runtime: Runtime,
    kept: Mutex<Option<SendRequest<Full<Bytes>>>>,
}

impl ApiClient {
    /// Reads the certificates; connects with the first call.
    ///
    /// # Errors
    /// The URL is invalid, certificates cannot be used, or the token would go over a network in clear text.
    pub fn new(options: &ApiOptions) -> Result<Self, ApiError> {
        let target = Target::of(options)?;
        let token = match &options.token {
            None => None,
            Some(token) => {
                let mut header = HeaderValue::try_from(format!("Bearer {}", token.trim()))
                    .map_err(|_| ApiError::BadToken)?;
                header.set_sensitive(true);
                Some(header)
            }
        };
        // A thread of its own, so that a kept connection's end is seen when it happens.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(ApiError::Runtime)?;
        Ok(Self {
            target,
            token,
            runtime,
            kept: Mutex::default(),
        })
    }

    /// Sends `GET path`. `query` is encoded here.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn get(&self, path: &str, query: &[(&str, &str)]) -> Result<ApiReply, ApiError> {
        self.call(&Method::GET, &with_query(path, query), None)
    }

    /// Sends `POST path` with a JSON body.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn post<T: Serialize>(&self, path: &str, body: &T) -> Result<ApiReply, ApiError> {
        self.call(&Method::POST, path, Some(json(body)?))
    }

    /// Sends `PUT path` with a JSON body.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn put<T: Serialize>(&self, path: &str, body: &T) -> Result<ApiReply, ApiError> {
        self.call(&Method::PUT, path, Some(json(body)?))
    }

    /// Sends `DELETE path`.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn delete(&self, path: &str) -> Result<ApiReply, ApiError> {
        self.call(&Method::DELETE, path, None)
    }

    fn call(&self, method: &Method, path: &str, body: Option<Bytes>) -> Result<ApiReply, ApiError> {
        self.runtime.block_on(async {
            let asking = tokio::time::timeout(ANSWER, self.ask(method, path, body));
            asking.await.map_err(|_| ApiError::Late {
                place: self.target.to_string(),
                limit: ANSWER,
            })?
        })
    }

    async fn ask(
        &self,
        method: &Method,
        path: &str,
        body: Option<Bytes>,
    ) -> Result<ApiReply, ApiError> {
        let broken = |error| self.target.broken(error);
        let mut request = self.request(method, path, body.clone())?;
        let kept = self.kept().take();
        if let Some(mut kept) = kept
            && kept.ready().await.is_ok()
        {
            match kept.try_send_request(request).await {
                Ok(response) => {
                    let answer = self.read(response).await?;
                    *self.kept() = Some(kept);
                    return answered(answer);
                }
                // The connection ended meanwhile: a request that was not sent, or may be repeated (RFC 9110,
                // section 9.2.2), goes over another one.
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None if method.is_idempotent() => request = self.request(method, path, body)?,
                    None => return Err(broken(error.into_error())),
                },
            }
        }
        let connecting = tokio::time::timeout(CONNECT, self.target.connect());
        let mut fresh = connecting.await.map_err(|_| ApiError::Late {
            place: self.target.to_string(),
            limit: CONNECT,
        })??;
        let response = fresh.send_request(request).await.map_err(broken)?;
        let answer = self.read(response).await?;
        *self.kept() = Some(fresh);
        answered(answer)
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        body: Option<Bytes>,
    ) -> Result<Request<Full<Bytes>>, ApiError> {
        let mut request = Request::builder()
            .method(method)
            .uri(self.target.path(path))
            .header(HOST, self.target.host())
            .header(ACCEPT, "application/json, application/problem+json")
            .header(
                USER_AGENT,
                concat!("permafrost/", env!("CARGO_PKG_VERSION")),
            );
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        request
            .body(Full::new(body.unwrap_or_default()))
            .map_err(|_| ApiError::Path {
                path: path.to_owned(),
            })
    }

    async fn read(&self, response: Response<Incoming>) -> Result<Answer, ApiError> {
        let status = response.status();
        let date = response.headers().get(DATE);
        let date = date.and_then(|date| Some(date.to_str().ok()?.to_owned()));
        let body = Limited::new(response.into_body(), MOST_BYTES).collect();
        let body = body.await.map_err(|source| ApiError::Body {
            place: self.target.to_string(),
            source,
        })?;
        Ok(Answer {
            status,
            reply: ApiReply {
                body: body.to_bytes(),
                date,
            },
        })
    }

    fn kept(&self) -> parking_lot::MutexGuard<'_, Option<SendRequest<Full<Bytes>>>> {
        // A connection or none: nothing that could be half done.
        self.kept.lock()
    }
}

fn json<T: Serialize>(body: &T) -> Result<Bytes, ApiError> {
    let body = serde_json::to_vec(body).map_err(ApiError::Json)?;
    Ok(Bytes::from(body))
}

/// A reply, whatever its status.
struct Answer {
    status: StatusCode,
    reply: ApiReply,
}

fn answered(Answer { status, reply }: Answer) -> Result<ApiReply, ApiError> {
    if status.is_success() {
        return Ok(reply);
    }
    let body = reply.body;
    if let Ok(problem) = serde_json::from_slice::<Problem>(&body) {
        return Err(ApiError::Refused(Box::new(problem)));
    }
    let text = String::from_utf8_lossy(&body);
    Err(ApiError::Foreign {
        status: status.as_u16(),
        excerpt: text.chars().take(EXCERPT).collect::<String>(),
    })
}

/// Returns the path with its query, percent-encoded.
fn with_query(path: &str, query: &[(&str, &str)]) -> String {
    let mut text = path.to_owned();
    for (index, (name, value)) in query.iter().enumerate() {
        text.push(if index == 0 { '?' } else { '&' });
        text.push_str(name);
        text.push('=');
        text.push_str(&encoded(value));
    }
    text
}

/// Encodes all but unreserved characters as `%XX` (RFC 3986, section 2): for a part of a path or a query.
pub fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Reply of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiReply {
    body: Bytes,
    date: Option<String>,
}

impl ApiReply {
    /// Returns the JSON text as received.
    pub fn bytes(&self) -> &[u8] {
        &self.body
    }

    /// Returns the time at which the node replied, as HTTP writes it; `None` if it does not say.
    pub fn date(&self) -> Option<&str> {
        self.date.as_deref()
    }

    /// Parses the reply; strings may be borrowed from it.
    ///
    /// # Errors
    /// The reply does not fit the type: another version.
    pub fn read<'a, T: Deserialize<'a>>(&'a self) -> Result<T, ApiError> {
        serde_json::from_slice(&self.body).map_err(ApiError::Unexpected)
    }

    /// Parses the reply into a value that borrows nothing.
    ///
    /// # Errors
    /// The reply does not fit the type: another version.
    pub fn into<T: DeserializeOwned>(self) -> Result<T, ApiError> {
        self.read()
    }
}
