//! The key that wraps the store key: a file, or a command that asks a key management service.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use zeroize::Zeroizing;

use crate::error::KeysError;
use crate::sealed::{open, seal};

/// Bytes of a key.
pub(crate) const KEY_BYTES: usize = 32;
/// Most bytes that a command may print.
const MOST_PRINTED: u64 = 64 << 10;
/// Time that a command has.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Period at which a running command is looked at.
const POLL: Duration = Duration::from_millis(10);
/// Associated data of a wrapped key.
const CONTEXT: &[u8] = b"permafrost store key";

/// Wraps and unwraps the store key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrapper {
    /// A file of 32 random bytes that belongs to this user or root and that nobody else can read.
    File(PathBuf),
    /// A command line for the shell: `wrap` or `unwrap` is its last argument, the bytes are its standard input, and the
    /// result its standard output.
    Command(String),
}

impl Wrapper {
    pub(crate) fn wrap(&self, key: &[u8; KEY_BYTES]) -> Result<Vec<u8>, KeysError> {
        match self {
            Self::File(path) => Ok(seal(&*read_key(path)?, CONTEXT, key)),
            Self::Command(command) => Ok(run(command, "wrap", key, TIMEOUT)?.to_vec()),
        }
    }

    /// Unwraps a key; `None` if it was wrapped with another one.
    pub(crate) fn unwrap(
        &self,
        wrapped: &[u8],
    ) -> Result<Option<Zeroizing<[u8; KEY_BYTES]>>, KeysError> {
        let plain = match self {
            Self::File(path) => match open(&*read_key(path)?, CONTEXT, wrapped) {
                Some(plain) => plain,
                None => return Ok(None),
            },
            Self::Command(command) => run(command, "unwrap", wrapped, TIMEOUT)?,
        };
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        if plain.len() != KEY_BYTES {
            return Err(KeysError::Command {
                command: self.to_string(),
                verb: "unwrap",
                what: format!("printed {} bytes instead of {KEY_BYTES}", plain.len()),
            });
        }
        key.copy_from_slice(&plain);
        Ok(Some(key))
    }
}

impl std::fmt::Display for Wrapper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Command(command) => f.write_str(command),
        }
    }
}

fn read_key(path: &Path) -> Result<Zeroizing<[u8; KEY_BYTES]>, KeysError> {
    let failed = |source| KeysError::Io {
        action: "read key file",
        path: path.to_owned(),
        source,
    };
    let defect = |what: String| KeysError::KeyFile {
        path: path.to_owned(),
        what,
    };
    let mut file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let owner = metadata.uid();
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(defect(format!("belongs to user {owner}")));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(defect(format!(
            "has mode {mode:o}: it has to be 600 or 400"
        )));
    }
    if metadata.len() != KEY_BYTES as u64 {
        let len = metadata.len();
        return Err(defect(format!("has {len} bytes instead of {KEY_BYTES}")));
    }
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    file.read_exact(key.as_mut_slice()).map_err(failed)?;
    Ok(key)
}

