//! Debian packages unpacked beside the system: fetched with an apt state of their own, never installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::sources::Mirror;

/// Settings that disable hooks of the machine's own apt configuration, which would touch the system, and unneeded
/// indexes. The rest of that configuration applies: it may name a proxy.
const CONFIGURATION: &str = "\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
#clear DPkg::Pre-Install-Pkgs;
#clear Acquire::IndexTargets;
Acquire::IndexTargets::deb::Packages { MetaKey \"$(COMPONENT)/binary-$(ARCHITECTURE)/Packages\"; flatMetaKey \"Packages\"; ShortDescription \"Packages\"; Optional \"false\"; };
Acquire::Languages \"none\";
Acquire::Retries \"3\";
Dir::Cache::pkgcache \"\";
Dir::Cache::srcpkgcache \"\";
APT::Install-Recommends \"false\";
// Its unprivileged user could not write into a private directory.
APT::Sandbox::User \"root\";
";

/// Fetches `packages` of `suite`, with everything they depend on, and unpacks all of them into `root`.
/// Either `root` is complete afterwards or it is not there.
///
/// Needs what a minimal Debian has: apt-get and dpkg-deb. Nothing outside `root`'s parent is written.
///
/// # Errors
/// Fails with apt's own words.
pub(crate) fn unpack(suite: &str, packages: &[&str], root: &Path) -> Result<()> {
    fetch(
        suite,
        packages,
        root,
        &[
            "install",
            "--yes",
            "--download-only",
            "--no-install-recommends",
        ],
    )
}

/// Fetches `packages` as [`unpack`] does, without what they depend on: for a program that needs no more than libc, of a
/// package that depends on much.
///
/// # Errors
/// Fails with apt's own words.
pub(crate) fn unpack_alone(suite: &str, packages: &[&str], root: &Path) -> Result<()> {
    fetch(suite, packages, root, &["download"])
}

fn fetch(suite: &str, packages: &[&str], root: &Path, command: &[&str]) -> Result<()> {
    let parent = root.parent().context("a root needs a parent")?;
    fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    let work = tempfile::Builder::new()
        .prefix("fetch-")
        .tempdir_in(parent)
        .context("create a working directory")?;
    let state = State::create(work.path(), &Mirror::of_this_machine()?.source(suite))?;
    state.apt(&["update"])?;
    let mut install = command.to_vec();
    install.extend(packages);
    state.apt(&install)?;
    let new = work.path().join("root");
    fs::create_dir(&new).context("create the new root")?;
    let archives = state.archives()?;
    if archives.is_empty() {
        bail!("apt-get fetched no packages");
    }
    for archive in &archives {
        let status = Command::new("dpkg-deb")
            .arg("-x")
            .arg(archive)
            .arg(&new)
            .status()
            .context("run dpkg-deb")?;
        if !status.success() {
            bail!("unpack {}: dpkg-deb fails ({status})", archive.display());
        }
    }
    match fs::remove_dir_all(root) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).context("remove the old root");
        }
        _ => {}
    }
    fs::rename(&new, root).with_context(|| format!("move the packages to {}", root.display()))
}

/// An apt state of its own, apart from the system's.
struct State {
    dir: PathBuf,
}

impl State {
    fn create(dir: &Path, source: &str) -> Result<Self> {
        for sub in [
            "lists/partial",
            "cache/archives/partial",
            "sources",
            "log",
            "preferences",
        ] {
            fs::create_dir_all(dir.join(sub)).with_context(|| format!("create {sub}"))?;
        }
        fs::write(dir.join("sources/mirror.sources"), source).context("write the source")?;
        fs::write(dir.join("apt.conf"), CONFIGURATION).context("write apt's configuration")?;
        // Empty: nothing counts as installed, so that every dependency is fetched too.
        fs::write(dir.join("status"), "").context("write an empty status")?;
        Ok(Self {
            dir: dir.to_path_buf(),
        })
    }

    fn apt(&self, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new("apt-get");
        command.arg("-qq").arg("-c").arg(self.dir.join("apt.conf"));
        for (option, value) in [
            ("Dir::State", ""),
            ("Dir::State::lists", "lists"),
            ("Dir::State::status", "status"),
            ("Dir::State::extended_states", "extended_states"),
            ("Dir::Cache", "cache"),
            ("Dir::Cache::archives", "cache/archives"),
            ("Dir::Etc::SourceParts", "sources"),
            ("Dir::Etc::PreferencesParts", "preferences"),
            ("Dir::Log", "log"),
        ] {
            command
                .arg("-o")
                .arg(format!("{option}={}", self.dir.join(value).display()));
        }
        command.args([
            "-o",
            "Dir::Etc::SourceList=/dev/null",
            "-o",
            "Dir::Etc::Preferences=/dev/null",
        ]);
        command
            .args(arguments)
            // `download` writes into the current directory.
            .current_dir(self.dir.join("cache/archives"))
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null());
        let output = command
            .output()
            .context("run apt-get (this needs a Debian machine)")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned()
                + &String::from_utf8_lossy(&output.stdout);
            bail!(
                "`apt-get {}` fails ({}):\n{}",
                arguments.join(" "),
                output.status,
                said.trim_end()
            );
        }
        Ok(())
    }

    fn archives(&self) -> Result<Vec<PathBuf>> {
        let mut archives = Vec::new();
        for entry in
            fs::read_dir(self.dir.join("cache/archives")).context("list the fetched packages")?
        {
            let path = entry.context("list the fetched packages")?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                archives.push(path);
            }
        }
        archives.sort();
        Ok(archives)
    }
}

/// Programs in an unpacked root, started through that root's own loader, whatever the system's libraries.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    /// The unpacked packages.
    pub(crate) dir: PathBuf,
}

impl Root {
    /// Returns the path of the dynamic loader.
    ///
    /// # Errors
    /// Fails when there is none, so the packages' libc is not there.
    pub(crate) fn loader(&self) -> Result<PathBuf> {
        for dir in ["lib64", "usr/lib64", "lib", "usr/lib"] {
            let Ok(entries) = fs::read_dir(self.dir.join(dir)) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name();
                if name.to_string_lossy().starts_with("ld-linux") {
                    return self.inside(&entry.path());
                }
            }
        }
        bail!("no dynamic loader in {}", self.dir.display())
    }

    /// Returns the value of the loader's `--library-path`.
    pub(crate) fn library_path(&self) -> String {
        let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
        let dirs =
            ["lib", "usr/lib"].map(|lib| self.dir.join(lib).join(&triplet).display().to_string());
        dirs.join(":")
    }

    /// Returns a command that runs one of the programs.
    pub(crate) fn command(&self, program: &str) -> Result<Command> {
        let mut command = Command::new(self.loader()?);
        command
            .arg("--library-path")
            .arg(self.library_path())
            .arg(self.dir.join(program));
        Ok(command)
    }

    /// Resolves a link with the root as `/`, because packages link by absolute paths too.
    fn inside(&self, path: &Path) -> Result<PathBuf> {
        let mut path = path.to_path_buf();
        // As many as the kernel follows.
        for _ in 0..40 {
            let Ok(link) = fs::read_link(&path) else {
                return Ok(path);
            };
            path = match link.strip_prefix("/") {
                Ok(absolute) => self.dir.join(absolute),
                Err(_) => path.parent().unwrap_or(&self.dir).join(link),
            };
        }
        bail!("{} leads round in circles", path.display())
    }
}
