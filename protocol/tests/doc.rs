//! Comparison of docs/protocol.md with the code.

use std::collections::BTreeMap;

use permafrost_protocol::control::{ErrorCode, MAX_MESSAGE_BYTES, Reply, Request, reply, request};
use permafrost_protocol::images::{
    COMMON_MAGIC, FILES_MAGIC, FIRST_SERVED_PAGES_ID, IMAGES_V1_1, INVENTORY_MAGIC, MM_MAGIC,
    PAGEMAP_MAGIC, PSTREE_MAGIC, PagemapEntry, PagemapWriter, SERVICE_MAGIC, STATS_MAGIC,
};
use permafrost_protocol::manifest::{self, MAX_JOB_NAME_BYTES};
use permafrost_protocol::pageserver::{
    Dialect, Frame, MAX_ADDRESS, MAX_SPACES, PE_LAZY, PE_PARENT, PE_PRESENT, command,
};
use permafrost_protocol::versions::Interface;
use permafrost_protocol::wire::frame::{
    HEADER_BYTES, Kind, MAX_IMAGE_BYTES, MAX_PAGES, MAX_PAYLOAD_BYTES, PREAMBLE_BYTES,
};
use permafrost_protocol::wire::receiver::{ACKNOWLEDGE_BYTES, ACKNOWLEDGE_FRAMES, MAX_IMAGES};
use permafrost_protocol::wire::sender::{DEFAULT_WINDOW_BYTES, FRAME_COST_BYTES, MIN_WINDOW_BYTES};
use permafrost_protocol::wire::{self, message};
use prost::Message;

const DOC: &str = include_str!("../../docs/protocol.md");

/// Rows of the table whose header begins with these cells.
fn table(header: &[&str]) -> Vec<Vec<&'static str>> {
    let cells = |line: &'static str| -> Vec<&'static str> {
        line.trim_matches('|')
            .split('|')
            .map(|cell| cell.trim().trim_matches('`'))
            .collect()
    };
    let mut lines = DOC
        .lines()
        .skip_while(|line| !line.starts_with('|') || !cells(line).starts_with(header));
    assert!(lines.next().is_some(), "no table {header:?}");
    lines
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .map(cells)
        .collect()
}

/// Returns two columns of a table, as name and number.
fn numbers(header: &[&str], name: usize, number: usize) -> BTreeMap<&'static str, u64> {
    let parse = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).expect("a hexadecimal number"),
        None => text.parse().expect("a number"),
    };
    table(header)
        .iter()
        .map(|row| (row[name], parse(row[number])))
        .collect()
}

#[test]
fn commands_and_flags() {
    let commands = [
        ("ADD", command::ADD),
        ("HOLE", command::HOLE),
        ("OPEN", command::OPEN),
        ("OPEN2", command::OPEN2),
        ("PARENT", command::PARENT),
        ("ADD_F", command::ADD_F),
        ("GET", command::GET),
        ("ADD_F_COMPRESSED", command::ADD_F_COMPRESSED),
        ("CLOSE", command::CLOSE),
        ("FORCE_CLOSE", command::FORCE_CLOSE),
    ];
    assert_eq!(
        numbers(&["command", "name"], 1, 0),
        commands.map(|(name, number)| (name, number.into())).into()
    );
    let flags = [
        ("PE_PARENT", PE_PARENT),
        ("PE_LAZY", PE_LAZY),
        ("PE_PRESENT", PE_PRESENT),
    ];
    assert_eq!(
        numbers(&["flag", "name"], 1, 0),
        flags.map(|(name, number)| (name, number.into())).into()
    );
}

