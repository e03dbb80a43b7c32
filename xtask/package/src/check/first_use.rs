//! The path of a first-time user: the book's first pages, typed into a shell of a clean Debian that has nothing but the
//! packages beside it; and how much typing that is.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::Site;
use crate::succeed;

/// Pages in the order in which they are read: packages, doctor, first dump, page; and further nodes.
const PAGES: [&str; 2] = ["quickstart.md", "quickstart-cluster.md"];

/// Begin of the command that names CRIU where it is not on PATH, as the first page says it.
const NAME_CRIU: &str = "export PERMAFROST_CRIU=";

/// Packages of Debian that the pages install. They are fetched before: the time of a download says nothing of the pages.
const FETCHED: [&str; 2] = ["etcd-server", "procps"];

/// Speed of typing that times are told for, characters in a minute: 40 words of five characters, that of an average
/// typist of prose.
const CHARACTERS_PER_MINUTE: f64 = 200.0;

/// Commands of a page as one types them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Typing {
    /// Commands of each block, and the line of the block.
    blocks: Vec<(usize, String)>,
}

impl Typing {
    /// Takes the blocks for a shell out of a page, without comments.
    fn of(page: &str) -> Self {
        let mut blocks: Vec<(usize, String)> = Vec::new();
        let mut is_inside = false;
        for (number, line) in (1..).zip(page.lines()) {
            match (is_inside, line) {
                (false, "```sh") => {
                    is_inside = true;
                    blocks.push((number, String::new()));
                }
                (true, "```") => is_inside = false,
                (true, line) => {
                    let line = line.split("  #").next().unwrap_or(line).trim_end();
                    if let Some((_, text)) = blocks.last_mut() {
                        *text += line;
                        text.push('\n');
                    }
                }
                (false, _) => {}
            }
        }
        Self { blocks }
    }
}

/// Types the pages of the tree at `source` into a shell of `site`, which has no package of ours yet, and says how long
/// it takes. `packages` are copied to where the shell starts.
///
/// # Errors
/// A command fails, or a page does not say what it has to.
pub(super) fn run(
    site: &Site<'_>,
    source: &Path,
    packages: &[std::path::PathBuf],
    target: &Path,
    criu: &Path,
) -> Result<()> {
    let done = site.host.begin("the book's first pages");
    let home = site.root.join("root/packages");
    fs::create_dir(&home).context("create a directory for the packages")?;
    let mut fetched: Vec<_> = FETCHED.map(str::to_owned).into();
    for path in packages {
        let name = path.file_name().context("a package without a name")?;
        fs::copy(path, home.join(name)).context("copy a package")?;
        // With what it depends on and recommends.
        fetched.push(format!("/root/packages/{}", name.display()));
    }
    // Whoever types answers apt's question with the return key.
    let apt = site.root.join("etc/apt/apt.conf.d/90yes");
    fs::write(apt, "APT::Get::Assume-Yes \"true\";\n").context("write apt's configuration")?;
    // The lists are of the day on which the clean Debian was made.
    succeed(site.inside("apt-get").args(["update", "--quiet"])).context("renew apt's lists")?;
    let mut fetch = site.inside("apt-get");
    fetch.args(["install", "--download-only", "--quiet"]);
    succeed(fetch.args(fetched)).context("fetch what the pages install")?;

    let mut pages = Vec::new();
    for name in PAGES {
        let text = fs::read_to_string(source.join("docs").join(name))
            .with_context(|| format!("read docs/{name}"))?;
        pages.push((name, text));
    }
    if !pages.iter().any(|(_, text)| text.contains(NAME_CRIU)) {
        bail!("no page says `{NAME_CRIU}`");
    }
    let typed: Vec<_> = pages
        .iter()
        .map(|(name, text)| (*name, Typing::of(text)))
        .collect();
    let said = site.boot(&shell(&typed), target, criu, &["--net"])?;
    let naming = NAME_CRIU.len() + criu.display().to_string().len() + 1;
    println!("{NAME_CRIU}…: 1 line, {naming} characters");
    let (mut lines, mut characters, mut milliseconds) = (1, naming, 0);
    let mut times = said.lines().filter_map(|line| line.strip_prefix(TIME));
    for (name, typing) in &typed {
        for (line, text) in &typing.blocks {
            let (of_block, typed) = (text.lines().count(), text.chars().count());
            let time = times.next().context("a block took no time")?;
            let time: u32 = time.parse().context("read a time")?;
            println!(
                "docs/{name}:{line}: {of_block} lines, {typed} characters, {:.1} s",
                f64::from(time) / 1e3
            );
            lines += of_block;
            characters += typed;
            milliseconds += time;
        }
    }
    let minutes = f64::from(milliseconds) / 6e4;
    let typing = f64::from(u32::try_from(characters)?) / CHARACTERS_PER_MINUTE;
    done(&format!(
        "{lines} lines of {characters} characters, whose commands take {minutes:.1} minutes; with typing {:.1} minutes \
         at {CHARACTERS_PER_MINUTE} characters a minute",
        minutes + typing
    ));
    Ok(())
}

/// Returns the script that types the pages.
fn shell(pages: &[(&str, Typing)]) -> String {
    let mut script = BEFORE.to_owned();
    for (number, (page, typing)) in pages.iter().enumerate() {
        for (line, text) in &typing.blocks {
            script += &format!("begin '{page}:{line}'\n{text}end\n");
        }
        if number == 0 {
            script += PAGE_OPENS;
        }
    }
    script + AGENT + "summary\n"
}

/// Begin of a line of the script's output; the milliseconds that a block took follow.
const TIME: &str = "=== took: ";

/// Stands before the commands of the pages: a line about each that fails, and one about the time of each block.
/// What has failed is said at the end, too, where one looks for it.
const BEFORE: &str = r#"
cd /root/packages
set -E -o pipefail
exec 2>&1
begin() { place=$1; echo "=== $1"; begun=$(date +%s%N); }
end() { echo "=== took: $((($(date +%s%N) - begun) / 1000000))"; }
trap 'printf "%s: exit code %s: %s\n" "$place" "$?" "$BASH_COMMAND" >>/run/failed' ERR
summary() { [ ! -e /run/failed ] || { echo "=== failed"; cat /run/failed; exit 1; }; exit 0; }
export PERMAFROST_CRIU="$CRIU"
"#;

/// Opens the page with the token that a block has printed, as a browser does.
const PAGE_OPENS: &str = r#"
place="the page"
token=$(grep --extended-regexp --line-regexp '[^ ]{30,}' /packages/said | tail -n 1)
fetch() {
  exec 3<>/dev/tcp/127.0.0.1/7119
  printf 'GET %s HTTP/1.1\r\nHost: 127.0.0.1:7119\r\nConnection: close\r\nAuthorization: Bearer %s\r\n\r\n' "$1" "$token" >&3
  cat <&3
}
fetch /ui | grep '<html' >/dev/null
fetch /v1/jobs | grep naps >/dev/null
"#;

/// Has systemd start the agent by its unit, and dumps and restores through it.
const AGENT: &str = include_str!("agent.sh");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_commands_are_typed_and_without_their_comments() {
        let page = "text\n```sh\nls   # lists\n\necho '#'\n```\n`ls`\n```toml\na = 1\n```\n```sh\nend\n```\n";
        let typing = Typing::of(page);
        let blocks = vec![(2, "ls\n\necho '#'\n".to_owned()), (11, "end\n".to_owned())];
        assert_eq!(typing, Typing { blocks });
    }
}
