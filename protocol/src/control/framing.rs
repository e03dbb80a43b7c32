//! Framing of control messages: a little-endian u32 length and that many bytes of protobuf.

use prost::Message;

use super::MAX_MESSAGE_BYTES;

/// Length of a message's length, bytes.
pub const LENGTH_BYTES: usize = 4;

/// A control message that cannot be sent, or was not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Longer than [`MAX_MESSAGE_BYTES`].
    #[error("a control message of {len_bytes} bytes is longer than {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// Length of the message, bytes.
        len_bytes: u64,
    },
    /// The bytes are not the expected message.
    #[error("the control message does not decode")]
    Undecodable(#[from] prost::DecodeError),
}

/// Encodes a message with its length before it.
///
/// # Errors
/// The message is too long.
pub fn encode(message: &impl Message) -> Result<Vec<u8>, MessageError> {
    let len = message.encoded_len();
    let len_bytes = u64::try_from(len).unwrap_or(u64::MAX);
    let length = u32::try_from(len)
        .ok()
        .filter(|length| *length <= MAX_MESSAGE_BYTES);
    let length = length.ok_or(MessageError::TooLong { len_bytes })?;
    let mut bytes = Vec::with_capacity(LENGTH_BYTES + len);
    bytes.extend_from_slice(&length.to_le_bytes());
    message.encode_raw(&mut bytes);
    Ok(bytes)
}

/// Returns the number of bytes that follow a length prefix.
///
/// # Errors
///
/// The length exceeds [`MAX_MESSAGE_BYTES`].
pub fn length(prefix: [u8; LENGTH_BYTES]) -> Result<usize, MessageError> {
    let len_bytes = u32::from_le_bytes(prefix);
    let length = usize::try_from(len_bytes)
        .ok()
        .filter(|_| len_bytes <= MAX_MESSAGE_BYTES);
    length.ok_or(MessageError::TooLong {
        len_bytes: len_bytes.into(),
    })
}

/// Decodes the first message in `bytes`, and returns it with its length; `None` if the message is not complete yet.
///
/// # Errors
/// The message is too long, which is noticed as soon as its length is there, or does not decode.
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<Option<(M, usize)>, MessageError> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Ok(None);
    };
    let len = length(*prefix)?;
    let Some(message) = rest.get(..len) else {
        return Ok(None);
    };
    Ok(Some((M::decode(message)?, LENGTH_BYTES + len)))
}
