//! Failures of the HTTP API and of certificates, with their exit codes and advice.

use std::io;

use permafrost_api_types::problem::{Problem, ProblemKind};
use permafrost_identity::IdentityError;
use permafrost_transport::api::ApiError;

use crate::failure::{Code, Failure};

/// Returns the exit code for an HTTP status.
fn code_of(status: u16) -> Code {
    match status {
        401 | 403 => Code::Denied,
        404 => Code::NotFound,
        409 => Code::Conflict,
        400..=499 if status != 429 => Code::Invalid,
        429 | 502..=504 => Code::Unavailable,
        _ => Code::Internal,
    }
}

fn hint_of(problem: &Problem) -> String {
    let of_kind = |kind: ProblemKind| problem.word() == kind.word();
    if of_kind(ProblemKind::UnknownNode) {
        "`permafrost nodes` lists them".to_owned()
    } else if of_kind(ProblemKind::Unauthenticated) {
        "show a token with --api-token-file, or a certificate with --identity".to_owned()
    } else if of_kind(ProblemKind::Forbidden) {
        "the token's or the certificate's scopes do not allow it: docs/security.md".to_owned()
    } else if let Some(after_s) = problem.retry_after_s {
        format!("try again in {after_s} s")
    } else {
        String::new()
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let message = error.to_string();
        let failure = |code| Self::new(code, message.clone());
        match error {
            ApiError::Refused(problem) => failure(code_of(problem.status)).hint(hint_of(&problem)),
            ApiError::Foreign { status, .. } => failure(code_of(status))
                .hint("is that a permafrostd's API? see --listen-api"),
            ApiError::Unreachable { source, .. }
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                failure(Code::Denied).hint("run as the user that permafrostd runs as, or as root")
            }
            ApiError::Unreachable { .. } => failure(Code::Unreachable)
                .hint("start permafrostd, or name its API with --api or PERMAFROST_API"),
            ApiError::Tls { .. } => failure(Code::Denied).hint(
                "--api-ca or --identity holds the CA of the node, --api-node its name; https:// is for a port with TLS",
            ),
            ApiError::Broken { .. } | ApiError::Body { .. } | ApiError::Late { .. } => {
                failure(Code::Unreachable).hint("permafrostd's log says why")
            }
            ApiError::NoAuthority => {
                failure(Code::Invalid).hint("name it with --api-ca FILE or --identity DIR")
            }
            ApiError::ClearText { .. } => failure(Code::Denied)
                .hint("use https://, or a tunnel to the node's loopback interface"),
            ApiError::Identity(error) => error.into(),
            ApiError::Url { .. } | ApiError::BadToken | ApiError::Path { .. } => {
                failure(Code::Invalid)
            }
            ApiError::Runtime(_) | ApiError::Json(_) => failure(Code::Internal),
            ApiError::Unexpected(_) => failure(Code::Internal)
                .hint("are permafrost and permafrostd of the same version? see permafrost status"),
        }
    }
}

impl From<IdentityError> for Failure {
    fn from(error: IdentityError) -> Self {
        let message = error.to_string();
        let failure = |code| Self::new(code, message.clone());
        match error {
            IdentityError::Io {
                action,
                path,
                source,
            } => Self::io(action, &path, &source),
            IdentityError::ReadableKey { .. }
            | IdentityError::ForeignKey { .. }
            | IdentityError::Expired { .. }
            | IdentityError::NotYetValid { .. }
            | IdentityError::Untrusted { .. }
            | IdentityError::OpenList { .. }
            | IdentityError::Ended { .. }
            | IdentityError::ExpiredAuthority { .. }
            | IdentityError::NoCertificate => failure(Code::Denied),
            IdentityError::Exists { what, .. } => failure(Code::Conflict).hint(match what {
                "a CA" => {
                    "add another CA with permafrost pki rotate --ca, or replace it with --force"
                }
                _ => "issue it anew with permafrost pki rotate, or replace it with --force",
            }),
            IdentityError::Occupied { .. } | IdentityError::DeniedBeside { .. } => {
                failure(Code::Conflict)
            }
            IdentityError::NotAFile { .. }
            | IdentityError::Pem { .. }
            | IdentityError::Mismatch { .. }
            | IdentityError::Foreign { .. }
            | IdentityError::Role { .. }
            | IdentityError::Delete { .. }
            | IdentityError::Namespace { .. }
            | IdentityError::TooManyNamespaces { .. }
            | IdentityError::Name { .. }
            | IdentityError::Host { .. }
            | IdentityError::Denial { .. }
            | IdentityError::TooManyDenials { .. }
            | IdentityError::Days { .. } => failure(Code::Invalid),
            IdentityError::Make(_) | IdentityError::Tls(_) => failure(Code::Internal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_the_exit_code_of_what_it_means() {
        for (kind, code) in [
            (ProblemKind::NotJson, Code::Invalid),
            (ProblemKind::TooLarge, Code::Invalid),
            (ProblemKind::Invalid, Code::Invalid),
            (ProblemKind::TooMany, Code::Invalid),
            (ProblemKind::UnknownNode, Code::Invalid),
            (ProblemKind::NotFound, Code::NotFound),
            (ProblemKind::Unauthenticated, Code::Denied),
            (ProblemKind::Forbidden, Code::Denied),
            (ProblemKind::TooOften, Code::Unavailable),
            (ProblemKind::Conflict, Code::Conflict),
            (ProblemKind::Unavailable, Code::Unavailable),
            (ProblemKind::Internal, Code::Internal),
        ] {
            let problem = Box::new(Problem::new(kind, "it is so"));
            let failure = Failure::from(ApiError::Refused(problem));
            assert_eq!(failure.code, code, "{kind:?}");
            assert_eq!(failure.message, "it is so");
        }
        let unknown = Failure::from(ApiError::Refused(Box::new(Problem::new(
            ProblemKind::UnknownNode,
            "no n9",
        ))));
        assert!(unknown.hint.contains("permafrost nodes"));
    }
}
