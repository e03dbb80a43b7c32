//! Clients without pause, and a stand-in for the daemon that answers what was recorded.
//!
//! One thread reads for half of the clients: each has a question on its way, whose answer is read when it has come.

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

use super::super::figures::as_f64;
use super::questions::Question;

/// Threads of the clients.
const THREADS: usize = 2;

/// They go behind everything that is measured.
const NICE: i32 = 19;

/// Before the first dump beside them.
const UNDER_WAY: Duration = Duration::from_millis(300);

/// What clients saw.
#[derive(Debug, Default)]
pub(super) struct Tally {
    latencies_s: Vec<f64>,
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
        self.tasks += other.tasks;
        self.elapsed += other.elapsed;
    }

    fn mean(&self) -> Duration {
        let count = as_f64(self.latencies_s.len().max(1) as u64);
        Duration::from_secs_f64(self.latencies_s.iter().sum::<f64>() / count)
    }

    pub(super) fn answers(&self) -> usize {
        self.latencies_s.len()
    }

    pub(super) fn rates(&self) -> Option<Rates> {
        let mut sorted = self.latencies_s.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let rank = |part: usize| sorted.get((sorted.len() * part).div_ceil(100).checked_sub(1)?);
        let seconds = self.elapsed.as_secs_f64();
        Some(Rates {
            requests_per_s: as_f64(sorted.len() as u64) / seconds,
            tasks_per_s: as_f64(self.tasks as u64) / seconds,
            p50_s: *rank(50)?,
            p99_s: *rank(99)?,
        })
    }
}

/// Clients that ask until they are stopped.
pub(super) struct Load {
    over: Arc<AtomicBool>,
    began: Instant,
    threads: Vec<JoinHandle<Result<Tally>>>,
}

impl Load {
    /// Connects so many clients to the socket, and has them ask.
    pub(super) fn start(place: &Path, clients: usize, questions: &[Question]) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let mut shares = [(); THREADS].map(|()| Vec::new());
        for client in 0..clients {
            let question = questions[client % questions.len()].clone();
            let share = client / questions.len() % THREADS;
            shares[share].push(Client::connect(place, question)?);
        }
        let began = Instant::now();
        let threads = shares.map(|clients| {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                yield_to_others()?;
                ask_on(clients, &over)
            })
        });
        std::thread::sleep(UNDER_WAY);
        Ok(Self {
            over,
            began,
            threads: threads.into(),
        })
    }

    /// Has them take the last answers; what all of them saw.
    pub(super) fn stop(self) -> Result<Tally> {
        let elapsed = self.began.elapsed();
        self.over.store(true, Ordering::Relaxed);
        let mut tally = Tally::default();
        for thread in self.threads {
            let seen = thread.join();
            tally.add(seen.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(Tally { elapsed, ..tally })
    }
}

/// Of this thread alone: the kernel's 0 is the thread that calls.
fn yield_to_others() -> Result<()> {
    rustix::process::setpriority_process(None, NICE).context("go behind the others")
}

fn ask_on(mut clients: Vec<Client>, over: &AtomicBool) -> Result<Tally> {
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
            // Those that come when all is over are right, too, but nobody dumps any more.
            if !over.load(Ordering::Relaxed) {
                tally.latencies_s.push(latency.as_secs_f64());
                tally.tasks += client.question.tasks;
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
    /// Its length with its head, once that has come.
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

    /// Reads on; how long the answer took if that was its end.
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

/// Lengths of an answer's head and of all of it, once the head is there.
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

/// Answers each question with what the daemon has said to it once, after as long as the daemon takes: its clients ask as
/// often as the daemon's.
pub(super) struct StandIn {
    path: PathBuf,
    /// Before each answer, microseconds.
    pause_us: Arc<AtomicU64>,
}

impl StandIn {
    /// Records the answers, and listens, for as long as this program runs.
    pub(super) fn start(path: &Path, daemon: &Daemon, questions: &[Question]) -> Result<Self> {
        let mut recorded = Vec::new();
        for question in questions {
            let mut client = Client::connect(&super::api_of(daemon), question.clone())?;
            client.ask()?;
            while client.take()?.is_none() {}
            recorded.push((question.request.clone(), client.answer));
        }
        let recorded = Arc::new(recorded);
        let pause_us = Arc::<AtomicU64>::default();
        let pause = Arc::clone(&pause_us);
        let listener = UnixListener::bind(path).context("listen in the daemon's stead")?;
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (recorded, pause) = (Arc::clone(&recorded), Arc::clone(&pause));
                std::thread::spawn(move || {
                    yield_to_others()?;
                    answer(stream, &recorded, &pause)
                });
            }
        });
        Ok(Self {
            path: path.to_owned(),
            pause_us,
        })
    }

    /// From now on its clients wait as long as those did in the mean.
    pub(super) fn as_slow_as(&self, seen: &Tally) {
        let pause = u64::try_from(seen.mean().as_micros()).unwrap_or(u64::MAX);
        self.pause_us.store(pause, Ordering::Relaxed);
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Until the client goes.
fn answer(stream: UnixStream, recorded: &[(Vec<u8>, Vec<u8>)], pause_us: &AtomicU64) -> Result<()> {
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
        let (_, answer) = recorded.iter().find(question).context("never asked")?;
        std::thread::sleep(Duration::from_micros(pause_us.load(Ordering::Relaxed)));
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
        };
        let rates = tally.rates().unwrap();
        assert_eq!((rates.p50_s, rates.p99_s), (50.0, 99.0));
        assert_eq!((rates.requests_per_s, rates.tasks_per_s), (10.0, 100.0));
    }
}
