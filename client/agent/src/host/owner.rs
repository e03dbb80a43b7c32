//! Looks up the user at the remote end of a TCP connection of this machine.
//!
//! Linux records for each socket the user who made it. `sock_diag` (sock_diag(7)) returns the user by the
//! connection's addresses; where the kernel has no `sock_diag`, the list in `/proc/net` does. A socket that its
//! owner has closed already belongs to no user any more: both then report user 0 and inode 0, and the inode
//! tells such a socket from root's.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// `SOCK_DIAG_BY_FAMILY` of linux/sock_diag.h.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST` of linux/netlink.h.
const REQUEST: u16 = 1;
/// `NLMSG_ERROR` of linux/netlink.h.
const ERROR: u16 = 2;
/// Protocol number `IPPROTO_TCP`.
const TCP: u8 = 6;
/// Address families `AF_INET` and `AF_INET6`.
const FAMILIES: (u8, u8) = (2, 10);

/// Size of a netlink header, bytes.
const HEADER_BYTES: usize = 16;
/// Size of a request, bytes: header and `inet_diag_req_v2`.
const REQUEST_BYTES: u32 = 72;
/// Offset of the user in a reply with `inet_diag_msg`.
const UID_AT: usize = HEADER_BYTES + 64;
/// Offset of the inode in a reply with `inet_diag_msg`.
const INODE_AT: usize = HEADER_BYTES + 68;

/// Returns the user that owns the remote end of `stream`; `None` if it is not a socket of this machine (or
/// belongs to another network namespace).
///
/// # Errors
/// The connection is over; neither `sock_diag` nor `/proc` gives an answer.
pub(super) fn peer_uid(stream: &TcpStream) -> io::Result<Option<u32>> {
    let theirs = canonical(stream.peer_addr()?);
    let ours = canonical(stream.local_addr()?);
    let found = match by_sock_diag(theirs, ours) {
        // The kernel also gives this answer if it lacks the module for TCP.
        Ok(None) if theirs.ip().is_loopback() => by_proc(theirs, ours)?,
        Ok(found) => found,
        Err(error) => {
            tracing::debug!(%error, "sock_diag does not answer");
            by_proc(theirs, ours)?
        }
    };
    match found {
        Some(Socket { inode: 0, .. }) => Err(io::ErrorKind::NotConnected.into()),
        found => Ok(found.map(|socket| socket.uid)),
    }
}

/// Attributes of a socket that the kernel reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Socket {
    uid: u32,
    inode: u64,
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn by_sock_diag(theirs: SocketAddr, ours: SocketAddr) -> io::Result<Option<Socket>> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?;
    // The message has no address, which means the kernel. The kernel answers within the call.
    rustix::net::send(&socket, &request(theirs, ours), SendFlags::empty())?;
    let mut answer = [0; 1024];
    let (_, bytes) = rustix::net::recv(&socket, &mut answer, RecvFlags::DONTWAIT)?;
    parse(answer.get(..bytes).unwrap_or_default())
}

/// Returns the request for one socket: its own address is the source.
fn request(theirs: SocketAddr, ours: SocketAddr) -> [u8; REQUEST_BYTES as usize] {
    let family = match theirs {
        SocketAddr::V4(_) => FAMILIES.0,
        SocketAddr::V6(_) => FAMILIES.1,
    };
    let mut bytes = [0; REQUEST_BYTES as usize];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, &REQUEST_BYTES.to_ne_bytes());
    put(4, &BY_FAMILY.to_ne_bytes());
    put(6, &REQUEST.to_ne_bytes());
    put(16, &[family, TCP]);
    put(20, &u32::MAX.to_ne_bytes()); // Sockets in all states.
    put(24, &theirs.port().to_be_bytes());
    put(26, &ours.port().to_be_bytes());
    put(28, &octets(theirs.ip()));
    put(44, &octets(ours.ip()));
    put(64, &[0xFF; 8]); // INET_DIAG_NOCOOKIE: any.
    bytes
}

fn octets(address: IpAddr) -> [u8; 16] {
    let mut octets = [0; 16];
    match address {
        IpAddr::V4(v4) => octets[..4].copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => octets = v6.octets(),
    }
    octets
}

