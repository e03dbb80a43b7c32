//! Identities of nodes, agents and persons, and the CAs they trust: certificates of a private CA.
//!
//! [`Authority`] issues certificates (`permafrost pki`), [`Identity`] and [`ReloadingIdentity`] use them, and
//! [`Peer`] is the remote end of a connection. Each side shows a certificate and verifies the other's in full:
//! its chain up to the CA, its dates, and, of a node that one connects to, its name. [`Role::may`] decides
//! which actions a peer may do. docs/security.md describes the whole.

#![forbid(unsafe_code)]

mod authority;
mod deny;
mod error;
mod expiry;
mod files;
mod peer;
mod register;
mod reload;
mod role;
mod scope;
mod statement;
mod status;
mod stream;
mod subject;
mod tls;
mod token;

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub use authority::{
    Authority, CertificateOrder, DEFAULT_DAYS, Issued, MAX_DAYS, Trusted, trusted,
};
pub use deny::{DENIED, Denial, DenyList, MAX_DENIALS};
pub use error::IdentityError;
pub use peer::Peer;
pub use register::Tenure;
pub use reload::{RELOAD_INTERVAL, ReloadingIdentity};
pub use role::{ALL_NAMESPACES, Action, MAX_NAMESPACE_BYTES, MAX_NAMESPACES, Namespaces, Role};
pub use scope::{NoScope, Scope, Scopes};
pub use statement::Signed;
pub use stream::{CriuTls, TlsError, TlsStream, begins_with_tls, looks_like_tls};
pub use subject::{DOMAIN, MAX_NAME_BYTES, Subject, server_name};
pub use token::{NoHash, Token, TokenHash};

use deny::DenyFiles;
use permafrost_protocol::versions::{self, Interface, VersionRange};
use tls::{Current, Denied, Material};

/// Number of attempts to read files that change while they are read.
const ATTEMPTS: usize = 5;

/// A certificate with its key, and the trusted CAs: the contents of a directory at one time. Cheap to clone.
#[derive(Clone)]
pub struct Identity {
    material: Arc<Material>,
}

impl Identity {
    /// Reads `ca.pem`, `cert.pem` and `key.pem` in `directory`, as `permafrost pki issue` writes them, and the list of
    /// denied certificates beside them, if there is one.
    ///
    /// # Errors
    /// A file is missing or unreadable; the key belongs to another user, or others may read it; key and
    /// certificate do not match; the certificate has expired, is not yet valid, is not of this CA, or is not
    /// one of Permafrost's.
    pub fn load(directory: impl AsRef<Path>) -> Result<Self, IdentityError> {
        let directory = directory.as_ref();
        let denied = DenyFiles::new(directory).load()?;
        Self::load_with(directory, &Arc::new(Denied::new(denied)))
    }

    /// Loads an identity like [`Self::load`], and refuses peers that are in `denied` at the time of a
    /// handshake.
    fn load_with(directory: &Path, denied: &Arc<Denied>) -> Result<Self, IdentityError> {
        let names = [files::CA, files::CERTIFICATE, files::KEY];
        let mut before = files::stamps(directory, names);
        for _ in 0..ATTEMPTS {
            let loaded = Material::load(directory, denied);
            let after = files::stamps(directory, names);
            if loaded.is_ok() || before == after {
                return loaded.map(Self::from);
            }
            // A file was replaced while the files were read; the writer needs a moment to finish.
            before = after;
            std::thread::sleep(Duration::from_millis(20));
        }
        Material::load(directory, denied).map(Self::from)
    }

    /// Returns the key of stateless resets, which stays the same as long as the private key.
    pub fn reset_key(&self) -> [u8; 32] {
        self.material.reset_key
    }

    /// Returns the name of the certificate's holder.
    pub fn name(&self) -> &str {
        &self.material.subject.name
    }

    /// Returns the role of the certificate's holder.
    pub fn role(&self) -> Role {
        self.material.subject.role
    }

