//! Tests of contents over a checkpoint in memory.

use std::io;

use permafrost_protocol::control::{self, Checkpoint};
use permafrost_protocol::images::{write_mappings, write_pstree};
use permafrost_protocol::manifest::{Image, Manifest};

use super::*;
use crate::source::{OutlinePages, PageRun, PagesOut};

const PAGE: u64 = 4096;

struct Stored {
    record: Checkpoint,
    manifest: Manifest,
    images: Vec<Vec<u8>>,
    /// Address spaces, each a list of index and checksum; 0 is a page of zeros.
    pages: Vec<Vec<(u64, u32)>>,
}

impl CheckpointSource for Stored {
    type Error = control::Error;

    fn record(&self) -> &Checkpoint {
        &self.record
    }

    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn small(
        &self,
        place: usize,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError<control::Error>> {
        Ok(sink(&self.images[place])?)
    }

    fn pagemap(&self, _: usize) -> Result<Vec<u8>, control::Error> {
        unreachable!("no pagemap is written")
    }

    fn positions(
        &self,
        place: usize,
        take: &mut dyn FnMut(u64, OutlinePages<'_>),
    ) -> Result<(), control::Error> {
        for (index, crc) in &self.pages[place] {
            match crc {
                0 => take(*index, OutlinePages::Zero(1)),
                crc => take(*index, OutlinePages::Stored(&[*crc])),
            }
        }
        Ok(())
    }

    fn pages(&self, _: usize, _: &mut PagesOut<'_>) -> Result<(), ReadError<control::Error>> {
        unreachable!("no pages are read")
    }

    fn range(
        &self,
        _: usize,
        _: u64,
        _: u64,
        _: &mut dyn FnMut(PageRun<'_>) -> io::Result<()>,
    ) -> Result<(), ReadError<control::Error>> {
        unreachable!("no pages are read")
    }
}

/// A process: its pid, its mappings (first page, page behind them), and its pages (page, CRC32).
type Shape<'a> = (u32, &'a [(u64, u64)], &'a [(u64, u32)]);

fn checkpoint(generation: u64, processes: &[Shape<'_>]) -> Stored {
    let tree: Vec<Process> = processes
        .iter()
        .map(|(pid, ..)| Process {
            pid: *pid,
            threads: vec![*pid],
            ..Process::default()
        })
        .collect();
    let mut images = vec![("pstree.img".to_owned(), write_pstree(&tree))];
    for (pid, mappings, _) in processes {
        let mappings: Vec<Mapping> = mappings
            .iter()
            .map(|(start, end)| Mapping {
                start: start * PAGE,
                end: end * PAGE,
                protection: 3,
                flags: 0x22,
                status: 1 << 9 | 1,
                ..Mapping::default()
            })
            .collect();
        images.push((mm_name(*pid), write_mappings(&mappings)));
    }
    let spaces = processes.iter().map(|(pid, ..)| AddressSpace {
        id: u64::from(*pid),
        ..AddressSpace::default()
    });
    Stored {
        record: Checkpoint {
            job: "j".to_owned(),
            generation,
            ..Checkpoint::default()
        },
        manifest: Manifest {
            images: images
                .iter()
                .map(|(name, bytes)| Image {
                    name: name.clone(),
                    len_bytes: bytes.len() as u64,
                    ..Image::default()
                })
                .collect(),
            spaces: spaces.collect(),
            ..Manifest::default()
        },
        images: images.into_iter().map(|(_, bytes)| bytes).collect(),
        pages: processes.iter().map(|(.., pages)| pages.to_vec()).collect(),
    }
}

#[test]
fn pages_are_counted_by_mapping_and_compared_on_both_sides() {
    let before = checkpoint(
        1,
        &[
            (
                7,
                &[(10, 20), (30, 40)],
                &[(10, 1), (11, 0), (12, 5), (30, 9)],
            ),
            (8, &[(1, 2)], &[(1, 3)]),
        ],
    );
    let after = checkpoint(
        2,
        &[(
            7,
            &[(10, 20), (50, 60)],
            &[(10, 1), (11, 4), (13, 0), (50, 2)],
        )],
    );
    let contents = of(&after, Some(&before), true, 0).unwrap();
    let [process] = contents.processes.as_slice() else {
        panic!("{contents:?}");
    };
    let counts = |pages, zero, equal, changed, only_here| {
        Some(PageCounts {
            pages,
            zero,
            equal: Some(equal),
            changed: Some(changed),
            only_here: Some(only_here),
        })
    };
    assert_eq!(process.pages, counts(4, 1, 1, 1, 2));
    let pages: Vec<_> = process
        .mappings
        .iter()
        .map(|mapping| mapping.pages)
        .collect();
    assert_eq!(pages, [counts(3, 1, 1, 1, 1), counts(1, 0, 0, 0, 1)]);
    assert_eq!(process.mappings[0].permissions, "rw-p");
    assert_eq!(process.mappings[0].kind, "anonymous");
    let [seven, eight] = contents.processes_before.as_slice() else {
        panic!("{contents:?}");
    };
    let pages: Vec<_> = seven.mappings.iter().map(|mapping| mapping.pages).collect();
    assert_eq!(pages, [counts(3, 1, 1, 1, 1), counts(1, 0, 0, 0, 1)]);
    assert_eq!(eight.pages, counts(1, 0, 0, 0, 1), "a process that is gone");
    // Against the parent only, nothing is told of that.
    let alone = of(&after, Some(&before), false, 0).unwrap();
    assert!(alone.processes_before.is_empty());
    assert_eq!(alone.processes, contents.processes);
}

#[test]
fn equal_digests_spare_a_comparison_and_say_the_same() {
    let pages: &[(u64, u32)] = &[(1, 5), (2, 0), (4, 6)];
    let mut one = checkpoint(1, &[(7, &[(1, 9)], pages)]);
    let mut two = checkpoint(2, &[(7, &[(1, 9)], pages)]);
    let compared = of(&two, Some(&one), true, 0).unwrap();
    for stored in [&mut one, &mut two] {
        stored.manifest.spaces[0].map_digest = vec![7; 32];
    }
    let spared = of(&two, Some(&one), true, 0).unwrap();
    assert_eq!(spared.processes, compared.processes);
    assert_eq!(spared.processes_before, compared.processes_before);
}

#[test]
fn one_process_can_be_asked_for_and_one_that_is_not_there_is_an_error() {
    let stored = checkpoint(1, &[(7, &[], &[(1, 1)]), (8, &[], &[(2, 2)])]);
    let contents = of(&stored, None, false, 8).unwrap();
    assert_eq!(contents.processes.len(), 1);
    assert_eq!(
        contents.processes[0].pages.map(|pages| pages.pages),
        Some(1)
    );
    let missing = of(&stored, None, false, 9);
    assert!(matches!(
        missing,
        Err(ContentsError::Limit(ContentsLimit::NoProcess { pid: 9 }))
    ));
}

#[test]
fn an_image_that_does_not_decode_is_named() {
    let mut stored = checkpoint(1, &[(7, &[(1, 2)], &[])]);
    stored.images[1].truncate(11);
    let damaged = of(&stored, None, false, 0);
    let Err(ContentsError::Limit(error)) = damaged else {
        panic!("{damaged:?}");
    };
    assert!(error.to_string().contains("mm-7.img"), "{error}");
    stored.manifest.images[0].len_bytes = MAX_IMAGE_BYTES + 1;
    let long = of(&stored, None, false, 0);
    assert!(matches!(
        long,
        Err(ContentsError::Limit(ContentsLimit::LongImage { .. }))
    ));
}

#[test]
fn what_cannot_be_is_refused_and_not_counted() {
    let shapes: [(&[Shape<'_>], &str); 3] = [
        (&[(7, &[(0, 4), (2, 6)], &[])], "overlap"),
        (&[(7, &[(4, 2)], &[])], "ends before it begins"),
        (&[(7, &[(0, 4)], &[]), (7, &[(0, 4)], &[])], "twice"),
    ];
    for (processes, what) in shapes {
        let error = of(&checkpoint(1, processes), None, false, 0).unwrap_err();
        let ContentsError::Limit(limit) = error else {
            panic!("{error:?}");
        };
        assert!(limit.to_string().contains(what), "{limit}");
    }
}
