//! The reference model, and the comparison of a recovered region with it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use permafrost_pmem::sim::{SimMedium, mix};
use permafrost_pmem::{
    CheckpointId, DataKey, FindMember, FoundMember, KeyId, MapRoot, Medium, MediumState, OpenError,
    PAGE_SIZE, RecoverOptions, Region, RegionMember, RunKind, StoredCheckpoint,
};

/// Number that a page's content follows from; 0 is a page of zeros.
pub(crate) type Salt = u64;

/// An object's pages: index, flags, salt.
pub(crate) type Pages = Vec<(u64, u16, Salt)>;

/// A checkpoint as the model has it; its map roots are in the manifest, 32 bytes each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sealed {
    pub(crate) attrs: u32,
    pub(crate) manifest: Vec<u8>,
    pub(crate) objects: Vec<Pages>,
}

/// All sealed checkpoints; `None` before there is a region.
pub(crate) type State = Option<BTreeMap<CheckpointId, Sealed>>;

/// Returns a page's content.
pub(crate) fn page(salt: Salt) -> Vec<u8> {
    if salt == 0 {
        return vec![0; PAGE_SIZE];
    }
    (0..PAGE_SIZE as u64 / 8)
        .flat_map(|i| mix(salt ^ i << 48).to_le_bytes())
        .collect()
}

/// Number of keys that checkpoints of a simulation may be encrypted with.
pub(crate) const KEYS: u64 = 2;

/// Gives a region the keys of a simulation.
pub(crate) fn give_keys(region: &Region) {
    for number in 1..=KEYS {
        let key = DataKey::new([number as u8; 32]);
        let cipher = key.cipher(region.usage().uuid.as_bytes());
        region.keys().insert(KeyId::new(number).unwrap(), cipher);
    }
}

/// Recovered region, the number of its state among the allowed ones, and its medium.
pub(crate) type Recovered = (Option<Arc<Region>>, usize, Arc<SimMedium>);

/// Returns a function that finds a region's other media, whose paths are their places in `others`.
pub(crate) fn find(
    others: &[Arc<SimMedium>],
) -> impl FnMut(&RegionMember) -> Result<FoundMember, String> {
    |member| {
        let place: usize = member.path.to_str().unwrap().parse().unwrap();
        let medium = others.get(place).ok_or("taken away")?;
        Ok(FoundMember {
            medium: Arc::clone(medium) as Arc<dyn Medium>,
            path: member.path.clone(),
        })
    }
}

/// Opens an image and compares: it must be one of `allowed`, byte for byte. Returns the region, the number of its
/// state, and the medium.
pub(crate) fn recover(image: &[u8], allowed: &[&State]) -> Result<Recovered, String> {
    recover_with(&Arc::new(SimMedium::from_image(image)), &[], allowed)
}

/// Opens a region of several media and compares, as [`recover`] does.
pub(crate) fn recover_with(
    medium: &Arc<SimMedium>,
    others: &[Arc<SimMedium>],
    allowed: &[&State],
) -> Result<Recovered, String> {
    recover_found(medium, &mut find(others), allowed)
}

