//! An identity that follows its files.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::files::{self, Stamp};
use super::tls::{self, Current, Material};
use super::{Identity, IdentityError};

/// How often the files are looked at, at most: three `stat`s per interval, and only while connections are
/// made. A certificate is rotated days before it is over, so seconds do not matter.
pub const RELOAD_INTERVAL: Duration = Duration::from_secs(3);

/// An [`Identity`] that is read again when its files change: new connections, of endpoints that are open
/// already, use the new certificate and trust the new CAs; old connections go on. Files that cannot be used are
/// reported once, and the identity before stays. Cheap to clone; clones share all.
///
/// There is no thread: whoever makes or accepts a connection looks at the files first if the last look is
/// longer ago than the interval.
#[derive(Clone)]
pub struct ReloadingIdentity {
    shared: Arc<Shared>,
}

struct Shared {
    directory: PathBuf,
    interval: Duration,
    current: RwLock<Identity>,
    look: Mutex<Look>,
}

struct Look {
    at: Instant,
    /// The files that were read last, whether or not they could be used.
    seen: Stamps,
}

type Stamps = [Option<Stamp>; 3];

impl ReloadingIdentity {
    /// As [`Identity::load`].
    ///
    /// # Errors
    /// As [`Identity::load`].
    pub fn load(directory: impl AsRef<Path>) -> Result<Self, IdentityError> {
        Self::load_every(directory, RELOAD_INTERVAL)
    }

    /// With an interval of one's own.
    ///
    /// # Errors
    /// As [`Identity::load`].
    pub fn load_every(
        directory: impl AsRef<Path>,
        interval: Duration,
    ) -> Result<Self, IdentityError> {
        let directory = directory.as_ref().to_owned();
        let seen = stamps(&directory);
        let current = RwLock::new(Identity::load(&directory)?);
        let look = Mutex::new(Look {
            at: Instant::now(),
            seen,
        });
        Ok(Self {
            shared: Arc::new(Shared {
                directory,
                interval,
                current,
                look,
            }),
        })
    }

    /// The identity of the moment.
    pub fn current(&self) -> Identity {
        self.shared.current_identity()
    }

    /// Looks at the files now. True if they changed and are used from here on.
    ///
    /// # Errors
    /// They changed and cannot be used: the identity before stays.
    pub fn reload(&self) -> Result<bool, IdentityError> {
        let mut look = self.shared.look();
        self.shared.reload(&mut look)
    }

    /// As [`Identity::quic_server_config`], following the files.
    ///
    /// # Errors
    /// As [`Identity::quic_server_config`].
    pub fn quic_server_config(&self) -> Result<quinn::ServerConfig, IdentityError> {
        tls::quic_server_config(self.shared.clone())
    }

    /// For HTTP over TLS, following the files: TLS 1.2 and 1.3. A client need show no certificate, but one that it shows
    /// is verified in full. [`super::Peer::of_chain`] says who it is.
    ///
    /// # Errors
    /// TLS cannot be set up; not with certificates that were loaded.
    pub fn https_server_config(&self) -> Result<rustls::ServerConfig, IdentityError> {
        tls::https_server_config(self.shared.clone())
    }

    /// As [`Identity::quic_client_config`], of this moment: ask anew for each connection.
    pub fn quic_client_config(&self) -> quinn::ClientConfig {
        self.current().quic_client_config()
    }

    /// As [`Identity::connect`].
    ///
    /// # Errors
    /// As [`Identity::connect`].
    pub fn connect(
        &self,
        endpoint: &quinn::Endpoint,
        address: SocketAddr,
        name: &str,
    ) -> Result<quinn::Connecting, quinn::ConnectError> {
        self.current().connect(endpoint, address, name)
    }

    pub(crate) fn source(&self) -> Arc<dyn Current> {
        self.shared.clone()
    }
}

impl Shared {
    // Neither lock guards anything that a panic could leave half done.
    fn look(&self) -> MutexGuard<'_, Look> {
        self.look.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current_identity(&self) -> Identity {
        // Whoever finds another one looking takes what there is.
        if let Ok(mut look) = self.look.try_lock()
            && look.at.elapsed() >= self.interval
            && let Err(error) = self.reload(&mut look)
        {
            tracing::warn!("keep the certificate before, the new one cannot be used: {error}");
        }
        self.current
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn reload(&self, look: &mut Look) -> Result<bool, IdentityError> {
        look.at = Instant::now();
        // Before they are read: a change in between shows at the next look.
        let stamps = stamps(&self.directory);
        if stamps == look.seen {
            return Ok(false);
        }
        look.seen = stamps;
        let identity = Identity::load(&self.directory)?;
        tracing::info!(
            "use the new certificate of {} in {}",
            identity.name(),
            self.directory.display()
        );
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = identity;
        Ok(true)
    }
}

impl Current for Shared {
    fn current(self: Arc<Self>) -> Arc<Material> {
        self.current_identity().material
    }
}

fn stamps(directory: &Path) -> Stamps {
    files::stamps(directory, [files::CA, files::CERTIFICATE, files::KEY])
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ReloadingIdentity")
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ReloadingIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(formatter)
    }
}
