//! What a checkpoint consists of, for people: processes, mappings, open files, and how its pages differ from another
//! checkpoint's. Decodes CRIU's small images and compares checksums; no page of memory is read.

mod error;
mod pages;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};

use permafrost_protocol::control::{
    CheckpointContents, ContentsImage, MappingContents, OpenFile, PageCounts, ProcessContents,
    SharedContents,
};
use permafrost_protocol::images::{
    DumpedFile, ImageError, Mapping, Process, RegularFile, file_kind, mm_name, read_core,
    read_descriptors, read_executable, read_files, read_files_id, read_mappings, read_pstree,
};
use permafrost_protocol::manifest::{AddressSpace, SpaceType};
use prost::Message as _;

use crate::source::{CheckpointSource, ReadError};
use pages::{Counter, Positions};

pub use error::{ContentsError, ContentsLimit};

/// Longest image that is decoded, bytes: ten thousand mappings or open files are a tenth of it.
const MAX_IMAGE_BYTES: u64 = 8 << 20;

/// Most mappings or open files of a process that are shown: an empty one takes two bytes of an image, and a hundred
/// times that of memory. The kernel's own limit is 65,530 mappings, unless it is raised.
const MAX_ENTRIES: usize = 100_000;

/// Longest contents that are returned, bytes: a message of the control protocol has room for slightly more.
const MAX_CONTENTS_BYTES: usize = 15 << 20;

/// Most memory that a page takes while it is compared, bytes: its checksum, and a run of its own.
const PAGE_ROOM_BYTES: u64 = 4 + 32;

/// Memory for the contents and the images that they are decoded from, bytes: images of at most 8 MiB grow when they are
/// decoded, and the contents are returned once more as a message.
const ROOM_BYTES: u64 = 48 << 20;

/// Returns the contents of `source`, its pages compared with those of `before`. With `tells_both`, the contents of
/// `before` are returned, too. `pid` restricts both to one process, unless it is 0.
///
/// Takes memory for the checksums of the largest address space: 4 bytes for each page of either checkpoint, and more where
/// zero pages or gaps lie between pages ([`room_bytes`]).
///
/// # Errors
/// An image cannot be read or does not decode; there is no such process; there is more than fits into a reply.
pub fn of<S: CheckpointSource>(
    source: &S,
    before: Option<&S>,
    tells_both: bool,
    pid: u32,
) -> Result<CheckpointContents, ContentsError<S::Error>> {
    let mut own = Side::of(source, pid)?;
    let mut other = match before.filter(|_| tells_both) {
        Some(before) => Some(Side::of(before, pid)?),
        None => None,
    };
    if pid != 0
        && own.processes.is_empty()
        && other.as_ref().is_none_or(|side| side.processes.is_empty())
    {
        return Err(ContentsLimit::NoProcess { pid }.into());
    }
    for (place, space) in own.spaces(source, pid) {
        let there = before.and_then(|before| counterpart(source, place, before));
        let (here, there) = (
            Positions::of(source, place).map_err(ContentsError::Source)?,
            match (before, there) {
                (Some(before), Some((theirs, counterpart))) => {
                    // Equal maps need not be read twice.
                    let is_same =
                        !space.map_digest.is_empty() && space.map_digest == counterpart.map_digest;
                    Some(if is_same {
                        None
                    } else {
                        Some(Positions::of(before, theirs).map_err(ContentsError::Source)?)
                    })
                }
                (Some(_), None) => Some(Some(Positions::default())),
                (None, _) => None,
            },
        );
        let compared = match &there {
            None => Counter::Alone,
            Some(None) => Counter::Same,
            Some(Some(there)) => Counter::Against(there),
        };
        own.count(space, &here, compared);
        if let (Some(other), Some((theirs, _)), Some(before)) = (
            &mut other,
            before.and_then(|before| counterpart(source, place, before)),
            before,
        ) {
            let space = &before.manifest().spaces[theirs];
            match &there {
                Some(Some(there)) => other.count(space, there, Counter::Against(&here)),
                _ => other.count(space, &here, Counter::Same),
            }
        }
    }
    if let (Some(other), Some(before)) = (&mut other, before) {
        // Address spaces that are gone.
        for (place, space) in other.spaces(before, pid) {
            if counterpart(before, place, source).is_none() {
                let nothing = Positions::default();
                other.count(
                    space,
                    &Positions::of(before, place).map_err(ContentsError::Source)?,
                    Counter::Against(&nothing),
                );
            }
        }
    }
    let (processes_before, shared_memory_before) =
        other.map_or_else(Default::default, |side| (side.processes, side.shared));
    let contents = CheckpointContents {
        checkpoint: Some(source.record().clone()),
        processes: own.processes,
        shared_memory: own.shared,
        compared_with: before.map(|before| before.record().clone()),
        processes_before,
        shared_memory_before,
        images: images(source),
    };
    match contents.encoded_len() {
        0..=MAX_CONTENTS_BYTES => Ok(contents),
        len_bytes => Err(ContentsLimit::TooLong { len_bytes }.into()),
    }
}

