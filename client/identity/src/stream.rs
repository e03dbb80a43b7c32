//! CRIU's own TLS on a page-server connection.
//!
//! `criu --tls` begins the handshake immediately after `connect`, before any command, on the connection itself
//! (`connect_to_page_server`), and ends with a close_notify whose reply it awaits
//! (`gnutls_bye(GNUTLS_SHUT_RDWR)`; after a failure it does not wait). So the first two bytes distinguish a TLS
//! handshake record from a page-server command, none of which has these bytes.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::{Identity, IdentityError, Peer, ReloadingIdentity, Tenure, tls};

/// Returns true if a connection that begins with these bytes is TLS, that is, with a handshake record of any
/// TLS version. Returns false for fewer than two bytes.
pub fn looks_like_tls(first: &[u8]) -> bool {
    first.starts_with(&[0x16, 0x03])
}

/// Waits at most `limit` for the first two bytes of a connection, and returns true if they begin a TLS
/// handshake. Does not consume them. A stream that ends before them is not TLS. The stream's read timeout is
/// changed, and removed at the end.
///
/// # Errors
/// The stream fails, or `TimedOut`.
pub fn begins_with_tls(stream: &TcpStream, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    let mut first = [0; 2];
    let mut seen = 0;
    loop {
        stream.set_read_timeout(Some(remaining(deadline)?))?;
        let before = seen;
        seen = match stream.peek(&mut first) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        };
        if seen == 0 || seen == 2 || (seen == 1 && first[0] != 0x16) {
            stream.set_read_timeout(None)?;
            return Ok(looks_like_tls(&first[..seen]));
        }
        if seen == before {
            // peek returns at once with the one byte that it showed before.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

/// A TLS connection that was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The stream failed, ended or was silent for too long.
    #[error("TLS handshake: {0}")]
    Io(#[source] io::Error),
    /// The peer's certificate was refused, or the peer's TLS is not compatible.
    #[error("TLS handshake: {0}")]
    Refused(#[source] rustls::Error),
    /// The peer's certificate is of a trusted CA, but does not identify its holder.
    #[error("TLS handshake: {0}")]
    Peer(#[source] IdentityError),
}

/// Acceptor of CRIU's TLS connections: TLS 1.2 and 1.3, client certificates required.
#[derive(Clone, Debug)]
pub struct CriuTls {
    config: Arc<ServerConfig>,
    /// Identity that ends connections whose certificates are no longer valid.
    identity: Option<ReloadingIdentity>,
}

impl CriuTls {
    /// Returns an acceptor that shows the certificate of `identity`. The certificate needs the address that
    /// CRIU connects to among its hosts, unless CRIU is given `--tls-no-cn-verify`.
    ///
    /// # Errors
    /// TLS cannot be set up; this does not happen with loaded certificates.
    pub fn new(identity: &Identity) -> Result<Self, IdentityError> {
        Self::with(identity.source(), None)
    }

    /// Returns a configuration like [`CriuTls::new`] that follows changes of the files; connections end when
    /// their peers' certificates are no longer valid.
    ///
    /// # Errors
    /// The same as for [`CriuTls::new`].
    pub fn reloading(identity: &ReloadingIdentity) -> Result<Self, IdentityError> {
        Self::with(identity.source(), Some(identity.clone()))
    }

    fn with(
        source: Arc<dyn tls::Current>,
        identity: Option<ReloadingIdentity>,
    ) -> Result<Self, IdentityError> {
        let versions = [&rustls::version::TLS13, &rustls::version::TLS12];
        Ok(Self {
            config: Arc::new(tls::server_config(source, &versions)?),
            identity,
        })
    }

    /// Completes the handshake, within `limit` however slowly bytes come. The stream has to be blocking; its
    /// timeouts are changed, and removed at the end.
    ///
    /// # Errors
    /// See [`TlsError`]; the peer was sent an alert with the reason.
    pub fn accept(&self, mut stream: TcpStream, limit: Duration) -> Result<TlsStream, TlsError> {
        let deadline = Instant::now() + limit;
        let mut connection =
            ServerConnection::new(self.config.clone()).map_err(TlsError::Refused)?;
        while connection.is_handshaking() || connection.wants_write() {
            let left = remaining(deadline).map_err(TlsError::Io)?;
            if connection.wants_write() {
                stream
                    .set_write_timeout(Some(left))
                    .and_then(|()| connection.write_tls(&mut stream))
                    .map_err(timed_out)?;
                continue;
            }
            stream.set_read_timeout(Some(left)).map_err(TlsError::Io)?;
            match connection.read_tls(&mut stream) {
                Ok(0) => return Err(TlsError::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(timed_out(error)),
            }
            if let Err(error) = connection.process_new_packets() {
                // The alert: a courtesy.
                let _ = stream.set_write_timeout(remaining(deadline).ok());
                let _ = connection.write_tls(&mut stream);
                return Err(TlsError::Refused(error));
            }
        }
        let chain = connection.peer_certificates().unwrap_or_default();
        let peer = Peer::of_verified(chain).map_err(TlsError::Peer)?;
        let ended = stream.try_clone().map_err(TlsError::Io)?;
        let admit = |identity: &ReloadingIdentity| {
            // The connection may have ended already; the error is of no interest.
            identity.admit(chain, move |_| drop(ended.shutdown(Shutdown::Both)))
        };
        let tenure = self.identity.as_ref().map(admit).transpose();
        let tenure = tenure.map_err(TlsError::Peer)?;
        stream
            .set_read_timeout(None)
            .and_then(|()| stream.set_write_timeout(None))
            .map_err(TlsError::Io)?;
        Ok(TlsStream {
            inner: StreamOwned::new(connection, stream),
            peer,
            closed: false,
            _tenure: tenure,
        })
    }
}

fn timed_out(error: io::Error) -> TlsError {
    TlsError::Io(if error.kind() == io::ErrorKind::WouldBlock {
        io::ErrorKind::TimedOut.into()
    } else {
        error
    })
}

/// A TLS connection, blocking. Each write is flushed, and is one record if it is no longer than 16 KiB: CRIU
/// expects its replies so.
///
/// An announced end (close_notify) of the peer is answered and reads as 0 bytes; an end without one is an
/// `UnexpectedEof` error: the stream was cut.
pub struct TlsStream {
    inner: StreamOwned<ServerConnection, TcpStream>,
    peer: Peer,
    closed: bool,
    _tenure: Option<Tenure>,
}

impl TlsStream {
    /// Returns the peer that the handshake verified.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns the TCP connection below, for timeouts and for ending it. It must not be read from or written
    /// to.
    pub fn tcp(&self) -> &TcpStream {
        self.inner.get_ref()
    }

    /// Announces this side's end. Done automatically when the peer announces its own.
    ///
    /// # Errors
    /// The stream fails.
    pub fn close(&mut self) -> io::Result<()> {
        if !self.closed {
            self.closed = true;
            self.inner.conn.send_close_notify();
            while self.inner.conn.wants_write() {
                self.inner.conn.write_tls(&mut self.inner.sock)?;
            }
        }
        Ok(())
    }
}

impl Read for TlsStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let length = self.inner.read(buffer)?;
        if length == 0 {
            // CRIU may have gone without waiting; it is its end all the same.
            let _ = self.close();
        }
        Ok(length)
    }
}

impl Write for TlsStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.inner.write(bytes)?;
        self.inner.flush()?;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TlsStream")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}
