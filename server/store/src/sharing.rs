//! Pages that jobs of one namespace share, where the operator has asked for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_pmem::{CheckpointId, FindEqual, MapRoot, StoredCheckpoint};
use permafrost_protocol::control;
use permafrost_protocol::manifest::{SpaceType, namespace_of};

use super::dump::map_root;
use super::{Store, manifest_of};

/// Time for which a job's first dump waits until the index has the other jobs' pages. What is left is done the next
/// time.
const INDEXING_TIME: Duration = Duration::from_secs(1);

impl Store {
    /// Notes a checkpoint as its job's newest, for the index of shared pages.
    pub(super) fn note_shared(&self, record: &control::Checkpoint) {
        if let Some(namespace) = self.sharing_namespace(&record.job)
            && let Ok(id) = record.id.parse()
        {
            self.sharing.note(namespace, &record.job, id);
        }
    }

    /// Brings the index of shared pages up to date for a dump of the job that has no parent: one that has finds most of
    /// its pages there. Reads the other jobs' maps, for a second at most.
    pub(super) fn refresh_shared(&self, job: &str) {
        let Some(namespace) = self.sharing_namespace(job) else {
            return;
        };
        // Once: from then on each seal notes its checkpoint.
        self.sharing_known
            .get_or_init(|| match self.catalog.list(None) {
                Ok(records) => records.iter().for_each(|record| self.note_shared(record)),
                Err(error) => tracing::warn!(event = "sharing-not-resumed", %error, "pages of earlier checkpoints are not shared"),
            });
        let deadline = Instant::now() + INDEXING_TIME;
        let open = |id| self.processes_of(id);
        self.sharing
            .refresh(&self.region, namespace, &open, deadline);
    }

    /// Returns a finder of pages for a dump of the job, if its namespace shares pages.
    pub(super) fn page_finder(&self, job: &str) -> Option<Box<dyn FindEqual>> {
        let namespace = self.sharing_namespace(job)?;
        Some(Box::new(self.sharing.finder(&self.region, namespace)))
    }

    fn sharing_namespace<'a>(&self, job: &'a str) -> Option<&'a str> {
        if self.sharing.is_off() {
            return None;
        }
        let namespace = namespace_of(job).ok()?;
        self.sharing.covers(namespace).then_some(namespace)
    }

    fn processes_of(&self, id: CheckpointId) -> Option<(Arc<StoredCheckpoint>, Vec<MapRoot>)> {
        let checkpoint = self.region.checkpoint(id)?;
        let manifest = manifest_of(&checkpoint).ok()?;
        let processes = manifest.spaces.iter();
        let processes = processes.filter(|space| space.space_type() == SpaceType::Process);
        let roots = processes.filter_map(|space| map_root(&space.map_root).ok());
        Some((checkpoint, roots.collect()))
    }
}
