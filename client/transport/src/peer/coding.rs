//! Decision which pages are compressed, and their decompression.
//!
//! Compression pays when the link is the bottleneck: then the codec's time hides behind the link's, and each
//! byte saved is time saved. On a link faster than the codec it only makes the dump slower. Both speeds are
//! measured while a dump runs; the link's only over stretches in which it had enough to send all the time,
//! because otherwise the speed of CRIU would be measured. A link also looks slow where the processors are busy, and
//! then the codec makes it slower still. So a dump compresses at first on trial, and goes on only if its pages go
//! faster than before.

use std::time::{Duration, Instant};

use bytes::Bytes;
use permafrost_protocol::wire::frame::{Coding, Header};

use super::pool::Pool;
use super::{Compression, PeerError};

/// Level of zstd: the fastest of its regular ones.
const LEVEL: i32 = 1;
/// Distance of two samples in a run, bytes; a page has at least one.
const SAMPLE_STRIDE: usize = 4096;
/// Size of a sample, bytes.
const SAMPLE_BYTES: usize = 64;
/// Most bytes that are sampled of one run.
const MAX_SAMPLED: usize = 1024;
/// Order-0 entropy above which a run is not compressed, bits a byte. A sample of 1,024 random bytes comes to
/// about 7.8, of machine code to 6, of text to 4.5.
const MAX_ENTROPY_BITS: f64 = 7.0;
/// Divisor of the least gain: a run is sent compressed if that makes it smaller than 7/8 of its size.
const GAIN_DIVISOR: usize = 8;
/// Assumed speed of the codec until it was measured, bytes/s.
const CODEC_PRIOR: f64 = 400e6;
/// Factor by which the codec has to be faster than the link: the codec shares the cores with the link.
const CODEC_MARGIN: f64 = 1.25;
/// Weight of the newest measurement.
const NEWEST: f64 = 0.25;
/// Shortest stretch over which a speed is measured.
const MIN_STRETCH: Duration = Duration::from_millis(20);

/// Number of bytes of pages over which their speed is measured.
const STRETCH_BYTES: usize = 4 << 20;
/// Number of bytes of pages after the beginning of a trial that are not measured: what was sent before still waits.
const SETTLING_BYTES: usize = 8 << 20;
/// Least gain of speed for which compression goes on.
const LEAST_GAIN: f64 = 1.15;
/// Number of bytes of pages after a failed trial before the next.
const TRIAL_PAUSE_BYTES: usize = 256 << 20;

/// Decision if a dump compresses, by the speed of its pages with and without.
#[derive(Debug)]
struct Trial {
    phase: Phase,
    /// Begin of the phase, and bytes of pages since.
    since: Instant,
    bytes: usize,
}

/// Phase of a dump over a link that is slower than the codec.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Pages are sent as they are, and not measured for so many bytes.
    Paused(usize),
    /// They are sent as they are, and measured.
    Raw,
    /// They are compressed on trial. Without, so many bytes a second were sent.
    Settling(f64),
    /// The speed with compression is measured.
    Measured(f64),
    /// The pages go faster compressed.
    Compressed,
}

impl Trial {
    fn new(now: Instant) -> Self {
        Self {
            phase: Phase::Paused(0),
            since: now,
            bytes: 0,
        }
    }

    /// Returns true if the next run, of `bytes`, is to be compressed. `slow`: the link seems slower than the codec.
    fn compresses(&mut self, bytes: usize, now: Instant, slow: bool) -> bool {
        if !slow && !matches!(self.phase, Phase::Paused(_)) {
            self.begin(Phase::Paused(0), now);
        }
        let next = match self.phase {
            Phase::Paused(pause) if slow && self.bytes >= pause => Some(Phase::Raw),
            Phase::Raw if self.bytes >= STRETCH_BYTES => Some(Phase::Settling(self.speed(now))),
            Phase::Settling(raw) if self.bytes >= SETTLING_BYTES => Some(Phase::Measured(raw)),
            Phase::Measured(raw) if self.bytes >= STRETCH_BYTES => {
                let is_faster = self.speed(now) > raw * LEAST_GAIN;
                Some(match is_faster {
                    true => Phase::Compressed,
                    false => Phase::Paused(TRIAL_PAUSE_BYTES),
                })
            }
            _ => None,
        };
        if let Some(next) = next {
            self.begin(next, now);
        }
        self.bytes = self.bytes.saturating_add(bytes);
        !matches!(self.phase, Phase::Paused(_) | Phase::Raw)
    }

    fn begin(&mut self, phase: Phase, now: Instant) {
        *self = Self {
            phase,
            since: now,
            bytes: 0,
        };
    }

    /// Returns bytes of pages a second in this phase.
    fn speed(&self, now: Instant) -> f64 {
        let time = now.saturating_duration_since(self.since);
        #[expect(clippy::cast_precision_loss, reason = "a speed need not be exact")]
        let bytes = self.bytes as f64;
        bytes / time.max(Duration::from_nanos(1)).as_secs_f64()
    }
}

