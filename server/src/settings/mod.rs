//! Options of `permafrostd` from the command line, the environment and the configuration file, in this order of
//! precedence.
//!
//! There is no second list of options: clap's definition ([`Args`]) says which exist, which names and types they have,
//! and which need or exclude each other. Values of the environment and of the file are checked one by one, so that an
//! error can name its line, and then go through the same parser as those of the command line.
//!
//! ```text
//! command line ----------------------------> ArgMatches (which options it has; where the file is)
//! environment, file -> values by option  --> minus those options
//!                                            = one command line -> clap -> Args
//! ```

mod apply;
mod file;
mod print;
mod problem;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};
use permafrost_protocol::versions::SPEAK;
use serde::Serialize;

use crate::arguments::{Args, InvocationArgs, LimitArgs};

pub(crate) use apply::Reloading;
pub(crate) use print::{default_file, print};
pub(crate) use problem::{Problem, SettingsError};

/// Configuration file that is read if it exists and the command line names none.
pub(crate) const DEFAULT_FILE: &str = "/etc/permafrost/permafrostd.toml";

/// Beginning of the names of all variables in the environment.
const VARIABLE_PREFIX: &str = "PERMAFROSTD_";

/// Value of `--config` for no file.
const NO_FILE: &str = "none";

/// Origin of an option's value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "from")]
pub(crate) enum Origin {
    /// The command line.
    CommandLine,
    /// A variable in the environment.
    Environment {
        /// Name of the variable.
        variable: String,
    },
    /// The configuration file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Line of the option's key, from 1.
        line: usize,
    },
    /// The definition of the option.
    Default,
}

/// Value of an option in the environment or in the file.
#[derive(Clone, Debug)]
struct LayerValue {
    /// One value, or any number for an option that may be repeated.
    values: Vec<String>,
    origin: Origin,
    /// Position for messages: the variable, or file, line and column.
    place: String,
    /// Options that this one needs and that are not beside it, as clap writes them.
    needs: Vec<String>,
}

/// Environment as [`Settings::read`] sees it.
pub(crate) type Environment = Vec<(OsString, OsString)>;

/// Options of a daemon and the origin of each.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    matches: ArgMatches,
    /// Values of the environment and of the file, by the option's name.
    layers: BTreeMap<String, LayerValue>,
    /// Configuration file that was read.
    file: Option<PathBuf>,
    /// Variables that begin like an option's and belong to none.
    unknown_variables: Vec<String>,
}

impl Settings {
    /// Reads the options: `arguments` begin with the name of the program. The configuration file is not read for a
    /// subcommand, which has options of its own.
    ///
    /// # Errors
    /// See [`SettingsError`]. Of the file and the environment it names everything that is wrong.
    pub(crate) fn read(
        arguments: &[OsString],
        environment: &Environment,
    ) -> Result<Self, SettingsError> {
        let command = Args::command();
        let given = match command.clone().try_get_matches_from(arguments) {
            Ok(matches) => matches,
            // An option may need another one that is in the file.
            Err(error) if is_about_relations(&error) => command
                .clone()
                .ignore_errors(true)
                .try_get_matches_from(arguments)?,
            Err(error) => return Err(error.into()),
        };
        let mut layers = BTreeMap::new();
        if given.subcommand_name().is_some() {
            let matches = command.try_get_matches_from(arguments)?;
            return Ok(Self {
                matches,
                layers,
                file: None,
                unknown_variables: Vec::new(),
            });
        }
        let mut problems = Vec::new();
        for arg in configurable(&command) {
            let source = given.value_source(arg.get_id().as_str());
            if source == Some(ValueSource::CommandLine) {
                continue;
            }
            match variable_of(&command, arg, environment) {
                Ok(Some(value)) => {
                    layers.insert(name_of(arg).to_owned(), value);
                }
                Ok(None) => {}
                Err(problem) => problems.push(problem),
            }
        }
        let file = file_of(&given);
        if let Some(path) = &file {
            let mut values = file::read(path, &command).unwrap_or_else(|found| {
                problems.extend(found);
                BTreeMap::new()
            });
            for arg in configurable(&command) {
                let is_given = matches!(
                    given.value_source(arg.get_id().as_str()),
                    Some(ValueSource::CommandLine | ValueSource::EnvVariable)
                );
                if let Some(value) = values.remove(name_of(arg))
                    && !is_given
                {
                    layers.entry(name_of(arg).to_owned()).or_insert(value);
                }
            }
        }
        if !problems.is_empty() {
            return Err(SettingsError::Wrong(problems));
        }
        let matches = command
            .clone()
            .try_get_matches_from(joined(arguments, &command, &layers))
            .map_err(|error| match problem::of_relation(&error, &layers) {
                Some(problem) => SettingsError::Wrong(vec![problem]),
                None => error.into(),
            })?;
        Ok(Self {
            matches,
            layers,
            file,
            unknown_variables: unknown_variables(&command, environment),
        })
    }

