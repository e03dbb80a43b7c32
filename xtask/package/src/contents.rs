//! Contents of each package.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::build::Binaries;
use crate::deb::{Entry, Package};
use crate::{files, succeed};

/// Maintainer of the packages. The project has no address of its own, which lintian counts as an error: see
/// [`OVERRIDES`].
pub(super) const MAINTAINER: &str = "Permafrost developers <permafrost@localhost>";

/// Findings of lintian that do not count, each with its reason.
const OVERRIDES: [(&str, &str); 2] = [
    ("bogus-mail-host", "the project has no mail address"),
    (
        "bogus-mail-host-in-debian-changelog",
        "the project has no mail address",
    ),
];

/// Files of the packages that are written by hand, below the tree.
const DIRECTORY: &str = "packaging";

/// Path of the default configuration, and of its directory's other files.
pub(super) const CONFIGURATION_FILE: &str = "etc/permafrost/permafrostd.toml";

/// Lines of the default configuration, and those in the package: the page can be opened on this machine by whoever has a
/// token. The file of tokens is made when the package is configured, and is empty.
pub(super) const PAGE: [(&str, &str); 2] = [
    (
        "#listen-api = \"ADDRESS:PORT\"\n",
        "# Set by the package: the page is at http://127.0.0.1:7119/ui (https:// with `identity`).\n\
         listen-api = \"127.0.0.1:7119\"\n",
    ),
    (
        "#api-tokens = \"FILE\"\n",
        "# Set by the package: permafrost token new --name NAME --scopes read --add-to FILE\n\
         api-tokens = \"/etc/permafrost/api-tokens\"\n",
    ),
];

/// Replaces lines of a configuration.
///
/// # Errors
/// One of them is not there.
pub(super) fn replace_lines<'a>(
    mut configuration: String,
    lines: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<String> {
    for (from, to) in lines {
        if !configuration.contains(from) {
            bail!("the configuration has no line {from:?}");
        }
        configuration = configuration.replacen(from, to, 1);
    }
    Ok(configuration)
}

/// Directory of the pages of the book. Alerts name it.
const PAGES: &str = "usr/share/doc/permafrostd";

/// Returns the version of the packages, which is the workspace's.
pub(super) fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// Parts of the packages that are made once.
struct Sources<'a> {
    source: &'a Path,
    binaries: &'a Binaries,
    notices: &'a str,
    changelog: String,
    work: &'a Path,
}

/// Returns the packages, in an order in which they can be installed. `work` is a directory for what is generated.
pub(super) fn packages(
    source: &Path,
    binaries: &Binaries,
    notices: &str,
    epoch: u64,
    work: &Path,
) -> Result<Vec<Package>> {
    let sources = Sources {
        source,
        binaries,
        notices,
        changelog: changelog(epoch)?,
        work,
    };
    Ok(vec![sources.command()?, sources.daemon()?, sources.criu()?])
}

/// Returns Debian's changelog: one entry, which points to the project's own.
fn changelog(epoch: u64) -> Result<String> {
    let date = succeed(
        Command::new("date")
            .args(["--utc", "--rfc-email", "--date"])
            .arg(format!("@{epoch}"))
            .env("LC_ALL", "C"),
    )?;
    Ok(format!(
        "permafrost ({}) unstable; urgency=medium\n\n  * Changes by their effect on users: CHANGELOG.md.\n\n -- {MAINTAINER}  {}\n",
        version(),
        date.trim()
    ))
}

