use std::os::unix::fs::PermissionsExt as _;

use super::*;

/// A configuration file in a directory of its own.
struct Site {
    dir: tempfile::TempDir,
}

impl Site {
    fn new(text: &str) -> Self {
        let site = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        site.write(text);
        site
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("permafrostd.toml")
    }

    fn write(&self, text: &str) {
        std::fs::write(self.path(), text).unwrap();
        self.chmod(0o600);
    }

    fn chmod(&self, mode: u32) {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(self.path(), permissions).unwrap();
    }

    /// Reads the options with further arguments and variables.
    fn read(
        &self,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Settings, SettingsError> {
        let config = format!("--config={}", self.path().display());
        read(&[&[config.as_str()], arguments].concat(), environment)
    }

    /// Returns the error without the path of the file.
    fn error(&self, arguments: &[&str]) -> String {
        let error = self.read(arguments, &[]).unwrap_err().to_string();
        error.replace(&self.path().display().to_string(), "F")
    }
}

fn read(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Settings, SettingsError> {
    let arguments: Vec<_> = std::iter::once(&"permafrostd")
        .chain(arguments)
        .map(OsString::from)
        .collect();
    let environment = environment
        .iter()
        .map(|(name, value)| (name.into(), value.into()))
        .collect();
    Settings::read(&arguments, &environment)
}

/// Returns the values of an option and a word for its origin.
fn value(settings: &Settings, name: &str) -> (String, &'static str) {
    let command = Args::command();
    let arg = configurable(&command)
        .find(|arg| name_of(arg) == name)
        .unwrap();
    let origin = match settings.origin(arg) {
        Origin::CommandLine => "command line",
        Origin::Environment { .. } => "environment",
        Origin::File { .. } => "file",
        Origin::Default => "default",
    };
    (settings.values(arg).join(","), origin)
}

#[test]
fn the_command_line_goes_before_the_environment_and_that_before_the_file() {
    let site = Site::new("park-ttl = '1h'\nsession-ttl = '1h'\nidle-timeout = '1h'\n");
    let settings = site
        .read(
            &["--park-ttl=3h"],
            &[
                ("PERMAFROSTD_PARK_TTL", "2h"),
                ("PERMAFROSTD_SESSION_TTL", "2h"),
                ("PERMAFROSTD_IDLE_TIMEOUT", ""),
                ("PERMAFROSTD_PARK_TLL", "5h"),
                ("PERMAFROST_SOCKET", "s"),
            ],
        )
        .unwrap();
    let value = |name| value(&settings, name);
    assert_eq!(value("park-ttl"), ("3h".to_owned(), "command line"));
    assert_eq!(value("session-ttl"), ("2h".to_owned(), "environment"));
    assert_eq!(value("idle-timeout"), ("1h".to_owned(), "file"));
    assert_eq!(value("scrub-period"), ("7d".to_owned(), "default"));
    assert_eq!(settings.unknown_variables(), ["PERMAFROSTD_PARK_TLL"]);
    assert_eq!(settings.file(), Some(site.path().as_path()));
    settings.args().unwrap().config().unwrap();
}

#[test]
fn each_type_of_value_reaches_the_configuration() {
    let site = Site::new(
        "data-dir = '/srv/frost'\n\
         region-size = '1G'\n\
         park-quota = 1048576\n\
         require-dax = true\n\
         accept-loss = false\n\
         listen = 'none'\n\
         listen-uid = [1000, '1001']\n\
         share-pages = 'team'\n\
         scrub-period = 'off'\n\
         cool-above = 70\n\
         log-format = 'json'\n",
    );
    let arguments = ["--require-dax=false", "--share-pages=a", "--share-pages=b"];
    let read = |arguments: &[&str]| {
        let settings = site.read(arguments, &[]).unwrap();
        settings.args().unwrap().config().unwrap()
    };
    let config = read(&[]);
    assert_eq!(config.data_dir, Path::new("/srv/frost"));
    assert_eq!(config.region_size_bytes, Some(1 << 30));
    assert_eq!(config.retention.parked_bytes, Some(1 << 20));
    assert!(config.require_dax && !config.accept_loss && config.listen.is_none());
    assert_eq!(config.listen_uids, [1000, 1001]);
    assert_eq!(config.share_pages, ["team"]);
    assert_eq!(config.scrub_period, None);
    assert_eq!(config.cooling.above_percent, Some(70));
    // A list is replaced as a whole, and a flag can be taken back.
    let config = read(&arguments);
    assert_eq!(config.share_pages, ["a", "b"]);
    assert!(!config.require_dax);
    let list = [("PERMAFROSTD_SHARE_PAGES", "x, y")];
    let settings = site.read(&[], &list).unwrap();
    assert_eq!(
        settings.args().unwrap().config().unwrap().share_pages,
        ["x", "y"]
    );
}

#[test]
fn errors_of_the_file_name_line_and_column_and_what_to_do() {
    let mut different = Vec::new();
    for (text, expected) in [
        ("park-ttl = 7d\n", "F:1:12: this is not TOML"),
        (
            "\n  park-tll = '7d'\n",
            "F:2:3: there is no option park-tll: did you mean park-ttl?",
        ),
        (
            "data_dir = '/x'\n",
            "F:1:1: there is no option data_dir: did you mean data-dir?",
        ),
        (
            "quux = 1\n",
            "F:1:1: there is no option quux: remove it, or see `permafrostd --print-default-config`",
        ),
        (
            "config = 'x'\n",
            "F:1:1: config can only be given on the command line: remove it here",
        ),
        (
            "data-dir = 5\n",
            "F:1:12: data-dir is a number: write text in quotation marks",
        ),
        (
            "require-dax = 'yes'\n",
            "F:1:15: require-dax is no truth value: write true or false",
        ),
        (
            "api-rate = 2.5\n",
            "F:1:12: api-rate is a number with a fraction",
        ),
        ("park-ttl = true\n", "F:1:12: park-ttl is a truth value"),
        ("park-ttl = ['1h', '2h']\n", "F:1:12: park-ttl is a list"),
        (
            "share-pages = [['a']]\n",
            "F:1:15: share-pages is a list: write a list such as",
        ),
        (
            "[cluster]\ncopies = 2\n",
            "F:1:2: there is no option cluster",
        ),
        ("[park-ttl]\nx = 2\n", "F:1:1: park-ttl is a section"),
        (
            "park-ttl = '1x'\n",
            "F:1:12: park-ttl: \"1x\" is no time such as 500ms, 30s, 90m, 2h or 7d",
        ),
        ("api-rate = 0\n", "F:1:12: api-rate: 0 is not in 1.."),
        (
            "listen-peers = '127.0.0.1:1'\nidentity = 'i'\ncatalog = 'http://h:2379'\n",
            "F:3:11: catalog: \"http://h:2379\" cannot be used: not an etcd:// URL; write it as etcd://host:2379,host:2379,host:2379 or with /prefix behind it",
        ),
        (
            "listen-peers = '127.0.0.1:1'\nidentity = 'i'\ncatalog = 'etcd://u:hunter2@h'\n",
            "F:3:11: catalog: the value cannot be used: a password does not belong here",
        ),
        (
            "log-format = 'xml'\n",
            "F:1:14: log-format: \"xml\" cannot be used: use text or json",
        ),
        (
            "park-ttl = '1h'\npark-ttl = '2h'\n",
            "F:2:1: this is not TOML: duplicate key",
        ),
        (
            "listen-peers = '127.0.0.1:0'\n",
            "F:1:1: listen-peers needs identity, too",
        ),
        ("key-file = 'a'\nkey-command = 'b'\n", "excludes"),
    ] {
        let found = Site::new(text).error(&[]);
        if !found.contains(expected) {
            different.push(format!("{text}: {found}"));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
    // All at once, and the line of an option that another one on the command line makes wrong.
    let site = Site::new("copies = 99\n\nnone = 1\n");
    assert_eq!(site.error(&[]).lines().count(), 2);
    let site = Site::new("# keys\nkey-file = '/k'\n");
    let found = site.error(&["--key-command=x"]);
    assert_eq!(
        found,
        "F:2:1: key-file excludes key-command, which is set as well: keep one of them"
    );
}

#[test]
fn errors_of_the_command_line_and_of_variables_name_these() {
    let site = Site::new("identity = '/i'\n");
    // The file has what the option on the command line needs.
    site.read(&["--listen-peers=127.0.0.1:0"], &[]).unwrap();
    let refused = site.read(&["--listen-peers=x"], &[]);
    assert!(matches!(refused, Err(SettingsError::CommandLine(_))));
    let refused = read(&["--config=none", "--listen-peers=127.0.0.1:0"], &[]);
    assert!(matches!(refused, Err(SettingsError::CommandLine(_))));
    let refused = site
        .read(&[], &[("PERMAFROSTD_COPIES", "many")])
        .unwrap_err();
    let message = refused.to_string();
    assert!(
        message.starts_with("variable PERMAFROSTD_COPIES: copies: \"many\""),
        "{message}"
    );
}

#[test]
fn a_file_that_others_can_write_is_refused_and_one_with_secrets_that_others_can_read() {
    let site = Site::new("key-command = 'hunter2'\n");
    site.read(&[], &[]).unwrap();
    site.chmod(0o640);
    site.read(&[], &[]).unwrap();
    site.chmod(0o644);
    assert!(
        site.error(&[])
            .contains("F:1:1: key-command may be a secret"),
        "{}",
        site.error(&[])
    );
    site.chmod(0o660);
    assert_eq!(
        site.error(&[]),
        "F: others can write it (mode 0660): chmod go-w it"
    );
    std::fs::remove_file(site.path()).unwrap();
    assert!(site.error(&[]).starts_with("F: cannot be read: "));
}

#[test]
fn no_secret_is_printed() {
    let site = Site::new("key-command = 'hunter2'\n");
    let settings = site.read(&["--old-key-command=hunter2"], &[]).unwrap();
    for json in [false, true] {
        let mut printed = Vec::new();
        print(&settings, json, &mut printed).unwrap();
        let printed = String::from_utf8(printed).unwrap();
        assert!(
            printed.contains("key-command") && !printed.contains("hunter2"),
            "{printed}"
        );
    }
    for text in [
        "key-command = 'hunter2\n",
        "key-command = ['hunter2']\n",
        "key-command = hunter2\n",
    ] {
        let found = Site::new(text).error(&[]);
        assert!(
            found.starts_with("F:1:") && !found.contains("hunter2"),
            "{found}"
        );
    }
}

#[test]
fn the_default_file_has_every_option_and_says_what_the_daemon_does_without_it() {
    let text = default_file();
    let site = Site::new(&text);
    let defaults = site.read(&[], &[]).unwrap();
    let command = Args::command();
    let mut uncommented = String::new();
    for arg in configurable(&command) {
        let name = name_of(arg);
        let begin = format!("#{name} = ");
        let lines: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with(&begin))
            .collect();
        assert_eq!(lines.len(), 1, "{name}");
        let has_default = arg
            .get_default_values()
            .iter()
            .any(|value| !value.is_empty());
        if has_default {
            let line = lines[0].trim_start_matches('#');
            // Most options of a cluster need one.
            let needs_cluster =
                arg.get_help_heading() == Some("Cluster") || name.starts_with("repair-");
            if !needs_cluster {
                uncommented.push_str(line);
                uncommented.push('\n');
            }
        }
    }
    site.write(&uncommented);
    let set = site.read(&[], &[]).unwrap();
    for arg in configurable(&command) {
        assert_eq!(defaults.values(arg), set.values(arg), "{}", name_of(arg));
    }
    assert!(text.lines().all(|line| line.chars().count() <= 120));
}

#[test]
fn a_subcommand_reads_no_file() {
    let site = Site::new("nonsense = 1\n");
    let path = site.path();
    let settings = read(&["region", "check", path.to_str().unwrap()], &[]).unwrap();
    assert_eq!(settings.file(), None);
}
