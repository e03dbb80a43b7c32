//! CRIU's own options, as far as Permafrost has to understand the options that a user passes on.
//!
//! Names and arguments as in the table of `criu/config.c`, release 4.2. The options that a restore must repeat
//! were read from the places where CRIU uses each: on both sides, or checked against the image on restore. Of
//! these a checkpoint records only the options that [`check_restore_options`] allows.

use permafrost_protocol::manifest::{RestoreOptionError, check_restore_options, is_repeatable};

/// Options that cannot be passed on to CRIU.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// Permafrost sets the option itself, or the option contradicts the way in which the dump is taken.
    #[error("CRIU option {option} cannot be used here: {reason}")]
    Reserved {
        /// Name of the option.
        option: String,
        /// Reason of the refusal.
        reason: &'static str,
    },
    /// An option's argument is missing.
    #[error("CRIU option {option} needs an argument")]
    NoArgument {
        /// Name of the option.
        option: String,
    },
    /// A word that is not an option.
    #[error("{argument:?} is not a CRIU option")]
    NotAnOption {
        /// Word that was given.
        argument: String,
    },
}

/// Kind of argument that an option takes (getopt_long(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    Nothing,
    Argument,
    /// An argument only in attached form: `--name=value`, `-xvalue`.
    Optional,
}

/// Short options and their long names.
const SHORT: &[(char, &str, Takes)] = &[
    ('d', "restore-detached", Takes::Nothing),
    ('S', "restore-sibling", Takes::Nothing),
    ('s', "leave-stopped", Takes::Nothing),
    ('R', "leave-running", Takes::Nothing),
    ('t', "tree", Takes::Argument),
    ('h', "help", Takes::Nothing),
    ('D', "images-dir", Takes::Argument),
    ('o', "log-file", Takes::Argument),
    ('v', "verbosity", Takes::Optional),
    ('x', "ext-unix-sk", Takes::Optional),
    ('V', "version", Takes::Nothing),
    ('r', "root", Takes::Argument),
    ('j', "shell-job", Takes::Nothing),
    ('J', "join-ns", Takes::Argument),
    ('l', "file-locks", Takes::Nothing),
    ('W', "work-dir", Takes::Argument),
    ('L', "libdir", Takes::Argument),
    ('M', "ext-mount-map", Takes::Argument),
];

/// Long options with an argument.
const WITH_ARGUMENT: &[&str] = &[
    "tree",
    "images-dir",
    "work-dir",
    "log-file",
    "join-ns",
    "root",
    "close",
    "pidfile",
    "veth-pair",
    "action-script",
    "address",
    "port",
    "prev-images-dir",
    "libdir",
    "ext-mount-map",
    "cgroup-root",
    "inherit-fd",
    "feature",
    "skip-mnt",
    "enable-fs",
    "freeze-cgroup",
    "ghost-limit",
    "irmap-scan-path",
    "lsm-profile",
    "timeout",
    "external",
    "empty-ns",
    "cgroup-props",
    "cgroup-props-file",
    "cgroup-dump-controller",
    "status-fd",
    "ps-socket",
    "config",
    "tls-cacert",
    "tls-cacrl",
    "tls-cert",
    "tls-key",
    "cgroup-yard",
    "pre-dump-mode",
    "file-validation",
    "lsm-mount-context",
    "network-lock",
];

/// Long options with an optional argument.
const WITH_OPTIONAL: &[&str] = &["ext-unix-sk", "cpu-cap", "manage-cgroups", "verbosity"];

/// Options for whose restore the caller may have to pass them, or a counterpart: their argument names an object
/// of one host, or they are not among those that a checkpoint may record.
const COUNTERPART: &[&str] = &[
    "cgroup-root",
    "config",
    "ext-mount-map",
    "external",
    "libdir",
    "no-default-config",
    "root",
    "skip-mnt",
];

