//! CRIU's image-streamer protocol, restoring side (`criu restore --stream`; `criu/img-streamer.c` and
//! `images/img-streamer.proto` of CRIU 4.2).
//!
//! CRIU connects to `streamer-serve.sock` in its images directory and requests one file after another by name,
//! missing files too. A message is a little-endian `u32` length and a protobuf, as on the control socket. After a
//! [`FileReply`] with `exists` CRIU sends one byte with the write end of a pipe riding on it, and reads the file from
//! the other end. The end of the connection ends the session.

use prost::Message;

/// Name of the socket that CRIU connects to, in its images directory.
pub const SERVE_SOCKET: &str = "streamer-serve.sock";

/// Name of the socket that a dumping CRIU connects to, in its images directory. There, the read end of a pipe follows
/// each request, and no reply: CRIU writes the file into the other end.
pub const CAPTURE_SOCKET: &str = "streamer-capture.sock";

/// CRIU's request for a file.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct FileRequest {
    /// Name of the file.
    #[prost(string, required, tag = "1")]
    pub filename: String,
}

/// Reply to a [`FileRequest`]: tells whether the file exists.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct FileReply {
    /// True if the file exists. Required, in proto2's sense: CRIU does not take a "no" that is left out as the
    /// default.
    #[prost(bool, required, tag = "1")]
    pub exists: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_no_is_spelled_out() {
        assert_eq!(FileReply { exists: false }.encode_to_vec(), [8, 0]);
        assert_eq!(FileReply { exists: true }.encode_to_vec(), [8, 1]);
        let request = FileRequest::decode([10, 3, b'a', b'b', b'c'].as_slice()).unwrap();
        assert_eq!(request.filename, "abc");
    }
}
