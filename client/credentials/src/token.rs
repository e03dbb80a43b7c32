//! `permafrost token`: makes tokens for a node's HTTP API.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use permafrost_identity::{Namespaces, Scope, Scopes, Token};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use serde::Serialize;

/// Help text behind the options of `permafrost token`.
pub const TOKEN_EXAMPLES: &str = "\
The token itself is printed this once; nodes keep its hash. Without --namespace it is good for all jobs. Nodes read the \
file of --api-tokens again when it changes: a line that is taken out is refused within a second.

Examples:
    permafrost token new --name me --scopes read --add-to /etc/permafrost/api-tokens       # prints the token
    permafrost token new --name slurm --scopes read,reserve --quiet > token                # for --api-token-file
";

/// Arguments of `permafrost token`.
#[derive(Debug, Args)]
pub struct TokenArguments {
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    /// Make a token, and the line for --api-tokens that lets it in.
    New(NewArguments),
}

#[derive(Debug, Args)]
struct NewArguments {
    /// Who will show it: letters, digits and . _ -
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    name: String,
    /// What it may ask for: read, reserve, operate; separated by commas.
    #[arg(long, value_name = "SCOPES", value_delimiter = ',', required = true)]
    scopes: Vec<String>,
    /// A namespace whose jobs it may see. Repeatable.
    #[arg(long = "namespace", value_name = "NS")]
    namespaces: Vec<String>,
    /// Append the line to the node's file of tokens, which is made with mode 0600 if there is none.
    #[arg(long, value_name = "FILE")]
    add_to: Option<PathBuf>,
}

/// A token, and its line for the node's file.
#[derive(Serialize)]
struct New {
    /// The token: keep it secret.
    token: String,
    /// Line for the file that --api-tokens names.
    line: String,
}

/// Runs `permafrost token`.
///
/// # Errors
/// The failure of the command.
pub fn token(context: &Context, arguments: &TokenArguments) -> Result<(), Failure> {
    match &arguments.command {
        TokenCommand::New(arguments) => {
            let new = new(arguments)?;
            match &arguments.add_to {
                Some(path) => append(path, &new.line)
                    .map_err(|error| Failure::io("append to", path, &error))?,
                None => context.remark(&format!("the line for --api-tokens: {}", new.line)),
            }
            context.print(&new, |new| new.token.clone())
        }
    }
}

fn new(arguments: &NewArguments) -> Result<New, Failure> {
    let scopes: Scopes = arguments
        .scopes
        .iter()
        .map(|scope| scope.parse::<Scope>())
        .collect::<Result<_, _>>()
        .map_err(|error| Failure::new(Code::Invalid, error.to_string()))?;
    let namespaces = Namespaces::new(arguments.namespaces.iter().map(String::as_str))?;
    let token = Token::fresh()?;
    let mut line = format!("{} {scopes} {}", arguments.name, token.hash());
    if !namespaces.is_empty() {
        let namespaces: Vec<&str> = namespaces.iter().collect();
        line.push_str(&format!(" {}", namespaces.join(",")));
    }
    Ok(New {
        token: token.to_string(),
        line,
    })
}

/// Appends a line to a file in one write, as a node may read it at any time.
fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)?;
    let before = std::fs::read(path)?;
    let separator = if before.is_empty() || before.ends_with(b"\n") {
        ""
    } else {
        "\n"
    };
    file.write_all(format!("{separator}{line}\n").as_bytes())
}

/// Parses a name as the node accepts it.
fn parse_name(text: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if text.is_empty() || text.len() > 64 || !text.bytes().all(plain) {
        return Err(format!(
            "{text:?} is no name: up to 64 letters, digits and . _ -"
        ));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use permafrost_identity::TokenHash;

    use super::*;

    #[test]
    fn a_token_comes_with_the_line_that_lets_it_in() {
        let arguments = |scopes: &[&str]| NewArguments {
            name: "slurm".to_owned(),
            scopes: scopes.iter().map(|&scope| scope.to_owned()).collect(),
            namespaces: vec!["b".to_owned(), "a".to_owned()],
            add_to: None,
        };
        let new = new(&arguments(&["reserve", "read"])).unwrap();
        let hash = TokenHash::of(&new.token);
        assert_eq!(new.line, format!("slurm read,reserve {hash} a,b"));
        let refused = self::new(&arguments(&["write"])).err().unwrap();
        assert_eq!(refused.code, Code::Invalid);
        for bad in ["", "a b", "a/b", &"x".repeat(65)] {
            assert!(parse_name(bad).is_err(), "{bad}");
        }
    }
    #[test]
    fn lines_are_appended_to_a_file_that_only_its_owner_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api-tokens");
        append(&path, "a read 1").unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // An editor may have left out the last newline.
        std::fs::write(&path, "a read 1").unwrap();
        append(&path, "b read 2").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "a read 1\nb read 2\n");
    }
}
