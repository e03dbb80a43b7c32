//! `permafrost show --maps` and `permafrost diff`: what a checkpoint consists of, and what changed between two.

mod compare;
mod diff;
mod elsewhere;
mod maps;

use permafrost_protocol::control::{CheckpointContents, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;

pub use compare::{
    ContentsChange, FileChange, MappingChange, PagesChange, ProcessChange, SharedChange,
};
pub use diff::{DIFF_EXAMPLES, DiffArguments, diff};
pub use maps::maps;

fn ask(context: &Context, asked: request::Describe) -> Result<CheckpointContents, Failure> {
    Ok(context.connect()?.call(asked)?)
}
