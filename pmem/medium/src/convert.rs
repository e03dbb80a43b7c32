//! Integer conversions that lose nothing, proven once here.

const _: () = assert!(
    usize::BITS == 64,
    "regions are mapped whole: 64-bit targets only"
);

/// Converts an offset or count of a 64-bit address space to an index.
#[expect(
    clippy::cast_possible_truncation,
    reason = "usize has 64 bits, asserted above"
)]
pub const fn to_usize(value: u64) -> usize {
    value as usize
}

/// Converts an index or length to an offset.
pub const fn to_u64(value: usize) -> u64 {
    value as u64
}
