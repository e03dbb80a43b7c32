//! Access that each request needs: one function from a request to its effect and its job.
//!
//! Both matches name every variant, so that a request without a row does not compile. The control socket derives from
//! this function which names are valid, a node derives which requests its peers may make, and the tests derive the
//! list of requests.

use crate::control::{self, ErrorCode, ReportedError, request as local};
use crate::manifest::{CheckpointRef, CheckpointRefError, JobName, JobNameError};
use crate::versions;
use crate::wire::message::request as wire;

/// Effect of a request, with the job that it concerns. Job names in it are valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// Add a checkpoint to a job, or pin one of its checkpoints.
    Dump(JobName),
    /// Store pages whose job is not known yet: they stay parked until they are adopted.
    Park,
    /// Give a parked session a job.
    Adopt {
        /// The session; empty: the caller's own with the processes of the images.
        session: String,
        /// Name of the job that adopts it.
        job: JobName,
    },
    /// Send the pages of a session: one that the caller has opened, or a copy from another node.
    Pages,
    /// Seal a session of the caller's own.
    Seal {
        /// Id of the session.
        session: String,
    },
    /// Discard a session, or a parked one.
    Discard {
        /// Id of the session.
        session: String,
    },
    /// Read checkpoints of a job.
    Read(JobName),
    /// Read of everything as much as the caller may read: other jobs are left out of the reply.
    ReadVisible,
    /// Read checkpoints by their ids; their manifests name their jobs.
    ReadById {
        /// Id of the checkpoint, 32 hex digits.
        checkpoint: String,
        /// Id of the checkpoint that its pages are compared with; empty for none.
        compared_with: String,
        /// Name of the checkpoint, for a node that does not hold it.
        listed_as: Option<CheckpointRef>,
    },
    /// Remove checkpoints of a job.
    Delete(JobName),
    /// Set what a namespace keeps, and how much it may have. The job stands for its namespace.
    Govern(JobName),
    /// Keep a place in a queue, or give one up.
    Reserve {
        /// Namespace that the reservation is for, if one is named.
        namespace: Option<String>,
    },
    /// Read the state of the nodes, and the list of denied certificates.
    Inspect,
    /// Look after nodes, the registry, denied certificates and damaged copies.
    Operate,
    /// Exchange copies between nodes.
    Replicate,
    /// Report the duration of a dump or a restore on this host.
    Report,
    /// Check that the node is alive.
    Ping,
}

/// Reason why a request is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A text is not a job name.
    #[error("{name:?} is no job name: {source}")]
    Job {
        /// The first characters of the name.
        name: String,
        /// The rule that it breaks.
        source: JobNameError,
    },
    /// A text is not a checkpoint name.
    #[error("{name:?} names no checkpoint: {source}")]
    Checkpoint {
        /// The first characters of the name.
        name: String,
        /// The rule that it breaks.
        source: CheckpointRefError,
    },
    /// A text is not a namespace.
    #[error("{name:?} is no namespace: it has a slash")]
    Namespace {
        /// The first characters of the name.
        name: String,
    },
    /// A job is not in the namespace that is named with it.
    #[error("job {name:?} is not in namespace {namespace:?}")]
    OtherNamespace {
        /// The first characters of the name.
        name: String,
        /// The first characters of the namespace.
        namespace: String,
    },
    /// Two checkpoints that are to be compared are not of one job.
    #[error("{name:?} and {other:?} are not of one job")]
    OtherJob {
        /// The first characters of the one's name.
        name: String,
        /// The first characters of the other's name.
        other: String,
    },
    /// The control request has another version, or no body that is known.
    #[error(transparent)]
    Unknown(#[from] control::UnknownRequest),
}

impl ReportedError for RequestError {
    fn code(&self) -> ErrorCode {
        ErrorCode::Invalid
    }

    fn hint(&self) -> &str {
        match self {
            Self::Job { .. } | Self::Namespace { .. } => {
                "use letters, digits and . _ : / + - (at most 200 bytes, no leading . - /)"
            }
            Self::OtherJob { .. } => "compare two generations of a job: `permafrost ls` lists them",
            Self::OtherNamespace { .. } => "leave the namespace out: the job's name has it",
            Self::Checkpoint { .. } => "name one as JOB or JOB@GENERATION",
            Self::Unknown(unknown) => unknown.hint(),
        }
    }
}

impl Access {
    /// Returns true if a request with this access can be made twice with the effect of one: nothing is opened, removed
    /// or counted. A request that may have arrived is repeated only then.
    #[must_use]
    pub const fn is_repeatable(&self) -> bool {
        matches!(
            self,
            Self::Read(_)
                | Self::ReadVisible
                | Self::ReadById { .. }
                | Self::Inspect
                | Self::Replicate
                | Self::Ping
        )
    }

