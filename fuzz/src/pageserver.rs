//! Page-server core, over any bytes that a client could send.
//!
//! 1. Nothing panics, and every step uses up input or ends the conversation.
//! 2. The way in which the stream arrives changes nothing: events, addresses and replies are equal whether the
//!    payload is taken page by page or in large pieces.
//! 3. Payload accounting is exact: a frame's pages are handed out once each, in order, at ascending addresses.
//! 4. Ranges of accepted frames ascend within each space, none overlap, and all lie in the address space.

use std::collections::BTreeMap;

use permafrost_protocol::pageserver::recording::{Conversation, Keep};
use permafrost_protocol::pageserver::{
    Answer, Event, MAX_ADDRESS, MAX_GET_PAGES, PE_PRESENT, PageServer, ProtocolError, SpaceId, Want,
};

/// Length of a page, so that small inputs can have many pages: a byte of the input is a page of payload.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PageLength {
    /// Pages of 4096 bytes, as in the protocol.
    Real,
    /// Pieces of one byte.
    OneByte,
}

#[derive(Debug, PartialEq, Eq)]
struct Transcript {
    events: Vec<Result<Event, ProtocolError>>,
    pages: Vec<(u64, u8)>,
    replies: Vec<u8>,
    end: Result<(), ProtocolError>,
}

/// Checks all properties of page-server conversations. The first byte chooses how the payload is cut.
pub fn check(input: &[u8]) {
    let Some((&choice, stream)) = input.split_first() else {
        return;
    };
    let at_once = 2 + usize::from(choice & 0x3f);
    for length in [PageLength::Real, PageLength::OneByte] {
        let reference = converse(stream, 1, length);
        assert_eq!(
            converse(stream, at_once, length),
            reference,
            "pieces of {at_once} pages"
        );
        check_ranges(&reference.events);
        check_pages(&reference);
    }
    if let Ok(recorded) = Conversation::capture(stream, &[0; 256], Keep::Pages) {
        let decoded = Conversation::decode(&recorded.encode()).expect("a recording decodes");
        assert_eq!(decoded, recorded);
        assert!(stream.starts_with(&recorded.client_bytes()));
    }
    let _ = Conversation::decode(stream);
}

fn converse(stream: &[u8], at_once: usize, length: PageLength) -> Transcript {
    let page_bytes = if length == PageLength::Real { 4096 } else { 1 };
    let mut core = PageServer::new();
    let mut transcript = Transcript {
        events: vec![],
        pages: vec![],
        replies: vec![],
        end: Ok(()),
    };
    let mut rest = stream;
    let truncated = |missing: u64| {
        Err(ProtocolError::Truncated {
            missing_bytes: missing,
        })
    };
    loop {
        match core.want() {
            Want::Frame { bytes } => {
                if bytes > 0 && rest.is_empty() {
                    transcript.end = core.eof();
                    return transcript;
                }
                let Some((frame, after)) = rest.split_at_checked(bytes) else {
                    transcript.end = truncated((bytes - rest.len()) as u64);
                    return transcript;
                };
                rest = after;
                match core.frame(frame) {
                    Ok(None) => assert_ne!(bytes, 0, "a step without input must tell something"),
                    Ok(Some(event)) => transcript.events.push(Ok(event)),
                    Err(error) if error.is_recoverable() => transcript.events.push(Err(error)),
                    Err(error) => {
                        assert_eq!(
                            core.want(),
                            Want::Eof,
                            "a fatal error ends the conversation"
                        );
                        assert!(core.frame(&[0; 32]).is_err());
                        transcript.end = Err(error);
                        return transcript;
                    }
                }
            }
            Want::Payload { bytes } => {
                assert!(bytes > 0 && bytes % 4096 == 0);
                let whole = usize::try_from(bytes / 4096)
                    .unwrap_or(usize::MAX)
                    .min(rest.len() / page_bytes);
                if whole == 0 {
                    assert_eq!(core.eof(), truncated(bytes));
                    transcript.end = truncated(bytes);
                    return transcript;
                }
                let count = whole.min(at_once);
                let first = core.payload(count).vaddr;
                for page in 0..count {
                    transcript
                        .pages
                        .push((first + page as u64 * 4096, rest[page * page_bytes]));
                }
                rest = &rest[count * page_bytes..];
                let left = bytes - count as u64 * 4096;
                assert_eq!(
                    matches!(core.want(), Want::Payload { bytes } if bytes == left),
                    left > 0
                );
            }
            Want::Reply => {
                assert!(core.eof().is_err());
                let answer = match transcript.events.last() {
                    Some(Ok(Event::Close { .. })) => Answer::Status(0x0102_0304),
                    _ => Answer::HasParent(transcript.events.len().is_multiple_of(2)),
                };
                let reply = core.reply(answer);
                let len = match transcript.events.last() {
                    Some(Ok(Event::Open {
                        wants_reply: true, ..
                    })) => 1,
                    Some(Ok(Event::QueryParent { .. } | Event::Close { .. })) => 4,
                    other => panic!("a reply to {other:?}"),
                };
                assert_eq!(reply.as_ref().len(), len);
                transcript.replies.extend_from_slice(reply.as_ref());
            }
            Want::Eof => {
                assert!(matches!(
                    transcript.events.last(),
                    Some(Ok(Event::Close { .. }))
                ));
                transcript.end = core.eof();
                assert_eq!(transcript.end, Ok(()));
                return transcript;
            }
        }
    }
}

