//! State of the agent and its nodes.

use permafrost_protocol::control::{self, reply, request};

use super::backend::Remote;
use super::nodes::odd_answer;
use crate::error::NodesError;

impl Remote {
    /// Has the nodes deny certificates, or list the denied ones. One node informs the others of a cluster; a
    /// denial is taken back on each node by itself.
    pub(super) fn deny_on_nodes(
        &self,
        deny: &request::Deny,
    ) -> Result<control::Denials, control::Error> {
        let body = request::Body::Deny(deny.clone());
        if !deny.take_back {
            return match self.nodes.ask_any(&body)? {
                (_, reply::Body::Denials(denials)) => Ok(denials),
                (node, _) => Err(odd_answer(&node)),
            };
        }
        let until = self.nodes.until();
        let mut all = control::Denials::default();
        for node in self.nodes.in_order() {
            match self.nodes.ask(&node, body.clone(), until) {
                Ok(reply::Body::Denials(denials)) => {
                    all.changed = all.changed.max(denials.changed);
                    all.entries.extend(denials.entries);
                }
                Ok(_) => return Err(odd_answer(&node)),
                Err(error) => {
                    return Err(NodesError::DenialKept { node, error }.into());
                }
            }
        }
        all.entries.sort();
        all.entries.dedup();
        Ok(all)
    }

    /// Returns the agent's own sessions, and the regions of the nodes that answer.
    pub(super) fn status_of_all(&self) -> control::ServerStatus {
        let mut sessions: Vec<_> = self
            .sessions()
            .values()
            .filter(|session| !session.is_done())
            .map(|session| session.status())
            .collect();
        sessions.sort_by(|a, b| {
            b.age_s
                .cmp(&a.age_s)
                .then_with(|| a.session.cmp(&b.session))
        });
        let mut status = control::ServerStatus {
            agent: true,
            certificate: Some(self.nodes.identity.status()),
            sessions,
            ..control::ServerStatus::default()
        };
        let until = self.nodes.until();
        let mut words = Vec::new();
        for node in self.nodes.in_order() {
            let body = request::Body::Status(request::Status {});
            match self.nodes.ask_if_reachable(&node, body, until) {
                Ok(reply::Body::Status(of_node)) => {
                    words.push(node.clone());
                    status
                        .regions
                        .extend(of_node.regions.into_iter().map(|region| {
                            let path = format!("{node}:{}", region.path);
                            control::RegionStatus { path, ..region }
                        }));
                    status
                        .namespaces
                        .extend(of_node.namespaces.into_iter().map(|one| {
                            let namespace = format!("{node}:{}", one.namespace);
                            control::NamespaceUsage { namespace, ..one }
                        }));
                    status.checkpoints = status.checkpoints.max(of_node.checkpoints);
                    status.parked = status.parked.max(of_node.parked);
                    status.park_ttl_s = status.park_ttl_s.max(of_node.park_ttl_s);
                }
                Ok(_) => words.push(format!("{node} (odd)")),
                Err(error) => words.push(format!("{node} ({})", error.message)),
            }
        }
        status.catalog = format!("none: an agent of {}", words.join(", "));
        status
    }
}