/// Measured speed of the link.
#[derive(Debug, Default)]
pub(crate) struct LinkSpeed {
    stretch: Option<(Instant, u64)>,
    bytes_per_second: Option<f64>,
}

impl LinkSpeed {
    /// Records that `freed_bytes` were acknowledged at `now`. `waiting`: more than a part of the window was in
    /// flight or queued all the time before.
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

    /// Discards the current stretch after a pause that has nothing to do with the link's speed.
    pub(crate) fn interrupted(&mut self) {
        self.stretch = None;
    }

    /// Returns bytes a second, if the link was ever the bottleneck.
    pub(crate) fn bytes_per_second(&self) -> Option<f64> {
        self.bytes_per_second
    }
}

/// Encoder that compresses runs, or leaves them as they are.
pub(crate) struct Coder {
    when: Compression,
    compressor: Option<zstd::bulk::Compressor<'static>>,
    bytes_per_second: f64,
    trial: Trial,
    buffers: Pool,
}

impl Coder {
    pub(crate) fn new(when: Compression, buffers: Pool) -> Self {
        Self {
            when,
            compressor: None,
            bytes_per_second: CODEC_PRIOR,
            trial: Trial::new(Instant::now()),
            buffers,
        }
    }

    /// Returns the payload to send for `run` at `now`, over a link of this speed (`None`: the link was never the
    /// bottleneck). Copies the run once.
    pub(crate) fn encode(
        &mut self,
        run: &[u8],
        link: Option<f64>,
        now: Instant,
    ) -> (Coding, Bytes) {
        let wanted = match self.when {
            Compression::Off => false,
            Compression::Always => true,
            Compression::Adaptive => {
                let slow = link.is_some_and(|link| link * CODEC_MARGIN < self.bytes_per_second);
                self.trial.compresses(run.len(), now, slow)
            }
        };
        if wanted
            && entropy_bits(run) <= MAX_ENTROPY_BITS
            && let Some(compressed) = self.compress(run)
        {
            return (Coding::Zstd, compressed);
        }
        let copy = |buffer: &mut Vec<u8>| buffer.extend_from_slice(run);
        (Coding::Raw, self.buffers.payload(run.len(), copy))
    }

    fn compress(&mut self, run: &[u8]) -> Option<Bytes> {
        if self.compressor.is_none() {
            self.compressor = zstd::bulk::Compressor::new(LEVEL).ok();
        }
        let compressor = self.compressor.as_mut()?;
        let start = Instant::now();
        // If the result does not fit, the gain is too small, and the codec stops early.
        let mut compressed = Vec::with_capacity(run.len() - run.len() / GAIN_DIVISOR);
        let fits = compressor.compress_to_buffer(run, &mut compressed).is_ok();
        let time = start.elapsed().max(Duration::from_nanos(1));
        #[expect(clippy::cast_precision_loss, reason = "a speed need not be exact")]
        let newest = run.len() as f64 / time.as_secs_f64();
        self.bytes_per_second += NEWEST * (newest - self.bytes_per_second);
        if !fits {
            return None;
        }
        // The payload stays in the window, so unused capacity is freed.
        compressed.shrink_to_fit();
        Some(compressed.into())
    }
}

