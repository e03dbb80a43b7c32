//! Scenarios: sequences of operations on a region, made from a seed.

use std::collections::BTreeMap;
use std::sync::Arc;

use permafrost_pmem::sim::{MediumEvent, SimMedium, mix};
use permafrost_pmem::{
    CheckpointId, CleanError, FormatOptions, JournalError, KeyId, MapCursor, MapRoot, Medium,
    PAGE_SIZE, RecoverOptions, Region, RegionUuid, SealError, Shadow, ShadowError,
    StoredCheckpoint,
};

use crate::cold::ColdParts;
use crate::model::{self, Pages, Salt, Sealed, State, page};

/// Small enough to be copied ten thousand times: a dozen segments and one page of journal a half.
pub(crate) const CAPACITY: usize = 13 * (64 << 10);

/// Numbers that follow from a seed.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Less than `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Result of a scenario: the log, and the states that its marks number.
pub(crate) struct Played {
    pub(crate) log: Vec<MediumEvent>,
    pub(crate) states: Vec<State>,
    /// Slots that cleaning emptied.
    pub(crate) cleaned_slots: u64,
}

pub(crate) struct Player {
    pub(crate) rng: Rng,
    pub(crate) medium: Arc<SimMedium>,
    /// Media that can be added to the region; their path is their place here.
    pub(crate) others: Vec<Arc<SimMedium>>,
    /// A cold medium that can be added.
    pub(crate) cold: Option<ColdParts>,
    pub(crate) region: Option<Arc<Region>>,
    /// The last one is current.
    pub(crate) states: Vec<State>,
    /// State that will be current if the operation under way succeeds.
    pub(crate) pending: Option<BTreeMap<CheckpointId, Sealed>>,
    pub(crate) cleaned_slots: u64,
}

