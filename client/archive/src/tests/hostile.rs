//! Archives and indexes that are made to lead outside or to exhaust memory, and the file that an archive is written to.

use std::os::unix::fs::PermissionsExt;

use prost::Message;

use super::*;
use crate::index::{Content, Index, StoredFile};
use crate::{check_room, pack_into_file};

fn link(path: &str, kind: EntryType, target: &str) -> Header {
    let mut header = header(path, kind, 0o777, 0);
    header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target.as_bytes());
    header.set_cksum();
    header
}

fn with(add: impl FnOnce(&mut Builder<Vec<u8>>)) -> Vec<u8> {
    archive_of(|_| true, add)
}

/// Appends a path or a link target of any length in GNU's way.
fn append_long(archive: &mut Builder<Vec<u8>>, kind: EntryType, name: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_path("././@LongLink").unwrap();
    header.set_entry_type(kind);
    header.set_size(name.len() as u64);
    header.set_cksum();
    archive.append(&header, name).unwrap();
}

#[test]
fn long_names_are_refused() {
    let deep = "a/".repeat(50_000);
    for (kind, name) in [
        (EntryType::GNULongName, deep.as_str()),
        (EntryType::GNULongLink, deep.as_str()),
        (EntryType::GNULongName, &"n".repeat(4097)),
    ] {
        let refused = refusal(&with(|archive| {
            append_long(archive, kind, name.as_bytes());
            let header = link("l", EntryType::Symlink, "x");
            archive.append(&header, &b""[..]).unwrap();
        }));
        assert!(
            matches!(refused, ArchiveError::LongPath { .. }),
            "{kind:?}: {refused}"
        );
        assert!(refused.to_string().len() < 300);
    }
}

#[test]
fn a_hard_link_to_a_symbolic_link_is_refused() {
    let refused = refusal(&with(|archive| {
        let symlink = link("a/b/c/s", EntryType::Symlink, "../../../x");
        archive.append(&symlink, &b""[..]).unwrap();
        let hard = link("h", EntryType::Link, "a/b/c/s");
        archive.append(&hard, &b""[..]).unwrap();
    }));
    assert!(
        matches!(refused, ArchiveError::HardLink { .. }),
        "{refused}"
    );
    take_apart(
        &with(|archive| {
            let hard = link("h", EntryType::Link, "./config.dump");
            archive.append(&hard, &b""[..]).unwrap();
        }),
        ROOM,
    )
    .unwrap();
}

#[test]
fn headers_that_programs_read_differently_are_refused() {
    let ambiguous = |archive: &[u8], what: &str| {
        let refused = refusal(archive);
        assert!(
            matches!(refused, ArchiveError::Ambiguous { .. }),
            "{what}: {refused}"
        );
    };
    let member = |kind| link("member", kind, "config.dump");
    let records: [&[(&str, &[u8])]; 7] = [
        &[("path", b"inside"), ("path", b"../outside")],
        &[("linkpath", b"inside"), ("linkpath", b"../outside")],
        &[("size", b"0"), ("size", b"512")],
        &[("mtime", b"1"), ("mtime", b"2")],
        &[("path", b"")],
        &[("size", b"+0")],
        &[("size", b"99999999999999999999")],
    ];
    for records in records {
        let kind = match records[0].0 {
            "linkpath" => EntryType::Symlink,
            "path" => EntryType::Directory,
            _ => EntryType::Regular,
        };
        let archive = with(|archive| {
            archive
                .append_pax_extensions(records.iter().copied())
                .unwrap();
            archive.append(&member(kind), &b""[..]).unwrap();
        });
        ambiguous(&archive, &format!("{records:?}"));
    }
    for (long, key) in [
        (EntryType::GNULongName, "path"),
        (EntryType::GNULongLink, "linkpath"),
    ] {
        let archive = with(|archive| {
            append_long(archive, long, b"inside\0");
            archive
                .append_pax_extensions([(key, &b"../outside"[..])])
                .unwrap();
            archive
                .append(&member(EntryType::Symlink), &b""[..])
                .unwrap();
        });
        ambiguous(&archive, key);
    }
    // Go takes this for a directory, and what follows for its headers.
    let refused = refusal(&with(|archive| {
        let header = header("directory/", EntryType::Regular, 0o600, 512);
        archive.append(&header, &[0; 512][..]).unwrap();
    }));
    assert!(matches!(refused, ArchiveError::Special { .. }), "{refused}");
}

