//! Archives that are taken apart and put together, sound ones and bad ones.

use std::fs;
use std::io::{Cursor, Read, Write};
use std::path::Path;

use permafrost_protocol::images::{PagemapEntry, PagemapWriter};
use permafrost_protocol::pageserver::PE_PRESENT;
use tar::{Builder, EntryType, Header};

use crate::{ArchiveCompression, ArchiveError, ArchiveLimits, INDEX_NAME, pack, unpack};

mod hostile;

/// Room in the tests, bytes.
const ROOM: u64 = 1 << 20;

/// Number of pages of the process.
const PAGES: usize = 3;

fn pagemap(pages_id: u32) -> Vec<u8> {
    let mut pagemap = PagemapWriter::new(pages_id);
    for place in 0..PAGES as u64 {
        pagemap.push(PagemapEntry {
            vaddr: 0x10000 + place * 0x2000,
            nr_pages: 1,
            flags: PE_PRESENT,
        });
    }
    pagemap.finish()
}

/// Members of a sound archive: path, kind, mode, contents.
fn members() -> Vec<(&'static str, EntryType, u32, Vec<u8>)> {
    let file = EntryType::Regular;
    vec![
        ("artifacts/", EntryType::Directory, 0o755, Vec::new()),
        ("config.dump", file, 0o600, b"{}".to_vec()),
        ("spec.dump", file, 0o600, b"{\"a\":1}".to_vec()),
        ("stats-dump", file, 0o644, b"statistics".to_vec()),
        ("checkpoint/", EntryType::Directory, 0o700, Vec::new()),
        (
            "checkpoint/inventory.img",
            file,
            0o644,
            b"inventory".to_vec(),
        ),
        ("checkpoint/pagemap-7.img", file, 0o644, pagemap(1)),
        ("checkpoint/pages-1.img", file, 0o644, vec![7; PAGES * 4096]),
        // Names of the index's own, which an archive may have for all that.
        ("checkpoint/archive.img", file, 0o640, b"theirs".to_vec()),
        (
            "checkpoint/archive-1.img",
            file,
            0o604,
            b"theirs, too".to_vec(),
        ),
        ("rootfs-diff.tar", file, 0o600, vec![9; 70_000]),
        ("empty", file, 0o600, Vec::new()),
    ]
}

fn header(path: &str, kind: EntryType, mode: u32, bytes: u64) -> Header {
    let mut header = Header::new_ustar();
    // Not `set_path`: it refuses what is tested here.
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(1234);
    header.set_mtime(1_795_223_069);
    header.set_size(bytes);
    header.set_cksum();
    header
}

/// Returns an archive of the sound members that `keep` keeps, and of what `add` adds behind them.
fn archive_of(keep: impl Fn(&str) -> bool, add: impl FnOnce(&mut Builder<Vec<u8>>)) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    for (path, kind, mode, contents) in members() {
        if keep(path) {
            let header = header(path, kind, mode, contents.len() as u64);
            archive.append(&header, &contents[..]).unwrap();
        }
    }
    add(&mut archive);
    archive.into_inner().unwrap()
}

fn sound() -> Vec<u8> {
    archive_of(|_| true, |_| {})
}

fn compressed(tar: &[u8], compression: ArchiveCompression) -> Vec<u8> {
    let mut output = crate::compression::Output::new(compression, Vec::new()).unwrap();
    output.write_all(tar).unwrap();
    output.finish().unwrap()
}

fn take_apart(archive: &[u8], room_bytes: u64) -> Result<tempfile::TempDir, ArchiveError> {
    let directory = tempfile::tempdir().unwrap();
    let images = directory.path().join("images");
    fs::create_dir(&images).unwrap();
    let unpacked = unpack(
        Cursor::new(archive),
        &images,
        &ArchiveLimits::with_room(room_bytes),
    );
    let beside: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
    assert_eq!(beside.len(), 1, "something was written beside the images");
    unpacked.map(|_| directory)
}

