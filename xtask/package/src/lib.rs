//! `cargo xtask package` and `cargo xtask release`: Debian packages with units, man pages, completions and a default
//! configuration; checksums and a bill of materials beside them; for a release an OCI image and the book, too.
//!
//! The packages are put together here and packed by dpkg-deb, Debian's own program. debhelper would bring Perl and some
//! forty packages for what are a list of files and six short scripts, and cargo-deb would have to be built first.
//! Everything is a function of the tree and of SOURCE_DATE_EPOCH, the time of the last commit unless it is set: the
//! same tree gives the same bytes, in whatever directory it lies.

#![forbid(unsafe_code)]

mod archive;
mod build;
mod check;
mod contents;
mod deb;
mod image;
mod notices;
mod sbom;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use sha2::{Digest, Sha256};

use archive::{Archive, compress};
use build::Binaries;

pub use build::BuildProfile;

/// Crates whose programs and libraries are packed.
const CRATES: [&str; 3] = [
    "permafrost-server",
    "permafrost-client",
    "permafrost-criu-plugin",
];

/// Oldest release of Debian that the packages are for: they are checked on it, and the image has its libraries.
const SUITE: &str = "bookworm";

/// File with the SHA-256 of each other file.
const CHECKSUMS: &str = "SHA256SUMS";

/// Services of the machine and of the workspace that making and checking packages needs.
pub trait BuildHost {
    /// Returns the root of the workspace.
    fn workspace(&self) -> PathBuf;

    /// Returns a `cargo` command in the workspace.
    fn cargo(&self) -> Command;

    /// Returns the output of `cargo metadata` for the platform that is built.
    ///
    /// # Errors
    /// The command fails.
    fn metadata(&self) -> Result<Value>;

    /// Returns the path of a CRIU that works here, or the reason why none can.
    ///
    /// # Errors
    /// One might work, but cannot be had.
    fn criu(&self) -> Result<std::result::Result<PathBuf, String>>;

    /// Returns the URI of the mirror that this machine gets Debian from.
    ///
    /// # Errors
    /// This machine is not a Debian.
    fn mirror(&self) -> Result<String>;

    /// Unpacks packages of a suite of Debian, with all that they depend on, into `root`.
    ///
    /// # Errors
    /// They cannot be fetched.
    fn unpack(&self, suite: &str, packages: &[&str], root: &Path) -> Result<()>;

    /// Loads an OCI image with podman, and runs a daemon of the loaded image `name`; returns what was seen, or the
    /// reason why no container runs here.
    ///
    /// # Errors
    /// The image cannot be loaded, or its daemon does not work.
    fn run_image(&self, image: &Path, name: &str) -> Result<std::result::Result<String, String>>;

    /// Renders the book of the tree at `source` as HTML in the directory `out`.
    ///
    /// # Errors
    /// mdBook cannot be had, or fails.
    fn book(&self, source: &Path, out: &Path) -> Result<()>;

    /// Shows that a step begins; the function that it returns shows the outcome.
    fn begin(&self, step: &str) -> Box<dyn FnOnce(&str)>;

    /// Prints a line so that nobody overlooks it.
    fn say_loudly(&self, line: &str);
}

/// Options of `cargo xtask package` and of `cargo xtask release`.
#[derive(clap::Args)]
pub struct PackageOptions {
    /// Profile of the programs: release, or dev to try the packaging itself with the programs in target/debug.
    #[arg(long, value_enum, default_value_t = BuildProfile::Release)]
    profile: BuildProfile,
    /// Directory of programs that were built before, to be packed as they are: nothing is built.
    #[arg(long, value_name = "DIR", conflicts_with = "profile")]
    programs: Option<PathBuf>,
    /// Directory of the files [default: target/packages, target/release-files].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Check the packages in a clean Debian: lintian, the units, installation, a dump and a restore of a real process,
    /// purge; and run a release's image with podman. Needs root.
    #[arg(long)]
    check: bool,
    /// Make everything a second time, from a copy of the last commit in target/package-twice, and compare the bytes.
    #[arg(long)]
    twice: bool,
}

/// Files that were made.
struct Packages {
    /// Directory of the files.
    dir: PathBuf,
    /// Paths of the Debian packages, in the order in which they can be installed.
    debs: Vec<PathBuf>,
    /// Path of the image, if one was made.
    image: Option<PathBuf>,
}

/// Makes the packages, and checks them if that is requested.
///
/// # Errors
/// A program is missing, the build fails, or a check does.
pub fn run(options: &PackageOptions, host: &dyn BuildHost) -> Result<()> {
    carry_out(options, host, "target/packages", false)
}

