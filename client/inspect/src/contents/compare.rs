//! What changed between two checkpoints, from their contents.

use std::collections::BTreeMap;

use permafrost_protocol::control::{
    CheckpointContents, MappingContents, OpenFile, PageCounts, ProcessContents, SharedContents,
};
use serde::Serialize;

/// Differences between two checkpoints of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ContentsChange {
    /// Earlier checkpoint, `JOB@GEN`.
    pub before: String,
    /// Later checkpoint, `JOB@GEN`.
    pub after: String,
    /// Pages of all processes and shared memories.
    pub pages: PagesChange,
    /// Processes that changed, came or went, by pid.
    pub processes: Vec<ProcessChange>,
    /// Shared memories whose pages changed, or that came or went.
    pub shared_memory: Vec<SharedChange>,
}

/// Numbers of pages by their change. Equality is that of CRC32s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PagesChange {
    /// Pages that both have, and that are equal.
    pub equal: u64,
    /// Pages that both have, and that differ.
    pub changed: u64,
    /// Pages that only the later one has.
    pub new: u64,
    /// Pages that only the earlier one has.
    pub gone: u64,
}

impl PagesChange {
    fn of(after: Option<PageCounts>, before: Option<PageCounts>) -> Self {
        let (after, before) = (after.unwrap_or_default(), before.unwrap_or_default());
        Self {
            equal: after.equal.unwrap_or(0),
            changed: after.changed.unwrap_or(0),
            new: after.only_here.unwrap_or(0),
            gone: before.only_here.unwrap_or(0),
        }
    }

    fn add(&mut self, other: Self) {
        self.equal += other.equal;
        self.changed += other.changed;
        self.new += other.new;
        self.gone += other.gone;
    }

    pub(super) const fn is_nothing(&self) -> bool {
        self.changed == 0 && self.new == 0 && self.gone == 0
    }
}

/// A process that changed, came or went.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProcessChange {
    /// Pid in its namespace.
    pub pid: u32,
    /// `changed`, `new` or `gone`; `other` if the pid was given to another program.
    pub change: &'static str,
    /// Name of its program, as of the later checkpoint that has it.
    pub program: String,
    /// Name of the program in the earlier checkpoint, if it differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program_before: Option<String>,
    /// Pages of the process.
    pub pages: PagesChange,
    /// Mappings that changed, came or went; those of a process that came or went are all listed.
    pub mappings: Vec<MappingChange>,
    /// Open files that changed, were opened or closed.
    pub files: Vec<FileChange>,
}

/// A mapping that changed, came or went.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MappingChange {
    /// `changed` (its pages only), `new`, `gone`, `resized` or `replaced` (other permissions, or another file).
    pub change: &'static str,
    /// First address of the mapping.
    pub start: u64,
    /// The address behind it, as of the later checkpoint that has it.
    pub end: u64,
    /// The address behind it in the earlier checkpoint, if it differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_before: Option<u64>,
    /// Permissions as `/proc/PID/maps` writes them.
    pub permissions: String,
    /// Path of the mapped file, or the kind of the mapping in brackets.
    pub what: String,
    /// Pages in the mapping. Where another mapping was at its addresses before, they are compared with the pages of that.
    pub pages: PagesChange,
}

/// An open file that changed, was opened or closed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileChange {
    /// `opened`, `closed`, `moved` (its position) or `replaced`.
    pub change: &'static str,
    /// Number of the descriptor.
    pub descriptor: u32,
    /// Kind of the file, as of the later checkpoint that has it.
    pub kind: String,
    /// Path of the file; empty if it has none.
    pub path: String,
    /// Path of the file that the descriptor had before, if it was replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_before: Option<String>,
    /// Position in the later checkpoint, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position_bytes: Option<u64>,
    /// Position in the earlier checkpoint, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position_before_bytes: Option<u64>,
}

/// Shared memory whose pages changed, or that came or went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SharedChange {
    /// Id of the shared memory.
    pub id: u64,
    /// `changed`, `new` or `gone`.
    pub change: &'static str,
    /// Pages of the shared memory.
    pub pages: PagesChange,
}