    /// Returns the parsed options.
    ///
    /// # Errors
    /// clap's; there are none after [`Self::read`].
    pub(crate) fn args(&self) -> Result<Args, SettingsError> {
        Ok(Args::from_arg_matches(&self.matches)?)
    }

    /// Returns the configuration file that was read.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Returns the variables that begin like an option's and belong to none: probably misspelt.
    pub(crate) fn unknown_variables(&self) -> &[String] {
        &self.unknown_variables
    }

    /// Returns the values of an option as text, its default included.
    fn values(&self, arg: &Arg) -> Vec<String> {
        let values = self.matches.get_raw(arg.get_id().as_str());
        let text = |value: &OsStr| value.to_string_lossy().into_owned();
        values.map_or_else(Vec::new, |values| values.map(text).collect())
    }

    fn origin(&self, arg: &Arg) -> Origin {
        if let Some(layer) = self.layers.get(name_of(arg)) {
            return layer.origin.clone();
        }
        let source = self.matches.value_source(arg.get_id().as_str());
        match (source, arg.get_env()) {
            (Some(ValueSource::CommandLine), _) => Origin::CommandLine,
            (Some(ValueSource::EnvVariable), Some(name)) => Origin::Environment {
                variable: name.to_string_lossy().into_owned(),
            },
            _ => Origin::Default,
        }
    }
}

/// Returns true for an error that another option could remove.
fn is_about_relations(error: &clap::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::MissingRequiredArgument | ErrorKind::ArgumentConflict
    )
}

/// Returns the options that the environment and the file may set.
fn configurable(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| {
        arg.get_long().is_some()
            && !is_in::<InvocationArgs>(command, arg)
            && !matches!(
                arg.get_action(),
                ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
            )
    })
}

/// Returns true for an option that SIGHUP reads again.
fn is_reloadable(command: &Command, arg: &Arg) -> bool {
    is_in::<LimitArgs>(command, arg)
}

/// Returns true if an option is a field of `T`: clap makes a group of each such type.
fn is_in<T: clap::Args>(command: &Command, arg: &Arg) -> bool {
    let group = T::group_id();
    let mut groups = command.get_groups();
    groups.any(|one| {
        Some(one.get_id()) == group.as_ref() && one.get_args().any(|id| id == arg.get_id())
    })
}

/// Returns true if the value of an option may be a secret. The definition marks them by `hide_env_values`.
fn is_secret(arg: &Arg) -> bool {
    arg.is_hide_env_values_set()
}

fn is_repeatable(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// Returns true if the values of an option are of the type `T`.
fn is_of<T: 'static>(arg: &Arg) -> bool {
    let parser: &ValueParser = arg.get_value_parser();
    parser.type_id() == std::any::TypeId::of::<T>()
}

/// Returns the name of an option, which is its key in the file.
fn name_of(arg: &Arg) -> &str {
    arg.get_long().unwrap_or_default()
}

