//! The CRIU front ends: what speaks CRIU's protocols on a socket, over a sink that keeps the pages.
//!
//! A front end knows nothing of where pages go: `permafrostd` hands it a sink over its own regions, so
//! that pages go straight from the socket into them.

mod pageserver;
mod pipe;
mod sink;
mod streamer;

pub use pageserver::{Bounded, Outcome, ServeError, serve};
pub use pipe::Pipe;
pub use sink::{PageSink, SinkError};
pub use streamer::{ImageError, ImageSource, StreamError, Streamed, Wanted, accept, stream};
