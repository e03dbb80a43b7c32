//! Subject of a certificate: the part of an X.509 certificate that Permafrost reads.
//!
//! All of it stands in the subject alternative names:
//!
//! ```text
//! DNS  NAME.ROLE.permafrost               the TLS server name of nodes
//! URI  permafrost://role/ROLE
//! URI  permafrost://namespace/NAMESPACE   any number
//! URI  permafrost://right/delete          may remove checkpoints in these namespaces
//! DNS, IP                                 addresses, for CRIU's own verification
//! ```

use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use x509_parser::extensions::GeneralName;

use super::deny::normalized;
use super::role::{Action, Namespaces, Role};
use super::{IdentityError, files, tls};

/// Domain of the names in certificates; it exists in no DNS.
pub const DOMAIN: &str = ".permafrost";

const ROLE_URI: &str = "permafrost://role/";
const NAMESPACE_URI: &str = "permafrost://namespace/";
const DELETE_URI: &str = "permafrost://right/delete";

/// Longest name, bytes: with role and domain it is still a valid DNS name.
pub const MAX_NAME_BYTES: usize = 200;

/// Subject of a certificate: its holder and the holder's rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Serial number: lower-case hex digits without leading zeros.
    pub serial: String,
    /// Name of the node, agent or person; unique within its role.
    pub name: String,
    /// Role of the holder.
    pub role: Role,
    /// Namespaces that the holder may access.
    pub namespaces: Namespaces,
    /// True if the holder may remove checkpoints in its namespaces.
    pub delete: bool,
    /// Further addresses and host names of the holder.
    pub hosts: Vec<String>,
    /// Start of the certificate's validity.
    pub not_before: SystemTime,
    /// End of the certificate's validity.
    pub not_after: SystemTime,
}

impl Subject {
    /// Returns true if the certificate permits its holder to do `action`.
    pub fn may(&self, action: Action<'_>) -> bool {
        self.role.may(action, &self.namespaces, self.delete)
    }

    /// Reads the certificate in an identity's directory, whether or not it can be used.
    ///
    /// # Errors
    /// The directory has no certificate, or it is not one of Permafrost's.
    pub fn in_directory(directory: &Path) -> Result<Self, IdentityError> {
        let path = files::resolve(directory)?.join(files::CERTIFICATE);
        Self::of(&tls::certificates(&path)?[0])
    }

    /// Parses a certificate. Does not verify that it is trusted.
    ///
    /// # Errors
    /// The certificate is not one of Permafrost's.
    pub fn of(certificate: &[u8]) -> Result<Self, IdentityError> {
        let foreign = |what| IdentityError::Foreign { what };
        let (_, certificate) = x509_parser::parse_x509_certificate(certificate)
            .map_err(|_| foreign("it is no X.509 certificate"))?;
        let names = certificate
            .subject_alternative_name()
            .map_err(|_| foreign("its alternative names cannot be read"))?
            .ok_or_else(|| foreign("it has no alternative names"))?;

        let mut role = None;
        let mut name = None;
        let mut namespaces = Vec::new();
        let mut delete = false;
        let mut hosts = Vec::new();
        for general in &names.value.general_names {
            match general {
                GeneralName::URI(uri) => {
                    if let Some(text) = uri.strip_prefix(ROLE_URI) {
                        if role.replace(text.parse::<Role>()?).is_some() {
                            return Err(foreign("it has two roles"));
                        }
                    } else if let Some(namespace) = uri.strip_prefix(NAMESPACE_URI) {
                        namespaces.push(namespace);
                    } else if *uri == DELETE_URI {
                        delete = true;
                    }
                }
                GeneralName::DNSName(dns) => match dns.strip_suffix(DOMAIN) {
                    Some(own) => {
                        if name.replace(own.to_owned()).is_some() {
                            return Err(foreign("it has two names"));
                        }
                    }
                    None => hosts.push((*dns).to_owned()),
                },
                GeneralName::IPAddress(bytes) => hosts.extend(address(bytes)),
                _ => {}
            }
        }
        let role = role.ok_or_else(|| foreign("it has no role"))?;
        let name = name
            .as_deref()
            .and_then(|name| name.strip_suffix(role.name())?.strip_suffix('.'))
            .ok_or_else(|| foreign("it has no name of its role"))?;
        check_name(name)?;
        let validity = certificate.validity();
        Ok(Self {
            serial: serial_of(&certificate),
            name: name.to_owned(),
            role,
            namespaces: Namespaces::new(namespaces)?,
            delete,
            hosts,
            not_before: time(validity.not_before.timestamp()),
            not_after: time(validity.not_after.timestamp()),
        })
    }