/// Options that Permafrost sets or that contradict it: name, refused on a dump, refused on a restore, reason.
const RESERVED: &[(&str, bool, bool, &str)] = &[
    ("tree", true, true, "the process is named by --pid"),
    (
        "images-dir",
        true,
        true,
        "images lie in a private directory in memory",
    ),
    ("work-dir", true, true, "use permafrost's own --work-dir"),
    (
        "log-file",
        true,
        true,
        "permafrost reads CRIU's log; use --work-dir to keep it",
    ),
    (
        "page-server",
        true,
        false,
        "pages go to permafrostd already",
    ),
    (
        "address",
        true,
        false,
        "pages go to permafrostd over its own socket",
    ),
    (
        "port",
        true,
        false,
        "pages go to permafrostd over its own socket",
    ),
    (
        "ps-socket",
        true,
        false,
        "pages go to permafrostd over its own socket",
    ),
    (
        "tls",
        true,
        false,
        "pages go to permafrostd over its own socket",
    ),
    (
        "stream",
        true,
        true,
        "a dump has permafrost's own --stream, a restore streams unless told otherwise",
    ),
    ("lazy-pages", true, true, "lazy pages are not served yet"),
    (
        "prev-images-dir",
        true,
        false,
        "the parent is found by job; see --full",
    ),
    (
        "auto-dedup",
        true,
        true,
        "pages are compared when they are stored",
    ),
    (
        "pidfile",
        true,
        true,
        "permafrost uses it and prints the pid",
    ),
    ("leave-running", false, true, "it belongs to the dump"),
    (
        "exec-cmd",
        true,
        true,
        "use --foreground to wait for the task",
    ),
    (
        "restore-sibling",
        true,
        true,
        "use --foreground to wait for the task",
    ),
    (
        "restore-detached",
        true,
        true,
        "it is the default; see --foreground",
    ),
    ("daemon", true, true, "it is the default; see --foreground"),
    ("help", true, true, "run criu --help"),
    ("version", true, true, "run criu --version"),
];

/// One option in its long form.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parsed {
    name: String,
    value: Option<String>,
}

impl Parsed {
    fn spelled(&self) -> String {
        match &self.value {
            Some(value) => format!("--{}={value}", self.name),
            None => format!("--{}", self.name),
        }
    }
}

/// Options that a user passes on to CRIU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassedOn {
    options: Vec<Parsed>,
}

/// Operation that CRIU carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Runs `criu dump` or `criu pre-dump`.
    Dump,
    /// Runs `criu restore`.
    Restore,
}

impl PassedOn {
    /// Parses the words after `--` on the command line.
    ///
    /// # Errors
    /// See [`OptionsError`].
    pub fn parse(words: &[String], operation: Operation) -> Result<Self, OptionsError> {
        let mut options = Vec::new();
        let mut words = words.iter().peekable();
        while let Some(word) = words.next() {
            if let Some(long) = word.strip_prefix("--").filter(|long| !long.is_empty()) {
                let (name, attached) = match long.split_once('=') {
                    Some((name, value)) => (name, Some(value.to_owned())),
                    None => (long, None),
                };
                let value = match long_takes(name) {
                    Takes::Argument if attached.is_none() => Some(argument(word, words.next())?),
                    _ => attached,
                };
                options.push(Parsed {
                    name: name.to_owned(),
                    value,
                });
            } else if let Some(cluster) = word.strip_prefix('-').filter(|short| !short.is_empty()) {
                parse_short(cluster, || words.next(), &mut options)?;
            } else {
                return Err(OptionsError::NotAnOption {
                    argument: word.clone(),
                });
            }
        }
        for option in &options {
            let reserved = RESERVED.iter().find(|(name, dump, restore, _)| {
                *name == option.name
                    && match operation {
                        Operation::Dump => *dump,
                        Operation::Restore => *restore,
                    }
            });
            if let Some((_, _, _, reason)) = reserved {
                return Err(OptionsError::Reserved {
                    option: format!("--{}", option.name),
                    reason,
                });
            }
        }
        Ok(Self { options })
    }

    /// Adds an option without an argument, unless it is present already.
    pub fn add(&mut self, name: &str) {
        if !self.has(name) {
            self.options.push(Parsed {
                name: name.to_owned(),
                value: None,
            });
        }
    }