/// Runs a command with `input` on its standard input, and returns what it prints.
fn run(
    command: &str,
    verb: &'static str,
    input: &[u8],
    timeout: Duration,
) -> Result<Zeroizing<Vec<u8>>, KeysError> {
    let failed = |what: String| KeysError::Command {
        command: command.to_owned(),
        verb,
        what,
    };
    let mut child = Command::new("/bin/sh")
        .args(["-c", &format!("{command} {verb}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // A group of its own: what the shell starts ends with it.
        .process_group(0)
        .spawn()
        .map_err(|error| failed(format!("was not started: {error}")))?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let ended = std::thread::scope(|scope| {
        scope.spawn(move || {
            // One that reads nothing is judged by what it prints.
            let _ = stdin.map(|mut stdin| stdin.write_all(input));
        });
        let reader = scope.spawn(move || {
            let mut printed = Zeroizing::new(Vec::new());
            let read = stdout.map(|out| out.take(MOST_PRINTED + 1).read_to_end(&mut printed));
            (printed, read.transpose())
        });
        let status = wait(&mut child, timeout);
        let (printed, read) = match reader.join() {
            Ok(read) => read,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        (status, printed, read)
    });
    let (status, printed, read) = ended;
    let status = status.map_err(|error| failed(format!("cannot be waited for: {error}")))?;
    let Some(status) = status else {
        return Err(KeysError::Timeout {
            command: command.to_owned(),
            verb,
            timeout,
        });
    };
    if !status.success() {
        return Err(failed(format!("failed: {status}")));
    }
    read.map_err(|error| failed(format!("cannot be read from: {error}")))?;
    match printed.len() as u64 {
        0 => Err(failed("printed nothing".to_owned())),
        len if len > MOST_PRINTED => Err(failed(format!("printed over {MOST_PRINTED} bytes"))),
        _ => Ok(printed),
    }
}

/// Waits for a child; `None` if it has not ended in time. Then its group is ended: whatever still has the pipes would
/// keep the threads.
fn wait(child: &mut Child, timeout: Duration) -> std::io::Result<Option<ExitStatus>> {
    let until = Instant::now() + timeout;
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let Some(group) = group else {
        return child.wait().map(Some);
    };
    // Not taken yet: the number of the group is its own until then.
    let ended = || {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        Ok::<_, std::io::Error>(waitid(WaitId::Pid(group), options)?.is_some())
    };
    let mut has_ended = ended()?;
    while !has_ended && Instant::now() < until {
        std::thread::sleep(POLL);
        has_ended = ended()?;
    }
    // There may be nobody left in it.
    let _ = kill_process_group(group, Signal::KILL);
    let status = child.wait()?;
    Ok(has_ended.then_some(status))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_file_has_to_be_private_and_of_32_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let wrapper = Wrapper::File(path.clone());
        assert!(matches!(wrapper.wrap(&[7; 32]), Err(KeysError::Io { .. })));
        std::fs::write(&path, [1; 32]).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(
            wrapper.wrap(&[7; 32]),
            Err(KeysError::KeyFile { .. })
        ));
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let wrapped = wrapper.wrap(&[7; 32]).unwrap();
        assert_eq!(
            **wrapper.unwrap(&wrapped).unwrap().as_ref().unwrap(),
            [7; 32]
        );
        std::fs::write(&path, [2; 32]).unwrap();
        assert!(wrapper.unwrap(&wrapped).unwrap().is_none());
        std::fs::write(&path, [1; 33]).unwrap();
        assert!(matches!(
            wrapper.unwrap(&wrapped),
            Err(KeysError::KeyFile { .. })
        ));
    }

    #[test]
    fn a_command_wraps_and_its_failures_are_named() {
        // "Wraps" by a prefix of three bytes.
        let kms = "k() { case $1 in wrap) printf kms; cat;; unwrap) tail -c +4;; esac; }; k";
        let wrapper = Wrapper::Command(kms.to_owned());
        let wrapped = wrapper.wrap(&[b'x'; 32]).unwrap();
        assert_eq!(wrapped.len(), 35);
        assert_eq!(
            **wrapper.unwrap(&wrapped).unwrap().as_ref().unwrap(),
            [b'x'; 32]
        );
        for (command, says) in [
            ("exit 3; :", "exit status: 3"),
            (":", "printed nothing"),
            ("head -c 70000 /dev/zero; :", "printed over"),
            ("printf abc; :", "printed 3 bytes"),
        ] {
            let error = Wrapper::Command(command.to_owned()).unwrap(b"wrapped");
            let error = error.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_command_that_hangs_is_ended() {
        let hung = run("sleep 1000; :", "unwrap", b"", Duration::from_millis(200));
        assert!(matches!(hung, Err(KeysError::Timeout { .. })));
    }
}
