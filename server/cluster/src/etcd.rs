//! Calls to etcd: each has a deadline, and is retried on another member when one does not answer.
//!
//! The client's own balancing sends calls to dead members too, and waits for silent ones; so there is one
//! client a member here, and a preferred member that moves on when it fails.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, Error, KeyValue, Txn, TxnOpResponse};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use permafrost_protocol::control::RegistryMember;
use permafrost_store::{Counter, Timings};
use tokio::time::Instant;

use super::config::ClusterConfig;

/// Time after which a silent member is given up while there is time to call another one: an answer takes
/// milliseconds, an election of etcd about a second.
const ATTEMPT: Duration = Duration::from_millis(1200);

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// A call that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// No member answered in time: the request may have been carried out, or may still be.
    #[error("no member of etcd answered within {waited_ms} ms; the last said: {last}")]
    Unreachable { waited_ms: u128, last: String },
    /// etcd refused the request.
    #[error("etcd refuses: {}", words(.0))]
    Refused(#[source] Error),
    /// No secure connection could be made: the certificates do not match.
    #[error("no secure connection to etcd: {member}: {why}")]
    Untrusted { member: String, why: String },
}

impl Failure {
    /// Returns true if this node's own credentials are at fault: a user, a password, a certificate.
    pub(crate) fn is_ours(&self) -> bool {
        match self {
            Self::Unreachable { .. } => false,
            Self::Untrusted { .. } => true,
            // By number: invalid argument, permission denied, failed precondition, unauthenticated. etcd uses these
            // for a wrong password, no right to the prefix, no users at all, and an invalid token.
            Self::Refused(Error::GRpcStatus(status)) => {
                matches!(i32::from(status.code()), 3 | 7 | 9 | 16)
            }
            Self::Refused(_) => false,
        }
    }
}

impl Failure {
    /// Returns advice for the operator.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "see that most members of etcd run and can be reached",
            Self::Refused(_) => {
                "see etcd's log; a user needs its right password, and read and write on the prefix"
            }
            Self::Untrusted { .. } => {
                "etcd's certificate must be of the given authority and name the address; ours must be of the one that etcd trusts"
            }
        }
    }
}

/// A transaction's outcome.
pub(crate) struct Outcome {
    /// True if the compares held.
    pub(crate) succeeded: bool,
    /// Key-value pairs that each get found.
    pub(crate) found: Vec<Vec<KeyValue>>,
}

/// Calls to etcd, since this node started.
#[derive(Debug, Default)]
pub struct RegistryCounters {
    /// Times of the calls that were answered, attempts on members that did not answer included.
    pub answered: Timings,
    /// Calls that no member answered in time, or that etcd refused.
    pub failed: Counter,
}

struct Member {
    address: String,
    client: tokio::sync::Mutex<Option<Client>>,
}

/// A client of all members of etcd.
pub(crate) struct Etcd {
    members: Vec<Member>,
    preferred: AtomicUsize,
    counters: Arc<RegistryCounters>,
    config: ClusterConfig,
    /// Options as they were last read.
    options: Mutex<ConnectOptions>,
}

impl Etcd {
    pub(crate) fn new(config: &ClusterConfig) -> Result<Self, permafrost_store::StoreError> {
        let members = config.members.iter().map(|address| Member {
            address: address.clone(),
            client: tokio::sync::Mutex::default(),
        });
        Ok(Self {
            members: members.collect(),
            preferred: AtomicUsize::new(0),
            counters: Arc::default(),
            options: Mutex::new(config.connect_options()?),
            config: config.clone(),
        })
    }

    /// Returns the counters of the calls.
    pub(crate) fn counters(&self) -> Arc<RegistryCounters> {
        Arc::clone(&self.counters)
    }

    /// Reads the files again, because certificates and passwords are renewed without a restart. If the files cannot
    /// be used, the last options stay in use.
    fn options(&self) -> ConnectOptions {
        let mut options = self.options.lock();
        match self.config.connect_options() {
            Ok(fresh) => *options = fresh,
            Err(error) => {
                tracing::warn!(event = "registry-options-not-reloaded", %error, "etcd is shown what was read before");
            }
        }
        options.clone()
    }

    /// Calls members until one answers or `limit` has passed. `call` may run more than once, also when an earlier
    /// run was carried out and only its answer lost: it must be repeatable.
    pub(crate) async fn call<T, F>(
        &self,
        limit: Duration,
        call: impl Fn(Client) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let begun = Instant::now();
        let answer = self.call_until(begun, begun + limit, call).await;
        match &answer {
            Ok(_) => self.counters.answered.record(begun.elapsed()),
            Err(_) => self.counters.failed.add(1),
        }
        answer
    }

