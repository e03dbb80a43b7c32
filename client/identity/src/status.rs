//! A daemon's own certificate, as its status and its metrics show it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use permafrost_protocol::control::CertificateStatus;

use super::ReloadingIdentity;

impl ReloadingIdentity {
    /// Returns the certificate that is currently in use.
    #[must_use]
    pub fn status(&self) -> CertificateStatus {
        let identity = self.current();
        let subject = identity.subject();
        let expires = subject.not_after.duration_since(UNIX_EPOCH);
        CertificateStatus {
            name: subject.name.clone(),
            role: subject.role.to_string(),
            serial: subject.serial.clone(),
            expires_unix_ms: u64::try_from(expires.unwrap_or_default().as_millis())
                .unwrap_or(u64::MAX),
            denied: self.denied().len() as u64,
        }
    }

    /// Returns the time until the certificate expires; zero afterwards.
    #[must_use]
    pub fn expires_in(&self) -> Duration {
        let left = self.current().not_after().duration_since(SystemTime::now());
        left.unwrap_or_default()
    }
}
