//! `permafrost-api-load`: measures how fast the HTTP API answers, over TCP on loopback, with simulated nodes.
//!
//! The server is the daemon's own: its sockets, its token check, its routes, over a [`Simulated`] cluster whose
//! snapshot is refreshed every second, on a runtime of two threads in this process. Clients are threads that send one
//! request after another. The first tenth of the replies is left out.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use permafrost_benches::api::{LoadClient, Question, Simulated, request};
use permafrost_http_api::serve::{self, Limits, Rate};
use permafrost_http_api::{Api, ApiConfig, refresh, router};
use sha2::{Digest as _, Sha256};
use tokio::runtime::Runtime;

/// Measures how fast the HTTP API answers.
#[derive(Parser)]
struct Options {
    /// Kinds of requests to send.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Question::Preempt])]
    questions: Vec<Question>,
    /// Nodes of the simulated cluster.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 1000, 10_000])]
    nodes: Vec<u32>,
    /// Candidates in a request.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100, 1000, 10_000])]
    candidates: Vec<u32>,
    /// Number of concurrent clients.
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    clients: Vec<usize>,
    /// Duration of each measurement, seconds.
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Jobs with a checkpoint.
    #[arg(long, default_value_t = 10_000)]
    jobs: u32,
    /// Print JSON, a line each.
    #[arg(long)]
    json: bool,
}

const TOKEN: &str = "load";

fn main() -> Result<()> {
    let options = Options::parse();
    if !options.json {
        println!(
            "question  nodes  candidates  clients  p50 ms  p99 ms  requests/s  request kB  answer kB"
        );
    }
    for &nodes in &options.nodes {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("start a runtime")?;
        let before = resident_bytes();
        let begun = Instant::now();
        let api = Api::new(Simulated::new(nodes, options.jobs));
        // As in the daemon: the snapshot is refreshed every second, beside the replies.
        let kept_up = runtime.block_on(async { refresh::start(&api, ApiConfig::default()) });
        let _kept_up = kept_up.context("start to look at the cluster")?;
        if !runtime.block_on(api.looked_within(Duration::from_secs(60))) {
            bail!("{nodes} nodes are not seen within a minute");
        }
        let (made, grown) = (begun.elapsed(), resident_bytes().saturating_sub(before));
        if options.json {
            let line = serde_json::json!({
                "nodes": nodes, "jobs": options.jobs, "resident_bytes": grown, "snapshot_s": made.as_secs_f64(),
            });
            println!("{line}");
        } else {
            println!(
                "{nodes} nodes and {} jobs: {} KiB, made in {:.1} ms",
                options.jobs,
                grown >> 10,
                made.as_secs_f64() * 1e3
            );
        }
        over(&options, nodes, api, &runtime)?;
    }
    Ok(())
}

/// Measures all requests to one cluster.
fn over(options: &Options, nodes: u32, api: Arc<Api>, runtime: &Runtime) -> Result<()> {
    let dir = tempfile::tempdir().context("create a directory")?;
    let tokens = dir.path().join("tokens");
    write_tokens(&tokens)?;
    let server = runtime.block_on(serve::serve(
        serve::ServeOptions {
            run_dir: dir.path().to_owned(),
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            tokens: Some(tokens),
            limits: Limits {
                // The rate limit is not measured.
                rate: Rate::of(u32::MAX),
                ..Limits::default()
            },
            ..serve::ServeOptions::default()
        },
        router(api),
    ))?;
    let address = server.address().context("ask where it listens")?;
    for &question in &options.questions {
        for &candidates in &options.candidates {
            let request = request(question, &question.body(candidates, nodes), TOKEN);
            for &clients in &options.clients {
                let time = Duration::from_secs(options.seconds);
                let asked = ask(address, &request, clients, time)?;
                tell(
                    options,
                    (question, nodes, candidates, clients),
                    &request,
                    &asked,
                );
            }
        }
    }
    runtime.block_on(server.stop());
    Ok(())
}

struct Asked {
    /// Times of the requests, ascending.
    times: Vec<Duration>,
    per_s: f64,
    answer_bytes: usize,
}

fn ask(address: SocketAddr, request: &[u8], clients: usize, time: Duration) -> Result<Asked> {
    let over = AtomicBool::new(false);
    let begun = Instant::now();
    let results: Vec<std::io::Result<(Vec<Duration>, usize)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..clients)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = LoadClient::connect(address)?;
                    let mut times = Vec::new();
                    while !over.load(Ordering::Relaxed) {
                        times.push(client.ask(request)?);
                    }
                    Ok((times, client.answer_bytes()))
                })
            })
            .collect();
        std::thread::sleep(time);
        over.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(result) => result,
                Err(_) => Err(std::io::Error::other("a client died")),
            })
            .collect()
    });
    let took = begun.elapsed().as_secs_f64();
    let (mut times, mut answer_bytes, mut count) = (Vec::new(), 0, 0_u32);
    for result in results {
        let (mine, bytes) = result.context("ask")?;
        count += u32::try_from(mine.len()).unwrap_or(u32::MAX);
        times.extend_from_slice(&mine[mine.len() / 10..]);
        answer_bytes = bytes;
    }
    times.sort_unstable();
    Ok(Asked {
        times,
        per_s: f64::from(count) / took,
        answer_bytes,
    })
}

fn tell(
    options: &Options,
    (question, nodes, candidates, clients): (Question, u32, u32, usize),
    request: &[u8],
    asked: &Asked,
) {
    let at = |percent: usize| {
        let rank = (asked.times.len() * percent)
            .div_ceil(100)
            .saturating_sub(1);
        asked
            .times
            .get(rank)
            .map_or(f64::NAN, Duration::as_secs_f64)
    };
    let word = format!("{question:?}").to_lowercase();
    if options.json {
        let line = serde_json::json!({
            "question": word, "nodes": nodes, "candidates": candidates, "clients": clients,
            "p50_s": at(50), "p99_s": at(99), "requests_per_s": asked.per_s, "answers": asked.times.len(),
            "request_bytes": request.len(), "answer_bytes": asked.answer_bytes,
        });
        println!("{line}");
    } else {
        println!(
            "{word:<8} {nodes:>6} {candidates:>11} {clients:>8} {:>7.3} {:>7.3} {:>11.0} {:>11.1} {:>10.1}",
            at(50) * 1e3,
            at(99) * 1e3,
            asked.per_s,
            kilo(request.len()),
            kilo(asked.answer_bytes)
        );
    }
}

fn kilo(bytes: usize) -> f64 {
    u32::try_from(bytes).map_or(f64::NAN, f64::from) / 1e3
}

fn write_tokens(path: &Path) -> Result<()> {
    let digest = Sha256::digest(TOKEN.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| writeln!(file, "load read,reserve,operate {hex}"))
        .context("write the tokens")
}

/// Returns the resident memory of this process, bytes.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
