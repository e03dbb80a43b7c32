//! The OCI image: a layer with Debian's libc, and one with the files of the packages, in a tar of the OCI image layout.
//!
//! A layout is some tars and JSON documents that name each other by digest (OCI Image Format Specification 1.1, "Image
//! Layout", "Image Manifest" and "Image Configuration"). So nothing has to be started to make it: no container, no
//! daemon, no mount, and no right that a build of the programs does not need.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use flate2::read::GzDecoder;
use serde_json::{Value, json};

use crate::archive::{Archive, compress};
use crate::contents::{CONFIGURATION_FILE, PAGE, replace_lines};
use crate::{BuildHost, SUITE, files, hex_of, succeed, timestamp};

/// Packages whose files are in the image, with what they depend on: the libraries that the programs load.
const LIBRARIES: [&str; 2] = ["libc6", "libgcc-s1"];

/// Packages of ours whose files are in the image.
const PACKAGES: [&str; 2] = ["permafrost_", "permafrostd_"];

/// Directories of packages that mean nothing in a container without an init, and libc's tables of character sets.
const LEFT_OUT: [&str; 8] = [
    "etc/default",
    "etc/ld.so.conf.d",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/systemd",
    "usr/lib/sysusers.d",
    "usr/lib/tmpfiles.d",
    "usr/share/lintian",
    "usr/share/man",
];

/// Returns true if a path of a package is to be in the image: the pages of the book are not.
fn is_wanted(path: &Path) -> bool {
    let is_page = path.starts_with("usr/share/doc")
        && path
            .extension()
            .is_some_and(|extension| extension == "md" || extension == "png");
    !is_page && !LEFT_OUT.iter().any(|out| path == Path::new(out))
}

/// User and group of the daemon: a number that Debian gives to no other user by itself (Debian Policy 9.2.2).
const USER: u64 = 64_117;

/// Names of the users and groups in the image.
const PASSWD: &str = "\
root:x:0:0:root:/root:/usr/sbin/nologin
permafrost:x:64117:64117:Permafrost:/var/lib/permafrost:/usr/sbin/nologin
";
const GROUP: &str = "root:x:0:\npermafrost:x:64117:\n";

/// Type of a layer.
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// Type of a configuration.
const CONFIGURATION: &str = "application/vnd.oci.image.config.v1+json";
/// Type of a manifest.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Type of the index.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Name of the file of an image.
pub(super) fn file_name(version: &str) -> String {
    format!("permafrost_{version}_amd64.oci.tar")
}

/// Returns the name of the image once it is loaded.
pub(super) fn name(version: &str) -> String {
    format!("localhost/permafrost:{version}")
}

/// A package of Debian whose files are in the image.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Library {
    pub(super) name: String,
    pub(super) version: String,
}

/// Makes the image of the packages in `out`, and writes it there; returns its path, and what is of Debian in it. The
/// libraries are kept below `target`, so that another image of the same build has the same ones.
///
/// # Errors
/// The libraries cannot be fetched, or a file cannot be read or written.
pub(super) fn make(
    host: &dyn BuildHost,
    version: &str,
    epoch: u64,
    work: &Path,
    out: &Path,
) -> Result<(PathBuf, Vec<Library>)> {
    let of_debian = host.workspace().join("target/image/libraries");
    if !of_debian.exists() {
        host.unpack(SUITE, &LIBRARIES, &of_debian)?;
    }
    let libraries = versions(&of_debian)?;
    let ours = work.join("image");
    for deb in files(out)? {
        let name = deb.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(".deb") && PACKAGES.iter().any(|package| name.starts_with(package)) {
            succeed(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&ours))?;
        }
    }
    // Nobody outside of a container reaches its loopback, and no script of the package makes the file of tokens.
    let path = ours.join(CONFIGURATION_FILE);
    let text = fs::read_to_string(&path).context("read the configuration")?;
    let without = replace_lines(text, PAGE.map(|(from, to)| (to, from)))?;
    fs::write(&path, without).context("write the configuration")?;
    let mut first = Archive::new(epoch);
    first.tree(&of_debian, "", is_wanted)?;
    let mut second = Archive::new(epoch);
    second.tree(&ours, "", is_wanted)?;
    second.file("etc/passwd", PASSWD.as_bytes())?;
    second.file("etc/group", GROUP.as_bytes())?;
    // `/var`, `/var/lib` and `/run` come into being with mode 0755, as root's.
    second.directory("var/lib/permafrost", 0o700, USER)?;
    second.directory("run/permafrost", 0o700, USER)?;
    second.directory("tmp", 0o1777, 0)?;
    let named: Vec<_> = libraries
        .iter()
        .map(|library| format!("{} {}", library.name, library.version))
        .collect();
    let mut layout = Layout::new(epoch);
    let layers = [
        (
            layout.layer(first)?,
            format!("libraries of Debian {SUITE}: {}", named.join(", ")),
        ),
        (
            layout.layer(second)?,
            format!("permafrost and permafrostd {version}"),
        ),
    ];
    let path = out.join(file_name(version));
    let bytes = layout.finish(&layers, version, &timestamp(epoch)?)?;
    fs::write(&path, bytes).with_context(|| format!("write {}", path.display()))?;
    Ok((path, libraries))
}

