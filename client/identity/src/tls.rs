//! Configurations of rustls and quinn for the certificates of this crate.
//!
//! All verification is WebPKI's. There is no session resumption: connections live long, and each new one must
//! use the current certificates, dates and CAs.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::RwLock;
use permafrost_protocol::versions::{self, Interface, VersionRange};
use permafrost_protocol::wire;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, InconsistentKeys, RootCertStore,
    SignatureScheme, SupportedProtocolVersion,
};
use sha2::{Digest as _, Sha256};

use super::deny::DenyList;
use super::files::{self, CA, CERTIFICATE, KEY};
use super::{IdentityError, Subject};

/// ALPN of HTTP/1.1 (RFC 7301, section 6).
const HTTP_1_1: &[u8] = b"http/1.1";

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// List of denied certificates that handshakes use.
#[derive(Debug, Default)]
pub(crate) struct Denied(RwLock<Lists>);

#[derive(Debug, Default)]
struct Lists {
    /// Denials in the own files.
    own: DenyList,
    /// Denials that nodes reported, by node.
    reported: BTreeMap<String, DenyList>,
    /// Union of all denials.
    all: Arc<DenyList>,
}

impl Lists {
    /// Computes the union. Reports of nodes that the own files deny are ignored.
    fn combine(&mut self) {
        let mut all = self.own.clone();
        for (node, list) in &self.reported {
            if !self.own.denies_node(node) {
                all.merge(list);
            }
        }
        self.all = Arc::new(all);
    }
}

impl Denied {
    pub(crate) fn new(list: DenyList) -> Self {
        let denied = Self::default();
        denied.replace(list);
        denied
    }

    pub(crate) fn replace(&self, list: DenyList) {
        let mut lists = self.0.write();
        lists.own = list;
        lists.combine();
    }

    /// Replaces the denials that `node` has reported. Returns true if that changes the union.
    pub(crate) fn report(&self, node: &str, list: DenyList) -> bool {
        let mut lists = self.0.write();
        let before = Arc::clone(&lists.all);
        lists.reported.insert(node.to_owned(), list);
        lists.combine();
        before != lists.all
    }

    pub(crate) fn list(&self) -> Arc<DenyList> {
        let lists = self.0.read();
        Arc::clone(&lists.all)
    }

    /// Refuses a certificate that is on the list. A certificate without a role is refused by [`super::Peer`].
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let list = self.list();
        if list.is_empty() {
            return Ok(());
        }
        match Subject::of(certificate) {
            Ok(subject) if list.refuses(&subject).is_some() => {
                tracing::warn!(
                    event = "denied-certificate-refused", peer = %format_args!("{} {}", subject.role, subject.name),
                    serial = subject.serial,
                    "handshake refused: the certificate is denied"
                );
                Err(CertificateError::Revoked.into())
            }
            _ => Ok(()),
        }
    }
}

/// Parsed contents of an identity directory.
pub(crate) struct Material {
    pub(crate) subject: Subject,
    pub(crate) certified: Arc<CertifiedKey>,
    clients: Arc<dyn ClientCertVerifier>,
    servers: Arc<dyn ServerCertVerifier>,
    denied: Arc<Denied>,
    pub(crate) quic_client: quinn::ClientConfig,
    /// Key of stateless resets, derived from the private key, which it does not reveal.
    pub(crate) reset_key: [u8; 32],
}

impl fmt::Debug for Material {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_tuple("Material")
            .field(&self.subject)
            .finish()
    }
}

/// Source of the material that is currently in use.
pub(crate) trait Current: fmt::Debug + Send + Sync {
    fn current(self: Arc<Self>) -> Arc<Material>;
}

impl Current for Material {
    fn current(self: Arc<Self>) -> Arc<Material> {
        self
    }
}

impl Material {
    /// Returns the configuration of QUIC connections for an end that speaks these versions of the wire.
    pub(crate) fn quic_client_speaking(
        &self,
        spoken: VersionRange,
    ) -> Result<quinn::ClientConfig, IdentityError> {
        quic_client_config(&self.certified, &self.servers, spoken)
    }

    /// Returns the configuration of an HTTPS client that shows this identity's certificate.
    pub(crate) fn https_client(&self) -> Result<rustls::ClientConfig, IdentityError> {
        https_client_config(self.servers.clone(), Some(&self.certified))
    }

    /// Returns the configuration of a client of bulk streams over TLS.
    pub(crate) fn bulk_client(&self) -> Result<rustls::ClientConfig, IdentityError> {
        let versions = [&rustls::version::TLS13];
        let offered = vec![wire::BULK_ALPN.to_vec()];
        client_config(
            self.servers.clone(),
            Some(&self.certified),
            &versions,
            offered,
        )
    }

    /// Refuses a certificate that is denied.
    pub(crate) fn check_not_denied(
        &self,
        certificate: &CertificateDer<'_>,
    ) -> Result<(), rustls::Error> {
        self.denied.check(certificate)
    }

