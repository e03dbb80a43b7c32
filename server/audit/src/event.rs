//! What a request is to the audit log. Every request is named here: one that is new does not compile before it is.

use permafrost_protocol::control::{self, reply, request};
use permafrost_protocol::wire::message;

/// How much of a request is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// It changes something: always.
    Change,
    /// It gives memory images out: once a minute for each client and checkpoint.
    Read,
    /// It asks how things stand: only that it was denied.
    Look,
}

/// A request, as the audit log names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub(super) action: &'static str,
    /// The job, checkpoint, session or node concerned.
    pub(super) on: String,
    pub(super) weight: Weight,
}

impl Event {
    /// An action that changes something.
    #[must_use]
    pub fn change(action: &'static str, on: impl Into<String>) -> Self {
        Self {
            action,
            on: on.into(),
            weight: Weight::Change,
        }
    }

    /// An action that gives memory images out.
    #[must_use]
    pub fn read(action: &'static str, on: impl Into<String>) -> Self {
        Self {
            weight: Weight::Read,
            ..Self::change(action, on)
        }
    }

    /// A question.
    #[must_use]
    pub fn look(action: &'static str, on: impl Into<String>) -> Self {
        Self {
            weight: Weight::Look,
            ..Self::change(action, on)
        }
    }

    /// The same action on something whose name is known only now.
    #[must_use]
    pub fn on(self, on: impl Into<String>) -> Self {
        Self {
            on: on.into(),
            ..self
        }
    }

    /// A request of the control protocol, by a socket or by QUIC.
    #[must_use]
    pub fn of_control(body: &request::Body) -> Self {
        use request::Body;
        match body {
            Body::Open(open) => Self::change("open", &open.job),
            Body::Seal(seal) => Self::change("dump", &seal.session),
            Body::Abort(abort) => Self::change("abort", &abort.session),
            Body::Adopt(adopt) => Self::change("adopt", &adopt.job),
            Body::Import(import) => Self::change("import", &import.job),
            Body::Remove(remove) => Self::change(
                match (remove.all_generations, remove.force) {
                    (false, false) => "remove",
                    (false, true) => "remove-forced",
                    (true, false) => "remove-all",
                    (true, true) => "remove-all-forced",
                },
                &remove.checkpoint,
            ),
            Body::Pin(pin) => {
                Self::change(if pin.pinned { "pin" } else { "unpin" }, &pin.checkpoint)
            }
            Body::SetNode(set) => Self::change(
                match set.state.as_str() {
                    "active" => "node-undrain",
                    "drained" => "node-drain",
                    "removed" if set.force => "node-remove-forced",
                    "removed" => "node-remove",
                    _ => "node-set",
                },
                &set.name,
            ),
            Body::Rebuild(rebuild) if rebuild.dry_run => Self::look("rebuild-dry-run", ""),
            Body::Rebuild(rebuild) => Self::change("rebuild", rebuild.discard.join(", ")),
            Body::Deny(deny) if deny.entries.is_empty() => Self::look("denied", ""),
            Body::Deny(deny) => Self::change(
                if deny.take_back { "undeny" } else { "deny" },
                deny.entries.join(", "),
            ),
            Body::Scrub(scrub) => Self::change("scrub", &scrub.checkpoint),
            Body::Reserve(reserve) => Self::change("reserve", &reserve.node),
            // Whoever has the token has the place: it stays out of the log.
            Body::CancelReservation(cancel) => Self::change("cancel-reservation", &cancel.node),
            Body::Export(export) if export.small_images_only => {
                Self::read("read-images", &export.checkpoint)
            }
            Body::Export(export) => Self {
                weight: Weight::Change,
                ..Self::read("export", &export.checkpoint)
            },
            Body::Stream(stream) => Self {
                weight: Weight::Change,
                ..Self::read("restore", &stream.checkpoint)
            },
            Body::Verify(verify) => Self::read("verify", &verify.checkpoint),
            Body::List(list) => Self::look("list", &list.job),
            Body::Show(show) => Self::look("show", &show.checkpoint),
            Body::Status(_) => Self::look("status", ""),
            Body::Nodes(nodes) => Self::look("nodes", &nodes.name),
            Body::Took(took) => Self::look("took", &took.checkpoint),
        }
    }

    /// A request of an agent, a person or another node, by QUIC.
    #[must_use]
    pub fn of_peer(body: &message::request::Body) -> Self {
        use message::request::Body;
        match body {
            Body::Dump(dump) => Self::of_dump(dump),
            Body::Fetch(fetch) => Self::of_fetch(fetch),
            Body::Publish(publish) => Self::change("publish-copy", &publish.checkpoint),
            Body::Rollback(rollback) => Self::change("drop-copy", &rollback.checkpoint),
            Body::Pull(pull) => Self::change("pull-copy", &pull.checkpoint),
            Body::Inventory(_) => Self::look("inventory", ""),
            Body::Ping(_) => Self::look("ping", ""),
            Body::Verify(_) => Self::look("verify-copies", ""),
            Body::Api(_) => Self::api_of_peer(),
            Body::Control(control) => match &control.body {
                Some(body) => Self::of_control(body),
                None => Self::look("unknown", ""),
            },
        }
    }

    /// A peer's connection to the API; what it asks there is recorded as any caller's.
    #[must_use]
    pub fn api_of_peer() -> Self {
        Self::look("api", "")
    }

    /// A dump that a peer brings.
    #[must_use]
    pub fn of_dump(dump: &message::request::Dump) -> Self {
        match &dump.adopt {
            Some(adopt) => Self::change("adopt", &adopt.job),
            None => Self::change("dump", &dump.job),
        }
    }

    /// A checkpoint, or a part of one, that a peer reads.
    #[must_use]
    pub fn of_fetch(fetch: &message::request::Fetch) -> Self {
        let name = if fetch.listed_as.is_empty() {
            &fetch.checkpoint
        } else {
            &fetch.listed_as
        };
        if fetch.manifest_only {
            Self::look("read-manifest", name)
        } else {
            Self::read("read", name)
        }
    }

    /// The event with the name that a reply gives it; `None` for a reply that ends nothing.
    #[must_use]
    pub fn told_by(self, reply: &reply::Body) -> Option<Self> {
        use reply::Body;
        let checkpoint = match reply {
            // It waits, and asks again.
            Body::Progress(_) => return None,
            Body::Checkpoint(checkpoint) => Some(checkpoint),
            Body::Exported(exported) => exported.checkpoint.as_ref(),
            _ => None,
        };
        Some(match checkpoint {
            Some(checkpoint) => self.on(name_of(checkpoint)),
            None => self,
        })
    }
}

/// `JOB@GENERATION`, or the session of what is parked.
pub fn name_of(checkpoint: &control::Checkpoint) -> String {
    if checkpoint.generation > 0 {
        format!("{}@{}", checkpoint.job, checkpoint.generation)
    } else {
        checkpoint.session.clone()
    }
}
