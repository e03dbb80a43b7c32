//! Tests over logs of CRIU 4.2.1 (Linux 6.18, as root in a container without CAP_SYS_RESOURCE), cut to the
//! lines around the failure. Each log was recorded in the situation that its test is named for.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use super::{Digest, digest};

/// Line in the log of every run on that machine, including successful ones.
const RLIMIT: &str = "(00.038694) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n";

fn failed(log: &str) -> Digest {
    digest(
        &format!("{RLIMIT}{log}"),
        "",
        Some(ExitStatus::from_raw(1 << 8)),
    )
}

#[track_caller]
fn check(log: &str, reason: &str, hint: &str) {
    let digest = failed(log);
    assert_eq!(digest.reason, reason);
    assert!(
        digest.hint.contains(hint) && hint.is_empty() == digest.hint.is_empty(),
        "{:?} does not say {hint:?}",
        digest.hint
    );
    assert!(!digest.lines.contains(&digest.reason));
    assert!(
        digest
            .lines
            .iter()
            .all(|line| !line.contains("rlimit") && !line.contains("FAILED"))
    );
}

#[test]
fn restore_while_the_pid_is_taken() {
    check(
        "(00.031902) Forking task with 7487 pid (flags 0x0)\n\
         (00.031943) Error (criu/cr-restore.c:1237): Can't fork for 7487: File exists\n\
         (00.031975) Error (criu/cr-restore.c:2331): Restoring FAILED.\n",
        "Can't fork for 7487: File exists",
        "pid is taken",
    );
}

#[test]
fn restore_with_an_open_file_gone() {
    check(
        "(00.033216)   7573: Error (criu/files-reg.c:2353): Can't open file tmp/x/af on restore: No such file or directory\n\
         (00.033219)   7573: Error (criu/files-reg.c:2267): Can't open file tmp/x/af: No such file or directory\n\
         (00.033221)   7573: Error (criu/files.c:1221): Unable to open fd=3 id=0x16\n\
         (00.033323) Error (criu/cr-restore.c:2331): Restoring FAILED.\n",
        "Can't open file tmp/x/af on restore: No such file or directory",
        "put it back",
    );
}

#[test]
fn restore_with_the_working_directory_gone() {
    check(
        "(00.043179)   7653: Error (criu/files-reg.c:2353): Can't open file tmp/x/cw on restore: No such file or directory\n\
         (00.043181)   7653: Error (criu/files-reg.c:2267): Can't open file tmp/x/cw: No such file or directory\n\
         (00.043182)   7653: Error (criu/files.c:1399): Can't open cwd\n\
         (00.044454) Error (criu/cr-restore.c:1265): 7653 exited, status=1\n\
         (00.044476) Error (criu/cr-restore.c:2331): Restoring FAILED.\n",
        "Can't open file tmp/x/cw on restore: No such file or directory",
        "put it back",
    );
}

#[test]
fn restore_with_a_file_of_another_size() {
    check(
        "(00.027774)  13318: Error (criu/files-reg.c:2175): File tmp/x/af has bad size 11 (expect 5)\n\
         (00.027777)  13318: Error (criu/files.c:1221): Unable to open fd=3 id=0x16\n\
         (00.028401) Error (criu/cr-restore.c:2331): Restoring FAILED.\n",
        "File tmp/x/af has bad size 11 (expect 5)",
        "changed since the dump",
    );
}

#[test]
fn restore_with_the_program_replaced() {
    check(
        "(00.032760)   7613: Error (criu/files-reg.c:2153): File tmp/x/slp has bad build-ID\n\
         (00.032764)   7613: Error (criu/mem.c:1467): `- Can't open vma\n\
         (00.032867) Error (criu/cr-restore.c:2331): Restoring FAILED.\n",
        "File tmp/x/slp has bad build-ID",
        "replaced",
    );
}

#[test]
fn restore_with_the_port_taken() {
    check(
        "(00.034976)   7680: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 25): Address already in use\n\
         (00.034991)   7680: Error (criu/files.c:1221): Unable to open fd=3 id=0x19\n\
         (00.035078) Error (criu/cr-restore.c:2331): Restoring FAILED.\n",
        "inet: Can't bind inet socket (id 25): Address already in use",
        "port",
    );
}

#[test]
fn restore_of_an_empty_directory() {
    check(
        "(00.026438) Error (criu/protobuf.c:72): Unexpected EOF on (empty-image)\n",
        "Unexpected EOF on (empty-image)",
        "incomplete",
    );
}

#[test]
fn dump_of_a_process_with_a_connection() {
    check(
        "(00.045726) Error (criu/sk-inet.c:200): inet: Connected TCP socket, consider using --tcp-established option.\n\
         (00.045733) ----------------------------------------\n\
         (00.045736) Error (criu/cr-dump.c:1545): Dump files (pid: 7412) failed with -1\n\
         (00.046289) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "inet: Connected TCP socket, consider using --tcp-established option.",
        "--tcp-established",
    );
}

