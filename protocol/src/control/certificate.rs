//! Messages about certificates: a daemon's own, and those that it refuses.

use prost::Message;
use serde::Serialize;

/// The certificate that a daemon shows.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct CertificateStatus {
    /// Name in it.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Role in it: `node`, `agent`.
    #[prost(string, tag = "2")]
    pub role: String,
    /// Serial number, hex.
    #[prost(string, tag = "3")]
    pub serial: String,
    /// End of its validity, milliseconds since the Unix epoch.
    #[prost(uint64, tag = "4")]
    pub expires_unix_ms: u64,
    /// Entries of the list of denied certificates.
    #[prost(uint64, tag = "5")]
    pub denied: u64,
}

/// The list of denied certificates.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Denials {
    /// `serial HEX`, or `name ROLE NAME`.
    #[prost(string, repeated, tag = "1")]
    pub entries: Vec<String>,
    /// Entries that the request has added or taken back.
    #[prost(uint64, tag = "2")]
    pub changed: u64,
}