impl ContentsChange {
    /// Compares what `contents` has of both checkpoints.
    pub(super) fn of(contents: &CheckpointContents, before: String, after: String) -> Self {
        let processes: Vec<_> = pairs(&contents.processes_before, &contents.processes, |process| {
            process.pid
        })
        .into_iter()
        .map(|(before, after)| process(before, after))
        .collect();
        let shared: Vec<_> = shared_pairs(&contents.shared_memory_before, &contents.shared_memory)
            .into_iter()
            .map(|(before, after)| SharedChange {
                id: after.or(before).map_or(0, |shared| shared.id),
                change: word(before.is_some(), after.is_some()),
                pages: PagesChange::of(
                    after.and_then(|shared| shared.pages),
                    before.and_then(|shared| shared.pages),
                ),
            })
            .collect();
        let mut pages = PagesChange::default();
        let of_processes = processes.iter().map(|process| process.pages);
        for change in of_processes.chain(shared.iter().map(|shared| shared.pages)) {
            pages.add(change);
        }
        let is_changed = |process: &ProcessChange| {
            process.change != "changed"
                || process.program_before.is_some()
                || !process.pages.is_nothing()
                || !process.mappings.is_empty()
                || !process.files.is_empty()
        };
        Self {
            before,
            after,
            pages,
            processes: processes.into_iter().filter(is_changed).collect(),
            shared_memory: shared
                .into_iter()
                .filter(|shared| shared.change != "changed" || !shared.pages.is_nothing())
                .collect(),
        }
    }

    /// Returns true if nothing differs.
    pub(super) fn is_nothing(&self) -> bool {
        self.processes.is_empty() && self.shared_memory.is_empty()
    }
}

const fn word(before: bool, after: bool) -> &'static str {
    match (before, after) {
        (true, false) => "gone",
        (false, _) => "new",
        (true, true) => "changed",
    }
}

/// Pairs elements with one key, in the order of the keys. Of several with one key the last counts.
fn pairs<'a, T, K: Ord>(
    before: &'a [T],
    after: &'a [T],
    key: impl Fn(&T) -> K,
) -> Vec<(Option<&'a T>, Option<&'a T>)> {
    let mut paired: BTreeMap<K, (Option<&T>, Option<&T>)> = BTreeMap::new();
    for one in before {
        paired.entry(key(one)).or_default().0 = Some(one);
    }
    for one in after {
        paired.entry(key(one)).or_default().1 = Some(one);
    }
    paired.into_values().collect()
}

/// Pairs shared memories as the node has compared their pages: by id, which the kernel gives (an inode) and which stays
/// while the processes live; and those without their like by their place, as a restore makes them anew in CRIU's order.
fn shared_pairs<'a>(
    before: &'a [SharedContents],
    after: &'a [SharedContents],
) -> Vec<(Option<&'a SharedContents>, Option<&'a SharedContents>)> {
    let is_in = |list: &[SharedContents], id: u64| list.iter().any(|one| one.id == id);
    let mut paired: Vec<_> = after
        .iter()
        .enumerate()
        .map(|(place, one)| {
            let by_id = before.iter().find(|other| other.id == one.id);
            let by_place = || before.get(place).filter(|other| !is_in(after, other.id));
            (by_id.or_else(by_place), Some(one))
        })
        .collect();
    let gone = before.iter().enumerate().filter(|(place, one)| {
        let taken = after
            .get(*place)
            .is_some_and(|other| !is_in(before, other.id));
        !is_in(after, one.id) && !taken
    });
    paired.extend(gone.map(|(_, one)| (Some(one), None)));
    paired.sort_by_key(|(before, after)| after.or(*before).map(|one| one.id));
    paired
}

fn process(before: Option<&ProcessContents>, after: Option<&ProcessContents>) -> ProcessChange {
    let shown = after.or(before).cloned().unwrap_or_default();
    let was = before.map(|before| before.program.clone());
    let program_before = was.filter(|program| *program != shown.program);
    let change = match word(before.is_some(), after.is_some()) {
        "changed" if program_before.is_some() => "other",
        word => word,
    };
    let (no_mappings, no_files) = (Vec::new(), Vec::new());
    let mappings = pairs(
        before.map_or(&no_mappings, |before| &before.mappings),
        after.map_or(&no_mappings, |after| &after.mappings),
        |mapping| mapping.start,
    );
    let files = pairs(
        before.map_or(&no_files, |before| &before.files),
        after.map_or(&no_files, |after| &after.files),
        |file| file.descriptor,
    );
    ProcessChange {
        pid: shown.pid,
        change,
        program: shown.program,
        program_before,
        pages: PagesChange::of(
            after.and_then(|after| after.pages),
            before.and_then(|before| before.pages),
        ),
        mappings: mappings
            .into_iter()
            .filter_map(|(before, after)| mapping(before, after))
            .collect(),
        files: files
            .into_iter()
            .filter_map(|(before, after)| file(before, after))
            .collect(),
    }
}

