//! A private CA in a directory, which `permafrost pki` manages.
//!
//! ```text
//! ca.pem       the CAs to trust, the newest first; it is the one that signs
//! ca-key.pem   its key
//! chain.pem    after a change of the CA: the newest, signed by the one before it
//! ```
//!
//! Nodes need not be told of a changed CA in any order: a certificate of the new CA comes with the new CA's
//! certificate by the old one. So nodes that know only the old CA trust it, and nodes with reissued
//! certificates trust both.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
    SanType,
};

use super::files::{self, CA, CA_KEY, CERTIFICATE, CHAIN, KEY, NewFile};
use super::subject::{check_host, check_name, dns_name, time};
use super::{IdentityError, Namespaces, Role, Subject, tls};

/// Default validity of a certificate, days: long enough to be rotated once a month with two failures in a row.
pub const DEFAULT_DAYS: u32 = 90;

/// Longest validity of a certificate, days.
pub const MAX_DAYS: u32 = 825;

const DAY: Duration = Duration::from_secs(86_400);

/// Time by which a certificate's validity begins in the past, because clocks differ by hours in practice.
const BACKDATED: Duration = DAY;

/// Validity of a CA: ten years.
const CA_VALIDITY: Duration = Duration::from_secs(3_650 * 86_400);

/// Contents of a certificate to be issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateOrder {
    /// Name of the holder.
    pub name: String,
    /// Role of the holder.
    pub role: Role,
    /// Namespaces that the holder may access.
    pub namespaces: Namespaces,
    /// True if the holder may remove checkpoints in its namespaces. For agents and operators only.
    pub delete: bool,
    /// Further addresses and host names of the holder: CRIU compares its `--address` with them.
    pub hosts: Vec<String>,
    /// Validity in days from now, up to [`MAX_DAYS`].
    pub days: u32,
}

impl CertificateOrder {
    /// Returns an order for [`DEFAULT_DAYS`], without namespaces and hosts, and without the right to delete.
    pub fn new(name: impl Into<String>, role: Role) -> Self {
        Self {
            name: name.into(),
            role,
            namespaces: Namespaces::default(),
            delete: false,
            hosts: Vec::new(),
            days: DEFAULT_DAYS,
        }
    }

    fn check(&self) -> Result<(), IdentityError> {
        check_name(&self.name)?;
        self.hosts.iter().try_for_each(|host| check_host(host))?;
        if self.delete && !matches!(self.role, Role::Agent | Role::Operator) {
            return Err(IdentityError::Delete { role: self.role });
        }
        if !(1..=MAX_DAYS).contains(&self.days) {
            return Err(IdentityError::Days {
                days: self.days,
                limit: MAX_DAYS,
            });
        }
        Ok(())
    }
}

/// An identity that was written by [`Authority::issue`] or a related method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// Directory of the identity.
    pub directory: PathBuf,
    /// Subject of the certificate.
    pub subject: Subject,
}

/// A CA with its key.
pub struct Authority {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    not_after: SystemTime,
    ca_pem: String,
    chain_pem: String,
}

impl std::fmt::Debug for Authority {
    /// Formats the CA without its key.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Authority")
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes a CA for `cluster` in `directory`. With `replace`, it replaces an existing CA: certificates issued
    /// by that one are no longer trusted.
    ///
    /// # Errors
    /// A CA exists already, the name is invalid, or the files cannot be written.
    pub fn create(directory: &Path, cluster: &str, replace: bool) -> Result<Self, IdentityError> {
        check_name(cluster)?;
        if files::holds(directory, CERTIFICATE) {
            return Err(occupied(directory, "an identity"));
        }
        if !replace && (files::is_taken(directory, CA) || files::is_taken(directory, CA_KEY)) {
            return Err(exists(directory, "a CA"));
        }
        let key = new_key()?;
        let certificate = ca_params(cluster)?.self_signed(&key)?;
        write_ca(directory, &certificate.pem(), &key, "", replace)?;
        Self::open(directory)
    }