/// Reads names and versions of unpacked packages from the first line of their changelogs, sorted by name.
///
/// # Errors
/// A changelog has another form, or there is none.
fn versions(root: &Path) -> Result<Vec<Library>> {
    let mut found = Vec::new();
    for dir in files(&root.join("usr/share/doc"))? {
        // A directory may be a link to that of another package of the same source, as libgcc-s1's is.
        let changelog = dir.join("changelog.Debian.gz");
        if !changelog.exists() {
            continue;
        }
        let file = File::open(&changelog).context("open a changelog")?;
        let mut line = String::new();
        BufReader::new(GzDecoder::new(file))
            .read_line(&mut line)
            .with_context(|| format!("read {}", changelog.display()))?;
        let version = line.split(['(', ')']).nth(1);
        let version = version.with_context(|| format!("{}: {line}", changelog.display()))?;
        found.push(Library {
            name: dir.file_name().unwrap_or_default().display().to_string(),
            version: version.to_owned(),
        });
    }
    if found.is_empty() {
        bail!("no changelog below {}", root.display());
    }
    Ok(found)
}

/// Runs the daemon of an image: in a container if one runs here, else in the root that the image describes.
///
/// # Errors
/// The image cannot be loaded, or its daemon does not work.
pub(super) fn check(image: &Path, version: &str, host: &dyn BuildHost) -> Result<()> {
    let done = host.begin("load the image, and start a daemon in it");
    let why = match host.run_image(image, &name(version))? {
        Ok(said) => {
            done(&format!("by podman: {said}"));
            return Ok(());
        }
        Err(why) => why,
    };
    host.say_loudly(&format!(
        "NO CONTAINER RUNS HERE; THE IMAGE'S ROOT IS TRIED WITHOUT PODMAN: {why}"
    ));
    let said = run_root(image).context("run the image's root")?;
    done(&format!("loaded by podman, run by chroot: {said}"));
    Ok(())
}

/// Unpacks the layers that the documents of an image name, and starts a daemon in that root as the image's user.
/// Returns what it says.
///
/// # Errors
/// A document or a layer is missing, or the daemon does not work.
fn run_root(image: &Path) -> Result<String> {
    let work = tempfile::tempdir().context("create a working directory")?;
    let (layout, root) = (work.path().join("layout"), work.path().join("root"));
    for dir in [&layout, &root] {
        fs::create_dir(dir).context("create a directory")?;
    }
    succeed(
        Command::new("tar")
            .arg("-xf")
            .arg(image)
            .arg("-C")
            .arg(&layout),
    )?;
    let read = |path: PathBuf| -> Result<Value> {
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("read {}", path.display()))
    };
    let blob = |descriptor: &Value| -> Result<PathBuf> {
        let digest = descriptor["digest"].as_str().context("no digest")?;
        Ok(layout.join("blobs").join(digest.replace(':', "/")))
    };
    let index = read(layout.join("index.json"))?;
    let manifest = read(blob(&index["manifests"][0])?)?;
    let configuration = &read(blob(&manifest["config"])?)?["config"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    for layer in manifest["layers"].as_array().context("no layers")? {
        let mut tar = Command::new("tar");
        tar.args(["-xzf"]).arg(blob(layer)?).arg("-C").arg(&root);
        succeed(tar.args(["--same-owner", "--numeric-owner"]))?;
    }
    let said = succeed(
        Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--kill-child", "bash", "-euc"])
            .args([RUN_ROOT, "bash"])
            .arg(&root)
            .args([
                text(&configuration["User"]),
                text(&configuration["WorkingDir"]),
                text(&configuration["Entrypoint"][0]),
            ]),
    )?;
    Ok(said.lines().take(2).collect::<Vec<_>>().join("; "))
}

