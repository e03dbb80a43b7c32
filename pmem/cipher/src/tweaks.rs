//! Tweaks of the blocks of a page: consecutive powers of x in GF(2^128), times the encrypted page number.
//!
//! Block by block, and by the compiler alone, tweaks took as long as AES itself on processors with vector AES. So they
//! are computed two at a time where the processor has AVX2.

use crate::xts::BLOCK_BYTES;

type Block = [u8; BLOCK_BYTES];

/// Tweaks that are computed independently of each other: each is 2^8 times the one so many before it.
const LANES: usize = 8;
/// Reduction of x^128 in the field of the tweaks: x^7 + x^2 + x + 1.
const POLYNOMIAL: u128 = 0x87;

/// Returns the tweak of the next block.
pub(crate) fn double(tweak: u128) -> u128 {
    tweak << 1 ^ (POLYNOMIAL & (tweak >> 127).wrapping_neg())
}

/// Fills in the tweaks of consecutive blocks.
pub(crate) fn fill(first: u128, tweaks: &mut [Block]) {
    fill_first(first, tweaks);
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { avx2::fill_rest(tweaks) };
    }
    fill_rest(tweaks);
}

/// Fills in the tweaks of consecutive blocks, and adds them to as many blocks, whose sums go into `sums`. All three are
/// of equal length.
pub(crate) fn fill_and_add(
    first: u128,
    tweaks: &mut [Block],
    blocks: &[Block],
    sums: &mut [Block],
) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && tweaks.len().is_multiple_of(LANES) {
        fill_first(first, tweaks);
        // SAFETY: the processor has AVX2.
        return unsafe { avx2::fill_and_add(tweaks, blocks, sums) };
    }
    fill(first, tweaks);
    sums.copy_from_slice(blocks);
    xor(sums, tweaks);
}

/// Adds the tweaks to blocks.
pub(crate) fn xor(blocks: &mut [Block], tweaks: &[Block]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { avx2::xor(blocks, tweaks) };
    }
    xor_portably(blocks, tweaks);
}

/// Fills in the tweaks that all others are computed from.
fn fill_first(first: u128, tweaks: &mut [Block]) {
    let mut tweak = first;
    for slot in tweaks.iter_mut().take(LANES) {
        *slot = tweak.to_le_bytes();
        tweak = double(tweak);
    }
}

/// Fills in the tweaks behind the first ones.
fn fill_rest(tweaks: &mut [Block]) {
    for place in LANES..tweaks.len() {
        let before = u128::from_le_bytes(tweaks[place - LANES]);
        let carry = before >> 120;
        let tweak = before << 8 ^ carry ^ carry << 1 ^ carry << 2 ^ carry << 7;
        tweaks[place] = tweak.to_le_bytes();
    }
}

