//! Ways by which CRIU sends the pages of a dump.

use serde::Serialize;

/// Way by which CRIU sends the pages of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Way {
    /// In its page-server protocol, straight to `permafrostd`.
    PageServer,
    /// With all other images through pipes (`--stream`).
    Stream,
}
