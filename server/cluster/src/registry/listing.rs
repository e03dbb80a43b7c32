//! Reads the listing, consistently as of one revision.

use etcd_client::GetOptions;
use permafrost_clustered::Registered;
use permafrost_store::StoreError;

use super::{Inner, entry};
use crate::error::RegistryError;
use crate::keys::end_of;
use permafrost_clustered::DataMark;

/// Number of entries in one reply: some 100 KiB, far below the 4 MiB that a client takes.
const PAGE: i64 = 500;

impl Inner {
    /// Returns the identity of etcd's current data, and its revision as etcd writes it. The id is empty while the
    /// data has none.
    pub(super) async fn mark(&self) -> Result<(DataMark, i64), StoreError> {
        let found = self.get(self.keys.cluster(), None).await?;
        let revision = found.header().map_or(0, |header| header.revision());
        let id = found.kvs().first().map(|kv| kv.value()).unwrap_or_default();
        let mark = DataMark {
            id: String::from_utf8_lossy(id).into_owned(),
            revision: u64::try_from(revision).unwrap_or_default(),
        };
        Ok((mark, revision))
    }

    /// Reads all entries of a range as of a revision, a page at a time.
    async fn pages(&self, prefix: &str, revision: i64) -> Result<Vec<Registered>, StoreError> {
        let end = end_of(prefix);
        let mut from = prefix.as_bytes().to_vec();
        let mut entries = Vec::new();
        loop {
            let options = GetOptions::new()
                .with_range(end.clone())
                .with_limit(PAGE)
                .with_revision(revision);
            let page = self.get(from, Some(options)).await?;
            for kv in page.kvs() {
                match entry(kv) {
                    Ok((registered, _)) => entries.push(registered),
                    // A damaged entry does not hide the others.
                    Err(error) => {
                        tracing::error!(event = "registry-entry-unreadable", %error, "entry not listed")
                    }
                }
            }
            match page.kvs().last() {
                Some(last) if page.more() => {
                    from = last.key().to_vec();
                    // The first key after the last one.
                    from.push(0);
                }
                _ => return Ok(entries),
            }
        }
    }

    /// Lists a job's entries, or all, with the identity of their data: all as of one revision.
    pub(super) async fn list(
        &self,
        job: &str,
        bound: Option<&DataMark>,
    ) -> Result<(Vec<Registered>, DataMark), StoreError> {
        let (mark, revision) = self.mark().await?;
        if let Some(bound) = bound
            && (bound.id != mark.id || bound.revision > mark.revision)
        {
            return Err(RegistryError::DataReplaced {
                cluster: bound.id.clone(),
                revision: bound.revision,
            }
            .into());
        }
        let prefix = if job.is_empty() {
            self.keys.checkpoints()
        } else {
            self.keys.checkpoints_of(job)
        };
        let mut listed = self.pages(&prefix, revision).await?;
        listed.sort_by(|a, b| {
            let key =
                |entry: &Registered| (entry.checkpoint.job.clone(), entry.checkpoint.generation);
            key(a).cmp(&key(b))
        });
        let parked = self.pages(&self.keys.all_parked(), revision).await?;
        listed.extend(
            parked
                .into_iter()
                .filter(|entry| job.is_empty() || entry.checkpoint.job == job),
        );
        Ok((listed, mark))
    }
}