/// Makes everything that a release has: the packages, the image, the book, the bill of materials and the checksums; and
/// checks them if that is requested. The tree must be as it was committed, or nobody could make the same again.
///
/// # Errors
/// The tree has changes; and those of [`run`].
pub fn release(options: &PackageOptions, host: &dyn BuildHost) -> Result<()> {
    refuse_changes(&host.workspace())?;
    carry_out(options, host, "target/release-files", true)
}

/// # Errors
/// The tree has changes, or is no clone.
fn refuse_changes(workspace: &Path) -> Result<()> {
    let mut status = Command::new("git");
    status
        .args(["status", "--porcelain"])
        .current_dir(workspace);
    let changes = succeed(&mut status).context("a release is made in a clone")?;
    if !changes.is_empty() {
        bail!(
            "a release is made of a commit, and the tree has changes: commit them, or put them aside with \
             `git stash --include-untracked`\n{}",
            changes.trim_end()
        );
    }
    Ok(())
}

fn carry_out(
    options: &PackageOptions,
    host: &dyn BuildHost,
    out: &str,
    is_release: bool,
) -> Result<()> {
    let source = host.workspace();
    let maker = Maker {
        host,
        profile: options.profile,
        programs: options.programs.as_deref(),
        is_release,
        epoch: epoch(&source)?,
    };
    let out = options.out.clone().unwrap_or_else(|| source.join(out));
    let packages = maker.make(&source, &out)?;
    for path in files(&packages.dir)? {
        println!("{}", path.display());
    }
    if options.twice {
        maker.compare(&packages)?;
    }
    if options.check {
        check::run(&packages, host)?;
        if let Some(image) = &packages.image {
            image::check(image, &contents::version(), host)?;
        }
    }
    Ok(())
}

/// Parameters of the packages beside the tree.
struct Maker<'a> {
    host: &'a dyn BuildHost,
    profile: BuildProfile,
    programs: Option<&'a Path>,
    is_release: bool,
    epoch: u64,
}

impl Maker<'_> {
    /// Makes the packages of a source tree.
    fn make(&self, source: &Path, out: &Path) -> Result<Packages> {
        let binaries = if let Some(dir) = self.programs {
            Binaries::there(dir)?
        } else {
            let done = self.host.begin("build the programs");
            let binaries = Binaries::build(source, self.profile, self.host)?;
            done(&binaries.dir().display().to_string());
            binaries
        };
        empty(out)?;
        let metadata = self.host.metadata()?;
        let version = contents::version();
        let parts = sbom::Parts::of(&metadata, source)?;
        let notices = notices::collect(&parts)?;
        let done = self.host.begin("pack");
        let work = tempfile::tempdir().context("create a working directory")?;
        let mut debs = Vec::new();
        for package in contents::packages(source, &binaries, &notices, self.epoch, work.path())? {
            debs.push(deb::make(&package, &version, self.epoch, work.path(), out)?);
        }
        let (mut image, mut libraries) = (None, Vec::new());
        if self.is_release {
            let (path, of_debian) = image::make(self.host, &version, self.epoch, work.path(), out)?;
            (image, libraries) = (Some(path), of_debian);
            self.book(source, &version, work.path(), out)?;
        }
        let bill = out.join(format!("permafrost_{version}.cdx.json"));
        fs::write(
            &bill,
            sbom::document(&parts, &libraries, &version, self.epoch)?,
        )
        .context("write the bill of materials")?;
        write_checksums(out)?;
        done(&out.display().to_string());
        Ok(Packages {
            dir: out.to_path_buf(),
            debs,
            image,
        })
    }

    /// Packs the book as HTML.
    fn book(&self, source: &Path, version: &str, work: &Path, out: &Path) -> Result<()> {
        let pages = work.join("book");
        self.host.book(source, &pages)?;
        let mut archive = Archive::new(self.epoch);
        archive.tree(&pages, &format!("permafrost-book-{version}"), |_| true)?;
        let path = out.join(format!("permafrost-book_{version}.tar.gz"));
        fs::write(&path, compress(&archive.finish()?)?)
            .with_context(|| format!("write {}", path.display()))
    }

    /// Makes the packages again from a copy of the tree in another directory, and compares them. That directory stays
    /// if they differ, so that one can look for the reason.
    fn compare(&self, first: &Packages) -> Result<()> {
        let done = self.host.begin("make again from a copy of the tree");
        let workspace = self.host.workspace();
        let copy = workspace.join("target/package-twice");
        copy_tree(&workspace, &copy)?;
        let second = self.make(&copy, &copy.join("packages"))?;
        let different = differences(&first.dir, &second.dir)?;
        if !different.is_empty() {
            bail!(
                "other bytes the second time, in {}: {}",
                second.dir.display(),
                different.join(", ")
            );
        }
        fs::remove_dir_all(&copy).context("remove the copy of the tree")?;
        done("the same bytes");
        Ok(())
    }
}

