//! `cargo xtask package --check`: the packages in a clean Debian of their own.
//!
//! debootstrap makes the Debian under `target/`, once; each check copies it. The steps that need mounts run in a mount
//! namespace, so that nothing is left mounted whatever happens. The system of this machine is not touched.

mod first_use;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{BuildHost, Packages, SUITE, succeed};

/// Packages of the clean Debian beside its base: what the packages depend on, and what checks them.
const INCLUDE: [&str; 3] = ["systemd", "init-system-helpers", "lintian"];

/// Units of the packages.
const UNITS: [&str; 2] = ["permafrostd.service", "permafrost-agent.service"];

/// Highest exposure that `systemd-analyze security` may find, in tenths: 0 is none, 100 everything.
const MOST_EXPOSURE: u32 = 20;

/// Paths that may be there after a purge and were not before the installation: the data directory, the user that may
/// own checkpoints, and files of other programs that note the time or the number of calls.
const LEFT: [&str; 5] = [
    "/var/lib/permafrost",
    "/etc/passwd",
    "/etc/group",
    "/etc/shadow",
    "/etc/gshadow",
];

/// Paths that change with every call of dpkg, systemd-sysusers or systemd-analyze, and while systemd runs.
const IGNORED: [&str; 12] = [
    "/run/systemd",
    "/var/lib/systemd/timers",
    "/var/lib/dpkg",
    "/var/log",
    "/var/cache",
    "/etc/.pwd.lock",
    "/etc/passwd-",
    "/etc/group-",
    "/etc/shadow-",
    "/etc/gshadow-",
    "/proc",
    "/tmp",
];

/// Runs all checks.
///
/// # Errors
/// The first one that fails.
pub(super) fn run(packages: &Packages, host: &dyn BuildHost) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("--check installs the packages into a directory: run it as root");
    }
    let target = host.workspace().join("target");
    let base = base(&target, host)?;
    let work = tempfile::Builder::new()
        .prefix("check-")
        .tempdir_in(&target)
        .context("create a working directory")?;
    let clean = |name: &str| -> Result<Site<'_>> {
        let root = work.path().join(name);
        succeed(Command::new("cp").arg("-a").arg(&base).arg(&root))?;
        // The place at which CRIU is mounted: it is no file of the packages.
        let below = target.strip_prefix("/").unwrap_or(&target);
        for dir in [&root.join("packages"), &root.join(below)] {
            fs::create_dir_all(dir).context("create a mount point")?;
        }
        Ok(Site { root, host })
    };
    let site = clean("root")?;
    let inside = site.root.join("packages");
    let mut names = Vec::new();
    for path in &packages.debs {
        let name = path.file_name().context("a package without a name")?;
        fs::copy(path, inside.join(name)).context("copy a package")?;
        names.push(format!("/packages/{}", name.to_string_lossy()));
    }
    site.lintian(&names)?;
    // Debian's package criu has it; hooks are installed into it.
    fs::create_dir_all(site.root.join("etc/criu")).context("create CRIU's directory")?;
    let before = site.tree()?;
    site.install(&names)?;
    for unit in UNITS {
        site.unit(unit)?;
    }
    let criu = criu(&target, host)?;
    match &criu {
        Ok(criu) => site.under_systemd(&target, criu)?,
        Err(why) => host.say_loudly(&format!("DUMP AND RESTORE ARE NOT CHECKED: {why}")),
    }
    site.purge(&before)?;
    if let Ok(criu) = &criu {
        let site = clean("first-use")?;
        first_use::run(&site, &host.workspace(), &packages.debs, &target, criu)?;
    }
    Ok(())
}

/// Returns the path of a CRIU that works in the clean Debian, or the reason why none can.
fn criu(target: &Path, host: &dyn BuildHost) -> Result<std::result::Result<PathBuf, String>> {
    Ok(host.criu()?.and_then(|path| {
        // The clean Debian has the directory of this one, but no library of a CRIU of this machine.
        if path.starts_with(target) {
            return Ok(path);
        }
        Err(format!(
            "{} is not below {}",
            path.display(),
            target.display()
        ))
    }))
}

