use std::borrow::Cow;
use std::time::Duration;

use permafrost_protocol::control::{Checkpoint, ErrorCode};
use permafrost_protocol::images::{PagemapEntry, PagemapWriter};
use permafrost_protocol::manifest::{AddressSpace, Manifest};
use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{Dialect, Frame, PE_LAZY, PE_PRESENT, command};

use super::*;
use crate::source::{CheckpointSource, OutlinePages, PagesOut};

/// First address of the process's pages, and their number; the last three are zeros.
const BASE: u64 = 0x7f00_0000_0000;
const PAGES: u64 = 2000;

/// Process 77, whose pages are filled with the low bits of their indices.
struct Source {
    record: Checkpoint,
    manifest: Manifest,
    is_damaged: bool,
}

impl Source {
    fn new() -> Self {
        let mut space = AddressSpace {
            id: 77,
            ..AddressSpace::default()
        };
        space.set_space_type(SpaceType::Process);
        Self {
            record: Checkpoint::default(),
            manifest: Manifest {
                spaces: vec![space],
                ..Manifest::default()
            },
            is_damaged: false,
        }
    }
}

fn page(index: u64) -> [u8; 4096] {
    [index.to_le_bytes()[0] | 1; 4096]
}

impl CheckpointSource for Source {
    type Error = control::Error;