/// Runs with a root, and the user, the directory and the program of the image's configuration, in a mount namespace: the
/// image has no shell.
const RUN_ROOT: &str = r#"
root=$1 user=$2 directory=$3 program=$4
ids=$(sed -n "s/^$user:x:\([0-9]*:[0-9]*\):.*/\1/p" "$root/etc/passwd")
[ -n "$ids" ] || { echo "the image has no user $user" >&2; exit 1; }
[ -d "$root$directory" ] || { echo "the image has no directory $directory" >&2; exit 1; }
mkdir -p "$root/proc" "$root/dev"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
inside() { chroot --userspec="$ids" "$root" "$@"; }
inside "$program" --version
inside "$program" --region-size 256M --listen none >"$root/tmp/log" 2>&1 &
inside /usr/bin/permafrost status --wait 60s || { cat "$root/tmp/log"; exit 1; }
"#;

/// A layer in the layout: its descriptor, and the digest of its tar.
struct Stored {
    descriptor: Value,
    digest_of_tar: String,
}

/// An image layout as a tar.
struct Layout {
    files: Archive,
}

impl Layout {
    fn new(epoch: u64) -> Self {
        Self {
            files: Archive::new(epoch),
        }
    }

    /// Adds a blob; returns its descriptor.
    fn blob(&mut self, kind: &str, bytes: &[u8]) -> Result<Value> {
        let digest = hex_of(bytes);
        self.files.file(&format!("blobs/sha256/{digest}"), bytes)?;
        Ok(json!({"mediaType": kind, "digest": format!("sha256:{digest}"), "size": bytes.len()}))
    }

    fn layer(&mut self, layer: Archive) -> Result<Stored> {
        let tar = layer.finish()?;
        Ok(Stored {
            descriptor: self.blob(LAYER, &compress(&tar)?)?,
            digest_of_tar: format!("sha256:{}", hex_of(&tar)),
        })
    }

