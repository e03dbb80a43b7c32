//! Tells the service manager about the state of this process (sd_notify(3)).

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Variable with the address of the service manager's socket: a path, or `@` and an abstract name.
const SOCKET: &str = "NOTIFY_SOCKET";

/// Tells the service manager the state of this process, such as `READY=1`. Does nothing without a service manager; one
/// that does not listen is logged.
pub fn notify_manager(state: &str) {
    let Some(name) = std::env::var_os(SOCKET) else {
        return;
    };
    if let Err(error) = send(name.as_bytes(), state) {
        tracing::warn!(event = "service-manager-not-told", %error, state, "the service manager was not told");
    }
}

fn send(name: &[u8], state: &str) -> io::Result<()> {
    let address = match name.split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name))?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_arrives_at_a_path_and_at_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let at_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("permafrost-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let abstract_one = UnixDatagram::bind_addr(&address).unwrap();
        for (name, socket) in [
            (path.to_str().unwrap().to_owned(), at_path),
            (format!("@{name}"), abstract_one),
        ] {
            send(name.as_bytes(), "READY=1").unwrap();
            let mut state = [0; 32];
            let length = socket.recv(&mut state).unwrap();
            assert_eq!(&state[..length], b"READY=1");
        }
        assert!(send(b"/nonexistent/notify", "READY=1").is_err());
    }
}