#[test]
fn dump_of_a_connection_without_iptables() {
    check(
        "(00.048343) Error (criu/util.c:657): exited, status=127\n\
         (00.048362) Error (criu/netfilter.c:105): Iptables configuration failed\n\
         (00.048365) Error (criu/sk-tcp.c:81): tcp: Failed to lock TCP connection 7738\n\
         (00.048396) Error (criu/cr-dump.c:1545): Dump files (pid: 13469) failed with -1\n\
         (00.048860) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "tcp: Failed to lock TCP connection 7738",
        "--network-lock",
    );
}

#[test]
fn dump_of_a_shell_job() {
    check(
        "(00.051720) Error (criu/pstree.c:304): The root process 7384 is not a session leader. Consider using --shell-job option\n\
         (00.051789) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "The root process 7384 is not a session leader. Consider using --shell-job option",
        "pass --shell-job",
    );
    check(
        "(00.058264) Error (criu/tty.c:410): tty: Found slave peer index 0 without correspond master peer\n\
         (00.058353) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "tty: Found slave peer index 0 without correspond master peer",
        "pass --shell-job",
    );
}

#[test]
fn dump_of_a_job_of_a_shell_on_a_terminal() {
    check(
        "(00.058264) Error (criu/tty.c:1250): tty: Found dangling tty with sid 28283 pgid 28283 (pts) on peer fd 0.\n\
         (00.058353) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "tty: Found dangling tty with sid 28283 pgid 28283 (pts) on peer fd 0.",
        "pass --shell-job",
    );
}

#[test]
fn only_the_first_error_blames_the_page_server() {
    let close_refused = "(00.062927) Error (criu/cr-dump.c:1975): Dumping FAILED.\n";
    assert!(failed(close_refused).blames_page_server);
    let gone = "(00.045711) Error (criu/page-xfer.c:191): page-xfer: Can't write pages to socket: Broken pipe\n";
    assert!(failed(gone).blames_page_server);
    let own_failure = "(00.04) Error (criu/mem.c:718): Can't dump page with parasite\n";
    assert!(!failed(&format!("{own_failure}{gone}")).blames_page_server);
    assert!(!digest(RLIMIT, "", Some(ExitStatus::from_raw(9))).blames_page_server);
}

#[test]
fn dump_with_a_large_deleted_file() {
    check(
        "(00.047248) Error (criu/files-reg.c:1031): Can't dump ghost file /tmp/x/ghost of 3002368 size, increase limit\n\
         (00.047262) ----------------------------------------\n\
         (00.047264) Error (criu/cr-dump.c:1545): Dump files (pid: 7426) failed with -1\n\
         (00.048575) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "Can't dump ghost file /tmp/x/ghost of 3002368 size, increase limit",
        "--ghost-limit",
    );
}

#[test]
fn dump_of_one_end_of_a_unix_socket() {
    check(
        "(00.057854) Error (criu/sk-unix.c:874): unix: External socket is used. Consider using --ext-unix-sk option.\n\
         (00.057938) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "unix: External socket is used. Consider using --ext-unix-sk option.",
        "--ext-unix-sk",
    );
}

#[test]
fn dump_of_a_process_with_file_locks() {
    check(
        "(00.058115) Error (criu/file-lock.c:110): Some file locks are hold by dumping tasks! You can try --file-locks to dump them.\n\
         (00.058206) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "Some file locks are hold by dumping tasks! You can try --file-locks to dump them.",
        "--file-locks",
    );
}

#[test]
fn tracking_on_a_kernel_without_soft_dirty() {
    check(
        "(00.032514) Error (criu/config.c:1131): Tracking memory is not available. Consider omitting --track-mem option.\n",
        "Tracking memory is not available. Consider omitting --track-mem option.",
        "CONFIG_MEM_SOFT_DIRTY",
    );
    // criu pre-dump does not check, and aborts.
    let log = format!("{RLIMIT}(00.053228) Error (criu/mem.c:46): BUG at criu/mem.c:46\n");
    let aborted = digest(&log, "", Some(ExitStatus::from_raw(6)));
    assert_eq!(aborted.reason, "BUG at criu/mem.c:46");
    assert!(aborted.hint.contains("CONFIG_MEM_SOFT_DIRTY"));
}

#[test]
fn dump_of_a_process_that_ended() {
    check(
        "(00.062823) Warn  (criu/seize.c:63): Failed to open /proc/4000000/comm: No such file or directory\n\
         (00.064007) Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 4000000 (No such process)\n\
         (00.064027) Error (compel/src/lib/infect.c:417): Unable to detach from 4000000: No such process\n\
         (00.064035) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "Unable to detach from 4000000: No such process",
        "ended before",
    );
}

