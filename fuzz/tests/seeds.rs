//! The seeds are what `PERMAFROST_WRITE_SEEDS=1 cargo test` writes, and all of them keep the properties.

use std::fs;
use std::path::PathBuf;

use permafrost_protocol::control::{Reply, Request, framing, reply, request};
use permafrost_protocol::images::{
    DumpStats, Inventory, Pagemap, PagemapEntry, Plugins, Process, Stats, write_pstree,
};
use permafrost_protocol::manifest::{AddressSpace, Image, Manifest, Origin, VERSION};
use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{Dialect, PE_LAZY, PE_PRESENT, SpaceId};
use prost::Message;

type Seeds = Vec<(&'static str, Vec<u8>)>;
type Check = fn(&[u8]);
type Target = (&'static str, fn() -> Seeds, Check);

fn pageserver() -> Seeds {
    let (shared, process) = (SpaceId::shared_memory(77).unwrap(), SpaceId::process(5));
    let dump = |dialect, page: &[u8]| {
        let e = Encoder::new(dialect);
        let mut bytes = vec![1];
        let mut add = |frame: &[u8], pages| {
            bytes.extend_from_slice(frame);
            bytes.extend_from_slice(&page.repeat(pages));
        };
        add(e.query_parent(process).as_ref(), 0);
        add(e.open(shared).as_ref(), 0);
        add(e.pages(shared, 0, 1, PE_PRESENT).as_ref(), 1);
        add(e.open(process).as_ref(), 0);
        add(
            e.pages(process, 0x1_0000, 3, PE_PRESENT | PE_LAZY).as_ref(),
            3,
        );
        add(e.hole(process, 0x1_3000, 9).as_ref(), 0);
        add(
            e.pages(process, 0x7fff_0000_0000, 1, PE_PRESENT).as_ref(),
            1,
        );
        add(e.force_close().as_ref(), 0);
        bytes
    };
    let e = Encoder::new(Dialect::V24);
    let space = SpaceId::process(9);
    let legacy = [
        vec![0],
        e.pages_legacy(space, 0x1000, 2).as_ref().to_vec(),
        vec![7; 2],
        e.hole_legacy(space, 0x5000, 1).as_ref().to_vec(),
        e.open_legacy(process).as_ref().to_vec(),
        e.close().as_ref().to_vec(),
    ];
    let descending = [
        vec![0],
        e.open(space).as_ref().to_vec(),
        e.pages(space, 0x3000, 1, PE_PRESENT).as_ref().to_vec(),
        vec![7],
        e.pages(space, 0x2000, 1, PE_PRESENT).as_ref().to_vec(),
        vec![7],
        e.pages(space, 0x9000, 1, PE_LAZY).as_ref().to_vec(),
        e.close().as_ref().to_vec(),
    ];
    let one_real_page = [
        vec![0],
        e.open(space).as_ref().to_vec(),
        e.pages(space, 0x3000, 1, PE_PRESENT).as_ref().to_vec(),
        vec![3; 4096],
        e.close().as_ref().to_vec(),
    ];
    let get = |dialect| {
        let e = Encoder::new(dialect);
        [
            &[0][..],
            e.get(5, 0x7000_0000, 16).as_ref(),
            e.close().as_ref(),
        ]
        .concat()
    };
    let e = Encoder::new(Dialect::V24);
    let gets = [16, 65_536].map(|pages| e.get(5, 0x7000_0000, pages));
    let get_refused = [&[0][..], gets[0].as_ref(), gets[1].as_ref()];
    vec![
        ("get-refused", get_refused.concat()),
        ("one-real-page", one_real_page.concat()),
        ("dump-24", dump(Dialect::V24, &[3])),
        ("dump-32", dump(Dialect::V32, &[3])),
        ("legacy", legacy.concat()),
        ("descending", descending.concat()),
        ("get-24", get(Dialect::V24)),
        ("get-32", get(Dialect::V32)),
        ("close-first", [&[0][..], e.close().as_ref()].concat()),
    ]
}

fn images() -> Seeds {
    let tagged = |tag: u8, bytes: &[u8]| [&[tag], bytes].concat();
    let pagemap = Pagemap {
        pages_id: 65_537,
        entries: vec![
            PagemapEntry {
                vaddr: 0x40_0000,
                nr_pages: 3,
                flags: 4,
            },
            PagemapEntry {
                vaddr: 0x50_0000,
                nr_pages: 1024,
                flags: 6,
            },
            PagemapEntry {
                vaddr: 0x7fff_0000_0000,
                nr_pages: 2,
                flags: 1,
            },
        ],
    };
    let inventory = Inventory {
        img_version: 2,
        root_ids: Some(vec![8, 1]),
        dump_uptime: Some(7),
        plugins: Some(Plugins {
            plugins: vec!["x".into()],
        }),
        dump_criu_run_id: Some("77d59e24".into()),
        ..Inventory::default()
    };
    let process = |pid, ppid| Process {
        pid,
        ppid,
        pgid: 5,
        sid: 5,
        threads: vec![pid, pid + 1],
    };
    let stats = Stats {
        dump: Some(DumpStats {
            frozen_time: 9,
            pages_written: 300,
            ..DumpStats::default()
        }),
        restore: None,
    };
    vec![
        ("pagemap", tagged(0, &pagemap.write())),
        ("inventory", tagged(1, &inventory.write())),
        (
            "pstree",
            tagged(2, &write_pstree(&[process(5, 0), process(8, 5)])),
        ),
        ("stats", tagged(3, &stats.write())),
        ("pagemap-records", tagged(4, &pagemap.write()[8..])),
        ("name", tagged(0, b"pagemap-shmem-77.img")),
    ]
}

fn manifest() -> Seeds {
    let image = |name: &str| Image {
        name: name.into(),
        len_bytes: 86,
        map_root: vec![1; 32],
        map_digest: vec![3; 32],
        offset_bytes: 0,
    };
    let space = |id, pages_id| AddressSpace {
        id,
        pages_id,
        map_root: vec![2; 32],
        pages: 10,
        sibling_pages: 1,
        stored_pages: 5,
        zero_pages: 3,
        parent_pages: 1,
        ..AddressSpace::default()
    };
    let whole = Manifest {
        version: VERSION,
        job: "a/b".into(),
        generation: 3,
        parent_generation: 2,
        created_unix_ms: 1_800_000_000_000,
        kind: 0,
        origin: Some(Origin {
            host: "n".into(),
            pid: 5,
            restore_options: vec!["--shell-job".into()],
            ..Origin::default()
        }),
        images: vec![image("inventory.img"), image("core-5.img")],
        spaces: vec![space(5, 65_537), space(8, 65_538)],
        session: "0123456789abcdef".repeat(2),
        commit_deadline_ms: 30_000,
        added_bytes: 4096,
        content_digest: vec![5; 32],
        taken_by: "agent c7".into(),
    };
    let parked = Manifest {
        job: String::new(),
        generation: 0,
        kind: 2,
        images: vec![],
        ..whole.clone()
    };
    let mut refused = whole.clone();
    if let Some(origin) = &mut refused.origin {
        origin.restore_options = vec!["--action-script=/tmp/x".into()];
    }
    vec![
        ("whole", whole.encode_checked().unwrap()),
        ("parked", parked.encode_checked().unwrap()),
        ("refused-option", refused.encode_to_vec()),
        ("reference", b"ns/pod-1:main@12".to_vec()),
    ]
}

fn control() -> Seeds {
    let open = request::Open {
        job: "j".into(),
        seal_follows: true,
        ..Default::default()
    };
    let request = |body| {
        framing::encode(&Request {
            version: 1,
            body: Some(body),
        })
        .unwrap()
    };
    let reply = |body| framing::encode(&Reply { body: Some(body) }).unwrap();
    vec![
        ("open", request(request::Body::Open(open))),
        (
            "remove",
            request(request::Body::Remove(request::Remove {
                checkpoint: "j@1".into(),
                all_generations: true,
                force: true,
                last: false,
            })),
        ),
        ("status", request(request::Body::Status(request::Status {}))),
        (
            "progress",
            reply(reply::Body::Progress(
                permafrost_protocol::control::Progress {
                    done_bytes: 1,
                    total_bytes: 2,
                    ..permafrost_protocol::control::Progress::default()
                },
            )),
        ),
    ]
}

fn wire() -> Seeds {
    use permafrost_protocol::wire::frame::{Coding, Header, Kind};
    let frame = |kind, pages, index, payload: &[u8]| {
        let header = Header {
            kind,
            coding: match kind {
                Kind::Pages => Coding::Zstd,
                _ => Coding::Raw,
            },
            flags: 0,
            pages,
            sequence: 0,
            index,
            payload_bytes: u32::try_from(payload.len()).unwrap(),
        };
        [&header.encode()[..], payload].concat()
    };
    let dump = [
        frame(Kind::Space, 1, 5, &[]),
        frame(Kind::Pages, 2, 16, &[7; 9]),
        frame(Kind::Zero, 9, 18, &[]),
        frame(Kind::Parent, 1, 30, &[]),
        frame(Kind::Close, 0, 0, &[]),
        frame(Kind::Image, 0, 3, b"core-5.img"),
        frame(Kind::ImageData, 0, 3, b"abc"),
        frame(Kind::Prepare, 0, 0, &[]),
    ];
    use permafrost_protocol::wire::message::{Hello, Reply, Request, reply, request};
    let hello = Hello {
        version: 2,
        name: "n1".into(),
        region: String::new(),
        versions: Some(permafrost_protocol::versions::SpokenVersions::built()),
        tls_bulk: true,
    };
    let ping = Request {
        body: Some(request::Body::Ping(request::Ping {})),
    };
    let words = [
        framing::encode(&hello).unwrap(),
        framing::encode(&ping).unwrap(),
    ];
    let replies = [
        reply::Body::DumpOpened(Default::default()),
        reply::Body::Acknowledged(Default::default()),
        reply::Body::Closed(Default::default()),
        reply::Body::Prepared(Default::default()),
        reply::Body::Committed(Default::default()),
    ];
    let replies = replies.map(|body| framing::encode(&Reply { body: Some(body) }).unwrap());
    vec![
        ("dump", dump.concat()),
        ("ping", words.concat()),
        ("replies", replies.concat()),
    ]
}

#[test]
fn seeds_are_current_and_keep_the_properties() {
    let targets: [Target; 5] = [
        ("pageserver", pageserver, permafrost_fuzz::pageserver::check),
        ("images", images, permafrost_fuzz::images::check),
        ("manifest", manifest, permafrost_fuzz::manifest::check),
        ("control", control, permafrost_fuzz::control::check),
        ("wire", wire, permafrost_fuzz::wire::check),
    ];
    for (target, seeds, check) in targets {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("seeds")
            .join(target);
        if std::env::var_os("PERMAFROST_WRITE_SEEDS").is_some() {
            fs::create_dir_all(&directory).unwrap();
            for (name, bytes) in seeds() {
                fs::write(directory.join(name), bytes).unwrap();
            }
        }
        let seeds = seeds();
        assert_eq!(
            fs::read_dir(&directory).unwrap().count(),
            seeds.len(),
            "files in {}",
            directory.display()
        );
        for (name, bytes) in seeds {
            let stored = fs::read(directory.join(name)).unwrap();
            assert!(
                stored == bytes,
                "{target}/{name} is old: run with PERMAFROST_WRITE_SEEDS=1"
            );
            check(&bytes);
        }
    }
}