    /// Verifies a peer's chain against the trusted CAs. Every certificate of Permafrost is valid for a client.
    pub(crate) fn verify(
        &self,
        chain: &[CertificateDer<'_>],
        at: SystemTime,
    ) -> Result<(), rustls::Error> {
        verify_chain(chain, self.clients.as_ref(), at)
    }

    pub(crate) fn load(directory: &Path, denied: &Arc<Denied>) -> Result<Self, IdentityError> {
        let place = files::resolve(directory)?;
        let chain = certificates(&place.join(CERTIFICATE))?;
        let roots = Arc::new(root_store(&place.join(CA))?);
        let key_path = place.join(KEY);
        let key = PrivateKeyDer::from_pem_slice(&files::read_key(&key_path)?).map_err(|_| {
            IdentityError::Pem {
                path: key_path,
                expected: "private key",
            }
        })?;

        let reset_key = Sha256::new()
            .chain_update("permafrost stateless reset")
            .chain_update(key.secret_der())
            .finalize()
            .into();
        let subject = Subject::of(&chain[0])?;
        let certified = CertifiedKey::from_der(chain, key, &provider()).map_err(|error| {
            if let rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) = error {
                IdentityError::Mismatch {
                    directory: directory.to_owned(),
                }
            } else {
                error.into()
            }
        })?;
        let clients = client_verifier(&roots)?;
        let now = SystemTime::now();
        if let Ok(over) = now.duration_since(subject.not_after) {
            return Err(IdentityError::Expired {
                directory: directory.to_owned(),
                seconds: over.as_secs(),
            });
        }
        if now < subject.not_before {
            return Err(IdentityError::NotYetValid {
                directory: directory.to_owned(),
            });
        }
        verify_chain(&certified.cert, clients.as_ref(), now).map_err(|source| {
            IdentityError::Untrusted {
                directory: directory.to_owned(),
                source,
            }
        })?;

        let certified = Arc::new(certified);
        let servers = server_verifier(roots, Some(denied))?;
        let spoken = versions::own().of(Interface::Wire);
        let quic_client = quic_client_config(&certified, &servers, spoken)?;
        Ok(Self {
            subject,
            certified,
            clients,
            servers,
            denied: Arc::clone(denied),
            quic_client,
            reset_key,
        })
    }
}

/// Returns the certificates in a file; at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let bytes = files::read(path)?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&bytes)
        .collect::<Result<_, _>>()
        .unwrap_or_default();
    if certificates.is_empty() {
        return Err(IdentityError::Pem {
            path: path.to_owned(),
            expected: "certificate",
        });
    }
    Ok(certificates)
}

pub(crate) fn root_store(path: &Path) -> Result<RootCertStore, IdentityError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|_| IdentityError::Pem {
            path: path.to_owned(),
            expected: "CA certificate",
        })?;
    }
    Ok(roots)
}

/// Returns a verifier of clients against `roots`, in full. Sends no hints of the trusted CAs: a client has one
/// certificate.
pub(crate) fn client_verifier(
    roots: &Arc<RootCertStore>,
) -> Result<Arc<dyn ClientCertVerifier>, IdentityError> {
    WebPkiClientVerifier::builder_with_provider(roots.clone(), provider())
        .clear_root_hint_subjects()
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()).into())
}

/// Returns a verifier of servers against `roots`, in full, which refuses denied certificates.
fn server_verifier(
    roots: Arc<RootCertStore>,
    denied: Option<&Arc<Denied>>,
) -> Result<Arc<dyn ServerCertVerifier>, IdentityError> {
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider())
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    Ok(match denied {
        None => verifier,
        Some(denied) => Arc::new(NotDenied {
            verifier,
            denied: Arc::clone(denied),
        }),
    })
}

