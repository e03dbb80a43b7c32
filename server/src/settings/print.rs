//! Prints the options: their values with the origins, and a configuration file with the defaults.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::Path;

use clap::{Arg, Command, CommandFactory as _};
use serde::Serialize;

use super::{
    Origin, Settings, configurable, is_of, is_reloadable, is_repeatable, is_secret, name_of,
    variable_name,
};
use crate::arguments::Args;

/// Printed instead of a value that may be a secret.
const HIDDEN: &str = "(not shown)";

/// Longest line of the configuration file, characters.
const LINE_CHARS: usize = 100;

/// All options, as `--print-config --json` prints them.
#[derive(Serialize)]
struct PrintedSettings<'a> {
    /// Configuration file that was read.
    file: Option<&'a Path>,
    options: Vec<PrintedOption>,
    /// Variables in the environment that belong to no option.
    unknown_variables: &'a [String],
}

/// An option, as `--print-config --json` prints it.
#[derive(Serialize)]
struct PrintedOption {
    name: String,
    /// Values as on the command line: none for an option that is not set, several for one that may be repeated.
    values: Vec<String>,
    /// True if the option is set to something that may be a secret; `values` is empty then.
    hidden: bool,
    #[serde(flatten)]
    origin: Origin,
    /// True if SIGHUP applies a change of it.
    reloadable: bool,
}

/// Prints every option with its value and its origin.
///
/// # Errors
/// `out` cannot be written.
pub(crate) fn print(settings: &Settings, json: bool, out: &mut dyn Write) -> io::Result<()> {
    let command = Args::command();
    let options: Vec<_> = configurable(&command)
        .map(|arg| printed(settings, &command, arg))
        .collect();
    if json {
        let all = PrintedSettings {
            file: settings.file(),
            options,
            unknown_variables: settings.unknown_variables(),
        };
        serde_json::to_writer_pretty(&mut *out, &all)?;
        return writeln!(out);
    }
    let value = |option: &PrintedOption| match (option.hidden, option.values.as_slice()) {
        (true, _) => HIDDEN.to_owned(),
        (false, []) => "-".to_owned(),
        (false, values) => values.join(", "),
    };
    let widest = |texts: &mut dyn Iterator<Item = String>| {
        texts.map(|text| text.chars().count()).max().unwrap_or(0)
    };
    let names = widest(&mut options.iter().map(|option| option.name.clone()));
    let values = widest(&mut options.iter().map(value)).min(40);
    match settings.file() {
        Some(path) => writeln!(out, "# configuration file: {}", path.display())?,
        None => writeln!(out, "# no configuration file")?,
    }
    for option in &options {
        let origin = match &option.origin {
            Origin::CommandLine => "command line".to_owned(),
            Origin::Environment { variable } => format!("environment, {variable}"),
            Origin::File { path, line } => format!("{}:{line}", path.display()),
            Origin::Default => "default".to_owned(),
        };
        writeln!(
            out,
            "{:names$}  {:values$}  {origin}",
            option.name,
            value(option)
        )?;
    }
    Ok(())
}

fn printed(settings: &Settings, command: &Command, arg: &Arg) -> PrintedOption {
    let values: Vec<_> = settings.values(arg);
    // An option may have the empty text as its default, which stands for none.
    let values: Vec<_> = values.into_iter().filter(|one| !one.is_empty()).collect();
    let hidden = is_secret(arg) && !values.is_empty();
    PrintedOption {
        name: name_of(arg).to_owned(),
        values: if hidden { Vec::new() } else { values },
        hidden,
        origin: settings.origin(arg),
        reloadable: is_reloadable(command, arg),
    }
}

/// Returns a configuration file with every option, its meaning and its default, all commented out.
pub(crate) fn default_file() -> String {
    let command = Args::command();
    let mut text = "\
# Configuration of permafrostd.
#
# Each line below has an option with its default, or with an example where there is none: remove the
# \"#\" before an option to set it. The command line goes before the environment (PERMAFROSTD_DATA_DIR
# for data-dir), and the environment before this file. `permafrostd --check-config` checks the file,
# and `permafrostd --print-config` prints each value and its origin. SIGHUP (`systemctl reload
# permafrostd`) applies changes of the options that say so; the others need a restart.
"
    .to_owned();
    let mut heading = None;
    let mut options: Vec<_> = configurable(&command).collect();
    // What has no heading would seem to belong to the one before.
    options.sort_by_key(|arg| arg.get_help_heading().is_some());
    for arg in options {
        if arg.get_help_heading() != heading {
            heading = arg.get_help_heading();
            if let Some(heading) = heading {
                // Writing into a String does not fail.
                let _ = write!(text, "\n\n## {heading}\n");
            }
        }
        text.push('\n');
        describe(&mut text, &command, arg);
        let _ = writeln!(text, "#{} = {}", name_of(arg), example(arg));
    }
    text
}

/// Writes the meaning of an option as comments.
fn describe(text: &mut String, command: &Command, arg: &Arg) {
    let help = arg.get_long_help().or_else(|| arg.get_help());
    let mut words = help.map_or_else(String::new, ToString::to_string);
    // clap takes the full stop away.
    if !words.ends_with('.') {
        words.push('.');
    }
    let _ = write!(words, " Variable: {}", variable_name(arg));
    if let Some(other) = arg.get_env() {
        let _ = write!(words, ", or {}", other.to_string_lossy());
    }
    words.push('.');
    if is_reloadable(command, arg) {
        words.push_str(" SIGHUP applies changes.");
    }
    let mut line = String::from("#");
    for word in words.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > LINE_CHARS {
            let _ = writeln!(text, "{line}");
            line = String::from("#");
        }
        line.push(' ');
        line.push_str(word);
    }
    let _ = writeln!(text, "{line}");
}

/// Returns the default of an option as TOML, or an example of the form that its value has.
fn example(arg: &Arg) -> String {
    let default = arg.get_default_values().first();
    let default = default.map(|value| value.to_string_lossy().into_owned());
    if is_of::<bool>(arg) {
        return default.unwrap_or_else(|| "false".to_owned());
    }
    let quoted = |text: &str| format!("{text:?}");
    let value = match default.filter(|default| !default.is_empty()) {
        Some(number) if number.parse::<u64>().is_ok() => number,
        Some(default) => quoted(&default),
        None => {
            let name = arg.get_value_names().and_then(|names| names.first());
            quoted(name.map_or("…", |name| name.as_str()))
        }
    };
    if is_repeatable(arg) {
        return format!("[{value}]");
    }
    value
}