impl Player {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rng: Rng::new(seed),
            medium: Arc::new(SimMedium::new(CAPACITY)),
            others: Vec::new(),
            cold: None,
            region: None,
            states: vec![None],
            pending: None,
            cleaned_slots: 0,
        }
    }

    /// Goes on from a recovered region.
    pub(crate) fn resume(
        seed: u64,
        medium: Arc<SimMedium>,
        region: Arc<Region>,
        state: State,
    ) -> Self {
        Self {
            rng: Rng::new(seed),
            medium,
            others: Vec::new(),
            cold: None,
            region: Some(region),
            states: vec![state],
            pending: None,
            cleaned_slots: 0,
        }
    }

    /// Plays a scenario from beginning to end.
    pub(crate) fn play(mut self) -> Played {
        self.format();
        self.open();
        for _ in 0..4 + self.rng.below(8) {
            self.step();
        }
        Played {
            log: self.medium.take_log(),
            states: self.states,
            cleaned_slots: self.cleaned_slots,
        }
    }

    pub(crate) fn current(&self) -> BTreeMap<CheckpointId, Sealed> {
        self.states.last().cloned().flatten().unwrap_or_default()
    }

    pub(crate) fn in_flight(&mut self, state: BTreeMap<CheckpointId, Sealed>) {
        self.pending = Some(state);
    }

    pub(crate) fn acknowledge_in_flight(&mut self) {
        if let Some(state) = self.pending.take() {
            self.acknowledge(state);
        }
    }

    /// Records the state that is current and acknowledged from now on.
    pub(crate) fn acknowledge(&mut self, state: BTreeMap<CheckpointId, Sealed>) {
        self.states.push(Some(state));
        self.medium.mark(self.states.len() as u64 - 1);
    }

    pub(crate) fn region(&self) -> Arc<Region> {
        Arc::clone(
            self.region
                .as_ref()
                .expect("the scenario opens the region first"),
        )
    }

    pub(crate) fn format(&mut self) {
        let uuid = RegionUuid::new(
            (u128::from(self.rng.next()) << 64 | u128::from(self.rng.next())).to_le_bytes(),
        );
        let options = FormatOptions {
            segment_bytes: 64 << 10,
            journal_records: Some(32),
            uuid: Some(uuid),
        };
        Region::format(Arc::clone(&self.medium) as Arc<dyn Medium>, &options).unwrap();
        self.acknowledge(BTreeMap::new());
    }

    pub(crate) fn open(&mut self) {
        self.region = None;
        let medium = Arc::clone(&self.medium) as Arc<dyn Medium>;
        let options = RecoverOptions::default();
        let opened = match &self.cold {
            Some(cold) => Region::open_all(medium, options, &mut |_| Ok(cold.found())),
            None => Region::open_all(medium, options, &mut model::find(&self.others)),
        };
        let region = opened.unwrap().0;
        model::give_keys(&region);
        self.region = Some(region);
    }

    pub(crate) fn step(&mut self) {
        match self.rng.below(24) {
            0..=8 => self.dump(),
            9..=10 => self.two_dumps_at_once(),
            11..=13 => self.delete(),
            14..=15 => self.set_attrs(1),
            // Fills the journal: the next operation or one of these compacts it.
            16 => self.set_attrs(32),
            17 => self.abandon(),
            18..=21 => {
                // Small checkpoints share segments, so several are made, and most of them are removed.
                for _ in 0..3 {
                    self.dump();
                }
                for _ in 0..self.rng.below(8) {
                    self.delete();
                }
                self.clean();
            }
            22 if self.rng.one_in(2) => {
                self.region().close().unwrap();
                self.open();
            }
            _ => self.open(),
        }
    }

    /// Begins a shadow in the clear, or under one of the keys.
    fn begin(&mut self, region: &Arc<Region>) -> Shadow {
        let key = KeyId::new(self.rng.below(1 + model::KEYS));
        region.begin_encrypted(key).unwrap()
    }

    pub(crate) fn dump(&mut self) {
        let region = self.region();
        let mut shadow = self.begin(&region);
        let Ok((manifest, objects)) = self.fill(&region, &mut shadow) else {
            return;
        };
        self.seal(shadow, manifest, objects);
    }

    fn two_dumps_at_once(&mut self) {
        let region = self.region();
        let (mut a, mut b) = (self.begin(&region), self.begin(&region));
        let filled_a = self.fill(&region, &mut a);
        let filled_b = self.fill(&region, &mut b);
        if let Ok((manifest, objects)) = filled_b {
            self.seal(b, manifest, objects);
        }
        if let Ok((manifest, objects)) = filled_a {
            self.seal(a, manifest, objects);
        }
    }

    fn abandon(&mut self) {
        let region = self.region();
        let mut shadow = self.begin(&region);
        let _ = self.fill(&region, &mut shadow);
    }

    fn seal(&mut self, shadow: Shadow, manifest: Vec<u8>, objects: Vec<Pages>) {
        let mut state = self.current();
        let replaces = if self.rng.one_in(4) {
            self.pick()
        } else {
            None
        };
        // A fresh copy of a damaged checkpoint has its name.
        let own = replaces.filter(|_| self.rng.one_in(2));
        let id = own.unwrap_or_else(|| CheckpointId::new(u128::from(self.rng.next())));
        match shadow.seal(id, &manifest, replaces) {
            Ok(_) => {
                if let Some(replaced) = replaces {
                    state.remove(&replaced);
                }
                state.insert(
                    id,
                    Sealed {
                        attrs: 0,
                        manifest,
                        objects,
                    },
                );
                self.acknowledge(state);
            }
            Err(
                SealError::Shadow(ShadowError::Full { .. })
                | SealError::Journal(JournalError::Full { .. }),
            ) => {}
            Err(error) => panic!("seal: {error}"),
        }
    }

    fn delete(&mut self) {
        let Some(id) = self.pick() else { return };
        self.region().delete(id).unwrap();
        let mut state = self.current();
        state.remove(&id);
        self.acknowledge(state);
    }

    fn set_attrs(&mut self, times: u64) {
        for _ in 0..times {
            let Some(id) = self.pick() else { return };
            let bits = u32::try_from(self.rng.below(4)).unwrap();
            self.region().set_attrs(id, bits).unwrap();
            let mut state = self.current();
            state.get_mut(&id).unwrap().attrs = bits;
            self.acknowledge(state);
        }
    }

    /// Moves segments, some of them or all that are worth it: changes no state.
    pub(crate) fn clean(&mut self) {
        let region = self.region();
        let kept = self.pick().and_then(|id| region.checkpoint(id));
        let max_bytes = self.rng.below(64) * PAGE_SIZE as u64;
        if self.rng.one_in(3) {
            let [from, to] = [0, 1].map(|_| KeyId::new(1 + self.rng.below(model::KEYS)).unwrap());
            let survey = region.survey_keys(&roots, &[from]);
            match region.change_keys(&survey, to, max_bytes) {
                Ok(_) | Err(CleanError::Full) => {}
                Err(error) => panic!("change keys: {error}"),
            }
        }
        let mut survey = region.survey(&roots);
        match region.clean(&mut survey, max_bytes) {
            Ok(cleaned) => self.cleaned_slots += cleaned.slots,
            Err(CleanError::Full) => {}
            Err(error) => panic!("clean: {error}"),
        }
        drop((survey, kept));
        model::check(&region, self.states.last().unwrap()).unwrap();
    }

    pub(crate) fn pick(&mut self) -> Option<CheckpointId> {
        let state = self.current();
        let n = self.rng.below(state.len().max(1) as u64);
        state.keys().nth(usize::try_from(n).unwrap()).copied()
    }

    /// Fills a shadow with a few objects, some against a parent; gives a manifest of their map roots.
    fn fill(
        &mut self,
        region: &Arc<Region>,
        shadow: &mut Shadow,
    ) -> Result<(Vec<u8>, Vec<Pages>), ()> {
        let parent = if self.rng.one_in(3) {
            None
        } else {
            self.pick()
        };
        let parent = parent.map(|id| (region.checkpoint(id).unwrap(), self.current()[&id].clone()));
        let (mut manifest, mut objects) = (Vec::new(), Vec::new());
        if let (Some((checkpoint, sealed)), true) = (&parent, self.rng.one_in(4)) {
            shadow.inherit(checkpoint);
            manifest.extend_from_slice(&sealed.manifest);
            objects.extend_from_slice(&sealed.objects);
        }
        for n in 0..1 + self.rng.below(2) {
            let old = parent.as_ref().and_then(|(checkpoint, sealed)| {
                let n = usize::try_from(n).unwrap();
                let root = MapRoot::try_from(sealed.manifest.chunks(32).nth(n)?).unwrap();
                Some((checkpoint.map(&root).cursor(), sealed.objects[n].clone()))
            });
            let (root, pages) = full_is_ok(self.object(shadow, old))?;
            manifest.extend_from_slice(&root.to_bytes());
            objects.push(pages);
            if self.rng.one_in(4) {
                full_is_ok(shadow.flush().map(|()| ((), ())))?;
            }
        }
        Ok((manifest, objects))
    }

    fn object(
        &mut self,
        shadow: &mut Shadow,
        old: Option<(MapCursor, Pages)>,
    ) -> Result<(MapRoot, Pages), ShadowError> {
        let mut map = shadow.map();
        let mut pages = Pages::new();
        let (mut cursor, old) = match old {
            Some((cursor, old)) => (Some(cursor), old),
            None => (None, Vec::new()),
        };
        let old: BTreeMap<u64, (u16, Salt)> = old
            .into_iter()
            .map(|(index, flags, salt)| (index, (flags, salt)))
            .collect();
        let mut index = 0;
        for _ in 0..self.rng.below(24) {
            index += if self.rng.one_in(3) {
                self.rng.below(4)
            } else {
                0
            };
            let flags = u16::from(self.rng.one_in(5));
            let salt = match (self.rng.below(4), old.get(&index)) {
                (0, _) => 0,
                (1 | 2, Some(&(_, old))) => old,
                _ => self.rng.next(),
            };
            match (&mut cursor, old.get(&index)) {
                (Some(cursor), Some(&(old_flags, old))) if self.rng.one_in(2) => {
                    shadow.reference(&mut map, index, 1, cursor)?;
                    pages.push((index, old_flags, old));
                }
                (cursor, _) => {
                    shadow.append(&mut map, index, flags, &page(salt), cursor.as_mut())?;
                    pages.push((index, flags, salt));
                }
            }
            index += 1;
        }
        let (root, stats) = shadow.finish(map)?;
        assert_eq!(stats.pages, pages.len() as u64);
        Ok((root, pages))
    }
}

/// Returns the map roots in a manifest.
pub(crate) fn roots(checkpoint: &Arc<StoredCheckpoint>) -> Option<Vec<MapRoot>> {
    let manifest = checkpoint.manifest().ok()?;
    manifest
        .chunks(32)
        .map(|root| MapRoot::try_from(root).ok())
        .collect()
}

/// Accepts a full region, which is part of a scenario; other errors are not.
fn full_is_ok<T, U>(result: Result<(T, U), ShadowError>) -> Result<(T, U), ()> {
    match result {
        Ok(done) => Ok(done),
        Err(ShadowError::Full { .. }) => Err(()),
        Err(error) => panic!("fill: {error}"),
    }
}
