//! Receives another node's dump as a copy.

use std::sync::Arc;

use permafrost_cluster::replication::apply;
use permafrost_protocol::control;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{Closed, Committed, Prepared, request};
use permafrost_store::{CopyRequest, Store};
use permafrost_transport::peer::{FrameSource, Replies};

use crate::error::RequestError;

/// Receives a copy, from its opening to its seal. If the conversation ends before the commit, the received pages are
/// freed.
///
/// # Errors
/// The error for the node that sends the dump.
pub(super) fn take_copy(
    store: &Arc<Store>,
    node: &str,
    request: request::Dump,
    frames: &mut dyn FrameSource,
    replies: &mut dyn Replies,
) -> Result<(), control::Error> {
    let session = request.session.as_slice().try_into();
    let session = session.map_err(|_| RequestError::SessionLength)?;
    // Copies that repair makes are of what was stored within quotas: those are pulled, and come another way.
    store.check_may_store(&request.job, 1, 1)?;
    let mut dump = store.open_copy(CopyRequest {
        session,
        job: request.job,
        parent: request.parent,
        compared: request.compared,
    })?;
    replies.opened(dump.has_parent());
    loop {
        let frame = frames.next().map_err(RequestError::SenderGone)?;
        match frame.header.kind {
            Kind::Close => {
                let digest = dump.close()?;
                replies.closed(Closed {
                    content_digest: digest.to_vec(),
                    nodes: vec![node.to_owned()],
                });
            }
            Kind::Prepare => break,
            _ => apply(&mut dump, &frame)?,
        }
    }
    let digest = dump.prepare()?;
    replies.prepared(Prepared {
        content_digest: digest.to_vec(),
        nodes: vec![node.to_owned()],
    });
    let commit = frames.commit().map_err(RequestError::SenderGone)?;
    dump.check_room(&commit.job)?;
    let record = dump.commit(&commit)?;
    replies.committed(Committed {
        checkpoint: Some(record),
        nodes: vec![node.to_owned()],
    });
    Ok(())
}
