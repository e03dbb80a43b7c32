//! Clients that send requests without pause, and a stand-in for the daemon that sends recorded replies.
//!
//! One thread reads for half of the clients: each has a question on its way, whose answer is read when it has come.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use permafrost_tests::daemon::Daemon;
use rustix::event::{PollFd, PollFlags, poll};

use super::super::figures::{as_f64, percentile};
use super::questions::Question;

/// Threads of the clients.
const THREADS: usize = 2;

/// Nice value of the clients: they run behind everything that is measured.
const NICE: i32 = 19;

/// Time for which the clients run before the first dump beside them.
const UNDER_WAY: Duration = Duration::from_millis(300);

/// Latencies that the clients measured while dumps ran.
#[derive(Debug, Default)]
pub(super) struct Tally {
    latencies_s: Vec<f64>,
    /// For each request, by its length: number of replies, and the sum of their latencies.
    of_each: BTreeMap<usize, (u64, Duration)>,
    tasks: usize,
    elapsed: Duration,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    pub(super) requests_per_s: f64,
    pub(super) tasks_per_s: f64,
    pub(super) p50_s: f64,
    pub(super) p99_s: f64,
}

impl Tally {
    pub(super) fn add(&mut self, other: Self) {
        self.latencies_s.extend(other.latencies_s);
        for (question, (count, sum)) in other.of_each {
            let all = self.of_each.entry(question).or_default();
            *all = (all.0 + count, all.1 + sum);
        }
        self.tasks += other.tasks;
        self.elapsed += other.elapsed;
    }

    fn took(&mut self, question: &Question, latency: Duration) {
        self.latencies_s.push(latency.as_secs_f64());
        self.tasks += question.tasks;
        let all = self.of_each.entry(question.request.len()).or_default();
        *all = (all.0 + 1, all.1 + latency);
    }

    /// Returns the mean latency of requests of this length.
    fn mean(&self, request: usize) -> Duration {
        let (count, sum) = self.of_each.get(&request).copied().unwrap_or_default();
        sum.div_f64(as_f64(count.max(1)))
    }

    pub(super) fn answers(&self) -> usize {
        self.latencies_s.len()
    }

    pub(super) fn rates(&self) -> Option<Rates> {
        let mut sorted = self.latencies_s.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let seconds = self.elapsed.as_secs_f64();
        Some(Rates {
            requests_per_s: as_f64(sorted.len() as u64) / seconds,
            tasks_per_s: as_f64(self.tasks as u64) / seconds,
            p50_s: percentile(&sorted, 50)?,
            p99_s: percentile(&sorted, 99)?,
        })
    }
}

/// Clients that send requests until they are stopped.
pub(super) struct Load {
    over: Arc<AtomicBool>,
    /// True while a dump runs: only replies during a dump count.
    dumping: Arc<AtomicBool>,
    dumped: Duration,
    threads: Vec<JoinHandle<Result<Tally>>>,
}

