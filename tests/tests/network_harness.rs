//! The hosts of other scenarios: they reach each other, cuts drop their packets and no others, and CRIU dumps from
//! one to the other.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use permafrost_tests::criu::{self, Criu};
use permafrost_tests::daemon::tail;
use permafrost_tests::net::{self, Host};
use permafrost_tests::workload::{self, Workload};

const PORT: u16 = 7000;
/// Time that is waited for a datagram that must not arrive. Expected datagrams have a longer limit, for a loaded
/// machine.
const LOST: Duration = Duration::from_millis(300);

fn socket(host: &Host) -> UdpSocket {
    let address = (host.address(), PORT);
    host.run(move || Ok(UdpSocket::bind(address)?)).unwrap()
}

/// Returns true if a datagram with a number of its own arrives. It is sent repeatedly, because the kernel may lose
/// one on a link that has just changed.
fn arrives(from: &UdpSocket, to: &UdpSocket, number: u32, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    to.set_read_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    let mut datagram = [0; 4];
    while Instant::now() < until {
        // A link that is down may refuse at once.
        let _ = from.send_to(&number.to_le_bytes(), to.local_addr().unwrap());
        while to.recv(&mut datagram).is_ok() {
            if datagram == number.to_le_bytes() {
                return true;
            }
        }
    }
    false
}

/// Checks which sockets reach which, as rows of senders. An expected datagram is awaited longer than an unexpected
/// one.
fn assert_reach(sockets: &[UdpSocket], expected: [[bool; 3]; 3]) {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    for (from, row) in expected.iter().enumerate() {
        for (to, &expected) in row.iter().enumerate() {
            let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let limit = if expected {
                Duration::from_secs(10)
            } else {
                LOST
            };
            assert_eq!(
                arrives(&sockets[from], &sockets[to], number, limit),
                expected,
                "from {from} to {to}"
            );
        }
    }
}

const ALL: [[bool; 3]; 3] = [[true; 3]; 3];

#[test]
fn cuts_cut_what_they_say_and_heal() {
    let Some(hosts) = net::for_test("cuts_cut_what_they_say_and_heal", 3, 1500) else {
        return;
    };
    let sockets: Vec<UdpSocket> = hosts.iter().map(socket).collect();
    assert_reach(&sockets, ALL);

    hosts[0].cut_to(&hosts[1]).unwrap();
    let mut expected = ALL;
    expected[0][1] = false;
    assert_reach(&sockets, expected);
    hosts[2].cut_to(&hosts[0]).unwrap();
    expected[2][0] = false;
    assert_reach(&sockets, expected);
    hosts[0].heal_to(&hosts[1]).unwrap();
    expected[0][1] = true;
    assert_reach(&sockets, expected);

    // The cable is pulled and plugged in again; the one-way cut stays.
    hosts[1].cut().unwrap();
    let pulled = [
        [true, false, true],
        [false, true, false],
        [false, false, true],
    ];
    assert_reach(&sockets, pulled);
    hosts[1].heal().unwrap();
    assert_reach(&sockets, expected);

    hosts[1].cut().unwrap();
    hosts.heal().unwrap();
    assert_reach(&sockets, ALL);
}

#[test]
fn a_connection_outlives_a_cut() {
    let Some(hosts) = net::for_test("a_connection_outlives_a_cut", 2, 9000) else {
        return;
    };
    let address = SocketAddr::from((hosts[1].address(), PORT));
    let listener = hosts[1].run(|| Ok(TcpListener::bind(address)?)).unwrap();
    let limit = Duration::from_secs(20);
    let mut near = hosts[0]
        .run(|| Ok(TcpStream::connect_timeout(&address, limit)?))
        .unwrap();
    let (mut far, peer) = listener.accept().unwrap();
    assert_eq!(peer.ip(), hosts[0].address());

    hosts[0].cut_to(&hosts[1]).unwrap();
    near.write_all(b"late").unwrap();
    let mut heard = [0; 4];
    far.set_read_timeout(Some(LOST)).unwrap();
    assert!(far.read_exact(&mut heard).is_err(), "heard through a cut");
    hosts[0].heal_to(&hosts[1]).unwrap();
    far.set_read_timeout(Some(limit)).unwrap();
    far.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"late");
}

