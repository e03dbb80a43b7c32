//! Passes what a client sends to a sink, on the thread that receives or on a second one.
//!
//! ```text
//!   thread of the connection                       thread of the sink
//!   receives into an empty chunk ── full chunks ──▶ checksums, encrypts, copies
//!               ▲                                        │
//!               └──────────── empty chunks ◀─────────────┘
//! ```
//!
//! The second thread is for sinks that take longer than the socket, and within one address space only: whatever needs
//! an answer waits for it to end, and is done by the thread of the connection. So the order of the pages is that in
//! which they came, and nothing is answered before all of them were taken. A dump has [`CHUNKS`] chunks of memory then
//! instead of one; when all are full, the client waits.

use std::mem;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use super::sink::{PageSink, SinkError};

/// Bytes received and passed on at once. Large enough that a 1 MiB frame costs a few system calls, small enough
/// that the bytes are still in a private L2 cache when the sink reads them again.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

/// Chunks of a connection whose sink has a thread of its own: one is filled, one is taken by the sink, and the others
/// make up for the times at which one of the two is late.
const CHUNKS: usize = 4;

/// Most runs of pages and holes of a chunk.
const MAX_PIECES: usize = 1_024;

/// Bytes of an address space from which on a second thread is worth its start.
const THREAD_BYTES: u64 = 2 << 20;

/// Sink of a conversation.
pub(super) struct Intake<'scope, 'env, K> {
    scope: &'scope Scope<'scope, 'env>,
    lane: Lane<'scope, 'env, K>,
    /// Bytes that came for the address space so far, since the last question.
    space_bytes: u64,
    /// True if no thread could be started for the address space.
    is_tried: bool,
    /// True if every sink gets a thread of its own.
    is_aside: bool,
    /// The first refusal. The sink was told to abort.
    refusal: Option<SinkError>,
}

enum Lane<'scope, 'env, K> {
    Here {
        sink: &'env mut K,
        chunk: Chunk,
    },
    Aside {
        filling: Chunk,
        full: SyncSender<Chunk>,
        empty: Receiver<Chunk>,
        thread: ScopedJoinHandle<'scope, Option<Taken<'env, K>>>,
        /// Chunks that are not allocated yet.
        spare: usize,
    },
    /// Between two of the others.
    None,
}

/// The sink as its thread leaves it, and the error after which it takes nothing more.
type Taken<'env, K> = (&'env mut K, Option<SinkError>);

struct Chunk {
    bytes: Box<[u8]>,
    filled: usize,
    pieces: Vec<Piece>,
}

enum Piece {
    Pages {
        vaddr: u64,
        flags: u16,
        bytes: usize,
    },
    Hole {
        vaddr: u64,
        pages: u64,
    },
}

impl Chunk {
    fn new() -> Self {
        Self {
            bytes: vec![0; CHUNK_BYTES].into_boxed_slice(),
            filled: 0,
            pieces: Vec::new(),
        }
    }

    fn is_full(&self) -> bool {
        self.filled == CHUNK_BYTES || self.pieces.len() >= MAX_PIECES
    }

    /// Passes everything to a sink, and is empty then.
    fn pass_to(&mut self, sink: &mut impl PageSink) -> Result<(), SinkError> {
        let mut from = 0;
        for piece in &self.pieces {
            match *piece {
                Piece::Hole { vaddr, pages } => sink.hole(vaddr, pages)?,
                Piece::Pages {
                    vaddr,
                    flags,
                    bytes,
                } => {
                    sink.pages(vaddr, flags, &self.bytes[from..from + bytes])?;
                    from += bytes;
                }
            }
        }
        self.filled = 0;
        self.pieces.clear();
        Ok(())
    }
}

impl<'scope, 'env, K: PageSink + Send> Intake<'scope, 'env, K> {
    pub(super) fn new(scope: &'scope Scope<'scope, 'env>, sink: &'env mut K) -> Self {
        let chunk = Chunk::new();
        Self {
            scope,
            lane: Lane::Here { sink, chunk },
            space_bytes: 0,
            is_tried: false,
            is_aside: false,
            refusal: None,
        }
    }

    /// Gives each sink a thread of its own, not only one that is slow: for pages that come faster than through a socket.
    pub(super) fn aside(self) -> Self {
        Self {
            is_aside: true,
            ..self
        }
    }

    /// Returns the refusal of what has come so far, as far as it is known.
    pub(super) fn refusal(&self) -> Option<&SinkError> {
        self.refusal.as_ref()
    }

    /// Takes everything that is on its way to the sink, and returns the refusal.
    pub(super) fn into_refusal(mut self) -> Option<SinkError> {
        self.here();
        self.refusal
    }

    /// Returns room for `bytes`, or as many as there is room for: whole pages if `bytes` is. To be followed by
    /// [`pages`](Self::pages) if it has been filled with pages.
    pub(super) fn room(&mut self, bytes: u64) -> &mut [u8] {
        if matches!(&self.lane, Lane::Aside { filling, .. } if filling.is_full()) {
            self.pass_on();
        }
        let chunk = match &mut self.lane {
            Lane::Here { chunk, .. } => chunk,
            Lane::Aside { filling, .. } => filling,
            Lane::None => return &mut [],
        };
        let room = &mut chunk.bytes[chunk.filled..];
        let len = usize::try_from(bytes).unwrap_or(usize::MAX).min(room.len());
        &mut room[..len]
    }

