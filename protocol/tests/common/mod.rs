//! Drives the page-server core over bytes in memory, as a shell over a socket would.

use permafrost_protocol::pageserver::{Answer, Event, PageServer, ProtocolError, Want};

/// Outcome of a conversation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Transcript {
    /// Events, in order, recoverable errors among them.
    pub(crate) events: Vec<Result<Event, ProtocolError>>,
    /// Address and bytes of each page.
    pub(crate) pages: Vec<(u64, Vec<u8>)>,
    /// Bytes of all replies.
    pub(crate) replies: Vec<u8>,
    /// Result of the conversation's end.
    pub(crate) end: Result<(), ProtocolError>,
}

/// Feeds `input`, taking payload in pieces of at most `pages_at_once` pages; has_parent is always answered
/// with yes, CLOSE with 0 or, after a recoverable error, with 22.
pub(crate) fn drive(input: &[u8], pages_at_once: usize) -> Transcript {
    let mut core = PageServer::new();
    let mut transcript = Transcript {
        events: Vec::new(),
        pages: Vec::new(),
        replies: Vec::new(),
        end: Ok(()),
    };
    let mut rest = input;
    loop {
        match core.want() {
            Want::Frame { bytes } => {
                if bytes > 0 && rest.is_empty() {
                    transcript.end = core.eof();
                    return transcript;
                }
                let Some((frame, after)) = rest.split_at_checked(bytes) else {
                    transcript.end = Err(ProtocolError::Truncated {
                        missing_bytes: (bytes - rest.len()) as u64,
                    });
                    return transcript;
                };
                rest = after;
                match core.frame(frame) {
                    Ok(None) => {}
                    Ok(Some(event)) => transcript.events.push(Ok(event)),
                    Err(error) if error.is_recoverable() => transcript.events.push(Err(error)),
                    Err(error) => {
                        assert_eq!(core.want(), Want::Eof);
                        transcript.end = Err(error);
                        return transcript;
                    }
                }
            }
            Want::Payload { bytes } => {
                let whole = usize::try_from(bytes / 4096)
                    .unwrap_or(usize::MAX)
                    .min(rest.len() / 4096);
                if whole == 0 {
                    let Err(ProtocolError::Truncated { missing_bytes }) = core.eof() else {
                        panic!("an end inside a payload must be an error");
                    };
                    assert_eq!(missing_bytes, bytes);
                    transcript.end = Err(ProtocolError::Truncated {
                        missing_bytes: bytes - rest.len() as u64,
                    });
                    return transcript;
                }
                let count = whole.min(pages_at_once);
                let first = core.payload(count).vaddr;
                for at in 0..count {
                    let (page, after) = rest.split_at(4096);
                    transcript
                        .pages
                        .push((first + at as u64 * 4096, page.to_vec()));
                    rest = after;
                }
            }
            Want::Reply => {
                let spoilt = transcript.events.iter().any(Result::is_err);
                let answer = match transcript.events.last() {
                    Some(Ok(Event::Close { .. })) => Answer::Status(if spoilt { 22 } else { 0 }),
                    _ => Answer::HasParent(true),
                };
                transcript
                    .replies
                    .extend_from_slice(core.reply(answer).as_ref());
            }
            Want::Eof => {
                transcript.end = core.eof();
                return transcript;
            }
        }
    }
}