    /// Returns the access that a control request needs.
    ///
    /// # Errors
    /// A name in it is not valid.
    pub fn of_control(body: &local::Body) -> Result<Self, RequestError> {
        use local::Body;
        Ok(match body {
            Body::Open(open) if open.job.is_empty() => Self::Park,
            Body::Open(open) => Self::Dump(job(&open.job)?),
            Body::Seal(seal) => Self::Seal {
                session: seal.session.clone(),
            },
            Body::TakeSpace(_) | Body::EndPages(_) => Self::Pages,
            Body::Abort(abort) => Self::Discard {
                session: abort.session.clone(),
            },
            Body::Adopt(adopt) => adopted(adopt)?,
            Body::List(list) if list.job.is_empty() => Self::ReadVisible,
            Body::List(list) => Self::Read(job(&list.job)?),
            Body::Show(show) => Self::Read(checkpoint(&show.checkpoint)?.job),
            Body::Describe(contents) => compared(contents)?,
            Body::Remove(remove) if remove.all_generations => {
                Self::Delete(job(&remove.checkpoint)?)
            }
            Body::Remove(remove) => Self::Delete(checkpoint(&remove.checkpoint)?.job),
            Body::SetRetention(set) => {
                let named = set.rule.as_ref().map_or("", |rule| &rule.namespace);
                Self::Govern(any_job_of(named)?)
            }
            Body::ShowRetention(show) if show.namespace.is_empty() => Self::ReadVisible,
            Body::ShowRetention(show) => Self::Read(any_job_of(&show.namespace)?),
            Body::Prune(prune) => pruned(prune)?,
            Body::Pin(pin) => Self::Dump(checkpoint(&pin.checkpoint)?.job),
            Body::Verify(verify) if verify.checkpoint.is_empty() => Self::ReadVisible,
            Body::Verify(verify) => Self::Read(checkpoint(&verify.checkpoint)?.job),
            Body::Export(export) => Self::Read(checkpoint(&export.checkpoint)?.job),
            Body::Import(import) => Self::Dump(job(&import.job)?),
            Body::Stream(stream) => Self::Read(checkpoint(&stream.checkpoint)?.job),
            Body::Lend(lend) => Self::Read(checkpoint(&lend.checkpoint)?.job),
            Body::Thaw(thaw) => Self::Read(checkpoint(&thaw.checkpoint)?.job),
            Body::Place(place) => Self::Read(checkpoint(&place.checkpoint)?.job),
            Body::Scrub(scrub) => {
                if !scrub.checkpoint.is_empty() {
                    checkpoint(&scrub.checkpoint)?;
                }
                Self::Operate
            }
            // Reading the list needs the right to inspect only: agents read it, too, and refuse nodes by it.
            Body::Deny(deny) if deny.entries.is_empty() && !deny.take_back => Self::Inspect,
            Body::Media(media) if media.action == "ls" => Self::Inspect,
            Body::Media(_) | Body::Keys(_) => Self::Operate,
            // A dry run reads every map, so it needs the same right.
            Body::SetNode(_)
            | Body::Rebuild(_)
            | Body::SetLevel(_)
            | Body::Deny(_)
            | Body::Gc(_) => Self::Operate,
            Body::Status(_) | Body::Nodes(_) => Self::Inspect,
            Body::Reserve(reserve) => Self::Reserve {
                namespace: match reserve.namespace.as_str() {
                    "" => None,
                    name => Some(namespace(name)?),
                },
            },
            Body::CancelReservation(_) => Self::Reserve { namespace: None },
            Body::Took(_) => Self::Report,
        })
    }

    /// Returns the access that a request between hosts needs.
    ///
    /// # Errors
    /// A name in it is not valid, or it carries no control request of this version.
    pub fn of_wire(body: &wire::Body) -> Result<Self, RequestError> {
        use wire::Body;
        Ok(match body {
            Body::Dump(dump) => Self::of_dump(dump)?,
            Body::Fetch(fetch) => Self::of_fetch(fetch)?,
            Body::Control(request) => {
                Self::of_control(request.known("the node", versions::own())?)?
            }
            Body::Publish(_)
            | Body::Rollback(_)
            | Body::Inventory(_)
            | Body::Pull(_)
            | Body::Verify(_) => Self::Replicate,
            Body::Ping(_) => Self::Ping,
            // The API checks the requests of this stream, with the same certificate.
            Body::Api(_) => Self::Inspect,
        })
    }

    /// Returns the access that a dump needs.
    ///
    /// # Errors
    /// The errors of [`Self::of_wire`].
    pub fn of_dump(dump: &wire::Dump) -> Result<Self, RequestError> {
        if !dump.job.is_empty() {
            job(&dump.job)?;
        }
        dump.adopt.as_ref().map_or(Ok(Self::Pages), adopted)
    }

