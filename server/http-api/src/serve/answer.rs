//! One request, from its head to the router and back: authentication, rate limit, and size of the body.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HeaderName, HeaderValue};
use hyper::service::Service as _;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use permafrost_audit::{Audit, AuditedRequest, Who};
use permafrost_protocol::control::{ErrorCode, ReportedError};
use tokio::sync::{Notify, Semaphore, SemaphorePermit, watch};

use super::Limits;
use super::buckets::Buckets;
use super::door::Place;
use super::page;
use super::refusal::Refusal;
use super::tokens::Tokens;
use crate::caller::{Caller, Scope};
use crate::problem::Audited;
use crate::shares::Shares;

/// Header with the request's id, which stands in the log and in the answer, so that one is found by the other.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest id that is accepted from a caller, bytes.
const MAX_ID_BYTES: usize = 128;

/// Unit in which bodies are counted: a semaphore counts to 2^32.
const BODY_UNIT_BYTES: usize = 1 << 10;

/// Size up to which a body takes no shared room, bytes: those of all connections together are 32 MiB.
const SMALL_BODY_BYTES: usize = 64 << 10;

/// Maximum that is read of a refused body, in bodies of the largest allowed size. A sender that is still
/// sending when the connection ends loses the answer (RFC 9112, section 9.6).
const DRAINED: usize = 4;

/// Maximum that is read of the body of an unauthenticated caller, bytes.
const DRAINED_OF_STRANGERS: usize = 256 << 10;

/// State that all connections share.
pub(super) struct Shared {
    pub(super) router: TowerToHyperService<Router>,
    pub(super) limits: Limits,
    pub(super) tokens: Option<Tokens>,
    pub(super) buckets: Buckets,
    /// Connections of authenticated callers to the port.
    pub(super) seats: Arc<Shares>,
    /// Room for bodies, in units.
    pub(super) bodies: Semaphore,
    /// Turns true when the server is to stop.
    pub(super) stop: watch::Receiver<bool>,
    /// Prefix of the ids of requests, which distinguishes two runs.
    pub(super) run: String,
    pub(super) requests: AtomicU64,
    /// Number of requests for files of the page, by anybody.
    pub(super) page_requests: Arc<AtomicU64>,
    pub(super) audit: Option<Arc<Audit>>,
}

/// Identity of the other end of a connection, before a request says more.
#[derive(Clone, Debug)]
pub(super) enum Known {
    /// Caller identified by the socket's credentials.
    Local(Arc<Caller>),
    /// Caller from another machine, perhaps with a certificate.
    Remote(Option<Arc<Caller>>),
}

/// One connection and its identity.
pub(super) struct Conversation {
    pub(super) shared: Arc<Shared>,
    pub(super) known: Known,
    /// Notified when an authenticated caller has made a request.
    pub(super) introduced: Notify,
    /// Its place among the connections.
    pub(super) place: Mutex<Place>,
}

impl Conversation {
    pub(super) async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Infallible> {
        let begun = Instant::now();
        let id = self.id(&request);
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        if permafrost_ui::has(&path) {
            self.shared.page_requests.fetch_add(1, Ordering::Relaxed);
            let mut response = page::answer(&request);
            let status = response.status().as_u16();
            tracing::debug!(request = id.to_str().unwrap_or_default(), %method, path, status, "page");
            response.headers_mut().insert(REQUEST_ID, id);
            return Ok(response);
        }
        let name;
        let admitted = self
            .admit(&request)
            .and_then(|caller| match self.seat(&caller) {
                Ok(()) => Ok(caller),
                Err(refusal) => Err((Some(caller), refusal)),
            });
        let mut response = match admitted {
            Ok(caller) => {
                name = Some(caller.name.clone());
                self.introduced.notify_one();
                self.pass(request, caller).await
            }
            Err((caller, refusal)) => {
                name = caller.map(|caller| caller.name.clone());
                if !request.headers().contains_key(EXPECT) {
                    self.drain(request.into_body(), DRAINED_OF_STRANGERS).await;
                }
                refusal.response()
            }
        };
        tracing::debug!(
            request = id.to_str().unwrap_or_default(),
            %method,
            path = logged(&path),
            status = response.status().as_u16(),
            us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
            caller = name.as_deref().unwrap_or("nobody"),
            "request"
        );
        self.record(&method, &path, name.as_deref(), &response);
        response.headers_mut().insert(REQUEST_ID, id);
        Ok(self.ending(response))
    }

