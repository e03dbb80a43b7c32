//! Options that only the command line has: where the others are read from, and what to do instead of serving.

use std::convert::Infallible;
use std::path::PathBuf;

use permafrost_agent::host::manual::CommandDocument;

/// Options that only the command line has. [`crate::settings`] recognizes them by their group, which clap names after
/// this type.
#[derive(clap::Args)]
pub(crate) struct InvocationArgs {
    /// File of options (TOML), a line each, such as `data-dir = "/srv/permafrost"`; `none` reads no file
    /// [default: /etc/permafrost/permafrostd.toml, if it is there].
    #[arg(long, value_name = "FILE", env = "PERMAFROSTD_CONFIG", value_parser = parse_path)]
    pub(crate) config: Option<PathBuf>,
    /// Check all options and the files of certificates, tokens and quotas that they name, and exit. Nothing is opened
    /// or changed.
    #[arg(long)]
    pub(crate) check_config: bool,
    /// Print every option with its value and its origin, and exit. Values that may be secret are left out.
    #[arg(long)]
    pub(crate) print_config: bool,
    /// Print the answer of --print-config as one JSON object.
    #[arg(long, requires = "print_config")]
    pub(crate) json: bool,
    /// Print a configuration file with every option, its meaning and its default, all commented out, and exit.
    #[arg(long)]
    pub(crate) print_default_config: bool,
    /// Print a completion script for a shell, or write the man pages into --to.
    #[arg(long, value_name = "WHAT", hide = true)]
    pub(crate) generate: Option<CommandDocument>,
    /// Directory for the man pages.
    #[arg(long, value_name = "DIR", hide = true, requires = "generate")]
    pub(crate) to: Option<PathBuf>,
}

/// Takes any path: an empty variable is none, as in unit files.
fn parse_path(text: &str) -> Result<PathBuf, Infallible> {
    Ok(PathBuf::from(text))
}