#[test]
fn offsets_in_frames() {
    let zero = Frame {
        command: 0,
        flags: 0,
        nr_pages: 0,
        vaddr: 0,
        dst_id: 0,
    };
    let fields = [
        (
            "cmd",
            Frame {
                command: 0xff,
                ..zero
            },
        ),
        (
            "nr_pages",
            Frame {
                nr_pages: 0xff,
                ..zero
            },
        ),
        (
            "vaddr",
            Frame {
                vaddr: 0xff,
                ..zero
            },
        ),
        (
            "dst_id",
            Frame {
                dst_id: 0xff,
                ..zero
            },
        ),
    ];
    for (dialect, column) in [(Dialect::V24, 1), (Dialect::V32, 2)] {
        let documented = numbers(&["field", "24-byte offset"], 0, column);
        let actual: BTreeMap<_, _> = fields
            .iter()
            .map(|(name, frame)| {
                let encoded = frame.encode(dialect).expect("255 fits");
                let at = encoded
                    .as_ref()
                    .iter()
                    .position(|byte| *byte == 0xff)
                    .expect("it is somewhere");
                // The lowest byte stands first or last, by the byte order of the host.
                (
                    *name,
                    if cfg!(target_endian = "little") {
                        at as u64
                    } else {
                        at as u64 / 4 * 4
                    },
                )
            })
            .collect();
        assert_eq!(documented, actual, "{dialect:?}");
        assert!(DOC.contains(&format!("a frame has {} bytes", dialect.frame_bytes())));
    }
}

#[test]
fn limits() {
    for text in [
        format!("more than {MAX_SPACES} spaces"),
        format!("ends beyond 2^{}", MAX_ADDRESS.trailing_zeros()),
        format!("at most {MAX_MESSAGE_BYTES}:"),
        format!(
            "speaks versions {} of the control protocol",
            Interface::Control.built()
        ),
        format!("1 to {MAX_JOB_NAME_BYTES} bytes"),
        format!("from {FIRST_SERVED_PAGES_ID}, so"),
        format!("Images version {IMAGES_V1_1} "),
        format!(
            "| control protocol | {} |",
            Interface::Control.built().newest
        ),
        format!("| manifest (docs/format.md) | {} |", manifest::VERSION),
    ] {
        assert!(DOC.contains(&text), "{text:?} is not in the document");
    }
    assert!(MAX_ADDRESS.is_power_of_two());
}

#[test]
fn every_protocol_error_is_listed() {
    let source = include_str!("../src/pageserver/error.rs");
    let body = source
        .split("pub enum ProtocolError {")
        .nth(1)
        .and_then(|rest| rest.split("\n}").next())
        .expect("the enum");
    let variants: Vec<&str> = body
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()))
        .map(|line| {
            line.split(|end: char| !end.is_ascii_alphanumeric())
                .next()
                .expect("a name")
        })
        .collect();
    assert!(variants.len() > 15, "{variants:?}");
    for variant in variants {
        // The caller's mistake, no peer's.
        if variant != "WrongLength" {
            assert!(
                DOC.contains(&format!("| `{variant}` |")),
                "{variant} is not in the tables of errors"
            );
        }
    }
}

