//! Tests of the passing of pages to a sink.

use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ThreadId};
use std::time::Duration;

use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{Dialect, PE_PRESENT, SpaceId};
use permafrost_protocol::{PAGE_BYTES, PAGE_SIZE};

use super::super::pageserver::{Bounded, ConversationEnd, ServeError, serve};
use super::*;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Open(SpaceId),
    /// A page, by its address and its first byte.
    Page(u64, u16, u8),
    Hole(u64, u64),
    Close,
    Abort,
}

/// Records its calls, and the threads that they come from.
#[derive(Default)]
struct Recorder<'a> {
    is_slow: bool,
    calls: Vec<(ThreadId, Call)>,
    refuses_from: Option<u64>,
    panics_from: Option<u64>,
    taken_bytes: Option<&'a AtomicUsize>,
}

impl Recorder<'_> {
    fn call(&mut self, call: Call) {
        self.calls.push((thread::current().id(), call));
    }

    fn names(&self) -> Vec<Call> {
        self.calls.iter().map(|(_, call)| call.clone()).collect()
    }
}

impl PageSink for Recorder<'_> {
    fn open(&mut self, space: SpaceId) -> Result<bool, SinkError> {
        self.call(Call::Open(space));
        Ok(true)
    }

    fn has_parent(&mut self, _: SpaceId) -> Result<bool, SinkError> {
        Ok(true)
    }

    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), SinkError> {
        let message = "full".to_owned();
        if self.refuses_from.is_some_and(|from| vaddr >= from) {
            return Err(SinkError {
                message,
                status: 28,
            });
        }
        assert!(self.panics_from.is_none_or(|from| vaddr < from));
        for (page, vaddr) in bytes.chunks(PAGE_SIZE).zip((vaddr..).step_by(PAGE_SIZE)) {
            assert_eq!(page, [page[0]; PAGE_SIZE]);
            self.call(Call::Page(vaddr, flags, page[0]));
        }
        if let Some(taken) = self.taken_bytes {
            thread::sleep(Duration::from_millis(1));
            taken.fetch_add(bytes.len(), Ordering::SeqCst);
        }
        Ok(())
    }

    fn is_slow(&self) -> bool {
        self.is_slow
    }

    fn hole(&mut self, vaddr: u64, pages: u64) -> Result<(), SinkError> {
        self.call(Call::Hole(vaddr, pages));
        Ok(())
    }

    fn close(&mut self) -> Result<(), SinkError> {
        self.call(Call::Close);
        Ok(())
    }

    fn abort(&mut self, _: &str) {
        self.call(Call::Abort);
    }
}

/// Client that has sent everything.
#[derive(Default)]
struct Client<'a> {
    sent: Vec<u8>,
    read_bytes: usize,
    replies: Vec<u8>,
    /// Bytes that the sink has taken, and the most that it may be behind.
    taken: Option<(&'a AtomicUsize, usize)>,
}

impl Read for Client<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = (&self.sent[self.read_bytes..]).read(buffer)?;
        self.read_bytes += read;
        if let Some((taken, most)) = self.taken {
            assert!(self.read_bytes <= taken.load(Ordering::SeqCst) + most);
        }
        Ok(read)
    }
}

impl Write for Client<'_> {
    fn write(&mut self, reply: &[u8]) -> io::Result<usize> {
        self.replies.write(reply)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Bounded for Client<'_> {
    fn limit_reads(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }
}

impl Client<'_> {
    fn open(&mut self, id: u32) {
        let frame = Encoder::new(Dialect::V32).open(SpaceId::process(id));
        self.sent.extend_from_slice(frame.as_ref());
    }

    fn pages(&mut self, id: u32, index: u64, pages: u32) {
        let space = SpaceId::process(id);
        let encoder = Encoder::new(Dialect::V32);
        let frame = encoder.pages(space, index * PAGE_BYTES, pages, PE_PRESENT);
        self.sent.extend_from_slice(frame.as_ref());
        for page in 0..u64::from(pages) {
            let byte = (index + page).to_le_bytes()[0];
            self.sent.resize(self.sent.len() + PAGE_SIZE, byte);
        }
    }

    fn hole(&mut self, id: u32, index: u64, pages: u32) {
        let encoder = Encoder::new(Dialect::V32);
        let frame = encoder.hole(SpaceId::process(id), index * PAGE_BYTES, pages);
        self.sent.extend_from_slice(frame.as_ref());
    }

    fn close(&mut self) {
        let frame = Encoder::new(Dialect::V32).close();
        self.sent.extend_from_slice(frame.as_ref());
    }

    /// Sends a large space, in frames of all lengths and with holes, between two small ones.
    fn dump() -> Self {
        let mut client = Self::default();
        client.open(1);
        client.pages(1, 3, 9);
        client.open(2);
        let mut index = 1;
        for round in 0..3_000 {
            let pages = [1, 1, 2, 7, 1, 300, 1, 1][round % 8];
            client.pages(2, index, pages);
            index += u64::from(pages);
            if round % 3 == 0 {
                client.hole(2, index, 2);
                index += 2;
            }
            if round % 500 == 0 {
                for _ in 0..700 {
                    client.hole(2, index, 1);
                    index += 2;
                }
            }
            if client.sent.len() > 24 << 20 {
                break;
            }
        }
        client.open(3);
        client.pages(3, 1, 1);
        client.close();
        client
    }
}

