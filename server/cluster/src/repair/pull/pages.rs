//! Fetches single pages of a checkpoint, to replace damaged ones here.

use std::time::Instant;

use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::request;
use permafrost_store::{Object, StoreError};
use permafrost_transport::peer::FetchReader;

use super::{MAX_SOURCES, OPENING, Puller};
use crate::error::CopyingError;

/// Pages with their indices.
type Pages = Vec<(u64, Box<[u8; PAGE_SIZE]>)>;

impl Puller {
    /// Fetches pages of an object from the first of the `holders` that gives all of them, and whose pages `take`
    /// accepts. `wanted` ascends. Holders that fail go to the end, so that the next fetch does not wait for them.
    ///
    /// # Errors
    /// [`ErrorCode::Unavailable`] with the reason of each holder.
    pub fn pages<T>(
        &self,
        checkpoint: &str,
        holders: &mut Vec<String>,
        object: &Object,
        wanted: &[u64],
        take: impl Fn(&[(u64, Box<[u8; PAGE_SIZE]>)]) -> Result<T, String>,
    ) -> Result<T, StoreError> {
        let mut said = Vec::new();
        holders.retain(|node| *node != self.node);
        for _ in 0..holders.len().min(MAX_SOURCES) {
            let Some(node) = holders.first() else { break };
            let pages = self.pages_from(node, checkpoint, object, wanted);
            match pages.and_then(|pages| take(&pages)) {
                Ok(taken) => return Ok(taken),
                Err(why) => said.push(format!("{node}: {why}")),
            }
            holders.rotate_left(1);
        }
        Err(CopyingError::NoPages { reasons: said }.into())
    }

    fn pages_from(
        &self,
        node: &str,
        checkpoint: &str,
        object: &Object,
        wanted: &[u64],
    ) -> Result<Pages, String> {
        let (Some(first), Some(last)) = (wanted.first(), wanted.last()) else {
            return Ok(Pages::new());
        };
        let mut fetch = request::Fetch {
            checkpoint: checkpoint.to_owned(),
            background: true,
            ..request::Fetch::default()
        };
        match object {
            Object::Space(place) => {
                fetch.space = u32::try_from(*place).map_or(u32::MAX, |place| place + 1);
                fetch.from_index = *first;
                fetch.pages = last - first + 1;
            }
            Object::Image(name) => fetch.image.clone_from(name),
        }
        let deadline = Instant::now() + OPENING;
        let frames = FetchReader::open(&self.network, node, fetch, deadline);
        let mut pages = Pages::new();
        // Offset of the image's next bytes.
        let mut offset = 0_usize;
        for frame in frames.map_err(|error| error.to_string())? {
            let frame = frame.map_err(|error| error.to_string())?;
            match frame.header.kind {
                Kind::Pages => {
                    let whole = frame.payload.chunks_exact(PAGE_SIZE);
                    for (bytes, index) in whole.zip(frame.header.index..) {
                        keep(&mut pages, wanted, index, 0, bytes);
                    }
                }
                Kind::ImageData => {
                    let mut bytes = &frame.payload[..];
                    while !bytes.is_empty() {
                        let (index, at) = (offset / PAGE_SIZE, offset % PAGE_SIZE);
                        let (now, rest) = bytes.split_at(bytes.len().min(PAGE_SIZE - at));
                        keep(&mut pages, wanted, index as u64, at, now);
                        offset += now.len();
                        bytes = rest;
                    }
                }
                _ => {}
            }
        }
        match wanted.iter().find(|index| !has(&pages, **index)) {
            None => Ok(pages),
            Some(index) => Err(format!("page {index:#x} did not come")),
        }
    }
}

fn has(pages: &Pages, index: u64) -> bool {
    pages.iter().any(|(kept, _)| *kept == index)
}

/// Copies bytes of a wanted page, which begin at `at` in it; bytes that never come are zero.
fn keep(pages: &mut Pages, wanted: &[u64], index: u64, at: usize, bytes: &[u8]) {
    if wanted.binary_search(&index).is_err() {
        return;
    }
    if pages.last().is_none_or(|(last, _)| *last != index) {
        pages.push((index, Box::new([0; PAGE_SIZE])));
    }
    if let Some((_, page)) = pages.last_mut() {
        page[at..at + bytes.len()].copy_from_slice(bytes);
    }
}
