//! Address and credentials of the registry.

use std::path::{Path, PathBuf};
use std::time::Duration;

use permafrost_identity::IdentityError;
use permafrost_store::StoreError;

use crate::error::{SetupError, UrlDefect};

/// Default prefix of all keys; the catalog's URL may name another.
pub const DEFAULT_PREFIX: &str = "/permafrost/v1";

/// Configuration of the connection to the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Members of etcd, `host:port` each; at least one. All should be named: a client finds no others.
    pub members: Vec<String>,
    /// Prefix of every key. Default [`DEFAULT_PREFIX`]; two clusters in one etcd need two.
    pub prefix: String,
    /// Encryption and identity; `None`: plain connections.
    pub tls: Option<TlsFiles>,
    /// File with `user:password` in its first line; `None`: etcd requires no user.
    pub user_file: Option<PathBuf>,
    /// Time for which a node counts as alive after its last sign of life. A shorter one detects a death sooner and
    /// tolerates less. Whole seconds, at least 2; etcd may lengthen it. Default 5 s.
    pub lease_ttl: Duration,
    /// Longest duration of a single call, with all its retries on other members. Default 10 s: longer than an
    /// election of etcd.
    pub call_deadline: Duration,
}

/// PEM files for TLS. Without a certificate of this node, etcd must accept any client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authorities that etcd's certificates are signed by.
    pub ca: PathBuf,
    /// Certificate and key of this node.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl ClusterConfig {
    /// Parses `etcd://host:port[,host:port…][/prefix]`. A host without a port gets 2379.
    ///
    /// # Errors
    /// The URL is malformed; the message describes the defect.
    pub fn parse(url: &str) -> Result<Self, StoreError> {
        let invalid = |source| SetupError::Url {
            url: url.to_owned(),
            source,
        };
        let rest = url
            .strip_prefix("etcd://")
            .ok_or_else(|| invalid(UrlDefect::Scheme))?;
        let (hosts, prefix) = match rest.split_once('/') {
            Some((hosts, prefix)) => (hosts, prefix.trim_end_matches('/')),
            None => (rest, ""),
        };
        if hosts.contains('@') {
            return Err(invalid(UrlDefect::Password).into());
        }
        let mut members = Vec::new();
        for host in hosts.split(',') {
            if host.is_empty() {
                return Err(invalid(UrlDefect::NoMember).into());
            }
            let member = if has_port(host) {
                host.to_owned()
            } else {
                format!("{host}:2379")
            };
            let (name, port) = member.rsplit_once(':').unwrap_or_default();
            if name.is_empty() || port.parse::<u16>().map_or(true, |port| port == 0) {
                let host = host.to_owned();
                return Err(invalid(UrlDefect::Host { host }).into());
            }
            if members.contains(&member) {
                let host = host.to_owned();
                return Err(invalid(UrlDefect::Twice { host }).into());
            }
            members.push(member);
        }
        if prefix.bytes().any(|byte| !byte.is_ascii_graphic()) {
            return Err(invalid(UrlDefect::Prefix).into());
        }
        Ok(Self {
            members,
            prefix: if prefix.is_empty() {
                DEFAULT_PREFIX.to_owned()
            } else {
                format!("/{prefix}")
            },
            tls: None,
            user_file: None,
            lease_ttl: Duration::from_secs(5),
            call_deadline: Duration::from_secs(10),
        })
    }

    /// Returns a description of the connection to the registry, for people.
    #[must_use]
    pub fn words(&self) -> String {
        let how = match (&self.tls, &self.user_file) {
            (Some(_), _) => "over TLS",
            (None, None) => "in plaintext",
            (None, Some(_)) => "in plaintext, the password too",
        };
        format!("etcd at {}, {how}", self.members.join(", "))
    }

    /// Returns a warning if the registry is reached in plaintext.
    pub(crate) fn warning(&self) -> Option<&'static str> {
        match (&self.tls, &self.user_file) {
            (Some(_), _) => None,
            (None, None) => Some(
                "etcd is spoken to in plaintext: whoever is on the network between can read and change what this cluster lists. Give --catalog-ca, and etcd certificates (docs/cluster.md, \"TLS and users\")",
            ),
            (None, Some(_)) => Some(
                "the password for etcd goes over the network in plaintext: whoever is between can use it. Give --catalog-ca, and etcd certificates (docs/cluster.md, \"TLS and users\")",
            ),
        }
    }

    /// Builds the client's options from the files.
    pub(crate) fn connect_options(&self) -> Result<etcd_client::ConnectOptions, StoreError> {
        // A member that takes longer is skipped, because there are others.
        let mut options = etcd_client::ConnectOptions::new()
            .with_connect_timeout(Duration::from_secs(1))
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if let Some(tls) = &self.tls {
            let ca = etcd_client::Certificate::from_pem(read(&tls.ca)?);
            let mut tls_options = etcd_client::TlsOptions::new().ca_certificate(ca);
            if let Some((certificate, key)) = &tls.identity {
                let identity =
                    etcd_client::Identity::from_pem(read(certificate)?, read_secret(key)?);
                tls_options = tls_options.identity(identity);
            }
            options = options.with_tls(tls_options);
        }
        if let Some(path) = &self.user_file {
            let text = String::from_utf8_lossy(&read_secret(path)?).into_owned();
            let line = text.lines().next().unwrap_or_default();
            let (user, password) = line
                .split_once(':')
                .ok_or_else(|| SetupError::NoUser { path: path.clone() })?;
            options = options.with_user(user, password);
        }
        Ok(options)
    }
}

