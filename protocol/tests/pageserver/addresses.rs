//! Addresses ascend, in each space for itself, up to the end of the address space.

use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{
    Dialect, Event, MAX_ADDRESS, PE_LAZY, PE_PRESENT, ProtocolError, SpaceId,
};

use crate::common::drive;
use crate::stream::{DIALECTS, Stream};

#[test]
fn overlaps_and_descents_are_reported_and_the_conversation_goes_on() {
    let space = SpaceId::process(1);
    for dialect in DIALECTS {
        let input = Stream::new(dialect)
            .frame(|e| e.open(space))
            .frame(|e| e.pages(space, 0x2000, 2, PE_PRESENT))
            .pages(2)
            .frame(|e| e.pages(space, 0x3000, 2, PE_PRESENT))
            .pages(2)
            .frame(|e| e.hole(space, 0x1000, 1))
            .frame(|e| e.pages(space, 0x5000, 1, PE_LAZY))
            .frame(|e| e.pages(space, 0x6000, 1, PE_PRESENT))
            .pages(1)
            .frame(Encoder::close)
            .1;
        let transcript = drive(&input, 1);
        let expected = 0x4000;
        assert_eq!(
            transcript.events[1..],
            [
                Ok(Event::Pages {
                    space,
                    vaddr: 0x2000,
                    nr_pages: 2,
                    flags: 4
                }),
                Err(ProtocolError::NotAscending {
                    space,
                    vaddr: 0x3000,
                    expected
                }),
                Err(ProtocolError::NotAscending {
                    space,
                    vaddr: 0x1000,
                    expected
                }),
                Err(ProtocolError::PagesWithheld {
                    space,
                    vaddr: 0x5000,
                    nr_pages: 1
                }),
                Ok(Event::Pages {
                    space,
                    vaddr: 0x6000,
                    nr_pages: 1,
                    flags: 4
                }),
                Ok(Event::Close { force: false }),
            ]
        );
        assert_eq!(
            transcript.pages.len(),
            5,
            "the payload of a refused frame is still accounted for"
        );
        assert_eq!(
            transcript.replies,
            [1, 22, 0, 0, 0],
            "CLOSE is answered with a refusal"
        );
        assert_eq!(transcript.end, Ok(()));
    }
}

#[test]
fn each_space_has_addresses_of_its_own() {
    let (one, two) = (SpaceId::process(1), SpaceId::process(2));
    let input = Stream::new(Dialect::V32)
        .frame(|e| e.open(one))
        .frame(|e| e.hole(one, 0x9000, 1))
        .frame(|e| e.open(two))
        .frame(|e| e.hole(two, 0x1000, 1))
        .frame(Encoder::close)
        .1;
    assert!(drive(&input, 1).events.iter().all(Result::is_ok));
}

#[test]
fn the_address_space_can_be_used_to_its_end() {
    let space = SpaceId::process(1);
    let input = Stream::new(Dialect::V32)
        .frame(|e| e.open(space))
        .frame(|e| e.hole(space, MAX_ADDRESS - 4096, 1))
        .frame(|e| e.hole(space, MAX_ADDRESS - 4096, 1))
        .1;
    let transcript = drive(&input, 1);
    assert!(transcript.events[1].is_ok());
    assert!(matches!(
        transcript.events[2],
        Err(ProtocolError::NotAscending {
            expected: MAX_ADDRESS,
            ..
        })
    ));
}