    /// Returns the namespaces that the certificate's holder may access.
    pub fn namespaces(&self) -> &Namespaces {
        &self.material.subject.namespaces
    }

    /// Returns the end of the certificate's validity.
    pub fn not_after(&self) -> SystemTime {
        self.material.subject.not_after
    }

    /// Returns the subject of the certificate.
    pub fn subject(&self) -> &Subject {
        &self.material.subject
    }

    /// Returns the configuration of a listening QUIC endpoint: TLS 1.3, Permafrost's ALPN, client certificates
    /// required.
    ///
    /// # Errors
    /// TLS cannot be set up; this does not happen with loaded certificates.
    pub fn quic_server_config(&self) -> Result<quinn::ServerConfig, IdentityError> {
        let spoken = versions::own().of(Interface::Wire);
        tls::quic_server_config(self.material.clone(), spoken)
    }

    /// Returns the configuration of QUIC connections to nodes, which show this identity's certificate. Connect
    /// with [`server_name`] of the node, or with [`Identity::connect`], so that the node's certificate is
    /// compared with the name.
    pub fn quic_client_config(&self) -> quinn::ClientConfig {
        self.material.quic_client.clone()
    }

    /// Returns a configuration like [`Self::quic_client_config`] for an end that speaks these versions of the wire.
    ///
    /// # Errors
    /// TLS cannot be set up; this does not happen with loaded certificates.
    pub fn quic_client_config_speaking(
        &self,
        spoken: VersionRange,
    ) -> Result<quinn::ClientConfig, IdentityError> {
        self.material.quic_client_speaking(spoken)
    }

    /// Returns the configuration of HTTP over TLS to a node: shows this identity's certificate, and compares
    /// the node's with the host of the URL.
    ///
    /// # Errors
    /// TLS cannot be set up; this does not happen with loaded certificates.
    pub fn https_client_config(&self) -> Result<rustls::ClientConfig, IdentityError> {
        self.material.https_client()
    }

    /// Returns the configuration of a bulk stream to a node over TLS 1.3: shows this identity's certificate, and
    /// compares the node's with the [`server_name`] that is connected to.
    ///
    /// # Errors
    /// TLS cannot be set up; this does not happen with loaded certificates.
    pub fn bulk_client_config(&self) -> Result<rustls::ClientConfig, IdentityError> {
        self.material.bulk_client()
    }

    /// Begins a connection to node `name` at `address`.
    ///
    /// Once the connection is established, this side has verified the node. Whether the node accepts this side
    /// shows with its first reply: in TLS 1.3 the client completes the handshake before the server has seen its
    /// certificate.
    ///
    /// # Errors
    /// The endpoint is closed, or the address or the name is invalid.
    pub fn connect(
        &self,
        endpoint: &quinn::Endpoint,
        address: SocketAddr,
        name: &str,
    ) -> Result<quinn::Connecting, quinn::ConnectError> {
        endpoint.connect_with(self.quic_client_config(), address, &server_name(name))
    }

    pub(crate) fn source(&self) -> Arc<dyn Current> {
        self.material.clone()
    }
}

/// Reads a secret: a file of this user or root that no other user may read.
///
/// # Errors
/// The file cannot be read; [`IdentityError::ReadableKey`] or [`IdentityError::ForeignKey`].
pub fn read_private(path: &Path) -> Result<Vec<u8>, IdentityError> {
    files::read_key(path)
}

/// Returns the configuration of HTTP over TLS without a client certificate: trusts the CAs in the file `ca`,
/// and compares the node's certificate with the host of the URL.
///
/// # Errors
/// The file is missing, or holds no certificates.
pub fn https_client_trusting(ca: &Path) -> Result<rustls::ClientConfig, IdentityError> {
    tls::https_client_trusting(ca)
}

impl From<Material> for Identity {
    fn from(material: Material) -> Self {
        Self {
            material: Arc::new(material),
        }
    }
}

impl fmt::Debug for Identity {
    /// Formats the identity without its key.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_tuple("Identity")
            .field(&self.material.subject)
            .finish()
    }
}