#[test]
fn sent_bytes_are_counted_as_on_a_wire() {
    const BYTES: u64 = 1 << 20;
    for mtu in [1500, 9000] {
        let Some(hosts) = net::for_test("sent_bytes_are_counted_as_on_a_wire", 2, mtu) else {
            return;
        };
        let address = SocketAddr::from((hosts[1].address(), PORT));
        let listener = hosts[1].run(|| Ok(TcpListener::bind(address)?)).unwrap();
        let mut near = hosts[0].run(|| Ok(TcpStream::connect(address)?)).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let before = hosts[0].sent().unwrap();
        let receiver = std::thread::spawn(move || std::io::copy(&mut far, &mut std::io::sink()));
        near.write_all(&vec![7; usize::try_from(BYTES).unwrap()])
            .unwrap();
        drop(near);
        assert_eq!(receiver.join().unwrap().unwrap(), BYTES);
        let after = hosts[0].sent().unwrap();
        let (bytes, packets) = (after.bytes - before.bytes, after.packets - before.packets);
        // IP and TCP headers with timestamps take 52 bytes of the MTU, Ethernet 14 beside it.
        let least = BYTES / u64::from(mtu - 52);
        assert!(packets >= least, "{packets} packets at {mtu}");
        assert!(packets < least * 3, "{packets} packets at {mtu}");
        assert!(bytes >= BYTES + least * 66, "{bytes} bytes at {mtu}");
        assert!(bytes < BYTES * 5 / 4, "{bytes} bytes at {mtu}");
    }
}

#[test]
fn names_are_cleaned_up() {
    let Some(hosts) = net::for_test("names_are_cleaned_up", 1, 1500) else {
        return;
    };
    let path = Path::new("/run/netns").join(hosts[0].namespace());
    assert!(path.exists());
    let panicked = std::thread::spawn(move || {
        let _hosts = hosts;
        std::panic::resume_unwind(Box::new("as a failing test does"));
    });
    assert!(panicked.join().is_err());
    assert!(!path.exists(), "still there after a panic");

    // One of a process that has ended. Pids are reused late, and none is reused while it is not waited for.
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    let ours = std::fs::metadata("/proc/self/ns/pid").unwrap().ino();
    let name = format!("permafrost-{ours}-{}-0-0", ended.id());
    let theirs = format!("permafrost-{}-{}-0-0", ours + 1, ended.id());
    ended.wait().unwrap();
    let added = std::process::Command::new("ip")
        .args(["netns", "add", &name])
        .status();
    assert!(added.unwrap().success());
    let of_others = Path::new("/run/netns").join(&theirs);
    std::fs::write(&of_others, "").unwrap();
    let left = Path::new("/run/netns").join(name);
    assert!(left.exists());
    drop(net::for_test("names_are_cleaned_up", 1, 1500));
    assert!(!left.exists(), "left by a process that has ended");
    // A process of that number in another pid namespace may well live.
    assert!(of_others.exists(), "another pid namespace's");
    std::fs::remove_file(of_others).unwrap();
}

/// A `criu page-server` for one dump.
struct PageServer {
    child: Child,
}

