//! Reads the small images of a checkpoint that nodes hold.
//!
//! CRIU writes one for each thread, of some hundred bytes. So short images are fetched many in one
//! conversation, and those that were not requested yet are kept until they are. Long images are passed on as
//! they come.

use std::collections::HashMap;
use std::ops::Range;

use parking_lot::MutexGuard;
use permafrost_criu::source::ReadError;
use permafrost_protocol::manifest::Image;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::request;
use permafrost_protocol::{PAGE_BYTES, control};
use permafrost_transport::peer::ReceivedFrame;

use super::checkpoint::{HINT, Stop, corrupt, fetch_of, name_of, nobody, protocol};
use super::digest::MapDigest;
use super::{RemoteCheckpoint, refusal};

/// Bytes of an image that are passed on at once: whole pages. As many as are held back, so that each is moved once.
const PASSED_BYTES: usize = if cfg!(test) { 64 << 10 } else { 16 << 20 };

/// Least number of bytes of an image that are held back. Shorter images are passed on whole, and come from
/// another holder if one sends them damaged.
const HELD_BYTES: usize = PASSED_BYTES;

/// Most images that are fetched in one conversation.
const BATCH_IMAGES: usize = 1024;

/// Most bytes of images that are fetched in one conversation, except for a single longer image.
const BATCH_BYTES: u64 = 4 << 20;

/// Most bytes of images that are kept for later requests.
const KEPT_BYTES: usize = 16 << 20;

/// Small images that came with a requested one and were found right, by their places in the manifest.
#[derive(Default)]
pub(super) struct Prefetched {
    images: HashMap<usize, Vec<u8>>,
    bytes: usize,
}

impl Prefetched {
    fn put(&mut self, place: usize, image: Vec<u8>) {
        if self.bytes + image.len() > KEPT_BYTES {
            *self = Self::default();
        }
        self.take(place);
        self.bytes += image.len();
        self.images.insert(place, image);
    }

    fn take(&mut self, place: usize) -> Option<Vec<u8>> {
        let image = self.images.remove(&place)?;
        self.bytes -= image.len();
        Some(image)
    }
}

impl RemoteCheckpoint {
    /// Passes a small image on, piece by piece. The last piece, which is all of a short image, is held back
    /// until the digest of the whole was found to match the manifest; an empty image is one empty piece.
    ///
    /// # Errors
    /// No holder gives it, or none gives it undamaged; an error of the taker.
    pub fn image<E>(
        &self,
        place: usize,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), ReadError<control::Error, E>> {
        let prefetched = self.prefetched().take(place);
        if let Some(image) = prefetched {
            return take(&image).map_err(ReadError::Taker);
        }
        let image = &self.manifest.images[place];
        let batch = self.batch(place);
        let mut failure = None;
        let order = self.order();
        let mut passing = Passing::new(image.len_bytes);
        for (holder, at) in order.iter().zip(1..) {
            let others = at < order.len();
            match self.images_from(holder, others, batch.clone(), &mut passing, &mut take) {
                Ok(()) if passing.is(&image.map_digest) => {
                    return take(&passing.held).map_err(ReadError::Taker);
                }
                Ok(()) => {
                    let what = format!("image {} from {holder}", image.name);
                    failure = Some(corrupt(&self.record, &what));
                    if passing.passed_bytes > 0 {
                        // It is unknown which piece is wrong.
                        break;
                    }
                }
                Err(Stop::Taker(error)) => return Err(ReadError::Taker(error)),
                Err(Stop::Node(error)) => {
                    tracing::warn!(event = "image-not-fetched", node = holder, checkpoint = name_of(&self.record), image = image.name, %error, "no image");
                    self.ask_last(holder);
                    failure.get_or_insert(refusal(&error, HINT));
                }
            }
            passing.begin_again();
        }
        Err(ReadError::Source(
            failure.unwrap_or_else(|| nobody(&self.record)),
        ))
    }

