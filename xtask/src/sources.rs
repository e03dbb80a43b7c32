//! Finds the mirror that this machine's own package sources name.
//!
//! Both notations of apt are read: one-line `*.list` and deb822 `*.sources` (sources.list(5)).

use std::path::Path;

use anyhow::{Context, Result, bail};

/// A mirror from which packages are fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mirror {
    /// URI of the mirror.
    pub(crate) uri: String,
    /// Key that verifies the mirror's signatures: the path of a key ring, or a key, as the source gives it.
    pub(crate) signed_by: Option<String>,
    suites: Vec<String>,
    components: Vec<String>,
}

/// Key ring of Debian's archive, with the keys of every suite.
const DEBIAN_KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

impl Mirror {
    /// Returns the mirror from which this machine gets Debian itself.
    ///
    /// # Errors
    /// Fails where the machine is not a Debian or its sources name no mirror.
    pub(crate) fn of_this_machine() -> Result<Self> {
        let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
        let value = |key: &str| {
            let line = release
                .lines()
                .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
            Some(line.trim_matches('"').to_owned())
        };
        if value("ID").as_deref() != Some("debian") {
            bail!("this machine is not a Debian, so packages cannot be fetched from its mirror");
        }
        let codename = value("VERSION_CODENAME");
        let mut found = Vec::new();
        for file in source_files()? {
            let text = std::fs::read_to_string(&file)
                .with_context(|| format!("read {}", file.display()))?;
            let is_deb822 = file
                .extension()
                .is_some_and(|extension| extension == "sources");
            found.extend(if is_deb822 {
                parse_deb822(&text)
            } else {
                parse_one_line(&text)
            });
        }
        let mut mirror = choose(found, codename.as_deref())
            .context("the package sources of this machine name no Debian mirror")?;
        if mirror.signed_by.is_none() && Path::new(DEBIAN_KEYRING).exists() {
            mirror.signed_by = Some(DEBIAN_KEYRING.to_owned());
        }
        Ok(mirror)
    }

    /// Returns a deb822 source for another suite of the same mirror.
    pub(crate) fn source(&self, suite: &str) -> String {
        let mut source = format!(
            "Types: deb\nURIs: {}\nSuites: {suite}\nComponents: main\n",
            self.uri
        );
        if let Some(key) = &self.signed_by {
            source += &format!("Signed-By: {key}\n");
        }
        source
    }
}

/// Returns the first source of this release (or of a suite that every Debian mirror has) with `main` in it.
/// Security, backports and third-party archives have other suite names or components.
fn choose(mirrors: Vec<Mirror>, codename: Option<&str>) -> Option<Mirror> {
    let is_release = |suite: &String| {
        Some(suite.as_str()) == codename
            || ["stable", "testing", "unstable", "sid"].contains(&suite.as_str())
    };
    mirrors.into_iter().find(|mirror| {
        mirror.suites.iter().any(is_release)
            && mirror
                .components
                .iter()
                .any(|component| component == "main")
    })
}

fn source_files() -> Result<Vec<std::path::PathBuf>> {
    let mut files = vec![Path::new("/etc/apt/sources.list").to_path_buf()];
    if let Ok(entries) = std::fs::read_dir("/etc/apt/sources.list.d") {
        for entry in entries {
            files.push(entry.context("read /etc/apt/sources.list.d")?.path());
        }
    }
    files.retain(|file| {
        file.is_file()
            && file
                .extension()
                .is_some_and(|extension| extension == "list" || extension == "sources")
    });
    files.sort();
    Ok(files)
}

fn parse_one_line(text: &str) -> Vec<Mirror> {
    text.lines()
        .filter_map(|line| parse_line(line.split('#').next().unwrap_or_default()))
        .collect()
}

/// `deb [ option=value … ] uri suite [component …]`
fn parse_line(line: &str) -> Option<Mirror> {
    let rest = line.trim().strip_prefix("deb")?;
    let rest = rest.strip_prefix(char::is_whitespace)?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    Some(Mirror {
        uri: words.next()?,
        suites: vec![words.next()?],
        components: words.collect(),
        signed_by: options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(str::to_owned),
    })
}

fn parse_deb822(text: &str) -> Vec<Mirror> {
    let mut mirrors = Vec::new();
    let mut fields: Vec<(String, String)> = Vec::new();
    // The empty line at the end closes the last stanza.
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            mirrors.extend(stanza(&fields));
            fields.clear();
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                // Kept line by line: a key may stand in the field itself.
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((key, value)) = line.split_once(':') {
            fields.push((key.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    mirrors
}

fn stanza(fields: &[(String, String)]) -> Vec<Mirror> {
    let value = |key: &str| {
        fields
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    };
    let words = |key: &str| {
        value(key)
            .unwrap_or_default()
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    if value("enabled").is_some_and(|enabled| enabled.eq_ignore_ascii_case("no"))
        || !words("types").contains(&"deb".to_owned())
    {
        return Vec::new();
    }
    let mirror = |uri| Mirror {
        uri,
        signed_by: value("signed-by").map(str::to_owned),
        suites: words("suites"),
        components: words("components"),
    };
    words("uris").into_iter().map(mirror).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "\
# A comment
Types: deb
URIs: https://security.example.org/debian-security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: https://off.example.org/debian
Suites: bookworm
Components: main

Types: deb deb-src
URIs: https://one.example.org/debian https://two.example.org/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/a.gpg
";

    #[test]
    fn deb822_gives_the_release_not_security_nor_what_is_off() {
        let mirror = choose(parse_deb822(DEB822), Some("bookworm")).unwrap();
        assert_eq!(mirror.uri, "https://one.example.org/debian");
        assert_eq!(
            mirror.signed_by.as_deref(),
            Some("/usr/share/keyrings/a.gpg")
        );
    }

    #[test]
    fn one_line_sources_are_read_with_and_without_options() {
        let text = "# deb https://comment.example.org stable main\n\
            deb-src https://src.example.org/debian bookworm main\n\
            deb https://node.example.org/node nodistro main\n\
            deb [arch=amd64 signed-by=/k.gpg] https://mirror.example.org/debian bookworm main contrib # why\n";
        let mirror = choose(parse_one_line(text), Some("bookworm")).unwrap();
        assert_eq!(
            (mirror.uri.as_str(), mirror.signed_by.as_deref()),
            ("https://mirror.example.org/debian", Some("/k.gpg"))
        );
        let mirror = choose(
            parse_one_line("deb https://plain.example.org/debian stable main"),
            None,
        )
        .unwrap();
        assert_eq!(
            (mirror.uri.as_str(), mirror.signed_by),
            ("https://plain.example.org/debian", None)
        );
    }

    #[test]
    fn an_embedded_key_passes_through() {
        let text = "Types: deb\nURIs: https://m.example.org/debian\nSuites: stable\nComponents: main\nSigned-By:\n -----BEGIN\n .\n abc\n";
        let mirror = choose(parse_deb822(text), None).unwrap();
        assert_eq!(
            mirror.source("unstable"),
            "Types: deb\nURIs: https://m.example.org/debian\nSuites: unstable\nComponents: main\nSigned-By: \n -----BEGIN\n .\n abc\n"
        );
    }

    #[test]
    fn no_mirror_is_no_mirror() {
        assert_eq!(
            choose(
                parse_one_line("deb https://node.example.org/node nodistro main"),
                Some("bookworm")
            ),
            None
        );
    }
}
