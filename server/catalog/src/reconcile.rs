//! Makes the index agree with the region.

use std::collections::HashMap;

use permafrost_protocol::control::Checkpoint;

use super::{Catalog, CatalogError};

/// Result of [`reconcile`]: the changes made, and the checkpoints that could not be listed.
#[derive(Debug)]
pub struct Reconciled<E> {
    /// Records that had to be changed.
    pub changed: usize,
    /// Checkpoints that the index lacks because `load` failed: their ids, and why.
    pub unreadable: Vec<(String, E)>,
    /// Checkpoints that the index lacks because another one has their place.
    pub hidden: Vec<Hidden>,
}

/// A checkpoint that claims the job and generation (or, parked, the session) of one that was sealed later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// The checkpoint that is not listed.
    pub id: String,
    /// Id of the checkpoint that is listed instead.
    pub by: String,
    /// Job that both checkpoints name; empty if they are parked.
    pub job: String,
    /// Generation that both checkpoints name.
    pub generation: u64,
}

/// Removes the records of the index that are not of the region's checkpoints, or differ in their pins. Calls `keep` for
/// each of the others, in the order of the list, with the one before. Returns the number of removed ones, and for each
/// checkpoint of the region whether the index lacks it.
pub fn remove_stale(
    catalog: &dyn Catalog,
    truth: &[(String, bool)],
    mut keep: impl FnMut(&Checkpoint, Option<Checkpoint>),
) -> Result<(usize, Vec<bool>), CatalogError> {
    let mut missing = vec![true; truth.len()];
    let sealed = by_id(truth);
    let (mut stale, mut before) = (Vec::new(), None);
    let mut look = |record: Checkpoint| {
        match sealed.get(record.id.as_str()) {
            Some(&(order, pinned)) if pinned == record.pinned => {
                missing[order] = false;
                keep(&record, before.take());
                before = Some(record);
            }
            _ => stale.push(record),
        }
        true
    };
    catalog.visit_sealed(("", 0), &mut look)?;
    for record in catalog.all_parked()? {
        look(record);
    }
    for record in &stale {
        catalog.remove(record)?;
    }
    Ok((stale.len(), missing))
}

fn by_id(truth: &[(String, bool)]) -> HashMap<&str, (usize, bool)> {
    let in_order = truth.iter().enumerate();
    in_order
        .map(|(order, (id, pinned))| (id.as_str(), (order, *pinned)))
        .collect()
}

/// Makes the index agree with the region: `truth` are the region's checkpoints in the order of their seals, by
/// id and whether pinned, and `load` reads the summary of one that the index lacks or has with other contents.
///
/// Differences come from a crash between a region's journal record and the index, or from a lost index. A
/// checkpoint that cannot be loaded, or not listed beside another, is left out; it stays in the region.
///
/// # Errors
/// The index cannot be read or written.
pub fn reconcile<E>(
    catalog: &dyn Catalog,
    truth: &[(String, bool)],
    load: impl FnMut(&str) -> Result<Checkpoint, E>,
) -> Result<Reconciled<E>, CatalogError> {
    let (removed, missing) = remove_stale(catalog, truth, |_, _| ())?;
    let mut done = add_missing(catalog, truth, &missing, load)?;
    done.changed += removed;
    Ok(done)
}

/// Adds the checkpoints that the index lacks, as `missing` says of each.
pub fn add_missing<E>(
    catalog: &dyn Catalog,
    truth: &[(String, bool)],
    missing: &[bool],
    mut load: impl FnMut(&str) -> Result<Checkpoint, E>,
) -> Result<Reconciled<E>, CatalogError> {
    let mut done = Reconciled {
        changed: 0,
        unreadable: Vec::new(),
        hidden: Vec::new(),
    };
    if !missing.contains(&true) {
        return Ok(done);
    }
    let sealed = by_id(truth);
    for (order, (id, _)) in truth
        .iter()
        .enumerate()
        .filter(|(order, _)| missing[*order])
    {
        let checkpoint = match load(id) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                done.unreadable.push((id.clone(), error));
                continue;
            }
        };
        // All checkpoints listed so far are in the region.
        let other = in_place_of(catalog, &checkpoint)?.filter(|other| other.id != *id);
        let other_order = other
            .as_ref()
            .and_then(|other| sealed.get(other.id.as_str()))
            .map(|(order, _)| *order);
        let (listed, hidden) = match other {
            Some(other) if other_order > Some(order) => (other, Some(checkpoint)),
            other => {
                catalog.put(&checkpoint)?;
                done.changed += 1;
                (checkpoint, other)
            }
        };
        done.hidden.extend(hidden.map(|hidden| Hidden {
            id: hidden.id,
            by: listed.id,
            job: hidden.job,
            generation: hidden.generation,
        }));
    }
    Ok(done)
}