/// Returns the clean Debian; makes it if it is not there.
fn base(target: &Path, host: &dyn BuildHost) -> Result<PathBuf> {
    let base = target.join("package-check").join(SUITE);
    if base.join("usr/bin/lintian").exists() {
        return Ok(base);
    }
    let done = host.begin("make a clean Debian for the checks");
    let tools = target.join("package-check/debootstrap");
    if !tools.join("usr/sbin/debootstrap").exists() {
        host.unpack(SUITE, &["debootstrap"], &tools)?;
    }
    let new = base.with_extension("new");
    if new.exists() {
        fs::remove_dir_all(&new).context("remove an unfinished Debian")?;
    }
    let mirror = host.mirror()?;
    succeed(
        Command::new("sh")
            .arg(tools.join("usr/sbin/debootstrap"))
            .args(["--variant=minbase", SUITE])
            .arg(&new)
            .arg(&mirror)
            .env("DEBOOTSTRAP_DIR", tools.join("usr/share/debootstrap")),
    )?;
    // debootstrap itself finds no package that another one provides.
    let site = Site {
        root: new.clone(),
        host,
    };
    succeed(site.inside("apt-get").arg("update"))?;
    let mut install = site.inside("apt-get");
    install.args(["install", "--yes", "--no-install-recommends"]);
    succeed(install.args(INCLUDE))?;
    succeed(site.inside("apt-get").arg("clean"))?;
    fs::rename(&new, &base).context("name the Debian")?;
    done(&base.display().to_string());
    Ok(base)
}

/// A Debian that the packages are installed into.
struct Site<'a> {
    root: PathBuf,
    host: &'a dyn BuildHost,
}

