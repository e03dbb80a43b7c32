//! Debian's runc, and a container for it: a bundle whose file system is busybox.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};

use crate::criu::Criu;

/// Environment variable that turns a skipped test into a failed one.
pub const REQUIRE_RUNC: &str = "PERMAFROST_REQUIRE_RUNC";

/// Packages that are needed.
pub const PACKAGES: [&str; 2] = ["runc", "busybox-static"];

/// Returns the directory into which `cargo xtask` unpacks the packages.
#[must_use]
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).join("target/runc/root")
}

/// Returns the path of runc.
#[must_use]
pub fn program() -> PathBuf {
    root().join("usr/sbin/runc")
}

/// Returns the path of busybox.
#[must_use]
pub fn busybox() -> PathBuf {
    root().join("bin/busybox")
}

/// Starts both programs.
///
/// # Errors
/// Gives the reason in one line.
pub fn check() -> Result<(), String> {
    for (program, argument) in [(program(), "--version"), (busybox(), "true")] {
        let status = Command::new(&program)
            .arg(argument)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        if !status.success() {
            return Err(format!("{} {argument}: {status}", program.display()));
        }
    }
    Ok(())
}

/// Returns true if there is a runc; otherwise prints loudly that `test` was skipped.
///
/// # Panics
/// Where [`REQUIRE_RUNC`] is set to anything but 0: there a skipped test is a failed one.
#[must_use]
pub fn for_test(test: &str) -> bool {
    let Err(why) = check() else { return true };
    let required = std::env::var_os(REQUIRE_RUNC).is_some_and(|value| value != "0");
    assert!(!required, "{test} needs runc: {why}");
    let _ = writeln!(
        std::io::stderr(),
        "SKIPPED: {test}: no runc (`cargo xtask setup` fetches one): {why}"
    );
    false
}

/// A container that counts in `/count` of its file system; removed when it is dropped.
#[derive(Debug)]
pub struct Container {
    dir: PathBuf,
    name: String,
    criu: PathBuf,
}

impl Container {
    /// Makes a bundle under `dir` and runs it. The annotations go into its configuration.
    ///
    /// # Errors
    /// Fails with runc's own words.
    pub fn run(dir: &Path, criu: &Criu, annotations: &[(&str, &str)]) -> Result<Self> {
        let rootfs = dir.join("bundle/rootfs");
        for sub in ["bin", "proc", "dev", "sys"] {
            fs::create_dir_all(rootfs.join(sub)).with_context(|| format!("create {sub}"))?;
        }
        fs::copy(busybox(), rootfs.join("bin/busybox")).context("copy busybox")?;
        symlink("busybox", rootfs.join("bin/sh")).context("link sh")?;
        // Names of containers are the machine's, as their cgroups are.
        let name = format!("permafrost-{}", uuid());
        let container = Self {
            dir: dir.to_path_buf(),
            name,
            criu: criu.path.clone(),
        };
        let bundle = container.bundle();
        container.runc(&["spec", "--bundle", text(&bundle)?])?;
        configure(&bundle.join("config.json"), annotations)?;
        container.runc(&[
            "run",
            "--detach",
            "--bundle",
            text(&bundle)?,
            &container.name,
        ])?;
        Ok(container)
    }

    /// Returns the name by which runc knows the container.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the bundle's directory.
    #[must_use]
    pub fn bundle(&self) -> PathBuf {
        self.dir.join("bundle")
    }

    /// Returns the number that the container's counter has reached.
    ///
    /// # Errors
    /// It has not begun to.
    pub fn count(&self) -> Result<u64> {
        let path = self.bundle().join("rootfs/count");
        let count = fs::read_to_string(path).context("read the count")?;
        count.trim().parse().context("parse the count")
    }

    /// Returns the container's status as reported by runc, such as `running` or `stopped`.
    ///
    /// # Errors
    /// runc does not know the container.
    pub fn status(&self) -> Result<String> {
        let state = self.runc(&["state", &self.name])?;
        let state: serde_json::Value =
            serde_json::from_slice(&state.stdout).context("parse runc's state")?;
        let status = state["status"].as_str().context("runc names no status")?;
        Ok(status.to_owned())
    }

    /// Returns a `runc` command with this container's CRIU and state.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program());
        command
            .arg("--root")
            .arg(self.dir.join("state"))
            .arg("--criu")
            .arg(&self.criu)
            .args(arguments)
            .stdin(Stdio::null())
            // A container keeps these, and CRIU cannot dump files of another mount namespace.
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// Runs `runc` to its end.
    ///
    /// # Errors
    /// It fails.
    pub fn runc(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = self.command(arguments);
        if arguments.first() == Some(&"state") {
            command.stdout(Stdio::piped());
        }
        let output = command.output().context("start runc")?;
        if !output.status.success() {
            bail!("runc {}: {}", arguments.join(" "), output.status);
        }
        Ok(output)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.runc(&["delete", "--force", &self.name]);
    }
}

/// Writes a configuration with no network of its own, no terminal, a writable file system, and a command.
fn configure(path: &Path, annotations: &[(&str, &str)]) -> Result<()> {
    let bytes = fs::read(path).context("read the configuration")?;
    let mut config: serde_json::Value =
        serde_json::from_slice(&bytes).context("parse the configuration")?;
    // Renamed: whoever reads meanwhile finds one number or the next, and never an empty file.
    let counting = "i=0; while :; do i=$((i+1)); echo $i > /next; /bin/busybox mv /next /count; \
                    /bin/busybox sleep 0.05; done";
    config["process"]["terminal"] = false.into();
    config["process"]["args"] = ["/bin/sh", "-c", counting].as_slice().into();
    config["root"]["readonly"] = false.into();
    if let Some(namespaces) = config["linux"]["namespaces"].as_array_mut() {
        namespaces.retain(|namespace| namespace["type"] != "network");
    }
    for (name, value) in annotations {
        config["annotations"][name] = (*value).into();
    }
    let written = serde_json::to_vec_pretty(&config).context("write the configuration")?;
    fs::write(path, written).context("write the configuration")
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path is not UTF-8")
}

fn uuid() -> String {
    let pid = std::process::id();
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    format!("{pid}-{nanos}")
}
