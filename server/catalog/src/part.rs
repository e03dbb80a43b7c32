//! Parts of the list of checkpoints: what a request asks for, and where the next part begins.

use std::cmp::Ordering;

use permafrost_protocol::control::{Checkpoint, Checkpoints, ErrorCode, ReportedError, request};
use permafrost_protocol::manifest::{
    CheckpointRef, CheckpointRefError, JobNameError, check_job_name, namespace_of,
};

/// Largest number of checkpoints in a part: an answer has to fit a message.
const MOST: usize = 10_000;

/// A request for a part of the list that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListPartError {
    /// The job name is invalid.
    #[error("{job:?}: {source}")]
    Job {
        /// Name in the request.
        job: String,
        /// Rule that it breaks.
        source: JobNameError,
    },
    /// The place to begin behind is none.
    #[error("{reference:?}: {source}")]
    After {
        /// Place in the request.
        reference: String,
        /// Rule that it breaks.
        source: CheckpointRefError,
    },
}

impl ReportedError for ListPartError {
    fn code(&self) -> ErrorCode {
        ErrorCode::Invalid
    }

    fn hint(&self) -> &str {
        match self {
            Self::Job { .. } => "`permafrost ls` lists the jobs",
            Self::After { .. } => "give `next` of the part before, or JOB@GENERATION",
        }
    }
}

/// Part of the list of checkpoints, in the order of [`Catalog::list`](super::Catalog::list).
#[derive(Clone, Debug)]
pub struct ListPart {
    job: String,
    namespace: String,
    is_parked_only: bool,
    after: After,
    limit: usize,
}

/// Place in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
enum After {
    Start,
    Sealed { job: String, generation: u64 },
    Parked { session: String },
}

impl ListPart {
    /// Checks a request.
    ///
    /// # Errors
    /// The job name, or the place to begin behind, is invalid.
    pub fn new(list: &request::List) -> Result<Self, ListPartError> {
        if !list.job.is_empty() {
            check_job_name(&list.job).map_err(|source| ListPartError::Job {
                job: list.job.clone(),
                source,
            })?;
        }
        let after = match list.after.as_str() {
            "" => After::Start,
            reference if reference.contains('@') => {
                let parsed = reference.parse::<CheckpointRef>();
                let parsed = parsed.map_err(|source| ListPartError::After {
                    reference: reference.to_owned(),
                    source,
                })?;
                After::Sealed {
                    job: parsed.job.as_str().to_owned(),
                    generation: parsed.generation.unwrap_or(0),
                }
            }
            session => After::Parked {
                session: session.to_owned(),
            },
        };
        let limit = usize::try_from(list.limit).unwrap_or(MOST);
        Ok(Self {
            job: list.job.clone(),
            namespace: list.namespace.clone(),
            is_parked_only: list.parked,
            after,
            limit: if limit == 0 { MOST } else { limit.min(MOST) },
        })
    }

    /// Returns the job that the part is of, if it is of one.
    #[must_use]
    pub fn job(&self) -> Option<&str> {
        (!self.job.is_empty()).then_some(self.job.as_str())
    }

    /// Returns true if the list is asked for from its beginning.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.after == After::Start
    }

    /// Cuts the part out of a list in order.
    #[must_use]
    pub fn of(&self, records: impl IntoIterator<Item = Checkpoint>) -> Checkpoints {
        let mut part = Checkpoints::default();
        for record in records {
            if !self.take(&mut part, record) {
                break;
            }
        }
        part
    }

    /// Adds the next record to the part, if it belongs to it. Returns false if the part is complete.
    pub(crate) fn take(&self, part: &mut Checkpoints, record: Checkpoint) -> bool {
        if !self.has(&record) {
            return true;
        }
        if let Some(last) = part.checkpoints.last()
            && part.checkpoints.len() >= self.limit
        {
            part.next = name_in_list(last);
            return false;
        }
        part.checkpoints.push(record);
        true
    }

    /// Returns the sealed checkpoint behind which the part begins; `None` if it has only parked ones. Checkpoints of
    /// other jobs or namespaces may be behind it.
    pub(crate) fn sealed_after(&self) -> Option<(String, u64)> {
        let first_of = if self.job.is_empty() && has_prefix(&self.namespace) {
            prefix_of(&self.namespace)
        } else {
            self.job.clone()
        };
        match &self.after {
            _ if self.is_parked_only => None,
            After::Parked { .. } => None,
            After::Start => Some((first_of, 0)),
            After::Sealed { job, generation } => {
                Some((first_of, 0).max((job.clone(), *generation)))
            }
        }
    }

    /// Returns true if no sealed checkpoint of the part is behind this one, which does not belong to it.
    pub(crate) fn ends_before(&self, record: &Checkpoint) -> bool {
        if !self.job.is_empty() {
            return record.job != self.job;
        }
        has_prefix(&self.namespace) && !record.job.starts_with(&prefix_of(&self.namespace))
    }

    fn has(&self, record: &Checkpoint) -> bool {
        let is_parked = record.generation == 0;
        let is_behind = match &self.after {
            After::Start => true,
            After::Sealed { job, generation } => {
                is_parked || (&record.job, record.generation) > (job, *generation)
            }
            After::Parked { session } => is_parked && record.session > *session,
        };
        is_behind
            && (self.job.is_empty() || record.job == self.job)
            && (is_parked || !self.is_parked_only)
            && (self.namespace.is_empty()
                || namespace_of(&record.job) == Ok(self.namespace.as_str()))
    }
}

