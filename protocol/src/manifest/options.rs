//! CRIU options that a manifest may ask a restore to repeat.
//!
//! A caller that may dump chooses them, and they reach the command line of a CRIU that runs with the rights of the
//! restoring user. So only options on one list are recorded and repeated: those that run no program, name no path,
//! descriptor or address, and change nothing on the restoring host but how the images are read. All other options are
//! left to the restoring user.

/// Maximum number of options that one manifest may record.
pub const MAX_RESTORE_OPTIONS: usize = 64;

/// Longest recorded option, bytes.
const MAX_OPTION_BYTES: usize = 256;

/// Longest part of a refused option that a message repeats, characters.
const MAX_QUOTED_CHARS: usize = 80;

/// Arguments that a recorded option may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Argument {
    /// The option has no argument.
    Nothing,
    /// One word of the list.
    OneOf(&'static [&'static str]),
    /// No argument, or one word of the list.
    NothingOr(&'static [&'static str]),
    /// Names joined by commas: letters, digits, `.`, `_` and `-`. Not required with `optional`.
    Names { optional: bool },
    /// `mnt[]`, perhaps with flags of `m` and `s`: mounts that CRIU finds by itself.
    DetectedMounts,
}

/// Options that a restore may repeat; names as in the table of `criu/config.c`, release 4.2.
const ALLOWED: &[(&str, Argument)] = &[
    ("allow-uprobes", Argument::Nothing),
    ("cpu-cap", Argument::Names { optional: true }),
    ("empty-ns", Argument::OneOf(&["net"])),
    ("enable-external-masters", Argument::Nothing),
    ("enable-external-sharing", Argument::Nothing),
    ("enable-fs", Argument::Names { optional: false }),
    // Any other value names a resource of the dumping host, and a restore needs one of the restoring host.
    ("external", Argument::DetectedMounts),
    ("ext-unix-sk", Argument::Names { optional: true }),
    ("file-locks", Argument::Nothing),
    ("link-remap", Argument::Nothing),
    (
        "manage-cgroups",
        Argument::NothingOr(&["none", "props", "soft", "full", "strict", "ignore"]),
    ),
    (
        "network-lock",
        Argument::OneOf(&["iptables", "nftables", "skip"]),
    ),
    ("shell-job", Argument::Nothing),
    ("tcp-close", Argument::Nothing),
    ("tcp-established", Argument::Nothing),
    ("unprivileged", Argument::Nothing),
    ("weak-sysctls", Argument::Nothing),
];

/// A recorded option that no restore repeats.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreOptionError {
    /// The option is not on the list, or its argument is not.
    #[error(
        "CRIU option {option:?} cannot be recorded in a checkpoint: it may run a program or reach files of the host that restores"
    )]
    Refused {
        /// The option, shortened.
        option: String,
    },
    /// The manifest records too many options.
    #[error("{count} recorded CRIU options are more than {MAX_RESTORE_OPTIONS}")]
    TooMany {
        /// Number of recorded options.
        count: usize,
    },
}

impl RestoreOptionError {
    /// Advice for the user: how to get the effect without recording the option.
    pub const HINT: &'static str = "leave it out of the dump or adoption; whoever restores gives it behind `--` of `permafrost restore`";
}

/// Checks the options that a manifest records, each spelled `--name` or `--name=argument`.
///
/// # Errors
/// The first one that a restore must not repeat; there are too many.
pub fn check_restore_options(options: &[String]) -> Result<(), RestoreOptionError> {
    if options.len() > MAX_RESTORE_OPTIONS {
        return Err(RestoreOptionError::TooMany {
            count: options.len(),
        });
    }
    match options.iter().find(|option| !is_repeatable(option)) {
        None => Ok(()),
        Some(refused) => Err(RestoreOptionError::Refused {
            option: refused.chars().take(MAX_QUOTED_CHARS).collect(),
        }),
    }
}