    /// Removes an option, and returns true if it was present.
    pub fn take(&mut self, name: &str) -> bool {
        let before = self.options.len();
        self.options.retain(|option| option.name != name);
        self.options.len() < before
    }

    /// Returns true if the option is present.
    pub fn has(&self, name: &str) -> bool {
        self.options.iter().any(|option| option.name == name)
    }

    /// Returns the options as arguments for CRIU.
    pub fn arguments(&self) -> Vec<String> {
        self.options.iter().map(Parsed::spelled).collect()
    }

    /// Returns the options of a dump that its restore repeats by itself: those that a checkpoint may record.
    pub fn restore_options(&self) -> Vec<String> {
        self.options
            .iter()
            .map(Parsed::spelled)
            .filter(|spelled| is_repeatable(spelled))
            .collect()
    }

    /// Returns the options of a dump that the caller of its restore may have to pass again.
    pub fn with_counterpart(&self) -> Vec<String> {
        self.options
            .iter()
            .filter(|option| COUNTERPART.contains(&option.name.as_str()))
            .map(Parsed::spelled)
            .filter(|spelled| !is_repeatable(spelled))
            .collect()
    }

    /// Returns the recorded options without those that the user has given anew, be it as `--no-NAME`.
    pub fn not_given_anew<'a>(&self, recorded: &'a [String]) -> Vec<&'a String> {
        recorded
            .iter()
            .filter(|option| {
                let name = option.trim_start_matches('-');
                let name = name.split_once('=').map_or(name, |(name, _)| name);
                !self.has(name) && !self.has(&format!("no-{name}"))
            })
            .collect()
    }

    /// Returns the user's options after the recorded ones, without those that the user has given anew.
    ///
    /// # Errors
    /// One of the recorded options must not be repeated. The user's own options are not checked.
    pub fn on_top_of(&self, recorded: &[String]) -> Result<Vec<String>, RestoreOptionError> {
        let mut arguments: Vec<String> =
            self.not_given_anew(recorded).into_iter().cloned().collect();
        // Written by an older Permafrost, or by a node that does not keep the rules.
        check_restore_options(&arguments)?;
        arguments.extend(self.arguments());
        Ok(arguments)
    }
}

fn long_takes(name: &str) -> Takes {
    if WITH_ARGUMENT.contains(&name) {
        Takes::Argument
    } else if WITH_OPTIONAL.contains(&name) {
        Takes::Optional
    } else {
        Takes::Nothing
    }
}

fn argument(option: &str, word: Option<&String>) -> Result<String, OptionsError> {
    word.cloned().ok_or_else(|| OptionsError::NoArgument {
        option: option.to_owned(),
    })
}