fn xor_portably(blocks: &mut [Block], tweaks: &[Block]) {
    for (block, tweak) in blocks.iter_mut().zip(tweaks) {
        *block = (u128::from_le_bytes(*block) ^ u128::from_le_bytes(*tweak)).to_le_bytes();
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _mm256_and_si256, _mm256_extract_epi64, _mm256_set_epi64x, _mm256_shuffle_epi32,
        _mm256_slli_epi64, _mm256_srli_epi64, _mm256_xor_si256,
    };

    use super::{Block, LANES};

    /// Two blocks, in one register.
    type Pair = [Block; 2];
    /// Pairs that are computed independently of each other.
    const PAIRS: usize = LANES / 2;

    #[target_feature(enable = "avx2")]
    pub(super) fn fill_rest(tweaks: &mut [Block]) {
        let (groups, rest) = tweaks.as_chunks_mut::<LANES>();
        let behind = rest.len();
        let Some((first, groups)) = groups.split_first_mut() else {
            return;
        };
        let pairs = first.as_chunks::<2>().0;
        let mut last: [__m256i; PAIRS] = std::array::from_fn(|place| load(&pairs[place]));
        for group in groups {
            let (pairs, _) = group.as_chunks_mut::<2>();
            for (lane, pair) in last.iter_mut().zip(pairs) {
                *lane = times_256(*lane);
                store(*lane, pair);
            }
        }
        // What is less than a group.
        let from = tweaks.len() - behind - LANES;
        super::fill_rest(&mut tweaks[from..]);
    }

    /// Whole groups only. The first one of `tweaks` is filled in.
    #[target_feature(enable = "avx2")]
    pub(super) fn fill_and_add(tweaks: &mut [Block], blocks: &[Block], sums: &mut [Block]) {
        let (groups, _) = tweaks.as_chunks_mut::<LANES>();
        let Some(first) = groups.first() else {
            return;
        };
        let pairs = first.as_chunks::<2>().0;
        let mut next: [__m256i; PAIRS] = std::array::from_fn(|place| load(&pairs[place]));
        let (blocks, sums) = (
            blocks.as_chunks::<LANES>().0,
            sums.as_chunks_mut::<LANES>().0,
        );
        for ((group, blocks), sums) in groups.iter_mut().zip(blocks).zip(sums) {
            let (pairs, blocks) = (group.as_chunks_mut::<2>().0, blocks.as_chunks::<2>().0);
            let sums = sums.as_chunks_mut::<2>().0;
            for (((lane, pair), block), sum) in next.iter_mut().zip(pairs).zip(blocks).zip(sums) {
                store(*lane, pair);
                store(_mm256_xor_si256(load(block), *lane), sum);
                *lane = times_256(*lane);
            }
        }
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn xor(blocks: &mut [Block], tweaks: &[Block]) {
        let (pairs, odd) = blocks.as_chunks_mut::<2>();
        let (tweak_pairs, _) = tweaks.as_chunks::<2>();
        for (pair, tweaks) in pairs.iter_mut().zip(tweak_pairs) {
            store(_mm256_xor_si256(load(pair), load(tweaks)), pair);
        }
        super::xor_portably(odd, &tweaks[2 * pairs.len()..]);
    }

    /// Multiplies two tweaks by x^8: shifts them by a byte, and adds what is shifted out times the polynomial.
    #[target_feature(enable = "avx2")]
    fn times_256(tweaks: __m256i) -> __m256i {
        // The highest byte of each half, in the lowest one of the other half.
        let carry = _mm256_srli_epi64::<56>(_mm256_shuffle_epi32::<0x4e>(tweaks));
        let shifted = _mm256_xor_si256(_mm256_slli_epi64::<8>(tweaks), carry);
        let out = _mm256_and_si256(carry, _mm256_set_epi64x(0, -1, 0, -1));
        let reduced = _mm256_xor_si256(_mm256_slli_epi64::<1>(out), _mm256_slli_epi64::<2>(out));
        let reduced = _mm256_xor_si256(reduced, _mm256_slli_epi64::<7>(out));
        _mm256_xor_si256(shifted, reduced)
    }

    /// Compiled to one instruction.
    #[target_feature(enable = "avx2")]
    fn load(pair: &Pair) -> __m256i {
        let (words, _) = pair.as_flattened().as_chunks::<8>();
        let word = |place: usize| words.get(place).map_or(0, |word| i64::from_le_bytes(*word));
        _mm256_set_epi64x(word(3), word(2), word(1), word(0))
    }

    /// Compiled to one instruction.
    #[target_feature(enable = "avx2")]
    fn store(value: __m256i, pair: &mut Pair) {
        let (words, _) = pair.as_flattened_mut().as_chunks_mut::<8>();
        let values = [
            _mm256_extract_epi64::<0>(value),
            _mm256_extract_epi64::<1>(value),
            _mm256_extract_epi64::<2>(value),
            _mm256_extract_epi64::<3>(value),
        ];
        for (word, value) in words.iter_mut().zip(values) {
            *word = value.to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tweak_is_twice_the_one_before_however_many_there_are() {
        for first in [1, 1 << 127, u128::MAX, 0x0123_4567_89ab_cdef << 37] {
            for count in [0, 1, 2, 7, 8, 9, 10, 15, 16, 17, 18, 33, 255, 256] {
                let mut tweaks = vec![[0; BLOCK_BYTES]; count];
                fill(first, &mut tweaks);
                let mut portable = tweaks.clone();
                fill_rest(&mut portable);
                let mut expected = first;
                for (place, tweak) in tweaks.iter().enumerate() {
                    assert_eq!(*tweak, expected.to_le_bytes(), "{place} of {count}");
                    assert_eq!(portable[place], *tweak);
                    expected = double(expected);
                }
                let mut blocks = vec![[0x5a; BLOCK_BYTES]; count];
                xor(&mut blocks, &tweaks);
                let mut same = vec![[0x5a; BLOCK_BYTES]; count];
                xor_portably(&mut same, &tweaks);
                assert_eq!(blocks, same);
                let (mut again, mut sums) = (vec![[7; BLOCK_BYTES]; count], same.clone());
                fill_and_add(
                    first,
                    &mut again,
                    &vec![[0x5a; BLOCK_BYTES]; count],
                    &mut sums,
                );
                assert_eq!((again, sums), (tweaks, same));
            }
        }
    }
}