    /// Records requests that changed something or read what is in checkpoints, and denied ones. A request whose scope allows changes is marked
    /// where the scope is checked.
    fn record(&self, method: &Method, path: &str, caller: Option<&str>, response: &Response<Body>) {
        let Some(audit) = &self.shared.audit else {
            return;
        };
        let status = response.status();
        let denied = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
        // The rest of the path may contain a token.
        let place: String = path.split_inclusive('/').take(3).collect();
        let place = place.trim_end_matches('/');
        let scope = response.extensions().get::<Scope>();
        let told = response.extensions().get::<Audited>();
        let event = match (told, scope) {
            (Some(Audited(event)), _) => event.clone(),
            (None, Some(Scope::Reserve)) if *method == Method::DELETE => {
                AuditedRequest::change("cancel-reservation", place)
            }
            (None, Some(Scope::Reserve)) => AuditedRequest::change("reserve", place),
            (None, Some(Scope::Operate)) => AuditedRequest::change("operate", place),
            (None, Some(Scope::Read) | None) if denied => AuditedRequest::look("ask", place),
            (None, Some(Scope::Read) | None) => return,
        };
        let refused = (!status.is_success()).then(|| RefusedStatus(status).to_reply());
        let who = Who::api(caller.unwrap_or("nobody"));
        audit.record(&who, &event, refused.as_ref().map_or(Ok(()), Err));
    }

    /// Returns the caller's request id if it fits the log, or a new one.
    fn id<B>(&self, request: &Request<B>) -> HeaderValue {
        let given = request.headers().get(REQUEST_ID);
        let plain = |id: &&HeaderValue| {
            (1..=MAX_ID_BYTES).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
        };
        given.filter(plain).cloned().unwrap_or_else(|| {
            let number = self.shared.requests.fetch_add(1, Ordering::Relaxed);
            HeaderValue::try_from(format!("{}-{number}", self.shared.run))
                .unwrap_or(HeaderValue::from_static("-"))
        })
    }

    /// Returns the caller of a request, if it may make one now.
    fn admit<B>(
        &self,
        request: &Request<B>,
    ) -> Result<Arc<Caller>, (Option<Arc<Caller>>, Refusal)> {
        let certified = match &self.known {
            // Callers at the socket may do everything, and are not rate-limited.
            Known::Local(caller) => return Ok(Arc::clone(caller)),
            Known::Remote(certified) => certified,
        };
        let caller = match (request.headers().get(AUTHORIZATION), certified) {
            // The credentials of the request take precedence over those of the connection.
            (Some(shown), _) => self.token(shown).ok_or((None, Refusal::BadToken))?,
            (None, Some(caller)) => Arc::clone(caller),
            (None, None) => return Err((None, Refusal::Nameless)),
        };
        match self.shared.buckets.take(&caller.name, Instant::now()) {
            Ok(()) => Ok(caller),
            Err(again_in) => {
                self.introduced.notify_one();
                Err((Some(caller), Refusal::TooOften { again_in }))
            }
        }
    }

    /// Gives the connection a place among those of authenticated callers.
    fn seat(&self, caller: &Caller) -> Result<(), Refusal> {
        let limit = self.shared.limits.connections;
        let mut place = self.place.lock();
        match &*place {
            Place::Local(_) | Place::Known(_) => Ok(()),
            Place::Crowded(_) => Err(Refusal::Crowded { limit }),
            Place::Stranger(_) => match self.shared.seats.take(&caller.name) {
                Some(seat) => {
                    *place = Place::Known(seat);
                    Ok(())
                }
                None => Err(Refusal::Crowded { limit }),
            },
        }
    }

    /// Returns the caller whose token is in the header (RFC 6750, section 2.1; the scheme's case does not matter,
    /// RFC 9110, 11.1).
    fn token(&self, shown: &HeaderValue) -> Option<Arc<Caller>> {
        let (scheme, token) = shown.to_str().ok()?.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        self.shared.tokens.as_ref()?.caller(token.trim())
    }

    /// Reads the body, and passes the request to the router.
    async fn pass(&self, request: Request<Incoming>, caller: Arc<Caller>) -> Response<Body> {
        let limits = &self.shared.limits;
        let (mut head, body) = request.into_parts();
        let declared = head.headers.get(CONTENT_LENGTH);
        let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        let too_large = Refusal::TooLarge {
            limit_bytes: limits.body_bytes,
        };
        if declared.is_some_and(|length| length > as_u64(limits.body_bytes)) {
            // A client that waits for `100 Continue` is not sending.
            if !head.headers.contains_key(EXPECT) {
                let most_bytes = limits.body_bytes.saturating_mul(DRAINED);
                self.drain(body, most_bytes).await;
            }
            return too_large.response();
        }
        let _room = match self.room(&body).await {
            Ok(room) => room,
            Err(refusal) => return refusal.response(),
        };
        let body = match tokio::time::timeout(limits.body, self.collect(body)).await {
            Ok(Ok(body)) => body,
            Ok(Err(refusal)) => return refusal.response(),
            Err(_) => return Refusal::SlowBody { limit: limits.body }.response(),
        };
        head.extensions.insert(caller.as_ref().clone());
        let request = Request::from_parts(head, Body::from(body));
        let answered = self.shared.router.call(request);
        match tokio::time::timeout(limits.request, answered).await {
            Ok(Ok(response)) => response,
            Ok(Err(never)) => match never {},
            Err(_) => {
                let limit = limits.request;
                Refusal::SlowAnswer { limit }.response()
            }
        }
    }

