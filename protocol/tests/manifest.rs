//! Manifests: written ones are read back, and those that break a rule are refused when written and when read.

use permafrost_protocol::manifest::{
    AddressSpace, DumpedProcess, Image, JobNameError, Kind, MAX_MANIFEST_BYTES, MAX_SMALL_IMAGES,
    Manifest, ManifestError, Origin, SpaceType, VERSION,
};
use proptest::prelude::*;
use prost::Message;

fn image(name: &str) -> Image {
    Image {
        name: name.into(),
        len_bytes: 86,
        map_root: vec![1; 32],
        map_digest: vec![3; 32],
        offset_bytes: 0,
    }
}

fn space(space_type: SpaceType, id: u64, pages_id: u32) -> AddressSpace {
    AddressSpace {
        space_type: space_type.into(),
        id,
        pages_id,
        map_root: vec![2; 32],
        pages: 100,
        stored_pages: 50,
        zero_pages: 30,
        parent_pages: 20,
        sibling_pages: 3,
        shared_pages: 4,
        map_digest: vec![4; 32],
    }
}

fn manifest() -> Manifest {
    Manifest {
        version: VERSION,
        job: "tests/one".into(),
        generation: 3,
        parent_generation: 2,
        created_unix_ms: 1_800_000_000_000,
        kind: Kind::Full.into(),
        origin: Some(Origin {
            host: "node1".into(),
            boot_id: "7f3e".into(),
            pid: 42,
            start_ticks: 99,
            tracked: true,
            restore_options: vec!["--shell-job".into()],
            criu_version: "4.2.1".into(),
            resident_bytes: 4 << 20,
            dirty_pages: Some(0),
            program: "sleep".into(),
            worked_us: 3_600_000_000,
            carried_us: 1_800_000_000,
            processes: vec![DumpedProcess {
                pid: 42,
                program: "sleep".into(),
                parent: 0,
                executable: "/usr/bin/sleep".into(),
                mappings: vec![0x5555, 33, 0x7fff, 2],
            }],
            pages_begun_unix_ms: 1_800_000_000_000,
            pages_closed_unix_ms: 1_800_000_000_100,
        }),
        images: vec![
            image("inventory.img"),
            image("core-42.img"),
            image("stats-dump"),
        ],
        spaces: vec![
            space(SpaceType::SharedMemory, 1141, 65_537),
            space(SpaceType::Process, 42, 65_538),
            space(SpaceType::Process, 1141, 65_539),
        ],
        session: "0123456789abcdef0123456789abcdef".into(),
        commit_deadline_ms: 30_000,
        added_bytes: 1 << 20,
        content_digest: vec![5; 32],
        taken_by: "agent c7".into(),
    }
}

#[test]
fn a_manifest_that_asks_for_an_option_that_runs_code_is_read_and_never_written() {
    let mut odd = manifest();
    odd.origin
        .get_or_insert_default()
        .restore_options
        .push("--action-script=/tmp/evil".into());
    let error = odd.encode_checked().unwrap_err();
    assert!(
        matches!(error, ManifestError::RestoreOption(_)),
        "{error:?}"
    );
    assert!(error.to_string().contains("--action-script=/tmp/evil"));
    // An older build has written such a manifest: its checkpoint can still be listed, removed, and restored by a user
    // who gives the option.
    assert_eq!(Manifest::decode_checked(&odd.encode_to_vec()), Ok(odd));

    let client = Manifest {
        taken_by: "agent c7\u{1b}[2J".into(),
        ..manifest()
    };
    client.encode_checked().unwrap_err();
    Manifest::decode_checked(&client.encode_to_vec()).unwrap_err();
}

#[test]
fn a_manifest_round_trips() {
    let bytes = manifest().encode_checked().unwrap();
    assert_eq!(Manifest::decode_checked(&bytes), Ok(manifest()));
}

#[test]
fn a_parked_one_has_no_number_and_needs_no_job() {
    for job in ["", "meant-for"] {
        let parked = Manifest {
            kind: Kind::Parked.into(),
            generation: 0,
            job: job.into(),
            ..manifest()
        };
        assert_eq!(parked.check(), Ok(()));
    }
    let numbered = Manifest {
        kind: Kind::Parked.into(),
        ..manifest()
    };
    assert!(matches!(
        numbered.check(),
        Err(ManifestError::Generation { generation: 3, .. })
    ));
}

#[test]
fn fields_of_a_newer_minor_format_are_skipped_but_not_a_newer_version() {
    let mut bytes = manifest().encode_to_vec();
    bytes.extend([0xf8, 0x07, 1]); // field 127
    assert_eq!(Manifest::decode_checked(&bytes), Ok(manifest()));
    let newer = Manifest {
        version: VERSION + 1,
        ..manifest()
    };
    let expected = ManifestError::NewerVersion {
        version: VERSION + 1,
    };
    assert_eq!(
        Manifest::decode_checked(&newer.encode_to_vec()),
        Err(expected.clone())
    );
    assert_eq!(newer.encode_checked(), Err(expected));
}

