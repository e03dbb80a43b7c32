//! Context of every command: the daemon's socket, and the output to the user.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use permafrost_protocol::control::request;
use permafrost_transport::control::Connection;
use serde::Serialize;

use crate::failure::{Code, Failure};
use crate::visible::visible;

/// Values of the global options.
#[derive(Clone, Debug)]
pub struct Context {
    /// Control socket, absolute: CRIU and its scripts work in other directories.
    pub socket: PathBuf,
    /// True to print results and failures as JSON.
    pub json: bool,
    /// True to print neither progress nor remarks.
    pub quiet: bool,
}

impl Context {
    /// Returns the context for a control socket, which may be relative to the working directory.
    pub fn new(socket: &Path, json: bool, quiet: bool) -> Self {
        Self {
            socket: std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned()),
            json,
            quiet,
        }
    }

    /// Connects to the daemon.
    ///
    /// # Errors
    /// The daemon cannot be reached.
    pub fn connect(&self) -> Result<Connection, Failure> {
        Ok(Connection::connect(&self.socket)?)
    }

    /// Reports the duration of an operation to the daemon, which uses it for its predictions. Errors are
    /// ignored, and the reply is not awaited: the operation is complete in either case.
    pub fn tell_took(&self, took: &request::Took) {
        if let Ok(mut connection) = self.connect() {
            let told = connection.begin(took.clone(), None);
            if let Err(error) = told {
                tracing::debug!(%error, "permafrostd is not told how long it took");
            }
        }
    }

    /// Prints the result: JSON, or the text that `human` returns.
    pub fn print<T: Serialize>(
        &self,
        value: &T,
        human: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        if !self.json {
            return self.write_text(&human(value));
        }
        let text = serde_json::to_string_pretty(value)
            .map_err(|error| Failure::new(Code::Internal, format!("write JSON: {error}")))?;
        self.write(text.as_bytes())
    }

    /// Writes text to standard output; control characters in texts of others are escaped.
    pub fn write_text(&self, text: &str) -> Result<(), Failure> {
        self.write(visible(text).as_bytes())
    }

    /// Writes a result as it is, with a newline at its end.
    pub fn write(&self, text: &[u8]) -> Result<(), Failure> {
        let end: &[u8] = match text.last() {
            None | Some(b'\n') => b"",
            Some(_) => b"\n",
        };
        let mut stdout = io::stdout().lock();
        match stdout
            .write_all(text)
            .and_then(|()| stdout.write_all(end))
            .and_then(|()| stdout.flush())
        {
            Ok(()) => Ok(()),
            // `permafrost ls | head`: the reader has had enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                Err(Failure::new(Code::Unread, String::new()))
            }
            Err(error) => Err(Failure::io("write", Path::new("standard output"), &error)),
        }
    }

    /// Prints a remark beside the result, on standard error.
    pub fn remark(&self, text: &str) {
        if !self.json && !self.quiet {
            let mut line = String::new();
            // Writing to a String cannot fail; a closed standard error is ignored.
            let _ = writeln!(line, "permafrost: {}", visible(text));
            let _ = io::stderr().write_all(line.as_bytes());
        }
    }
}
