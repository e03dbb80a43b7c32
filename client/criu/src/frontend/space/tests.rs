//! Tests of what comes through two pipes, from senders that mean no good.

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read as _, Write as _, pipe};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::images::Pagemap;
use proptest::prelude::*;

use super::super::sink::SinkError;
use super::*;

/// Keeps the pages by their addresses.
#[derive(Default)]
struct Pages {
    runs: Vec<(u64, Vec<u8>)>,
    refuses_from: Option<u64>,
    aborted: Option<String>,
}

impl PageSink for Pages {
    fn open(&mut self, _: SpaceId) -> Result<bool, SinkError> {
        Ok(false)
    }

    fn has_parent(&mut self, _: SpaceId) -> Result<bool, SinkError> {
        Ok(false)
    }

    fn pages(&mut self, vaddr: u64, _: u16, bytes: &[u8]) -> Result<(), SinkError> {
        if self.refuses_from.is_some_and(|from| vaddr >= from) {
            let (message, status) = ("the region is full".to_owned(), 28);
            return Err(SinkError { message, status });
        }
        match self.runs.last_mut() {
            Some((first, before)) if *first + before.len() as u64 == vaddr => {
                before.extend_from_slice(bytes);
            }
            _ => self.runs.push((vaddr, bytes.to_vec())),
        }
        Ok(())
    }

    fn hole(&mut self, _: u64, _: u64) -> Result<(), SinkError> {
        Ok(())
    }

    fn close(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        self.aborted = Some(reason.to_owned());
    }
}

const LIMITS: SpaceLimits = SpaceLimits {
    waiting_bytes: 64 << 20,
    idle: Duration::from_secs(60),
    pipe_bytes: waiting::PIPE_BYTES,
};

/// Limits for senders of which nothing more is to come.
const SHORT: SpaceLimits = SpaceLimits {
    idle: Duration::from_millis(300),
    ..LIMITS
};

fn take(
    sink: &mut Pages,
    limits: &SpaceLimits,
    pagemap: impl Into<OwnedFd>,
    pages: impl Into<OwnedFd>,
) -> Result<(), SpaceError> {
    let (caller, _its_end) = UnixStream::pair().unwrap();
    let pipes = SpacePipes {
        space: SpaceId::process(7),
        pages_id: 1,
        pagemap: pagemap.into(),
        pages: pages.into(),
        room: Arc::new(PipeRoom::unreserved()),
    };
    pipes.take(sink, limits, caller.as_fd())
}

fn pagemap(runs: &[(u64, u64)]) -> Vec<u8> {
    let entries = runs.iter().map(|&(vaddr, nr_pages)| PagemapEntry {
        vaddr,
        nr_pages,
        flags: PE_PRESENT,
    });
    let entries = entries.collect();
    Pagemap {
        pages_id: 1,
        entries,
    }
    .write()
}

/// Returns pages that differ from each other.
fn pages(first: u64, count: u64) -> Vec<u8> {
    let pages = first..first + count;
    let words = pages.flat_map(|page| (0..512_u64).map(move |word| page << 16 | word));
    words.flat_map(u64::to_le_bytes).collect()
}

/// Sends `bytes` in pieces of a length.
fn send(mut to: PipeWriter, bytes: Vec<u8>, piece: usize) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        for piece in bytes.chunks(piece) {
            if to.write_all(piece).is_err() {
                break;
            }
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn pages_get_the_addresses_of_their_pagemap(
        lengths in proptest::collection::vec((1_u64..40, 1_u64..5), 0..60),
        piece in 1_usize..70_000,
        entries_late in any::<bool>(),
        in_files in any::<bool>(),
    ) {
        let limits = SpaceLimits {
            pipe_bytes: if in_files { &[] } else { LIMITS.pipe_bytes },
            ..LIMITS
        };
        let (mut runs, mut expected, mut at, mut count) = (Vec::new(), Vec::new(), 1, 0);
        for (length, gap) in lengths {
            runs.push((at * PAGE_BYTES, length));
            expected.push((at * PAGE_BYTES, pages(count, length)));
            at += length + gap;
            count += length;
        }
        let (entries_out, entries_in) = pipe().unwrap();
        let (pages_out, pages_in) = pipe().unwrap();
        let sending = send(pages_in, pages(0, count), piece);
        let map = pagemap(&runs);
        let entries = thread::spawn(move || {
            if entries_late {
                sending.join().unwrap();
            }
            send(entries_in, map, 1 + piece % 100).join().unwrap();
        });
        let mut sink = Pages::default();
        take(&mut sink, &limits, entries_out, pages_out).unwrap();
        entries.join().unwrap();
        prop_assert!(sink.runs == expected);
        prop_assert_eq!(sink.aborted, None);
    }
}

#[track_caller]
fn refused(outcome: Result<(), SpaceError>, sink: &Pages, words: &str) {
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
    assert!(
        sink.aborted
            .as_ref()
            .is_some_and(|told| told.contains(words))
    );
}

#[test]
fn anything_but_a_pipe_is_refused() {
    let file = || tempfile::tempfile().unwrap();
    let directory = || File::open("/").unwrap();
    let socket = || UnixStream::pair().unwrap().0;
    let writer = || pipe().unwrap().1;
    let others: [OwnedFd; 4] = [
        file().into(),
        directory().into(),
        socket().into(),
        writer().into(),
    ];
    for other in others {
        let (out, _) = pipe().unwrap();
        let mut sink = Pages::default();
        let outcome = take(&mut sink, &LIMITS, other.try_clone().unwrap(), out);
        refused(
            outcome,
            &sink,
            "pagemap of process 7: the descriptor is no pipe",
        );
        let (out, _) = pipe().unwrap();
        let mut sink = Pages::default();
        let outcome = take(&mut sink, &LIMITS, out, other);
        refused(
            outcome,
            &sink,
            "pages of process 7: the descriptor is no pipe",
        );
    }
}

