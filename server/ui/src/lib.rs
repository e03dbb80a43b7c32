//! The page at `/ui` of the HTTP API: files that contain no data. What the page shows it asks the API for, as any other
//! caller, with the token or the certificate of whoever looks at it.
//!
//! The files are part of the binary, and written as they are sent: no build step, no library, no other origin. The
//! browser enforces the last with [`CONTENT_SECURITY_POLICY`], and that no text of a job's name becomes markup or code
//! follows from `assets/dom.js`, by which alone elements are made.

#![forbid(unsafe_code)]

/// Policy that the page is served with: scripts, styles, images and requests of its own origin alone, no markup in the
/// place of scripts, in no frame.
pub const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

/// A file of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFile {
    /// Media type, for the header `Content-Type`.
    pub media_type: &'static str,
    /// Content of the file, UTF-8.
    pub content: &'static str,
}

macro_rules! files {
    ($($path:literal: $name:literal, $media_type:literal;)*) => {
        /// Paths of all files, and the files.
        const FILES: &[(&str, PageFile)] = &[$((
            $path,
            PageFile {
                media_type: $media_type,
                content: include_str!(concat!("../assets/", $name)),
            },
        )),*];
    };
}

files! {
    "/ui": "index.html", "text/html; charset=utf-8";
    "/ui/": "index.html", "text/html; charset=utf-8";
    "/ui/style.css": "style.css", "text/css; charset=utf-8";
    "/ui/icon.svg": "icon.svg", "image/svg+xml";
    "/ui/main.js": "main.js", "text/javascript; charset=utf-8";
    "/ui/api.js": "api.js", "text/javascript; charset=utf-8";
    "/ui/dom.js": "dom.js", "text/javascript; charset=utf-8";
    "/ui/follow.js": "follow.js", "text/javascript; charset=utf-8";
    "/ui/activity.js": "activity.js", "text/javascript; charset=utf-8";
    "/ui/contents.js": "contents.js", "text/javascript; charset=utf-8";
    "/ui/format.js": "format.js", "text/javascript; charset=utf-8";
    "/ui/nodes.js": "nodes.js", "text/javascript; charset=utf-8";
    "/ui/jobs.js": "jobs.js", "text/javascript; charset=utf-8";
    "/ui/events.js": "events.js", "text/javascript; charset=utf-8";
    "/ui/what_if.js": "what_if.js", "text/javascript; charset=utf-8";
}

/// Returns true if a path belongs to the page, whether there is such a file or not.
#[must_use]
pub fn has(path: &str) -> bool {
    path == "/ui" || path.starts_with("/ui/")
}

/// Returns the file at a path of the API.
#[must_use]
pub fn file(path: &str) -> Option<PageFile> {
    let found = FILES.iter().find(|(at, _)| *at == path);
    found.map(|(_, file)| *file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_asset_is_served_and_every_reference_leads_to_one() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/assets");
        for entry in std::fs::read_dir(directory).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let path = match name.as_str() {
                "index.html" => "/ui".to_owned(),
                name => format!("/ui/{name}"),
            };
            assert!(file(&path).is_some(), "{name}");
        }
        for (_, page) in FILES {
            // `src="/ui/…"`, `from "./…"`.
            for (before, to) in [("\"/ui/", "/ui/"), ("from \"./", "/ui/")] {
                for rest in page.content.split(before).skip(1) {
                    let name = rest.split('"').next().unwrap();
                    assert!(file(&format!("{to}{name}")).is_some(), "{name}");
                }
            }
        }
    }

    #[test]
    fn no_file_makes_markup_of_text_or_names_another_origin() {
        for (path, page) in FILES {
            for never in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                "localStorage",
                "http://",
                "https://",
            ] {
                // The name space of SVG is a name, not an address.
                let content = page.content.replace("http://www.w3.org/2000/svg", "");
                assert!(!content.contains(never), "{path}: {never}");
            }
        }
    }
}
