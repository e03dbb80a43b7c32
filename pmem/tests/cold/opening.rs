//! Media that are drained, away, or of another time or region.

use std::sync::atomic::Ordering;

use permafrost_cold::Objects;
use permafrost_pmem::{
    CheckpointId, CleanError, FoundMember, MediaError, OpenOptions, RecoverOptions, Region,
    RegionMember, open_sparse_medium,
};

use super::{FIRST, SEGMENT, Site, cold_error, cool, read, root, seal};

#[test]
fn a_drained_cold_medium_is_read_and_what_cannot_be_moved_is_named() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    drop(seal(&region, 1000, 20, None).unwrap());
    let moved = cool(&region).unwrap();
    region.set_draining(1, true).unwrap();
    read(&region, 1, FIRST, 1, 1).unwrap();
    assert!(matches!(cool(&region), Ok(0)), "nothing is moved there");
    // The first one: those behind it are moved all the same.
    let gone = site.objects.all().into_keys().next().unwrap();
    drop(region);
    site.objects.delete(&gone).unwrap();
    let region = site.open();
    let drained = region.drain_step(1, u64::MAX).unwrap();
    assert_eq!(drained.moved_bytes, (moved - 1) * SEGMENT);
    assert_eq!(drained.left_bytes, SEGMENT);
    let [stuck] = &drained.stuck[..] else {
        panic!("{:?}", drained.stuck);
    };
    assert!(stuck.error.to_string().contains(&gone), "{}", stuck.error);
    assert!(!stuck.segments.is_empty());
    // The next step does not ask for it again.
    let asked = site.objects.gets.load(Ordering::SeqCst);
    let next = region.drain_others(1, u64::MAX, &drained.stuck).unwrap();
    assert!(next.stuck.is_empty() && next.left_bytes == SEGMENT);
    assert_eq!(site.objects.gets.load(Ordering::SeqCst), asked);
    assert!(region.remove_medium(1).is_err());
    // Away, it says so instead.
    site.objects.set_away(true);
    let away = region.drain_step(1, u64::MAX);
    // The damage is known.
    assert!(away.is_ok_and(|drained| drained.stuck.len() == 1));
    drop(region);
    assert!(site.open().drain_step(1, u64::MAX).is_err());
    site.objects.set_away(false);
    let region = site.open();
    region.delete(CheckpointId::new(1)).unwrap();
    region.delete(CheckpointId::new(1000)).unwrap();
    assert_eq!(region.drain_step(1, u64::MAX).unwrap().left_bytes, 0);
    region.remove_medium(1).unwrap();
    assert!(
        site.objects.all().is_empty(),
        "a removed tier leaves no objects"
    );
}

/// Returns why the cold medium is not there.
fn problem(site: &Site) -> String {
    let mut find = |member: &RegionMember| {
        Ok(FoundMember {
            medium: site.cold(&member.path),
            path: member.path.clone(),
        })
    };
    let (region, _) = Region::open_all(site.file(), RecoverOptions::default(), &mut find).unwrap();
    let media = region.media();
    assert!(media[1].is_cold);
    media[1].problem.clone().unwrap_or_default()
}

#[test]
fn an_index_of_another_time_or_medium_is_refused_by_name() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    let early = std::fs::read(site.index()).unwrap();
    cool(&region).unwrap();
    let first = std::fs::read(site.dir.path().join("first")).unwrap();
    drop(region);
    // Of this start, it could be what a crash has left; it is not of the next one.
    drop(site.open());
    let newest = std::fs::read(site.index()).unwrap();
    std::fs::write(site.index(), &early).unwrap();
    let text = problem(&site);
    assert!(
        text.contains("older copy of the index") && text.contains("--lost"),
        "{text}"
    );
    std::fs::write(site.index(), &newest).unwrap();
    assert_eq!(problem(&site), "");
    read(&site.open(), 1, FIRST, 1, 1).unwrap();
    // Objects were removed since.
    let region = site.open();
    let before = std::fs::read(site.index()).unwrap();
    region.delete(CheckpointId::new(1)).unwrap();
    assert!(region.sweep_cold(true, &|| false).unwrap() > 0);
    drop(region);
    let after = std::fs::read(site.index()).unwrap();
    std::fs::write(site.index(), &before).unwrap();
    assert!(problem(&site).contains("older copy of the index"));
    std::fs::write(site.index(), &after).unwrap();
    assert_eq!(problem(&site), "");
    let (other, _region) = Site::new();
    std::fs::copy(other.index(), site.index()).unwrap();
    let text = problem(&site);
    assert!(text.contains("is that of medium"), "{text}");
    std::fs::write(site.index(), b"").unwrap();
    assert!(problem(&site).contains("empty"));
    std::fs::write(site.index(), &after).unwrap();
    std::fs::write(site.dir.path().join("first"), &first).unwrap();
    assert!(problem(&site).contains("first file"));
}