    fn prefetched(&self) -> MutexGuard<'_, Prefetched> {
        self.prefetched.lock()
    }

    /// Chooses the images to fetch together with the one at `place`: those behind it that are short and not
    /// here yet.
    fn batch(&self, place: usize) -> Range<usize> {
        let prefetched = self.prefetched();
        let mut left_bytes = BATCH_BYTES;
        let behind = self.manifest.images.iter().enumerate().skip(place);
        let fitting = behind.take(BATCH_IMAGES).take_while(|(at, image)| {
            let fits = image.len_bytes <= left_bytes && !prefetched.images.contains_key(at);
            left_bytes = left_bytes.saturating_sub(image.len_bytes);
            fits
        });
        place..place + fitting.count().max(1)
    }

    /// Takes a batch from one holder: the part of its first image that was not passed on yet, and those of the
    /// others that are right. It is no failure if the others do not come.
    fn images_from<E>(
        &self,
        holder: &str,
        others: bool,
        batch: Range<usize>,
        passing: &mut Passing,
        take: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), Stop<E>> {
        let images = &self.manifest.images;
        let fetch = request::Fetch {
            image: images[batch.start].name.clone(),
            images: u32::try_from(batch.len()).unwrap_or(1),
            ..fetch_of(&self.record)
        };
        let arriving = self.holders.fetch(holder, others, fetch);
        let mut batch = Batch::new(images, batch, passing);
        for frame in arriving.map_err(Stop::Node)?.frames {
            match frame {
                Ok(frame) => {
                    if !batch.push(&frame, take).map_err(Stop::Taker)? {
                        break;
                    }
                }
                Err(_) if batch.has_first() => break,
                Err(error) => return Err(Stop::Node(error)),
            }
        }
        batch.end_image();
        let has_first = batch.has_first();
        let mut prefetched = self.prefetched();
        for (place, image) in batch.ready {
            prefetched.put(place, image);
        }
        if has_first {
            Ok(())
        } else {
            Err(Stop::Node(protocol(holder, "an image of another length")))
        }
    }
}

/// Images that come one after another in a conversation.
struct Batch<'a> {
    images: &'a [Image],
    range: Range<usize>,
    passing: &'a mut Passing,
    /// Place of the image that is being received.
    current: Option<usize>,
    /// Bytes of that image that have come.
    received_bytes: u64,
    /// Contents of that image so far, unless it is the first.
    bytes: Vec<u8>,
    /// Images behind the first that are whole and right.
    ready: Vec<(usize, Vec<u8>)>,
}

impl<'a> Batch<'a> {
    fn new(images: &'a [Image], range: Range<usize>, passing: &'a mut Passing) -> Self {
        Self {
            images,
            range,
            passing,
            current: None,
            received_bytes: 0,
            bytes: Vec::new(),
            ready: Vec::new(),
        }
    }

    /// Returns true if all bytes of the first image have come.
    fn has_first(&self) -> bool {
        match self.current {
            Some(place) if place == self.range.start => {
                self.received_bytes == self.passing.len_bytes
            }
            current => current.is_some(),
        }
    }

    /// Takes a frame; returns false if it is not one that was requested.
    fn push<E>(
        &mut self,
        frame: &ReceivedFrame,
        take: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        match frame.header.kind {
            Kind::Image => Ok(self.begin(&frame.payload)),
            Kind::ImageData => self.data(&frame.payload, take),
            _ => Ok(true),
        }
    }

    fn begin(&mut self, name: &[u8]) -> bool {
        self.end_image();
        let next = match self.current {
            None => self.range.start,
            Some(_) if !self.has_first() => return false,
            Some(place) => place + 1,
        };
        if next >= self.range.end || self.images[next].name.as_bytes() != name {
            return false;
        }
        self.current = Some(next);
        self.received_bytes = 0;
        true
    }

    fn data<E>(
        &mut self,
        bytes: &[u8],
        take: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let Some(place) = self.current else {
            return Ok(false);
        };
        self.received_bytes += bytes.len() as u64;
        if self.received_bytes > self.images[place].len_bytes {
            return Ok(false);
        }
        if place == self.range.start {
            self.passing.take(self.received_bytes, bytes, take)?;
        } else {
            self.bytes.extend_from_slice(bytes);
        }
        Ok(true)
    }

    /// Ends the image that came last. A short or damaged image is discarded, and fetched again when it is
    /// requested.
    fn end_image(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let Some(place) = self.current.filter(|place| *place != self.range.start) else {
            return;
        };
        let image = &self.images[place];
        let mut digest = MapDigest::default();
        digest.image_end(0, &bytes);
        if bytes.len() as u64 == image.len_bytes
            && digest.is(pages_of(image.len_bytes), &image.map_digest)
        {
            self.ready.push((place, bytes));
        }
    }
}

/// A small image that is passed on from a holder to its taker.
struct Passing {
    len_bytes: u64,
    /// Digest of the whole pages that were passed on.
    digest: MapDigest,
    passed_bytes: u64,
    /// Bytes that follow them and are held back.
    held: Vec<u8>,
}

impl Passing {
    fn new(len_bytes: u64) -> Self {
        Self {
            len_bytes,
            digest: MapDigest::default(),
            passed_bytes: 0,
            held: Vec::new(),
        }
    }

    /// Prepares for another holder, which sends the image from the beginning.
    fn begin_again(&mut self) {
        self.held.clear();
    }