    fn record(&self) -> &Checkpoint {
        &self.record
    }

    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn small(
        &self,
        _: usize,
        _: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError<control::Error>> {
        unreachable!("no small images are read")
    }

    fn pagemap(&self, _: usize) -> Result<Vec<u8>, control::Error> {
        let mut pagemap = PagemapWriter::new(1);
        for (vaddr, nr_pages, flags) in [
            (BASE, 1, PE_PRESENT),
            (BASE + 4096, PAGES - 1, PE_PRESENT | PE_LAZY),
        ] {
            pagemap.push(PagemapEntry {
                vaddr,
                nr_pages,
                flags,
            });
        }
        Ok(pagemap.finish())
    }

    fn positions(
        &self,
        _: usize,
        _: &mut dyn FnMut(u64, OutlinePages<'_>),
    ) -> Result<(), control::Error> {
        unreachable!("no checksums are read")
    }

    fn pages(&self, _: usize, _: &mut PagesOut<'_>) -> Result<(), ReadError<control::Error>> {
        unreachable!("pages are read by their places")
    }

    fn range(
        &self,
        place: usize,
        first_index: u64,
        pages: u64,
        take: &mut dyn FnMut(PageRun<'_>) -> io::Result<()>,
    ) -> Result<(), ReadError<control::Error>> {
        assert_eq!(place, 0);
        if self.is_damaged {
            return Err(ReadError::Source(control::Error {
                code: ErrorCode::Corrupt.into(),
                message: "a bad page".to_owned(),
                hint: String::new(),
            }));
        }
        let zeros_from = BASE / PAGE_BYTES + PAGES - 3;
        for index in first_index..first_index + pages {
            take(if index < zeros_from {
                PageRun::Pages {
                    first_index: index,
                    flags: PE_PRESENT,
                    bytes: Cow::Owned(page(index).to_vec()),
                }
            } else {
                PageRun::Zero {
                    first_index: index,
                    flags: PE_PRESENT,
                    pages: 1,
                }
            })?;
        }
        Ok(())
    }
}

/// A client whose requests are written down, and which keeps the answers. It takes a few bytes at once.
struct Client {
    requests: Vec<u8>,
    read: usize,
    answers: Vec<u8>,
}

impl Read for Client {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len().min(self.requests.len() - self.read).min(7);
        buffer[..length].copy_from_slice(&self.requests[self.read..self.read + length]);
        self.read += length;
        Ok(length)
    }
}

impl Write for Client {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = bytes.len().min(1000);
        self.answers.extend_from_slice(&bytes[..length]);
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Bounded for Client {
    fn limit_reads(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }
}

fn converse(source: &Source, requests: &[u8]) -> (Result<(), LendError>, Vec<u8>) {
    let lent = LentCheckpoint::new(source).unwrap();
    let mut client = Client {
        requests: requests.to_vec(),
        read: 0,
        answers: Vec::new(),
    };
    let outcome = lend(&mut client, &lent);
    (outcome, client.answers)
}

#[test]
fn gets_are_answered_in_order_with_at_most_what_is_there() {
    for dialect in [Dialect::V24, Dialect::V32] {
        let encoder = Encoder::new(dialect);
        // The client asks again before it has its answer; the second range crosses two entries, the third goes beyond
        // the last page, the fourth is longer than an answer.
        let asked = [
            (5, 1_u32, 1_u64),
            (0, 4, 4),
            (PAGES - 4, 9, 4),
            (1, 1999, 1024),
        ];
        let mut requests = Vec::new();
        for (skip, pages, _) in asked {
            let frame = encoder.get(77, BASE + skip * PAGE_BYTES, pages);
            requests.extend_from_slice(frame.as_ref());
        }
        requests.extend_from_slice(encoder.close().as_ref());
        let (outcome, answers) = converse(&Source::new(), &requests);
        outcome.unwrap();
        let mut rest = &answers[..];
        for (skip, _, pages) in asked {
            let (head, after) = rest.split_at(dialect.frame_bytes());
            let expected = Frame {
                command: command::ADD_F,
                flags: PE_PRESENT,
                nr_pages: pages,
                vaddr: BASE + skip * PAGE_BYTES,
                dst_id: 77,
            };
            assert_eq!(Frame::decode(dialect, head), Some(expected));
            rest = after;
            for index in skip..skip + pages {
                let (found, after) = rest.split_at(4096);
                let expected = match index >= PAGES - 3 {
                    true => [0; 4096],
                    false => page(BASE / PAGE_BYTES + index),
                };
                assert!(found == expected, "page {index}");
                rest = after;
            }
        }
        assert_eq!(rest, [0; 4], "the status of CLOSE");
    }
}

#[test]
fn requests_for_what_is_not_there_are_refused_by_name() {
    for dialect in [Dialect::V24, Dialect::V32] {
        let encoder = Encoder::new(dialect);
        let good = encoder.get(77, BASE, 1);
        let refused = |request: &[u8]| {
            let (outcome, answers) = converse(&Source::new(), &[good.as_ref(), request].concat());
            assert_eq!(answers.len(), dialect.frame_bytes() + 4096, "the good one");
            outcome.unwrap_err()
        };
        let unknown = refused(encoder.get(78, BASE, 1).as_ref());
        assert!(matches!(unknown, LendError::UnknownProcess { pid: 78 }));
        for vaddr in [BASE - 4096, BASE + PAGES * 4096] {
            let nowhere = refused(encoder.get(77, vaddr, 1).as_ref());
            assert!(matches!(nowhere, LendError::NoPage { vaddr: at, .. } if at == vaddr));
        }
        let dump = refused(
            encoder
                .open(permafrost_protocol::pageserver::SpaceId::process(77))
                .as_ref(),
        );
        assert!(matches!(dump, LendError::Dump));
        for (vaddr, pages) in [(BASE + 1, 1), (BASE, 0), (BASE, 65_536), (BASE, u32::MAX)] {
            let broken = refused(encoder.get(77, vaddr, pages).as_ref());
            assert!(matches!(broken, LendError::Protocol(_)), "{broken}");
        }
    }
}

#[test]
fn damage_ends_the_connection_before_anything_of_it_is_sent() {
    let source = Source {
        is_damaged: true,
        ..Source::new()
    };
    let get = Encoder::new(Dialect::V32).get(77, BASE, 1);
    let (outcome, answers) = converse(&source, get.as_ref());
    assert!(matches!(outcome, Err(LendError::Source(error)) if error.message == "a bad page"));
    assert!(answers.is_empty());
}