    /// Opens the CA in `directory`.
    ///
    /// # Errors
    /// The directory has no CA, its key can be read by others, or it has expired.
    pub fn open(directory: &Path) -> Result<Self, IdentityError> {
        let place = files::resolve(directory)?;
        let ca_path = place.join(CA);
        let key_path = place.join(CA_KEY);
        let certificates = tls::certificates(&ca_path)?;
        let key = text(files::read_key(&key_path)?)
            .and_then(|pem| KeyPair::from_pem(&pem).ok())
            .ok_or_else(|| IdentityError::Pem {
                path: key_path,
                expected: "private key",
            })?;
        let not_an_authority = || IdentityError::Pem {
            path: ca_path.clone(),
            expected: "CA certificate",
        };
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificates[0])
            .map_err(|_| not_an_authority())?;
        if !parsed.is_ca() {
            return Err(not_an_authority());
        }
        if parsed.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
            return Err(IdentityError::Mismatch {
                directory: directory.to_owned(),
            });
        }
        let not_after = time(parsed.validity().not_after.timestamp());
        let issuer = Issuer::from_ca_cert_der(&certificates[0], key)?;
        let chain = place.join(CHAIN);
        let chain_pem = match files::read(&chain) {
            Ok(bytes) => text(bytes).unwrap_or_default(),
            Err(IdentityError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                String::new()
            }
            Err(error) => return Err(error),
        };
        Ok(Self {
            directory: directory.to_owned(),
            issuer,
            not_after,
            ca_pem: text(files::read(&ca_path)?).unwrap_or_default(),
            chain_pem,
        })
    }

    /// Returns the end of the CA certificate's validity.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Returns the default directory for the certificate of `name`, which lies beside the CA.
    pub fn default_place(&self, name: &str) -> PathBuf {
        self.directory.join("issued").join(name)
    }

    /// Issues the ordered certificate into the directory `out`. With `replace`, it replaces an existing
    /// identity.
    ///
    /// # Errors
    /// The order is invalid, the CA has expired, an identity exists already, or the files cannot be written.
    pub fn issue(
        &self,
        order: &CertificateOrder,
        out: &Path,
        replace: bool,
    ) -> Result<Issued, IdentityError> {
        order.check()?;
        let now = SystemTime::now();
        if now >= self.not_after {
            return Err(IdentityError::ExpiredAuthority {
                directory: self.directory.clone(),
            });
        }
        // gnutls refuses a certificate whose CA is over.
        let not_after = (now + DAY * order.days).min(self.not_after);
        self.issue_for(order, now - BACKDATED, not_after, out, replace)
    }

    /// Issues a certificate that is valid between two given times, whenever those are: for tests of the
    /// behaviour before and after.
    ///
    /// # Errors
    /// The same as for [`Authority::issue`], but for the dates.
    pub fn issue_for(
        &self,
        order: &CertificateOrder,
        not_before: SystemTime,
        not_after: SystemTime,
        out: &Path,
        replace: bool,
    ) -> Result<Issued, IdentityError> {
        order.check()?;
        // Refused even with `replace`: a cluster that loses its CA has to be set up anew.
        if files::holds(out, CA_KEY) {
            return Err(occupied(out, "a CA"));
        }
        if !replace && (files::is_taken(out, CERTIFICATE) || files::is_taken(out, KEY)) {
            return Err(exists(out, "an identity"));
        }
        let key = new_key()?;
        let certificate = self.sign(order, not_before, not_after, &key)?;
        let chain = format!("{}{}", certificate.pem(), self.chain_pem);
        let key_pem = key.serialize_pem();
        let file = |name, contents, secret| NewFile {
            name,
            contents,
            secret,
        };
        files::write_version(
            out,
            &[
                file(CA, &self.ca_pem, false),
                file(CERTIFICATE, &chain, false),
                file(KEY, &key_pem, true),
            ],
            replace,
        )
        .map_err(|error| taken(error, out, "an identity"))?;
        Ok(Issued {
            directory: out.to_owned(),
            subject: Subject::of(certificate.der())?,
        })
    }

    /// Issues the certificate in `out` anew, with a new key, for `days` from now or as long as before, and with
    /// the current CAs. Also reissues a certificate that has expired.
    ///
    /// # Errors
    /// The directory has no certificate of this CA, the CA has expired, or the files cannot be written.
    pub fn reissue(&self, out: &Path, days: Option<u32>) -> Result<Issued, IdentityError> {
        let chain = tls::certificates(&files::resolve(out)?.join(CERTIFICATE))?;
        let before = Subject::of(&chain[0])?;
        self.check_issued(&chain, &before, out)?;
        let length = before
            .not_after
            .duration_since(before.not_before + BACKDATED)
            .unwrap_or(DAY);
        let rounded = (length + DAY / 2).as_secs() / DAY.as_secs();
        let same = u32::try_from(rounded).unwrap_or(MAX_DAYS);
        let order = CertificateOrder {
            name: before.name,
            role: before.role,
            namespaces: before.namespaces,
            delete: before.delete,
            hosts: before.hosts,
            days: days.unwrap_or(same.clamp(1, MAX_DAYS)),
        };
        self.issue(&order, out, true)
    }

    /// Checks that the certificate in `out` was issued by this CA, so that only such certificates are issued
    /// anew. Ignores the dates.
    fn check_issued(
        &self,
        chain: &[rustls::pki_types::CertificateDer<'_>],
        subject: &Subject,
        out: &Path,
    ) -> Result<(), IdentityError> {
        let roots = tls::root_store(&files::resolve(&self.directory)?.join(CA))?;
        let verifier = tls::client_verifier(&Arc::new(roots))?;
        tls::verify_chain(chain, verifier.as_ref(), subject.not_after).map_err(|source| {
            IdentityError::Untrusted {
                directory: out.to_owned(),
                source,
            }
        })
    }

    /// Adds a new CA, which signs from here on; its predecessors stay trusted until [`Authority::retire`].
    /// Nodes that do not know the new CA trust its certificates.
    ///
    /// # Errors
    /// The name is invalid, or the files cannot be written.
    pub fn succeed(&self, cluster: &str) -> Result<Self, IdentityError> {
        check_name(cluster)?;
        let key = new_key()?;
        let params = ca_params(cluster)?;
        let own = params.self_signed(&key)?;
        let by_predecessor = params.signed_by(&key, &self.issuer)?;
        let all = format!("{}{}", own.pem(), self.ca_pem);
        // Behind it the chain so far, for nodes two changes behind.
        let chain = format!("{}{}", by_predecessor.pem(), self.chain_pem);
        write_ca(&self.directory, &all, &key, &chain, true)?;
        Self::open(&self.directory)
    }

    /// Removes all CAs but the newest: identities issued from here on do not trust certificates of the removed
    /// CAs. Returns the number removed.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn retire(&self) -> Result<usize, IdentityError> {
        let place = files::resolve(&self.directory)?;
        let all = tls::certificates(&place.join(CA))?;
        let own = first_pem(&self.ca_pem);
        write_ca(&self.directory, own, self.issuer.key(), "", true)?;
        Ok(all.len() - 1)
    }

    fn sign(
        &self,
        order: &CertificateOrder,
        not_before: SystemTime,
        not_after: SystemTime,
        key: &KeyPair,
    ) -> Result<Certificate, IdentityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = common_name(&format!("{} {}", order.role, order.name));
        params.not_before = not_before.into();
        params.not_after = not_after.into();
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if order.role == Role::Node {
            params
                .extended_key_usages
                .push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        let ia5 = |text: String| Ia5String::try_from(text);
        params
            .subject_alt_names
            .push(SanType::DnsName(ia5(dns_name(&order.name, order.role))?));
        for uri in Subject::uris(order.role, &order.namespaces, order.delete) {
            params.subject_alt_names.push(SanType::URI(ia5(uri)?));
        }
        for host in &order.hosts {
            params.subject_alt_names.push(match host.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName(ia5(host.to_ascii_lowercase())?),
            });
        }
        Ok(params.signed_by(key, &self.issuer)?)
    }
}

