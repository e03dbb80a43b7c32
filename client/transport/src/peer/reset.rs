//! Stateless resets (RFC 9000, 10.3): a peer that was killed and restarted tells the senders of its
//! predecessor's connections to stop, which would otherwise wait for seconds. For that, both processes must
//! derive the same token from a connection id: the key is derived from the certificate's private key.

use std::time::Duration;

use quinn::crypto::{CryptoError, HmacKey};
use quinn::{ConnectionId, ConnectionIdGenerator};
use sha2::{Digest as _, Sha256};

const BLOCK_BYTES: usize = 64;

/// Key of the resets, for HMAC-SHA256 (RFC 2104).
pub(super) struct ResetKey(pub(super) [u8; 32]);

impl ResetKey {
    fn mac(&self, data: &[u8]) -> [u8; 32] {
        let padded = |pad: u8| {
            let mut block = [pad; BLOCK_BYTES];
            for (byte, key) in block.iter_mut().zip(self.0) {
                *byte ^= key;
            }
            block
        };
        let inner = Sha256::new().chain_update(padded(0x36)).chain_update(data);
        let outer = Sha256::new().chain_update(padded(0x5c));
        outer.chain_update(inner.finalize()).finalize().into()
    }
}

impl HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        signature_out.copy_from_slice(&self.mac(data));
    }

    fn signature_len(&self) -> usize {
        32
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), CryptoError> {
        let differs = self
            .mac(data)
            .iter()
            .zip(signature)
            .fold(0, |d, (a, b)| d | (a ^ b));
        (signature.len() == 32 && differs == 0)
            .then_some(())
            .ok_or(CryptoError)
    }
}

/// Generator of random ids that rejects no id: ids of a predecessor get their reset.
pub(super) struct Ids;

const ID_BYTES: usize = 8;

impl ConnectionIdGenerator for Ids {
    fn generate_cid(&mut self) -> ConnectionId {
        // All but a few bits of these are random.
        ConnectionId::new(&uuid::Uuid::new_v4().as_bytes()[16 - ID_BYTES..])
    }

    fn cid_len(&self) -> usize {
        ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_hmac_sha256() {
        // RFC 4231, test case 3: the key is 20 bytes, which is the same as 32 with zeros behind.
        let mut key = [0; 32];
        key[..20].fill(0xaa);
        let mac = ResetKey(key).mac(&[0xdd; 50]);
        assert_eq!(mac[..8], [0x77, 0x3e, 0xa9, 0x1e, 0x36, 0x80, 0x0e, 0x46]);
    }
}
