//! Integer conversions that lose nothing, proven once here.

const _: () = assert!(
    usize::BITS == 64,
    "regions are mapped whole: 64-bit targets only"
);

/// An offset or count of a 64-bit address space as an index.
#[expect(
    clippy::cast_possible_truncation,
    reason = "usize has 64 bits, asserted above"
)]
pub(crate) const fn to_usize(value: u64) -> usize {
    value as usize
}

/// An index or length as an offset.
pub(crate) const fn to_u64(value: usize) -> u64 {
    value as u64
}