impl Sources<'_> {
    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.source.join(DIRECTORY).join(name);
        fs::read(&path).with_context(|| format!("read {}", path.display()))
    }

    /// Returns the files that every package has.
    fn documents(&self, package: &str) -> Result<Vec<Entry>> {
        let dir = format!("usr/share/doc/{package}");
        let overrides = OVERRIDES.map(|(tag, why)| format!("# {why}\n{package}: {tag} *\n"));
        let changes = fs::read(self.source.join("CHANGELOG.md")).context("read CHANGELOG.md")?;
        Ok(vec![
            Entry::file(format!("{dir}/copyright"), self.read("copyright")?),
            Entry::file(
                format!("usr/share/lintian/overrides/{package}"),
                overrides.concat(),
            ),
            Entry::compressed(format!("{dir}/changelog.gz"), self.changelog.as_bytes())?,
            Entry::compressed(format!("{dir}/CHANGELOG.md.gz"), &changes)?,
            Entry::compressed(format!("{dir}/NOTICES.gz"), self.notices.as_bytes())?,
        ])
    }

    /// Returns the documents that a program makes from the definition of its own command line: man pages of a section
    /// and completion scripts. `generate` are the arguments before the name of the document.
    fn generated(&self, program: &str, section: &str, generate: &str) -> Result<Vec<Entry>> {
        let command = || {
            let mut command = Command::new(self.binaries.path(program));
            command.env_clear().arg(generate);
            command
        };
        let pages = self.work.join(format!("{program}.man"));
        succeed(command().args(["man", "--to"]).arg(&pages))?;
        let mut entries = Vec::new();
        for path in files(&pages)? {
            let name = path
                .file_name()
                .context("a page without a name")?
                .to_string_lossy();
            let page = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            entries.push(Entry::compressed(
                format!("usr/share/man/man{section}/{name}.gz"),
                &page,
            )?);
        }
        for (shell, path) in [
            (
                "bash",
                format!("usr/share/bash-completion/completions/{program}"),
            ),
            (
                "fish",
                format!("usr/share/fish/vendor_completions.d/{program}.fish"),
            ),
            (
                "zsh",
                format!("usr/share/zsh/vendor-completions/_{program}"),
            ),
        ] {
            let script = succeed(command().arg(shell))?;
            entries.push(Entry::file(path, script));
        }
        Ok(entries)
    }

    fn scripts(
        &self,
        package: &str,
        names: &[&'static str],
    ) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let read = |name: &&'static str| Ok((*name, self.read(&format!("{package}.{name}"))?));
        names.iter().map(read).collect()
    }

    /// The command, the agent's unit, and the user that both daemons run as.
    fn command(&self) -> Result<Package> {
        let mut entries = self.documents("permafrost")?;
        entries.push(Entry::program(
            "usr/bin/permafrost",
            self.binaries.path("permafrost"),
        ));
        // CRIU calls it at the end of each dump.
        entries.push(Entry::program(
            "usr/bin/permafrost-action",
            self.binaries.path("permafrost-action"),
        ));
        entries.push(Entry::compressed(
            "usr/share/man/man1/permafrost-action.1.gz",
            &self.read("permafrost-action.1")?,
        )?);
        entries.extend(self.generated("permafrost", "1", "generate")?);
        for (path, name) in [
            (
                "usr/lib/systemd/system/permafrost-agent.service",
                "permafrost-agent.service",
            ),
            ("etc/default/permafrost-agent", "permafrost-agent.default"),
            ("usr/lib/sysusers.d/permafrost.conf", "sysusers.conf"),
        ] {
            entries.push(Entry::file(path, self.read(name)?));
        }
        Ok(Package {
            name: "permafrost",
            depends: "systemd | systemd-standalone-sysusers".to_owned(),
            recommends: "criu",
            suggests: "permafrostd, permafrost-criu",
            summary: "freeze processes into a replicated store, and thaw them (command)",
            description: &[
                "Permafrost stores the images of processes that CRIU freezes, at the speed of",
                "memory, on one node or several, and thaws them there or elsewhere.",
                "",
                "This package has the command for users, scripts and compute nodes, and the",
                "unit of the agent that serves a node without storage.",
            ],
            entries,
            conffiles: &["/etc/default/permafrost-agent"],
            scripts: self.scripts("permafrost", &["postinst", "prerm", "postrm"])?,
        })
    }

    /// The storage node.
    fn daemon(&self) -> Result<Package> {
        let mut entries = self.documents("permafrostd")?;
        let program = self.binaries.path("permafrostd");
        entries.push(Entry::program("usr/sbin/permafrostd", program.clone()));
        entries.extend(self.generated("permafrostd", "8", "--generate")?);
        let configuration = succeed(
            Command::new(program)
                .env_clear()
                .arg("--print-default-config"),
        )?;
        let configuration = replace_lines(configuration, PAGE)?;
        entries.push(Entry::file(CONFIGURATION_FILE, configuration));
        for (path, name) in [
            (
                "usr/lib/systemd/system/permafrostd.service",
                "permafrostd.service",
            ),
            ("usr/lib/tmpfiles.d/permafrost.conf", "tmpfiles.conf"),
            (
                "usr/share/permafrost/prometheus/alerts.yml",
                "prometheus/alerts.yml",
            ),
            (
                "usr/share/permafrost/prometheus/alerts_test.yml",
                "prometheus/alerts_test.yml",
            ),
            (
                "usr/share/permafrost/grafana/permafrost.json",
                "grafana/permafrost.json",
            ),
        ] {
            entries.push(Entry::file(path, self.read(name)?));
        }
        entries.extend(self.pages()?);
        Ok(Package {
            name: "permafrostd",
            depends: format!(
                "permafrost (= {}), systemd | systemd-standalone-tmpfiles",
                version()
            ),
            recommends: "permafrost-criu",
            suggests: "etcd-server",
            summary: "freeze processes into a replicated store, and thaw them (storage node)",
            description: &[
                "Permafrost stores the images of processes that CRIU freezes, at the speed of",
                "memory, on one node or several, and thaws them there or elsewhere.",
                "",
                "This package has the daemon that stores them: in persistent memory, in tmpfs",
                "or in plain files, with copies on other nodes, over QUIC.",
            ],
            entries,
            conffiles: &["/etc/permafrost/permafrostd.toml"],
            scripts: self.scripts("permafrostd", &["postinst", "prerm", "postrm"])?,
        })
    }

    /// Returns the pages of the book and their pictures: alerts link to the runbooks, and pages to each other.
    fn pages(&self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for path in files(&self.source.join("docs"))? {
            let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            entries.push(Entry::file(format!("{PAGES}/{name}"), bytes));
        }
        Ok(entries)
    }

    /// The plugin for CRIU.
    fn criu(&self) -> Result<Package> {
        let mut entries = self.documents("permafrost-criu")?;
        entries.push(Entry::library(
            "usr/lib/permafrost/criu/libpermafrost_plugin.so",
            self.binaries.path("libpermafrost_plugin.so"),
        ));
        entries.push(Entry::link(
            "usr/lib/permafrost/criu/permafrost-hook",
            "../../../bin/permafrost-action",
        ));
        Ok(Package {
            name: "permafrost-criu",
            depends: format!("permafrost (= {})", version()),
            recommends: "criu",
            suggests: "",
            summary: "store dumps of any CRIU in Permafrost (plugin)",
            description: &[
                "With `criu dump -L /usr/lib/permafrost/criu` CRIU stores a dump in Permafrost,",
                "and no configuration has to be changed. For runc, CRIU_LIBS_DIR names the",
                "directory. `permafrost install-criu-hooks` does the same for all dumps of a",
                "machine, and needs only the package permafrost.",
            ],
            entries,
            conffiles: &[],
            scripts: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Program that answers as those of the packages do when they are asked for their documents.
    const PROGRAM: &str = r#"#!/bin/sh
case "$*" in
  *"man --to "*) for last in "$@"; do :; done; mkdir -p "$last"; echo page >"$last/$(basename "$0").1" ;;
  --print-default-config) printf '#listen-api = "ADDRESS:PORT"\n#api-tokens = "FILE"\n' ;;
  *) echo "$*" ;;