fn refusal(archive: &[u8]) -> ArchiveError {
    take_apart(archive, ROOM).expect_err("a bad archive")
}

fn put_together(images: &Path, compression: ArchiveCompression) -> Result<Vec<u8>, ArchiveError> {
    let mut output = Vec::new();
    pack(images, compression, &mut output, &mut |_| true)?;
    Ok(output)
}

#[test]
fn an_archive_comes_back_byte_for_byte_whatever_its_compression() {
    let tar = archive_of(
        |_| true,
        |archive| {
            // A path that takes a header of its own, links that stay inside, and bytes that no name has.
            let long = format!("checkpoint/{}/x.img", "l".repeat(180));
            let mut gnu = Header::new_gnu();
            gnu.set_mode(0o600);
            gnu.set_size(4);
            archive.append_data(&mut gnu, &long, &b"long"[..]).unwrap();
            let attributes = [("SCHILY.xattr.user.a", &b"\0\x01"[..]), ("mtime", b"1.5")];
            archive.append_pax_extensions(attributes).unwrap();
            archive
                .append(
                    &header("with-attributes", EntryType::Regular, 0o600, 1),
                    &b"x"[..],
                )
                .unwrap();
            let mut link = Header::new_gnu();
            link.set_entry_type(EntryType::Symlink);
            link.set_size(0);
            archive
                .append_link(&mut link, "checkpoint/parent", "../pre-checkpoint")
                .unwrap();
        },
    );
    for compression in [
        ArchiveCompression::None,
        ArchiveCompression::Gzip,
        ArchiveCompression::Zstd,
    ] {
        let directory = take_apart(&compressed(&tar, compression), ROOM).unwrap();
        let images = directory.path().join("images");
        assert!(fs::read(images.join("pages-1.img")).unwrap() == [7; PAGES * 4096]);
        assert_eq!(fs::read(images.join("stats-dump")).unwrap(), b"statistics");
        // A store writes a pagemap with other runs, and pages with holes; the archive does not show it.
        fs::write(images.join("pagemap-7.img"), b"rewritten").unwrap();
        assert!(put_together(&images, ArchiveCompression::None).unwrap() == tar);
        let again = put_together(&images, ArchiveCompression::Zstd).unwrap();
        let again = take_apart(&again, ROOM);
        assert!(again.is_ok(), "{again:?}");
    }
}

#[test]
fn every_file_is_private_and_has_a_name_that_an_import_takes() {
    use std::os::unix::fs::PermissionsExt;
    let directory = take_apart(&sound(), ROOM).unwrap();
    for entry in fs::read_dir(directory.path().join("images")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        assert_eq!(
            entry.metadata().unwrap().permissions().mode() & 0o777,
            0o600,
            "{name}"
        );
        assert!(name.ends_with(".img") || name == "stats-dump", "{name}");
    }
}

#[test]
fn paths_and_kinds_that_do_not_belong_are_refused() {
    let with = |path: &str, kind| {
        let header = header(path, kind, 0o644, 0);
        refusal(&archive_of(
            |_| true,
            |archive| archive.append(&header, &b""[..]).unwrap(),
        ))
    };
    for path in ["/etc/passwd", "../x", "checkpoint/../../x", "a/..", ""] {
        let refused = with(path, EntryType::Regular);
        let outside = matches!(refused, ArchiveError::OutsidePath { .. });
        let nameless = path.is_empty() && matches!(refused, ArchiveError::Special { .. });
        assert!(outside || nameless, "{path}: {refused}");
    }
    for kind in [
        EntryType::Char,
        EntryType::Block,
        EntryType::Fifo,
        EntryType::Continuous,
        EntryType::XGlobalHeader,
        EntryType::new(b'Z'),
    ] {
        let refused = with("x", kind);
        assert!(
            matches!(refused, ArchiveError::Special { .. }),
            "{kind:?}: {refused}"
        );
    }
    let mut sparse = Header::new_gnu();
    sparse.set_path("x").unwrap();
    sparse.set_entry_type(EntryType::GNUSparse);
    sparse.set_size(0);
    sparse.as_gnu_mut().unwrap().set_real_size(0);
    sparse.set_cksum();
    let refused = refusal(&archive_of(
        |_| true,
        |archive| {
            archive.append(&sparse, &b""[..]).unwrap();
        },
    ));
    assert!(
        matches!(
            refused,
            ArchiveError::Special {
                kind: "sparse file",
                ..
            }
        ),
        "{refused}"
    );
    assert!(matches!(
        with("config.dump", EntryType::Regular),
        ArchiveError::Twice { .. }
    ));
}

