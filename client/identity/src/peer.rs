//! The other side of a connection.

use std::time::SystemTime;

use rustls::pki_types::CertificateDer;

use super::{Action, IdentityError, Namespaces, Role, Subject};

/// Remote end of a connection, as identified by the certificate that the handshake verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    subject: Subject,
}

impl Peer {
    /// Returns the peer of a connection made with this crate's configurations, which verify the certificate.
    ///
    /// # Errors
    /// The peer showed no certificate, or the certificate is of the CA but does not state name and role.
    pub fn of(connection: &quinn::Connection) -> Result<Self, IdentityError> {
        let chain = connection
            .peer_identity()
            .and_then(|identity| identity.downcast::<Vec<CertificateDer<'static>>>().ok())
            .ok_or(IdentityError::NoCertificate)?;
        Self::of_verified(&chain)
    }

    /// Returns the peer of a TLS connection made with this crate's configurations, from the chain that the
    /// handshake verified. `None` if the peer showed none, which only
    /// [`super::ReloadingIdentity::https_server_config`] allows.
    ///
    /// # Errors
    /// The certificate is of the CA but does not state name and role.
    pub fn of_chain(
        chain: Option<&[CertificateDer<'static>]>,
    ) -> Result<Option<Self>, IdentityError> {
        chain.map(|chain| Self::of_verified(chain)).transpose()
    }

    /// Returns the peer for a chain that a handshake verified.
    pub(crate) fn of_verified(chain: &[CertificateDer<'_>]) -> Result<Self, IdentityError> {
        let own = chain.first().ok_or(IdentityError::NoCertificate)?;
        Ok(Self {
            subject: Subject::of(own)?,
        })
    }

    /// Returns the name of the peer, which is unique within its role.
    pub fn name(&self) -> &str {
        &self.subject.name
    }

    /// Returns the role of the peer.
    pub fn role(&self) -> Role {
        self.subject.role
    }

    /// Returns the serial number of the peer's certificate.
    pub fn serial(&self) -> &str {
        &self.subject.serial
    }

    /// Returns the namespaces that the peer may access.
    pub fn namespaces(&self) -> &Namespaces {
        &self.subject.namespaces
    }

    /// Returns the end of the certificate's validity. A connection that was
    /// [admitted](super::ReloadingIdentity::admit) ends then.
    pub fn not_after(&self) -> SystemTime {
        self.subject.not_after
    }

    /// Returns true if the peer's certificate permits `action`.
    pub fn may(&self, action: Action<'_>) -> bool {
        self.subject.may(action)
    }
}
