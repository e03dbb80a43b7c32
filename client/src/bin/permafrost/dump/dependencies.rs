//! Refuses trees that contain a process which the dump itself needs: if that process were frozen, the freeze
//! could not end.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, ToSocketAddrs, UdpSocket};

use permafrost_criu::origin::ProcessStat;
use permafrost_criu::processes;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_transport::control::Connection;

/// State of a listening TCP socket in `/proc/net/tcp` (include/net/tcp_states.h of the kernel).
const LISTENING: &str = "0A";

/// Refuses the tree of `root` if it contains the daemon, or the agent, at the other end of `connection`.
pub(super) fn refuse_daemon(root: u32, connection: &Connection) -> Result<(), Failure> {
    match connection.peer_pid() {
        Some(daemon) if processes::is_in_tree(daemon, root) => {
            Err(refusal(root, daemon, "which takes the dump"))
        }
        _ => Ok(()),
    }
}

/// Refuses the tree of `root` if one of its processes listens on one of `endpoints`, which the daemon needs: members
/// of etcd, or storage nodes, as `host:port`.
pub(super) fn refuse_endpoints(root: u32, endpoints: &[String]) -> Result<(), Failure> {
    let ports: Vec<(u16, &str)> = endpoints
        .iter()
        .filter_map(|endpoint| {
            Some((
                endpoint.rsplit_once(':')?.1.parse().ok()?,
                endpoint.as_str(),
            ))
        })
        .collect();
    if ports.is_empty() {
        return Ok(());
    }
    // Nearly always none or one: only then the descriptors of the tree are looked through.
    let listening: HashMap<u64, &str> = listeners()
        .filter_map(|(port, inode)| {
            let (_, endpoint) = ports.iter().find(|(of, _)| *of == port)?;
            Some((inode, *endpoint))
        })
        .collect();
    if listening.is_empty() {
        return Ok(());
    }
    for pid in processes::tree(root) {
        let endpoint = sockets_of(pid).find_map(|inode| listening.get(&inode));
        if let Some(endpoint) = endpoint.filter(|endpoint| is_local(endpoint)) {
            let why = format!("which serves {endpoint}, and permafrostd needs that");
            return Err(refusal(root, pid, &why));
        }
    }
    Ok(())
}

fn refusal(root: u32, pid: u32, why: &str) -> Failure {
    let name = ProcessStat::read(pid).map_or_else(|_| "?".to_owned(), |stat| stat.name);
    let what = if pid == root {
        format!("process {pid} is {name}, {why}")
    } else {
        format!("the tree of process {root} contains process {pid} ({name}), {why}")
    };
    Failure::new(
        Code::Invalid,
        format!("{what}: frozen, it could not end the freeze"),
    )
    .hint("name the root of a smaller tree, or run that process outside of this one")
}

/// Lists ports and inodes of this network namespace's listening TCP sockets, and of its UDP sockets.
fn listeners() -> impl Iterator<Item = (u16, u64)> {
    let lines = |file: &str| {
        let file = File::open(format!("/proc/self/net/{file}")).ok();
        let lines = file
            .into_iter()
            .flat_map(|file| BufReader::new(file).lines());
        // The first line names the columns.
        lines.map_while(Result::ok).skip(1)
    };
    let tcp = ["tcp", "tcp6"].into_iter().flat_map(move |file| {
        // The kernel lists the listening ones first; there may be many others.
        lines(file).take_while(|line| line.split_whitespace().nth(3) == Some(LISTENING))
    });
    let udp = ["udp", "udp6"].into_iter().flat_map(lines);
    tcp.chain(udp).filter_map(|line| port_and_inode(&line))
}

/// Parses local port and inode in a line of `/proc/net/tcp` or `udp` (Documentation/networking/proc_net_tcp.rst
/// of the kernel).
fn port_and_inode(line: &str) -> Option<(u16, u64)> {
    let mut words = line.split_whitespace();
    let (_, port) = words.nth(1)?.rsplit_once(':')?;
    Some((
        u16::from_str_radix(port, 16).ok()?,
        words.nth(7)?.parse().ok()?,
    ))
}

/// Lists the inodes of the sockets that a process has open.
fn sockets_of(pid: u32) -> impl Iterator<Item = u64> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    entries.flatten().filter_map(|entry| {
        let link = fs::read_link(entry.path()).ok()?;
        let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        inode.parse().ok()
    })
}

/// Returns true if an endpoint is at an address of this machine: other addresses cannot be bound.
fn is_local(endpoint: &str) -> bool {
    let addresses = endpoint.to_socket_addrs().into_iter().flatten();
    let ips: Vec<IpAddr> = addresses.map(|address| address.ip()).collect();
    ips.into_iter().any(|ip| UdpSocket::bind((ip, 0)).is_ok())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use super::*;

    #[test]
    fn the_process_at_the_other_end_is_refused_in_a_tree_and_others_are_not() {
        // Both ends are this process.
        let (connection, _peer) = UnixStream::pair().unwrap();
        let connection = Connection::from_stream(connection);
        let own = std::process::id();
        let refused = refuse_daemon(own, &connection).unwrap_err();
        assert_eq!(refused.code, Code::Invalid);
        assert!(
            refused.message.contains(&format!("process {own} is ")),
            "{}",
            refused.message
        );
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        assert!(refuse_daemon(child.id(), &connection).is_ok());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn listeners_that_the_daemon_needs_are_found_in_a_tree_by_their_port() {
        let own = std::process::id();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        for endpoint in [
            tcp.local_addr().unwrap().to_string(),
            udp.local_addr().unwrap().to_string(),
            format!("localhost:{}", tcp.local_addr().unwrap().port()),
        ] {
            let refused = refuse_endpoints(own, &["10.0.0.1:1".to_owned(), endpoint.clone()]);
            let message = refused.unwrap_err().message;
            assert!(message.contains(&endpoint), "{message}");
            let mut child = Command::new("sleep").arg("600").spawn().unwrap();
            assert!(refuse_endpoints(child.id(), &[endpoint]).is_ok());
            child.kill().unwrap();
            child.wait().unwrap();
        }
        // The same port of another machine (TEST-NET-1), and no port at all.
        let elsewhere = format!("192.0.2.1:{}", tcp.local_addr().unwrap().port());
        assert!(refuse_endpoints(own, &[elsewhere, "etcd".to_owned()]).is_ok());
    }

    #[test]
    fn lines_of_the_kernel_give_port_and_inode() {
        let line = "   0: 0100007F:094B 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 8123 1 0000000000000000 100 0 0 10 0";
        assert_eq!(port_and_inode(line), Some((2379, 8123)));
        assert_eq!(port_and_inode("  sl  local_address rem_address   st"), None);
    }
}
