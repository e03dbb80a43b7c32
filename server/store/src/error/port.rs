//! Errors of what stands behind a port of the store: the store knows their codes and hints, and not their types.

use std::error::Error;
use std::fmt;

use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Error of the implementation of a port.
#[derive(Debug)]
pub struct PortError(Box<dyn ReportedError + Send + Sync>);

impl PortError {
    /// Wraps an error.
    pub fn new(error: impl ReportedError + Send + Sync + 'static) -> Self {
        Self(Box::new(error))
    }
}

impl fmt::Display for PortError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for PortError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

impl ReportedError for PortError {
    fn code(&self) -> ErrorCode {
        self.0.code()
    }

    fn hint(&self) -> &str {
        self.0.hint()
    }

    fn message(&self) -> String {
        self.0.message()
    }
}
