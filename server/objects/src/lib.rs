//! Object stores for cold tiers.
//!
//! | address | store | credentials and options, from the environment |
//! | --- | --- | --- |
//! | `file:///DIRECTORY` | a directory, which may be a mount | |
//! | `s3://BUCKET/PREFIX` | S3 and compatible | `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP`, … |
//! | `gs://BUCKET/PREFIX` | Google Cloud Storage | `GOOGLE_SERVICE_ACCOUNT`, … |
//! | `az://CONTAINER/PREFIX` | Azure Blob Storage | `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`, … |

#![forbid(unsafe_code)]

mod counted;
mod limited;

use std::future::Future;
use std::io;
use std::path::Path as FilePath;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _, PutPayload};
use permafrost_cold::{DirectoryObjects, ListedObject, ObjectError, Objects};
use tokio::runtime::Runtime;
use url::Url;

pub use crate::counted::{ObjectCounters, counters};

use crate::counted::CountedObjects;
use crate::limited::LimitedObjects;
// Only for its features: the store's client uses it.
use reqwest as _;

/// Longest time that a request takes, its retries included: an object is a slot of a region, some MiB at most. A list
/// may have many parts, and takes at most [`LISTS`] times as long.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Times of [`LIMIT`] that a list may take.
const LISTS: u32 = 10;

/// Prefixes of the environment variables that name credentials and options.
const VARIABLES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];

/// Returns the store at an address, with credentials and options from the environment. It is not asked for anything.
///
/// # Errors
/// The reason why the address names no store.
pub fn connect(address: &str) -> Result<Arc<dyn Objects>, String> {
    // Others may not be UTF-8, and must not end the daemon.
    let all = std::env::vars_os();
    let texts =
        all.filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)));
    let options = texts.filter(|(key, _)| VARIABLES.iter().any(|prefix| key.starts_with(prefix)));
    connect_with(address, options)
}

/// Returns the store at an address as [`connect`] does, with these options instead of the environment's.
///
/// # Errors
/// The reason why the address names no store.
pub fn connect_with(
    address: &str,
    options: impl Iterator<Item = (String, String)>,
) -> Result<Arc<dyn Objects>, String> {
    connect_within(address, options, LIMIT)
}

/// Returns the store at an address as [`connect_with`] does, whose requests take at most `limit` instead of [`LIMIT`].
///
/// # Errors
/// The reason why the address names no store.
pub fn connect_within(
    address: &str,
    options: impl Iterator<Item = (String, String)>,
    limit: Duration,
) -> Result<Arc<dyn Objects>, String> {
    // It is stored as a line of text.
    if address.chars().any(char::is_control) {
        return Err("it has control characters".to_owned());
    }
    if let Some(path) = address.strip_prefix("file://") {
        let path = FilePath::new(path);
        if !path.is_absolute() {
            return Err("the directory is to be named by its whole path".to_owned());
        }
        let store = Arc::new(DirectoryObjects::new(path));
        return Ok(CountedObjects::wrap(LimitedObjects::new(store, limit)));
    }
    let url = Url::parse(address).map_err(|error| error.to_string())?;
    if !["s3", "gs", "az"].contains(&url.scheme()) {
        return Err("say file:///DIRECTORY, s3://, gs:// or az://".to_owned());
    }
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() {
        return Err("credentials and options belong into the environment".to_owned());
    }
    // The client takes the process's provider; ring is the one that all else here uses.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (store, prefix) =
        object_store::parse_url_opts(&url, options).map_err(|error| error.to_string())?;
    Ok(CountedObjects::wrap(RemoteObjects {
        store,
        prefix,
        address: address.to_owned(),
        limit,
        runtime: runtime()?,
    }))
}

/// Returns the runtime of all stores. It is never dropped, as that must not happen on another runtime's threads.
fn runtime() -> Result<&'static Runtime, String> {
    static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();
    let made = RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("objects")
            .enable_all()
            .build()
    });
    made.as_ref().map_err(ToString::to_string)
}

/// Objects behind a prefix of a bucket.
struct RemoteObjects {
    store: Box<dyn ObjectStore>,
    prefix: Path,
    address: String,
    limit: Duration,
    runtime: &'static Runtime,
}

impl RemoteObjects {
    fn path(&self, name: &str) -> Path {
        name.split('/')
            .fold(self.prefix.clone(), |path, part| path.join(part))
    }

    /// Waits for a request.
    fn wait<T>(
        &self,
        limit: Duration,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, ObjectError> {
        let limited = async { tokio::time::timeout(limit, request).await };
        match self.runtime.block_on(limited) {
            Ok(done) => done.map_err(|error| match error {
                object_store::Error::NotFound { .. } => ObjectError::Missing,
                error => ObjectError::Store(error.into()),
            }),
            Err(_) => {
                let late = io::Error::from(io::ErrorKind::TimedOut);
                Err(ObjectError::Store(late.into()))
            }
        }
    }
}

impl Objects for RemoteObjects {
    fn address(&self) -> &str {
        &self.address
    }

    fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), ObjectError> {
        let path = self.path(name);
        let put = self.wait(self.limit, self.store.put(&path, PutPayload::from(bytes)));
        match put {
            Ok(_) => Ok(()),
            // The bucket is.
            Err(ObjectError::Missing) => Err(ObjectError::Store("no such bucket".into())),
            Err(error) => Err(error),
        }
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, ObjectError> {
        let path = self.path(name);
        let bytes = self.wait(self.limit, async {
            self.store.get(&path).await?.bytes().await
        })?;
        Ok(bytes.to_vec())
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        let path = self.path(name);
        match self.wait(self.limit, self.store.delete(&path)) {
            Err(ObjectError::Missing) => Ok(()),
            deleted => deleted,
        }
    }

    fn list(&self, directory: &str) -> Result<Vec<ListedObject>, ObjectError> {
        let path = self.path(directory);
        let listed = self.store.list_with_delimiter(Some(&path));
        let listed = self.wait(self.limit.saturating_mul(LISTS), listed)?;
        let listed = listed.objects.iter().filter_map(|object| {
            Some(ListedObject {
                name: format!("{directory}/{}", object.location.filename()?),
                len_bytes: object.size,
            })
        });
        Ok(listed.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_stores_and_carry_no_secrets() {
        let none = std::iter::empty;
        for refused in [
            "",
            "file://relative",
            "http://host/x",
            "ftp://x",
            "s3://key:secret@bucket/x",
            "s3://bucket/x?secret=1",
            "s3://bucket/a\nb",
        ] {
            assert!(connect_with(refused, none()).is_err(), "{refused}");
        }
        for address in ["file:///mnt/archive", "s3://bucket/some/prefix"] {
            let options = [("AWS_REGION".to_owned(), "eu-central-1".to_owned())];
            let store = connect_with(address, options.into_iter()).unwrap();
            assert_eq!(store.address(), address);
        }
    }
}
