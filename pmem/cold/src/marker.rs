//! The marker of an object store: the object that names the region and the medium that the store belongs to.

use permafrost_medium::ColdIdentity;

/// Name of the marker.
pub(crate) const MARKER: &str = "permafrost-region";

/// First line of a marker.
const TITLE: &str = "permafrost cold tier 1";

/// Returns the contents of a marker.
pub(crate) fn encode(identity: &ColdIdentity) -> Vec<u8> {
    let (region, medium) = (hex(&identity.region), hex(&identity.medium));
    format!("{TITLE}\nregion {region}\nmedium {medium}\n").into_bytes()
}

/// Reads a marker; `None` if it is damaged or something else.
pub(crate) fn decode(bytes: &[u8]) -> Option<ColdIdentity> {
    let text = std::str::from_utf8(bytes).ok()?;
    let mut lines = text.lines();
    if lines.next()? != TITLE {
        return None;
    }
    let mut id = |title: &str| {
        let digits = lines.next()?.strip_prefix(title)?;
        let number = u128::from_str_radix(digits, 16).ok()?;
        Some(number.to_be_bytes())
    };
    let found = ColdIdentity {
        region: id("region ")?,
        medium: id("medium ")?,
    };
    // Whole, and nothing behind it.
    (encode(&found) == bytes).then_some(found)
}

/// Returns an id as hexadecimal digits.
pub(crate) fn hex(id: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_read_as_written_and_nothing_else_is_one() {
        let identity = ColdIdentity {
            region: [1; 16],
            medium: [0xfe; 16],
        };
        let bytes = encode(&identity);
        assert_eq!(decode(&bytes), Some(identity));
        for at in 0..bytes.len() {
            assert_eq!(decode(&bytes[..at]), None);
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x80;
            assert_eq!(decode(&flipped), None);
        }
        assert_eq!(decode(&[bytes, b"\n".to_vec()].concat()), None);
    }
}
