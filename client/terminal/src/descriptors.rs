//! Starts a program that CRIU can dump: it inherits no open descriptors but the standard streams.

use std::ffi::OsStr;
use std::fs;
use std::process::Command;

/// Value of `O_CLOEXEC` as `/proc/PID/fdinfo/N` shows it, octal.
const CLOSE_ON_EXEC: u32 = 0o2_000_000;

/// Script that closes inherited descriptors and becomes the given program: CRIU refuses descriptors of files
/// from outside of the mount namespace, and pipes whose other end is not in the tree.
const CLOSE_INHERITED: &str = r#"
for fd in /proc/$$/fd/*; do
    fd=${fd##*/}
    [ "$fd" -le 2 ] || eval "exec $fd>&-"
done
exec "$@"
"#;

/// Returns a command that inherits nothing but the standard streams.
pub fn without_inherited(program: impl AsRef<OsStr>) -> Command {
    if !leaked() {
        return Command::new(program);
    }
    let mut command = Command::new("bash");
    command.args(["-c", CLOSE_INHERITED, "bash"]).arg(program);
    command
}

/// Returns true if a child would inherit more than the standard streams.
fn leaked() -> bool {
    let Ok(entries) = fs::read_dir("/proc/self/fdinfo") else {
        return true;
    };
    entries.flatten().any(|entry| {
        let number: Option<u32> = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let Ok(info) = fs::read_to_string(entry.path()) else {
            // The listing's own, gone by now.
            return false;
        };
        let flags = info
            .lines()
            .find_map(|line| line.strip_prefix("flags:"))
            .and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
        number.is_none_or(|number| number > 2)
            && flags.is_none_or(|flags| flags & CLOSE_ON_EXEC == 0)
    })
}