#[test]
fn an_index_that_was_copied_while_its_medium_was_away_is_an_older_one() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    cool(&region).unwrap();
    drop(region);
    let mut find = |_: &RegionMember| Err("not mounted".to_owned());
    let (region, _) = Region::open_all(site.file(), RecoverOptions::default(), &mut find).unwrap();
    let copied = std::fs::read(site.index()).unwrap();
    assert_eq!(site.add(&region).unwrap(), 1);
    drop(region);
    let newest = std::fs::read(site.index()).unwrap();
    std::fs::write(site.index(), copied).unwrap();
    let text = problem(&site);
    assert!(text.contains("older copy of the index"), "{text}");
    std::fs::write(site.index(), newest).unwrap();
    assert_eq!(problem(&site), "");
}

#[test]
fn a_cold_medium_that_is_opened_without_its_store_says_so() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    cool(&region).unwrap();
    drop(region);
    let mut find = |member: &RegionMember| {
        let file = open_sparse_medium(&member.path, 0, &OpenOptions::default());
        Ok(FoundMember {
            medium: file.unwrap(),
            path: member.path.clone(),
        })
    };
    let (region, _) = Region::open_all(site.file(), RecoverOptions::default(), &mut find).unwrap();
    let medium = &region.media()[1];
    let problem = medium.problem.as_deref().unwrap();
    assert!(
        medium.is_cold && problem.contains("cold.store beside it"),
        "{problem}"
    );
}

#[test]
fn a_directory_that_is_not_mounted_is_away_and_another_regions_is_refused() {
    let mounts = tempfile::tempdir_in("/dev/shm").unwrap();
    let (store, away) = (mounts.path().join("store"), mounts.path().join("away"));
    std::fs::create_dir(&store).unwrap();
    let (site, region) = Site::alone(Some(&store));
    site.add(&region).unwrap();
    drop(seal(&region, 1, FIRST, None).unwrap());
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    let slots = region.occupied_slots();
    region.cool_slot(&survey, &slots[0], 1, &|| true).unwrap();

    std::fs::rename(&store, &away).unwrap();
    std::fs::create_dir(&store).unwrap();
    let error = read(&region, 1, FIRST, 1, 1).unwrap_err();
    assert!(cold_error(&error).is_away(), "{error}");
    let unmounted = region
        .cool_slot(&survey, &slots[1], 1, &|| true)
        .unwrap_err();
    let MediaError::Clean(CleanError::Io(unmounted)) = unmounted else {
        panic!("{unmounted}");
    };
    assert!(
        unmounted.to_string().contains("not the one that was added"),
        "{unmounted}"
    );
    let (absent, problems) = region.absent_segments();
    assert_eq!((absent.len(), problems.len()), (0, 1));
    assert!(region.sweep_cold(true, &|| false).is_err());
    assert_eq!(
        std::fs::read_dir(&store).unwrap().count(),
        0,
        "nothing is written there"
    );

    std::fs::remove_dir(&store).unwrap();
    std::fs::rename(&away, &store).unwrap();
    read(&region, 1, FIRST, 1, 1).unwrap();
    assert_eq!(
        region.cool_slot(&survey, &slots[1], 1, &|| true).unwrap(),
        SEGMENT
    );
    drop(survey);
    assert!(region.absent_segments().0.is_empty());

    let (other, other_region) = Site::alone(Some(&store));
    let taken = other.add(&other_region).unwrap_err().to_string();
    let names = taken.contains("is the cold tier of") && taken.contains("permafrost-region");
    assert!(names, "{taken}");
    read(&region, 1, FIRST, 1, 1).unwrap();
    region.set_draining(1, true).unwrap();
    assert_eq!(region.drain_step(1, u64::MAX).unwrap().left_bytes, 0);
    region.remove_medium(1).unwrap();
    // Now it is free. Its files are made anew.
    let (other, other_region) = Site::alone(Some(&store));
    other.add(&other_region).unwrap();
}
