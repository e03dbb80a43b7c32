//! Small images on their way from an agent into a session, frame by frame.

use std::io::{self, Read};

use bytes::Bytes;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::Prepared;
use permafrost_store::{SmallImages, StoreError};
use permafrost_transport::peer::{FrameSource, Replies};

use crate::error::RequestError;

/// Small images of a conversation, up to its commit. The wire's receiver has checked that names are plain and
/// unique, and that each image is as long as announced.
pub(super) struct ArrivingImages<'a> {
    frames: &'a mut dyn FrameSource,
    replies: &'a mut dyn Replies,
    /// Session that the peer has to name in its commit.
    session: &'a str,
    payload: Bytes,
    left_bytes: u64,
    failure: Option<StoreError>,
}

impl<'a> ArrivingImages<'a> {
    pub(super) fn new(
        frames: &'a mut dyn FrameSource,
        replies: &'a mut dyn Replies,
        session: &'a str,
    ) -> Self {
        Self {
            frames,
            replies,
            session,
            payload: Bytes::new(),
            left_bytes: 0,
            failure: None,
        }
    }

    /// Waits for the commit, and checks that it is of this session.
    fn commit(&mut self) -> Result<(), StoreError> {
        self.replies.prepared(Prepared::default());
        let commit = self.frames.commit().map_err(RequestError::SenderGone)?;
        if commit.session == self.session {
            return Ok(());
        }
        Err(RequestError::OtherSession.into())
    }

    /// Receives the next bytes of the image into `payload`.
    fn receive(&mut self) -> Result<(), StoreError> {
        let frame = self.frames.next().map_err(RequestError::SenderGone)?;
        if frame.header.kind != Kind::ImageData {
            return Err(RequestError::NoImageFrame.into());
        }
        self.left_bytes = self.left_bytes.saturating_sub(frame.payload.len() as u64);
        self.payload = frame.payload;
        Ok(())
    }
}

impl SmallImages for ArrivingImages<'_> {
    fn next_image(&mut self) -> Result<Option<(String, u64)>, StoreError> {
        let frame = self.frames.next().map_err(RequestError::SenderGone)?;
        match frame.header.kind {
            Kind::Image => {
                let name =
                    std::str::from_utf8(&frame.payload).map_err(|_| RequestError::NoImageFrame)?;
                self.left_bytes = frame.header.index;
                Ok(Some((name.to_owned(), self.left_bytes)))
            }
            Kind::Prepare => self.commit().map(|()| None),
            _ => Err(RequestError::NoImageFrame.into()),
        }
    }

    fn failure(&mut self) -> Option<StoreError> {
        self.failure.take()
    }
}

impl Read for ArrivingImages<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.payload.is_empty() && self.left_bytes > 0 {
            self.receive().map_err(|error| {
                let told = io::Error::other(error.to_string());
                self.failure = Some(error);
                told
            })?;
        }
        let part = into.len().min(self.payload.len());
        into[..part].copy_from_slice(&self.payload.split_to(part));
        Ok(part)
    }
}
