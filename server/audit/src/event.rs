//! Names every request for the audit log. A new request does not compile before it is named here.

use permafrost_protocol::control::{self, reply, request};
use permafrost_protocol::wire::message;

/// Decides how much of a request is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditWeight {
    /// The request changes something: always recorded.
    Change,
    /// The request returns memory images: recorded once a minute for each client and checkpoint.
    Read,
    /// The request only reads state: recorded only if it is denied.
    Look,
}

/// A request, as the audit log names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditedRequest {
    pub(super) action: &'static str,
    /// Job, checkpoint, session or node concerned.
    pub(super) on: String,
    pub(super) weight: AuditWeight,
}

impl AuditedRequest {
    /// Returns the event of an action that changes something.
    #[must_use]
    pub fn change(action: &'static str, on: impl Into<String>) -> Self {
        Self {
            action,
            on: on.into(),
            weight: AuditWeight::Change,
        }
    }

    /// Returns the event of an action that returns memory images.
    #[must_use]
    pub fn read(action: &'static str, on: impl Into<String>) -> Self {
        Self {
            weight: AuditWeight::Read,
            ..Self::change(action, on)
        }
    }

    /// Returns the event of a request that only reads state.
    #[must_use]
    pub fn look(action: &'static str, on: impl Into<String>) -> Self {
        Self {
            weight: AuditWeight::Look,
            ..Self::change(action, on)
        }
    }

    /// Returns the event with the name of its object, which is known only later.
    #[must_use]
    pub fn on(self, on: impl Into<String>) -> Self {
        Self {
            on: on.into(),
            ..self
        }
    }

    /// Returns the event of a removal by a rule of retention, under the rule's name.
    #[must_use]
    pub fn removed_by(rule: &str, checkpoint: &control::Checkpoint) -> Self {
        let action = match rule {
            "job-quota" => "remove-job-quota",
            "namespace-quota" => "remove-namespace-quota",
            _ => "remove-expired",
        };
        Self::change(action, name_of(checkpoint))
    }