    /// Passes on the pages that were written to the beginning of the room.
    pub(super) fn pages(&mut self, vaddr: u64, flags: u16, bytes: usize) {
        self.space_bytes += bytes as u64;
        match &mut self.lane {
            Lane::Here { sink, chunk } => {
                if self.refusal.is_none() {
                    let taken = sink.pages(vaddr, flags, &chunk.bytes[..bytes]);
                    self.note(taken);
                    self.consider_thread();
                }
            }
            Lane::Aside { filling, .. } => {
                filling.filled += bytes;
                filling.pieces.push(Piece::Pages {
                    vaddr,
                    flags,
                    bytes,
                });
            }
            Lane::None => {}
        }
    }

    pub(super) fn hole(&mut self, vaddr: u64, pages: u64) {
        if matches!(&self.lane, Lane::Aside { filling, .. } if filling.is_full()) {
            self.pass_on();
        }
        match &mut self.lane {
            Lane::Aside { filling, .. } => filling.pieces.push(Piece::Hole { vaddr, pages }),
            _ => {
                self.ask(|sink| sink.hole(vaddr, pages));
            }
        }
    }

    /// Begins another address space.
    pub(super) fn begin_space(&mut self) {
        self.here();
        (self.space_bytes, self.is_tried) = (0, false);
    }

    /// Asks the sink, once it has taken everything before; `None` if it has refused, or refuses now.
    pub(super) fn ask<T>(
        &mut self,
        question: impl FnOnce(&mut K) -> Result<T, SinkError>,
    ) -> Option<T> {
        self.here();
        let Lane::Here { sink, .. } = &mut self.lane else {
            return None;
        };
        if self.refusal.is_some() {
            return None;
        }
        match question(sink) {
            Ok(answer) => Some(answer),
            Err(refusal) => {
                self.note(Err(refusal));
                None
            }
        }
    }

    /// Keeps the first refusal, and lets the sink free its resources while the rest is drained.
    pub(super) fn note(&mut self, result: Result<(), SinkError>) {
        let Err(refusal) = result else {
            return;
        };
        self.here();
        if let Lane::Here { sink, .. } = &mut self.lane
            && self.refusal.is_none()
        {
            sink.abort(&refusal.message);
            self.refusal = Some(refusal);
        }
    }

    /// Gives the sink a thread of its own if that is worth it. Without one everything goes on here.
    fn consider_thread(&mut self) {
        let Lane::Here { sink, .. } = &self.lane else {
            return;
        };
        let is_large = self.space_bytes >= THREAD_BYTES;
        if !is_large
            || self.is_tried
            || !(self.is_aside || sink.is_slow())
            || self.refusal.is_some()
        {
            return;
        }
        let (full, to_take) = sync_channel::<Chunk>(CHUNKS);
        let (give_back, empty) = sync_channel::<Chunk>(CHUNKS);
        // The sink comes behind the start, so that it is still here if no thread can be started.
        let (hand_over, handed_over) = sync_channel::<&'env mut K>(1);
        let take = move || {
            let sink = handed_over.recv().ok()?;
            let refusal = take_all(sink, &to_take, &give_back);
            Some((sink, refusal))
        };
        let thread = Builder::new().name("criu-pages".to_owned());
        let thread = match thread.spawn_scoped(self.scope, take) {
            Ok(thread) => thread,
            Err(error) => {
                tracing::warn!(event = "intake-thread-failed", %error, "no thread for the pages of a dump");
                // Not tried again for this space.
                self.is_tried = true;
                return;
            }
        };
        let Lane::Here { sink, chunk } = mem::replace(&mut self.lane, Lane::None) else {
            return;
        };
        // The thread waits for it.
        let _ = hand_over.send(sink);
        self.lane = Lane::Aside {
            filling: chunk,
            spare: CHUNKS - 1,
            full,
            empty,
            thread,
        };
    }

    /// Gives the thread of the sink what came, and takes an empty chunk.
    fn pass_on(&mut self) {
        let Lane::Aside {
            filling,
            spare,
            full,
            empty,
            ..
        } = &mut self.lane
        else {
            return;
        };
        let next = match spare.checked_sub(1) {
            Some(left) => {
                *spare = left;
                Ok(Chunk::new())
            }
            None => empty.recv(),
        };
        if let Ok(next) = next
            && full.send(mem::replace(filling, next)).is_ok()
        {
            return;
        }
        // The sink has refused.
        self.here();
    }

    /// Waits until the sink has taken everything, and has it back on this thread.
    fn here(&mut self) {
        if !matches!(self.lane, Lane::Aside { .. }) {
            return;
        }
        let Lane::Aside {
            filling,
            full,
            empty,
            thread,
            ..
        } = mem::replace(&mut self.lane, Lane::None)
        else {
            return;
        };
        // A sink that has refused takes nothing more.
        let _ = full.send(filling);
        drop(full);
        let taken = match thread.join() {
            Ok(taken) => taken,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let Some((sink, refusal)) = taken else {
            return;
        };
        let chunk = empty.try_recv().unwrap_or_else(|_| Chunk::new());
        self.lane = Lane::Here { sink, chunk };
        // Another thread is worth its start after as many bytes as this one was: not after each question.
        self.space_bytes = 0;
        self.refusal = self.refusal.take().or(refusal);
    }
}

/// Passes chunks to a sink until there are no more. Returns the error after which it takes nothing more; it was told to
/// abort.
fn take_all(
    sink: &mut impl PageSink,
    full: &Receiver<Chunk>,
    empty: &SyncSender<Chunk>,
) -> Option<SinkError> {
    for mut chunk in full {
        if let Err(refusal) = chunk.pass_to(sink) {
            sink.abort(&refusal.message);
            return Some(refusal);
        }
        // The conversation may be over. There is room for all chunks.
        let _ = empty.send(chunk);
    }
    None
}

#[cfg(test)]
#[path = "intake_tests.rs"]
mod tests;