/// Opens a region whose other media `find` finds, and compares, as [`recover`] does.
pub(crate) fn recover_found(
    medium: &Arc<SimMedium>,
    find: &mut FindMember<'_>,
    allowed: &[&State],
) -> Result<Recovered, String> {
    let (medium, writes) = (Arc::clone(medium), medium.writes());
    let first = Arc::clone(&medium) as Arc<dyn Medium>;
    let found = match Region::open_all(first, RecoverOptions::default(), find) {
        Ok((region, _)) => Some(region),
        Err(OpenError::NotARegion) => {
            if medium.writes() != writes {
                return Err("refused, and yet written to".to_owned());
            }
            None
        }
        Err(error) => return Err(format!("open: {error}")),
    };
    let Some(region) = found else {
        let which = allowed.iter().position(|state| state.is_none());
        return which
            .map(|i| (None, i, medium))
            .ok_or("region gone".to_owned());
    };
    give_keys(&region);
    // No crash is damage.
    if let Some(failure) = region.failure() {
        return Err(format!("takes no writes: {failure}"));
    }
    for medium in region.media() {
        if let Some(problem) = medium.problem {
            return Err(format!("medium {}: {problem}", medium.number));
        }
    }
    if let Some(damaged) = region.damaged().first() {
        return Err(format!("{damaged:?}"));
    }
    let ids: BTreeMap<_, _> = region
        .checkpoints()
        .iter()
        .map(|c| (c.id(), c.attrs()))
        .collect();
    let has_ids = |state: &&State| {
        state.as_ref().is_some_and(|s| {
            s.iter()
                .map(|(id, c)| (*id, c.attrs))
                .collect::<BTreeMap<_, _>>()
                == ids
        })
    };
    let mut why = format!("found {ids:x?}");
    // Two states may have equal ids: before and after a checkpoint was replaced under its id.
    for (which, state) in allowed.iter().enumerate() {
        if !has_ids(state) {
            continue;
        }
        match check(&region, state) {
            Ok(()) => return Ok((Some(region), which, medium)),
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// Compares all content, and the allocation.
pub(crate) fn check(region: &Region, state: &State) -> Result<(), String> {
    let Some(state) = state else {
        return Err("there should be no region".to_owned());
    };
    let found = region.checkpoints();
    if found.len() != state.len() {
        return Err(format!(
            "{} checkpoints instead of {}",
            found.len(),
            state.len()
        ));
    }
    let mut held = BTreeSet::new();
    for checkpoint in &found {
        let id = checkpoint.id();
        let expected = state.get(&id).ok_or(format!("{id} should not exist"))?;
        check_content(checkpoint, expected).map_err(|e| format!("{id}: {e}"))?;
        held.extend(checkpoint.segment_numbers());
    }
    // Of packed segments several are in one slot, which is counted by the survey.
    let used = region.survey(&crate::scenario::roots).used_bytes();
    let media = region.media();
    let counted: u64 = media.iter().map(|medium| medium.used_bytes).sum();
    let wrong = media.iter().find(|medium| {
        let free = medium.capacity_bytes - medium.used_bytes;
        medium.state == MediumState::Active && medium.free_bytes != free
    });
    if used != counted || wrong.is_some() || used / region.usage().segment_bytes > held.len() as u64
    {
        return Err(format!(
            "{used} bytes used, {} segments held, media {media:?}",
            held.len()
        ));
    }
    Ok(())
}

pub(crate) fn check_content(
    checkpoint: &Arc<StoredCheckpoint>,
    expected: &Sealed,
) -> Result<(), String> {
    let manifest = checkpoint
        .manifest()
        .map_err(|e| format!("manifest: {e}"))?;
    if manifest != expected.manifest {
        return Err("manifest differs".to_owned());
    }
    for (root, pages) in manifest.chunks(32).zip(&expected.objects) {
        let root = MapRoot::try_from(root).map_err(|e| e.to_string())?;
        let map = checkpoint.map(&root);
        let mut expected = pages.iter();
        for run in map.runs() {
            let run = run.map_err(|e| e.to_string())?;
            let bytes = map.read(&run).map_err(|e| e.to_string())?;
            // A whole run is verified by the map, the segment's checksums are for a part of one and for cleaning.
            map.check_checksums(&run).map_err(|e| e.to_string())?;
            for i in 0..run.pages as usize {
                let Some(&(index, flags, salt)) = expected.next() else {
                    return Err("pages too many".to_owned());
                };
                let same = match run.kind {
                    RunKind::Zero => salt == 0,
                    RunKind::Stored { .. } => bytes[i * PAGE_SIZE..][..PAGE_SIZE] == page(salt),
                };
                if !same || run.first_index + i as u64 != index || run.flags != flags {
                    return Err(format!("page {index:#x} differs"));
                }
            }
        }
        if expected.next().is_some() {
            return Err("pages missing".to_owned());
        }
    }
    Ok(())
}