/// Returns the small images, the longest first.
fn images<S: CheckpointSource>(source: &S) -> Vec<ContentsImage> {
    let images = source.manifest().images.iter().map(|image| ContentsImage {
        name: image.name.clone(),
        len_bytes: image.len_bytes,
    });
    let mut images: Vec<_> = images.collect();
    images.sort_by(|one, other| {
        let by_length = other.len_bytes.cmp(&one.len_bytes);
        by_length.then_with(|| one.name.cmp(&other.name))
    });
    images
}

/// Returns the most memory that [`of`] takes for `source` compared with `before`, bytes: the checksums and the runs of the
/// largest address space of each, and what is returned.
pub fn room_bytes<S: CheckpointSource>(source: &S, before: Option<&S>) -> u64 {
    let largest = |one: &S| {
        let pages = one.manifest().spaces.iter().map(|space| space.pages);
        pages.max().unwrap_or(0)
    };
    let pages = largest(source).saturating_add(before.map_or(0, largest));
    pages
        .saturating_mul(PAGE_ROOM_BYTES)
        .saturating_add(ROOM_BYTES)
}

/// Returns the address space of `other` that the one at `place` of `of` continues: that of the same process, or the
/// same shared memory. Shared memory without its like by id has that at the same place among shared memories, as ids
/// change with a restore.
fn counterpart<'a, S: CheckpointSource>(
    of: &S,
    place: usize,
    other: &'a S,
) -> Option<(usize, &'a AddressSpace)> {
    let space = of.manifest().spaces.get(place)?;
    let same_type = |one: &&AddressSpace| one.space_type == space.space_type;
    let theirs = || {
        let spaces = other.manifest().spaces.iter().enumerate();
        spaces.filter(|(_, one)| same_type(one))
    };
    let by_id = theirs().find(|(_, one)| one.id == space.id);
    if by_id.is_some() || space.space_type() == SpaceType::Process {
        return by_id;
    }
    let before = of.manifest().spaces.iter().take(place);
    let (_, one) = theirs().nth(before.filter(same_type).count())?;
    // It may be the like of another one by its id.
    let is_free = !of
        .manifest()
        .spaces
        .iter()
        .any(|mine| mine.id == one.id && same_type(&mine));
    is_free
        .then(|| theirs().find(|(_, found)| found.id == one.id))
        .flatten()
}

/// Processes and shared memory of one checkpoint.
struct Side {
    processes: Vec<ProcessContents>,
    shared: Vec<SharedContents>,
}

impl Side {
    fn of<S: CheckpointSource>(source: &S, pid: u32) -> Result<Self, ContentsError<S::Error>> {
        let images = Images::new(source);
        let mut processes = match images.decoded("pstree.img", read_pstree)? {
            Some(tree) => images.processes(&tree, pid)?,
            // A pre-dump has pages only.
            None => unnamed(source),
        };
        processes.retain(|process| pid == 0 || process.pid == pid);
        let spaces = source.manifest().spaces.iter();
        let shared = spaces.filter(|space| space.space_type() == SpaceType::SharedMemory);
        let shared = shared.map(|space| SharedContents {
            id: space.id,
            pages: None,
        });
        Ok(Self {
            processes,
            shared: shared.collect(),
        })
    }

