//! Files that may be media, and reads from them past the process.

use std::sync::Arc;

use permafrost_pmem::{
    CheckpointId, MediumError, OpenOptions, PAGE_SIZE, PageError, Region, RunKind, open_medium,
};

use super::{SMALL, pages};

#[test]
fn a_file_that_is_anothers_or_open_to_others_is_no_region() {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let options = OpenOptions::default();
    let open = || open_medium(&path, 1 << 20, &options).map(drop);
    open().unwrap();
    for mode in [0o644, 0o640, 0o606, 0o610] {
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let refused = open().unwrap_err();
        assert!(
            matches!(refused, MediumError::OpenToOthers { mode: found, .. } if found == mode),
            "{refused}"
        );
        assert!(refused.to_string().contains("chmod 0600"), "{refused}");
    }
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    open().unwrap();
    if std::fs::metadata(&path).unwrap().uid() == 0 {
        // Owned by `nobody`, as a file that another user put there.
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        let refused = open().unwrap_err();
        assert!(
            matches!(
                refused,
                MediumError::ForeignOwner {
                    owner: 65534,
                    user: 0,
                    ..
                }
            ),
            "{refused}"
        );
    }
}

#[test]
fn a_medium_is_left_out_of_core_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a-region-of-its-own");
    let _medium = open_medium(&path, 1 << 20, &OpenOptions::default()).unwrap();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mappings: Vec<_> = maps.split("a-region-of-its-own").skip(1).collect();
    assert!(!mappings.is_empty(), "it is mapped");
    for mapping in mappings {
        let flags = mapping
            .lines()
            .find_map(|line| line.strip_prefix("VmFlags:"));
        assert!(
            flags.unwrap().split_whitespace().any(|flag| flag == "dd"),
            "{flags:?}"
        );
    }
}

#[test]
fn splice_takes_verified_pages_from_the_mediums_file() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let medium = open_medium(&path, 2 << 20, &OpenOptions::default()).unwrap();
    Region::format(Arc::clone(&medium), &SMALL).unwrap();
    let (region, _) = Region::open(medium).unwrap();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    // Longer than a segment, with zeros: runs in two segments, between pages of nodes, and one that is stored nowhere.
    let salts: Vec<u8> = (1..=20).chain([0, 0]).collect();
    shadow
        .append(&mut map, 0x10, 3, &pages(&salts), None)
        .unwrap();
    let (root, _) = shadow.finish(map).unwrap();
    let checkpoint = shadow.seal(CheckpointId::new(1), b"", None).unwrap();
    let map = checkpoint.map(&root);
    let runs: Vec<_> = map.runs().map(Result::unwrap).collect();
    assert_eq!(runs.len(), 5);
    for run in &runs {
        let expected = map.read(run).unwrap().to_vec();
        let source = map.splice_source(run).unwrap();
        if run.kind == RunKind::Zero {
            assert!(source.is_none());
            continue;
        }
        let (file, at) = source.expect("a medium with a file");
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut spliced = Vec::new();
        for page in 0..u64::from(run.pages) {
            let mut from = at + page * PAGE_SIZE as u64;
            let flags = rustix::pipe::SpliceFlags::empty();
            let moved = rustix::pipe::splice(file, Some(&mut from), &write, None, PAGE_SIZE, flags)
                .unwrap();
            assert_eq!(moved, PAGE_SIZE);
            let mut page = [0; PAGE_SIZE];
            std::io::Read::read_exact(
                &mut std::fs::File::from(read.try_clone().unwrap()),
                &mut page,
            )
            .unwrap();
            spliced.extend_from_slice(&page);
        }
        assert!(spliced == expected, "{run:?}");
    }

    // A damaged page is not handed out, nor are its neighbours in the run; other runs are.
    let (_, at) = map.splice_source(&runs[0]).unwrap().unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"X", at + PAGE_SIZE as u64 + 5).unwrap();
    let refused = map.splice_source(&runs[0]).map(|_| ());
    assert!(
        matches!(refused, Err(PageError::Corrupt { index: 0x11, .. })),
        "{refused:?}"
    );
    assert!(map.splice_source(&runs[1]).unwrap().is_some());
}