/// Returns the name of an option's variable.
fn variable_name(arg: &Arg) -> String {
    let name = name_of(arg).to_uppercase().replace('-', "_");
    format!("{VARIABLE_PREFIX}{name}")
}

/// Returns the value of an option's variable. An empty one counts as none, as in unit files.
fn variable_of(
    command: &Command,
    arg: &Arg,
    environment: &Environment,
) -> Result<Option<LayerValue>, Problem> {
    let variable = variable_name(arg);
    let Some((_, value)) = environment.iter().find(|(name, _)| *name == *variable) else {
        return Ok(None);
    };
    let place = format!("variable {variable}");
    let Some(value) = value.to_str() else {
        return Err(Problem::new(place, "the value is not UTF-8".to_owned()));
    };
    if value.is_empty() {
        return Ok(None);
    }
    let values = if is_repeatable(arg) {
        value.split(',').map(|one| one.trim().to_owned()).collect()
    } else {
        vec![value.to_owned()]
    };
    let needs =
        check(command, arg, &values).map_err(|message| Problem::new(place.clone(), message))?;
    Ok(Some(LayerValue {
        values,
        origin: Origin::Environment { variable },
        place,
        needs,
    }))
}

/// Parses the values of an option. Returns the options that it needs.
///
/// # Errors
/// A value is wrong; the error is a message.
fn check(command: &Command, arg: &Arg, values: &[String]) -> Result<Vec<String>, String> {
    let alone = std::iter::once(OsString::new()).chain(options(arg, values));
    match command.clone().try_get_matches_from(alone) {
        Ok(_) => Ok(Vec::new()),
        Err(error) if is_about_relations(&error) => Ok(strings(&error, ContextKind::InvalidArg)),
        Err(error) => Err(problem::of_value(arg, &error)),
    }
}

/// Returns the text of a part of clap's errors.
fn strings(error: &clap::Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::Strings(strings)) => strings.clone(),
        Some(ContextValue::String(string)) => vec![string.clone()],
        _ => Vec::new(),
    }
}

/// Returns an option with its values, as on a command line.
fn options<'a>(arg: &'a Arg, values: &'a [String]) -> impl Iterator<Item = OsString> + 'a {
    let name = name_of(arg);
    values
        .iter()
        .map(move |value| format!("--{name}={value}").into())
}

/// Returns a command line with the values of the layers before those of `arguments`.
fn joined(
    arguments: &[OsString],
    command: &Command,
    layers: &BTreeMap<String, LayerValue>,
) -> Vec<OsString> {
    let mut all: Vec<OsString> = arguments.iter().take(1).cloned().collect();
    for arg in command.get_arguments() {
        if let Some(layer) = layers.get(name_of(arg)) {
            all.extend(options(arg, &layer.values));
        }
    }
    all.extend(arguments.iter().skip(1).cloned());
    all
}

/// Returns the configuration file to read.
fn file_of(given: &ArgMatches) -> Option<PathBuf> {
    match given.get_one::<PathBuf>("config") {
        Some(none) if none.as_os_str() == NO_FILE => None,
        Some(path) if !path.as_os_str().is_empty() => Some(path.clone()),
        _ => {
            let path = Path::new(DEFAULT_FILE);
            // One that cannot be reached is an error when it is read: a daemon that started without the options that
            // are there would open another region.
            let absent = path.symlink_metadata().is_err_and(|error| {
                matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                )
            });
            (!absent).then(|| path.to_owned())
        }
    }
}

fn unknown_variables(command: &Command, environment: &Environment) -> Vec<String> {
    let known = |name: &str| {
        let mut all = command.get_arguments();
        all.any(|arg| arg.get_long().is_some() && variable_name(arg) == name)
    };
    let names = environment.iter().filter_map(|(name, _)| name.to_str());
    names
        .filter(|name| name.starts_with(VARIABLE_PREFIX) && *name != SPEAK && !known(name))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests;
