//! Names of image files (`criu/image-desc.c`).

use crate::manifest::SpaceType;
use crate::pageserver::SpaceId;

/// Kind of a file in an images directory, as its name tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageName {
    /// `pagemap-PID.img` or `pagemap-shmem-ID.img`.
    Pagemap(SpaceId),
    /// `pages-N.img`, N being the pages id that a pagemap's head names.
    Pages(u32),
    /// `mm-PID.img`: the memory mappings of a process.
    Mm(u32),
    /// `inventory.img`: the kind of the images.
    Inventory,
    /// `pstree.img`: the processes.
    Pstree,
    /// `stats-dump`: statistics of a dump.
    StatsDump,
    /// `stats-restore`: statistics of a restore.
    StatsRestore,
    /// Any other file.
    Other,
}

impl ImageName {
    /// Reads a file name. Numbers are taken as CRIU prints them: decimal, no sign, no leading zero.
    #[must_use]
    pub fn parse(name: &str) -> Self {
        match name {
            "inventory.img" => return Self::Inventory,
            "pstree.img" => return Self::Pstree,
            "stats-dump" => return Self::StatsDump,
            "stats-restore" => return Self::StatsRestore,
            _ => {}
        }
        let Some(stem) = name.strip_suffix(".img") else {
            return Self::Other;
        };
        let parsed = if let Some(id) = stem.strip_prefix("pagemap-shmem-") {
            number(id)
                .and_then(SpaceId::shared_memory)
                .map(Self::Pagemap)
        } else if let Some(pid) = stem.strip_prefix("pagemap-") {
            short(pid).map(|pid| Self::Pagemap(SpaceId::process(pid)))
        } else if let Some(id) = stem.strip_prefix("pages-") {
            short(id).map(Self::Pages)
        } else if let Some(pid) = stem.strip_prefix("mm-") {
            short(pid).map(Self::Mm)
        } else {
            None
        };
        parsed.unwrap_or(Self::Other)
    }
}

/// Returns the name of a space's pagemap.
#[must_use]
pub fn pagemap_name(space: SpaceId) -> String {
    match space.space_type {
        SpaceType::Process => format!("pagemap-{}.img", space.id),
        SpaceType::SharedMemory => format!("pagemap-shmem-{}.img", space.id),
    }
}

/// Returns the name of a pages file.
#[must_use]
pub fn pages_name(pages_id: u32) -> String {
    format!("pages-{pages_id}.img")
}

/// Returns the name of the image with a process's mappings.
#[must_use]
pub fn mm_name(pid: u32) -> String {
    format!("mm-{pid}.img")
}

fn number(digits: &str) -> Option<u64> {
    let canonical = digits.bytes().all(|byte| byte.is_ascii_digit())
        && (digits == "0" || !digits.starts_with('0'));
    if canonical { digits.parse().ok() } else { None }
}

fn short(digits: &str) -> Option<u32> {
    number(digits).and_then(|value| u32::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_round_trip(pid: u32, id in 0..=SpaceId::MAX_ID) {
            let (process, shared) = (SpaceId::process(pid), SpaceId::shared_memory(id).unwrap());
            prop_assert_eq!(ImageName::parse(&pagemap_name(process)), ImageName::Pagemap(process));
            prop_assert_eq!(ImageName::parse(&pagemap_name(shared)), ImageName::Pagemap(shared));
            prop_assert_eq!(ImageName::parse(&pages_name(pid)), ImageName::Pages(pid));
            prop_assert_eq!(ImageName::parse(&mm_name(pid)), ImageName::Mm(pid));
        }

        #[test]
        fn no_name_panics(name: String) {
            let _ = ImageName::parse(&name);
        }
    }

    #[test]
    fn whatever_criu_does_not_print_is_another_file() {
        for name in [
            "pages-01.img",
            "pages-+1.img",
            "pages- 1.img",
            "pages-.img",
            "pages-4294967296.img",
            "pages-1",
            "pages-1.img~",
            "pagemap-shmem-72057594037927936.img",
            "pagemap-shmem-.img",
            "pagemap-shmem.img",
            "pages-shmem-1.img",
            "core-1.img",
            "",
            ".img",
            "inventory",
            "stats-dump.img",
        ] {
            assert_eq!(ImageName::parse(name), ImageName::Other, "{name}");
        }
        assert_eq!(ImageName::parse("pages-0.img"), ImageName::Pages(0));
        assert_eq!(ImageName::parse("inventory.img"), ImageName::Inventory);
        assert_eq!(ImageName::parse("pstree.img"), ImageName::Pstree);
        assert_eq!(ImageName::parse("stats-dump"), ImageName::StatsDump);
        assert_eq!(ImageName::parse("stats-restore"), ImageName::StatsRestore);
    }
}
