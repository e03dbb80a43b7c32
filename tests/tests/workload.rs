//! The workload itself: other scenarios would only report that it did not start.

use std::process::{Command, Stdio};
use std::time::Duration;

use permafrost_tests::{binaries, process, status::Status};

/// A container's or a CI runner's processes are often in a session whose leader is outside their PID namespace:
/// the kernel then calls it session 0.
#[test]
fn a_workload_starts_in_a_session_led_from_outside_its_pid_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.arg(binaries::path("permafrost-workload").unwrap());
    command
        .arg("--dir")
        .arg(dir.path())
        .args(["--size-mib", "1"]);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let status = process::wait_for("the first report", Duration::from_secs(60), || {
        if let Some(status) = child.try_wait()? {
            anyhow::bail!("ended: {status}");
        }
        Status::read(&dir.path().join("workload.status"))
    });
    let _ = child.kill();
    let _ = child.wait();
    assert_eq!(status.unwrap().pid, 1, "a namespace of its own");
}
