//! An identity that is reloaded when its files change.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Mutex, MutexGuard, RwLock};
use permafrost_protocol::versions::VersionRange;
use rustls::pki_types::CertificateDer;

use super::deny::{Denial, DenyFiles, DenyList};
use super::expiry::warnings_due;
use super::files::{self, Stamp};
use super::register::{End, Open, Register, Tenure};
use super::statement::Signed;
use super::tls::{self, Current, Denied, Material};
use super::{Identity, IdentityError, Subject};

/// Shortest interval between two checks of the files, each of five `stat`s. A certificate is rotated days
/// before it expires, and the connections of a denied holder are ended within this time.
pub const RELOAD_INTERVAL: Duration = Duration::from_secs(3);

/// Longest interval between two comparisons of open connections with the clock.
const OVERSIGHT_INTERVAL: Duration = Duration::from_secs(1);

/// An [`Identity`] that is reloaded when its files change: new connections, also of endpoints that are open
/// already, use the new certificate, trust the new CAs and refuse denied certificates. Files that cannot be
/// used are reported once, and the previous ones stay in use. Cheap to clone; clones share all state.
///
/// Open connections that were [admitted](Self::admit) end when their peer's certificate has expired or is
/// denied, or its CA is no longer trusted. A thread checks this, and warns before the own certificate expires.
#[derive(Clone)]
pub struct ReloadingIdentity {
    shared: Arc<Shared>,
}

struct Shared {
    directory: PathBuf,
    interval: Duration,
    current: RwLock<Identity>,
    denied: Arc<Denied>,
    look: Mutex<Look>,
    register: Arc<Register>,
    /// Counter that grows with every change of the trusted certificates.
    changes: AtomicU64,
    /// Value of `changes` that open connections were last compared with.
    compared: AtomicU64,
    /// Number of warnings given about the end of this certificate.
    warned: AtomicUsize,
    /// True if another identity of this process warns about the same files.
    is_second: bool,
}

struct Look {
    at: Instant,
    /// Stamps of the files that were read last, whether or not they could be used.
    seen: Stamps,
    deny_files: DenyFiles,
    denials_seen: [Option<Stamp>; 2],
}

type Stamps = [Option<Stamp>; 3];

impl ReloadingIdentity {
    /// Loads the identity like [`Identity::load`], and reloads it when its files change.
    ///
    /// # Errors
    /// The same as for [`Identity::load`].
    pub fn load(directory: impl AsRef<Path>) -> Result<Self, IdentityError> {
        Self::load_every(directory, RELOAD_INTERVAL)
    }

    /// Loads the identity like [`Self::load`], with the given interval between checks.
    ///
    /// # Errors
    /// The same as for [`Identity::load`]; the system cannot start another thread.
    pub fn load_every(
        directory: impl AsRef<Path>,
        interval: Duration,
    ) -> Result<Self, IdentityError> {
        Self::load_as(directory.as_ref().to_owned(), interval, false)
    }

    /// Returns another identity over the same files, which ignores the lists that [nodes
    /// report](Self::report_denials).
    ///
    /// # Errors
    /// The same as for [`Self::load_every`].
    pub fn by_files_only(&self) -> Result<Self, IdentityError> {
        Self::load_as(self.shared.directory.clone(), self.shared.interval, true)
    }

    fn load_as(
        directory: PathBuf,
        interval: Duration,
        is_second: bool,
    ) -> Result<Self, IdentityError> {
        let seen = stamps(&directory);
        let deny_files = DenyFiles::new(&directory);
        let denials_seen = deny_stamps(&deny_files);
        let denied = Arc::new(Denied::new(deny_files.load()?));
        let current = RwLock::new(Identity::load_with(&directory, &denied)?);
        let look = Mutex::new(Look {
            at: Instant::now(),
            seen,
            deny_files,
            denials_seen,
        });
        let shared = Arc::new(Shared {
            directory,
            interval,
            current,
            denied,
            look,
            register: Arc::default(),
            changes: AtomicU64::new(0),
            compared: AtomicU64::new(0),
            warned: AtomicUsize::new(0),
            is_second,
        });
        let watched = Arc::downgrade(&shared);
        std::thread::Builder::new()
            .name("certificates".to_owned())
            .spawn(move || oversee(&watched))
            .map_err(files::io_error("start a thread for", &shared.directory))?;
        Ok(Self { shared })
    }

