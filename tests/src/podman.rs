//! Debian's podman, with storage and configuration of its own, for one test.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, getrlimit};

use crate::criu::Criu;
use crate::{binaries, runc};

/// Environment variable that turns a skipped test into a failed one.
pub const REQUIRE_PODMAN: &str = "PERMAFROST_REQUIRE_PODMAN";

/// Packages that are needed beside those of runc.
pub const PACKAGES: [&str; 2] = ["podman", "conmon"];

/// Time limit for the end of conmon behind its container.
const CONMON_ENDS: Duration = Duration::from_secs(5);

/// Time within which a command in a container has to work.
const EXEC_WORKS: Duration = Duration::from_secs(60);

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
    let mut command = binaries::unpacked(&root(), "usr/bin/podman");
    command.stdin(Stdio::null());
    command
}

/// Returns how many processes a container may have, as an option of podman: all of root's on the machine count. podman
/// lowers its own limit to this number, and without CAP_SYS_RESOURCE no limit is raised.
fn process_limit() -> String {
    let most = getrlimit(Resource::Nproc).maximum.unwrap_or(u64::MAX);
    let most = most.min(32_768);
    format!("nproc={most}:{most}")
}

/// Begin of the names of directories and cgroups; the pid of the test that owns them follows.
const PREFIX: &str = "permafrost-podman-";

/// A podman whose containers, cgroups and storage are removed when it is dropped. What a killed test has left is removed
/// by the next one.
#[derive(Debug)]
pub struct Podman {
    dir: PathBuf,
    path: std::ffi::OsString,
    /// Name of the cgroup that its containers are in, in each hierarchy.
    cgroup: String,
}

impl Podman {
    /// Prepares storage, configuration and an image with busybox in a directory of its own. A process may have one.
    ///
    /// # Errors
    /// Fails with podman's own words.
    pub fn new(criu: &Criu) -> Result<Self> {
        let podman = Self::empty()?;
        symlink(&criu.path, podman.dir.join("bin/criu")).context("link CRIU")?;
        podman.import_image()?;
        Ok(podman)
    }

    /// Prepares storage and configuration in a directory of its own, without CRIU and without an image. A process may
    /// have one.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn empty() -> Result<Self> {
        let parent = std::env::temp_dir();
        remove_left(&parent);
        let podman = Self::of(&parent, std::process::id());
        // podman wants short paths.
        let dir = &podman.dir;
        fs::DirBuilder::new()
            .mode(0o700)
            .create(dir)
            .with_context(|| format!("create {}", dir.display()))?;
        // podman and runc take CRIU from PATH.
        let bin = dir.join("bin");
        let home = dir.join("home/.config/containers");
        for made in [&bin, &home] {
            fs::create_dir_all(made).with_context(|| format!("create {}", made.display()))?;
        }
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
        Ok(podman)
    }

    /// Loads an image from a tar.
    ///
    /// # Errors
    /// Fails with podman's own words.
    pub fn load(&self, archive: &Path) -> Result<()> {
        let archive = archive.to_str().context("a path is not UTF-8")?;
        self.run(&["load", "--quiet", "--input", archive]).map(drop)
    }

    /// Runs an image with these arguments to its end; returns its standard output.
    ///
    /// # Errors
    /// Fails with podman's own words.
    pub fn run_once(&self, image: &str, arguments: &[&str]) -> Result<String> {
        let output = self.launch(&["--rm"], image, arguments)?;
        String::from_utf8(output.stdout).context("read what it says")
    }

    /// Starts a container of an image with these arguments, which runs on.
    ///
    /// # Errors
    /// Fails with podman's own words.
    pub fn start(&self, name: &str, image: &str, arguments: &[&str]) -> Result<()> {
        self.launch(&["--detach", "--name", name], image, arguments)
            .map(drop)
    }

    fn launch(&self, options: &[&str], image: &str, arguments: &[&str]) -> Result<Output> {
        // podman leaves the directory of its default group behind.
        let group = format!("/{}", self.cgroup);
        let limit = process_limit();
        let mut all = vec!["run"];
        all.extend(options);
        all.extend(["--network", "host", "--cgroup-parent", &group]);
        // There is no default profile, and a root without CAP_SYS_RESOURCE cannot raise limits.
        all.extend(["--security-opt", "seccomp=unconfined"]);
        all.extend(["--ulimit", "nofile=1024:1024", "--ulimit", &limit, image]);
        all.extend(arguments);
        self.run(&all)
    }

    /// Runs a command in a container, again and again for a minute while it fails; returns its standard output.
    ///
    /// # Errors
    /// Fails with podman's own words, and the container's.
    pub fn exec_until(&self, name: &str, command: &[&str]) -> Result<String> {
        let mut all = vec!["exec", name];
        all.extend(command);
        let until = Instant::now() + EXEC_WORKS;
        loop {
            match self.run(&all) {
                Ok(output) => return String::from_utf8(output.stdout).context("read what it says"),
                Err(error) if Instant::now() > until => {
                    let logs = self.run(&["logs", name]);
                    let logs = logs.map(|logs| String::from_utf8_lossy(&logs.stdout).into_owned());
                    return Err(error).context(format!("its log: {}", logs.unwrap_or_default()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// Returns the podman of the test with this pid.
    fn of(parent: &Path, pid: u32) -> Self {
        let name = format!("{PREFIX}{pid}");
        let dir = parent.join(&name);
        let mut path = dir.join("bin").into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        Self {
            dir,
            path,
            cgroup: name,
        }
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
        self.start(name, IMAGE, &["/bin/sh", "-c", counting])
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
        // Containers that podman could not end keep their mounts.
        for mount in mounts_below(&self.dir) {
            let _ = Command::new("umount").arg("--lazy").arg(mount).status();
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Removes what tests have left that were killed.
fn remove_left(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let Some(pid) = pid.and_then(|pid| pid.parse().ok()) else {
            continue;
        };
        if !Path::new("/proc").join(format!("{pid}")).exists() {
            drop(Podman::of(parent, pid));
        }
    }
}

/// Returns the mount points below a directory, the innermost first.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let mut points: Vec<PathBuf> = points
        .map(PathBuf::from)
        .filter(|point| point.starts_with(dir))
        .collect();
    points.reverse();
    points
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_test_has_left_is_removed_and_that_of_a_living_one_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let [left, used] =
            [ended.id(), std::process::id()].map(|pid| Podman::of(parent.path(), pid).dir.clone());
        let other = parent.path().join("permafrost-podman-x");
        for dir in [&left, &used, &other] {
            fs::create_dir_all(dir.join("graph/vfs")).unwrap();
        }
        remove_left(parent.path());
        assert!(!left.exists() && used.exists() && other.exists());
    }
}