#[test]
fn requests_and_replies() {
    use reply::Body as R;
    use request::Body as Q;
    let requests = [
        ("Open", Q::Open(Default::default())),
        ("Seal", Q::Seal(Default::default())),
        ("Abort", Q::Abort(Default::default())),
        ("Adopt", Q::Adopt(Default::default())),
        ("List", Q::List(Default::default())),
        ("Show", Q::Show(Default::default())),
        ("Describe", Q::Describe(Default::default())),
        ("Remove", Q::Remove(Default::default())),
        ("Pin", Q::Pin(Default::default())),
        ("Verify", Q::Verify(Default::default())),
        ("Export", Q::Export(Default::default())),
        ("Import", Q::Import(Default::default())),
        ("Status", Q::Status(Default::default())),
        ("Stream", Q::Stream(Default::default())),
        ("Lend", Q::Lend(Default::default())),
        ("Thaw", Q::Thaw(Default::default())),
        ("TakeSpace", Q::TakeSpace(Default::default())),
        ("EndPages", Q::EndPages(Default::default())),
        ("Place", Q::Place(Default::default())),
        ("Nodes", Q::Nodes(Default::default())),
        ("SetNode", Q::SetNode(Default::default())),
        ("Rebuild", Q::Rebuild(Default::default())),
        ("SetLevel", Q::SetLevel(Default::default())),
        ("Scrub", Q::Scrub(Default::default())),
        ("Gc", Q::Gc(Default::default())),
        ("SetRetention", Q::SetRetention(Default::default())),
        ("ShowRetention", Q::ShowRetention(Default::default())),
        ("Prune", Q::Prune(Default::default())),
        ("Reserve", Q::Reserve(Default::default())),
        (
            "CancelReservation",
            Q::CancelReservation(Default::default()),
        ),
        ("Took", Q::Took(Default::default())),
        ("Media", Q::Media(Default::default())),
        ("Keys", Q::Keys(Default::default())),
        ("Deny", Q::Deny(Default::default())),
    ];
    let replies = [
        ("Error", R::Error(Default::default())),
        ("Progress", R::Progress(Default::default())),
        ("SessionOpened", R::SessionOpened(Default::default())),
        ("Checkpoint", R::Checkpoint(Default::default())),
        ("Checkpoints", R::Checkpoints(Default::default())),
        ("Detail", R::Detail(Default::default())),
        ("Done", R::Done(Default::default())),
        ("Verified", R::Verified(Default::default())),
        ("Exported", R::Exported(Default::default())),
        ("Status", R::Status(Default::default())),
        ("LazyServed", R::LazyServed(Default::default())),
        ("Nodes", R::Nodes(Default::default())),
        ("Rebuilt", R::Rebuilt(Default::default())),
        ("Scrubbed", R::Scrubbed(Default::default())),
        ("GcReport", R::GcReport(Default::default())),
        ("Retention", R::Retention(Default::default())),
        ("Pruned", R::Pruned(Default::default())),
        ("Reserved", R::Reserved(Default::default())),
        ("RegionMedia", R::RegionMedia(Default::default())),
        ("KeyList", R::KeyList(Default::default())),
        ("Denials", R::Denials(Default::default())),
        ("Contents", R::Contents(Default::default())),
    ];
    // A message with nothing but the body begins with the body's key.
    let tag = |encoded: Vec<u8>| {
        let (tag, _) = prost::encoding::decode_key(&mut &*encoded).expect("a key");
        u64::from(tag)
    };
    let requests = requests.map(|(name, body)| {
        (
            name,
            tag(Request {
                version: 0,
                body: Some(body),
            }
            .encode_to_vec()),
        )
    });
    assert_eq!(numbers(&["request", "tag"], 0, 1), requests.into());
    let replies =
        replies.map(|(name, body)| (name, tag(Reply { body: Some(body) }.encode_to_vec())));
    assert_eq!(numbers(&["reply", "tag"], 0, 1), replies.into());
    for row in table(&["request", "tag"]) {
        assert!(
            replies.iter().any(|(name, _)| *name == row[3]),
            "{} is answered by {}",
            row[0],
            row[3]
        );
    }
    let codes = numbers(&["code", "name"], 1, 0);
    for (name, number) in &codes {
        let code = ErrorCode::try_from(i32::try_from(*number).expect("small")).expect("a code");
        assert_eq!(*name, format!("{code:?}"));
    }
    let known = (0..100)
        .filter(|code| ErrorCode::try_from(*code).is_ok())
        .count();
    assert_eq!(codes.len(), known);
}

#[test]
fn magics() {
    let hex = |magic: u32| format!("{magic:#x}");
    let expected = [
        ("inventory.img", hex(INVENTORY_MAGIC), "none".to_owned()),
        (
            "stats-dump`, `stats-restore",
            hex(SERVICE_MAGIC),
            hex(STATS_MAGIC),
        ),
        (
            "pagemap-PID.img`, `pagemap-shmem-ID.img",
            hex(COMMON_MAGIC),
            hex(PAGEMAP_MAGIC),
        ),
        ("pstree.img", hex(COMMON_MAGIC), hex(PSTREE_MAGIC)),
        ("mm-PID.img", hex(COMMON_MAGIC), hex(MM_MAGIC)),
        ("files.img", hex(COMMON_MAGIC), hex(FILES_MAGIC)),
        ("pages-N.img", "none".to_owned(), "none".to_owned()),
    ];
    let documented = table(&["file", "first word"]);
    let documented: Vec<_> = documented
        .iter()
        .map(|row| (row[0], row[1].to_owned(), row[2].to_owned()))
        .collect();
    assert_eq!(documented, expected);
}

