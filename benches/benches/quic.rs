//! Dumps over QUIC beside a bare quinn pair with the same transport parameters, and over TLS, over the loopback
//! interface.
//!
//! `cargo bench -p permafrost-benches --bench quic`: medians of five alternating measurements, in one process. The
//! receiver of a dump puts packets together to pages and drops them; that of the bare pair puts them together to runs of
//! the same length. So the difference is the cost of the conversation: the copy into the window, the frames, the
//! acknowledgements, the queue to the handler.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use permafrost_benches::bare::{self, RUN_BYTES};
use permafrost_identity::{Authority, CertificateOrder, Peer, ReloadingIdentity, Role};
use permafrost_protocol::control;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{Closed, reply, request};
use permafrost_transport::peer::{
    DumpSender, Endpoint, FrameSink, FrameSource, Handler, Network, PeerOptions, Replies,
};
use tokio::runtime::Runtime;

/// Sent in one measurement.
const BYTES: usize = 512 << 20;
/// Number of measurements of each, of which the median counts.
const ROUNDS: usize = 5;
/// UDP payloads: Ethernet, what quinn's GSO batches of ten hold at most, jumbo frames.
const PACKETS: [u16; 3] = [1452, 6500, 8972];

/// Sink that drops all pages.
struct Sink;

impl Handler for Sink {
    fn call(&self, _: &Peer, _: request::Body) -> reply::Body {
        reply::Body::Error(control::Error::default())
    }

    fn dump(
        &self,
        _: &Peer,
        _: request::Dump,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        replies.opened(false);
        while let Ok(frame) = frames.next() {
            if frame.header.kind == Kind::Close {
                replies.closed(Closed::default());
            }
        }
        Ok(())
    }

    fn fetch(
        &self,
        _: &Peer,
        _: request::Fetch,
        _: &mut dyn FrameSink,
    ) -> Result<(), control::Error> {
        Err(control::Error::default())
    }
}

fn main() {
    // cargo test runs benches to check that they work; this one would only take time.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    // Only one of the two, for a profiler.
    let others_than = |what: &str| !std::env::args().any(|argument| argument == what);
    let directory = tempfile::tempdir().expect("temporary directory");
    let authority =
        Authority::create(&directory.path().join("ca"), "bench", false).expect("authority");
    let here = identity(&authority, directory.path(), "here");
    let there = identity(&authority, directory.path(), "there");
    let ends = Ends {
        sending: runtime(),
        receiving: runtime(),
        here,
        there,
    };
    let run = bare::run();

    println!(
        "packet   bare quinn        dump              ratio   two dumps     over TLS      CPU s/GB bare, dump, over TLS (user+system)"
    );
    for packet in PACKETS {
        let options = bare::options(packet);
        let over_tls = PeerOptions {
            tls_bulk: true,
            ..options.clone()
        };
        let (mut bare, mut dumps, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
        let mut tls = Vec::new();
        for _ in 0..ROUNDS {
            if others_than("dump") {
                bare.push(measure(|| bare_pair(&ends, &options, &run)));
            }
            if others_than("bare") {
                dumps.push(measure(|| dump(&ends, &options, &run, 1)));
                pairs.push(measure(|| dump(&ends, &options, &run, 2)));
                tls.push(measure(|| dump(&ends, &over_tls, &run, 1)));
            }
        }
        let (bare, dumps, pairs) = (median(bare), median(dumps), median(pairs));
        let tls = median(tls);
        println!(
            "{packet:>5}    {:>6.0} MB/s       {:>6.0} MB/s       {:>5.2}   {:>6.0} MB/s   {:>6.0} MB/s   {:.2}+{:.2}, {:.2}+{:.2}, {:.2}+{:.2}",
            bare.speed / 1e6,
            dumps.speed / 1e6,
            dumps.speed / bare.speed,
            pairs.speed / 1e6,
            tls.speed / 1e6,
            bare.user,
            bare.system,
            dumps.user,
            dumps.system,
            tls.user,
            tls.system,
        );
    }
}

/// Two nodes in one process, a runtime each: their tasks are not to wake, or wait for, each other's.
struct Ends {
    sending: Runtime,
    receiving: Runtime,
    here: Arc<ReloadingIdentity>,
    there: Arc<ReloadingIdentity>,
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("runtime")
}

#[derive(Clone, Copy, Default)]
struct Measured {
    /// Bytes a second.
    speed: f64,
    /// CPU seconds of both ends for a gigabyte, in this program and in the kernel.
    user: f64,
    system: f64,
}

#[expect(clippy::cast_precision_loss, reason = "a speed need not be exact")]
fn measure(run: impl FnOnce() -> Duration) -> Measured {
    let before = cpu_seconds();
    let time = run();
    let after = cpu_seconds();
    let bytes = BYTES as f64;
    Measured {
        speed: bytes / time.as_secs_f64(),
        user: (after.0 - before.0) * 1e9 / bytes,
        system: (after.1 - before.1) * 1e9 / bytes,
    }
}

fn median(mut measured: Vec<Measured>) -> Measured {
    measured.sort_by(|a, b| a.speed.total_cmp(&b.speed));
    measured
        .get(measured.len() / 2)
        .copied()
        .unwrap_or_default()
}

/// Returns the user and system time of this process: fields 14 and 15 of its stat, in ticks of 10 ms.
fn cpu_seconds() -> (f64, f64) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = rest.split_whitespace().skip(11);
    let mut next = || -> f64 {
        let ticks = fields.next().and_then(|field| field.parse().ok());
        ticks.unwrap_or(0.0) / 100.0
    };
    (next(), next())
}

