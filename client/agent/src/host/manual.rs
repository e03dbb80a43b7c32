//! Man pages and completion scripts from the definition of a command line, for packages.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

use clap::{Command, ValueEnum};
use clap_complete::Shell;
use clap_mangen::Man;

/// Documents made from the definition of a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CommandDocument {
    /// Completion script for bash.
    Bash,
    /// Completion script for fish.
    Fish,
    /// Completion script for zsh.
    Zsh,
    /// Man pages: one of the command, and one of each subcommand.
    Man,
}

impl CommandDocument {
    /// Writes the document: a completion script to standard output, man pages of a section of the manual into the
    /// directory `to`, which is made if it is not there.
    ///
    /// # Errors
    /// Standard output or the directory cannot be written; man pages without a directory.
    pub fn write(self, command: Command, section: &str, to: Option<&Path>) -> io::Result<()> {
        let shell = match self {
            Self::Bash => Shell::Bash,
            Self::Fish => Shell::Fish,
            Self::Zsh => Shell::Zsh,
            Self::Man => {
                let to = to.ok_or_else(|| io::Error::other("--to names no directory"))?;
                return manual(command, section, to);
            }
        };
        let (mut command, mut script) = (command, Vec::new());
        let name = command.get_name().to_owned();
        clap_complete::generate(shell, &mut command, name, &mut script);
        io::stdout().write_all(&script)
    }
}

fn manual(command: Command, section: &str, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    page(&command, section, to)
}

/// Writes the page of a command and those of its subcommands, `command-subcommand`.
fn page(command: &Command, section: &str, to: &Path) -> io::Result<()> {
    for inner in command.get_subcommands() {
        if !inner.is_hide_set() {
            page(inner, section, to)?;
        }
    }
    let name = command.get_display_name().unwrap_or(command.get_name());
    let path = to.join(format!("{name}.{section}"));
    let mut text = Vec::new();
    Man::new(command.clone())
        .section(section)
        .manual("Permafrost")
        .render(&mut text)?;
    fs::write(path, text)
}

#[cfg(test)]
mod tests {
    use clap::Arg;

    use super::*;

    #[test]
    fn each_visible_command_has_a_page() {
        let command = Command::new("ice")
            .about("Freezes")
            .arg(Arg::new("deep").long("deep").help("Freeze deeper"))
            .subcommand(Command::new("thaw").about("Thaws"))
            .subcommand(Command::new("inner").hide(true));
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("man");
        let written = CommandDocument::Man.write(command.clone(), "8", Some(&to));
        written.unwrap();
        let mut names: Vec<_> = fs::read_dir(&to)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["ice-thaw.8", "ice.8"]);
        let page = fs::read_to_string(to.join("ice.8")).unwrap();
        assert!(
            page.contains("Freeze deeper") && page.contains(".TH ice 8"),
            "{page}"
        );
        assert!(CommandDocument::Man.write(command, "8", None).is_err());
    }
}
