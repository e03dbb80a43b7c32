//! The plugin for CRIU: `criu dump -L DIR`, with this library and a link `permafrost-hook` to `permafrost-action` in
//! `DIR`, stores its dump without any other option.
//!
//! CRIU loads every `*.so` of `DIR` and calls `init`, before anything is frozen. There the plugin sees whether
//! `permafrostd` answers: if not, the dump fails at once. Then it has CRIU call the hook as one of its action scripts,
//! which seals while the processes are frozen, and can veto. The plugin has no hooks of CRIU's own (`max_hooks` 0): so it
//! is accepted by every release, whose tables of hooks differ in length.
//!
//! A plugin cannot know CRIU's options: their structure differs from release to release. It needs none: `add_script` is
//! one of the functions that CRIU exports to its plugins (it is linked with `-rdynamic`), and has been the same since
//! 3.11. Two cases are left to a line in CRIU's configuration (`permafrost install-criu-hooks`): a CRIU that exports no
//! such function; and requests over RPC (runc, crun) before 4.0, as releases before 3.19 end in an assertion if a script
//! is added there.

#![expect(
    unsafe_code,
    reason = "the interface to CRIU is C's; this is the only file of the crate with unsafe code"
)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::{env, fs};

/// Stage of a dump (`CR_PLUGIN_STAGE__DUMP`); 1 is a pre-dump, 2 a restore.
const DUMP: c_int = 0;

/// Version of the interface: 0.2.0, of every release since 1.4.
const VERSION: c_uint = 0x0000_0200;

/// Name of the program that CRIU is to call, in the plugin's directory.
const HOOK: &str = "permafrost-hook";

/// Control socket of `permafrostd`, as the hook finds it.
const SOCKET_VARIABLE: &str = "PERMAFROST_SOCKET";
const DEFAULT_SOCKET: &str = "/run/permafrost/control.sock";

/// Job and session of the dump, as the hook finds them; the job `none` leaves a dump alone.
const JOB_VARIABLE: &str = "PERMAFROST_JOB";
const SESSION_VARIABLE: &str = "PERMAFROST_SESSION";

/// Description that CRIU looks for in a plugin, `cr_plugin_desc_t` of `criu/include/criu-plugin.h` up to its hooks. CRIU
/// reads as many hooks behind it as `max_hooks` says: none.
#[repr(C)]
pub struct Descriptor {
    name: *const c_char,
    init: extern "C" fn(c_int) -> c_int,
    exit: extern "C" fn(c_int, c_int),
    version: c_uint,
    max_hooks: c_uint,
}

// SAFETY: all fields are read only; the name points to a constant.
unsafe impl Sync for Descriptor {}

/// The plugin's descriptor, which CRIU finds by its name.
// SAFETY: no other symbol of this name is in the library, and CRIU looks it up in the library only.
#[unsafe(no_mangle)]
pub static CR_PLUGIN_DESC: Descriptor = Descriptor {
    name: c"permafrost".as_ptr(),
    init,
    exit,
    version: VERSION,
    max_hooks: 0,
};

/// Called by CRIU before anything is frozen; a return value other than 0 ends the dump.
extern "C" fn init(stage: c_int) -> c_int {
    if stage != DUMP {
        return 0;
    }
    match prepare() {
        Ok(()) => 0,
        Err(why) => {
            // CRIU's standard error: its log, or the terminal.
            eprintln!("permafrost: {why}");
            -1
        }
    }
}

extern "C" fn exit(_stage: c_int, _result: c_int) {}

