//! A Debian package from a list of files: staged in a directory, packed by dpkg-deb.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::archive::compress;
use crate::succeed;

/// Content of a path in a package.
pub(super) enum Content {
    /// A file with these bytes.
    Bytes(Vec<u8>),
    /// A program or a library, which is stripped.
    Binary(PathBuf),
    /// A link to this path.
    Link(&'static str),
}

/// File of a package.
pub(super) struct Entry {
    /// Path below `/`.
    pub(super) path: String,
    /// Permissions of the file, or of the link.
    pub(super) mode: u32,
    content: Content,
}

impl Entry {
    /// Makes a file that everybody may read.
    pub(super) fn file(path: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            path: path.into(),
            mode: 0o644,
            content: Content::Bytes(bytes.into()),
        }
    }

    /// Makes a file that is compressed.
    pub(super) fn compressed(path: impl Into<String>, bytes: &[u8]) -> Result<Self> {
        Ok(Self::file(path, compress(bytes)?))
    }

    /// Makes a program.
    pub(super) fn program(path: impl Into<String>, binary: PathBuf) -> Self {
        Self {
            path: path.into(),
            mode: 0o755,
            content: Content::Binary(binary),
        }
    }

    /// Makes a library that programs load.
    pub(super) fn library(path: impl Into<String>, binary: PathBuf) -> Self {
        Self {
            mode: 0o644,
            ..Self::program(path, binary)
        }
    }

    /// Makes a link.
    pub(super) fn link(path: impl Into<String>, to: &'static str) -> Self {
        Self {
            path: path.into(),
            mode: 0o777,
            content: Content::Link(to),
        }
    }

    /// Returns the bytes of a file that is neither a program nor a link.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> Option<&[u8]> {
        match &self.content {
            Content::Bytes(bytes) => Some(bytes),
            Content::Binary(_) | Content::Link(_) => None,
        }
    }

    fn is_binary(&self) -> bool {
        matches!(self.content, Content::Binary(_))
    }
}

/// A package before it is packed.
pub(super) struct Package {
    /// Name of the package.
    pub(super) name: &'static str,
    /// Other packages that it needs; those of its shared libraries are added.
    pub(super) depends: String,
    /// Packages that are installed with it by default.
    pub(super) recommends: &'static str,
    /// Packages that are of use with it.
    pub(super) suggests: &'static str,
    /// Description in one line.
    pub(super) summary: &'static str,
    /// Lines of the description.
    pub(super) description: &'static [&'static str],
    /// Files of the package.
    pub(super) entries: Vec<Entry>,
    /// Paths that dpkg keeps if they were changed.
    pub(super) conffiles: &'static [&'static str],
    /// Maintainer scripts by name.
    pub(super) scripts: Vec<(&'static str, Vec<u8>)>,
}

/// Packs a package; returns the path of the file in `out`.
pub(super) fn make(
    package: &Package,
    version: &str,
    epoch: u64,
    work: &Path,
    out: &Path,
) -> Result<PathBuf> {
    let root = work.join(package.name);
    for entry in &package.entries {
        stage(entry, &root).with_context(|| format!("stage {}", entry.path))?;
    }
    let control = root.join("DEBIAN");
    make_dir(&control)?;
    for (name, script) in &package.scripts {
        write(&control.join(name), script, 0o755)?;
    }
    if !package.conffiles.is_empty() {
        let lines = package.conffiles.join("\n") + "\n";
        write(&control.join("conffiles"), lines.as_bytes(), 0o644)?;
    }
    write(
        &control.join("md5sums"),
        sums(package, &root)?.as_bytes(),
        0o644,
    )?;
    let libraries = libraries(package, &root, work)?;
    let text = fields(
        package,
        version,
        &libraries,
        installed_size(package, &root)?,
    );
    write(&control.join("control"), text.as_bytes(), 0o644)?;
    let path = out.join(format!("{}_{version}_amd64.deb", package.name));
    // The number of threads would show in the bytes.
    succeed(
        Command::new("dpkg-deb")
            .args([
                "--root-owner-group",
                "-Zxz",
                "-z6",
                "--threads-max=1",
                "--build",
            ])
            .arg(&root)
            .arg(&path)
            .env("SOURCE_DATE_EPOCH", epoch.to_string()),
    )?;
    Ok(path)
}

fn make_dir(path: &Path) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        make_dir(parent)?;
    }
    fs::create_dir(path).with_context(|| format!("create {}", path.display()))?;
    // Whatever this user's umask is.
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).context("set a mode")
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("write {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).context("set a mode")
}

fn stage(entry: &Entry, root: &Path) -> Result<()> {
    let path = root.join(&entry.path);
    make_dir(path.parent().context("a file at /")?)?;
    match &entry.content {
        Content::Bytes(bytes) => write(&path, bytes, entry.mode),
        Content::Link(to) => symlink(to, &path).context("make a link"),
        Content::Binary(binary) => {
            succeed(
                Command::new("strip")
                    .args(["--strip-unneeded", "--remove-section=.comment"])
                    .arg("-o")
                    .arg(&path)
                    .arg(binary),
            )?;
            fs::set_permissions(&path, fs::Permissions::from_mode(entry.mode)).context("set a mode")
        }
    }
}

/// Returns the lines of `md5sums`, by which `dpkg --verify` finds damaged files.
fn sums(package: &Package, root: &Path) -> Result<String> {
    let mut command = Command::new("md5sum");
    command.current_dir(root).arg("--");
    let mut paths: Vec<_> = package
        .entries
        .iter()
        .filter(|entry| !matches!(entry.content, Content::Link(_)))
        .map(|entry| entry.path.as_str())
        .filter(|path| !package.conffiles.contains(&format!("/{path}").as_str()))
        .collect();
    paths.sort_unstable();
    succeed(command.args(paths))
}