/// Returns true if a restore may repeat `option`, spelled `--name` or `--name=argument`. Abbreviations, which CRIU
/// takes, are not repeated.
#[must_use]
pub fn is_repeatable(option: &str) -> bool {
    let Some(long) = option
        .strip_prefix("--")
        .filter(|_| option.len() <= MAX_OPTION_BYTES)
    else {
        return false;
    };
    let (name, argument) = match long.split_once('=') {
        Some((name, argument)) => (name, Some(argument)),
        None => (long, None),
    };
    ALLOWED
        .iter()
        .any(|(allowed, takes)| *allowed == name && takes.allows(argument))
}

impl Argument {
    fn allows(self, argument: Option<&str>) -> bool {
        match (self, argument) {
            (Self::Nothing | Self::NothingOr(_) | Self::Names { optional: true }, None) => true,
            (Self::OneOf(words) | Self::NothingOr(words), Some(word)) => words.contains(&word),
            (Self::Names { .. }, Some(names)) => {
                !names.is_empty()
                    && names
                        .bytes()
                        .all(|byte| byte.is_ascii_alphanumeric() || b",._-".contains(&byte))
            }
            (Self::DetectedMounts, Some(mounts)) => match mounts.strip_prefix("mnt[]") {
                Some("") => true,
                Some(flags) => flags
                    .strip_prefix(':')
                    .is_some_and(|flags| matches!(flags, "m" | "s" | "ms" | "sm")),
                None => false,
            },
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_only_say_how_images_are_read_are_repeated() {
        for option in [
            "--shell-job",
            "--tcp-established",
            "--manage-cgroups",
            "--manage-cgroups=full",
            "--empty-ns=net",
            "--external=mnt[]",
            "--external=mnt[]:sm",
            "--enable-fs=nfs,ext4",
            "--network-lock=nftables",
            "--ext-unix-sk=12,13",
        ] {
            assert!(is_repeatable(option), "{option}");
        }
    }

    #[test]
    fn options_that_run_code_or_name_files_are_refused_by_name() {
        for option in [
            "--action-script=/tmp/evil",
            "--config=/tmp/c",
            "--libdir=/tmp",
            "--root=/tmp",
            "--work-dir=/tmp",
            "--images-dir=/tmp",
            "--log-file=/etc/passwd",
            "--pidfile=/etc/passwd",
            "--exec-cmd",
            "--inherit-fd=fd[3]:/x",
            "--external=mnt[/data]:data",
            "--external=mnt[]:/data",
            "--external=file[1:2]",
            "--skip-mnt=/proc",
            "--cgroup-root=/x",
            "--cgroup-yard=/x",
            "--cgroup-props-file=/x",
            "--join-ns=net:/x",
            "--lsm-profile=selinux:x",
            "--tls-key=/x",
            "--status-fd=3",
            "--no-default-config",
            // Other spellings of allowed and refused options.
            "--conf=/tmp/c",
            "--shell",
            "--shell-job=",
            "--shell-job=--config",
            "--manage-cgroups=/x",
            "--network-lock",
            "--enable-fs=",
            "--enable-fs=a b",
            "--empty-ns=mnt",
            "-L/tmp",
            "-j",
            "--",
            "",
            "shell-job",
            " --shell-job",
            "--shell-job\n",
            "--shell-job --config",
        ] {
            assert!(!is_repeatable(option), "{option}");
            let error = check_restore_options(&["--shell-job".into(), option.into()]).unwrap_err();
            assert!(
                error.to_string().contains(&format!("{option:?}")),
                "{error}"
            );
        }
    }

    #[test]
    fn many_and_long_options_are_refused() {
        let many = vec!["--shell-job".to_owned(); MAX_RESTORE_OPTIONS + 1];
        assert_eq!(
            check_restore_options(&many),
            Err(RestoreOptionError::TooMany { count: 65 })
        );
        assert_eq!(check_restore_options(&many[1..]), Ok(()));
        let long = format!("--enable-fs={}", "x".repeat(MAX_OPTION_BYTES));
        let error = check_restore_options(&[long]).unwrap_err();
        assert!(error.to_string().len() < 300, "{error}");
    }
}