    /// Returns the URIs of a certificate with this role, these namespaces, and the right to delete in them.
    pub(crate) fn uris(role: Role, namespaces: &Namespaces, delete: bool) -> Vec<String> {
        let mut uris = vec![format!("{ROLE_URI}{role}")];
        uris.extend(
            namespaces
                .iter()
                .map(|namespace| format!("{NAMESPACE_URI}{namespace}")),
        );
        uris.extend(delete.then(|| DELETE_URI.to_owned()));
        uris
    }
}

/// Returns the DNS name for `name` in `role`.
pub(crate) fn dns_name(name: &str, role: Role) -> String {
    format!("{name}.{role}{DOMAIN}")
}

/// Returns the TLS server name of node `name`.
pub fn server_name(name: &str) -> String {
    dns_name(name, Role::Node)
}

/// Checks that a name consists of DNS labels in lower case, because DNS names are case-insensitive.
pub(crate) fn check_name(name: &str) -> Result<(), IdentityError> {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    };
    if name.len() <= MAX_NAME_BYTES && name.split('.').all(label) {
        Ok(())
    } else {
        Err(IdentityError::Name {
            name: name.to_owned(),
        })
    }
}

/// Checks that a host is an address, or a DNS name outside of [`DOMAIN`]: otherwise an agent could be named
/// like a node.
pub(crate) fn check_host(host: &str) -> Result<(), IdentityError> {
    let name = host.to_ascii_lowercase();
    let ours = name.ends_with(DOMAIN) || name == DOMAIN[1..];
    if host.parse::<IpAddr>().is_ok() || (!ours && check_name(&name).is_ok()) {
        Ok(())
    } else {
        Err(IdentityError::Host {
            host: host.to_owned(),
        })
    }
}

fn serial_of(certificate: &x509_parser::certificate::X509Certificate<'_>) -> String {
    let hex: String = certificate
        .raw_serial()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    normalized(&hex)
}

fn address(bytes: &[u8]) -> Option<String> {
    let address = <[u8; 4]>::try_from(bytes)
        .map(IpAddr::from)
        .or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from))
        .ok()?;
    Some(address.to_string())
}

/// Converts a Unix time. Times before 1970 become 1970: both have passed.
pub(crate) fn time(unix_s: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(unix_s).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_labels_in_lower_case() {
        for name in ["a", "node-1", "node-1.rack2", "0"] {
            check_name(name).unwrap();
        }
        let long = "a".repeat(64);
        let longer = ["abcdefgh"; 30].join(".");
        for name in [
            "", ".", "a.", ".a", "a..b", "A", "a_b", "-a", "a-", "a b", "ä", "*", "a/b", "a\n",
            &long, &longer,
        ] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn hosts_cannot_claim_a_name_of_ours() {
        for host in [
            "10.0.0.1",
            "::1",
            "node-1.example.org",
            "Node-1",
            "localhost",
        ] {
            check_host(host).unwrap();
        }
        for host in [
            "",
            "n.node.permafrost",
            "n.node.PERMAFROST",
            "permafrost",
            "*.example.org",
            "a b",
            "10.0.0.1:80",
            "[::1]",
        ] {
            assert!(check_host(host).is_err(), "{host:?}");
        }
    }

    #[test]
    fn garbage_is_no_certificate() {
        for bytes in [&b""[..], b"\x30", b"\x30\x82\xff\xff", &[0xff; 100]] {
            assert!(matches!(
                Subject::of(bytes),
                Err(IdentityError::Foreign { .. })
            ));
        }
    }
}
