//! Debian's podman, with storage and configuration of its own, for one test.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, getrlimit};

use crate::criu::Criu;
use crate::runc;

/// Environment variable that turns a skipped test into a failed one.
pub const REQUIRE_PODMAN: &str = "PERMAFROST_REQUIRE_PODMAN";

/// Packages that are needed beside those of runc.
pub const PACKAGES: [&str; 2] = ["podman", "conmon"];

/// Time limit for the end of conmon behind its container.
const CONMON_ENDS: Duration = Duration::from_secs(5);

/// Image of the containers.
const IMAGE: &str = "localhost/counter";

/// Returns the directory into which `cargo xtask` unpacks the packages.
#[must_use]
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).join("target/podman/root")
}

/// Starts podman.
///
/// # Errors
/// Gives the reason in one line.
pub fn check() -> Result<(), String> {
    runc::check()?;
    let mut command = command();
    let status = command
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map_err(|error| format!("{}: {error}", root().display()))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("podman --version: {status}"))
    }
}

/// Returns true if there is a podman; otherwise prints loudly that `test` was skipped.
///
/// # Panics
/// If there is none and [`REQUIRE_PODMAN`] is set to anything but 0.
#[must_use]
pub fn for_test(test: &str) -> bool {
    let Err(why) = check() else { return true };
    let required = std::env::var_os(REQUIRE_PODMAN).is_some_and(|value| value != "0");
    assert!(!required, "{test} needs podman: {why}");
    let _ = writeln!(
        std::io::stderr(),
        "SKIPPED: {test}: no podman (`cargo xtask setup` fetches one): {why}"
    );
    false
}

fn command() -> Command {
    let root = root();
    let libraries = ["usr/lib", "lib"].map(|lib| {
        let lib = root
            .join(lib)
            .join(format!("{}-linux-gnu", std::env::consts::ARCH));
        lib.display().to_string()
    });
    let mut command = Command::new(root.join("usr/bin/podman"));
    command
        .env("LD_LIBRARY_PATH", libraries.join(":"))
        .stdin(Stdio::null());
    command
}

/// Returns how many processes a container may have, as an option of podman: all of root's on the machine count. podman
/// lowers its own limit to this number, and without CAP_SYS_RESOURCE no limit is raised.
fn process_limit() -> String {
    let most = getrlimit(Resource::Nproc).maximum.unwrap_or(u64::MAX);
    let most = most.min(32_768);
    format!("nproc={most}:{most}")
}

/// A podman whose containers and cgroups are removed when it is dropped.
#[derive(Debug)]
pub struct Podman {
    dir: PathBuf,
    path: std::ffi::OsString,
    /// Name of the cgroup that its containers are in, in each hierarchy.
    cgroup: String,
}

impl Podman {
    /// Prepares storage, configuration and an image with busybox under `dir`, an empty directory with a short path.
    ///
    /// # Errors
    /// Fails with podman's own words.
    pub fn new(dir: &Path, criu: &Criu) -> Result<Self> {
        // podman and runc take CRIU from PATH.
        let bin = dir.join("bin");
        let home = dir.join("home/.config/containers");
        for made in [&bin, &home] {
            fs::create_dir_all(made).with_context(|| format!("create {}", made.display()))?;
        }
        symlink(&criu.path, bin.join("criu")).context("link CRIU")?;
        let policy = r#"{"default": [{"type": "insecureAcceptAnything"}]}"#;
        fs::write(home.join("policy.json"), policy).context("write the policy")?;
        // Locks in shared memory would be those of every podman of the machine.
        let configuration = format!(
            "[engine]\nlock_type = \"file\"\nconmon_path = [\"{}\"]\nruntime = \"runc\"\n[engine.runtimes]\nrunc = [\"{}\"]\n\
             [network]\nnetwork_backend = \"cni\"\nnetwork_config_dir = \"{}\"\n",
            root().join("usr/bin/conmon").display(),
            runc::program().display(),
            dir.join("net").display(),
        );
        fs::write(dir.join("containers.conf"), configuration).context("write the configuration")?;
        let storage = format!(
            "[storage]\ndriver = \"vfs\"\nrunroot = \"{}\"\ngraphroot = \"{}\"\n",
            dir.join("run").display(),
            dir.join("graph").display(),
        );
        fs::write(dir.join("storage.conf"), storage).context("write the configuration")?;
        let mut path = bin.into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let podman = Self {
            dir: dir.to_path_buf(),
            path,
            cgroup: format!("permafrost-podman-{}", std::process::id()),
        };
        podman.import_image()?;
        Ok(podman)
    }