impl PageServer {
    fn start(criu: &Criu, host: &Host, images: &Path) -> Result<Self> {
        let mut child = host
            .command(&criu.path)
            .args(["page-server", "--status-fd", "1", "-o", "page-server.log"])
            .args(["--address", &host.address().to_string()])
            .args(["--port", &PORT.to_string(), "-D"])
            .arg(images)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        // It writes a byte when it is ready.
        let mut stdout = child.stdout.take().context("take its stdout")?;
        let server = Self { child };
        if stdout.read(&mut [0])? == 0 {
            bail!("no page server:\n{}", tail(&images.join("page-server.log")));
        }
        Ok(server)
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn dump(criu: &Criu, from: &Host, to: Ipv4Addr, pid: u32, images: &Path) -> Child {
    from.command(&criu.path)
        .args(["dump", "-t", &pid.to_string(), "-o", "dump.log"])
        .args(["--page-server", "--address", &to.to_string()])
        .args(["--port", &PORT.to_string(), "-D"])
        .arg(images)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// The task's network namespace is CRIU's own on either side, so none of it is in the images: what ran on one host
/// goes on in the network of the other.
#[test]
fn criu_dumps_from_one_host_and_restores_on_another() {
    let test = "criu_dumps_from_one_host_and_restores_on_another";
    let Some(criu) = criu::for_test(test) else {
        return;
    };
    let Some(hosts) = net::for_test(test, 2, 1500) else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let images = work.path().join("images");
    std::fs::create_dir(&images).unwrap();
    let options = workload::Options {
        size_mib: 8,
        ..workload::Options::default()
    };
    let mut workload = hosts[0]
        .run(|| Workload::start(work.path(), &options))
        .unwrap();
    let net = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    let near = net(workload.pid());
    let before = hosts[0].sent().unwrap();
    let server = PageServer::start(&criu, &hosts[1], &images).unwrap();
    let mut dumping = dump(
        &criu,
        &hosts[0],
        hosts[1].address(),
        workload.pid(),
        &images,
    );
    let status = dumping.wait().unwrap();
    assert!(status.success(), "{}", tail(&images.join("dump.log")));
    let sent = hosts[0].sent().unwrap().bytes - before.bytes;
    assert!(
        sent > options.size_mib << 20,
        "only {sent} bytes on the wire"
    );
    drop(server);
    workload.wait_until_gone().unwrap();

    let restored = hosts[1]
        .command(&criu.path)
        .args(["restore", "-d", "-o", "restore.log", "-D"])
        .arg(&images)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(restored.success(), "{}", tail(&images.join("restore.log")));
    assert!(workload.verify().unwrap().is_sound());
    assert_ne!(net(workload.pid()), near, "it is on the other host now");
}

#[test]
fn a_cut_fails_a_dump_and_the_task_lives() {
    let test = "a_cut_fails_a_dump_and_the_task_lives";
    let Some(criu) = criu::for_test(test) else {
        return;
    };
    let Some(hosts) = net::for_test(test, 2, 1500) else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let images = work.path().join("images");
    std::fs::create_dir(&images).unwrap();
    // Sending takes 30 s at this rate: the cut is sure to come in the middle.
    hosts[0].limit(10).unwrap();
    let options = workload::Options {
        size_mib: 32,
        ..workload::Options::default()
    };
    let workload = hosts[0]
        .run(|| Workload::start(work.path(), &options))
        .unwrap();
    // TCP gives up a connection after a quarter of an hour; this host after some retries.
    hosts[0]
        .run(|| Ok(std::fs::write("/proc/sys/net/ipv4/tcp_retries2", "3")?))
        .unwrap();
    let _server = PageServer::start(&criu, &hosts[1], &images).unwrap();
    let before = hosts[0].sent().unwrap();
    let mut dumping = dump(
        &criu,
        &hosts[0],
        hosts[1].address(),
        workload.pid(),
        &images,
    );
    let half_way =
        permafrost_tests::process::wait_for("the first MiB", Duration::from_secs(60), || {
            Ok((hosts[0].sent()?.bytes > before.bytes + (1 << 20)).then_some(()))
        });
    hosts[0].cut_to(&hosts[1]).unwrap();
    let status = permafrost_tests::process::wait_for(
        "the end of a dump that was cut off",
        Duration::from_secs(60),
        || Ok(dumping.try_wait()?),
    );
    if status.is_err() {
        let _ = dumping.kill();
        let _ = dumping.wait();
    }
    half_way.unwrap();
    assert!(!status.unwrap().success(), "dumped through a cut");
    assert!(workload.verify().unwrap().is_sound(), "the task lives on");
}