/// A CA that an identity or an authority trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trusted {
    /// Name of the CA.
    pub name: String,
    /// End of the CA certificate's validity.
    pub not_after: SystemTime,
}

/// Returns the CAs in `directory`, be it an authority's or an identity's; the newest first.
///
/// # Errors
/// `ca.pem` is missing or is not a list of certificates.
pub fn trusted(directory: &Path) -> Result<Vec<Trusted>, IdentityError> {
    let path = files::resolve(directory)?.join(CA);
    tls::certificates(&path)?
        .iter()
        .map(|certificate| {
            let (_, parsed) = x509_parser::parse_x509_certificate(certificate).map_err(|_| {
                IdentityError::Pem {
                    path: path.clone(),
                    expected: "CA certificate",
                }
            })?;
            let name = parsed
                .subject()
                .iter_common_name()
                .find_map(|name| name.as_str().ok())
                .unwrap_or_default()
                .to_owned();
            Ok(Trusted {
                name,
                not_after: time(parsed.validity().not_after.timestamp()),
            })
        })
        .collect()
}

fn new_key() -> Result<KeyPair, IdentityError> {
    Ok(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?)
}

fn ca_params(cluster: &str) -> Result<CertificateParams, IdentityError> {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    // Two CAs of a cluster must not share their name: some verifiers choose by it.
    let unique = uuid::Uuid::new_v4().simple().to_string();
    params.distinguished_name = common_name(&format!("{cluster} CA {}", &unique[..8]));
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + CA_VALIDITY).into();
    // Unconstrained, because a CA also signs its successor.
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    // 64 characters are the most that X.520 allows, and gnutls insists.
    let end = name.len().min(64);
    distinguished.push(DnType::CommonName, name.get(..end).unwrap_or(name));
    distinguished
}