    /// Returns the address spaces that are to be counted.
    fn spaces<'a, S: CheckpointSource>(
        &self,
        source: &'a S,
        pid: u32,
    ) -> Vec<(usize, &'a AddressSpace)> {
        let spaces = source.manifest().spaces.iter().enumerate();
        let wanted = |space: &AddressSpace| pid == 0 || process_of(space) == Some(pid);
        spaces.filter(|(_, space)| wanted(space)).collect()
    }

    fn count(&mut self, space: &AddressSpace, positions: &Positions, compared: Counter<'_>) {
        let Some(pid) = process_of(space) else {
            let all = positions.count(0, u64::MAX, compared);
            for shared in self
                .shared
                .iter_mut()
                .filter(|shared| shared.id == space.id)
            {
                shared.pages = Some(all);
            }
            return;
        };
        for process in self
            .processes
            .iter_mut()
            .filter(|process| process.pid == pid)
        {
            process.pages = Some(positions.count(0, u64::MAX, compared));
            for mapping in &mut process.mappings {
                mapping.pages = Some(positions.count(mapping.start, mapping.end, compared));
            }
        }
    }
}

/// Returns the pid of a process's address space.
fn process_of(space: &AddressSpace) -> Option<u32> {
    match space.space_type() {
        SpaceType::Process => u32::try_from(space.id).ok(),
        SpaceType::SharedMemory => None,
    }
}

/// Returns the processes of a checkpoint without images of them.
fn unnamed<S: CheckpointSource>(source: &S) -> Vec<ProcessContents> {
    let manifest = source.manifest();
    let known = manifest.origin.iter().flat_map(|origin| &origin.processes);
    let known: HashMap<u32, _> = known.map(|process| (process.pid, process)).collect();
    let pids = manifest.spaces.iter().filter_map(process_of);
    pids.map(|pid| {
        let process = known.get(&pid);
        ProcessContents {
            pid,
            parent: process.map_or(0, |process| process.parent),
            program: process.map_or_else(String::new, |process| process.program.clone()),
            executable: process.map_or_else(String::new, |process| process.executable.clone()),
            ..ProcessContents::default()
        }
    })
    .collect()
}

/// Small images of a checkpoint.
struct Images<'a, S> {
    source: &'a S,
    places: HashMap<&'a str, usize>,
}

impl<'a, S: CheckpointSource> Images<'a, S> {
    fn new(source: &'a S) -> Self {
        let images = source.manifest().images.iter().enumerate();
        Self {
            source,
            places: images
                .map(|(place, image)| (image.name.as_str(), place))
                .collect(),
        }
    }