/// Verifies a chain as a client's: every certificate of Permafrost is valid for a client, so this also fits the
/// own certificate.
pub(crate) fn verify_chain(
    chain: &[CertificateDer<'_>],
    verifier: &dyn ClientCertVerifier,
    at: SystemTime,
) -> Result<(), rustls::Error> {
    let Some((own, between)) = chain.split_first() else {
        return Err(rustls::Error::NoCertificatesPresented);
    };
    let since = at
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    verifier
        .verify_client_cert(own, between, UnixTime::since_unix_epoch(since))
        .map(|_| ())
}

fn quic_client_config(
    certified: &Arc<CertifiedKey>,
    servers: &Arc<dyn ServerCertVerifier>,
    spoken: VersionRange,
) -> Result<quinn::ClientConfig, IdentityError> {
    let versions = [&rustls::version::TLS13];
    let offered = wire::offered(spoken);
    let config = client_config(servers.clone(), Some(certified), &versions, offered)?;
    let config = QuicClientConfig::try_from(config)
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    Ok(quinn::ClientConfig::new(Arc::new(config)))
}

pub(crate) fn quic_server_config(
    source: Arc<dyn Current>,
    spoken: VersionRange,
) -> Result<quinn::ServerConfig, IdentityError> {
    let mut config = server_config(source, &[&rustls::version::TLS13])?;
    config.alpn_protocols = wire::offered(spoken);
    let config = QuicServerConfig::try_from(config)
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    Ok(quinn::ServerConfig::with_crypto(Arc::new(config)))
}

/// Returns the configuration of a server of bulk streams over TLS; requires a certificate.
pub(crate) fn bulk_server_config(
    source: Arc<dyn Current>,
) -> Result<rustls::ServerConfig, IdentityError> {
    let mut config = server_config(source, &[&rustls::version::TLS13])?;
    config.alpn_protocols = vec![wire::BULK_ALPN.to_vec()];
    Ok(config)
}

/// Returns the configuration of an HTTPS server. A client without a certificate is accepted, and has to
/// identify itself in another way.
pub(crate) fn https_server_config(
    source: Arc<dyn Current>,
) -> Result<rustls::ServerConfig, IdentityError> {
    let versions = [&rustls::version::TLS13, &rustls::version::TLS12];
    let mut config = configured(source, &versions, Certificates::Optional)?;
    config.alpn_protocols = vec![HTTP_1_1.to_vec()];
    Ok(config)
}

/// Returns the configuration of an HTTPS client that verifies servers and compares their certificates with the
/// host of the URL.
fn https_client_config(
    servers: Arc<dyn ServerCertVerifier>,
    certified: Option<&Arc<CertifiedKey>>,
) -> Result<rustls::ClientConfig, IdentityError> {
    let versions = [&rustls::version::TLS13, &rustls::version::TLS12];
    client_config(servers, certified, &versions, vec![HTTP_1_1.to_vec()])
}

fn client_config(
    servers: Arc<dyn ServerCertVerifier>,
    certified: Option<&Arc<CertifiedKey>>,
    versions: &[&'static SupportedProtocolVersion],
    alpn_protocols: Vec<Vec<u8>>,
) -> Result<rustls::ClientConfig, IdentityError> {
    let config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(versions)?
        .dangerous()
        .with_custom_certificate_verifier(servers);
    let mut config = match certified {
        Some(certified) => {
            let shown = SingleCertAndKey::from(certified.as_ref().clone());
            config.with_client_cert_resolver(Arc::new(shown))
        }
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = alpn_protocols;
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Returns the configuration of an HTTPS client that trusts the CAs in the file `ca`, and shows no certificate.
pub(crate) fn https_client_trusting(ca: &Path) -> Result<rustls::ClientConfig, IdentityError> {
    https_client_config(server_verifier(Arc::new(root_store(ca)?), None)?, None)
}

/// Returns the configuration of a server that uses the material of `source` at the time of each handshake;
/// requires a certificate.
pub(crate) fn server_config(
    source: Arc<dyn Current>,
    versions: &[&'static SupportedProtocolVersion],
) -> Result<rustls::ServerConfig, IdentityError> {
    configured(source, versions, Certificates::Required)
}

/// Requirement for clients to show a certificate. A certificate that is shown is verified in full in either
/// case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Certificates {
    Required,
    Optional,
}

fn configured(
    source: Arc<dyn Current>,
    versions: &[&'static SupportedProtocolVersion],
    certificates: Certificates,
) -> Result<rustls::ServerConfig, IdentityError> {
    let latest = Arc::new(Latest {
        source,
        certificates,
    });
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(versions)?
        .with_client_cert_verifier(latest.clone())
        .with_cert_resolver(latest);
    config.session_storage = Arc::new(NoServerSessionStorage {});
    // A ticket would also be a surprise to CRIU: gnutls reports it as EAGAIN from a blocking receive.
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Verifier that uses the current material, and leaves all verification to its WebPKI verifier.
#[derive(Debug)]
struct Latest {
    source: Arc<dyn Current>,
    certificates: Certificates,
}

impl Latest {
    fn material(&self) -> Arc<Material> {
        self.source.clone().current()
    }
}

impl ResolvesServerCert for Latest {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.material().certified.clone())
    }
}

impl ClientCertVerifier for Latest {
    fn client_auth_mandatory(&self) -> bool {
        self.certificates == Certificates::Required
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let material = self.material();
        // The chain is verified first: the log must not contain names from certificates of other CAs.
        let verified = material
            .clients
            .verify_client_cert(end_entity, intermediates, now)?;
        material.denied.check(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.material()
            .clients
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.material()
            .clients
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.material().clients.supported_verify_schemes()
    }
}

/// Verifier of servers: WebPKI's, and the list of denied certificates.
#[derive(Debug)]
struct NotDenied {
    verifier: Arc<WebPkiServerVerifier>,
    denied: Arc<Denied>,
}

impl ServerCertVerifier for NotDenied {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self.verifier.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        )?;
        self.denied.check(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