/// Compares checkpoints by their places in the list: sealed ones by job and generation, and behind them parked ones by
/// session.
#[must_use]
pub fn in_list_order(a: &Checkpoint, b: &Checkpoint) -> Ordering {
    let is_parked = |record: &Checkpoint| record.generation == 0;
    match (is_parked(a), is_parked(b)) {
        (false, false) => (&a.job, a.generation).cmp(&(&b.job, b.generation)),
        (true, true) => a.session.cmp(&b.session),
        (a, b) => a.cmp(&b),
    }
}

/// Returns true if the names of all jobs of a namespace begin with it.
fn has_prefix(namespace: &str) -> bool {
    !namespace.is_empty() && namespace_of("x") != Ok(namespace)
}

fn prefix_of(namespace: &str) -> String {
    format!("{namespace}/")
}

fn name_in_list(record: &Checkpoint) -> String {
    match record.generation {
        0 => record.session.clone(),
        generation => format!("{}@{generation}", record.job),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Catalog, SledCatalog};
    use super::*;

    fn record(job: &str, generation: u64) -> Checkpoint {
        Checkpoint {
            job: job.into(),
            generation,
            session: format!("{job}-{generation}"),
            ..Checkpoint::default()
        }
    }

    #[test]
    fn parts_make_the_list_whatever_they_are_of() {
        let dir = tempfile::tempdir().unwrap();
        let (catalog, _) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
        let jobs = ["a", "a/x", "a/y", "a-b/z", "b", "n/x", "n/y"];
        for job in jobs {
            for generation in 1..=5 {
                catalog.put(&record(job, generation)).unwrap();
            }
        }
        for job in ["", "a/x"] {
            let parked = Checkpoint {
                session: format!("parked of {job}"),
                ..record(job, 0)
            };
            catalog.put(&parked).unwrap();
        }
        let all = catalog.list(None).unwrap();
        let ask = |job: &str, namespace: &str, parked| request::List {
            job: job.into(),
            namespace: namespace.into(),
            parked,
            limit: 4,
            after: String::new(),
        };
        for (list, expected) in [
            (ask("", "", false), all.len()),
            (ask("a", "", false), 5),
            (ask("a/x", "", false), 6),
            (ask("", "a", false), 11),
            (ask("", "a-b", false), 5),
            (ask("", "default", false), 10),
            (ask("", "", true), 2),
            (ask("b", "a", false), 0),
        ] {
            let (mut list, mut found) = (list, Vec::new());
            let wanted = ListPart::new(&request::List {
                limit: 0,
                ..list.clone()
            })
            .unwrap();
            loop {
                let part = ListPart::new(&list).unwrap();
                let records = catalog.part(&part).unwrap();
                assert_eq!(records, part.of(all.clone()), "{list:?}");
                assert!(records.checkpoints.len() <= 4);
                found.extend(records.checkpoints);
                if records.next.is_empty() {
                    break;
                }
                list.after = records.next;
            }
            assert_eq!(found.len(), expected, "{list:?}");
            assert_eq!(found, wanted.of(all.clone()).checkpoints);
        }
        let odd = request::List {
            after: "a@@".into(),
            ..request::List::default()
        };
        assert!(ListPart::new(&odd).is_err());
    }
}
