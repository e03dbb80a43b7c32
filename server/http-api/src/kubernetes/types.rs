//! Messages between kube-scheduler and an extender: `k8s.io/kube-scheduler/extender/v1`, as Go marshals it. The
//! types there have no JSON tags, so their fields are called as in Go; a pod's and a node's have tags. A
//! missing field is no error, and unneeded fields are ignored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Arguments of filter and prioritize, `ExtenderArgs`. One of `nodes` and `node_names` is present, by
/// `nodeCacheCapable`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct ExtenderArgs {
    pub(super) pod: Option<Pod>,
    pub(super) nodes: Option<NodeList>,
    pub(super) node_names: Option<Vec<String>>,
}

impl ExtenderArgs {
    /// Returns the names of the candidates, in their order.
    pub(super) fn names(&self) -> Vec<&str> {
        match (&self.node_names, &self.nodes) {
            (Some(names), _) => names.iter().map(String::as_str).collect(),
            (None, Some(nodes)) => nodes.items.iter().flatten().map(node_name).collect(),
            (None, None) => Vec::new(),
        }
    }
}

/// List of nodes, `v1.NodeList`; the nodes themselves are returned as they came.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct NodeList {
    /// Nodes of the list; `null` for a nil slice.
    #[serde(default)]
    pub(super) items: Option<Vec<Value>>,
    /// Kind, version and metadata of the list.
    #[serde(flatten)]
    pub(super) rest: BTreeMap<String, Value>,
}

/// Returns a node's `metadata.name`; empty for a node without.
pub(super) fn node_name(node: &Value) -> &str {
    let name = node
        .get("metadata")
        .and_then(|metadata| metadata.get("name"));
    name.and_then(Value::as_str).unwrap_or_default()
}

/// The fields of `v1.Pod` that are used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub(super) metadata: Metadata,
    pub(super) spec: PodSpec,
    pub(super) status: PodStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) uid: String,
    pub(super) namespace: String,
    pub(super) annotations: Option<BTreeMap<String, String>>,
    pub(super) owner_references: Option<Vec<Owner>>,
}

/// An owner of a pod, `v1.OwnerReference`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Owner {
    pub(super) uid: String,
    /// True for the one that started the pod.
    pub(super) controller: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PodSpec {
    pub(super) priority: Option<i64>,
    pub(super) containers: Option<Vec<Container>>,
    /// Time that the pod has to end, seconds.
    pub(super) termination_grace_period_seconds: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Container {
    pub(super) resources: Requirements,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Requirements {
    /// Requested quantities, as texts.
    pub(super) requests: Option<BTreeMap<String, Value>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PodStatus {
    /// Start time, RFC 3339.
    pub(super) start_time: Option<String>,
}

/// Result of filter, `ExtenderFilterResult`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct ExtenderFilterResult {
    pub(super) nodes: Option<NodeList>,
    pub(super) node_names: Option<Vec<String>>,
    pub(super) failed_nodes: BTreeMap<String, String>,
    pub(super) failed_and_unresolvable_nodes: BTreeMap<String, String>,
    pub(super) error: String,
}

/// Score of one node, `HostPriority`.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct HostPriority {
    pub(super) host: String,
    /// Score from 0 to [`MAX_PRIORITY`].
    pub(super) score: i64,
}

/// Highest score, `MaxExtenderPriority`.
pub(super) const MAX_PRIORITY: i64 = 10;

/// Arguments of preempt, `ExtenderPreemptionArgs`. With `nodeCacheCapable` only the second map is present,
/// which identifies pods by UID alone.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct ExtenderPreemptionArgs {
    pub(super) node_name_to_victims: Option<BTreeMap<String, Victims>>,
    pub(super) node_name_to_meta_victims: Option<BTreeMap<String, MetaVictims>>,
}

/// Victims on a node, `Victims`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Victims {
    #[serde(rename = "Pods")]
    pub(super) pods: Option<Vec<Pod>>,
    #[serde(rename = "NumPDBViolations")]
    pub(super) pdb_violations: i64,
}

/// Victims on a node by UID, `MetaVictims`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct MetaVictims {
    #[serde(rename = "Pods")]
    pub(super) pods: Option<Vec<MetaPod>>,
    #[serde(rename = "NumPDBViolations")]
    pub(super) pdb_violations: i64,
}

/// A pod by UID, `MetaPod`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct MetaPod {
    #[serde(rename = "UID")]
    pub(super) uid: String,
}

impl Victims {
    /// Returns the victims identified by UID.
    pub(super) fn meta(&self) -> MetaVictims {
        let pods = self.pods.iter().flatten().map(|pod| MetaPod {
            uid: pod.metadata.uid.clone(),
        });
        MetaVictims {
            pods: Some(pods.collect()),
            pdb_violations: self.pdb_violations,
        }
    }

    /// Returns the highest priority among the victims; pods without one have 0.
    pub(super) fn highest_priority(&self) -> i64 {
        let pods = self.pods.iter().flatten();
        let priorities = pods.map(|pod| pod.spec.priority.unwrap_or_default());
        priorities.max().unwrap_or(i64::MIN)
    }
}

/// Result of preempt, `ExtenderPreemptionResult`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct ExtenderPreemptionResult {
    pub(super) node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}