#[test]
fn each_rule_has_its_own_error() {
    let refused = |change: fn(&mut Manifest)| {
        let mut changed = manifest();
        change(&mut changed);
        let error = changed.encode_checked().unwrap_err();
        assert_eq!(
            Manifest::decode_checked(&changed.encode_to_vec()),
            Err(error.clone()),
            "either side refuses"
        );
        error
    };
    assert_eq!(refused(|m| m.version = 0), ManifestError::NoVersion);
    assert_eq!(
        refused(|m| m.kind = 9),
        ManifestError::UnknownKind { kind: 9 }
    );
    assert_eq!(
        refused(|m| m.job.clear()),
        ManifestError::JobName(JobNameError::Empty)
    );
    assert_eq!(
        refused(|m| m.job = "../x".into()),
        ManifestError::JobName(JobNameError::BadStart { first: '.' })
    );
    for change in [(|m| m.generation = 0) as fn(&mut Manifest), |m| {
        m.parent_generation = 3
    }] {
        assert!(matches!(
            refused(change),
            ManifestError::Generation {
                kind: Kind::Full,
                ..
            }
        ));
    }
    for change in [(|m| m.session.push('0')) as fn(&mut Manifest), |m| {
        m.session = "g".repeat(32)
    }] {
        assert!(matches!(refused(change), ManifestError::SessionId { .. }));
    }
    for name in ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "a\nb"] {
        let mut changed = manifest();
        changed.images[1].name = name.into();
        assert_eq!(
            changed.check(),
            Err(ManifestError::ImageName { name: name.into() })
        );
    }
    let mut changed = manifest();
    changed.images[1].name = "x".repeat(256);
    assert!(matches!(
        changed.check(),
        Err(ManifestError::ImageName { .. })
    ));
    for (change, name) in [
        (
            (|m| m.images[1].name = "inventory.img".into()) as fn(&mut Manifest),
            "inventory.img",
        ),
        (
            |m| m.images[1].name = "pagemap-42.img".into(),
            "pagemap-42.img",
        ),
        (
            |m| m.images[1].name = "pages-65537.img".into(),
            "pages-65537.img",
        ),
        (|m| m.spaces[1].id = 1141, "pagemap-1141.img"),
        (|m| m.spaces[1].pages_id = 65_537, "pages-65537.img"),
    ] {
        assert_eq!(
            refused(change),
            ManifestError::DuplicateFile { name: name.into() }
        );
    }
    assert_eq!(
        refused(|m| m.spaces[1].space_type = 2),
        ManifestError::BadSpace {
            space_type: 2,
            id: 42
        }
    );
    assert_eq!(
        refused(|m| m.spaces[1].id = 1 << 32),
        ManifestError::BadSpace {
            space_type: 0,
            id: 1 << 32
        }
    );
    assert_eq!(
        refused(|m| m.spaces[0].id = 1 << 56),
        ManifestError::BadSpace {
            space_type: 1,
            id: 1 << 56
        }
    );
    assert_eq!(
        refused(|m| m.images[0].map_root.push(0)),
        ManifestError::MapRoot {
            of: "inventory.img".into(),
            len_bytes: 33
        }
    );
    assert_eq!(
        refused(|m| m.spaces[0].map_root.clear()),
        ManifestError::MapRoot {
            of: "pagemap-shmem-1141.img".into(),
            len_bytes: 0
        }
    );
}

#[test]
fn the_images_of_the_most_threads_fit_a_manifest_and_what_fits_no_message_is_refused() {
    let named = |pattern: &str| Manifest {
        images: (0..MAX_SMALL_IMAGES)
            .map(|n| image(&format!("{pattern}{n:07}.img")))
            .collect(),
        ..manifest()
    };
    assert!(named("core-").encode_checked().unwrap().len() <= MAX_MANIFEST_BYTES);
    let refused = named(&"x".repeat(40)).encode_checked().unwrap_err();
    assert!(
        matches!(refused, ManifestError::TooLong { len_bytes } if len_bytes > MAX_MANIFEST_BYTES),
        "{refused}"
    );
    assert!(refused.to_string().contains("dump subtrees"), "{refused}");
}

#[test]
fn the_map_of_packed_images_is_named_once() {
    let mut packed = manifest();
    packed.images = (0..20).map(|n| image(&format!("core-{n}.img"))).collect();
    for (image, at) in packed.images.iter_mut().zip((0..).step_by(100)) {
        image.offset_bytes = at;
    }
    let bytes = packed.encode_checked().unwrap();
    assert_eq!(Manifest::decode_checked(&bytes), Ok(packed.clone()));
    let mut apart = packed.clone();
    apart
        .images
        .iter_mut()
        .zip(0..)
        .for_each(|(image, n)| image.map_root[0] = n);
    assert!(bytes.len() + 19 * 34 <= apart.encode_checked().unwrap().len());
}

#[test]
fn a_manifest_cut_short_is_refused_or_has_less_in_it() {
    let bytes = manifest().encode_checked().unwrap();
    for cut in 0..bytes.len() {
        assert_ne!(
            Manifest::decode_checked(&bytes[..cut]),
            Ok(manifest()),
            "cut at {cut}"
        );
    }
}

#[test]
fn a_flipped_bit_is_refused_or_seen() {
    // The region's checksums catch these; here it only has to be sure that none panics or passes unseen.
    let original = manifest();
    let mut bytes = original.encode_checked().unwrap();
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        let same = Manifest::decode_checked(&bytes).as_ref() == Ok(&original);
        // Protobuf reads any number but 0 as true.
        let in_a_bool = bytes[bit / 8] ^ 1 << (bit % 8) == 1;
        assert!(!same || in_a_bool, "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        if let Ok(read) = Manifest::decode_checked(&bytes) {
            prop_assert_eq!(Manifest::decode_checked(&read.encode_checked().unwrap()), Ok(read));
        }
    }

    #[test]
    fn any_number_of_images_and_spaces_round_trips(images in 0_usize..40, pids in proptest::collection::btree_set(1_u32..1000, 0..40)) {
        let images = (0..images).map(|n| image(&format!("file-{n}.img"))).collect();
        let spaces = pids.iter().map(|pid| space(SpaceType::Process, u64::from(*pid), *pid)).collect();
        let written = Manifest { images, spaces, ..manifest() };
        prop_assert_eq!(Manifest::decode_checked(&written.encode_checked().unwrap()), Ok(written));
    }
}