fn identity(authority: &Authority, directory: &Path, name: &str) -> Arc<ReloadingIdentity> {
    let directory = directory.join(name);
    let order = CertificateOrder::new(name, Role::Node);
    authority.issue(&order, &directory, false).expect("issue");
    Arc::new(ReloadingIdentity::load(&directory).expect("identity"))
}

fn bare_pair(ends: &Ends, options: &PeerOptions, run: &Bytes) -> Duration {
    let bind = (Ipv4Addr::LOCALHOST, 0).into();
    let server = {
        let _entered = ends.receiving.enter();
        bare::receiver(bind, &ends.there, options)
    };
    let address = server.local_addr().expect("address");
    let receiving = ends
        .receiving
        .spawn(async move { bare::receive(&server).await });
    let client = {
        let _entered = ends.sending.enter();
        bare::sender(bind, &ends.here, options)
    };
    let run = run.clone();
    // On a worker, as the peers' tasks are.
    let sending = ends
        .sending
        .spawn(async move { bare::send(&client, address, "there", &run, BYTES).await });
    let time = ends.sending.block_on(sending).expect("sender");
    let taken = ends.receiving.block_on(receiving).expect("receiver");
    assert_eq!(taken, BYTES);
    time
}

/// Runs `count` dumps at once, [`BYTES`] in all, over one connection.
fn dump(ends: &Ends, options: &PeerOptions, run: &[u8], count: usize) -> Duration {
    let bind = (Ipv4Addr::LOCALHOST, 0).into();
    let endpoint = Endpoint::serve(
        ends.receiving.handle(),
        bind,
        Arc::clone(&ends.there),
        Arc::new(Sink),
        options.clone(),
    )
    .expect("serve");
    let address = endpoint.local_address().expect("address");
    let network = Network::new(
        ends.sending.handle().clone(),
        bind,
        Arc::clone(&ends.here),
        "",
        Arc::new(move |_: &str| Some(address)),
        options.clone(),
    )
    .expect("network");
    let deadline = Instant::now() + Duration::from_secs(120);
    let dumps: Vec<_> = (0..count)
        .map(|number| {
            let request = request::Dump {
                session: vec![u8::try_from(number).expect("few"); 16],
                ..request::Dump::default()
            };
            DumpSender::open(&network, "there", request, deadline).expect("open")
        })
        .collect();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for mut dump in dumps {
            scope.spawn(move || {
                dump.space(1, 1, 1).expect("space");
                for index in 0..BYTES / RUN_BYTES / count {
                    let index = u64::try_from(index * RUN_BYTES / 4096).expect("small");
                    dump.pages(index, 0, run).expect("pages");
                }
                dump.close(deadline).expect("close");
            });
        }
    });
    start.elapsed()
}
