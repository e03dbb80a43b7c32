//! What is wrong with a certificate, and what to do about it.

use std::io;
use std::path::PathBuf;

/// Why an identity or an authority cannot be used, made or verified.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file could not be read or written.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// Verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Not a regular file of a sensible size.
    #[error("{} is no regular file of at most {limit_bytes} bytes", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
        /// Most that is read.
        limit_bytes: u64,
    },
    /// Others may read the key.
    #[error("the key {} can be read by others (mode {mode:04o}): chmod 600 it, and issue a new one if somebody may have", path.display())]
    ReadableKey {
        /// The key.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Somebody else can replace the key.
    #[error("the key {} belongs to user {owner}: it has to belong to the user that runs this, or to root", path.display())]
    ForeignKey {
        /// The key.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// Somebody else can change who is refused.
    #[error("the list {} can be changed by others (mode {mode:04o}, user {owner}): it has to belong to the user that runs this, or to root; chmod 600 it", path.display())]
    OpenList {
        /// The list.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// Its owner.
        owner: u32,
    },
    /// Not a line of a list of denied certificates.
    #[error("{text:?} denies no certificate: write `serial HEX` or `name ROLE NAME`")]
    Denial {
        /// What was given.
        text: String,
    },
    /// Too many.
    #[error(
        "at most {limit} certificates can be denied: change the CA, and take denials back (permafrost pki undeny)"
    )]
    TooManyDenials {
        /// Most.
        limit: usize,
    },
    /// A denial that another file repeats.
    #[error("`{denial}` stands in {} as well: take it out there (permafrost pki undeny --identity)", directory.join(super::DENIED).display())]
    DeniedBeside {
        /// The entry.
        denial: String,
        /// The identity.
        directory: PathBuf,
    },
    /// A peer's certificate counts no longer.
    #[error("the peer is refused: {reason}")]
    Ended {
        /// Why.
        reason: String,
    },
    /// Not PEM, or not what is expected inside of it.
    #[error("{} holds no {expected} in PEM", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What should be there.
        expected: &'static str,
    },
    /// Key and certificate are no pair.
    #[error("key.pem and cert.pem in {} do not belong together: issue them again (permafrost pki rotate)", directory.display())]
    Mismatch {
        /// The identity.
        directory: PathBuf,
    },
    /// The certificate ran out.
    #[error("the certificate in {} expired {}: issue a new one (permafrost pki rotate), or set this machine's clock", directory.display(), ago(*seconds))]
    Expired {
        /// The identity.
        directory: PathBuf,
        /// How long ago.
        seconds: u64,
    },
    /// The certificate is of the future.
    #[error("the certificate in {} is not valid yet: this machine's clock is behind", directory.display())]
    NotYetValid {
        /// The identity.
        directory: PathBuf,
    },
    /// The certificate does not come from the CA beside it.
    #[error("the certificate in {} is not one of the CA in its ca.pem: {source}", directory.display())]
    Untrusted {
        /// The identity.
        directory: PathBuf,
        /// What the verification said.
        #[source]
        source: rustls::Error,
    },
    /// The certificate does not say what its holder is.
    #[error("the certificate is none of Permafrost's: {what}")]
    Foreign {
        /// What is missing or too much.
        what: &'static str,
    },
    /// No such role.
    #[error("no role is called {role:?}: node, agent, reader or operator")]
    Role {
        /// What was given.
        role: String,
    },
    /// The right to delete for a role that removes nothing.
    #[error("a {role} removes nothing: the right to delete is for agents and operators")]
    Delete {
        /// The role.
        role: super::Role,
    },
    /// Not a namespace.
    #[error("{namespace:?} is no namespace: 1 to 63 letters, digits and . _ : + -, or * for all")]
    Namespace {
        /// What was given.
        namespace: String,
    },
    /// Too many.
    #[error("a certificate holds at most {limit} namespaces")]
    TooManyNamespaces {
        /// Most.
        limit: usize,
    },
    /// Not a name.
    #[error(
        "{name:?} is no name for a certificate: lower-case letters, digits and '-', in parts of 1 to 63 joined by '.', 200 in all"
    )]
    Name {
        /// What was given.
        name: String,
    },
    /// Not a host.
    #[error("{host:?} is neither an IP address nor a host name outside of .permafrost")]
    Host {
        /// What was given.
        host: String,
    },
    /// Out of range.
    #[error("a certificate is valid for 1 to {limit} days, not {days}")]
    Days {
        /// What was given.
        days: u32,
        /// Most.
        limit: u32,
    },
    /// Something is there already.
    #[error("{} holds {what} already", directory.display())]
    Exists {
        /// Where.
        directory: PathBuf,
        /// A CA or an identity.
        what: &'static str,
    },
    /// A CA's directory is no place for an identity, nor the other way round.
    #[error("{} holds {what}: choose another directory", directory.display())]
    Occupied {
        /// Where.
        directory: PathBuf,
        /// A CA or an identity.
        what: &'static str,
    },
    /// The CA's own certificate ran out.
    #[error("the CA in {} has expired: add a new one (permafrost pki rotate --ca)", directory.display())]
    ExpiredAuthority {
        /// The CA.
        directory: PathBuf,
    },
    /// A certificate could not be made.
    #[error("make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// A TLS configuration could not be made.
    #[error("set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// A connection whose other side showed no certificate; cannot happen with our configurations.
    #[error("the peer has no certificate")]
    NoCertificate,
}

fn ago(seconds: u64) -> String {
    match seconds {
        0..3_600 => format!("{} minutes ago", seconds / 60),
        3_600..172_800 => format!("{} hours ago", seconds / 3_600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}