#[test]
fn links_that_leave_the_archive_are_refused() {
    let with = |path: &str, kind, target: &str| {
        let mut header = header(path, kind, 0o777, 0);
        header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        archive_of(
            |_| true,
            |archive| archive.append(&header, &b""[..]).unwrap(),
        )
    };
    for (path, kind, target) in [
        ("l", EntryType::Symlink, "/etc/passwd"),
        ("l", EntryType::Symlink, "../x"),
        ("checkpoint/l", EntryType::Symlink, "../../x"),
        ("checkpoint/l", EntryType::Symlink, "x/../../.."),
        ("l", EntryType::Link, "/etc/passwd"),
        ("checkpoint/l", EntryType::Link, "../x"),
    ] {
        let refused = refusal(&with(path, kind, target));
        assert!(
            matches!(refused, ArchiveError::OutsideLink { .. }),
            "{path} {target}: {refused}"
        );
    }
    let mut link = header("x", EntryType::Symlink, 0o777, 0);
    link.as_mut_bytes()[157] = b'.';
    link.set_cksum();
    let beneath = archive_of(
        |_| true,
        |archive| {
            archive.append(&link, &b""[..]).unwrap();
            archive
                .append(&header("x/y", EntryType::Regular, 0o600, 0), &b""[..])
                .unwrap();
        },
    );
    assert!(matches!(
        refusal(&beneath),
        ArchiveError::BeneathLink { .. }
    ));
    // An inventory that is a link is none.
    let linked = archive_of(
        |path| !path.ends_with("inventory.img"),
        |archive| {
            let mut link = header("checkpoint/inventory.img", EntryType::Link, 0o600, 0);
            link.as_mut_bytes()[157..168].copy_from_slice(b"config.dump");
            link.set_cksum();
            archive.append(&link, &b""[..]).unwrap();
        },
    );
    assert!(matches!(refusal(&linked), ArchiveError::Missing { .. }));
}

#[test]
fn bombs_are_refused_by_what_their_headers_promise() {
    // Never written: only the header is there.
    let promising = |bytes| {
        let mut header = Header::new_gnu();
        header.set_path("rootfs-diff.tar.2").unwrap();
        header.set_size(bytes);
        header.set_cksum();
        let tar = archive_of(|_| true, |_| {});
        [header.as_bytes(), &tar[..]].concat()
    };
    assert!(matches!(
        refusal(&promising(ROOM + 1)),
        ArchiveError::NoRoom { .. }
    ));
    assert!(matches!(
        refusal(&promising(u64::MAX >> 1)),
        ArchiveError::TooLarge { .. }
    ));
    // Sizes add up.
    assert!(matches!(
        take_apart(&sound(), 40_000).expect_err("too large"),
        ArchiveError::NoRoom {
            room_bytes: 40_000,
            ..
        }
    ));
    // 40,000 times as large as the file that it is in.
    let zeros = archive_of(
        |_| true,
        |archive| {
            let header = header("zeros", EntryType::Regular, 0o600, 40 << 20);
            archive
                .append(&header, std::io::repeat(0).take(40 << 20))
                .unwrap();
        },
    );
    let bomb = compressed(&zeros, ArchiveCompression::Zstd);
    assert!(bomb.len() < 64 << 10);
    assert!(matches!(refusal(&bomb), ArchiveError::NoRoom { .. }));

    let tar = sound();
    let mut limits = ArchiveLimits::with_room(ROOM);
    limits.members = members().len() - 1;
    let directory = tempfile::tempdir().unwrap();
    let refused = unpack(Cursor::new(tar), directory.path(), &limits).unwrap_err();
    assert!(matches!(refused, ArchiveError::TooMany { .. }));
}

