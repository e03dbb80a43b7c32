//! CRIU: found, of a release that is known, and content with the kernel.

use std::path::Path;

use permafrost_criu::Criu;
use permafrost_criu::scratch::is_in_memory;

use super::report::Findings;

const AREA: &str = "criu";

/// Oldest release that was tried.
const OLDEST: (u32, u32) = (3, 17);

/// Directory in which CRIU, run as root, keeps what it has found out about the kernel.
const RUN: &str = "/run";

/// CRIU's file of the kernel's features, and the name under which it is written (`kerndat_save_cache` in
/// criu/kerndat.c).
const FEATURES: [&str; 2] = ["criu.kdat", "criu.kdat.tmp"];

/// Most problems that are repeated.
const PROBLEMS: usize = 3;

pub(super) fn check(findings: &mut Findings, criu: &Criu) {
    let version = match criu.version() {
        Ok(version) => version,
        Err(error) => {
            findings.error(
                (AREA, "program"),
                error.to_string(),
                "install CRIU, or name it with --criu or PERMAFROST_CRIU",
            );
            for name in ["check", "features", "lazy restores"] {
                findings.skipped((AREA, name), "there is no CRIU to try it with");
            }
            return;
        }
    };
    if release_of(&version) < Some(OLDEST) {
        findings.warning(
            (AREA, "program"),
            format!("CRIU {version}, older than what was tried"),
            format!("install CRIU {}.{} or newer", OLDEST.0, OLDEST.1),
        );
    } else {
        findings.ok((AREA, "program"), format!("CRIU {version}"));
    }
    match criu.check() {
        Ok(problems) if problems.is_empty() => {
            findings.ok((AREA, "check"), "`criu check` finds nothing amiss");
        }
        Ok(problems) => findings.error(
            (AREA, "check"),
            format!("`criu check` fails: {}", first_of(&problems)),
            "run it as root on the machine itself; a container needs CAP_CHECKPOINT_RESTORE, CAP_SYS_PTRACE and an unmasked /proc, and a kernel may lack CONFIG_CHECKPOINT_RESTORE",
        ),
        Err(error) => findings.error(
            (AREA, "check"),
            error.to_string(),
            "run `criu check` by hand, which says more",
        ),
    }
    if rustix::process::geteuid().is_root() {
        // `criu check` has written the file, if it can.
        features(findings, Path::new(RUN));
    } else {
        findings.skipped(
            (AREA, "features"),
            "whether CRIU remembers the kernel's features shows when it runs as root",
        );
    }
    match criu.has_feature("uffd-noncoop") {
        Ok(true) => findings.ok(
            (AREA, "lazy restores"),
            "userfaultfd reports the events of other processes",
        ),
        Ok(false) => findings.warning(
            (AREA, "lazy restores"),
            "userfaultfd with its events cannot be used here: `permafrost restore` streams, and fails with --lazy",
            "restore without --lazy, or as root on a kernel with CONFIG_USERFAULTFD",
        ),
        Err(error) => findings.skipped((AREA, "lazy restores"), error.to_string()),
    }
}

/// Checks that CRIU does not examine the kernel each time that it starts.
fn features(findings: &mut Findings, run: &Path) {
    let [kept, unfinished] = FEATURES.map(|name| run.join(name));
    let place = (AREA, "features");
    let again = "CRIU examines the kernel's features each time that it starts, which takes tens of milliseconds";
    if !is_in_memory(run) {
        findings.warning(
            place,
            format!(
                "{again}: it remembers them only where {} is tmpfs",
                run.display()
            ),
            format!(
                "mount a tmpfs on {0}; in a container, start it with `--tmpfs {0}`",
                run.display()
            ),
        );
    } else if kept.exists() {
        findings.ok(
            place,
            format!("CRIU remembers the kernel's features in {}", kept.display()),
        );
    } else if unfinished.exists() {
        findings.warning(
            place,
            format!(
                "{again}: an unfinished {} keeps it from remembering them",
                unfinished.display()
            ),
            format!("remove {}, if no CRIU is running", unfinished.display()),
        );
    } else {
        findings.skipped(place, format!("CRIU has not written {}", kept.display()));
    }
}

