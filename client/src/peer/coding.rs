//! When pages are compressed, and by what they are decompressed.
//!
//! Compression pays when the link is what everybody waits for: then the codec's time hides behind the link's, and
//! each byte saved is time saved. On a link faster than the codec it only makes the dump slower. Both speeds are
//! measured while a dump runs; the link's only over stretches in which it had enough to send all the time, because
//! otherwise it is the speed of CRIU that is measured.

use std::time::{Duration, Instant};

use bytes::Bytes;
use permafrost_protocol::wire::frame::{Coding, Header};

use super::{Compression, PeerError};

/// zstd's level: the fastest of its regular ones.
const LEVEL: i32 = 1;
/// Bytes of a run between two samples; a page has at least one.
const SAMPLE_STRIDE: usize = 4096;
/// Bytes of one sample.
const SAMPLE_BYTES: usize = 64;
/// Most bytes that are looked at of one run.
const MAX_SAMPLED: usize = 1024;
/// Order-0 entropy above which a run is left alone, bits a byte. A sample of 1,024 random bytes comes to about
/// 7.8, of machine code to 6, of text to 4.5.
const MAX_ENTROPY_BITS: f64 = 7.0;
/// A compressed run must be smaller than 7/8 of itself to be sent so.
const GAIN_DIVISOR: usize = 8;
/// The codec is taken for this fast until it was measured, bytes/s.
const CODEC_PRIOR: f64 = 400e6;
/// How much faster than the link the codec has to be: it shares the cores with the link.
const CODEC_MARGIN: f64 = 1.25;
/// Weight of the newest measurement.
const NEWEST: f64 = 0.25;
/// Shortest stretch that a speed is measured over.
const MIN_STRETCH: Duration = Duration::from_millis(20);

/// How fast the link takes bytes.
#[derive(Debug, Default)]
pub(crate) struct LinkSpeed {
    stretch: Option<(Instant, u64)>,
    bytes_per_second: Option<f64>,
}

impl LinkSpeed {
    /// `freed_bytes` were acknowledged at `now`; `waiting` says whether more than a part of the window was in
    /// flight or waiting all the time before.
    pub(crate) fn acknowledged(&mut self, now: Instant, freed_bytes: u64, waiting: bool) {
        if !waiting {
            self.stretch = None;
            return;
        }
        let Some((start, bytes)) = &mut self.stretch else {
            self.stretch = Some((now, 0));
            return;
        };
        *bytes += freed_bytes;
        let time = now.saturating_duration_since(*start);
        if time >= MIN_STRETCH {
            #[expect(clippy::cast_precision_loss, reason = "a speed need not be exact")]
            let newest = *bytes as f64 / time.as_secs_f64();
            let blended = self
                .bytes_per_second
                .map_or(newest, |old| old + NEWEST * (newest - old));
            self.bytes_per_second = Some(blended);
            self.stretch = Some((now, 0));
        }
    }

    /// A pause that says nothing about the link.
    pub(crate) fn interrupted(&mut self) {
        self.stretch = None;
    }

    /// Bytes a second, if it was ever what everybody waited for.
    pub(crate) fn bytes_per_second(&self) -> Option<f64> {
        self.bytes_per_second
    }
}

/// Compresses runs, or leaves them.
pub(crate) struct Coder {
    when: Compression,
    compressor: Option<zstd::bulk::Compressor<'static>>,
    bytes_per_second: f64,
}

impl Coder {
    pub(crate) fn new(when: Compression) -> Self {
        Self {
            when,
            compressor: None,
            bytes_per_second: CODEC_PRIOR,
        }
    }

    /// The payload to send for `run`, over a link of this speed (`None`: never seen waiting). Copies it once.
    pub(crate) fn encode(&mut self, run: &[u8], link: Option<f64>) -> (Coding, Bytes) {
        let wanted = match self.when {
            Compression::Off => false,
            Compression::Always => true,
            Compression::Adaptive => {
                link.is_some_and(|link| link * CODEC_MARGIN < self.bytes_per_second)
            }
        };
        if wanted
            && entropy_bits(run) <= MAX_ENTROPY_BITS
            && let Some(compressed) = self.compress(run)
        {
            return (Coding::Zstd, compressed);
        }
        (Coding::Raw, Bytes::copy_from_slice(run))
    }

    fn compress(&mut self, run: &[u8]) -> Option<Bytes> {
        if self.compressor.is_none() {
            self.compressor = zstd::bulk::Compressor::new(LEVEL).ok();
        }
        let compressor = self.compressor.as_mut()?;
        let start = Instant::now();
        // Where it does not fit the gain is too small, and the codec stops early.
        let mut compressed = Vec::with_capacity(run.len() - run.len() / GAIN_DIVISOR);
        let fits = compressor.compress_to_buffer(run, &mut compressed).is_ok();
        let time = start.elapsed().max(Duration::from_nanos(1));
        #[expect(clippy::cast_precision_loss, reason = "a speed need not be exact")]
        let newest = run.len() as f64 / time.as_secs_f64();
        self.bytes_per_second += NEWEST * (newest - self.bytes_per_second);
        if !fits {
            return None;
        }
        // It stays in the window: without the room that it did not need.
        compressed.shrink_to_fit();
        Some(compressed.into())
    }
}

/// Order-0 entropy of a sample of `run`, bits a byte; a sample of n bytes shows at most log2 n.
fn entropy_bits(run: &[u8]) -> f64 {
    let mut counts = [0u16; 256];
    let mut sampled = 0u16;
    // So many places that a long run is looked at all over.
    let stride = SAMPLE_STRIDE.max(run.len() / (MAX_SAMPLED / SAMPLE_BYTES));
    for sample in run.chunks(stride) {
        // In the middle: a page's head is often more regular than the rest of it.
        let middle = sample.len().saturating_sub(SAMPLE_BYTES) / 2;
        let end = sample.len().min(middle + SAMPLE_BYTES);
        for byte in &sample[middle..end] {
            counts[usize::from(*byte)] += 1;
            sampled += 1;
        }
    }
    if sampled == 0 {
        return 0.0;
    }
    let total = f64::from(sampled);
    let entropy: f64 = counts
        .iter()
        .filter(|count| **count > 0)
        .map(|count| {
            let share = f64::from(*count) / total;
            -share * share.log2()
        })
        .sum();
    // A short sample cannot show more: 64 random bytes come to 5.9 bits, so the bar is what they could show.
    entropy * 8.0 / total.log2().clamp(1.0, 8.0)
}

/// Decodes a payload: exactly as many bytes as its header announces, never more.
///
/// # Errors
/// It does not decode, or to another length.
pub fn decode(node: &str, header: &Header, payload: Bytes) -> Result<Bytes, PeerError> {
    let wrong = || PeerError::protocol(node, "a payload that does not decode to its length");
    let expected = usize::try_from(header.decoded_bytes()).map_err(|_| wrong())?;
    let decoded = match header.coding {
        Coding::Raw => payload,
        // The buffer's size is the bound: zstd stops where it is full.
        Coding::Zstd => zstd::bulk::decompress(&payload, expected)
            .map_err(|_| wrong())?
            .into(),
    };
    if decoded.len() != expected {
        return Err(wrong());
    }
    Ok(decoded)
}