/// Returns the index's record in the place where the checkpoint belongs.
fn in_place_of(
    catalog: &dyn Catalog,
    checkpoint: &Checkpoint,
) -> Result<Option<Checkpoint>, CatalogError> {
    if checkpoint.generation == 0 {
        catalog.parked(&checkpoint.session)
    } else {
        catalog.find(&checkpoint.job, checkpoint.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::super::SledCatalog;
    use super::*;

    fn sealed(id: &str, job: &str, generation: u64) -> Checkpoint {
        Checkpoint {
            job: job.into(),
            generation,
            id: id.into(),
            ..Checkpoint::default()
        }
    }

    fn catalog(records: &[Checkpoint]) -> (tempfile::TempDir, SledCatalog) {
        let dir = tempfile::tempdir().unwrap();
        let (catalog, _) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
        for record in records {
            catalog.put(record).unwrap();
        }
        (dir, catalog)
    }

    fn ids(catalog: &SledCatalog) -> Vec<(String, bool)> {
        let all = catalog.list(None).unwrap().into_iter();
        all.map(|c| (c.id, c.pinned)).collect()
    }

    fn truth(ids: &[(&str, bool)]) -> Vec<(String, bool)> {
        ids.iter().map(|(id, p)| ((*id).to_owned(), *p)).collect()
    }

    #[test]
    fn the_index_follows_the_region() {
        let records = [1, 2, 3].map(|n| sealed(&format!("a-{n}"), "a", n));
        let (_dir, catalog) = catalog(&records);
        // a@2 is gone, a@3 was pinned, b@1 is new.
        let truth = truth(&[("a-1", false), ("a-3", true), ("b-1", false)]);
        let done = reconcile(&catalog, &truth, |id| {
            let (job, generation) = id.split_once('-').unwrap();
            Ok::<_, CatalogError>(Checkpoint {
                pinned: id == "a-3",
                ..sealed(id, job, generation.parse().unwrap())
            })
        })
        .unwrap();
        // Gone, changed (removed and added), added.
        assert_eq!(done.changed, 4);
        assert!(done.unreadable.is_empty() && done.hidden.is_empty());
        assert_eq!(ids(&catalog), truth);
    }

    #[test]
    fn what_cannot_be_loaded_is_left_out() {
        let (_dir, catalog) = catalog(&[]);
        let truth = truth(&[("x", false), ("damaged", false), ("y", false)]);
        let done = reconcile(&catalog, &truth, |id| match id {
            "damaged" => Err("checksum"),
            id => Ok(sealed(id, id, 1)),
        })
        .unwrap();
        assert_eq!(done.changed, 2);
        assert_eq!(done.unreadable, [("damaged".to_owned(), "checksum")]);
        assert_eq!(ids(&catalog), [truth[0].clone(), truth[2].clone()]);
    }

    #[test]
    fn of_two_that_claim_a_number_the_later_one_is_listed_and_the_other_told() {
        for parked in [false, true] {
            let claim = |id: &str| Checkpoint {
                session: "s".into(),
                ..sealed(id, if parked { "" } else { "a" }, u64::from(!parked))
            };
            let truth = truth(&[("early", false), ("late", false)]);
            // One of them may be in the index already, or neither, at any start.
            for records in [vec![], vec![claim("early")], vec![claim("late")]] {
                let (_dir, catalog) = catalog(&records);
                for _ in 0..2 {
                    let done =
                        reconcile(&catalog, &truth, |id| Ok::<_, CatalogError>(claim(id))).unwrap();
                    let told: Vec<_> = done.hidden.iter().map(|h| (&*h.id, &*h.by)).collect();
                    assert_eq!(told, [("early", "late")], "{records:?}");
                    assert_eq!(ids(&catalog), truth[1..]);
                }
            }
        }
    }
}