/// Puts an archive together from a hand-made index, and a file `file.img` with 512 bytes.
fn hand_made(parts: Vec<Content>) -> ArchiveError {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file.img"), [b'f'; 512]).unwrap();
    let index = Index::new(parts).encode_to_vec();
    fs::write(directory.path().join(INDEX_NAME), index).unwrap();
    let mut output = Vec::new();
    let packed = pack(
        directory.path(),
        ArchiveCompression::None,
        &mut output,
        &mut |_| true,
    );
    assert_eq!(output, b"", "written before it was checked");
    packed.expect_err("a bad index")
}

#[test]
fn an_index_is_checked_as_an_archive_is() {
    let file = || {
        Content::File(StoredFile {
            name: "file.img".to_owned(),
            len_bytes: 512,
            crc32: crc32fast::hash(&[b'f'; 512]),
        })
    };
    let bytes = |header: &Header| Content::Bytes(header.as_bytes().to_vec());
    let end = || Content::Bytes(vec![0; 1024]);

    let refused = hand_made(vec![bytes(&link("l", EntryType::Symlink, "/etc")), end()]);
    assert!(
        matches!(refused, ArchiveError::OutsideLink { .. }),
        "{refused}"
    );
    let outside = header("../x", EntryType::Regular, 0o600, 512);
    let refused = hand_made(vec![bytes(&outside), file(), end()]);
    assert!(
        matches!(refused, ArchiveError::OutsidePath { .. }),
        "{refused}"
    );
    let refused = hand_made(vec![bytes(&header("d", EntryType::Char, 0o600, 0)), end()]);
    assert!(matches!(refused, ArchiveError::Special { .. }), "{refused}");

    // Headers in a file, and contents among the headers.
    let inside = header("x", EntryType::Regular, 0o600, 512);
    for parts in [
        vec![file(), end()],
        vec![bytes(&inside), file(), file(), end()],
        vec![bytes(&inside), end(), end()],
    ] {
        let refused = hand_made(parts);
        assert!(matches!(refused, ArchiveError::BadIndex), "{refused}");
    }
    let refused = hand_made(vec![bytes(&inside), file(), end(), bytes(&inside)]);
    assert!(matches!(refused, ArchiveError::BehindEnd), "{refused}");
}

#[test]
fn pagemaps_count_twice_and_headers_count() {
    let promising = |path: &str, bytes: u64, room_bytes: u64| {
        let tar = [
            header(path, EntryType::Regular, 0o600, bytes).as_bytes(),
            &sound()[..],
        ]
        .concat();
        take_apart(&tar, room_bytes).expect_err("too large")
    };
    let refused = promising("checkpoint/pagemap-9.img", ROOM / 3 * 2, ROOM);
    assert!(matches!(refused, ArchiveError::NoRoom { .. }), "{refused}");
    let refused = promising("checkpoint/pagemap-9.img", (1 << 30) + 1, 1 << 40);
    assert!(
        matches!(
            refused,
            ArchiveError::TooLarge {
                limit: 0x4000_0000,
                ..
            }
        ),
        "{refused}"
    );
    let headers = with(|archive| {
        for number in 0..800 {
            let header = header(&format!("d{number}"), EntryType::Directory, 0o700, 0);
            archive.append(&header, &b""[..]).unwrap();
        }
    });
    let refused = take_apart(&headers, ROOM).expect_err("too large");
    assert!(matches!(refused, ArchiveError::NoRoom { .. }), "{refused}");
    take_apart(&headers, 2 * ROOM).unwrap();

    let here = std::env::temp_dir();
    let refused = check_room(&here, true, u64::MAX);
    assert!(matches!(refused, Err(ArchiveError::NoRoomToPack { .. })));
    check_room(&here, true, 0).unwrap();
}

#[test]
fn an_archive_has_no_name_until_it_is_complete() {
    let directory = take_apart(&sound(), ROOM).unwrap();
    let images = directory.path().join("images");
    // tmpfs has files without a name.
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = place.path().join("back.tar");
    let names = || fs::read_dir(place.path()).unwrap().count();
    let write = |force, before| {
        pack_into_file(&images, ArchiveCompression::None, &path, force, &mut |_| {
            assert_eq!(names(), before);
            true
        })
    };
    write(false, 0).unwrap();
    assert!(fs::read(&path).unwrap() == sound());
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    fs::write(&path, "another").unwrap();
    let refused = write(false, 1);
    assert!(matches!(refused, Err(ArchiveError::Io { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"another");
    write(true, 1).unwrap();
    assert!(fs::read(&path).unwrap() == sound());
    assert_eq!(names(), 1);
}
