//! Rights that can be checked only once the checkpoint is found: the job of a compared checkpoint, and the jobs
//! named in a reply.

use std::sync::Arc;

use permafrost_cluster::Operate;
use permafrost_identity::Role;
use permafrost_protocol::control::{
    self, ErrorCode, NodeList, NodeStatus, Rebuilt, reply, request as local,
};
use permafrost_protocol::wire::message::request;
use permafrost_store::StoreError;

use super::site::Site;

#[test]
fn a_checkpoint_that_is_compared_with_must_be_ones_own_to_read() {
    let site = Site::new();
    let (own, theirs) = (site.dump("team-a/x"), site.dump("team-b/x"));
    let agent = site.peer("a", Role::Agent, &["team-a"]);
    let fetch = |parent: &str| {
        let fetch = request::Fetch {
            checkpoint: own.id.clone(),
            parent: parent.to_owned(),
            ..request::Fetch::default()
        };
        let asked = site.ask_wire(&agent, request::Body::Fetch(fetch));
        asked.refused.map(|error| error.code())
    };
    assert_eq!(fetch(&theirs.id), Some(ErrorCode::Denied));
    assert_eq!(fetch(&own.id), None);
    assert_eq!(fetch(""), None);
}

/// A cluster of one node, which has the only copy of a checkpoint of each tenant.
struct OneNode;

impl Operate for OneNode {
    fn nodes(&self, _: &local::Nodes) -> Result<NodeList, StoreError> {
        let names = ["team-a/x@1", "team-b/secret@1", "plain@1"];
        Ok(NodeList {
            nodes: vec![NodeStatus {
                only_here: Some(3),
                only_here_names: names.map(str::to_owned).to_vec(),
                ..NodeStatus::default()
            }],
            ..NodeList::default()
        })
    }

    fn set_node(&self, _: &local::SetNode) -> Result<NodeList, StoreError> {
        self.nodes(&local::Nodes::default())
    }

    fn set_level(&self, _: &local::SetLevel) -> Result<NodeList, StoreError> {
        Ok(NodeList::default())
    }

    fn rebuild(&self, _: &local::Rebuild) -> Result<Rebuilt, StoreError> {
        Ok(Rebuilt::default())
    }
}

#[test]
fn nodes_are_shown_with_the_jobs_that_one_may_read() {
    let site = Site::new();
    let agents = site.agents().with_operator(Arc::new(OneNode));
    let names = |role: Role, namespaces: &[&str], body: local::Body| {
        let peer = site.peer("p", role, namespaces);
        let request = control::Request {
            version: 1,
            body: Some(body),
        };
        let reply = agents.call(&peer, request).body;
        let Some(reply::Body::Nodes(list)) = reply else {
            panic!("{reply:?}");
        };
        assert_eq!(list.nodes[0].only_here, Some(3), "all are counted");
        list.nodes[0].only_here_names.clone()
    };
    let show = || local::Body::Nodes(local::Nodes::default());
    assert_eq!(names(Role::Agent, &["team-a"], show()), ["team-a/x@1"]);
    assert_eq!(names(Role::Reader, &["default"], show()), ["plain@1"]);
    assert!(names(Role::Operator, &[], show()).is_empty());
    assert_eq!(names(Role::Operator, &["*"], show()).len(), 3);
    let drain = local::Body::SetNode(local::SetNode::default());
    assert_eq!(
        names(Role::Operator, &["team-b"], drain),
        ["team-b/secret@1"]
    );
}