    /// Returns the current identity.
    pub fn current(&self) -> Identity {
        self.shared.current_identity()
    }

    /// Compares the files with those in use, and loads them if they changed. Returns true if changed files are
    /// used from here on.
    ///
    /// # Errors
    /// The changed files cannot be used; the previous identity stays in use.
    pub fn reload(&self) -> Result<bool, IdentityError> {
        let mut look = self.shared.look();
        self.shared.reload(&mut look)
    }

    /// Registers a connection whose peer showed `chain`. `end` is called when the certificate has expired or is
    /// denied, or its CA is no longer trusted. The connection is forgotten when the [`Tenure`] is dropped.
    ///
    /// # Errors
    /// The certificate is no longer valid at the time of the call: a handshake may have begun before a change.
    pub fn admit(
        &self,
        chain: &[CertificateDer<'_>],
        end: impl FnOnce(&str) + Send + 'static,
    ) -> Result<Tenure, IdentityError> {
        self.shared.admit(chain, Box::new(end))
    }

    /// Registers a QUIC connection like [`Self::admit`]; the connection is closed with `code` when its
    /// certificate is no longer valid.
    ///
    /// # Errors
    /// The same as for [`Self::admit`], and a peer that showed no certificate.
    pub fn admit_quic(
        &self,
        connection: &quinn::Connection,
        code: quinn::VarInt,
    ) -> Result<Tenure, IdentityError> {
        let chain = connection
            .peer_identity()
            .and_then(|identity| identity.downcast::<Vec<CertificateDer<'static>>>().ok())
            .ok_or(IdentityError::NoCertificate)?;
        let ended = connection.clone();
        self.admit(&chain, move |why| ended.close(code, why.as_bytes()))
    }

    /// Signs a statement that is stored where other programs can write.
    ///
    /// # Errors
    /// The key supports no known signature scheme.
    pub fn sign(&self, statement: &[u8]) -> Result<Signed, IdentityError> {
        self.shared.used().material.sign(statement)
    }

    /// Verifies a statement and returns its signer, whose certificate must be trusted and not denied now. The
    /// certificate may have expired since.
    ///
    /// # Errors
    /// The signature is of another statement, or its signer is not trusted.
    pub fn signer(&self, statement: &[u8], signed: &Signed) -> Result<Subject, IdentityError> {
        let material = self.shared.used().material;
        material.signer(statement, signed, SystemTime::now())
    }

    /// Adds the list in this file, which [`Self::deny`] writes.
    ///
    /// # Errors
    /// The list cannot be used.
    pub fn keep_denials_in(&self, path: PathBuf) -> Result<(), IdentityError> {
        {
            let mut look = self.shared.look();
            look.deny_files.keep(path);
            look.denials_seen = deny_stamps(&look.deny_files);
            let list = look.deny_files.load()?;
            self.shared.use_denials(list);
        }
        self.shared.compare_open();
        Ok(())
    }

    /// Returns the list of denied certificates.
    #[must_use]
    pub fn denied(&self) -> Arc<DenyList> {
        self.shared.denied.list()
    }

    /// Refuses certificates from now on, and ends their connections. Returns the number of new entries.
    ///
    /// # Errors
    /// The list cannot be written; it then stays unchanged.
    pub fn deny<'a>(
        &self,
        denials: impl IntoIterator<Item = &'a Denial>,
    ) -> Result<usize, IdentityError> {
        let known = self.denied();
        let new: Vec<&Denial> = denials
            .into_iter()
            .filter(|denial| !known.contains(denial))
            .collect();
        if new.is_empty() {
            return Ok(0);
        }
        self.rewrite(|list| {
            for denial in &new {
                list.insert((*denial).clone())?;
            }
            Ok(new.len())
        })
    }

    /// Refuses the certificates that a node of the cluster reports as denied, and replaces those that it
    /// reported before. They are kept in memory only. The reports of a node are ignored once the own files deny
    /// that node by name. Returns true if the list used by handshakes has changed.
    pub fn report_denials(&self, node: &str, list: DenyList) -> bool {
        let changed = self.shared.denied.report(node, list);
        if changed {
            self.shared.changes.fetch_add(1, Ordering::AcqRel);
            self.shared.compare_open();
        }
        changed
    }

    /// Takes back denials that [`Self::deny`] wrote. Returns their number.
    ///
    /// # Errors
    /// The list cannot be written, or another file contains one of the denials too.
    pub fn undeny(&self, denials: &[Denial]) -> Result<usize, IdentityError> {
        let taken = self.rewrite(|list| {
            let taken = denials.iter().filter(|denial| list.remove(denial));
            Ok(taken.count())
        })?;
        let denied = self.denied();
        match denials.iter().find(|denial| denied.contains(denial)) {
            None => Ok(taken),
            Some(denial) => Err(IdentityError::DeniedBeside {
                denial: denial.to_string(),
                directory: self.shared.directory.clone(),
            }),
        }
    }

    fn rewrite(
        &self,
        change: impl FnOnce(&mut DenyList) -> Result<usize, IdentityError>,
    ) -> Result<usize, IdentityError> {
        let changed = {
            let mut look = self.shared.look();
            let path = look.deny_files.written().to_owned();
            let mut list = DenyList::load(&path)?;
            let changed = change(&mut list)?;
            list.store(&path)?;
            look.denials_seen = deny_stamps(&look.deny_files);
            let all = look.deny_files.load()?;
            self.shared.use_denials(all);
            changed
        };
        self.shared.compare_open();
        Ok(changed)
    }

    /// Returns a configuration like [`Identity::quic_server_config`] that follows changes of the files, for an end
    /// that speaks these versions of the wire.
    ///
    /// # Errors
    /// The same as for [`Identity::quic_server_config`].
    pub fn quic_server_config(
        &self,
        spoken: VersionRange,
    ) -> Result<quinn::ServerConfig, IdentityError> {
        tls::quic_server_config(self.shared.clone(), spoken)
    }

    /// Returns the configuration of an HTTPS server that follows changes of the files: TLS 1.2 and 1.3. A
    /// client need not show a certificate, but a certificate that is shown is verified in full.
    /// [`super::Peer::of_chain`] identifies the client.
    ///
    /// # Errors
    /// TLS cannot be set up; this does not happen with loaded certificates.
    pub fn https_server_config(&self) -> Result<rustls::ServerConfig, IdentityError> {
        tls::https_server_config(self.shared.clone())
    }

    /// Returns the configuration of a server of bulk streams over TLS 1.3 that follows changes of the files; client
    /// certificates are required.
    ///
    /// # Errors
    /// TLS cannot be set up; this does not happen with loaded certificates.
    pub fn bulk_server_config(&self) -> Result<rustls::ServerConfig, IdentityError> {
        tls::bulk_server_config(self.shared.clone())
    }

    /// Returns the QUIC client configuration of the current identity. Call it anew for each connection.
    pub fn quic_client_config(&self) -> quinn::ClientConfig {
        self.current().quic_client_config()
    }

    /// Connects with the current identity, like [`Identity::connect`].
    ///
    /// # Errors
    /// The same as for [`Identity::connect`].
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

/// Checks the files, the clock and the open connections until the identity is dropped.
fn oversee(watched: &Weak<Shared>) {
    while let Some(shared) = watched.upgrade() {
        let pause = shared.interval.min(OVERSIGHT_INTERVAL);
        shared.current_identity();
        shared.compare_open();
        shared.warn_of_expiry(SystemTime::now());
        drop(shared);
        std::thread::sleep(pause.max(Duration::from_millis(20)));
    }
}

impl Shared {
    // A poisoned lock may be used: none of the locks guards state that a panic could leave inconsistent.
    fn look(&self) -> MutexGuard<'_, Look> {
        self.look.lock()
    }

    fn used(&self) -> Identity {
        self.current.read().clone()
    }

    fn current_identity(&self) -> Identity {
        // If another thread is checking the files, the current material is used.
        if let Some(mut look) = self.look.try_lock()
            && look.at.elapsed() >= self.interval
            && let Err(error) = self.reload(&mut look)
        {
            tracing::warn!(
                event = "credentials-not-reloaded",
                "keep what was read before, the new files cannot be used: {error}"
            );
        }
        self.used()
    }

    fn reload(&self, look: &mut Look) -> Result<bool, IdentityError> {
        look.at = Instant::now();
        // The denials come first: an error in the certificate must not let a denied peer in.
        let denials = self.reload_denials(look);
        let identity = self.reload_identity(look);
        Ok(denials? | identity?)
    }

    fn reload_denials(&self, look: &mut Look) -> Result<bool, IdentityError> {
        let stamps = deny_stamps(&look.deny_files);
        if stamps == look.denials_seen {
            return Ok(false);
        }
        look.denials_seen = stamps;
        let list = look.deny_files.load()?;
        tracing::info!(
            event = "denials-reloaded",
            entries = list.len(),
            "use the new list of denied certificates"
        );
        self.use_denials(list);
        Ok(true)
    }

    fn use_denials(&self, list: DenyList) {
        self.denied.replace(list);
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    fn reload_identity(&self, look: &mut Look) -> Result<bool, IdentityError> {
        // Before they are read: a change in between shows at the next look.
        let stamps = stamps(&self.directory);
        if stamps == look.seen {
            return Ok(false);
        }
        look.seen = stamps;
        let identity = Identity::load_with(&self.directory, &self.denied)?;
        tracing::info!(
            event = "certificate-reloaded",
            "use the new certificate of {} in {}",
            identity.name(),
            self.directory.display()
        );
        *self.current.write() = identity;
        self.warned.store(0, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::AcqRel);
        Ok(true)
    }

    fn admit(&self, chain: &[CertificateDer<'_>], end: End) -> Result<Tenure, IdentityError> {
        let chain: Vec<_> = chain
            .iter()
            .cloned()
            .map(CertificateDer::into_owned)
            .collect();
        let own = chain.first().ok_or(IdentityError::NoCertificate)?;
        let subject = Subject::of(own)?;
        let peer = (subject.clone(), chain.clone());
        // Registered before it is compared: a change in between is seen here, a later one by the thread.
        let tenure = self.register.add(Open {
            subject,
            chain,
            end,
        });
        let (subject, chain) = &peer;
        let (material, denied) = (self.used().material, self.denied.list());
        match verdict(subject, chain, &material, &denied, SystemTime::now(), true) {
            None => Ok(tenure),
            Some(reason) => Err(IdentityError::Ended { reason }),
        }
    }

    /// Ends connections whose peers' certificates are no longer valid.
    fn compare_open(&self) {
        let changes = self.changes.load(Ordering::Acquire);
        let changed = self.compared.swap(changes, Ordering::AcqRel) != changes;
        let (material, denied, now) = (self.used().material, self.denied.list(), SystemTime::now());
        self.register.end_where(|open| {
            verdict(&open.subject, &open.chain, &material, &denied, now, changed)
        });
    }

    fn warn_of_expiry(&self, now: SystemTime) {
        if self.is_second {
            return;
        }
        let identity = self.used();
        let due = warnings_due(identity.subject(), now);
        if self.warned.swap(due, Ordering::Relaxed) >= due {
            return;
        }
        let directory = self.directory.display();
        match identity.not_after().duration_since(now) {
            Ok(left) => tracing::warn!(
                event = "certificate-expires-soon",
                hours_left = left.as_secs() / 3_600,
                "the certificate in {directory} is about to expire: issue a new one (permafrost pki rotate), which is used without a restart"
            ),
            Err(_) => tracing::error!(
                event = "certificate-expired",
                "the certificate in {directory} has expired, and everybody refuses it: issue a new one (permafrost pki rotate), which is used without a restart"
            ),
        }
    }
}

/// Returns the reason for which a connection must end, if there is one. Checks its CA and the list only where
/// they may have `changed`.
fn verdict(
    subject: &Subject,
    chain: &[CertificateDer<'_>],
    material: &Material,
    denied: &DenyList,
    now: SystemTime,
    changed: bool,
) -> Option<String> {
    if now >= subject.not_after {
        return Some("its certificate has expired".to_owned());
    }
    if !changed {
        return None;
    }
    if let Some(denial) = denied.refuses(subject) {
        return Some(format!("its certificate is denied ({denial})"));
    }
    let refused = material.verify(chain, now).err()?;
    Some(format!("its certificate is trusted no longer: {refused}"))
}

impl Current for Shared {
    fn current(self: Arc<Self>) -> Arc<Material> {
        self.current_identity().material
    }
}

fn stamps(directory: &Path) -> Stamps {
    files::stamps(directory, [files::CA, files::CERTIFICATE, files::KEY])
}

fn deny_stamps(deny_files: &DenyFiles) -> [Option<Stamp>; 2] {
    deny_files.paths().map(|path| path.and_then(files::stamp))
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