    /// Ends an image of these layers, each with a line that says what is in it, and returns the tar.
    fn finish(
        mut self,
        layers: &[(Stored, String)],
        version: &str,
        created: &str,
    ) -> Result<Vec<u8>> {
        let of_tars: Vec<_> = layers
            .iter()
            .map(|(layer, _)| &layer.digest_of_tar)
            .collect();
        let history: Vec<_> = layers
            .iter()
            .map(|(_, what)| json!({"created": created, "created_by": "cargo xtask release", "comment": what}))
            .collect();
        let configuration = json!({
            "created": created,
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "User": "permafrost",
                "Entrypoint": ["/usr/sbin/permafrostd"],
                "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
                "ExposedPorts": {"7117/tcp": {}},
                "Volumes": {"/var/lib/permafrost": {}},
                "WorkingDir": "/var/lib/permafrost",
                "StopSignal": "SIGTERM",
                "Labels": {
                    "org.opencontainers.image.title": "Permafrost storage node",
                    "org.opencontainers.image.version": version,
                },
            },
            "rootfs": {"type": "layers", "diff_ids": of_tars},
            "history": history,
        });
        let configuration = self.blob(CONFIGURATION, &serde_json::to_vec(&configuration)?)?;
        let layers: Vec<_> = layers.iter().map(|(layer, _)| &layer.descriptor).collect();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": configuration,
            "layers": layers,
        });
        let mut manifest = self.blob(MANIFEST, &serde_json::to_vec(&manifest)?)?;
        manifest["annotations"] =
            json!({"org.opencontainers.image.ref.name": format!("permafrost:{version}")});
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [manifest]});
        self.files
            .file("index.json", &serde_json::to_vec(&index)?)?;
        self.files
            .file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        self.files.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;
    use std::os::unix::fs::symlink;

    use super::*;

    fn entries(tar: &[u8]) -> BTreeMap<String, (tar::Header, Vec<u8>)> {
        let mut archive = tar::Archive::new(tar);
        let entries = archive.entries().unwrap();
        entries
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes).unwrap();
                let name = entry.path().unwrap().display().to_string();
                (name, (entry.header().clone(), bytes))
            })
            .collect()
    }

    fn image(root: &Path) -> Vec<u8> {
        let mut layout = Layout::new(7);
        let mut layer = Archive::new(7);
        layer.tree(root, "", is_wanted).unwrap();
        layer.directory("run/permafrost", 0o700, USER).unwrap();
        let layers = [(layout.layer(layer).unwrap(), "all".to_owned())];
        layout
            .finish(&layers, "1.2.3", "1970-01-01T00:00:07Z")
            .unwrap()
    }

    #[test]
    fn versions_of_debians_packages_are_those_of_their_changelogs() {
        let dir = tempfile::tempdir().unwrap();
        let docs = dir.path().join("usr/share/doc");
        let of = |name: &str| docs.join(name).join("changelog.Debian.gz");
        fs::create_dir_all(docs.join("libc6")).unwrap();
        let error = versions(dir.path()).unwrap_err().to_string();
        assert!(error.contains("no changelog below"), "{error}");
        let text = "glibc (2.36-9+deb12u10) bookworm; urgency=medium\n\n  * (1)\n";
        fs::write(of("libc6"), compress(text.as_bytes()).unwrap()).unwrap();
        symlink("libc6", docs.join("libgcc-s1")).unwrap();
        let libraries = ["libc6", "libgcc-s1"].map(|name| Library {
            name: name.to_owned(),
            version: "2.36-9+deb12u10".to_owned(),
        });
        assert_eq!(versions(dir.path()).unwrap(), libraries);
        fs::write(of("libc6"), compress(b"nothing").unwrap()).unwrap();
        assert!(versions(dir.path()).is_err());
    }

    #[test]
    fn documents_name_each_other_by_digest() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        fs::create_dir_all(dir.path().join("usr/share/man/man1")).unwrap();
        fs::write(dir.path().join("usr/bin/b"), "program").unwrap();
        fs::write(dir.path().join("usr/share/man/man1/b.1"), "page").unwrap();
        fs::create_dir(dir.path().join("usr/share/doc")).unwrap();
        fs::write(dir.path().join("usr/share/doc/b.md"), "page").unwrap();
        symlink("b", dir.path().join("usr/bin/a")).unwrap();
        let bytes = image(dir.path());
        assert_eq!(
            bytes,
            image(dir.path()),
            "the same files give the same bytes"
        );
        let files = entries(&bytes);
        for (name, (_, bytes)) in &files {
            if let Some(digest) = name.strip_prefix("blobs/sha256/") {
                assert_eq!(hex_of(bytes), digest);
            }
        }
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap();
            let (_, bytes) =
                &files[&format!("blobs/sha256/{}", digest.strip_prefix("sha256:").unwrap())];
            assert_eq!(descriptor["size"], bytes.len());
            bytes.as_slice()
        };
        let index: Value = serde_json::from_slice(&files["index.json"].1).unwrap();
        let named = &index["manifests"][0];
        assert_eq!(
            named["annotations"]["org.opencontainers.image.ref.name"],
            "permafrost:1.2.3"
        );
        let manifest: Value = serde_json::from_slice(blob(named)).unwrap();
        let configuration: Value = serde_json::from_slice(blob(&manifest["config"])).unwrap();
        let mut tar = Vec::new();
        let mut layer = flate2::read::GzDecoder::new(blob(&manifest["layers"][0]));
        layer.read_to_end(&mut tar).unwrap();
        assert_eq!(
            configuration["rootfs"]["diff_ids"][0],
            format!("sha256:{}", hex_of(&tar))
        );
        let layer = entries(&tar);
        let names: Vec<_> = layer.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "run/permafrost",
                "usr",
                "usr/bin",
                "usr/bin/a",
                "usr/bin/b",
                "usr/share",
                "usr/share/doc"
            ]
        );
        for (name, (header, _)) in &layer {
            let owner = if name == "run/permafrost" { USER } else { 0 };
            assert_eq!((header.uid().unwrap(), header.mtime().unwrap()), (owner, 7));
        }
        assert_eq!(layer["usr/bin/b"].1, b"program");
        assert_eq!(
            layer["usr/bin/a"].0.link_name().unwrap().unwrap(),
            Path::new("b")
        );
    }
}