fn prepare() -> Result<(), String> {
    let has_session = env::var_os(SESSION_VARIABLE).is_some_and(|session| !session.is_empty());
    if !has_session && env::var_os(JOB_VARIABLE).is_some_and(|job| job == "none") {
        return Ok(());
    }
    let socket =
        env::var_os(SOCKET_VARIABLE).map_or_else(|| PathBuf::from(DEFAULT_SOCKET), PathBuf::from);
    UnixStream::connect(&socket).map_err(|error| {
        format!(
            "permafrostd does not answer at {}: {error}",
            socket.display()
        )
    })?;
    let hook = directory()
        .ok_or("the plugin's directory is not known")?
        .join(HOOK);
    let metadata = fs::metadata(&hook).map_err(|error| format!("{}: {error}", hook.display()))?;
    if !metadata.is_file() {
        return Err(format!("{} is no program", hook.display()));
    }
    let hook = CString::new(hook.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    if is_rpc() && symbol(c"rpc_query_external_files").is_null() {
        return Err("this CRIU runs no scripts of plugins for runc: run permafrost install-criu-hooks instead".to_owned());
    }
    let add_script = symbol(c"add_script");
    if add_script.is_null() {
        return Err(
            "this CRIU exports no add_script: run permafrost install-criu-hooks instead".to_owned(),
        );
    }
    // SAFETY: the symbol of this name is `int add_script(char *path)` in every release from 3.11 to 4.2
    // (`criu/action-scripts.c`). It was found in the program that called this plugin.
    let add_script = unsafe { std::mem::transmute::<*mut c_void, AddScript>(add_script) };
    // SAFETY: the path ends with a zero; CRIU copies it (`xstrdup`) and changes nothing.
    match unsafe { add_script(hook.as_ptr()) } {
        0 => Ok(()),
        _ => Err("CRIU does not take the script".to_owned()),
    }
}

type AddScript = unsafe extern "C" fn(*const c_char) -> c_int;

/// Returns the address of a symbol of the program or of one of its libraries; null if there is none.
fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: the name ends with a zero.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// Returns true if this CRIU was started by libcriu, for a request over RPC.
fn is_rpc() -> bool {
    let line = fs::read("/proc/self/cmdline").unwrap_or_default();
    let mut arguments = line.split(|byte| *byte == 0);
    arguments.any(|argument| argument == b"swrk" || argument == b"service")
}

/// Returns the directory that this library was loaded from.
fn directory() -> Option<PathBuf> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    let own = (&raw const CR_PLUGIN_DESC).cast::<c_void>();
    // SAFETY: `found` has room for the answer; the address is one of this library.
    let known = unsafe { libc::dladdr(own, found.as_mut_ptr()) };
    if known == 0 {
        return None;
    }
    // SAFETY: it was zeroed, which is valid for its fields, integers and pointers, and filled by dladdr.
    let found = unsafe { found.assume_init() };
    if found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gives the path as a string that ends with a zero and lives as long as the library is loaded.
    let path = unsafe { CStr::from_ptr(found.dli_fname) };
    let path = PathBuf::from(std::ffi::OsStr::from_bytes(path.to_bytes()));
    Some(fs::canonicalize(path).ok()?.parent()?.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `CR_PLUGIN_HOOK__MAX` of the releases.
    const MAX_HOOKS: [(&str, c_uint); 6] = [
        ("3.17", 10),
        ("3.18", 10),
        ("3.19", 10),
        ("4.0", 12),
        ("4.1", 12),
        ("4.2", 13),
    ];

    /// Loads the library as `cr_lib_load` of `criu/plugin.c` does, and returns its descriptor.
    fn load(path: &std::path::Path) -> &'static Descriptor {
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: the path ends with a zero; the library has no constructors but the standard library's.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY) };
        assert!(!library.is_null(), "{path:?} is not loaded");
        // SAFETY: the name ends with a zero.
        let descriptor = unsafe { libc::dlsym(library, c"CR_PLUGIN_DESC".as_ptr()) };
        assert!(!descriptor.is_null(), "no descriptor");
        // SAFETY: the library is the one of this file, and is never unloaded.
        unsafe { &*descriptor.cast::<Descriptor>() }
    }

    #[test]
    fn every_release_from_3_17_to_4_2_takes_the_plugin() {
        assert_eq!(std::mem::offset_of!(Descriptor, init), 8);
        assert_eq!(std::mem::offset_of!(Descriptor, exit), 16);
        assert_eq!(std::mem::offset_of!(Descriptor, version), 24);
        assert_eq!(std::mem::offset_of!(Descriptor, max_hooks), 28);
        assert_eq!(size_of::<Descriptor>(), 32);
        let built = env::current_exe().unwrap();
        let built = built.parent().unwrap().join("libpermafrost_plugin.so");
        let descriptor = load(&built);
        for (release, max_hooks) in MAX_HOOKS {
            // verify_plugin of criu/plugin.c.
            assert!(
                descriptor.version <= VERSION && descriptor.max_hooks <= max_hooks,
                "{release}"
            );
            // An older version would be freed at the end.
            assert!(descriptor.version > 0x100, "{release}");
        }
        // SAFETY: the name is a constant of the library that ends with a zero.
        let name = unsafe { CStr::from_ptr(descriptor.name) };
        assert_eq!(name, c"permafrost");
        // Restores and pre-dumps are none of its business; and a dump fails here before it is frozen, as no daemon or no
        // CRIU is there.
        for stage in [1, 2] {
            assert_eq!((descriptor.init)(stage), 0);
        }
        assert_eq!((descriptor.init)(DUMP), -1);
        (descriptor.exit)(DUMP, 0);
    }
}
