//! The guest's file system: Debian's programs with their libraries and loader in a folder of their own,
//! ours with the libraries of the machine that built them in the usual places.

use std::fs;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use permafrost_tests::binaries;

use super::cpio::Archive;
use super::packages::{self, Packages};
use crate::paths;

/// Programs taken from the packages.
pub(super) const PROGRAMS: [&str; 3] = ["usr/sbin/criu", "sbin/mke2fs", "usr/bin/etcd"];
/// Programs of this workspace.
const OURS: [&str; 4] = [
    "permafrostd",
    "permafrost",
    "permafrost-action",
    "permafrost-workload",
];

/// Writes the initial ram file system. Of this workspace's binaries, those that are built are included.
pub(crate) fn build(packages: &Packages) -> Result<PathBuf> {
    let path = packages::dir().join("initrd");
    let file = fs::File::create(&path).with_context(|| format!("create {}", path.display()))?;
    let mut archive = Archive::new(BufWriter::new(file));
    for directory in [
        "proc", "sys", "dev", "tmp", "run", "mnt", "root", "var", "newroot",
    ] {
        archive.directory(directory)?;
    }
    busybox(&mut archive, packages)?;
    debian(&mut archive, packages)?;
    modules(&mut archive, packages)?;
    ours(&mut archive)?;
    archive.file("etc/passwd", 0o644, b"root:x:0:0::/root:/bin/sh\n")?;
    archive.file("etc/group", 0o644, b"root:x:0:\n")?;
    archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n")?;
    archive.finish()?;
    Ok(path)
}

type Initrd = Archive<BufWriter<fs::File>>;

fn busybox(archive: &mut Initrd, packages: &Packages) -> Result<()> {
    archive.copy("bin/busybox", &packages.busybox())?;
    let list = Command::new(packages.busybox())
        .arg("--list")
        .output()
        .context("list busybox's applets")?;
    for applet in String::from_utf8_lossy(&list.stdout)
        .lines()
        .filter(|applet| *applet != "busybox")
    {
        archive.link(&format!("bin/{applet}"), "busybox")?;
    }
    Ok(())
}

fn debian(archive: &mut Initrd, packages: &Packages) -> Result<()> {
    let mut libraries = vec![packages.root.loader()?];
    for program in PROGRAMS {
        let name = file_name(Path::new(program))?;
        archive.copy(
            &format!("debian/bin/{name}"),
            &packages.root.dir.join(program),
        )?;
        let script = format!(
            "#!/bin/sh\nexec /debian/lib/loader --library-path /debian/lib /debian/bin/{name} \"$@\"\n"
        );
        archive.file(&format!("usr/sbin/{name}"), 0o755, script.as_bytes())?;
        libraries.extend(packages.libraries(program)?);
    }
    archive.copy("debian/lib/loader", &libraries[0])?;
    libraries.sort();
    libraries.dedup();
    for library in &libraries {
        archive.copy(&format!("debian/lib/{}", file_name(library)?), library)?;
    }
    archive.copy(
        "etc/mke2fs.conf",
        &packages.root.dir.join("etc/mke2fs.conf"),
    )
}

fn modules(archive: &mut Initrd, packages: &Packages) -> Result<()> {
    let mut order = String::new();
    for module in packages.modules()? {
        let name = file_name(&module)?;
        archive.copy(&format!("modules/{name}"), &module)?;
        order += &format!("{name}\n");
    }
    archive.file("modules/order", 0o644, order.as_bytes())
}

fn ours(archive: &mut Initrd) -> Result<()> {
    let sources = paths::workspace().join("xtask/guest");
    let scenarios = sources.join("scenarios");
    for entry in fs::read_dir(&scenarios).context("list the scenarios")? {
        let path = entry.context("list the scenarios")?.path();
        archive.copy(&format!("scenarios/{}", file_name(&path)?), &path)?;
    }
    archive.file(
        "init",
        0o755,
        &fs::read(sources.join("init")).context("read the guest's init")?,
    )?;
    let mut libraries = Vec::new();
    for name in OURS {
        let Ok(binary) = binaries::path(name) else {
            continue;
        };
        archive.copy(&format!("permafrost/{name}"), &stripped(&binary)?)?;
        libraries.extend(packages::libraries_of(&binary)?);
    }
    libraries.sort();
    libraries.dedup();
    for library in &libraries {
        // At the very paths: the loader's is written into the binaries.
        archive.copy(library.to_string_lossy().trim_start_matches('/'), library)?;
    }
    Ok(())
}

/// Returns the binary without its debug information, which is most of its size, if there is a `strip`.
fn stripped(binary: &Path) -> Result<PathBuf> {
    let dir = packages::dir().join("stripped");
    fs::create_dir_all(&dir).context("create a directory for stripped binaries")?;
    let to = dir.join(file_name(binary)?);
    match Command::new("strip")
        .arg("-o")
        .arg(&to)
        .arg(binary)
        .status()
    {
        Ok(status) if status.success() => Ok(to),
        Ok(status) => bail!("strip {} fails ({status})", binary.display()),
        Err(_) => Ok(binary.to_path_buf()),
    }
}

fn file_name(path: &Path) -> Result<String> {
    let name = path
        .file_name()
        .with_context(|| format!("{} names no file", path.display()))?;
    Ok(name.to_string_lossy().into_owned())
}
