//! Address of an API, and connecting to it.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;
use hyper::Uri;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use permafrost_identity::{Identity, https_client_trusting, server_name};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::{ApiError, ApiOptions};

/// Address of an API.
pub(super) enum Target {
    Socket(PathBuf),
    Port {
        /// URL as the user wrote it.
        url: String,
        host: String,
        port: u16,
        /// Prefix of each path, for a proxy.
        prefix: String,
        tls: Option<Tls>,
    },
}

/// TLS configuration for the verification of the node and the client's certificate, and the name expected of
/// the node.
pub(super) struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Target {
    pub(super) fn of(options: &ApiOptions) -> Result<Self, ApiError> {
        let Some(url) = &options.url else {
            return Ok(Self::Socket(options.socket.clone()));
        };
        let wrong = |what| ApiError::Url {
            url: url.clone(),
            what,
        };
        let uri: Uri = url.parse().map_err(|_| wrong("no URL at all"))?;
        let encrypted = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(wrong("it begins with http:// or https://")),
        };
        if uri.query().is_some() {
            return Err(wrong("it has a query"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("it has no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong(
                "it holds a user: tokens are given by --api-token-file",
            ));
        }
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let port = match authority.port_u16() {
            Some(port) => port,
            None if authority.as_str() != authority.host() => {
                return Err(wrong("its port is none"));
            }
            None if encrypted => 443,
            None => 80,
        };
        let tls = encrypted.then(|| Tls::of(options, &host)).transpose()?;
        if tls.is_none() && options.token.is_some() && !is_loopback(&host) {
            return Err(ApiError::ClearText { host });
        }
        Ok(Self::Port {
            url: url.clone(),
            port,
            prefix: uri.path().trim_end_matches('/').to_owned(),
            host,
            tls,
        })
    }

    /// Returns the path for the request line.
    pub(super) fn path(&self, path: &str) -> String {
        match self {
            Self::Socket(_) => path.to_owned(),
            Self::Port { prefix, .. } => format!("{prefix}{path}"),
        }
    }

    /// Returns the value of the Host header (RFC 9112, section 3.2).
    pub(super) fn host(&self) -> String {
        match self {
            Self::Socket(_) => "localhost".to_owned(),
            Self::Port { host, port, .. } if host.contains(':') => format!("[{host}]:{port}"),
            Self::Port { host, port, .. } => format!("{host}:{port}"),
        }
    }

    pub(super) async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, ApiError> {
        let unreachable = |error| self.unreachable(error);
        match self {
            Self::Socket(path) => {
                let stream = UnixStream::connect(path).await.map_err(unreachable)?;
                self.converse(stream).await
            }
            Self::Port {
                host, port, tls, ..
            } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await;
                let stream = stream.map_err(unreachable)?;
                stream.set_nodelay(true).map_err(unreachable)?;
                let Some(tls) = tls else {
                    return self.converse(stream).await;
                };
                let connector = TlsConnector::from(Arc::clone(&tls.config));
                let stream = connector.connect(tls.name.clone(), stream).await;
                self.converse(stream.map_err(unreachable)?).await
            }
        }
    }

    async fn converse<S>(&self, stream: S) -> Result<SendRequest<Full<Bytes>>, ApiError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (client, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.broken(error))?;
        // The end of the connection shows with the next request.
        tokio::spawn(connection);
        Ok(client)
    }

    fn unreachable(&self, source: io::Error) -> ApiError {
        let place = self.to_string();
        match of_tls(&source) {
            Some(source) => ApiError::Tls { place, source },
            None => ApiError::Unreachable { place, source },
        }
    }

    /// Returns the error of a broken connection. In TLS 1.3 a client's certificate is refused after the
    /// handshake, with the first reply.
    pub(super) fn broken(&self, source: hyper::Error) -> ApiError {
        let place = self.to_string();
        match of_tls(&source) {
            Some(source) => ApiError::Tls { place, source },
            None => ApiError::Broken { place, source },
        }
    }
}

/// Returns the TLS error in the chain of sources of `error`, if there is one.
fn of_tls(error: &(dyn std::error::Error + 'static)) -> Option<rustls::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(tls) = error.downcast_ref::<rustls::Error>() {
            return Some(tls.clone());
        }
        // The error within an io::Error is not its source, but is treated as such.
        let wrapped = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        next = match wrapped {
            Some(wrapped) => Some(wrapped),
            None => error.source(),
        };
    }
    None
}

impl Tls {
    fn of(options: &ApiOptions, host: &str) -> Result<Self, ApiError> {
        let config = match (&options.identity, &options.ca) {
            (Some(identity), _) => Identity::load(identity)?.https_client_config()?,
            (None, Some(ca)) => https_client_trusting(ca)?,
            (None, None) => return Err(ApiError::NoAuthority),
        };
        let name = match &options.node {
            Some(node) => server_name(node),
            None => host.to_owned(),
        };
        let name = ServerName::try_from(name.clone()).map_err(|_| ApiError::Url {
            url: name,
            what: "no host that a certificate can name",
        })?;
        let config = Arc::new(config);
        Ok(Self { config, name })
    }
}

/// Returns true for a name that a resolver maps to the loopback interface (RFC 6761, section 6.3), or an
/// address of it.
fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.to_canonical().is_loopback())
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(formatter),
            Self::Port { url, .. } => formatter.write_str(url),
        }
    }
}