    async fn call_until<T, F>(
        &self,
        begun: Instant,
        deadline: Instant,
        call: impl Fn(Client) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Error>>,
    {
        // Members whose certificates do not match, or that do not accept ours.
        let mut untrusted = BTreeSet::new();
        loop {
            let index = self.preferred.load(Ordering::Relaxed) % self.members.len().max(1);
            let until = deadline.min(Instant::now() + ATTEMPT);
            let last = match tokio::time::timeout_at(until, self.attempt(index, &call)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) if !is_passing(&error) => return Err(Failure::Refused(error)),
                Ok(Err(error)) => words(&error),
                Err(_) => "nothing".to_owned(),
            };
            self.give_up(index);
            if is_about_certificates(&last) {
                untrusted.insert(index);
                if untrusted.len() == self.members.len() {
                    return Err(Failure::Untrusted {
                        member: self.members[index].address.clone(),
                        why: last,
                    });
                }
            }
            let now = Instant::now();
            if now + PAUSE >= deadline {
                return Err(Failure::Unreachable {
                    waited_ms: begun.elapsed().as_millis(),
                    last: format!("{}: {last}", self.members[index].address),
                });
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Carries out a transaction, which must be repeatable.
    pub(crate) async fn transact(&self, limit: Duration, txn: Txn) -> Result<Outcome, Failure> {
        let answer = self
            .call(limit, |mut client| {
                let txn = txn.clone();
                async move { client.txn(txn).await }
            })
            .await?;
        let found = answer
            .op_responses()
            .into_iter()
            .filter_map(|answer| match answer {
                TxnOpResponse::Get(mut get) => Some(get.take_kvs()),
                _ => None,
            });
        Ok(Outcome {
            succeeded: answer.succeeded(),
            found: found.collect(),
        })
    }

    /// Asks each member for its version, all at once, for [`ATTEMPT`] each.
    pub(crate) async fn probe(&self) -> Vec<RegistryMember> {
        let asked: FuturesUnordered<_> = (0..self.members.len())
            .map(|index| async move { (index, self.probe_member(index).await) })
            .collect();
        let mut answers: Vec<_> = asked.collect().await;
        answers.sort_by_key(|(index, _)| *index);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    async fn probe_member(&self, index: usize) -> RegistryMember {
        let asked = async {
            let mut client = self.client(index).await?;
            let begun = Instant::now();
            let status = client.status().await?;
            Ok::<_, Error>((status.version().to_owned(), begun.elapsed()))
        };
        let address = self.members[index].address.clone();
        match tokio::time::timeout(ATTEMPT, asked).await {
            Ok(Ok((version, round_trip))) => RegistryMember {
                address,
                version,
                round_trip_us: u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX),
                error: String::new(),
            },
            failed => RegistryMember {
                address,
                error: match failed {
                    Ok(Err(error)) => words(&error),
                    _ => format!("no answer within {} ms", ATTEMPT.as_millis()),
                },
                ..RegistryMember::default()
            },
        }
    }

    async fn attempt<T, F>(&self, index: usize, call: impl Fn(Client) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let client = self.client(index).await?;
        call(client).await
    }

    /// Returns a client of the preferred member, for a stream.
    pub(crate) async fn stream_client(&self) -> Result<(usize, Client), Error> {
        let index = self.preferred.load(Ordering::Relaxed) % self.members.len().max(1);
        Ok((index, self.client(index).await?))
    }

    async fn client(&self, index: usize) -> Result<Client, Error> {
        let member = &self.members[index];
        let mut slot = member.client.lock().await;
        if let Some(client) = slot.as_ref() {
            return Ok(client.clone());
        }
        let client = Client::connect([&member.address], Some(self.options())).await?;
        *slot = Some(client.clone());
        Ok(client)
    }

    /// Prefers the next member, and drops the connection: if its packets are lost, it would stay silent for minutes
    /// after the network has recovered.
    pub(crate) fn give_up(&self, index: usize) {
        let member = &self.members[index];
        if let Ok(mut slot) = member.client.try_lock() {
            *slot = None;
        }
        let next = (index + 1) % self.members.len();
        // A second caller finds the preferred member moved already.
        let _ = self
            .preferred
            .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Formats an error with its causes: a transport's own message only states that there was an error.
fn words(error: &Error) -> String {
    let (mut text, mut cause) = match error {
        Error::GRpcStatus(status) => (status.message().to_owned(), status.source()),
        Error::TransportError(error) => (error.to_string(), error.source()),
        Error::IoError(error) => (error.to_string(), error.source()),
        other => (other.to_string(), None),
    };
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}

/// Returns true if a TLS library's message is about certificates, the peer's or ours.
fn is_about_certificates(words: &str) -> bool {
    let words = words.to_lowercase();
    ["certificate", "unknownca", "unknownissuer"]
        .iter()
        .any(|word| words.contains(word))
}

/// Returns true if the same call may succeed on another member, or after a moment.
fn is_passing(error: &Error) -> bool {
    match error {
        Error::TransportError(_) | Error::IoError(_) | Error::EndpointError(_) => true,
        // The stream ended without an answer.
        Error::WatchError(_) => true,
        Error::GRpcStatus(status) => {
            // By number, as tonic is not a dependency: cancelled, unknown, deadline exceeded, aborted, internal,
            // unavailable.
            matches!(i32::from(status.code()), 1 | 2 | 4 | 10 | 13 | 14)
        }
        _ => false,
    }
}