#[test]
fn headers_without_end_are_refused() {
    // A name of 1 GiB, made as it is read.
    let mut long = Header::new_gnu();
    long.set_entry_type(EntryType::GNULongName);
    long.set_path("././@LongLink").unwrap();
    long.set_size(1 << 30);
    long.set_cksum();
    let archive = Cursor::new(long.as_bytes().to_vec()).chain(std::io::repeat(b'n').take(1 << 30));
    let directory = tempfile::tempdir().unwrap();
    let refused = unpack(archive, directory.path(), &ArchiveLimits::with_room(ROOM)).unwrap_err();
    assert!(matches!(refused, ArchiveError::Headers { .. }), "{refused}");
}

#[test]
fn an_archive_that_ends_early_is_refused_wherever_it_ends() {
    let tar = sound();
    let end = tar.len() - 1024;
    for cut in (0..=end)
        .step_by(509)
        .chain([end - 512, end - 1, end, end + 1, end + 511])
    {
        let refused = refusal(&tar[..cut]);
        let early = matches!(
            refused,
            ArchiveError::Truncated { .. } | ArchiveError::Damaged { .. }
        );
        assert!(early, "{cut}: {refused}");
    }
    for compression in [ArchiveCompression::Gzip, ArchiveCompression::Zstd] {
        let bytes = compressed(&tar, compression);
        for cut in [20, bytes.len() / 2, bytes.len() - 1] {
            let refused = refusal(&bytes[..cut]);
            let early = matches!(
                refused,
                ArchiveError::Truncated { .. } | ArchiveError::Damaged { .. }
            );
            assert!(early, "{compression:?} {cut}: {refused}");
        }
    }
    assert!(matches!(
        refusal(&[tar, vec![1; 512]].concat()),
        ArchiveError::BehindEnd
    ));
}

#[test]
fn other_files_are_refused() {
    for (bytes, expected) in [
        (&b"\xfd7zXZ\0rest"[..], "xz"),
        (b"BZh91AY", "bzip2"),
        (b"\x04\x22\x4d\x18", "lz4"),
    ] {
        match refusal(bytes) {
            ArchiveError::Compression { found } => assert_eq!(found, expected),
            other => panic!("{other}"),
        }
    }
    let text = b"no archive at all ".repeat(100);
    assert!(matches!(refusal(&text), ArchiveError::NotTar));
    assert!(matches!(
        refusal(&compressed(&text, ArchiveCompression::Gzip)),
        ArchiveError::NotTar
    ));
    assert!(matches!(refusal(b""), ArchiveError::Truncated { .. }));
    let mut damaged = compressed(&sound(), ArchiveCompression::Zstd);
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0x55;
    assert!(take_apart(&damaged, ROOM).is_err());
}

