//! The plugin as CRIU's loader treats it. The tests are in the plugin's own file, the only one with unsafe code; here, the
//! library is built when they run.

#[path = "../src/plugin.rs"]
#[expect(unreachable_pub, reason = "the descriptor is public in the library")]
mod plugin;