    /// Takes a piece of the image of which `received` is the end; skips the part that was passed on before.
    fn take<E>(
        &mut self,
        received: u64,
        piece: &[u8],
        take: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let fresh = received.saturating_sub(self.passed_bytes);
        let fresh = usize::try_from(fresh)
            .unwrap_or(usize::MAX)
            .min(piece.len());
        self.held.extend_from_slice(&piece[piece.len() - fresh..]);
        if self.held.len() < HELD_BYTES + PASSED_BYTES {
            return Ok(());
        }
        let index = self.passed_bytes / PAGE_BYTES;
        self.digest.pages(index, 0, &self.held[..PASSED_BYTES]);
        take(&self.held[..PASSED_BYTES])?;
        self.held.drain(..PASSED_BYTES);
        self.passed_bytes += PASSED_BYTES as u64;
        Ok(())
    }

    /// Returns true if everything that came matches the manifest.
    fn is(&self, map_digest: &[u8]) -> bool {
        let mut digest = self.digest.clone();
        digest.image_end(self.passed_bytes / PAGE_BYTES, &self.held);
        digest.is(pages_of(self.len_bytes), map_digest)
    }
}

fn pages_of(len_bytes: u64) -> u64 {
    len_bytes.div_ceil(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::wire::frame::{Coding, Header};

    use super::*;

    fn image(name: &str, contents: &[u8]) -> Image {
        let mut digest = MapDigest::default();
        digest.image_end(0, contents);
        Image {
            name: name.to_owned(),
            len_bytes: contents.len() as u64,
            map_root: Vec::new(),
            map_digest: digest.finish().to_vec(),
            offset_bytes: 0,
        }
    }

    fn frame(kind: Kind, index: u64, payload: &[u8]) -> ReceivedFrame {
        ReceivedFrame {
            header: Header {
                kind,
                coding: Coding::Raw,
                flags: 0,
                pages: 0,
                sequence: 0,
                index,
                payload_bytes: u32::try_from(payload.len()).unwrap(),
            },
            payload: payload.to_vec().into(),
        }
    }

    fn frames(images: &[(&str, &[u8])]) -> Vec<ReceivedFrame> {
        let of = |(name, contents): &(&str, &[u8])| {
            [
                frame(Kind::Image, contents.len() as u64, name.as_bytes()),
                frame(Kind::ImageData, contents.len() as u64, contents),
            ]
        };
        images.iter().flat_map(of).collect()
    }

    /// Takes a batch of three: says whether the first has come, and which others are ready.
    fn taken(sent: &[ReceivedFrame]) -> (bool, Vec<usize>) {
        let images = [image("a", b"one"), image("b", b"two"), image("c", b"three")];
        let mut passing = Passing::new(3);
        let mut batch = Batch::new(&images, 0..3, &mut passing);
        let mut none = |_: &[u8]| Ok::<(), ()>(());
        for frame in sent {
            if !batch.push(frame, &mut none).unwrap() {
                break;
            }
        }
        batch.end_image();
        let places = batch.ready.iter().map(|(place, _)| *place).collect();
        (batch.has_first(), places)
    }

    #[test]
    fn of_a_batch_only_what_is_whole_and_right_is_kept() {
        let whole = frames(&[("a", b"one"), ("b", b"two"), ("c", b"three")]);
        assert_eq!(taken(&whole), (true, vec![1, 2]));
        assert_eq!(taken(&whole[..3]), (true, vec![]));
        assert_eq!(taken(&whole[..1]), (false, vec![]));
        assert_eq!(taken(&whole[2..]), (false, vec![]));
        let odd = frames(&[("a", b"one"), ("b", b"TWO"), ("c", b"three")]);
        assert_eq!(taken(&odd), (true, vec![2]));
        let long = frames(&[("a", b"one"), ("b", b"two and more"), ("c", b"three")]);
        assert_eq!(taken(&long), (true, vec![]));
        let more = frames(&[
            ("a", b"one"),
            ("b", b"two"),
            ("c", b"three"),
            ("d", b"four"),
        ]);
        assert_eq!(taken(&more), (true, vec![1, 2]));
    }

    #[test]
    fn of_a_long_image_the_end_is_held_back() {
        let contents: Vec<u8> = (0_u32..)
            .flat_map(u32::to_le_bytes)
            .take(HELD_BYTES + 3 * PASSED_BYTES + 5)
            .collect();
        let image = image("a", &contents);
        let mut passing = Passing::new(image.len_bytes);
        let mut passed = Vec::new();
        let mut received = 0;
        for piece in contents.chunks(5000) {
            received += piece.len() as u64;
            let take = &mut |bytes: &[u8]| -> Result<(), ()> {
                passed.extend_from_slice(bytes);
                Ok(())
            };
            passing.take(received, piece, take).unwrap();
        }
        assert!(passing.is(&image.map_digest));
        assert!(passing.held.len() >= HELD_BYTES);
        passed.extend_from_slice(&passing.held);
        assert!(passed == contents);
    }
}
