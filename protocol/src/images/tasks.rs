//! What the images of a task say of its name and its open files: `core-N.img`, `ids-N.img`, `fdinfo-N.img`, `files.img`
//! (`images/core.proto`, `images/fdinfo.proto`, `images/regfile.proto`), as far as it is shown.

use prost::Message;

use super::magic::{CORE_MAGIC, FDINFO_MAGIC, FILES_MAGIC, IDS_MAGIC};
use super::{Head, ImageError, ImageReader};

#[derive(Clone, PartialEq, Message)]
struct CoreRecord {
    #[prost(message, optional, tag = "3")]
    task: Option<TaskRecord>,
    #[prost(message, optional, tag = "4")]
    ids: Option<IdsRecord>,
}

#[derive(Clone, PartialEq, Message)]
struct TaskRecord {
    // A name is bytes to the kernel, cut off after 15.
    #[prost(bytes = "vec", tag = "6")]
    comm: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct IdsRecord {
    #[prost(uint32, tag = "2")]
    files_id: u32,
}

/// Open descriptor of a task.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct DumpedDescriptor {
    /// Number of the open file in `files.img`, which counts for each kind of file by itself in older images.
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Flags of the descriptor.
    #[prost(uint32, tag = "2")]
    pub flags: u32,
    /// Kind of the file: a number of `enum fd_types`.
    #[prost(uint32, tag = "3")]
    pub kind: u32,
    /// Number of the descriptor.
    #[prost(uint32, tag = "4")]
    pub descriptor: u32,
}

/// Open file of the dumped tasks.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DumpedFile {
    /// Kind of the file: a number of `enum fd_types`.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Number of the open file.
    #[prost(uint32, tag = "2")]
    pub id: u32,
    /// Details of a file with a path.
    #[prost(message, optional, tag = "3")]
    pub regular: Option<RegularFile>,
}

/// Open file with a path.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegularFile {
    /// Place of the next read or write, bytes.
    #[prost(uint64, tag = "3")]
    pub position_bytes: u64,
    /// Path of the file: bytes, to the kernel.
    #[prost(bytes = "vec", tag = "6")]
    pub name: Vec<u8>,
}

impl RegularFile {
    /// Returns the path as text; what is not UTF-8 is replaced.
    #[must_use]
    pub fn path(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }
}

/// Returns the word for a kind of file (`enum fd_types` in `images/fdinfo.proto`).
#[must_use]
pub const fn file_kind(number: u32) -> &'static str {
    match number {
        1 => "file",
        2 => "pipe",
        3 => "fifo",
        4 => "socket",
        5 => "unix-socket",
        6 => "eventfd",
        7 => "epoll",
        8 => "inotify",
        9 => "signalfd",
        10 => "packet-socket",
        11 => "tty",
        12 => "fanotify",
        13 => "netlink-socket",
        14 => "namespace",
        15 => "tun",
        16 => "external",
        17 => "timerfd",
        18 => "memfd",
        19 => "bpf-map",
        20 => "pidfd",
        _ => "other",
    }
}

/// Reads the name of a task, and the number of its table of descriptors where the image has that, of `core-N.img`.
///
/// # Errors
/// The image is damaged.
pub fn read_core(bytes: &[u8]) -> Result<(String, Option<u32>), ImageError> {
    let mut records = ImageReader::new(bytes, Head::Common(CORE_MAGIC))?;
    let record = records.next_record()?;
    let record = record.ok_or(ImageError::MissingRecord { record: "core" })?;
    let core: CoreRecord = record.decode()?;
    let name = core.task.map(|task| task.comm).unwrap_or_default();
    let name = String::from_utf8_lossy(&name).into_owned();
    Ok((name, core.ids.map(|ids| ids.files_id)))
}

/// Reads the number of a task's table of descriptors of `ids-N.img`: the N of `fdinfo-N.img`.
///
/// # Errors
/// The image is damaged.
pub fn read_files_id(bytes: &[u8]) -> Result<u32, ImageError> {
    let record: IdsRecord = ImageReader::new(bytes, Head::Common(IDS_MAGIC))?
        .only_record("ids")?
        .decode()?;
    Ok(record.files_id)
}

/// Reads the open descriptors of `fdinfo-N.img`, in the order of the image.
///
/// # Errors
/// The image is damaged.
pub fn read_descriptors(bytes: &[u8]) -> Result<Vec<DumpedDescriptor>, ImageError> {
    ImageReader::new(bytes, Head::Common(FDINFO_MAGIC))?
        .map(|record| record?.decode())
        .collect()
}

/// Reads the open files of `files.img`, in the order of the image. Images before CRIU 3.3 had a file for each kind.
///
/// # Errors
/// The image is damaged.
pub fn read_files(bytes: &[u8]) -> Result<Vec<DumpedFile>, ImageError> {
    ImageReader::new(bytes, Head::Common(FILES_MAGIC))?
        .map(|record| record?.decode())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::ImageWriter;
    use super::*;

    fn image(magic: u32, records: &[&dyn Fn(&mut ImageWriter)]) -> Vec<u8> {
        let mut image = ImageWriter::new(Head::Common(magic));
        records.iter().for_each(|record| record(&mut image));
        image.finish()
    }

    #[test]
    fn names_and_files_are_read_and_damage_is_an_error() {
        let core = CoreRecord {
            task: Some(TaskRecord {
                // Cut off within a letter.
                comm: b"perl\xc3".to_vec(),
            }),
            ids: None,
        };
        let core = image(CORE_MAGIC, &[&|image| image.message(&core)]);
        assert_eq!(read_core(&core).unwrap(), ("perl\u{fffd}".to_owned(), None));
        let ids = image(
            IDS_MAGIC,
            &[&|image| image.message(&IdsRecord { files_id: 9 })],
        );
        assert_eq!(read_files_id(&ids).unwrap(), 9);
        let descriptor = DumpedDescriptor {
            id: 3,
            flags: 0,
            kind: 1,
            descriptor: 7,
        };
        let fdinfo = image(FDINFO_MAGIC, &[&|image| image.message(&descriptor)]);
        assert_eq!(read_descriptors(&fdinfo).unwrap(), [descriptor]);
        let file = DumpedFile {
            kind: 1,
            id: 3,
            regular: Some(RegularFile {
                position_bytes: 12,
                name: b"/etc/hosts\xff".to_vec(),
            }),
        };
        let files = image(
            FILES_MAGIC,
            &[&|image| image.message(&file), &|image| image.message(&file)],
        );
        let read = read_files(&files).unwrap();
        let path = read[0].regular.as_ref().unwrap().path();
        assert_eq!(path, "/etc/hosts\u{fffd}");
        assert_eq!(read, [file.clone(), file]);
        for len in 1..8 {
            assert!(read_files(&files[..files.len() - len]).is_err());
        }
        assert!(read_core(&files).is_err() && read_files_id(&core).is_err());
        assert_eq!((file_kind(1), file_kind(9_999)), ("file", "other"));
    }
}