    /// Returns the event of a request of the control protocol, over a socket or QUIC.
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
            Body::SetLevel(set) => Self::change("node-level", set.registry.to_string()),
            Body::Rebuild(rebuild) if rebuild.dry_run => Self::look("rebuild-dry-run", ""),
            Body::Rebuild(rebuild) => Self::change("rebuild", rebuild.discard.join(", ")),
            Body::Deny(deny) if deny.entries.is_empty() => Self::look("denied", ""),
            Body::Deny(deny) => Self::change(
                if deny.take_back { "undeny" } else { "deny" },
                deny.entries.join(", "),
            ),
            Body::Scrub(scrub) => Self::change("scrub", &scrub.checkpoint),
            Body::SetRetention(set) => {
                let rule = set.rule.as_ref();
                let on = rule.map_or_else(String::new, |rule| match rule.jobs.as_str() {
                    "" => format!("{}/", rule.namespace),
                    jobs => format!("{}/{jobs}", rule.namespace),
                });
                let action = match set.remove {
                    true => "remove-retention",
                    false => "set-retention",
                };
                Self::change(action, on)
            }
            Body::ShowRetention(show) => Self::look("show-retention", &show.namespace),
            Body::Prune(prune) => {
                let on = match prune.job.as_str() {
                    "" if prune.namespace.is_empty() => String::new(),
                    "" => format!("{}/", prune.namespace),
                    job => job.to_owned(),
                };
                match prune.dry_run {
                    true => Self::look("prune-dry-run", on),
                    false => Self::change("prune", on),
                }
            }
            Body::Gc(gc) if gc.dry_run => Self::look("gc-dry-run", ""),
            Body::Gc(_) => Self::change("gc", ""),
            Body::Keys(keys) => match keys.action.as_str() {
                "ls" => Self::look("keys-ls", ""),
                "rotate" => Self::change("keys-rotate", format!("{}/", keys.namespace)),
                _ => Self::change("keys-destroy", format!("{}/", keys.namespace)),
            },
            Body::Media(media) => match media.action.as_str() {
                "ls" => Self::look("region-ls", ""),
                "add" => Self::change("region-add", &media.medium),
                "grow" => Self::change("region-grow", &media.medium),
                "drain" => Self::change("region-drain", &media.medium),
                "undrain" => Self::change("region-undrain", &media.medium),
                "remove" => Self::change("region-remove", &media.medium),
                "give-up" => Self::change("region-give-up", &media.medium),
                "cool" if media.dry_run => Self::look("region-cool-dry-run", &media.checkpoint),
                "cool" => Self::change("region-cool", &media.checkpoint),
                "warm" if media.dry_run => Self::look("region-warm-dry-run", &media.checkpoint),
                "warm" => Self::change("region-warm", &media.checkpoint),
                _ => Self::change("region-unknown", &media.medium),
            },
            Body::Reserve(reserve) => Self::change("reserve", &reserve.node),
            // With the token anyone can take the reservation: it stays out of the log.
            Body::CancelReservation(cancel) => Self::change("cancel-reservation", &cancel.node),
            Body::Export(export) if export.small_images_only => {
                Self::read("read-images", &export.checkpoint)
            }
            Body::Export(export) => Self {
                weight: AuditWeight::Change,
                ..Self::read("export", &export.checkpoint)
            },
            Body::Stream(stream) => Self {
                weight: AuditWeight::Change,
                ..Self::read("restore", &stream.checkpoint)
            },
            Body::Lend(lend) => Self {
                weight: AuditWeight::Change,
                ..Self::read("lend", &lend.checkpoint)
            },
            Body::Thaw(thaw) => Self {
                weight: AuditWeight::Change,
                ..Self::read("restore-lazy", &thaw.checkpoint)
            },
            Body::Place(place) => Self {
                weight: AuditWeight::Change,
                ..Self::read("restore", &place.checkpoint)
            },
            // One line tells of all of a dump's pages, as for those that come in the page-server protocol.
            Body::TakeSpace(take) => Self::look("take-space", &take.session),
            Body::EndPages(end) => Self::look("end-pages", &end.session),
            Body::Verify(verify) => Self::read("verify", &verify.checkpoint),
            Body::List(list) => Self::look("list", &list.job),
            Body::Show(show) => Self::look("show", &show.checkpoint),
            Body::Describe(contents) => Self::read("read-contents", &contents.checkpoint),
            Body::Status(_) => Self::look("status", ""),
            Body::Nodes(nodes) => Self::look("nodes", &nodes.name),
            Body::Took(took) => Self::look("took", &took.checkpoint),
        }
    }

    /// Returns the event of a request of an agent, a person or another node, over QUIC.
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

    /// Returns the event of a peer's connection to the API; the requests on it are recorded as any caller's.
    #[must_use]
    pub fn api_of_peer() -> Self {
        Self::look("api", "")
    }

    /// Returns the event of a dump that a peer sends.
    #[must_use]
    pub fn of_dump(dump: &message::request::Dump) -> Self {
        match &dump.adopt {
            Some(adopt) => Self::change("adopt", &adopt.job),
            None => Self::change("dump", &dump.job),
        }
    }

    /// Returns the event of a peer's read of a checkpoint, or of a part of one.
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

    /// Returns the event with the name that a reply gives it; `None` for a reply that ends nothing.
    #[must_use]
    pub fn told_by(self, reply: &reply::Body) -> Option<Self> {
        use reply::Body;
        let checkpoint = match reply {
            // The request waits, and will come again.
            Body::Progress(_) => return None,
            Body::Checkpoint(checkpoint) => Some(checkpoint),
            Body::Exported(exported) => exported.checkpoint.as_ref(),
            Body::LazyServed(served) => served.checkpoint.as_ref(),
            _ => None,
        };
        Some(match checkpoint {
            Some(checkpoint) => self.on(name_of(checkpoint)),
            None => self,
        })
    }
}

/// Formats a checkpoint's name: `JOB@GENERATION`, or the session of a parked one.
pub fn name_of(checkpoint: &control::Checkpoint) -> String {
    if checkpoint.generation > 0 {
        format!("{}@{}", checkpoint.job, checkpoint.generation)
    } else {
        checkpoint.session.clone()
    }
}