/// Parses `-jl`, `-xVALUE`, `-L DIR`.
fn parse_short<'a>(
    cluster: &str,
    mut next: impl FnMut() -> Option<&'a String>,
    options: &mut Vec<Parsed>,
) -> Result<(), OptionsError> {
    for (at, letter) in cluster.char_indices() {
        let Some((_, name, takes)) = SHORT.iter().find(|(short, _, _)| *short == letter) else {
            return Err(OptionsError::NotAnOption {
                argument: format!("-{letter}"),
            });
        };
        let attached = &cluster[at + letter.len_utf8()..];
        let value = match takes {
            Takes::Nothing => None,
            Takes::Optional if attached.is_empty() => None,
            Takes::Argument if attached.is_empty() => {
                Some(argument(&format!("-{letter}"), next())?)
            }
            Takes::Argument | Takes::Optional => Some(attached.to_owned()),
        };
        options.push(Parsed {
            name: (*name).to_owned(),
            value,
        });
        if *takes != Takes::Nothing {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump(words: &[&str]) -> Result<PassedOn, OptionsError> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        PassedOn::parse(&words, Operation::Dump)
    }

    #[test]
    fn spellings_become_one() {
        let options = dump(&[
            "-jl",
            "-xsocket[1]",
            "-L",
            "/lib/criu",
            "--ghost-limit",
            "10M",
            "--manage-cgroups",
            "--empty-ns=net",
            "-v4",
        ])
        .unwrap();
        assert_eq!(
            options.arguments(),
            [
                "--shell-job",
                "--file-locks",
                "--ext-unix-sk=socket[1]",
                "--libdir=/lib/criu",
                "--ghost-limit=10M",
                "--manage-cgroups",
                "--empty-ns=net",
                "--verbosity=4",
            ]
        );
    }

    #[test]
    fn a_restore_repeats_what_it_must() {
        let mut options = dump(&[
            "--ghost-limit",
            "10M",
            "--file-locks",
            "--manage-cgroups=full",
            "--external",
            "mnt[]:s",
            "--external",
            "mnt[/data]:data",
            "--timeout",
            "60",
        ])
        .unwrap();
        options.add("shell-job");
        options.add("file-locks");
        assert_eq!(
            options.restore_options(),
            [
                "--file-locks",
                "--manage-cgroups=full",
                "--external=mnt[]:s",
                "--shell-job"
            ]
        );
        assert_eq!(options.with_counterpart(), ["--external=mnt[/data]:data"]);
    }

    #[test]
    fn the_users_word_wins_over_the_recorded_one() {
        let words = ["--manage-cgroups=none", "--no-shell-job", "-l"].map(str::to_owned);
        let options = PassedOn::parse(&words, Operation::Restore).unwrap();
        let recorded =
            ["--shell-job", "--manage-cgroups=full", "--tcp-established"].map(str::to_owned);
        assert_eq!(
            options.on_top_of(&recorded).unwrap(),
            [
                "--tcp-established",
                "--manage-cgroups=none",
                "--no-shell-job",
                "--file-locks"
            ]
        );
    }

    #[test]
    fn a_recorded_option_that_may_run_code_is_not_repeated_but_the_users_own_is() {
        let recorded = ["--shell-job", "--action-script=/tmp/evil"].map(str::to_owned);
        let nothing = PassedOn::default();
        let error = nothing.on_top_of(&recorded).unwrap_err();
        assert!(
            error.to_string().contains("--action-script=/tmp/evil"),
            "{error}"
        );
        let words = ["--action-script", "/usr/local/bin/mine"].map(str::to_owned);
        let own = PassedOn::parse(&words, Operation::Restore).unwrap();
        assert_eq!(
            own.on_top_of(&recorded).unwrap(),
            ["--shell-job", "--action-script=/usr/local/bin/mine"]
        );
    }

    #[test]
    fn a_dump_records_nothing_that_a_restore_may_not_repeat() {
        let options = dump(&[
            "-L/lib/criu",
            "--config=/etc/criu.conf",
            "--root=/srv",
            "--skip-mnt=/proc",
            "--action-script=/x",
            "-j",
        ])
        .unwrap();
        assert_eq!(options.restore_options(), ["--shell-job"]);
        assert_eq!(
            options.with_counterpart(),
            [
                "--libdir=/lib/criu",
                "--config=/etc/criu.conf",
                "--root=/srv",
                "--skip-mnt=/proc"
            ]
        );
    }

    #[test]
    fn what_permafrost_sets_itself_is_refused() {
        for words in [
            &["-t", "1"][..],
            &["--images-dir=/x"],
            &["-D/x"],
            &["--page-server"],
            &["--stream"],
            &["--lazy-pages"],
            &["-jt", "3"],
            &["--prev-images-dir", "x"],
        ] {
            assert!(
                matches!(dump(words), Err(OptionsError::Reserved { .. })),
                "{words:?}"
            );
        }
        let leave_running = ["-R".to_owned()];
        assert!(dump(&["-R"]).is_ok());
        assert!(PassedOn::parse(&leave_running, Operation::Restore).is_err());
        assert!(matches!(
            dump(&["stray"]),
            Err(OptionsError::NotAnOption { .. })
        ));
        assert!(matches!(
            dump(&["-L"]),
            Err(OptionsError::NoArgument { .. })
        ));
        assert!(matches!(
            dump(&["--timeout"]),
            Err(OptionsError::NoArgument { .. })
        ));
    }
}