    fn import_image(&self) -> Result<()> {
        let rootfs = self.dir.join("rootfs");
        for sub in ["bin", "proc", "dev", "sys", "tmp"] {
            fs::create_dir_all(rootfs.join(sub)).with_context(|| format!("create {sub}"))?;
        }
        fs::copy(runc::busybox(), rootfs.join("bin/busybox")).context("copy busybox")?;
        symlink("busybox", rootfs.join("bin/sh")).context("link sh")?;
        let archive = self.dir.join("rootfs.tar");
        let status = Command::new("tar")
            .arg("-cf")
            .arg(&archive)
            .arg("-C")
            .arg(&rootfs)
            .arg(".")
            .status()
            .context("run tar")?;
        anyhow::ensure!(status.success(), "tar: {status}");
        let archive = archive.to_str().context("a path is not UTF-8")?;
        self.run(&["import", "--quiet", archive, IMAGE]).map(drop)
    }

    /// Starts a container that counts in `/count` of its file system.
    ///
    /// # Errors
    /// Fails with podman's own words.
    pub fn start_counting(&self, name: &str) -> Result<()> {
        // Renamed: whoever reads meanwhile finds one number or the next, and never an empty file.
        // It ends after ten minutes or more, for the case that the test is killed.
        let counting = "i=0; while [ $i -lt 12000 ]; do i=$((i+1)); echo $i > /next; \
                        /bin/busybox mv /next /count; /bin/busybox sleep 0.05; done";
        self.run(&[
            "run",
            "--detach",
            "--name",
            name,
            "--network",
            "host",
            // podman leaves the directory of its default group behind.
            "--cgroup-parent",
            &format!("/{}", self.cgroup),
            // There is no default profile, and a root without CAP_SYS_RESOURCE cannot raise limits.
            "--security-opt",
            "seccomp=unconfined",
            "--ulimit",
            "nofile=1024:1024",
            "--ulimit",
            &process_limit(),
            IMAGE,
            "/bin/sh",
            "-c",
            counting,
        ])
        .map(drop)
    }

    /// Returns the number that a container's counter has reached.
    ///
    /// # Errors
    /// It has not begun to.
    pub fn count(&self, name: &str) -> Result<u64> {
        let output = self.run(&["exec", name, "/bin/busybox", "cat", "/count"])?;
        let text = String::from_utf8(output.stdout).context("parse the count")?;
        text.trim().parse().context("parse the count")
    }

    /// Runs `podman` to its end.
    ///
    /// # Errors
    /// Fails with podman's own words.
    pub fn run(&self, arguments: &[&str]) -> Result<Output> {
        let under = |name: &str| self.dir.join(name);
        let mut runtime_root = std::ffi::OsString::from("root=");
        runtime_root.push(under("runc"));
        // What a container keeps open must not be a pipe to the test.
        let errors = under("podman.err");
        let output = command()
            .env("HOME", under("home"))
            .env("PATH", &self.path)
            .env("CONTAINERS_CONF", under("containers.conf"))
            .env("CONTAINERS_STORAGE_CONF", under("storage.conf"))
            .arg("--root")
            .arg(under("graph"))
            .arg("--runroot")
            .arg(under("run"))
            .arg("--tmpdir")
            .arg(under("libpod"))
            .arg("--runtime-flag")
            .arg(runtime_root)
            .args([
                "--storage-driver",
                "vfs",
                "--cgroup-manager",
                "cgroupfs",
                "--events-backend",
                "none",
            ])
            .args(arguments)
            .stderr(fs::File::create(&errors).context("make a file for podman's errors")?)
            .output()
            .context("start podman")?;
        if !output.status.success() {
            let said = fs::read_to_string(&errors).unwrap_or_default();
            bail!("podman {}: {}: {said}", arguments.join(" "), output.status);
        }
        Ok(output)
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.run(&["rm", "--all", "--force", "--time", "0"]);
        // Beside the containers' groups there is one of conmon, which ends soon after its container.
        let until = Instant::now() + CONMON_ENDS;
        while !self.remove_cgroups() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Podman {
    /// Removes the groups, which are empty. Returns true if none is left.
    fn remove_cgroups(&self) -> bool {
        let root = Path::new("/sys/fs/cgroup");
        let hierarchies = fs::read_dir(root).into_iter().flatten().flatten();
        let hierarchies = hierarchies.map(|hierarchy| hierarchy.path());
        let mut none_left = true;
        // The root is the only hierarchy of cgroup v2.
        for hierarchy in std::iter::once(root.to_owned()).chain(hierarchies) {
            none_left &= remove_empty(&hierarchy.join(&self.cgroup));
        }
        none_left
    }
}

/// Removes a group and those in it. Returns true if it is gone.
fn remove_empty(group: &Path) -> bool {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path());
        }
    }
    let _ = fs::remove_dir(group);
    !group.exists()
}