    /// Returns the access that a fetch needs.
    ///
    /// # Errors
    /// The errors of [`Self::of_wire`].
    pub fn of_fetch(fetch: &wire::Fetch) -> Result<Self, RequestError> {
        Ok(Self::ReadById {
            checkpoint: fetch.checkpoint.clone(),
            compared_with: fetch.parent.clone(),
            listed_as: match fetch.listed_as.as_str() {
                "" => None,
                name => Some(checkpoint(name)?),
            },
        })
    }
}

/// Returns the access that applying the rules of retention needs: of a job or a namespace that of removing there. Of
/// all namespaces it is what every node does by itself, and left to operators.
fn pruned(prune: &local::Prune) -> Result<Access, RequestError> {
    let concerned = match (prune.job.as_str(), prune.namespace.as_str()) {
        ("", "") => None,
        ("", namespace) => Some(any_job_of(namespace)?),
        (name, "") => Some(job(name)?),
        (name, named) => {
            let job = job(name)?;
            if job.namespace() != namespace(named)? {
                return Err(RequestError::OtherNamespace {
                    name: shortened(name),
                    namespace: shortened(named),
                });
            }
            Some(job)
        }
    };
    Ok(match (concerned, prune.dry_run) {
        (None, true) => Access::ReadVisible,
        (None, false) => Access::Operate,
        (Some(job), true) => Access::Read(job),
        (Some(job), false) => Access::Delete(job),
    })
}

/// Returns the access that a comparison needs: of one job, so that no pages are told from those of another.
fn compared(contents: &local::Describe) -> Result<Access, RequestError> {
    let job = checkpoint(&contents.checkpoint)?.job;
    if !contents.before.is_empty() && checkpoint(&contents.before)?.job != job {
        return Err(RequestError::OtherJob {
            name: shortened(&contents.checkpoint),
            other: shortened(&contents.before),
        });
    }
    Ok(Access::Read(job))
}

fn adopted(adopt: &local::Adopt) -> Result<Access, RequestError> {
    Ok(Access::Adopt {
        session: adopt.session.clone(),
        job: job(&adopt.job)?,
    })
}

fn job(name: &str) -> Result<JobName, RequestError> {
    name.parse().map_err(|source| RequestError::Job {
        name: shortened(name),
        source,
    })
}

/// Checks a namespace: a job name without a slash.
fn namespace(name: &str) -> Result<String, RequestError> {
    let named = job(name)?;
    if name.contains('/') {
        return Err(RequestError::Namespace {
            name: shortened(name),
        });
    }
    Ok(named.into())
}

/// Returns a name that stands for all jobs of a namespace.
fn any_job_of(name: &str) -> Result<JobName, RequestError> {
    let any = format!("{}/any", namespace(name)?);
    // The longest namespace leaves no room for a job.
    job(&any)
}

fn checkpoint(name: &str) -> Result<CheckpointRef, RequestError> {
    name.parse().map_err(|source| RequestError::Checkpoint {
        name: shortened(name),
        source,
    })
}

/// Returns the first 64 characters: bounds the part of a peer's text that messages and the log repeat.
fn shortened(name: &str) -> String {
    name.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_checkpoints_of_one_job_are_compared() {
        let access = |checkpoint: &str, before: &str| {
            compared(&local::Describe {
                checkpoint: checkpoint.to_owned(),
                before: before.to_owned(),
                ..local::Describe::default()
            })
        };
        let job: JobName = "a/job".parse().unwrap();
        assert_eq!(access("a/job@2", "a/job@1"), Ok(Access::Read(job.clone())));
        assert_eq!(access("a/job", ""), Ok(Access::Read(job)));
        for (one, other) in [("a/job@2", "b/job@1"), ("a/job", "a/other")] {
            let refused = access(one, other);
            assert!(matches!(refused, Err(RequestError::OtherJob { .. })));
        }
        assert!(access("a/job@2", "a//b").is_err() && access("", "a/job").is_err());
    }

    #[test]
    fn applying_rules_needs_the_rights_of_removing() {
        let access = |namespace: &str, job: &str, dry_run| {
            pruned(&local::Prune {
                namespace: namespace.to_owned(),
                job: job.to_owned(),
                dry_run,
            })
        };
        let any: JobName = "a/any".parse().unwrap();
        let job: JobName = "a/job".parse().unwrap();
        assert_eq!(access("", "", true), Ok(Access::ReadVisible));
        assert_eq!(access("", "", false), Ok(Access::Operate));
        assert_eq!(access("a", "", true), Ok(Access::Read(any.clone())));
        assert_eq!(access("a", "", false), Ok(Access::Delete(any)));
        assert_eq!(access("a", "a/job", false), Ok(Access::Delete(job.clone())));
        assert_eq!(access("", "a/job", true), Ok(Access::Read(job)));
        let other = access("b", "a/job", false);
        assert!(matches!(other, Err(RequestError::OtherNamespace { .. })));
        assert!(access("a/b", "", true).is_err() && access("", "a//b", true).is_err());
    }
}