impl Site<'_> {
    /// Returns a command that runs inside, with `/proc`. Its environment is that of a login of root.
    fn inside(&self, program: &str) -> Command {
        const CHROOT: &str = r#"mount -t proc proc "$0/proc" && exec chroot "$0" "$@""#;
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", CHROOT])
            .arg(&self.root);
        command.arg(program).env_clear().envs([
            (
                "PATH",
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            ),
            ("HOME", "/root"),
            ("LC_ALL", "C.UTF-8"),
            ("DEBIAN_FRONTEND", "noninteractive"),
        ]);
        command
    }

    /// Prints lintian's findings; errors among them are a failure.
    fn lintian(&self, packages: &[String]) -> Result<()> {
        let done = self.host.begin("lintian");
        let mut command = self.inside("lintian");
        command
            .args([
                "--tag-display-limit",
                "0",
                "--fail-on",
                "error",
                "--allow-root",
            ])
            .args(packages);
        let output = command.output().context("run lintian")?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            bail!(
                "lintian finds errors:\n{said}{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        print!("{said}");
        let warnings = said.lines().filter(|line| line.starts_with("W:")).count();
        done(&format!("no errors, {warnings} warnings"));
        Ok(())
    }

    /// Returns the paths of all files and directories, with sizes and owners of files.
    fn tree(&self) -> Result<Vec<String>> {
        let mut command = self.inside("find");
        command.args(["/", "-xdev"]);
        for path in IGNORED.into_iter().chain(["/packages"]) {
            command.args(["-path", path, "-prune", "-o"]);
        }
        command.args([
            "(",
            "-type",
            "d",
            "-printf",
            "%p\\n",
            "-o",
            "-printf",
            "%p %s %U %m\\n",
            ")",
        ]);
        let said = succeed(&mut command).context("list the files")?;
        let mut lines: Vec<_> = said.lines().map(str::to_owned).collect();
        lines.sort();
        Ok(lines)
    }

    fn install(&self, packages: &[String]) -> Result<()> {
        let done = self.host.begin("install");
        succeed(self.inside("dpkg").arg("--install").args(packages))?;
        let damaged = succeed(self.inside("dpkg").args([
            "--verify",
            "permafrost",
            "permafrostd",
            "permafrost-criu",
        ]))?;
        if !damaged.is_empty() {
            bail!("dpkg --verify: {damaged}");
        }
        let enabled = "etc/systemd/system/multi-user.target.wants/permafrostd.service";
        if fs::symlink_metadata(self.root.join(enabled)).is_err() {
            bail!("permafrostd.service is not enabled");
        }
        for program in ["permafrost", "permafrostd"] {
            println!("{}", succeed(self.inside(program).arg("--version"))?.trim());
        }
        succeed(self.inside("permafrostd").arg("--check-config"))?;
        // Removing the package is to take them out again.
        succeed(self.inside("permafrost").arg("install-criu-hooks"))?;
        if !self.root.join("etc/criu/default.conf").exists() {
            bail!("install-criu-hooks has written no configuration");
        }
        done("configured");
        Ok(())
    }

    /// Has systemd check a unit, and prints how exposed it is.
    fn unit(&self, unit: &str) -> Result<()> {
        let done = self.host.begin(&format!("systemd-analyze {unit}"));
        let path = format!("/usr/lib/systemd/system/{unit}");
        // It does not look at man pages without man.
        let verified = self
            .inside("systemd-analyze")
            .args(["verify", "--man=no", &path])
            .output()
            .context("run systemd-analyze")?;
        let said = String::from_utf8_lossy(&verified.stderr).into_owned();
        let about_it: Vec<_> = said.lines().filter(|line| line.contains(unit)).collect();
        if !verified.status.success() || !about_it.is_empty() {
            bail!("systemd-analyze verify: {said}");
        }
        let threshold = MOST_EXPOSURE.to_string();
        let said = succeed(self.inside("systemd-analyze").args([
            "security",
            "--offline=true",
            "--no-pager",
            &format!("--threshold={threshold}"),
            &path,
        ]))?;
        let overall = said.lines().find(|line| line.contains("Overall exposure"));
        done(overall.context("systemd-analyze names no exposure")?.trim());
        Ok(())
    }

    /// Has systemd start the daemon by its unit, and dumps and restores a real process with the installed programs: by
    /// the command, with and without a stream, by the plugin and by the hook. Reloads, kills, restarts and stops the
    /// service.
    fn under_systemd(&self, target: &Path, criu: &Path) -> Result<()> {
        let done = self
            .host
            .begin("the service under systemd, dumps and restores");
        self.configure(REGION)?;
        let said = self.boot(SCENARIO, target, criu, &[])?;
        done(said.lines().last().unwrap_or_default());
        Ok(())
    }

    /// Has systemd run a script for bash in namespaces of its own, among them those that `more` names. Returns what it
    /// prints.
    fn boot(&self, script: &str, target: &Path, criu: &Path, more: &[&str]) -> Result<String> {
        let packages = self.root.join("packages");
        let environment = format!("HOME=/root\nLC_ALL=C.UTF-8\nCRIU={}\n", criu.display());
        let unit = self.root.join("etc/systemd/system/check.service");
        let boot = packages.join("boot");
        for (path, text) in [
            (&boot, BOOT),
            (&packages.join("scenario"), script),
            (&packages.join("environment"), &environment),
            (&unit, UNIT),
        ] {
            fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
        }
        let mut command = Command::new("sh");
        command
            .args(["-euc", IN_A_GROUP, "sh", "unshare"])
            .args(["--mount", "--pid", "--uts", "--ipc", "--cgroup"])
            .args(more)
            // A process namespace of its own ends everything that is left.
            .args(["--fork", "--kill-child", "bash"])
            .arg(&boot)
            .arg(&self.root)
            .arg(target);
        let ended = succeed(&mut command);
        let said = fs::read_to_string(packages.join("said")).unwrap_or_default();
        if let Err(error) = ended {
            bail!("{error:#}\nthe script says:\n{said}");
        }
        fs::remove_file(&unit).context("remove the script's unit")?;
        Ok(said)
    }

    /// Appends a line to the daemon's configuration.
    fn configure(&self, line: &str) -> Result<()> {
        let path = self.root.join("etc/permafrost/permafrostd.toml");
        let mut text = fs::read_to_string(&path).context("read the configuration")?;
        text.push_str(line);
        text.push('\n');
        fs::write(&path, text).context("write the configuration")
    }

    /// Purges the packages, and compares the files with those before the installation.
    fn purge(&self, before: &[String]) -> Result<()> {
        let done = self.host.begin("purge");
        succeed(self.inside("dpkg").args([
            "--purge",
            "permafrost-criu",
            "permafrostd",
            "permafrost",
        ]))?;
        let data = self.root.join("var/lib/permafrost/region");
        if !data.exists() {
            bail!("the purge removed data: {} is gone", data.display());
        }
        let after = self.tree()?;
        let (left, gone) = (changes(before, &after), changes(&after, before));
        if !left.is_empty() || !gone.is_empty() {
            bail!("the purge leaves {left:?}, and {gone:?} are gone");
        }
        done("nothing is left but data");
        Ok(())
    }
}