#[test]
fn dump_whose_page_server_went_away() {
    check(
        "(00.045711) Error (criu/page-xfer.c:191): page-xfer: Can't write pages to socket: Broken pipe\n\
         (00.045830) Error (criu/mem.c:718): Can't dump page with parasite\n\
         (00.046115) Error (criu/page-xfer.c:150): page-xfer: Can't send PSI 4132 to server: Broken pipe\n\
         (00.046190) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "page-xfer: Can't write pages to socket: Broken pipe",
        "permafrostd",
    );
}

#[test]
fn dump_from_inside_the_tree() {
    check(
        "(00.025493) Error (compel/src/lib/infect.c:260): The criu itself is within dumped tree.\n\
         (00.025511) Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 13524 (Operation not permitted)\n\
         (00.025537) Error (compel/src/lib/infect.c:260): The criu itself is within dumped tree.\n\
         (00.025651) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "The criu itself is within dumped tree.",
        "another session",
    );
}

#[test]
fn dump_that_an_action_script_refused() {
    check(
        "(00.054593) Error (criu/util.c:657): exited, status=3\n\
         (00.054609) Error (criu/action-scripts.c:94): Script /tmp/x/fail.sh exited with -1\n\
         (00.054622) Error (criu/action-scripts.c:156): One of more action scripts failed\n\
         (00.054684) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "Script /tmp/x/fail.sh exited with -1",
        "action script",
    );
}

#[test]
fn without_capabilities_there_is_no_log() {
    let console = "CRIU needs to have the CAP_SYS_ADMIN or the CAP_CHECKPOINT_RESTORE capability: \n\
                   setcap cap_checkpoint_restore+eip /usr/sbin/criu\n\
                   (00.000000) CRIU run id = a68ee8b2-27f8-4ae5-9001-e4eaa05d5dc1\n\
                   (00.000000) Effective capability 40 missing\n";
    let digest = digest("", console, Some(ExitStatus::from_raw(1 << 8)));
    assert_eq!(
        digest.reason,
        "CRIU needs to have the CAP_SYS_ADMIN or the CAP_CHECKPOINT_RESTORE capability:"
    );
    assert!(digest.hint.contains("run as root"));
    assert_eq!(
        digest.lines,
        ["setcap cap_checkpoint_restore+eip /usr/sbin/criu"]
    );
}

#[test]
fn an_unknown_option_is_named_without_the_usage() {
    let console = "/usr/sbin/criu: unrecognized option '--nonsense'\n\nUsage:\n  criu dump|pre-dump -t PID [<options>]\n";
    let digest = digest("", console, Some(ExitStatus::from_raw(1 << 8)));
    assert_eq!(
        digest.reason,
        "/usr/sbin/criu: unrecognized option '--nonsense'"
    );
    assert!(digest.lines.is_empty());
}

#[test]
fn an_unknown_cause_is_the_first_error() {
    check(
        "(00.05) Error (criu/new.c:1): Something new\n\
         (00.06) Error (criu/old.c:2): Its caller\n\
         (00.07) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "Something new",
        "",
    );
    assert_eq!(
        failed("(00.07) Error (criu/cr-dump.c:1975): Dumping FAILED.\n").reason,
        "CRIU exited with 1 and gave no reason"
    );
    let killed = digest(RLIMIT, "", Some(ExitStatus::from_raw(9)));
    assert_eq!(killed.reason, "CRIU was killed by signal 9");
    assert_eq!(digest("", "", None).reason, "CRIU gave no reason");
}

#[test]
fn limits_of_another_users_process() {
    check(
        "(00.091002) Error (criu/cr-dump.c:391): Can't get rlimit 0: Operation not permitted\n\
         (00.091020) Error (criu/cr-dump.c:1545): Dump core (pid: 912) failed with -1\n\
         (00.091101) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "Can't get rlimit 0: Operation not permitted",
        "CAP_SYS_RESOURCE",
    );
}

#[test]
fn shared_memory_of_system_v_outside_of_an_ipc_namespace() {
    check(
        "(00.061530) Error (criu/cr-dump.c:213): Task 1187 with SysVIPC shmem map @7f2f0c5b8000 doesn't live in IPC ns\n\
         (00.061702) Error (criu/cr-dump.c:1975): Dumping FAILED.\n",
        "Task 1187 with SysVIPC shmem map @7f2f0c5b8000 doesn't live in IPC ns",
        "unshare --ipc",
    );
}

#[test]
fn pages_that_permafrostd_refuses_to_criu_3_17() {
    // In Debian 12, on Linux 6.1.
    let digest = failed(
        "(00.061034) Error (criu/net.c:3553): Unable to restore TCP_CORK (1): Operation not supported\n\
         (00.061210) Error (criu/net.c:3559): Unable to restore TCP_NODELAY (1): Operation not supported\n\
         (01.330514) Error (criu/page-xfer.c:241): page-xfer: Can't write pages to socket: Broken pipe\n\
         (01.331846) Error (criu/page-xfer.c:199): page-xfer: Can't send PSI 4132 to server: Broken pipe\n",
    );
    assert!(digest.blames_page_server, "{digest:?}");
    assert!(digest.reason.starts_with("page-xfer: "), "{digest:?}");
}
