//! XTS-AES-256 over pages.
//!
//! The crate `xts-mode` encrypts block by block, four times slower than the blocks of a page together.

use aes::Aes256;
use aes::cipher::consts::U16;
use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use zeroize::Zeroize;

use crate::PAGE_BYTES;
use crate::tweaks::{self, double};

type Block = Array<u8, U16>;

/// Bytes of a block of AES: a part of a page that is decrypted begins and ends with one.
pub const BLOCK_BYTES: usize = 16;
/// Blocks of a page.
const BLOCKS: usize = PAGE_BYTES / BLOCK_BYTES;

/// Cipher of the pages of one data key in one region. Its keys are zeroed when it is dropped.
pub struct PageCipher {
    data: Aes256,
    tweak: Aes256,
}

#[derive(Clone, Copy)]
enum Direction {
    Encrypt,
    Decrypt,
}

impl PageCipher {
    /// Makes a cipher of the key for data and the key for tweaks, one after the other.
    #[must_use]
    pub fn new(keys: &[u8; 64]) -> Self {
        let (mut data, mut tweak) = ([0; 32], [0; 32]);
        data.copy_from_slice(&keys[..32]);
        tweak.copy_from_slice(&keys[32..]);
        let cipher = Self {
            data: Aes256::new(&data.into()),
            tweak: Aes256::new(&tweak.into()),
        };
        data.zeroize();
        tweak.zeroize();
        cipher
    }

    /// Encrypts a page in place.
    pub fn encrypt(&self, page_no: u64, page: &mut [u8; PAGE_BYTES]) {
        self.apply(page_no, 0, page, Direction::Encrypt);
    }

    /// Encrypts a page into another place: cheaper than a copy that is encrypted in its place.
    pub fn encrypt_to(
        &self,
        page_no: u64,
        page: &[u8; PAGE_BYTES],
        encrypted: &mut [u8; PAGE_BYTES],
    ) {
        let (plain, _) = page.as_chunks::<BLOCK_BYTES>();
        let (blocks, _) = encrypted.as_chunks_mut::<BLOCK_BYTES>();
        let mut tweaks = [[0; BLOCK_BYTES]; BLOCKS];
        tweaks::fill_and_add(self.first_tweak(page_no), &mut tweaks, plain, blocks);
        let units: &mut [Block] = Array::cast_slice_from_core_mut(&mut *blocks);
        self.data.encrypt_blocks(units);
        tweaks::xor(blocks, &tweaks);
    }

    /// Decrypts a page in place.
    pub fn decrypt(&self, page_no: u64, page: &mut [u8; PAGE_BYTES]) {
        self.apply(page_no, 0, page, Direction::Decrypt);
    }

    /// Encrypts a part of a page in place, which begins at `offset` of the page. Both the offset and the length are
    /// whole blocks; bytes beyond a page or a whole block stay as they are.
    pub fn encrypt_part(&self, page_no: u64, offset: usize, part: &mut [u8]) {
        self.apply(page_no, offset, part, Direction::Encrypt);
    }

    /// Decrypts a part of a page in place, as [`encrypt_part`](Self::encrypt_part) encrypts one.
    pub fn decrypt_part(&self, page_no: u64, offset: usize, part: &mut [u8]) {
        self.apply(page_no, offset, part, Direction::Decrypt);
    }

    /// Returns the tweak of a page's first block.
    fn first_tweak(&self, page_no: u64) -> u128 {
        let mut first = Block::from(u128::from(page_no).to_le_bytes());
        self.tweak.encrypt_block(&mut first);
        u128::from_le_bytes(first.into())
    }

    fn apply(&self, page_no: u64, offset: usize, part: &mut [u8], direction: Direction) {
        let mut tweak = self.first_tweak(page_no);
        for _ in 0..offset / BLOCK_BYTES {
            tweak = double(tweak);
        }
        let (blocks, _) = part.as_chunks_mut::<BLOCK_BYTES>();
        let count = blocks.len().min(BLOCKS);
        let blocks = &mut blocks[..count];
        let mut tweaks = [[0; BLOCK_BYTES]; BLOCKS];
        let tweaks = &mut tweaks[..count];
        tweaks::fill(tweak, tweaks);
        tweaks::xor(blocks, tweaks);
        let units: &mut [Block] = Array::cast_slice_from_core_mut(&mut *blocks);
        match direction {
            Direction::Encrypt => self.data.encrypt_blocks(units),
            Direction::Decrypt => self.data.decrypt_blocks(units),
        }
        tweaks::xor(blocks, tweaks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let pairs = digits.chunks_exact(2);
        let pair = |pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        pairs.map(pair).collect()
    }

    /// Keys of the vectors 10 to 12 of IEEE 1619, appendix B.
    const IEEE_KEYS: &str = "2718281828459045235360287471352662497757247093699959574966967627
        3141592653589793238462643383279502884197169399375105820974944592";

    fn ieee() -> PageCipher {
        PageCipher::new(&bytes(IEEE_KEYS).try_into().unwrap())
    }

    fn ascending() -> Vec<u8> {
        (0..512_u32)
            .map(|n| u8::try_from(n % 256).unwrap())
            .collect()
    }

    #[test]
    fn published_vectors() {
        // IEEE 1619 vector 10: the whole data unit of 512 bytes.
        let mut data = ascending();
        ieee().encrypt_part(0xff, 0, &mut data);
        let expected = bytes(include_str!("ieee1619-vector10.hex"));
        assert_eq!(data, expected);
        ieee().decrypt_part(0xff, 0, &mut data);
        assert_eq!(data, ascending());
        // Vectors 11 and 12: other data units.
        for (unit, first) in [
            (0xffff, "77a31251618a15e6b92d1d66dffe7b50"),
            (0x00ff_ffff, "e387aaa58ba483afa7e8eb469778317e"),
        ] {
            let mut data = ascending();
            ieee().encrypt_part(unit, 0, &mut data);
            assert_eq!(data[..16], bytes(first));
        }
    }

    #[test]
    fn parts_equal_the_whole() {
        let cipher = ieee();
        let mut page = [0_u8; PAGE_BYTES];
        for (place, byte) in page.iter_mut().enumerate() {
            *byte = u8::try_from(place * 7 % 251).unwrap();
        }
        let (plain, mut whole) = (page, page);
        cipher.encrypt(77, &mut whole);
        let mut elsewhere = [1; PAGE_BYTES];
        cipher.encrypt_to(77, &plain, &mut elsewhere);
        assert_eq!(elsewhere, whole);
        for (offset, len) in [(0, 16), (16, 32), (112, 176), (2048, 2048), (4080, 16)] {
            let mut part = whole[offset..offset + len].to_vec();
            cipher.decrypt_part(77, offset, &mut part);
            assert_eq!(part, plain[offset..offset + len], "{offset} {len}");
            cipher.encrypt_part(77, offset, &mut part);
            assert_eq!(part, whole[offset..offset + len]);
        }
        cipher.decrypt(77, &mut whole);
        assert_eq!(whole, plain);
        cipher.encrypt(78, &mut whole);
        let mut again = plain;
        cipher.encrypt(77, &mut again);
        assert_ne!(whole, again);
    }
}
