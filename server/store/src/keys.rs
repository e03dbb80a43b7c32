//! Requests about the keys for encryption at rest: a new key for a namespace, or the end of all of them.

use permafrost_pmem::{KeyId, Survey};
use permafrost_protocol::control::{self, KeyList, KeyStatus, request};
use permafrost_protocol::manifest::namespace_of;

use super::{DataKeys, ProgressReceiver, Store, StoreError};
use crate::error::KeyRequestError;

/// Bytes that are encrypted anew between two reports of progress.
const STEP_BYTES: u64 = 16 << 20;

impl Store {
    /// Lists the keys, gives a namespace a new one, or destroys those of a namespace with its checkpoints. The latter
    /// only if there are none, unless it `may_remove` them: those of a cluster are removed by the cluster.
    ///
    /// # Errors
    /// Nothing is encrypted here; the namespace has no key; keys cannot be stored; the region takes no writes, or has
    /// no room to move segments to.
    pub fn keys(
        &self,
        request: &request::Keys,
        may_remove: bool,
        progress: ProgressReceiver<'_>,
    ) -> Result<KeyList, StoreError> {
        let keys = self.keys.as_ref().ok_or(KeyRequestError::NotEncrypted)?;
        let (mut moved_segments, mut removed_checkpoints) = (0, 0);
        let namespace = &request.namespace;
        match request.action.as_str() {
            "ls" => {}
            "rotate" => moved_segments = self.rotate_key(&**keys, namespace, progress)?,
            "destroy" => {
                (removed_checkpoints, moved_segments) =
                    self.destroy_keys(&**keys, namespace, may_remove, progress)?;
            }
            action => {
                let action = action.to_owned();
                return Err(KeyRequestError::Action { action }.into());
            }
        }
        let segments = self.region.segments_by_key();
        let status = |key: super::NamespaceKey| KeyStatus {
            namespace: key.namespace,
            id: key.id.to_string(),
            created_unix_s: key.created_unix_s,
            current: key.is_current,
            segments: segments.get(&key.id).copied().unwrap_or(0),
        };
        Ok(KeyList {
            keys: keys.list().into_iter().map(status).collect(),
            moved_segments,
            removed_checkpoints,
        })
    }

    /// Makes a new key for a namespace, and encrypts with it what older ones of it encrypt. A key that nothing is
    /// encrypted with any more is erased; one that dumps under way or damaged checkpoints keep stays for the next time.
    fn rotate_key(
        &self,
        keys: &dyn DataKeys,
        namespace: &str,
        progress: ProgressReceiver<'_>,
    ) -> Result<u64, StoreError> {
        self.check_writable()?;
        let new = keys.rotate(namespace)?;
        let others = keys.list().into_iter();
        let others = others.filter(|key| key.namespace == namespace && !key.is_current);
        let old: Vec<KeyId> = others.map(|key| key.id).collect();
        let moved = {
            let mut last = self.lock_cleaning();
            let survey = self.survey_keys(&mut last, &old);
            self.change_keys(&survey, &old, new, progress)?
        };
        for id in old {
            if self.region.take_unused_key(id) {
                keys.retire(id)?;
            }
        }
        tracing::info!(event = "key-rotated", namespace, key = %new, segments = moved, "key rotated");
        Ok(moved)
    }

    fn change_keys(
        &self,
        survey: &Survey,
        old: &[KeyId],
        new: KeyId,
        progress: ProgressReceiver<'_>,
    ) -> Result<u64, StoreError> {
        let segments = self.region.segments_by_key();
        let counts = old.iter().filter_map(|key| segments.get(key));
        let total = counts.sum();
        let mut moved = 0;
        loop {
            let step = self.region.change_keys(survey, new, STEP_BYTES)?;
            moved += step.segments;
            progress(moved, total);
            if step.done {
                return Ok(moved);
            }
        }
    }

    /// Removes a namespace's checkpoints, and erases its keys. Dumps of it that were adopted had their pages under the
    /// key of dumps without a name: what is left under that one gets a new key, and it is erased, too.
    fn destroy_keys(
        &self,
        keys: &dyn DataKeys,
        namespace: &str,
        may_remove: bool,
        progress: ProgressReceiver<'_>,
    ) -> Result<(u64, u64), StoreError> {
        self.check_writable()?;
        if namespace.is_empty() {
            // Dumps that had no name have their pages under it, whatever jobs they are of now.
            return Err(KeyRequestError::Adopted.into());
        }
        let all = self.catalog.list(None)?.into_iter();
        let of_it: Vec<control::Checkpoint> = all.filter(|one| is_in(one, namespace)).collect();
        if !may_remove && !of_it.is_empty() {
            let (namespace, checkpoints) = (namespace.to_owned(), of_it.len());
            return Err(KeyRequestError::InUse {
                namespace,
                checkpoints,
            }
            .into());
        }
        let mut removed = 0;
        for record in &of_it {
            removed += u64::from(self.roll_back(&record.id, true)?);
        }
        let has_keys = |of: &str| keys.list().iter().any(|key| key.namespace == of);
        let has_adopted = has_keys("");
        // Without keys they were destroyed before, and what follows failed then.
        if has_keys(namespace) || !has_adopted {
            keys.destroy(namespace)?;
        }
        tracing::warn!(
            event = "keys-destroyed",
            namespace,
            checkpoints = removed,
            "keys destroyed"
        );
        if !has_adopted {
            return Ok((removed, 0));
        }
        let moved = self.rotate_key(keys, "", progress)?;
        let segments = self.region.segments_by_key();
        let mut old = keys.list();
        old.retain(|key| key.namespace.is_empty() && !key.is_current);
        if old.is_empty() {
            return Ok((removed, moved));
        }
        let counts = old.iter().filter_map(|key| segments.get(&key.id));
        Err(KeyRequestError::Shared {
            namespace: namespace.to_owned(),
            segments: counts.sum(),
        }
        .into())
    }
}

fn is_in(record: &control::Checkpoint, namespace: &str) -> bool {
    match record.job.as_str() {
        "" => namespace.is_empty(),
        job => namespace_of(job) == Ok(namespace),
    }
}