/// Makes a directory for the packages; removes those that are in it.
///
/// # Errors
/// The directory has something else.
fn empty(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let is_made_here = |path: &&PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ends = [".deb", ".cdx.json", ".oci.tar"];
        let is_package =
            name.starts_with("permafrost") && ends.iter().any(|end| name.ends_with(end));
        let is_book = name.starts_with("permafrost-book_") && name.ends_with(".tar.gz");
        path.is_file() && (name == CHECKSUMS || is_package || is_book)
    };
    let old = files(dir)?;
    if let Some(other) = old.iter().find(|path| !is_made_here(path)) {
        bail!(
            "{} was not made here: name another directory with --out",
            other.display()
        );
    }
    for path in old {
        fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    }
    Ok(())
}

/// Returns a line for each file that only one of two directories has, or that has other bytes in the second: its name,
/// and the offset of the first byte that differs.
fn differences(first: &Path, second: &Path) -> Result<Vec<String>> {
    let names = |dir: &Path| -> Result<BTreeSet<OsString>> {
        let paths = files(dir)?.into_iter();
        Ok(paths
            .filter_map(|path| Some(path.file_name()?.to_owned()))
            .collect())
    };
    let (ours, theirs) = (names(first)?, names(second)?);
    let mut different = Vec::new();
    for name in ours.union(&theirs) {
        let why = if !theirs.contains(name) {
            "only the first time".to_owned()
        } else if !ours.contains(name) {
            "only the second time".to_owned()
        } else {
            let read = |dir: &Path| fs::read(dir.join(name)).context("read a file to compare");
            let (ours, theirs) = (read(first)?, read(second)?);
            let Some(offset) = first_difference(&ours, &theirs) else {
                continue;
            };
            format!(
                "from byte {offset} on, {} and {} bytes",
                ours.len(),
                theirs.len()
            )
        };
        different.push(format!("{} ({why})", name.to_string_lossy()));
    }
    Ok(different)
}

/// Returns the offset of the first byte that only one of two files has, or that differs.
fn first_difference(ours: &[u8], theirs: &[u8]) -> Option<usize> {
    let same = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
    (same < ours.len().max(theirs.len())).then_some(same)
}

/// Returns the time that stands in everything that is made, seconds since the Unix epoch.
fn epoch(source: &Path) -> Result<u64> {
    if let Ok(text) = std::env::var("SOURCE_DATE_EPOCH") {
        return text.parse().context("read SOURCE_DATE_EPOCH");
    }
    let output = Command::new("git")
        .args(["log", "-1", "--format=%ct"])
        .current_dir(source)
        .output()
        .context("run git")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let seconds = text.trim().parse();
    seconds.context("this is no clone of the repository: set SOURCE_DATE_EPOCH")
}

/// Returns a time in seconds since the Unix epoch as RFC 3339 has it.
///
/// # Errors
/// date(1) is not there.
fn timestamp(epoch: u64) -> Result<String> {
    let said = succeed(
        Command::new("date")
            .args(["--utc", "+%Y-%m-%dT%H:%M:%SZ", "--date"])
            .arg(format!("@{epoch}")),
    )?;
    Ok(said.trim().to_owned())
}

/// Writes the SHA-256 of each file into `SHA256SUMS`, as sha256sum(1) reads it.
fn write_checksums(dir: &Path) -> Result<()> {
    let mut lines = String::new();
    for path in files(dir)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        lines += &format!("{}  {name}\n", hex_of(&bytes));
    }
    fs::write(dir.join(CHECKSUMS), lines).context("write the checksums")
}

/// Returns the SHA-256 of bytes in hexadecimal digits.
fn hex_of(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the files in a directory, by name.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))?;
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Writes the files of the last commit into a directory. What was built in it before stays, as that takes long; all files
/// are newer than that, so that cargo does not take old programs for those of new sources.
fn copy_tree(workspace: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    for old in files(to)? {
        if old.ends_with("target") {
            continue;
        }
        let removed = match old.is_dir() {
            true => fs::remove_dir_all(&old),
            false => fs::remove_file(&old),
        };
        removed.with_context(|| format!("remove {}", old.display()))?;
    }
    let archive = to.join("tree.tar");
    let mut git = Command::new("git");
    git.args(["archive", "--format=tar", "HEAD", "-o"]);
    succeed(git.arg(&archive).current_dir(workspace))?;
    let mut tar = Command::new("tar");
    succeed(tar.args(["--touch", "-xf"]).arg(&archive).arg("-C").arg(to))?;
    fs::remove_file(&archive).context("remove the archive of the tree")
}

