//! Parts of [`Reply`](super::Reply).

use super::{
    Checkpoint, CheckpointContents, Checkpoints, Denials, Detail, Done, Error, Exported, GcReport,
    KeyList, LazyServed, NodeList, Progress, Pruned, Rebuilt, RegionMedia, Reserved,
    RetentionRules, Scrubbed, ServerStatus, SessionOpened, Verified,
};

/// Body of a reply.
#[derive(Clone, PartialEq, prost::Oneof)]
#[allow(missing_docs)]
pub enum Body {
    #[prost(message, tag = "1")]
    Error(Error),
    #[prost(message, tag = "2")]
    Progress(Progress),
    #[prost(message, tag = "3")]
    SessionOpened(SessionOpened),
    #[prost(message, tag = "4")]
    Checkpoint(Checkpoint),
    #[prost(message, tag = "5")]
    Checkpoints(Checkpoints),
    #[prost(message, tag = "6")]
    Detail(Detail),
    #[prost(message, tag = "7")]
    Done(Done),
    #[prost(message, tag = "8")]
    Verified(Verified),
    #[prost(message, tag = "9")]
    Exported(Exported),
    #[prost(message, tag = "10")]
    Status(ServerStatus),
    #[prost(message, tag = "11")]
    LazyServed(LazyServed),
    #[prost(message, tag = "20")]
    Nodes(NodeList),
    #[prost(message, tag = "21")]
    Rebuilt(Rebuilt),
    #[prost(message, tag = "25")]
    Scrubbed(Scrubbed),
    #[prost(message, tag = "26")]
    GcReport(GcReport),
    #[prost(message, tag = "27")]
    Retention(RetentionRules),
    #[prost(message, tag = "28")]
    Pruned(Pruned),
    #[prost(message, tag = "30")]
    Reserved(Reserved),
    #[prost(message, tag = "33")]
    RegionMedia(RegionMedia),
    #[prost(message, tag = "34")]
    KeyList(KeyList),
    #[prost(message, tag = "40")]
    Denials(Denials),
    #[prost(message, tag = "50")]
    Contents(CheckpointContents),
}
