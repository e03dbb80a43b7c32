//! Errors of certificates, with messages that say how to correct them.

use std::io;
use std::path::PathBuf;

/// An identity or an authority that cannot be used, made or verified.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file could not be read or written.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// Verb of the failed operation.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The path is not a regular file of an acceptable size.
    #[error("{} is no regular file of at most {limit_bytes} bytes", path.display())]
    NotAFile {
        /// Path of the file.
        path: PathBuf,
        /// Largest size that is read, bytes.
        limit_bytes: u64,
    },
    /// Other users may read the key.
    #[error("the key {} can be read by others (mode {mode:04o}): chmod 600 it, and issue a new one if somebody may have", path.display())]
    ReadableKey {
        /// Path of the key.
        path: PathBuf,
        /// Permission bits of the key file.
        mode: u32,
    },
    /// Another user can replace the key.
    #[error("the key {} belongs to user {owner}: it has to belong to the user that runs this, or to root", path.display())]
    ForeignKey {
        /// Path of the key.
        path: PathBuf,
        /// User id of the key's owner.
        owner: u32,
    },
    /// Another user can change the list of denied certificates.
    #[error("the list {} can be changed by others (mode {mode:04o}, user {owner}): it has to belong to the user that runs this, or to root; chmod 600 it", path.display())]
    OpenList {
        /// Path of the list.
        path: PathBuf,
        /// Permission bits of the list.
        mode: u32,
        /// User id of the list's owner.
        owner: u32,
    },
    /// A line of a list of denied certificates cannot be parsed.
    #[error("{text:?} denies no certificate: write `serial HEX` or `name ROLE NAME`")]
    Denial {
        /// Text of the line.
        text: String,
    },
    /// More denials than a list may hold.
    #[error(
        "at most {limit} certificates can be denied: change the CA, and take denials back (permafrost pki undeny)"
    )]
    TooManyDenials {
        /// Largest number of denials.
        limit: usize,
    },
    /// A denial that cannot be taken back because another file also contains it.
    #[error("`{denial}` stands in {} as well: take it out there (permafrost pki undeny --identity)", directory.join(super::DENIED).display())]
    DeniedBeside {
        /// Text of the denial.
        denial: String,
        /// Identity directory whose list contains the denial too.
        directory: PathBuf,
    },
    /// A peer's certificate is no longer valid.
    #[error("the peer is refused: {reason}")]
    Ended {
        /// Reason of the refusal.
        reason: String,
    },
    /// A file is not PEM, or does not hold the expected items.
    #[error("{} holds no {expected} in PEM", path.display())]
    Pem {
        /// Path of the file.
        path: PathBuf,
        /// Description of the items that the file should hold.
        expected: &'static str,
    },
    /// Key and certificate do not match.
    #[error("key.pem and cert.pem in {} do not belong together: issue them again (permafrost pki rotate)", directory.display())]
    Mismatch {
        /// Directory of the identity.
        directory: PathBuf,
    },
    /// The certificate has expired.
    #[error("the certificate in {} expired {}: issue a new one (permafrost pki rotate), or set this machine's clock", directory.display(), ago(*seconds))]
    Expired {
        /// Directory of the identity.
        directory: PathBuf,
        /// Time since the expiry, seconds.
        seconds: u64,
    },
    /// The certificate is not valid yet.
    #[error("the certificate in {} is not valid yet: this machine's clock is behind", directory.display())]
    NotYetValid {
        /// Directory of the identity.
        directory: PathBuf,
    },
    /// The certificate was not issued by the CA beside it.
    #[error("the certificate in {} is not one of the CA in its ca.pem: {source}", directory.display())]
    Untrusted {
        /// Directory of the identity.
        directory: PathBuf,
        /// Error of the verification.
        #[source]
        source: rustls::Error,
    },
    /// The certificate does not state the role and name of its holder in Permafrost's form.
    #[error("the certificate is none of Permafrost's: {what}")]
    Foreign {
        /// Description of the part that is missing or unexpected.
        what: &'static str,
    },
    /// An unknown role.
    #[error("no role is called {role:?}: node, agent, reader or operator")]
    Role {
        /// Role that was given.
        role: String,
    },
    /// The right to delete for a role that must not remove checkpoints.
    #[error("a {role} removes nothing: the right to delete is for agents and operators")]
    Delete {
        /// Role that was given.
        role: super::Role,
    },
    /// An invalid namespace.
    #[error("{namespace:?} is no namespace: 1 to 63 letters, digits and . _ : + -, or * for all")]
    Namespace {
        /// Namespace that was given.
        namespace: String,
    },
    /// More namespaces than a certificate may hold.
    #[error("a certificate holds at most {limit} namespaces")]
    TooManyNamespaces {
        /// Largest number of namespaces.
        limit: usize,
    },
    /// An invalid name.
    #[error(
        "{name:?} is no name for a certificate: lower-case letters, digits and '-', in parts of 1 to 63 joined by '.', 200 in all"
    )]
    Name {
        /// Name that was given.
        name: String,
    },
    /// An invalid host.
    #[error("{host:?} is neither an IP address nor a host name outside of .permafrost")]
    Host {
        /// Host that was given.
        host: String,
    },
    /// A validity that is out of range.
    #[error("a certificate is valid for 1 to {limit} days, not {days}")]
    Days {
        /// Number of days that was given.
        days: u32,
        /// Largest number of days.
        limit: u32,
    },
    /// The directory already holds a CA or an identity.
    #[error("{} holds {what} already", directory.display())]
    Exists {
        /// Path of the directory.
        directory: PathBuf,
        /// Kind of the contents: a CA or an identity.
        what: &'static str,
    },
    /// An identity cannot be put into a CA's directory, nor a CA into an identity's.
    #[error("{} holds {what}: choose another directory", directory.display())]
    Occupied {
        /// Path of the directory.
        directory: PathBuf,
        /// Kind of the contents: a CA or an identity.
        what: &'static str,
    },
    /// The CA's own certificate has expired.
    #[error("the CA in {} has expired: add a new one (permafrost pki rotate --ca)", directory.display())]
    ExpiredAuthority {
        /// Directory of the CA.
        directory: PathBuf,
    },
    /// A certificate could not be made.
    #[error("make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// A TLS configuration could not be made.
    #[error("set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The peer showed no certificate; this cannot happen with Permafrost's TLS configurations.
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