#[test]
fn members_that_every_checkpoint_has_must_be_there() {
    for path in ["checkpoint/inventory.img", "config.dump", "spec.dump"] {
        match refusal(&archive_of(|member| member != path, |_| {})) {
            ArchiveError::Missing { path: missing } => assert_eq!(missing, path),
            other => panic!("{other}"),
        }
    }
    let without_pages = archive_of(|path| path != "checkpoint/pages-1.img", |_| {});
    assert!(matches!(
        refusal(&without_pages),
        ArchiveError::PagesDiffer { bytes: 0, .. }
    ));
    for pages in [PAGES * 4096 - 1, (PAGES + 1) * 4096] {
        let other = archive_of(
            |path| path != "checkpoint/pages-1.img",
            |archive| {
                let header = header(
                    "checkpoint/pages-1.img",
                    EntryType::Regular,
                    0o600,
                    pages as u64,
                );
                archive.append(&header, &vec![1; pages][..]).unwrap();
            },
        );
        assert!(matches!(refusal(&other), ArchiveError::PagesDiffer { .. }));
    }
    let shared = archive_of(
        |_| true,
        |archive| {
            let contents = pagemap(1);
            let header = header(
                "checkpoint/pagemap-8.img",
                EntryType::Regular,
                0o600,
                contents.len() as u64,
            );
            archive.append(&header, &contents[..]).unwrap();
        },
    );
    assert!(matches!(refusal(&shared), ArchiveError::SharedPages { .. }));
    let broken = archive_of(
        |path| path != "checkpoint/pagemap-7.img",
        |archive| {
            let header = header("checkpoint/pagemap-7.img", EntryType::Regular, 0o600, 7);
            archive.append(&header, &b"nothing"[..]).unwrap();
        },
    );
    assert!(matches!(refusal(&broken), ArchiveError::Pagemap { .. }));
}

#[test]
fn images_that_are_not_as_stored_make_no_archive() {
    let directory = take_apart(&sound(), ROOM).unwrap();
    let images = directory.path().join("images");
    let pages = images.join("pages-1.img");
    let whole = fs::read(&pages).unwrap();
    let altered = || {
        let packed = put_together(&images, ArchiveCompression::None);
        assert!(
            matches!(packed, Err(ArchiveError::Altered { .. })),
            "{packed:?}"
        );
    };
    let mut flipped = whole.clone();
    flipped[5000] ^= 1;
    for bytes in [flipped, whole[1..].to_vec(), [&whole[..], b"x"].concat()] {
        fs::write(&pages, bytes).unwrap();
        altered();
    }
    fs::remove_file(&pages).unwrap();
    altered();
    fs::write(&pages, &whole).unwrap();
    put_together(&images, ArchiveCompression::None).unwrap();
    let stopped = pack(&images, ArchiveCompression::None, Vec::new(), &mut |_| {
        false
    });
    assert!(matches!(stopped, Err(ArchiveError::Interrupted)));
    fs::write(images.join(INDEX_NAME), b"\xff\xff").unwrap();
    assert!(matches!(
        put_together(&images, ArchiveCompression::None),
        Err(ArchiveError::BadIndex)
    ));
    fs::remove_file(images.join(INDEX_NAME)).unwrap();
    assert!(matches!(
        put_together(&images, ArchiveCompression::None),
        Err(ArchiveError::NoArchive)
    ));
}

#[test]
fn a_changed_byte_is_refused_or_comes_back_as_it_is() {
    let tar = sound();
    let check = |changed: &[u8], at: usize| {
        if let Ok(directory) = take_apart(changed, ROOM) {
            let images = directory.path().join("images");
            let again = put_together(&images, ArchiveCompression::None).unwrap();
            assert!(again == changed, "byte {at}");
        }
    };
    for at in (0..tar.len()).step_by(257) {
        let mut changed = tar.clone();
        changed[at] ^= 0x55;
        check(&changed, at);
    }
    // In the header of the second member, with a checksum that fits: what the fields say is believed.
    let header_at = 512;
    for at in 0..512 {
        let mut changed = tar.clone();
        changed[header_at + at] ^= 1;
        let mut header = Header::new_old();
        header
            .as_mut_bytes()
            .copy_from_slice(&changed[header_at..header_at + 512]);
        header.set_cksum();
        changed[header_at..header_at + 512].copy_from_slice(header.as_bytes());
        check(&changed, header_at + at);
    }
}