/// Returns the lines of the second list that the first has not, without those that may stay after a purge.
fn changes<'a>(before: &[String], after: &'a [String]) -> Vec<&'a str> {
    let may_stay = |line: &str| {
        let path = line.split(' ').next().unwrap_or(line);
        LEFT.iter().any(|left| Path::new(path).starts_with(left))
    };
    let added = after.iter().filter(|line| !before.contains(line));
    added
        .map(String::as_str)
        .filter(|line| !may_stay(line))
        .collect()
}

/// Runs its arguments as a command in a control group that it makes, and removes that with the groups that the command
/// has made in it: systemd leaves its own.
const IN_A_GROUP: &str = r#"
own=$(findmnt --noheadings --first-only --types cgroup2 --output TARGET)$(sed -n 's/^0:://p' /proc/self/cgroup)
group=$(mktemp --directory "$own/permafrost-check-XXXXXX")
echo $$ >"$group/cgroup.procs"
status=0
"$@" || status=$?
echo $$ >"$own/cgroup.procs"
find "$group" -depth -type d -exec rmdir {} +
exit "$status"
"#;

/// Starts systemd in the root.
const BOOT: &str = include_str!("check/boot.sh");

/// The unit that runs [`SCENARIO`].
const UNIT: &str = include_str!("check/check.service");

/// Script that uses the packages under systemd.
const SCENARIO: &str = include_str!("check/scenario.sh");

/// Size of the region for the scenario.
const REGION: &str = "region-size = \"128M\"";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_purge_may_leave_data_and_the_user_only() {
        let lines = |lines: &[&str]| {
            lines
                .iter()
                .map(|line| (*line).to_owned())
                .collect::<Vec<_>>()
        };
        let before = lines(&["/etc", "/etc/passwd 100 0 644", "/usr/bin/sh 5 0 755"]);
        let mut after = lines(&[
            "/etc",
            "/etc/passwd 150 0 644",
            "/usr/bin/sh 5 0 755",
            "/var/lib/permafrost",
            "/var/lib/permafrost/region 8 990 600",
        ]);
        assert_eq!(changes(&before, &after), [""; 0]);
        assert_eq!(changes(&after, &before), [""; 0]);
        // Of another name, however similar; another owner; gone.
        after.extend(lines(&[
            "/var/lib/permafrost-old",
            "/etc/criu/default.conf 3 0 644",
        ]));
        after[2] = "/usr/bin/sh 5 7 755".to_owned();
        assert_eq!(
            changes(&before, &after),
            [
                "/usr/bin/sh 5 7 755",
                "/var/lib/permafrost-old",
                "/etc/criu/default.conf 3 0 644"
            ]
        );
        assert_eq!(changes(&after, &before), ["/usr/bin/sh 5 0 755"]);
    }
}