#[test]
fn fields_of_a_pagemap_entry() {
    let mut writer = PagemapWriter::new(1);
    writer.push(PagemapEntry {
        vaddr: 0x1000,
        nr_pages: 2,
        flags: 4,
    });
    let image = writer.finish();
    // Head 8, pagemap head 6, length 4; then key and value of vaddr (2 bytes), compat_nr_pages, flags, nr_pages.
    assert_eq!(
        image[18..],
        [1 << 3, 0x80, 0x20, 2 << 3, 2, 4 << 3, 4, 5 << 3, 2]
    );
    let fields = [
        ("vaddr", 1),
        ("compat_nr_pages", 2),
        ("in_parent", 3),
        ("flags", 4),
        ("nr_pages", 5),
    ];
    assert_eq!(numbers(&["field", "number"], 0, 1), fields.into());
}

#[test]
fn frames_between_nodes() {
    let documented = numbers(&["frame", "kind"], 0, 1);
    let known: BTreeMap<String, u64> = (0..=255)
        .filter_map(|byte| Kind::from_byte(byte).map(|kind| (format!("{kind:?}"), byte.into())))
        .collect();
    assert_eq!(documented.len(), known.len());
    for (name, number) in documented {
        assert_eq!(known.get(name), Some(&number), "{name}");
    }
    for row in table(&["frame", "kind"]) {
        let kind = Kind::from_byte(row[1].parse().expect("a number")).expect("a kind");
        assert_eq!(
            !row[5].starts_with("none"),
            kind.has_payload(),
            "{}",
            row[0]
        );
    }
    for text in [
        format!("A header has {HEADER_BYTES} bytes"),
        format!("a preamble of\n{PREAMBLE_BYTES} bytes"),
        format!("| 1 to {MAX_PAGES} |"),
        format!("its payload and {FRAME_COST_BYTES} bytes"),
        format!("`{0}/1` and `{0}/2`", wire::ALPN),
        format!("speaks versions {} of the wire", Interface::Wire.built()),
        format!("| between nodes | {} |", Interface::Wire.built().newest),
    ] {
        assert!(DOC.contains(&text), "{text:?} is not in the document");
    }
}

#[test]
fn limits_between_nodes() {
    let limits = [
        ("payload of a frame, bytes", MAX_PAYLOAD_BYTES.to_string()),
        (
            "page numbers below",
            format!("2^{}", MAX_ADDRESS.trailing_zeros() - 12),
        ),
        ("address spaces", MAX_SPACES.to_string()),
        ("images", MAX_IMAGES.to_string()),
        ("length of an image, bytes", MAX_IMAGE_BYTES.to_string()),
        (
            "length of a name, bytes",
            manifest::MAX_FILE_NAME_BYTES.to_string(),
        ),
        (
            "payload until an acknowledgement, bytes",
            ACKNOWLEDGE_BYTES.to_string(),
        ),
        (
            "frames until an acknowledgement",
            ACKNOWLEDGE_FRAMES.to_string(),
        ),
        ("smallest window, bytes", MIN_WINDOW_BYTES.to_string()),
        ("usual window, bytes", DEFAULT_WINDOW_BYTES.to_string()),
    ];
    let documented: Vec<_> = table(&["limit", "value"])
        .iter()
        .map(|row| (row[0], row[1].to_owned()))
        .collect();
    assert_eq!(documented, limits);
}

#[test]
fn requests_between_nodes() {
    use message::request::Body as Q;
    let requests = [
        ("Dump", Q::Dump(Default::default())),
        ("Fetch", Q::Fetch(Default::default())),
        ("Publish", Q::Publish(Default::default())),
        ("Rollback", Q::Rollback(Default::default())),
        ("Inventory", Q::Inventory(Default::default())),
        ("Ping", Q::Ping(Default::default())),
        ("Control", Q::Control(Default::default())),
        ("Pull", Q::Pull(Default::default())),
        ("Verify", Q::Verify(Default::default())),
        ("Api", Q::Api(Default::default())),
    ]
    .map(|(name, body)| {
        let encoded = message::Request { body: Some(body) }.encode_to_vec();
        (name, u64::from(encoded[0] >> 3))
    });
    assert_eq!(numbers(&["asked", "tag"], 0, 1), requests.into());
}
