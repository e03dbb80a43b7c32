//! Reads the options again at SIGHUP, and applies those that a running daemon can take.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Arg, CommandFactory as _};
use permafrost_agent::host::arguments::{LogFilter, in_full};
use permafrost_audit::{AuditedRequest, Who};
use permafrost_protocol::control::{self, ErrorCode, ReportedError};
use permafrost_server::daemon::Daemon;

use super::{
    Environment, Settings, SettingsError, configurable, is_reloadable, is_secret, name_of,
};
use crate::arguments::{Args, LimitArgs};

/// Reason why the options are not applied.
#[derive(Debug, thiserror::Error)]
enum ReloadError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("{}", in_full(.0.as_ref()))]
    Config(anyhow::Error),
    /// Cure: correct `log-level` in the configuration file: `permafrostd --check-config` names the place.
    #[error("log-level: {0}")]
    Log(String),
    /// Cure: put the configuration file back; the daemon goes on with what it has.
    #[error("{}: the file is gone", .0.display())]
    FileGone(PathBuf),
}

impl ReportedError for ReloadError {
    fn code(&self) -> ErrorCode {
        ErrorCode::Invalid
    }
}

/// Options of a running daemon.
pub(crate) struct Reloading {
    arguments: Vec<OsString>,
    environment: Environment,
    log: LogFilter,
    /// Options that the daemon was started with.
    started: Settings,
    /// Options whose reloadable part applies now.
    applied: Settings,
}

impl Reloading {
    /// Makes the state of a daemon that was started with `settings`, which were read from `arguments` and
    /// `environment`.
    pub(crate) fn new(
        arguments: Vec<OsString>,
        environment: Environment,
        settings: Settings,
        log: LogFilter,
    ) -> Self {
        Self {
            arguments,
            environment,
            log,
            applied: settings.clone(),
            started: settings,
        }
    }

    /// Opens the audit log anew, reads the options and the certificates again, and applies what can be applied. An
    /// error leaves everything as it was. The audit log gets a line.
    pub(crate) fn reload(&mut self, daemon: &Daemon) {
        daemon.audit().reopen();
        let outcome = self.apply(daemon);
        let (on, outcome) = match outcome {
            Ok(changed) => (changed.join(", "), Ok(())),
            Err(error) => {
                tracing::error!(
                    event = "configuration-refused",
                    "SIGHUP: the configuration stays as it was: {error}"
                );
                (String::new(), Err(control::Error::from(error)))
            }
        };
        let event = AuditedRequest::change("reload", on);
        let outcome = outcome.as_ref().copied();
        daemon
            .audit()
            .record(&Who::signal("SIGHUP"), &event, outcome);
        match daemon.reload_identity() {
            Ok(true) => tracing::info!(
                event = "certificates-reloaded",
                "SIGHUP: the certificates were read again"
            ),
            Ok(false) => {}
            Err(error) => {
                tracing::error!(
                    event = "certificates-not-reloaded",
                    "SIGHUP: the certificates stay as they were: {}",
                    in_full(&error)
                );
            }
        }
    }

    /// Returns the names of the options whose changes were applied.
    fn apply(&mut self, daemon: &Daemon) -> Result<Vec<String>, ReloadError> {
        let new = Settings::read(&self.arguments, &self.environment)?;
        // It may be about to be replaced; without it all limits would be the defaults.
        if let (Some(file), None) = (self.applied.file(), new.file()) {
            return Err(ReloadError::FileGone(file.to_owned()));
        }
        let args = new.args()?;
        let filter = args.limits.log_level.clone();
        let config = args.config().map_err(ReloadError::Config)?;
        let command = Args::command();
        // Without a restart a node neither joins a cluster nor leaves it.
        let takes_repair = daemon.is_in_cluster() && config.cluster.is_some();
        let (mut changed, mut deferred) = (Vec::new(), Vec::new());
        for arg in configurable(&command) {
            let is_of_repair = LimitArgs::OF_REPAIR.contains(&name_of(arg));
            let reloadable = is_reloadable(&command, arg) && (takes_repair || !is_of_repair);
            let before = if reloadable {
                &self.applied
            } else {
                &self.started
            };
            let (from, to) = (before.values(arg), new.values(arg));
            if from == to {
                continue;
            }
            let change = in_words(arg, &from, &to);
            if reloadable {
                changed.push((name_of(arg).to_owned(), change));
            } else {
                deferred.push(change);
            }
        }
        self.log.set(&filter).map_err(ReloadError::Log)?;
        daemon.apply_limits(&config);
        self.applied = new;
        for (_, change) in &changed {
            tracing::info!(event = "configuration-applied", "SIGHUP: {change}");
        }
        for change in &deferred {
            tracing::warn!(
                event = "configuration-needs-restart",
                "SIGHUP: {change}: needs a restart"
            );
        }
        if changed.is_empty() && deferred.is_empty() {
            tracing::info!(
                event = "configuration-unchanged",
                "SIGHUP: no option has changed"
            );
        }
        Ok(changed.into_iter().map(|(name, _)| name).collect())
    }
}

/// Returns a change of an option as text.
fn in_words(arg: &Arg, from: &[String], to: &[String]) -> String {
    let mut text = name_of(arg).to_owned();
    if is_secret(arg) {
        text.push_str(" has changed");
        return text;
    }
    let list = |values: &[String]| match values {
        [] => "nothing".to_owned(),
        values => values.join(", "),
    };
    // Writing into a String does not fail.
    let _ = write!(text, " was {}, is {}", list(from), list(to));
    text
}
