//! Writing cache lines back, store fences, and copies that bypass the cache.
//!
//! `std::arch` has neither `clwb` nor `clflushopt`, hence the assembly. On processors other than x86-64 this module
//! has no cache write-back: [`FlushInstruction::detect`] returns `None`, and DAX is not used.

use std::sync::OnceLock;

/// Bytes of a cache line, the unit of the flush instructions. Fixed on x86-64.
pub(crate) const CACHE_LINE: usize = 64;

/// Instruction by which this CPU writes a cache line back to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushInstruction {
    /// Writes back and keeps the line: cheapest. Ordered by sfence only.
    Clwb,
    /// Writes back and drops the line. Ordered by sfence only.
    ClflushOpt,
    /// Writes back and drops the line; each waits for the one before it.
    Clflush,
    /// No instruction that this crate knows.
    None,
}

impl FlushInstruction {
    /// Returns the best instruction that this CPU has. Cached.
    pub(crate) fn detect() -> Self {
        static FOUND: OnceLock<FlushInstruction> = OnceLock::new();
        *FOUND.get_or_init(Self::probe)
    }

    #[cfg(target_arch = "x86_64")]
    fn probe() -> Self {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        // Intel SDM vol. 2, CPUID: leaf 7 subleaf 0, EBX bit 24 CLWB, bit 23 CLFLUSHOPT;
        // leaf 1, EDX bit 19 CLFSH. AMD APM vol. 3 has the same bits.
        #[allow(unused_unsafe, reason = "unsafe only up to some compiler version")]
        // SAFETY: every x86-64 CPU has CPUID and leaves 0 and 1; leaf 7 is read only if leaf 0 reports that it
        // exists.
        let (leaf7, leaf1) = unsafe {
            let last = __cpuid(0).eax;
            (
                if last >= 7 {
                    __cpuid_count(7, 0).ebx
                } else {
                    0
                },
                __cpuid(1).edx,
            )
        };
        if leaf7 & 1 << 24 != 0 {
            Self::Clwb
        } else if leaf7 & 1 << 23 != 0 {
            Self::ClflushOpt
        } else if leaf1 & 1 << 19 != 0 {
            Self::Clflush
        } else {
            Self::None
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn probe() -> Self {
        Self::None
    }

    /// Returns the instruction's name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Clwb => "clwb",
            Self::ClflushOpt => "clflushopt",
            Self::Clflush => "clflush",
            Self::None => "none",
        }
    }
}

/// Starts writing back every cache line of `len` bytes from `start`; done at the next [`store_fence`].
///
/// # Safety
/// The range is mapped for as long as the call lasts, and `instruction` is one that this CPU has.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn write_back(start: *const u8, len: usize, instruction: FlushInstruction) {
    use std::arch::asm;
    let skew = start.addr() % CACHE_LINE;
    let lines = (skew + len).div_ceil(CACHE_LINE);
    // SAFETY: rounding down stays in the page that `start` is in, a cache line never leaves its page.
    let mut line = unsafe { start.sub(skew) };
    for _ in 0..if len == 0 { 0 } else { lines } {
        // SAFETY: the line overlaps the mapped range, and mappings consist of whole pages. The
        // instructions change no register, flag or byte of memory as seen by the program; being asm
        // without `nomem`, they stay after the stores before them.
        unsafe {
            match instruction {
                FlushInstruction::Clwb => {
                    asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags))
                }
                FlushInstruction::ClflushOpt => {
                    asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags))
                }
                FlushInstruction::Clflush => {
                    asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags))
                }
                FlushInstruction::None => {}
            }
            line = line.wrapping_add(CACHE_LINE);
        }
    }
}

/// Does nothing: DAX is not used on these processors.
///
/// # Safety
/// None needed; the signature is that of the x86-64 one.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn write_back(_start: *const u8, _len: usize, _instruction: FlushInstruction) {}

/// Waits until the write-backs and streaming stores before it have reached the persistence domain.
pub(crate) fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64; the instruction has no operand.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Copies around the cache. A [`store_fence`] must follow before anything relies on the order.
///
/// The bytes reach memory without a read of the target, and without displacing the next chunk from its reader's
/// cache.
///
/// # Safety
/// `to` is valid for writes of `from.len()` bytes that do not overlap `from`, and no other thread accesses them
/// meanwhile. Both `to` and `from.len()` are multiples of [`CACHE_LINE`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn copy_streaming(to: *mut u8, from: &[u8]) {
    debug_assert!(to.addr().is_multiple_of(CACHE_LINE) && from.len().is_multiple_of(CACHE_LINE));
    // AVX-512 is not faster than AVX here: two stores fill a cache line, and memory is the limit.
    if is_x86_feature_detected!("avx") {
        // SAFETY: as the caller promises, and the CPU has AVX.
        unsafe { copy_avx(to, from) }
    } else {
        // SAFETY: as the caller promises.
        unsafe { copy_sse2(to, from) }
    }
}