fn first_of(problems: &[String]) -> String {
    let mut text = problems
        .iter()
        .take(PROBLEMS)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join("; ");
    if problems.len() > PROBLEMS {
        text.push_str(&format!("; and {} more", problems.len() - PROBLEMS));
    }
    text
}

fn release_of(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    let mut next = || parts.next()?.parse().ok();
    Some((next()?, next()?))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};

    use super::super::DoctorStatus;
    use super::*;

    fn program(directory: &Path, text: &str) -> PathBuf {
        let path = directory.join("criu");
        // A shell writes it: a file that this process writes may be busy when it is started.
        let status = std::process::Command::new("sh")
            .args(["-c", "printf '%s' \"$2\" >\"$1\" && chmod 755 \"$1\"", "sh"])
            .arg(&path)
            .arg(format!("#!/bin/sh\n{text}\n"))
            .status();
        assert!(status.unwrap().success());
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o755
        );
        path
    }

    fn checked(text: &str) -> Findings {
        let directory = tempfile::tempdir().unwrap();
        let criu = Criu::new(Some(program(directory.path(), text)));
        let mut findings = Findings::default();
        check(&mut findings, &criu);
        findings
    }

    #[test]
    fn a_missing_criu_is_an_error_and_the_rest_is_skipped() {
        let mut findings = Findings::default();
        check(&mut findings, &Criu::new(Some("/nowhere/criu".into())));
        let missing = findings.of("program");
        assert_eq!(missing.status, DoctorStatus::Error);
        assert!(missing.advice.contains("PERMAFROST_CRIU"), "{missing:?}");
        assert_eq!(findings.of("check").status, DoctorStatus::Skipped);
    }

    #[test]
    fn what_criu_check_says_is_repeated() {
        let findings = checked(
            r#"case "$1 $2" in
--version*) echo "Version: 4.2.1";;
"check --feature") exit 1;;
check*) echo "Error (criu/cr-check.c:99): Kernel lacks something" >&2; exit 1;;
esac"#,
        );
        assert_eq!(findings.of("program").status, DoctorStatus::Ok);
        let failed = findings.of("check");
        assert_eq!(failed.status, DoctorStatus::Error);
        assert!(
            failed.found.contains("Kernel lacks something"),
            "{failed:?}"
        );
        assert_eq!(findings.of("lazy restores").status, DoctorStatus::Warning);
    }

    #[test]
    fn whether_features_are_remembered_depends_on_the_file_system_and_on_what_is_there() {
        let of = |directory: &Path| {
            let mut findings = Findings::default();
            features(&mut findings, directory);
            findings.of("features").clone()
        };
        let on_disk = of(Path::new("/proc"));
        assert_eq!(on_disk.status, DoctorStatus::Warning);
        assert!(on_disk.advice.contains("--tmpfs /proc"), "{on_disk:?}");

        let run = tempfile::tempdir_in("/dev/shm").unwrap();
        assert_eq!(of(run.path()).status, DoctorStatus::Skipped);
        fs::write(run.path().join("criu.kdat.tmp"), "").unwrap();
        let unfinished = of(run.path());
        assert_eq!(unfinished.status, DoctorStatus::Warning);
        assert!(
            unfinished.advice.contains("criu.kdat.tmp"),
            "{unfinished:?}"
        );
        fs::write(run.path().join("criu.kdat"), "features").unwrap();
        assert_eq!(of(run.path()).status, DoctorStatus::Ok);
    }

    #[test]
    fn an_old_release_is_a_warning_and_a_content_one_is_ok() {
        let findings = checked("case $1 in --version) echo 'Version: 3.9';; esac");
        assert_eq!(findings.of("program").status, DoctorStatus::Warning);
        assert_eq!(findings.of("check").status, DoctorStatus::Ok);
        assert_eq!(findings.of("lazy restores").status, DoctorStatus::Ok);
    }
}