/// Returns the size of the installed files, KiB.
fn installed_size(package: &Package, root: &Path) -> Result<u64> {
    let mut kib = 0;
    for entry in &package.entries {
        let metadata = fs::symlink_metadata(root.join(&entry.path)).context("stat a file")?;
        // dpkg counts a file in whole KiB.
        kib += metadata.len().div_ceil(1024);
    }
    Ok(kib)
}

/// Returns the control file. `libraries` are the packages of the shared libraries, `kib` the size of the files, KiB.
fn fields(package: &Package, version: &str, libraries: &str, kib: u64) -> String {
    let depends: Vec<_> = [package.depends.as_str(), libraries]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect();
    let mut text = format!(
        "Package: {}\nSource: permafrost\nVersion: {version}\nArchitecture: amd64\nMaintainer: {}\n\
         Installed-Size: {kib}\n",
        package.name,
        crate::contents::MAINTAINER,
    );
    for (field, value) in [
        ("Depends", depends.join(", ").as_str()),
        ("Recommends", package.recommends),
        ("Suggests", package.suggests),
    ] {
        if !value.is_empty() {
            text += &format!("{field}: {value}\n");
        }
    }
    text += &format!(
        "Section: admin\nPriority: optional\nDescription: {}\n",
        package.summary
    );
    for line in package.description {
        text += &format!(" {}\n", if line.is_empty() { "." } else { line });
    }
    text
}

/// Returns the packages of the shared libraries that the programs are linked with, with the oldest versions that have
/// the symbols in use.
fn libraries(package: &Package, root: &Path, work: &Path) -> Result<String> {
    let binaries: Vec<_> = package
        .entries
        .iter()
        .filter(|entry| entry.is_binary())
        .collect();
    if binaries.is_empty() {
        return Ok(String::new());
    }
    // It insists on a source package.
    let dir = work.join(format!("{}.libraries", package.name));
    make_dir(&dir.join("debian"))?;
    let control = format!(
        "Source: permafrost\n\nPackage: {}\nArchitecture: any\n",
        package.name
    );
    write(&dir.join("debian/control"), control.as_bytes(), 0o644)?;
    let mut command = Command::new("dpkg-shlibdeps");
    command.current_dir(&dir).arg("-O");
    for entry in binaries {
        command.arg("-e").arg(root.join(&entry.path));
    }
    let said = succeed(&mut command).context("find the shared libraries (apt: dpkg-dev)")?;
    let line = said
        .lines()
        .find_map(|line| line.strip_prefix("shlibs:Depends="));
    Ok(line.context("dpkg-shlibdeps names no library")?.to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn package(entries: Vec<Entry>) -> Package {
        Package {
            name: "permafrost-try",
            depends: "permafrost (= 1.2.3)".to_owned(),
            recommends: "criu",
            suggests: "",
            summary: "try it",
            description: &["One.", "", "Two."],
            entries,
            conffiles: &["/etc/try"],
            scripts: Vec::new(),
        }
    }

    #[test]
    fn the_control_file_has_no_empty_field_and_no_empty_line() {
        let mut package = package(Vec::new());
        let text = fields(&package, "1.2.3", "libc6 (>= 2.34)", 7);
        assert_eq!(
            text,
            format!(
                "Package: permafrost-try\nSource: permafrost\nVersion: 1.2.3\nArchitecture: amd64\nMaintainer: {}\n\
                 Installed-Size: 7\nDepends: permafrost (= 1.2.3), libc6 (>= 2.34)\nRecommends: criu\n\
                 Section: admin\nPriority: optional\nDescription: try it\n One.\n .\n Two.\n",
                crate::contents::MAINTAINER
            )
        );
        package.depends = String::new();
        assert!(fields(&package, "1.2.3", "libc6", 7).contains("\nDepends: libc6\n"));
        assert!(!fields(&package, "1.2.3", "", 7).contains("Depends"));
    }

    #[test]
    fn staged_files_have_their_modes_sizes_and_sums() {
        let root = tempfile::tempdir().unwrap();
        let entries = vec![
            Entry::file("usr/share/doc/try/text", vec![b'a'; 1025]),
            Entry::file("etc/try", "option\n"),
            Entry::link("usr/lib/try/link", "../text"),
        ];
        for entry in &entries {
            stage(entry, root.path()).unwrap();
        }
        let package = package(entries);
        let mode = |path: &str| {
            let metadata = fs::symlink_metadata(root.path().join(path)).unwrap();
            metadata.permissions().mode() & 0o7777
        };
        assert_eq!(mode("usr/share/doc/try/text"), 0o644);
        assert_eq!(mode("usr/share/doc"), 0o755);
        let link = fs::read_link(root.path().join("usr/lib/try/link")).unwrap();
        assert_eq!(link, Path::new("../text"));
        // Two KiB, and one for each of the others.
        assert_eq!(installed_size(&package, root.path()).unwrap(), 4);
        // Without the link, and the file that may be changed.
        let sums = sums(&package, root.path()).unwrap();
        let paths: Vec<_> = sums
            .lines()
            .filter_map(|line| line.split_once("  "))
            .map(|(_, path)| path)
            .collect();
        assert_eq!(paths, ["usr/share/doc/try/text"]);
    }

    #[test]
    fn compressed_files_have_neither_name_nor_time() {
        let Content::Bytes(bytes) = Entry::compressed("a", b"text").unwrap().content else {
            panic!("not a file");
        };
        // RFC 1952: flags, then the time.
        assert_eq!(bytes[3..8], [0; 5]);
        let mut text = String::new();
        flate2::read::GzDecoder::new(bytes.as_slice())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "text");
    }
}