esac
"#;

    fn tree() -> &'static Path {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        package.ancestors().nth(2).unwrap()
    }

    fn all(dir: &Path) -> Vec<Package> {
        let text = dir.join("program");
        fs::write(&text, PROGRAM).unwrap();
        for name in [
            "permafrost",
            "permafrostd",
            "permafrost-action",
            "libpermafrost_plugin.so",
        ] {
            // A process that is forked by another test meanwhile would have a file open that this one writes, and the
            // kernel refuses to run a file that is open for writing.
            let mut install = Command::new("install");
            install.args(["-m", "755"]).arg(&text);
            succeed(install.arg(dir.join(name))).unwrap();
        }
        let binaries = Binaries::there(dir).unwrap();
        packages(tree(), &binaries, "notices", 0, &dir.join("work")).unwrap()
    }

    #[test]
    fn a_missing_program_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = Binaries::there(dir.path()).err().unwrap().to_string();
        assert!(error.contains("/permafrost is not there"), "{error}");
    }

    #[test]
    fn paths_are_debians_and_belong_to_one_package() {
        let dir = tempfile::tempdir().unwrap();
        let mut known = BTreeSet::new();
        for package in all(dir.path()) {
            for entry in &package.entries {
                let path = entry.path.as_str();
                assert!(known.insert(path.to_owned()), "{path} is in two packages");
                assert!(
                    !path.split('/').any(|part| matches!(part, "" | "." | "..")),
                    "{path}"
                );
                assert!(
                    path.starts_with("usr/") || path.starts_with("etc/"),
                    "{path}"
                );
                let is_program = path.starts_with("usr/bin/") || path.starts_with("usr/sbin/");
                assert_eq!(entry.mode == 0o755, is_program, "{path}");
            }
            // Every file below /etc is one that dpkg keeps, and none is named that is not there.
            let of_etc = package
                .entries
                .iter()
                .map(|entry| format!("/{}", entry.path));
            let of_etc: Vec<_> = of_etc.filter(|path| path.starts_with("/etc/")).collect();
            assert_eq!(of_etc, package.conffiles, "{}", package.name);
            let has = |path: String| package.entries.iter().any(|entry| entry.path == path);
            assert!(has(format!("usr/share/doc/{}/copyright", package.name)));
            assert!(package.summary.len() < 80 && !package.summary.ends_with('.'));
            assert!(package.description.iter().all(|line| line.len() < 80));
        }
        for path in [
            "usr/bin/permafrost",
            "usr/sbin/permafrostd",
            "usr/share/man/man1/permafrost.1.gz",
            "usr/share/zsh/vendor-completions/_permafrostd",
            "usr/lib/systemd/system/permafrostd.service",
            "usr/share/permafrost/prometheus/alerts.yml",
            "usr/share/doc/permafrostd/runbooks.md",
        ] {
            assert!(known.contains(path), "{path}");
        }
    }

    #[test]
    fn pages_and_alerts_link_to_files_of_the_package() {
        let dir = tempfile::tempdir().unwrap();
        let packages = all(dir.path());
        let daemon = &packages[1];
        let root = dir.path().join("root");
        for entry in &daemon.entries {
            let path = root.join(&entry.path);
            if let Some(bytes) = entry.bytes() {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
            }
        }
        let read = |path: &std::path::Path| fs::read_to_string(path).unwrap();
        let mut links = 0;
        for page in files(&root.join(PAGES)).unwrap() {
            if page.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            // What stands between backticks is no link.
            let text: String = read(&page).split('`').step_by(2).collect();
            for behind in text.split("](").skip(1) {
                let target = behind.split([')', '#']).next().unwrap();
                if !target.is_empty() && !target.contains("://") {
                    let there = root.join(PAGES).join(target).exists();
                    assert!(there, "{}: {target}", page.display());
                    links += 1;
                }
            }
        }
        let alerts = read(&root.join("usr/share/permafrost/prometheus/alerts.yml"));
        for behind in alerts.split("file:///").skip(1) {
            let target = behind.split(['#', '\n']).next().unwrap();
            assert!(root.join(target).exists(), "{target}");
            links += 1;
        }
        assert!(links > 100, "{links}");
    }

    #[test]
    fn every_package_depends_on_what_is_installed_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut before: Vec<&str> = Vec::new();
        for package in all(dir.path()) {
            for one in package.depends.split(", ") {
                if let Some((name, wanted)) = one.split_once(" (= ") {
                    assert!(before.contains(&name), "{}: {name}", package.name);
                    assert_eq!(wanted, format!("{})", version()));
                }
            }
            before.push(package.name);
        }
        assert_eq!(before, ["permafrost", "permafrostd", "permafrost-criu"]);
    }

    #[test]
    fn maintainer_scripts_are_shell_that_stops_at_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let mut used = 0;
        for package in all(dir.path()) {
            for (name, script) in &package.scripts {
                let text = String::from_utf8(script.clone()).unwrap();
                assert!(text.starts_with("#!/bin/sh\nset -e\n"), "{name}");
                let path = dir.path().join("script");
                fs::write(&path, script).unwrap();
                succeed(Command::new("sh").arg("-n").arg(&path)).unwrap();
                used += 1;
            }
        }
        let is_script = |path: &&std::path::PathBuf| {
            let suffix = path.extension().and_then(|suffix| suffix.to_str());
            matches!(suffix, Some("preinst" | "postinst" | "prerm" | "postrm"))
        };
        let there = files(&tree().join(DIRECTORY)).unwrap();
        assert_eq!(used, there.iter().filter(is_script).count());
    }

    #[test]
    fn the_changelog_has_the_form_that_dpkg_reads() {
        let text = changelog(0).unwrap();
        let first = format!(
            "permafrost ({}) unstable; urgency=medium\n\n  * ",
            version()
        );
        assert!(text.starts_with(&first), "{text}");
        let last = format!("\n\n -- {MAINTAINER}  Thu, 01 Jan 1970 00:00:00 +0000\n");
        assert!(text.ends_with(&last), "{text}");
    }

    #[test]
    fn the_page_of_the_package_is_taken_out_again_for_the_image() {
        let default = format!("a = 1\n{}b = 2\n{}", PAGE[0].0, PAGE[1].0);
        let packaged = replace_lines(default.clone(), PAGE).unwrap();
        assert!(packaged.contains("\nlisten-api = \"127.0.0.1:7119\"\nb = 2\n"));
        assert!(!packaged.contains("#listen-api"));
        let back = replace_lines(packaged, PAGE.map(|(from, to)| (to, from))).unwrap();
        assert_eq!(back, default);
        assert!(replace_lines("a = 1\n".to_owned(), PAGE).is_err());
    }
}
