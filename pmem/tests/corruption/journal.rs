//! Damage in the journal.

use std::sync::Arc;

use permafrost_pmem::layout::RECORD_BYTES;
use permafrost_pmem::sim::{SimMedium, mix};
use permafrost_pmem::{CheckpointId, JournalFault, Medium, PAGE_SIZE, RecoverOptions, Region};

use super::{CAPACITY, JOURNAL, check, copies, ids, open, sealed};

#[test]
fn a_journal_damaged_in_the_middle_is_not_taken_for_a_torn_one() {
    let (image, _) = sealed();
    // Header, two seals, attributes.
    let damaged = |n: usize| {
        let mut image = image.clone();
        copies(n).into_iter().for_each(|at| image[at + 20] ^= 1);
        image
    };
    let damage = |n: usize| open(&damaged(n)).map(|(_, report)| report);
    let refused_writes = |n: usize| {
        let (region, _) = open(&damaged(n)).unwrap();
        assert!(
            region.failure().is_some()
                && region
                    .begin()
                    .seal(CheckpointId::new(9), b"", None)
                    .is_err()
        );
        let mut now = vec![0; CAPACITY];
        region.medium().read(0, &mut now).unwrap();
        assert!(now == damaged(n), "written to");
        (ids(&region), region.journal_damage().unwrap().clone())
    };
    let hole = |record| JournalFault::Hole {
        record,
        later: record + 1,
    };
    // The header: all records are there. The first seal: later checkpoints remain. The second: its id is known
    // nevertheless, as its attributes were set.
    let (found, damage_found) = refused_writes(0);
    assert_eq!(
        (found, damage_found.faults),
        (vec![1, 2], vec![JournalFault::Header])
    );
    let (found, damage_found) = refused_writes(1);
    assert_eq!((found, damage_found.faults), (vec![2], vec![hole(1)]));
    let (found, damage_found) = refused_writes(2);
    assert_eq!((found, damage_found.faults), (vec![1], vec![hole(2)]));
    assert_eq!(damage_found.checkpoints_lost, [CheckpointId::new(2)]);
    // The last record cannot be distinguished from one that a crash tore in both copies.
    assert!(damage(3).unwrap().torn_record);
    // One copy is enough, and is repaired.
    for at in copies(3) {
        let mut one = image.clone();
        one[at + 20] ^= 1;
        let (region, report) = open(&one).unwrap();
        assert_eq!((report.records_repaired, report.torn_record), (1, false));
        let mut repaired = [0; RECORD_BYTES];
        region.medium().read(at as u64, &mut repaired).unwrap();
        assert_eq!(repaired, image[at..at + RECORD_BYTES]);
    }
}

#[test]
fn all_of_a_page_of_the_journal_may_be_damaged() {
    let (image, roots) = sealed();
    for page in JOURNAL.step_by(PAGE_SIZE) {
        let mut damaged = image.clone();
        for (n, byte) in damaged[page..page + PAGE_SIZE].iter_mut().enumerate() {
            *byte = mix(n as u64) as u8;
        }
        let (region, _) = open(&damaged).unwrap();
        assert!(check(&region, &roots) && region.failure().is_none());
        // Whole again.
        let mut repaired = vec![0; CAPACITY];
        region.medium().read(0, &mut repaired).unwrap();
        for at in [0, 1, 2, 3].map(copies).concat() {
            assert!(repaired[at..at + RECORD_BYTES] == image[at..at + RECORD_BYTES]);
        }
    }
}

#[test]
fn a_damaged_journal_is_left_behind_when_the_loss_is_accepted() {
    let (mut image, _) = sealed();
    for at in copies(1) {
        image[at..at + RECORD_BYTES].fill(0xa5);
    }
    let medium = Arc::new(SimMedium::from_image(&image));
    let options = RecoverOptions::default().accept_loss(true);
    let (region, _) = Region::open_with(Arc::clone(&medium) as Arc<dyn Medium>, options).unwrap();
    assert_eq!(region.journal_damage().unwrap().records_lost, 1);
    region
        .begin()
        .seal(CheckpointId::new(9), b"", None)
        .unwrap();
    // Whole again, whatever comes: the damaged half is left, and a full journal comes back to it.
    for id in 100..200 {
        let sealed = region.begin().seal(CheckpointId::new(id), b"", None);
        sealed.unwrap();
        region.delete(CheckpointId::new(id)).unwrap();
    }
    let (region, _) = open(&medium.image()).unwrap();
    assert_eq!(region.journal_damage(), None);
    assert_eq!(ids(&region), [2, 9]);
}
