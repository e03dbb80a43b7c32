//! Bytes that no peer means: nothing panics.

use permafrost_protocol::pageserver::SpaceId;
use proptest::prelude::*;

use crate::common::drive;
use crate::stream::{DIALECTS, Stream, whole_dump};

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(
        tail in proptest::collection::vec(any::<u8>(), 0..9000), dialect in 0_usize..2, at_once in 1_usize..4,
    ) {
        let mut input = Stream::new(DIALECTS[dialect]).frame(|e| e.open(SpaceId::process(1))).1;
        input.extend(tail);
        drive(&input, at_once);
    }

    #[test]
    fn a_flipped_bit_in_a_dump_is_taken_or_refused_but_never_panics(bit in 0_usize..8 * 600, dialect in 0_usize..2) {
        let mut input = whole_dump(DIALECTS[dialect]);
        let bit = bit % (input.len() * 8);
        input[bit / 8] ^= 1 << (bit % 8);
        drive(&input, 1);
    }
}