/// Returns the order-0 entropy of a sample of `run`, bits a byte; a sample of n bytes shows at most log2 n.
fn entropy_bits(run: &[u8]) -> f64 {
    let mut counts = [0u16; 256];
    let mut sampled = 0u16;
    // As many samples as spread over the whole of a long run.
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
/// The payload cannot be decoded, or has another length.
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

#[cfg(test)]
mod tests {
    use permafrost_protocol::wire::frame::Kind;

    use super::*;

    const RUN: usize = 64 * 4096;

    fn coder_for(when: Compression) -> Coder {
        Coder::new(when, Pool::default())
    }

    fn random(bytes: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let words = std::iter::repeat_with(move || {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()
        });
        words.flatten().take(bytes).collect()
    }

    fn text(bytes: usize) -> Vec<u8> {
        let line = b"the quick brown fox jumps over 13 lazy dogs; ";
        line.iter().copied().cycle().take(bytes).collect()
    }

    /// Pages of which the first tenth holds anything.
    fn zero_rich(bytes: usize) -> Vec<u8> {
        let mut pages = random(bytes);
        for page in pages.chunks_mut(4096) {
            page[400..].fill(0);
        }
        pages
    }

    fn header(coding: Coding, pages: u32, payload: &[u8]) -> Header {
        Header {
            kind: Kind::Pages,
            coding,
            flags: 0,
            pages,
            sequence: 0,
            index: 16,
            payload_bytes: u32::try_from(payload.len()).unwrap(),
        }
    }

    #[test]
    fn random_pages_stay_raw_and_others_shrink_and_come_back() {
        for pages in [1, 2, 16, 64] {
            let bytes = pages * 4096;
            let count = u32::try_from(pages).unwrap();
            let mut coder = coder_for(Compression::Always);
            for (run, expected) in [
                (random(bytes), Coding::Raw),
                (text(bytes), Coding::Zstd),
                (zero_rich(bytes), Coding::Zstd),
                (vec![0; bytes], Coding::Zstd),
            ] {
                let (coding, payload) = coder.encode(&run, None, Instant::now());
                assert_eq!(coding, expected, "{pages} pages");
                if coding == Coding::Zstd {
                    assert!(payload.len() < run.len() * 7 / 8);
                }
                let decoded = decode("peer", &header(coding, count, &payload), payload).unwrap();
                assert!(decoded == run);
            }
        }
    }

    #[test]
    fn pages_that_only_look_compressible_are_sent_raw() {
        // Four bits of entropy in a byte, but the codec's gain is bounded by what is asked of it.
        let mut run = random(RUN);
        for page in run.chunks_mut(4096) {
            // Where samples are taken the pages look like text.
            page[1900..2200].fill(b'x');
        }
        let (coding, payload) = coder_for(Compression::Always).encode(&run, None, Instant::now());
        assert_eq!((coding, payload.len()), (Coding::Raw, RUN));
    }

    /// Passes as many bytes of text, at so many bytes a second raw and compressed, over a link of which this speed was
    /// measured. Returns the bytes that were compressed.
    fn passed(coder: &mut Coder, bytes: usize, speeds: [f64; 2], link: Option<f64>) -> usize {
        let (run, mut now, mut compressed) = (text(RUN), coder.trial.since, 0);
        for _ in 0..bytes / RUN {
            let is_compressed = coder.encode(&run, link, now).0 == Coding::Zstd;
            // As fast as it was measured to be, not as this machine is.
            coder.bytes_per_second = CODEC_PRIOR;
            compressed += usize::from(is_compressed) * RUN;
            now += Duration::from_secs_f64(262_144.0 / speeds[usize::from(is_compressed)]);
        }
        compressed
    }

    #[test]
    fn only_a_link_slower_than_the_codec_is_compressed_for() {
        let gains = [100e6, 300e6];
        for link in [None, Some(50e9)] {
            let mut coder = coder_for(Compression::Adaptive);
            assert_eq!(passed(&mut coder, 64 << 20, gains, link), 0);
        }
        let mut coder = coder_for(Compression::Adaptive);
        let compressed = passed(&mut coder, 64 << 20, gains, Some(100e6));
        assert_eq!(compressed, (64 << 20) - STRETCH_BYTES);
        // The link is not the bottleneck any more.
        assert_eq!(passed(&mut coder, 64 << 20, gains, None), 0);
        let mut off = coder_for(Compression::Off);
        assert_eq!(passed(&mut off, 64 << 20, gains, Some(1e6)), 0);
    }

    #[test]
    fn a_link_that_is_slow_because_the_processors_are_busy_is_not_compressed_for() {
        for slower in [[100e6, 60e6], [100e6, 110e6]] {
            let mut coder = coder_for(Compression::Adaptive);
            let trial = SETTLING_BYTES + STRETCH_BYTES;
            let once = passed(&mut coder, TRIAL_PAUSE_BYTES, slower, Some(100e6));
            assert_eq!(once, trial);
            // The next trial comes later, and the machine is idle then.
            let gains = [100e6, 300e6];
            let bytes = passed(&mut coder, TRIAL_PAUSE_BYTES, gains, Some(100e6));
            assert!(bytes > TRIAL_PAUSE_BYTES / 2, "{bytes}");
        }
    }

    #[test]
    fn a_link_is_measured_only_while_it_is_waited_for() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut link = LinkSpeed::default();
        link.acknowledged(at(0), 1 << 20, false);
        link.acknowledged(at(100), 1 << 20, false);
        assert_eq!(link.bytes_per_second(), None);
        link.acknowledged(at(200), 5 << 20, true);
        link.acknowledged(at(210), 1_000_000, true);
        assert_eq!(link.bytes_per_second(), None, "too short");
        link.acknowledged(at(220), 1_000_000, true);
        let speed = link.bytes_per_second().unwrap();
        assert!((speed - 100e6).abs() < 1e3, "{speed}");
        // An hour in which nothing was sent is no slow link.
        link.interrupted();
        link.acknowledged(at(3_600_000), 10, true);
        assert!((link.bytes_per_second().unwrap() - speed).abs() < 1e3);
    }

    #[test]
    fn a_payload_decodes_to_what_its_header_announces_or_not_at_all() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
        assert!(bomb.len() < RUN);
        let bomb = Bytes::from(bomb);
        for pages in [1, 64] {
            let header = header(Coding::Zstd, pages, &bomb);
            assert!(decode("peer", &header, bomb.clone()).is_err());
        }
        let two = Bytes::from(zstd::bulk::compress(&text(2 * 4096), 1).unwrap());
        assert!(decode("peer", &header(Coding::Zstd, 2, &two), two.clone()).is_ok());
        for pages in [1, 3] {
            assert!(decode("peer", &header(Coding::Zstd, pages, &two), two.clone()).is_err());
        }
        let noise = Bytes::from(random(500));
        assert!(decode("peer", &header(Coding::Zstd, 1, &noise), noise.clone()).is_err());
    }
}