fn check_ranges(events: &[Result<Event, ProtocolError>]) {
    let mut open = None;
    let mut ends: BTreeMap<SpaceId, u64> = BTreeMap::new();
    for event in events.iter().filter_map(|event| event.as_ref().ok()) {
        match *event {
            Event::Open { space, .. } => {
                assert_eq!(ends.insert(space, 0), None, "{space} opened twice");
                open = Some(space);
            }
            Event::Pages {
                space,
                vaddr,
                nr_pages,
                flags,
            }
            | Event::Hole {
                space,
                vaddr,
                nr_pages,
                flags,
            } => {
                assert_eq!(open, Some(space));
                assert_eq!(
                    flags & PE_PRESENT != 0,
                    matches!(event, Event::Pages { .. })
                );
                assert!(flags & 3 != 0 || flags == PE_PRESENT);
                assert!(nr_pages > 0 && vaddr % 4096 == 0);
                let end = vaddr + nr_pages * 4096;
                assert!(end <= MAX_ADDRESS);
                assert!(vaddr >= ends[&space], "{space} goes back to {vaddr:#x}");
                ends.insert(space, end);
            }
            Event::Get {
                pid,
                vaddr,
                nr_pages,
            } => {
                assert!(pid > 0 && nr_pages > 0 && vaddr % 4096 == 0);
                assert!(nr_pages <= MAX_GET_PAGES);
                assert!(vaddr + nr_pages * 4096 <= MAX_ADDRESS);
            }
            Event::QueryParent { .. } | Event::Close { .. } => {}
        }
    }
}

/// Checks that the pages handed out are exactly those that the frames announced, refused frames included, up to the
/// end.
fn check_pages(transcript: &Transcript) {
    let mut pages = transcript.pages.iter();
    for event in &transcript.events {
        match event {
            Ok(Event::Pages {
                vaddr, nr_pages, ..
            }) => {
                for page in 0..*nr_pages {
                    match pages.next() {
                        Some((at, _)) => assert_eq!(*at, vaddr + page * 4096),
                        None => {
                            assert!(matches!(
                                transcript.end,
                                Err(ProtocolError::Truncated { .. })
                            ));
                            return;
                        }
                    }
                }
            }
            // The error of a refused frame does not contain the number of its pages.
            Err(_) => return,
            Ok(_) => {}
        }
    }
    assert_eq!(pages.next(), None, "pages that no frame announced");
}