#[test]
fn a_slow_sink_takes_the_same_in_the_same_order_from_a_second_thread() {
    let mut here = Recorder::default();
    let mut client = Client::dump();
    let ended = serve(&mut client, &mut here);
    assert!(matches!(ended, Ok(ConversationEnd::Closed)), "{ended:?}");
    let mut aside = Recorder {
        is_slow: true,
        ..Recorder::default()
    };
    let mut again = Client::dump();
    let ended = serve(&mut again, &mut aside);
    assert!(matches!(ended, Ok(ConversationEnd::Closed)), "{ended:?}");
    assert!(here.names() == aside.names() && here.names().len() > 6_000);
    assert_eq!(client.replies, again.replies);

    let own = thread::current().id();
    assert!(here.calls.iter().all(|(thread, _)| *thread == own));
    let elsewhere = |call: &&(ThreadId, Call)| call.0 != own;
    let moved = aside.calls.iter().filter(elsewhere).count();
    assert!(moved > 4_000, "{moved}");
    // What is answered is done here, and so are the small spaces.
    for (thread, call) in &aside.calls {
        assert!(*thread == own || matches!(call, Call::Page(..) | Call::Hole(..)));
    }
    let last = &aside.calls[aside.calls.len() - 3..];
    assert!(last.iter().all(|(thread, _)| *thread == own));
}

#[test]
fn a_refusal_on_the_second_thread_is_the_answer_to_close() {
    let mut replies = Vec::new();
    for is_slow in [false, true] {
        let mut sink = Recorder {
            is_slow,
            refuses_from: Some(2_000 * PAGE_BYTES),
            ..Recorder::default()
        };
        let mut client = Client::dump();
        let ended = serve(&mut client, &mut sink);
        let Ok(ConversationEnd::Refused(refusal)) = ended else {
            panic!("{ended:?}");
        };
        assert_eq!((refusal.status, refusal.message.as_str()), (28, "full"));
        let names = sink.names();
        assert_eq!(names.last(), Some(&Call::Abort));
        assert_eq!(names.iter().filter(|call| **call == Call::Abort).count(), 1);
        replies.push(client.replies);
    }
    assert_eq!(replies[0], replies[1]);
}

#[test]
fn a_connection_that_ends_early_is_told_to_the_sink_once_and_last() {
    let whole = Client::dump();
    for cut in [9 << 20, (9 << 20) + 4_321, whole.sent.len() - 1] {
        let mut sink = Recorder {
            is_slow: true,
            ..Recorder::default()
        };
        let mut client = Client {
            sent: whole.sent[..cut].to_vec(),
            ..Client::default()
        };
        let ended = serve(&mut client, &mut sink);
        assert!(
            matches!(ended, Err(ServeError::Truncated { .. })),
            "{ended:?}"
        );
        let names = sink.names();
        assert_eq!(names.last(), Some(&Call::Abort));
        assert_eq!(names.iter().filter(|call| **call == Call::Abort).count(), 1);
    }
}

#[test]
fn the_client_waits_for_a_sink_that_is_behind() {
    let taken = AtomicUsize::new(0);
    let mut sink = Recorder {
        is_slow: true,
        taken_bytes: Some(&taken),
        ..Recorder::default()
    };
    let mut client = Client::default();
    client.open(1);
    for frame in 0..24 {
        client.pages(1, 1 + frame * 256, 256);
    }
    client.close();
    // The chunks, and headers of frames.
    client.taken = Some((&taken, CHUNKS * CHUNK_BYTES + 4_096));
    let ended = serve(&mut client, &mut sink);
    assert!(matches!(ended, Ok(ConversationEnd::Closed)), "{ended:?}");
    assert_eq!(taken.load(Ordering::SeqCst), 24 << 20);
}

#[test]
fn a_panic_of_the_sink_is_that_of_the_connection() {
    let mut sink = Recorder {
        is_slow: true,
        panics_from: Some(2_000 * PAGE_BYTES),
        ..Recorder::default()
    };
    let served = catch_unwind(AssertUnwindSafe(|| serve(&mut Client::dump(), &mut sink)));
    assert!(served.is_err());
}

#[test]
fn a_question_does_not_start_another_thread_at_once() {
    let mut sink = Recorder {
        is_slow: true,
        ..Recorder::default()
    };
    let pages = THREAD_BYTES / PAGE_BYTES;
    thread::scope(|scope| {
        let mut intake = Intake::new(scope, &mut sink);
        let mut next = 0;
        let mut send = |intake: &mut Intake<'_, '_, _>, count: u64| {
            for _ in 0..count {
                intake.room(PAGE_BYTES).fill(1);
                intake.pages(next * PAGE_BYTES, PE_PRESENT, PAGE_SIZE);
                next += 1;
            }
        };
        send(&mut intake, pages + 1);
        assert!(matches!(intake.lane, Lane::Aside { .. }));
        for _ in 0..3 {
            assert!(
                intake
                    .ask(|sink| sink.has_parent(SpaceId::process(1)))
                    .is_some()
            );
            send(&mut intake, 1);
            assert!(matches!(intake.lane, Lane::Here { .. }));
        }
        // After as many bytes as before.
        send(&mut intake, pages);
        assert!(matches!(intake.lane, Lane::Aside { .. }));
        assert!(intake.into_refusal().is_none());
    });
    assert_eq!(sink.calls.len() as u64, 2 * pages + 4);
}