/// Returns the change of a mapping; `None` if there is none.
fn mapping(
    before: Option<&MappingContents>,
    after: Option<&MappingContents>,
) -> Option<MappingChange> {
    let shown = after.or(before)?;
    let pages = PagesChange::of(
        after.and_then(|after| after.pages),
        before.and_then(|before| before.pages),
    );
    let change = match (before, after) {
        (Some(before), Some(after)) => {
            let what = |mapping: &MappingContents| {
                let kind = mapping.kind.clone();
                (kind, mapping.permissions.clone(), mapping.path.clone())
            };
            if what(before) != what(after) {
                "replaced"
            } else if before.end != after.end {
                "resized"
            } else if pages.is_nothing() {
                return None;
            } else {
                "changed"
            }
        }
        (before, after) => word(before.is_some(), after.is_some()),
    };
    let end_before = before.map(|before| before.end);
    Some(MappingChange {
        change,
        start: shown.start,
        end: shown.end,
        end_before: end_before.filter(|end| *end != shown.end),
        permissions: shown.permissions.clone(),
        what: super::maps::what(shown),
        pages,
    })
}

/// Returns the change of an open file; `None` if there is none.
fn file(before: Option<&OpenFile>, after: Option<&OpenFile>) -> Option<FileChange> {
    let shown = after.or(before)?;
    let position = |file: Option<&OpenFile>| file.and_then(|file| file.position_bytes);
    let is_same = |before: &OpenFile, after: &OpenFile| {
        before.kind == after.kind && before.path == after.path
    };
    let change = match (before, after) {
        (Some(before), Some(after)) if !is_same(before, after) => "replaced",
        (Some(_), Some(_)) if position(before) != position(after) => "moved",
        (Some(_), Some(_)) => return None,
        (Some(_), None) => "closed",
        (None, _) => "opened",
    };
    let path_before = before.map(|before| before.path.clone());
    Some(FileChange {
        change,
        descriptor: shown.descriptor,
        kind: shown.kind.clone(),
        path: shown.path.clone(),
        path_before: path_before.filter(|_| change == "replaced"),
        position_bytes: position(after),
        position_before_bytes: position(before),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(equal: u64, changed: u64, only_here: u64) -> Option<PageCounts> {
        Some(PageCounts {
            pages: equal + changed + only_here,
            zero: 0,
            equal: Some(equal),
            changed: Some(changed),
            only_here: Some(only_here),
        })
    }

    fn area(start: u64, end: u64, pages: Option<PageCounts>) -> MappingContents {
        MappingContents {
            start,
            end,
            permissions: "rw-p".to_owned(),
            kind: "anonymous".to_owned(),
            pages,
            ..MappingContents::default()
        }
    }

    fn open(descriptor: u32, path: &str, position: u64) -> OpenFile {
        OpenFile {
            descriptor,
            kind: "file".to_owned(),
            path: path.to_owned(),
            position_bytes: Some(position),
            number: descriptor,
        }
    }

    #[test]
    fn shared_memory_is_followed_through_a_restore() {
        let shared = |id, pages| SharedContents { id, pages };
        let told = |before: &[SharedContents], after: &[SharedContents]| {
            let contents = CheckpointContents {
                shared_memory: after.to_vec(),
                shared_memory_before: before.to_vec(),
                ..CheckpointContents::default()
            };
            let change = ContentsChange::of(&contents, "j@1".to_owned(), "j@2".to_owned());
            let shared = change.shared_memory.iter();
            let shared = shared.map(|one| (one.id, one.change, one.pages.gone));
            shared.collect::<Vec<_>>()
        };
        // The same kernel: by id, in any order.
        let before = [shared(7, counts(4, 1, 0)), shared(9, counts(2, 0, 3))];
        let after = [shared(9, counts(2, 0, 0)), shared(7, counts(4, 1, 0))];
        assert_eq!(
            told(&before, &after),
            [(7, "changed", 0), (9, "changed", 3)]
        );
        // After a restore both have other ids: by place, and nothing is new or gone.
        let restored = [shared(31, counts(4, 1, 0)), shared(32, counts(2, 0, 0))];
        assert_eq!(
            told(&before, &restored),
            [(31, "changed", 0), (32, "changed", 3)]
        );
        // One is gone, and one is really new.
        let fewer = [shared(9, counts(2, 0, 0))];
        assert_eq!(told(&before, &fewer), [(7, "gone", 0), (9, "changed", 3)]);
        let more = [
            before[0].clone(),
            before[1].clone(),
            shared(40, counts(0, 0, 6)),
        ];
        assert_eq!(told(&before[..1], &more[..1]), [(7, "changed", 0)]);
        let last = told(&before, &more).pop();
        assert_eq!(last, Some((40, "new", 0)));
    }

    #[test]
    fn each_kind_of_change_has_its_word() {
        let before = ProcessContents {
            pid: 7,
            program: "perl".to_owned(),
            pages: counts(5, 2, 3),
            mappings: vec![
                area(0x1000, 0x3000, counts(1, 1, 0)),
                area(0x5000, 0x6000, counts(0, 0, 3)),
                area(0x8000, 0x9000, counts(1, 0, 0)),
                area(0xa000, 0xb000, counts(1, 1, 0)),
            ],
            files: vec![
                open(0, "/dev/null", 0),
                open(3, "/old", 5),
                open(4, "/log", 1),
            ],
            ..ProcessContents::default()
        };
        let after = ProcessContents {
            pages: counts(5, 2, 4),
            mappings: vec![
                area(0x1000, 0x3000, counts(1, 1, 0)),
                area(0x7000, 0x8000, counts(0, 0, 4)),
                area(0x8000, 0x9000, counts(1, 0, 0)),
                area(0xa000, 0xc000, counts(1, 1, 0)),
            ],
            files: vec![
                open(0, "/dev/null", 0),
                open(4, "/log", 9),
                open(5, "/new", 0),
            ],
            ..before.clone()
        };
        let other = ProcessContents {
            pid: 8,
            pages: counts(0, 0, 1),
            ..ProcessContents::default()
        };
        let contents = CheckpointContents {
            processes: vec![after],
            processes_before: vec![before, other],
            ..CheckpointContents::default()
        };
        let change = ContentsChange::of(&contents, "j@1".to_owned(), "j@2".to_owned());
        let [seven, eight] = change.processes.as_slice() else {
            panic!("{change:#?}");
        };
        assert_eq!((seven.change, eight.change), ("changed", "gone"));
        let mappings: Vec<_> = (seven.mappings.iter())
            .map(|mapping| (mapping.start, mapping.change))
            .collect();
        assert_eq!(
            mappings,
            [
                (0x1000, "changed"),
                (0x5000, "gone"),
                (0x7000, "new"),
                (0xa000, "resized")
            ]
        );
        let files: Vec<_> = (seven.files.iter())
            .map(|file| (file.descriptor, file.change))
            .collect();
        assert_eq!(files, [(3, "closed"), (4, "moved"), (5, "opened")]);
        let pages = PagesChange {
            equal: 5,
            changed: 2,
            new: 4,
            gone: 4,
        };
        assert_eq!(change.pages, pages);
    }

    #[test]
    fn nothing_is_told_of_what_did_not_change() {
        let process = ProcessContents {
            pid: 7,
            pages: counts(5, 0, 0),
            mappings: vec![area(0x1000, 0x6000, counts(5, 0, 0))],
            files: vec![open(0, "/dev/null", 0)],
            ..ProcessContents::default()
        };
        let contents = CheckpointContents {
            processes: vec![process.clone()],
            processes_before: vec![process],
            ..CheckpointContents::default()
        };
        let change = ContentsChange::of(&contents, "j@1".to_owned(), "j@2".to_owned());
        assert!(change.is_nothing(), "{change:#?}");
        assert_eq!(change.pages.equal, 5);
    }
}