/// Returns true if a port follows a name, an IPv4 address or an IPv6 address in brackets.
fn has_port(host: &str) -> bool {
    match host.rsplit_once(']') {
        Some((_, behind)) => behind.starts_with(':'),
        None => host.contains(':'),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, StoreError> {
    std::fs::read(path).map_err(StoreError::io(format!("read {}", path.display())))
}

/// Reads a file that no other user may read or replace.
fn read_secret(path: &Path) -> Result<Vec<u8>, StoreError> {
    let path = path.to_owned();
    permafrost_identity::read_private(&path).map_err(|error| match error {
        IdentityError::Io { source, .. } => {
            StoreError::io(format!("read {}", path.display()))(source)
        }
        IdentityError::ReadableKey { mode, .. } => {
            SetupError::ReadableByOthers { path, mode }.into()
        }
        IdentityError::ForeignKey { owner, .. } => SetupError::ForeignOwner { path, owner }.into(),
        error => SetupError::Unusable {
            path,
            source: Box::new(error),
        }
        .into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plaintext_is_warned_of_and_a_password_in_it_more() {
        let plain = ClusterConfig::parse("etcd://a").unwrap();
        assert!(plain.warning().unwrap().contains("plaintext"));
        let with_password = ClusterConfig {
            user_file: Some("password".into()),
            ..plain.clone()
        };
        assert!(with_password.warning().unwrap().contains("password"));
        assert!(with_password.words().contains("a:2379, in plaintext"));
        let secure = ClusterConfig {
            tls: Some(TlsFiles::default()),
            ..with_password
        };
        assert_eq!(secure.warning(), None);
        assert!(secure.words().ends_with("over TLS"));
    }

    #[test]
    fn a_password_that_others_can_read_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("password");
        std::fs::write(&file, "permafrost:secret\n").unwrap();
        let config = ClusterConfig {
            user_file: Some(file.clone()),
            ..ClusterConfig::parse("etcd://a").unwrap()
        };
        for (mode, is_used) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false)] {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            let options = config.connect_options();
            assert_eq!(options.is_ok(), is_used, "{mode:o}");
            if let Err(error) = options {
                assert!(
                    error.to_string().contains("can be read by others"),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn members_and_prefix_are_read() {
        let config = ClusterConfig::parse("etcd://a:2379,b,[::1],[::1]:99/x/y/").unwrap();
        assert_eq!(
            config.members,
            ["a:2379", "b:2379", "[::1]:2379", "[::1]:99"]
        );
        assert_eq!(config.prefix, "/x/y");
        assert_eq!(
            ClusterConfig::parse("etcd://a").unwrap().prefix,
            DEFAULT_PREFIX
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for url in [
            "",
            "etcd://",
            "http://a",
            "etcd://a,",
            "etcd://a:x",
            "etcd://a:0",
            "etcd://:1",
            "etcd://a:2379,a",
            "etcd://u:p@a",
            "etcd://a/b c",
        ] {
            assert!(ClusterConfig::parse(url).is_err(), "{url}");
        }
    }
}