/// Copies without streaming, which is only an optimisation.
///
/// # Safety
/// The contract of the x86-64 version.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn copy_streaming(to: *mut u8, from: &[u8]) {
    // SAFETY: as the caller promises.
    unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) }
}

/// # Safety
/// As [`copy_streaming`], on a CPU with AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn copy_avx(to: *mut u8, from: &[u8]) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    for at in (0..from.len()).step_by(CACHE_LINE) {
        // SAFETY: both ranges have from.len() bytes, a multiple of 64; `to` is aligned to 64.
        unsafe {
            let source = from.as_ptr().add(at).cast::<__m256i>();
            let target = to.add(at).cast::<__m256i>();
            let (low, high) = (
                _mm256_loadu_si256(source),
                _mm256_loadu_si256(source.add(1)),
            );
            _mm256_stream_si256(target, low);
            _mm256_stream_si256(target.add(1), high);
        }
    }
}

/// # Safety
/// As [`copy_streaming`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_sse2(to: *mut u8, from: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for at in (0..from.len()).step_by(16) {
        // SAFETY: both ranges have from.len() bytes, a multiple of 64; `to` is aligned to 64; SSE2 is
        // part of x86-64.
        unsafe {
            let source = from.as_ptr().add(at).cast::<__m128i>();
            _mm_stream_si128(to.add(at).cast::<__m128i>(), _mm_loadu_si128(source));
        }
    }
}

/// Returns true if `page` is all zero. Costs one comparison if its first bytes are not.
pub fn is_zero(page: &[u8]) -> bool {
    let (first, rest) = page.split_at(page.len().min(CACHE_LINE));
    if first.iter().any(|&b| b != 0) {
        return false;
    }
    // A line at a time: vectorised, and leaves at the first that is not zero.
    rest.chunks(256)
        .all(|chunk| chunk.iter().fold(0, |all, &b| all | b) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Aligned([u8; 8192]);

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_copy_copies_every_byte() {
        let from: Vec<u8> = (0..8192_u32)
            .map(|i| i.to_le_bytes()[0] ^ i.to_le_bytes()[1])
            .collect();
        type Copy = unsafe fn(*mut u8, &[u8]);
        let mut copies: Vec<(&str, Copy)> = vec![("best", copy_streaming), ("sse2", copy_sse2)];
        if is_x86_feature_detected!("avx") {
            copies.push(("avx", copy_avx));
        }
        for (name, copy) in copies {
            for (skew, len) in [(0, 0), (1, 64), (3, 320), (0, 4096), (5, 4096 + 192)] {
                let mut to = Aligned([0xee; 8192]);
                // SAFETY: `to` is aligned and 8192 bytes long, len is at most 4288; both are local.
                unsafe { copy(to.0.as_mut_ptr(), &from[skew..skew + len]) };
                store_fence();
                assert_eq!(&to.0[..len], &from[skew..skew + len], "{name} {len}");
                assert!(to.0[len..].iter().all(|&b| b == 0xee), "{name} {len}");
            }
        }
    }

    #[test]
    fn write_back_of_any_range_changes_nothing() {
        let data = Aligned([7; 8192]);
        let instruction = FlushInstruction::detect();
        for (at, len) in [(0, 0), (0, 1), (63, 2), (1, 8191)] {
            // SAFETY: within `data`; the instruction was detected.
            unsafe { write_back(data.0.as_ptr().add(at), len, instruction) };
        }
        store_fence();
        assert!(data.0.iter().all(|&b| b == 7), "{}", instruction.name());
    }

    #[test]
    fn zero_means_every_byte() {
        let mut page = vec![0; 4096];
        assert!(is_zero(&page));
        for at in [0, 1, 63, 64, 65, 255, 2048, 4095] {
            page[at] = 1;
            assert!(!is_zero(&page), "byte {at}");
            page[at] = 0;
        }
        assert!(is_zero(&page));
    }
}