fn parse(answer: &[u8]) -> io::Result<Option<Socket>> {
    let word = |at: usize| {
        let bytes = answer.get(at..).and_then(|rest| rest.first_chunk::<4>());
        bytes.ok_or(io::ErrorKind::UnexpectedEof)
    };
    let kind = word(4)?;
    match u16::from_ne_bytes([kind[0], kind[1]]) {
        BY_FAMILY => Ok(Some(Socket {
            uid: u32::from_ne_bytes(*word(UID_AT)?),
            inode: u32::from_ne_bytes(*word(INODE_AT)?).into(),
        })),
        ERROR => {
            let error = i32::from_ne_bytes(*word(HEADER_BYTES)?).saturating_neg();
            match io::Error::from_raw_os_error(error) {
                error if error.kind() == io::ErrorKind::NotFound => Ok(None),
                error => Err(error),
            }
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn by_proc(theirs: SocketAddr, ours: SocketAddr) -> io::Result<Option<Socket>> {
    // A socket for both versions of IP is in the second list, with IPv4 addresses written as of IPv6.
    let lists = match theirs {
        SocketAddr::V4(_) => ["/proc/self/net/tcp", "/proc/self/net/tcp6"].as_slice(),
        SocketAddr::V6(_) => ["/proc/self/net/tcp6"].as_slice(),
    };
    for list in lists {
        let text = match std::fs::read_to_string(list) {
            // The kernel has no IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text?,
        };
        if let Some(socket) = find_in(&text, theirs, ours) {
            return Ok(Some(socket));
        }
    }
    Ok(None)
}

/// Finds the socket between two addresses in a list of `/proc/net` (proc_net_tcp.txt of the kernel's
/// documentation).
fn find_in(list: &str, theirs: SocketAddr, ours: SocketAddr) -> Option<Socket> {
    list.lines().skip(1).find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (local, remote) = (address(words.next()?)?, address(words.next()?)?);
        if (local, remote) != (theirs, ours) {
            return None;
        }
        let mut rest = words.skip(4);
        let uid = rest.next()?.parse().ok()?;
        let inode = rest.nth(1)?.parse().ok()?;
        Some(Socket { uid, inode })
    })
}

/// Parses an address of those lists: words of 32 bits in the machine's order, in hexadecimal.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let word = |at: usize| {
        let digits = address.get(at..at + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let ip: IpAddr = match address.len() {
        8 => word(0)?.into(),
        32 => {
            let mut octets = [0; 16];
            for (part, at) in octets.chunks_exact_mut(4).zip((0..).step_by(8)) {
                part.copy_from_slice(&word(at)?);
            }
            octets.into()
        }
        _ => return None,
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(SocketAddr::new(ip.to_canonical(), port))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_owner_of_a_connection_is_found_and_one_that_is_gone_is_nobody() {
        for bind in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(bind) else {
                continue; // Without IPv6.
            };
            let port = listener.local_addr().unwrap().port();
            let address = match bind {
                "[::1]:0" => format!("[::1]:{port}"),
                _ => format!("127.0.0.1:{port}"),
            };
            let client = TcpStream::connect(address).unwrap();
            let (served, _) = listener.accept().unwrap();
            let own = rustix::process::geteuid().as_raw();
            assert_eq!(peer_uid(&served).unwrap(), Some(own), "{bind}");
            let (theirs, ours) = (
                canonical(served.peer_addr().unwrap()),
                canonical(served.local_addr().unwrap()),
            );
            let found = by_proc(theirs, ours).unwrap().unwrap();
            assert_eq!(found.uid, own);
            assert_ne!(found.inode, 0);

            // The kernel reports uid 0 for a closed socket: it belongs to no user, not to root. A process that another test
            // is starting has the socket, too, until it runs its program.
            drop(client);
            let until = Instant::now() + Duration::from_secs(30);
            while peer_uid(&served).is_ok() {
                assert!(Instant::now() < until, "{bind}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn answers_that_are_none_are_errors() {
        for bytes in [&[][..], &[0; 16], &[0xFF; 40], &[0; 4]] {
            assert!(parse(bytes).is_err());
        }
        let line = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                    0: 0100007F:1BCD 0100007F:0050 01 00000000:00000000 00:00000000 00000000  1000        0 4242 1 x";
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let list = line.replace(
            "0100007F",
            &format!("{:08X}", u32::from_ne_bytes([127, 0, 0, 1])),
        );
        let found = find_in(&list, at("127.0.0.1:7117"), at("127.0.0.1:80"));
        let wanted = Socket {
            uid: 1000,
            inode: 4242,
        };
        assert_eq!(found, Some(wanted));
        assert_eq!(
            find_in(&list, at("127.0.0.1:80"), at("127.0.0.1:7117")),
            None
        );
        assert_eq!(
            find_in("x\ny z\n\n", at("127.0.0.1:80"), at("[::1]:1")),
            None
        );
    }
}
