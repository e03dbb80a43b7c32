//! Statements signed by the holder of a certificate, for storage in places where others can write.

use rustls::SignatureScheme;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

use super::tls::Material;
use super::{IdentityError, Subject};

/// Signature schemes of statements, the usual first: keys of `permafrost pki` are P-256.
const SCHEMES: [SignatureScheme; 4] = [
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ED25519,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::RSA_PSS_SHA256,
];

/// Prefix of every signed message, so that a signature made for TLS is never valid for a statement.
const CONTEXT: &[u8] = b"permafrost statement v1\0";

/// Longest chain that is read: a certificate, and CAs signed by their predecessors.
const MAX_CHAIN: usize = 8;

/// A signature, and the certificates to verify it with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signed {
    /// The signer's certificate and those between it and its CA, DER in hex.
    pub chain: Vec<String>,
    /// Number of the signature scheme in TLS.
    pub scheme: u16,
    /// The signature as hex digits.
    pub signature: String,
}

fn message(statement: &[u8]) -> Vec<u8> {
    [CONTEXT, statement].concat()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect::<Option<Vec<u8>>>()
        .filter(|_| text.len().is_multiple_of(2))
}

impl Material {
    pub(super) fn sign(&self, statement: &[u8]) -> Result<Signed, IdentityError> {
        let unfit =
            || rustls::Error::General("the key signs by no scheme that is known".to_owned());
        let signer = self
            .certified
            .key
            .choose_scheme(&SCHEMES)
            .ok_or_else(unfit)?;
        Ok(Signed {
            chain: self.certified.cert.iter().map(|one| hex(one)).collect(),
            scheme: u16::from(signer.scheme()),
            signature: hex(&signer.sign(&message(statement))?),
        })
    }

    /// Verifies a statement and returns its signer, whose certificate must be trusted.
    pub(super) fn signer(
        &self,
        statement: &[u8],
        signed: &Signed,
        now: std::time::SystemTime,
    ) -> Result<Subject, IdentityError> {
        let unreadable = |what| IdentityError::Foreign { what };
        if signed.chain.len() > MAX_CHAIN {
            return Err(unreadable("its chain is too long"));
        }
        let chain: Option<Vec<_>> = signed.chain.iter().map(|one| unhex(one)).collect();
        let chain = chain.ok_or_else(|| unreadable("its chain is not hexadecimal"))?;
        let chain: Vec<CertificateDer<'_>> = chain.into_iter().map(CertificateDer::from).collect();
        let own = chain.first().ok_or(IdentityError::NoCertificate)?;
        let subject = Subject::of(own)?;
        // A statement stays valid after the certificate's expiry; the certificate must be trusted and not
        // denied now.
        let at = now.min(subject.not_after - std::time::Duration::from_secs(1));
        self.verify(&chain, at)?;
        self.check_not_denied(own)?;

        let (_, certificate) = x509_parser::parse_x509_certificate(own)
            .map_err(|_| unreadable("it is no X.509 certificate"))?;
        let key = certificate.public_key().subject_public_key.data.as_ref();
        let signature = unhex(&signed.signature)
            .ok_or_else(|| unreadable("its signature is not hexadecimal"))?;
        let message = message(statement);
        let provider = super::tls::provider();
        let algorithms = provider.signature_verification_algorithms.mapping.iter();
        let is_right = algorithms
            .filter(|(scheme, _)| u16::from(*scheme) == signed.scheme && SCHEMES.contains(scheme))
            .flat_map(|(_, algorithms)| *algorithms)
            .any(|algorithm| {
                algorithm
                    .verify_signature(key, &message, &signature)
                    .is_ok()
            });
        if is_right {
            Ok(subject)
        } else {
            Err(rustls::Error::General("the signature is of something else".to_owned()).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_comes_back_and_nonsense_is_none() {
        assert_eq!(unhex(&hex(&[0, 255, 16])), Some(vec![0, 255, 16]));
        for text in ["0", "0g", "00f", "ää"] {
            assert_eq!(unhex(text), None, "{text}");
        }
    }
}