fn write_ca(
    directory: &Path,
    ca_pem: &str,
    key: &KeyPair,
    chain_pem: &str,
    replace: bool,
) -> Result<(), IdentityError> {
    let key_pem = key.serialize_pem();
    let file = |name, contents, secret| NewFile {
        name,
        contents,
        secret,
    };
    files::write_version(
        directory,
        &[
            file(CA, ca_pem, false),
            file(CHAIN, chain_pem, false),
            file(CA_KEY, &key_pem, true),
        ],
        replace,
    )
    .map_err(|error| taken(error, directory, "a CA"))
}

fn exists(directory: &Path, what: &'static str) -> IdentityError {
    IdentityError::Exists {
        directory: directory.to_owned(),
        what,
    }
}

fn occupied(directory: &Path, what: &'static str) -> IdentityError {
    IdentityError::Occupied {
        directory: directory.to_owned(),
        what,
    }
}

/// Replaces the error of a concurrent creation by [`IdentityError::Exists`].
fn taken(error: IdentityError, directory: &Path, what: &'static str) -> IdentityError {
    match error {
        IdentityError::Io { path, source, .. }
            if source.kind() == io::ErrorKind::AlreadyExists && path.ends_with(files::CURRENT) =>
        {
            exists(directory, what)
        }
        error => error,
    }
}

fn text(bytes: Vec<u8>) -> Option<String> {
    String::from_utf8(bytes).ok()
}

/// Returns the first of the certificates in `pem`.
fn first_pem(pem: &str) -> &str {
    const END: &str = "-----END CERTIFICATE-----";
    pem.find(END).map_or(pem, |at| {
        let end = at + END.len();
        pem.get(..end).unwrap_or(pem)
    })
}