/// Runs a command; an error has what it wrote.
fn succeed(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("run {program} (is it installed?)"))?;
    if !output.status.success() {
        bail!(
            "{program} fails ({}): {}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr),
            String::from_utf8_lossy(&output.stdout)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_sha256sum() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("b.deb"), "abc").unwrap();
        fs::write(dir.path().join("a.deb"), "").unwrap();
        write_checksums(dir.path()).unwrap();
        // FIPS 180-4, examples of NIST.
        assert_eq!(
            fs::read_to_string(dir.path().join("SHA256SUMS")).unwrap(),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  a.deb\n\
             ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  b.deb\n"
        );
    }

    #[test]
    fn only_packages_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("a/new/one");
        empty(&out).unwrap();
        let made = [
            "permafrost_0.1.0_amd64.deb",
            "permafrost_0.1.0.cdx.json",
            "permafrost_0.1.0_amd64.oci.tar",
            CHECKSUMS,
        ];
        for name in made {
            fs::write(out.join(name), "").unwrap();
        }
        fs::write(out.join("letter.txt"), "").unwrap();
        let error = empty(&out).unwrap_err().to_string();
        assert!(error.contains("letter.txt was not made here"), "{error}");
        assert_eq!(files(&out).unwrap().len(), 5);
        fs::remove_file(out.join("letter.txt")).unwrap();
        empty(&out).unwrap();
        assert!(files(&out).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_differs_or_is_missing_is_named_with_the_place() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (name, ours, theirs) in [
            ("same", "a", "a"),
            ("other", "abc", "abd"),
            ("longer", "ab", "abc"),
        ] {
            fs::write(first.path().join(name), ours).unwrap();
            fs::write(second.path().join(name), theirs).unwrap();
        }
        fs::write(second.path().join("new"), "").unwrap();
        fs::write(first.path().join("gone"), "").unwrap();
        let different = differences(first.path(), second.path()).unwrap();
        assert_eq!(
            different,
            [
                "gone (only the first time)",
                "longer (from byte 2 on, 2 and 3 bytes)",
                "new (only the second time)",
                "other (from byte 2 on, 3 and 3 bytes)",
            ]
        );
        assert!(differences(first.path(), first.path()).unwrap().is_empty());
    }

    fn git(dir: &Path, arguments: &[&str]) {
        let mut git = Command::new("git");
        git.args(["-c", "user.name=test", "-c", "user.email=test@localhost"]);
        succeed(git.args(arguments).current_dir(dir)).unwrap();
    }

    #[test]
    fn a_release_is_of_a_commit() {
        let dir = tempfile::tempdir().unwrap();
        let refused = || refuse_changes(dir.path()).map_err(|error| format!("{error:#}"));
        let error = refused().unwrap_err();
        assert!(error.contains("a release is made in a clone"), "{error}");
        git(dir.path(), &["init", "--quiet"]);
        fs::write(dir.path().join("a"), "1").unwrap();
        let error = refused().unwrap_err();
        assert!(
            error.contains("commit them") && error.ends_with("?? a"),
            "{error}"
        );
        git(dir.path(), &["add", "a"]);
        git(dir.path(), &["commit", "--quiet", "--message", "a"]);
        assert_eq!(refused(), Ok(()));
        fs::write(dir.path().join("a"), "2").unwrap();
        assert!(refused().unwrap_err().ends_with(" M a"));
    }

    #[test]
    fn a_copy_of_the_tree_is_that_of_the_commit_and_new() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, copy) = (dir.path().join("tree"), dir.path().join("copy"));
        fs::create_dir_all(copy.join("target")).unwrap();
        fs::create_dir_all(copy.join("gone")).unwrap();
        fs::write(copy.join("target/built"), "before").unwrap();
        fs::create_dir(&tree).unwrap();
        git(&tree, &["init", "--quiet"]);
        fs::write(tree.join("a"), "committed").unwrap();
        git(&tree, &["add", "a"]);
        let begun = std::time::SystemTime::now() - std::time::Duration::from_secs(2);
        let mut commit = Command::new("git");
        commit.env("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z");
        commit.args(["-c", "user.name=test", "-c", "user.email=test@localhost"]);
        commit.args(["commit", "--quiet", "--message", "a"]);
        succeed(commit.current_dir(&tree)).unwrap();
        fs::write(tree.join("a"), "changed").unwrap();
        copy_tree(&tree, &copy).unwrap();
        assert_eq!(files(&copy).unwrap(), [copy.join("a"), copy.join("target")]);
        assert_eq!(fs::read_to_string(copy.join("a")).unwrap(), "committed");
        assert!(fs::metadata(copy.join("a")).unwrap().modified().unwrap() > begun);
        assert_eq!(
            fs::read_to_string(copy.join("target/built")).unwrap(),
            "before"
        );
    }
}
