//! `permafrost report`: what a report of a defect needs, in one tar, and no secrets.

mod clean;
mod collect;

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use serde::Serialize;

use clean::Cleaner;
use collect::Collected;

/// Help of `permafrost report`.
pub const REPORT_EXAMPLES: &str = "\
Writes a tar with the versions, what `permafrost doctor` finds, the state of the daemon, the nodes and the queues, metrics, \
the last lines of logs, and the options of the daemon with the origin of each, as `permafrostd --print-config` shows \
them. It has no memory contents and no images. Keys and files of tokens are not read into it; tokens, passwords, the contents of the daemon's secret files and \
PEM keys are replaced by (removed) wherever they occur. Names of jobs, hosts and paths are in it: look before you pass it on.

Where one of the daemon's secret files cannot be read, logs are left out, as its contents would not be found in them.
What cannot be collected is named in the tar's file `missing.txt`, and is no failure.

Examples:
    permafrost report
    permafrost report --out r.tar --log /var/log/permafrostd.log
    tar xOf r.tar permafrost-report/doctor.json | jq .errors
";

/// Most lines of a log.
const LOG_LINES: usize = 2_000;

/// Arguments of `permafrost report`.
#[derive(Debug, Args)]
pub struct ReportArguments {
    /// File to write; it must not be there yet [default: permafrost-report-HOST-TIME.tar].
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Log of permafrostd, whose last lines are taken. Repeatable [default: the journal of permafrostd, where there is
    /// one].
    #[arg(long, value_name = "FILE")]
    log: Vec<PathBuf>,
    /// Configuration file of permafrostd, if it does not run.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/permafrost/permafrostd.toml"
    )]
    config: PathBuf,
    #[command(flatten)]
    doctor: crate::doctor::DoctorArguments,
}

/// Report that was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BugReport {
    /// Path of the tar.
    pub path: PathBuf,
    /// Names of the files in it.
    pub files: Vec<String>,
    /// Parts that could not be collected, each with the reason.
    pub missing: Vec<String>,
    /// Number of secrets that were removed.
    pub removed: usize,
}

/// Runs `permafrost report`.
///
/// # Errors
/// The tar cannot be written, or is there already.
pub fn report(context: &Context, arguments: &ReportArguments) -> Result<(), Failure> {
    let path = arguments.out.clone().unwrap_or_else(default_path);
    let mut collected = Collected::default();
    let secrets = collect::all(&mut collected, context, arguments);
    let (files, missing) = collected.finish();
    let mut cleaner = Cleaner::new(secrets);
    let files: Vec<(String, Vec<u8>)> = files
        .into_iter()
        .map(|(name, text)| {
            let clean = cleaner.clean(&text, !name.ends_with(".json"));
            (name, clean.into_bytes())
        })
        .collect();
    write(&path, &files)?;
    let written = BugReport {
        path,
        files: files.into_iter().map(|(name, _)| name).collect(),
        missing,
        removed: cleaner.removed,
    };
    context.print(&written, |written| {
        let mut text = format!(
            "{} written: {}\n",
            written.path.display(),
            written.files.join(", ")
        );
        for missing in &written.missing {
            text.push_str(&format!("not in it: {missing}\n"));
        }
        text.push_str("It names jobs, hosts and paths: look before you pass it on.\n");
        text
    })
}

fn default_path() -> PathBuf {
    let host = rustix::system::uname();
    let host: String = host
        .nodename()
        .to_string_lossy()
        .chars()
        .map(|letter| {
            if letter.is_ascii_alphanumeric() {
                letter
            } else {
                '-'
            }
        })
        .collect();
    let time: String = human::date(human::now_unix_ms())
        .chars()
        .take(19)
        .filter_map(|letter| match letter {
            ' ' => Some('T'),
            '-' | ':' => None,
            letter => Some(letter),
        })
        .collect();
    PathBuf::from(format!("permafrost-report-{host}-{time}.tar"))
}

/// Writes a new file with mode 0600; what was begun is removed if that fails.
fn write(path: &Path, files: &[(String, Vec<u8>)]) -> Result<(), Failure> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Failure::new(
                Code::Conflict,
                format!("{} is there already", path.display()),
            )
            .hint("name another file with --out"),
            _ => Failure::io("create", path, &error),
        })?;
    let written = pack(file, files);
    written.map_err(|error| {
        // The error is the news, not that a part of a file is left.
        let _ = std::fs::remove_file(path);
        Failure::io("write", path, &error)
    })
}

fn pack(file: std::fs::File, files: &[(String, Vec<u8>)]) -> io::Result<()> {
    let mut tar = tar::Builder::new(file);
    for (name, bytes) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(human::now_unix_ms() / 1_000);
        header.set_entry_type(tar::EntryType::Regular);
        tar.append_data(
            &mut header,
            format!("permafrost-report/{name}"),
            bytes.as_slice(),
        )?;
    }
    let mut file = tar.into_inner()?;
    file.flush()?;
    file.sync_all()
}