    /// Reserves room for a body. Waits while other bodies take all of it; small ones need not wait for large ones.
    async fn room(&self, body: &Incoming) -> Result<Option<SemaphorePermit<'_>>, Refusal> {
        let limits = &self.shared.limits;
        let upper = body.size_hint().upper();
        let most = upper.map_or(limits.body_bytes, |upper| {
            usize::try_from(upper).unwrap_or(limits.body_bytes)
        });
        if most <= SMALL_BODY_BYTES {
            return Ok(None);
        }
        let units = most.min(limits.body_bytes).div_ceil(BODY_UNIT_BYTES);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let waiting = self.shared.bodies.acquire_many(units);
        match tokio::time::timeout(limits.body, waiting).await {
            // The semaphore is never closed.
            Ok(room) => Ok(room.ok()),
            Err(_) => Err(Refusal::NoRoom),
        }
    }

    /// Reads a whole body.
    async fn collect(&self, mut body: Incoming) -> Result<Bytes, Refusal> {
        let limit_bytes = self.shared.limits.body_bytes;
        match Limited::new(&mut body, limit_bytes).collect().await {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => {
                let most_bytes = limit_bytes.saturating_mul(DRAINED);
                self.drain(body, most_bytes).await;
                Err(Refusal::TooLarge { limit_bytes })
            }
            Err(_) => Err(Refusal::BrokenBody),
        }
    }

    /// Reads and discards up to `most_bytes`, so that the sender reads its answer.
    async fn drain(&self, mut body: Incoming, most_bytes: usize) {
        let mut left = most_bytes;
        let reading = async {
            while let Some(Ok(frame)) = body.frame().await {
                let length = frame.data_ref().map_or(0, Bytes::len);
                let Some(less) = left.checked_sub(length) else {
                    return;
                };
                left = less;
            }
        };
        // In time or not, the answer is the same.
        let _ = tokio::time::timeout(self.shared.limits.drain, reading).await;
    }

    /// Ends a stream of events when the server stops; its reader can read from another node.
    fn ending(&self, response: Response<Body>) -> Response<Body> {
        let streams = response
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        if !streams {
            return response;
        }
        let mut stop = self.shared.stop.clone();
        response.map(|body| {
            Body::new(UntilStopped {
                body,
                stop: Some(Box::pin(async move {
                    // A dropped server counts as a stop, too.
                    let _ = stop.wait_for(|stop| *stop).await;
                })),
            })
        })
    }
}

/// Returns the permits for all bodies at once.
pub(super) fn body_units(limits: &Limits) -> usize {
    let units = limits.bodies_bytes.max(limits.body_bytes) / BODY_UNIT_BYTES;
    units.clamp(1, Semaphore::MAX_PERMITS)
}

/// Returns the path of a request for the log, without a reservation's token: with the token anyone can take the
/// reservation.
fn logged(path: &str) -> &str {
    const RESERVATIONS: &str = "/v1/reserve/";
    match path.starts_with(RESERVATIONS) {
        true => RESERVATIONS,
        false => path,
    }
}

fn as_u64(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

/// A body that ends when the server stops.
struct UntilStopped {
    body: Body,
    /// Future that resolves when the server stops; `None` once it has.
    stop: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl HttpBody for UntilStopped {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(stop) = &mut self.stop else {
            return Poll::Ready(None);
        };
        if stop.as_mut().poll(context).is_ready() {
            self.stop = None;
            return Poll::Ready(None);
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// A response that refuses a request, as the audit log names it.
///
/// Cure: see the problem's `detail`.
#[derive(Debug, thiserror::Error)]
#[error("HTTP {}", .0.as_u16())]
struct RefusedStatus(StatusCode);

impl ReportedError for RefusedStatus {
    fn code(&self) -> ErrorCode {
        match self.0 {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorCode::Denied,
            StatusCode::NOT_FOUND => ErrorCode::NotFound,
            StatusCode::CONFLICT => ErrorCode::Conflict,
            status if status.is_client_error() => ErrorCode::Invalid,
            StatusCode::SERVICE_UNAVAILABLE => ErrorCode::Unavailable,
            _ => ErrorCode::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::logged;

    #[test]
    fn tokens_of_reservations_stay_out_of_the_log() {
        assert_eq!(logged("/v1/reserve/5f0ca1"), "/v1/reserve/");
        assert_eq!(logged("/v1/reserve/5f0ca1/more"), "/v1/reserve/");
        for path in ["/v1/reserve", "/v1/jobs/team-a", "/metrics"] {
            assert_eq!(logged(path), path);
        }
    }
}