#[test]
fn a_sender_that_falls_silent_or_goes_is_given_up() {
    let (entries_out, _entries_in) = pipe().unwrap();
    let (pages_out, mut pages_in) = pipe().unwrap();
    pages_in.write_all(&pages(0, 1)).unwrap();
    let mut sink = Pages::default();
    let outcome = take(&mut sink, &SHORT, entries_out, pages_out);
    refused(outcome, &sink, "nothing of process 7 has come");

    let (caller, its_end) = UnixStream::pair().unwrap();
    let (entries_out, _entries_in) = pipe().unwrap();
    let (pages_out, _pages_in) = pipe().unwrap();
    let pipes = SpacePipes {
        space: SpaceId::process(7),
        pages_id: 1,
        pagemap: entries_out.into(),
        pages: pages_out.into(),
        room: Arc::new(PipeRoom::unreserved()),
    };
    let leaving = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(its_end);
    });
    let mut sink = Pages::default();
    let began = Instant::now();
    let outcome = pipes.take(&mut sink, &LIMITS, caller.as_fd());
    refused(outcome, &sink, "has gone");
    assert!(began.elapsed() < Duration::from_secs(30));
    leaving.join().unwrap();
}

/// The sender keeps a read end, and takes what it has sent: a read of the pipe would wait for ever.
#[test]
fn a_pipe_that_others_read_too_blocks_nobody() {
    let (entries_out, _entries_in) = pipe().unwrap();
    let (pages_out, mut pages_in) = pipe().unwrap();
    let mut thief: PipeReader = pages_out.try_clone().unwrap();
    let sending = thread::spawn(move || {
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(500) {
            if pages_in.write_all(&[0; PAGE_SIZE]).is_err() {
                break;
            }
        }
    });
    // Until the sender has ended.
    let stealing = thread::spawn(move || {
        let mut page = [0; PAGE_SIZE];
        while thief.read(&mut page).is_ok_and(|read| read > 0) {}
    });
    let mut sink = Pages::default();
    let outcome = take(&mut sink, &SHORT, entries_out, pages_out);
    assert!(outcome.is_err());
    sending.join().unwrap();
    stealing.join().unwrap();
}

#[test]
fn endless_pages_and_endless_runs_are_bounded() {
    let limits = SpaceLimits {
        waiting_bytes: 1 << 20,
        ..LIMITS
    };
    // Pages without addresses, in large pieces and in small ones, of which a pipe holds few bytes.
    for piece in [PAGE_SIZE, 1] {
        let (entries_out, _entries_in) = pipe().unwrap();
        let (pages_out, mut pages_in) = pipe().unwrap();
        let bytes = vec![1; piece];
        let sending = thread::spawn(move || {
            let mut sent = 0_u64;
            while pages_in.write_all(&bytes).is_ok() {
                sent += bytes.len() as u64;
            }
            sent
        });
        let mut sink = Pages::default();
        let outcome = take(&mut sink, &limits, entries_out, pages_out);
        refused(outcome, &sink, "have no address yet");
        assert!(sending.join().unwrap() < 4 << 20);
    }
    // Addresses without pages: they stay in their pipe.
    let (entries_out, entries_in) = pipe().unwrap();
    let (pages_out, _pages_in) = pipe().unwrap();
    let runs: Vec<(u64, u64)> = (0..1 << 20).map(|at| (at * 2 * PAGE_BYTES, 1)).collect();
    let sending = send(entries_in, pagemap(&runs), 4096);
    let mut sink = Pages::default();
    let outcome = take(&mut sink, &SHORT, entries_out, pages_out);
    refused(outcome, &sink, "nothing of process 7 has come");
    sending.join().unwrap();
    // A run of more pages than there can be.
    let (entries_out, mut entries_in) = pipe().unwrap();
    let (pages_out, mut pages_in) = pipe().unwrap();
    entries_in
        .write_all(&pagemap(&[(0x1000, 1 << 40)]))
        .unwrap();
    pages_in.write_all(&pages(0, 2)).unwrap();
    drop((entries_in, pages_in));
    let mut sink = Pages::default();
    let outcome = take(&mut sink, &LIMITS, entries_out, pages_out);
    refused(outcome, &sink, "too few");
}

#[test]
fn a_sink_that_refuses_ends_the_transfer() {
    let (entries_out, mut entries_in) = pipe().unwrap();
    let (pages_out, pages_in) = pipe().unwrap();
    let count = 4096;
    entries_in.write_all(&pagemap(&[(0, count)])).unwrap();
    drop(entries_in);
    // More than a thread of the sink's own is worth, so that it refuses there.
    let sending = send(pages_in, pages(0, count), 1 << 16);
    let mut sink = Pages {
        refuses_from: Some(3000 * PAGE_BYTES),
        ..Pages::default()
    };
    let outcome = take(&mut sink, &LIMITS, entries_out, pages_out);
    assert!(matches!(&outcome, Err(SpaceError::Refused(refusal)) if refusal.status == 28));
    refused(outcome, &sink, "the region is full");
    sending.join().unwrap();
}
