//! The CRIU front ends: they speak CRIU's protocols on a socket, and pass the pages to a sink that keeps them.
//!
//! A front end knows nothing of where pages go: `permafrostd` hands it a sink over its own regions, so
//! that pages go straight from the socket into them.

mod capture;
mod intake;
mod lend;
mod pageserver;
mod pipe;
mod sink;
mod space;
mod streamer;

pub use capture::{Capture, CaptureError, CaptureLimits, MAX_SOCKET_PATH, StreamReceiver};
pub use lend::{LendError, LentCheckpoint, lend};
pub use pageserver::{Bounded, ConversationEnd, ServeError, serve};
pub use pipe::Pipe;
pub use sink::{PageSink, SinkError};
pub use space::{PipeRoom, SpaceError, SpaceLimits, SpacePipes, pipe_bytes};
pub use streamer::{StreamError, Streamed, accept, stream};