impl Load {
    /// Connects so many clients to the socket, and starts them.
    pub(super) fn start(place: &Path, clients: usize, questions: &[Question]) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let mut shares = [(); THREADS].map(|()| Vec::new());
        for client in 0..clients {
            let question = questions[client % questions.len()].clone();
            let share = client / questions.len() % THREADS;
            shares[share].push(Client::connect(place, question)?);
        }
        let dumping = Arc::<AtomicBool>::default();
        let threads = shares.map(|clients| {
            let (over, dumping) = (Arc::clone(&over), Arc::clone(&dumping));
            std::thread::spawn(move || {
                yield_to_others()?;
                ask_on(clients, &over, &dumping)
            })
        });
        std::thread::sleep(UNDER_WAY);
        Ok(Self {
            over,
            dumping,
            dumped: Duration::ZERO,
            threads: threads.into(),
        })
    }

    /// Runs a dump beside the clients.
    pub(super) fn beside<T>(&mut self, dump: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        self.dumping.store(true, Ordering::Relaxed);
        let dumped = dump();
        self.dumping.store(false, Ordering::Relaxed);
        self.dumped += began.elapsed();
        dumped
    }

    /// Waits for the last replies, and returns what all clients measured.
    pub(super) fn stop(self) -> Result<Tally> {
        let elapsed = self.dumped;
        self.over.store(true, Ordering::Relaxed);
        let mut tally = Tally::default();
        for thread in self.threads {
            let seen = thread.join();
            tally.add(seen.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(Tally { elapsed, ..tally })
    }
}

/// Raises the nice value of this thread alone: the kernel's 0 is the calling thread.
fn yield_to_others() -> Result<()> {
    rustix::process::setpriority_process(None, NICE).context("go behind the others")
}

fn ask_on(mut clients: Vec<Client>, over: &AtomicBool, dumping: &AtomicBool) -> Result<Tally> {
    let mut tally = Tally::default();
    for client in &mut clients {
        client.ask()?;
    }
    while clients.iter().any(|client| client.asked.is_some()) {
        let waiting: Vec<bool> = {
            let mut polled: Vec<_> = clients
                .iter()
                .filter(|client| client.asked.is_some())
                .map(|client| PollFd::new(&client.stream, PollFlags::IN))
                .collect();
            poll(&mut polled, None).context("wait for answers")?;
            polled.iter().map(|one| !one.revents().is_empty()).collect()
        };
        let asking = clients.iter_mut().filter(|client| client.asked.is_some());
        for (client, _) in asking.zip(waiting).filter(|(_, waiting)| *waiting) {
            let Some(latency) = client.take()? else {
                continue;
            };
            if dumping.load(Ordering::Relaxed) {
                tally.took(&client.question, latency);
            }
            if !over.load(Ordering::Relaxed) {
                client.ask()?;
            }
        }
    }
    Ok(tally)
}

struct Client {
    stream: UnixStream,
    question: Question,
    asked: Option<Instant>,
    answer: Vec<u8>,
    /// Length of the reply with its head, once the head has arrived.
    whole: Option<(usize, usize)>,
}

impl Client {
    fn connect(place: &Path, question: Question) -> Result<Self> {
        let stream = UnixStream::connect(place);
        Ok(Self {
            stream: stream.with_context(|| format!("connect to {}", place.display()))?,
            question,
            asked: None,
            answer: Vec::new(),
            whole: None,
        })
    }

    fn ask(&mut self) -> Result<()> {
        self.asked = Some(Instant::now());
        self.answer.clear();
        self.whole = None;
        let asked = self.stream.write_all(&self.question.request);
        asked.context("ask")
    }

    /// Reads on. Returns the latency of the reply if this was its end.
    fn take(&mut self) -> Result<Option<Duration>> {
        let mut chunk = [0; 64 << 10];
        let read = self.stream.read(&mut chunk).context("read an answer")?;
        if read == 0 {
            bail!("an answer ends early");
        }
        self.answer.extend_from_slice(&chunk[..read]);
        if self.whole.is_none() {
            self.whole = whole(&self.answer)?;
        }
        let Some((head, whole)) = self.whole.filter(|(_, whole)| self.answer.len() >= *whole)
        else {
            return Ok(None);
        };
        let took = self.asked.take().map(|asked| asked.elapsed());
        let (head, body) = self.answer[..whole].split_at(head);
        self.question.check(std::str::from_utf8(head)?, body)?;
        Ok(took)
    }
}

/// Returns the lengths of a reply's head and of the whole reply, once the head has arrived.
fn whole(answer: &[u8]) -> Result<Option<(usize, usize)>> {
    let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else {
        return Ok(None);
    };
    let head = std::str::from_utf8(&answer[..end])?;
    let body = length(head).with_context(|| format!("no length in {head}"))?;
    Ok(Some((end + 4, end + 4 + body)))
}

fn length(head: &str) -> Option<usize> {
    let mut headers = head.lines().filter_map(|line| line.split_once(':'));
    let (_, length) = headers.find(|(name, _)| name.eq_ignore_ascii_case("content-length"))?;
    length.trim().parse().ok()
}

/// Stand-in that sends the daemon's recorded reply to each request, after as long as the daemon took, so that its
/// clients send as many requests as the daemon's.
pub(super) struct StandIn {
    path: PathBuf,
    /// Pause before each reply, microseconds, by the length of its request.
    pauses_us: Arc<Vec<(usize, AtomicU64)>>,
}

impl StandIn {
    /// Records the replies, and listens for as long as this program runs.
    pub(super) fn start(path: &Path, daemon: &Daemon, questions: &[Question]) -> Result<Self> {
        let mut recorded = Vec::new();
        for question in questions {
            let mut client = Client::connect(&super::api_of(daemon), question.clone())?;
            client.ask()?;
            while client.take()?.is_none() {}
            recorded.push((question.request.clone(), client.answer));
        }
        let recorded = Arc::new(recorded);
        let lengths = questions.iter().map(|question| question.request.len());
        let pauses_us: Vec<_> = lengths.map(|length| (length, AtomicU64::new(0))).collect();
        let pauses_us = Arc::new(pauses_us);
        let pauses = Arc::clone(&pauses_us);
        let listener = UnixListener::bind(path).context("listen in the daemon's stead")?;
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (recorded, pauses) = (Arc::clone(&recorded), Arc::clone(&pauses));
                std::thread::spawn(move || {
                    yield_to_others()?;
                    answer(stream, &recorded, &pauses)
                });
            }
        });
        Ok(Self {
            path: path.to_owned(),
            pauses_us,
        })
    }

    /// Sets the pauses to the mean latencies in `seen`.
    pub(super) fn as_slow_as(&self, seen: &Tally) {
        for (request, pause) in &*self.pauses_us {
            let mean = u64::try_from(seen.mean(*request).as_micros()).unwrap_or(u64::MAX);
            pause.store(mean, Ordering::Relaxed);
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Serves a client until it disconnects.
fn answer(
    stream: UnixStream,
    recorded: &[(Vec<u8>, Vec<u8>)],
    pauses_us: &[(usize, AtomicU64)],
) -> Result<()> {
    let mut to = stream.try_clone()?;
    let mut from = BufReader::new(stream);
    loop {
        let mut request = String::new();
        while !request.ends_with("\r\n\r\n") {
            if from.read_line(&mut request)? == 0 {
                return Ok(());
            }
        }
        let mut body = vec![0; length(&request).context("no length")?];
        from.read_exact(&mut body)?;
        // They differ in length or path, which both stand in the head.
        let question = |(asked, _): &&(Vec<u8>, Vec<u8>)| asked.starts_with(request.as_bytes());
        let (asked, answer) = recorded.iter().find(question).context("never asked")?;
        let pause = pauses_us.iter().find(|(length, _)| *length == asked.len());
        let pause = pause.map_or(0, |(_, pause)| pause.load(Ordering::Relaxed));
        std::thread::sleep(Duration::from_micros(pause));
        to.write_all(answer)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_when_its_body_is() {
        assert_eq!(whole(b"HTTP/1.1 200 OK\r\ncontent-le").unwrap(), None);
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
        assert_eq!(whole(head).unwrap(), Some((head.len(), head.len() + 5)));
        assert!(whole(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }

    #[test]
    fn rates_are_of_the_time_and_percentiles_of_all_answers() {
        assert!(Tally::default().rates().is_none());
        let tally = Tally {
            latencies_s: (1..=100).map(f64::from).collect(),
            tasks: 1000,
            elapsed: Duration::from_secs(10),
            ..Tally::default()
        };
        let rates = tally.rates().unwrap();
        assert_eq!((rates.p50_s, rates.p99_s), (50.0, 99.0));
        assert_eq!((rates.requests_per_s, rates.tasks_per_s), (10.0, 100.0));
    }
}