    /// Reads an image; `None` if the checkpoint has none of the name.
    fn decoded<T>(
        &self,
        name: &str,
        read: impl FnOnce(&[u8]) -> Result<T, ImageError>,
    ) -> Result<Option<T>, ContentsError<S::Error>> {
        let Some(&place) = self.places.get(name) else {
            return Ok(None);
        };
        let len_bytes = self.source.manifest().images[place].len_bytes;
        if len_bytes > MAX_IMAGE_BYTES {
            let image = name.to_owned();
            return Err(ContentsLimit::LongImage { image, len_bytes }.into());
        }
        let mut bytes = Vec::new();
        let passed = self.source.small(place, &mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        });
        match passed {
            Ok(()) => {}
            Err(ReadError::Source(error)) => return Err(ContentsError::Source(error)),
            Err(ReadError::Taker(source)) => {
                let image = name.to_owned();
                return Err(ContentsLimit::NotRead { image, source }.into());
            }
        }
        read(&bytes).map(Some).map_err(|source| {
            let image = name.to_owned();
            ContentsLimit::Undecodable { image, source }.into()
        })
    }

    fn processes(
        &self,
        tree: &[Process],
        pid: u32,
    ) -> Result<Vec<ProcessContents>, ContentsError<S::Error>> {
        let files = self.decoded("files.img", read_files)?.unwrap_or_default();
        let by_id: HashMap<u32, &DumpedFile> = files.iter().map(|file| (file.id, file)).collect();
        let path = |id: u32| {
            let regular = by_id.get(&id).and_then(|file| file.regular.as_ref());
            regular.map_or_else(String::new, RegularFile::path)
        };
        let mut seen = HashSet::new();
        if !tree.iter().all(|process| seen.insert(process.pid)) {
            return Err(implausible("pstree.img", "names a process twice").into());
        }
        let mut len_bytes = 0_usize;
        let wanted = tree.iter().filter(|process| pid == 0 || process.pid == pid);
        wanted
            .map(|process| {
                let pid = process.pid;
                let core = self.decoded(&format!("core-{pid}.img"), read_core)?;
                let (program, files_id) = core.unwrap_or_default();
                let ids = self.decoded(&format!("ids-{pid}.img"), read_files_id)?;
                let descriptors = match ids.or(files_id) {
                    Some(id) => self.decoded(&format!("fdinfo-{id}.img"), read_descriptors)?,
                    None => None,
                };
                let descriptors = descriptors.unwrap_or_default();
                if descriptors.len() > MAX_ENTRIES {
                    return Err(implausible("fdinfo", "has more than 100,000 open files").into());
                }
                let mut open: Vec<OpenFile> = descriptors
                    .iter()
                    .map(|descriptor| {
                        let regular = by_id.get(&descriptor.id);
                        let regular = regular.and_then(|file| file.regular.as_ref());
                        OpenFile {
                            descriptor: descriptor.descriptor,
                            kind: file_kind(descriptor.kind).to_owned(),
                            path: regular.map_or_else(String::new, RegularFile::path),
                            position_bytes: regular.map(|file| file.position_bytes),
                            number: descriptor.id,
                        }
                    })
                    .collect();
                open.sort_by_key(|file| file.descriptor);
                let mm = mm_name(pid);
                let mappings = self.decoded(&mm, read_mappings)?.unwrap_or_default();
                check(&mm, &mappings)?;
                let executable = self.decoded(&mm, read_executable)?;
                let contents = ProcessContents {
                    pid,
                    parent: process.ppid,
                    program,
                    executable: executable.map_or_else(String::new, path),
                    threads: u32::try_from(process.threads.len()).unwrap_or(u32::MAX),
                    pages: None,
                    mappings: mappings
                        .iter()
                        .map(|mapping| shown(mapping, path))
                        .collect(),
                    files: open,
                };
                // Before the next one takes memory, too.
                len_bytes = len_bytes.saturating_add(contents.encoded_len());
                if len_bytes > MAX_CONTENTS_BYTES {
                    return Err(ContentsLimit::TooLong { len_bytes }.into());
                }
                Ok(contents)
            })
            .collect()
    }
}

fn implausible(image: &str, what: &'static str) -> ContentsLimit {
    ContentsLimit::Implausible {
        image: image.to_owned(),
        what,
    }
}

/// Checks the mappings of a process, in the order of their addresses: they are as the kernel has them, so the pages of
/// all of them are no more than the process has.
fn check(image: &str, mappings: &[Mapping]) -> Result<(), ContentsLimit> {
    if mappings.len() > MAX_ENTRIES {
        return Err(implausible(image, "has more than 100,000 mappings"));
    }
    if mappings.iter().any(|mapping| mapping.end <= mapping.start) {
        return Err(implausible(
            image,
            "has a mapping that ends before it begins",
        ));
    }
    let overlap = mappings.windows(2).any(|pair| match pair {
        [before, next] => before.end > next.start,
        _ => false,
    });
    match overlap {
        true => Err(implausible(image, "has mappings that overlap")),
        false => Ok(()),
    }
}

fn shown(mapping: &Mapping, path: impl Fn(u32) -> String) -> MappingContents {
    MappingContents {
        start: mapping.start,
        end: mapping.end,
        permissions: mapping.permissions(),
        kind: mapping.kind().to_owned(),
        path: mapping.file_id().map_or_else(String::new, path),
        offset_bytes: mapping.offset_bytes,
        shared_memory: mapping.shared_memory().unwrap_or(0),
        pages: Some(PageCounts::default()),
    }
}
