//! Short secrets under AES-256-GCM: the store key under a key file, the data keys under the store key.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroizing;

/// Encrypts and authenticates `plain` under a random nonce, which comes first in the result. Few secrets are ever
/// sealed with a key, so random nonces of 96 bits do not repeat.
///
/// # Panics
/// If the kernel has no `getrandom`, which every kernel since 3.17 has.
pub(crate) fn seal(key: &[u8; 32], context: &[u8], plain: &[u8]) -> Vec<u8> {
    let mut nonce = [0; NONCE_LEN];
    getrandom::fill(&mut nonce).expect("the kernel gives random numbers");
    let mut sealed = nonce.to_vec();
    sealed.extend_from_slice(plain);
    let (_, content) = sealed.split_at_mut(NONCE_LEN);
    let nonce = Nonce::assume_unique_for_key(nonce);
    let tag = cipher(key)
        .seal_in_place_separate_tag(nonce, Aad::from(context), content)
        .expect("a secret is far shorter than the longest that GCM takes");
    sealed.extend_from_slice(tag.as_ref());
    sealed
}

/// Decrypts what [`seal`] returned; `None` if it was sealed with another key, for something else, or is damaged.
pub(crate) fn open(key: &[u8; 32], context: &[u8], sealed: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let (nonce, content) = sealed.split_first_chunk::<NONCE_LEN>()?;
    let mut content = Zeroizing::new(content.to_vec());
    let nonce = Nonce::assume_unique_for_key(*nonce);
    let plain = cipher(key).open_in_place(nonce, Aad::from(context), &mut content);
    let len = plain.ok()?.len();
    content.truncate(len);
    Some(content)
}

fn cipher(key: &[u8; 32]) -> LessSafeKey {
    let key = UnboundKey::new(&AES_256_GCM, key);
    LessSafeKey::new(key.expect("a key of AES-256 has 32 bytes"))
}
