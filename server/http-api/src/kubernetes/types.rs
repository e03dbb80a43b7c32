//! What kube-scheduler sends to an extender and takes from it: `k8s.io/kube-scheduler/extender/v1`, as Go marshals it.
//! The types there have no JSON tags, so their fields are called as in Go; a pod's and a node's have tags. Nothing that
//! is absent is an error, and what is not needed is passed over.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// `ExtenderArgs`: of filter and prioritize. One of `nodes` and `node_names` is there, by `nodeCacheCapable`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct ExtenderArgs {
    pub(super) pod: Option<Pod>,
    pub(super) nodes: Option<NodeList>,
    pub(super) node_names: Option<Vec<String>>,
}

impl ExtenderArgs {
    /// Names of the candidates, in their order.
    pub(super) fn names(&self) -> Vec<&str> {
        match (&self.node_names, &self.nodes) {
            (Some(names), _) => names.iter().map(String::as_str).collect(),
            (None, Some(nodes)) => nodes.items.iter().flatten().map(node_name).collect(),
            (None, None) => Vec::new(),
        }
    }
}

/// `v1.NodeList`; the nodes themselves go back as they came.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct NodeList {
    /// `null` of a nil slice.
    #[serde(default)]
    pub(super) items: Option<Vec<Value>>,
    /// Kind, version and metadata.
    #[serde(flatten)]
    pub(super) rest: BTreeMap<String, Value>,
}

/// `metadata.name`; empty for a node without.
pub(super) fn node_name(node: &Value) -> &str {
    let name = node
        .get("metadata")
        .and_then(|metadata| metadata.get("name"));
    name.and_then(Value::as_str).unwrap_or_default()
}

/// `v1.Pod`, as far as it is looked at.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub(super) metadata: Metadata,
    pub(super) spec: PodSpec,
    pub(super) status: PodStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Metadata {
    pub(super) uid: String,
    pub(super) namespace: String,
    pub(super) annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PodSpec {
    pub(super) priority: Option<i64>,
    pub(super) containers: Option<Vec<Container>>,
    /// Seconds.
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
    /// Quantities, as texts.
    pub(super) requests: Option<BTreeMap<String, Value>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PodStatus {
    /// RFC 3339.
    pub(super) start_time: Option<String>,
}

/// `ExtenderFilterResult`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct ExtenderFilterResult {
    pub(super) nodes: Option<NodeList>,
    pub(super) node_names: Option<Vec<String>>,
    pub(super) failed_nodes: BTreeMap<String, String>,
    pub(super) failed_and_unresolvable_nodes: BTreeMap<String, String>,
    pub(super) error: String,
}

/// `HostPriority`.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct HostPriority {
    pub(super) host: String,
    /// 0 to [`MAX_PRIORITY`].
    pub(super) score: i64,
}

/// `MaxExtenderPriority`.
pub(super) const MAX_PRIORITY: i64 = 10;

/// `ExtenderPreemptionArgs`. With `nodeCacheCapable` only the second map is there, which tells pods by UID alone.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct ExtenderPreemptionArgs {
    pub(super) node_name_to_victims: Option<BTreeMap<String, Victims>>,
    pub(super) node_name_to_meta_victims: Option<BTreeMap<String, MetaVictims>>,
}

/// `Victims`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Victims {
    #[serde(rename = "Pods")]
    pub(super) pods: Option<Vec<Pod>>,
    #[serde(rename = "NumPDBViolations")]
    pub(super) pdb_violations: i64,
}

/// `MetaVictims`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct MetaVictims {
    #[serde(rename = "Pods")]
    pub(super) pods: Option<Vec<MetaPod>>,
    #[serde(rename = "NumPDBViolations")]
    pub(super) pdb_violations: i64,
}

/// `MetaPod`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct MetaPod {
    #[serde(rename = "UID")]
    pub(super) uid: String,
}

impl Victims {
    /// The same pods, told by UID.
    pub(super) fn meta(&self) -> MetaVictims {
        let pods = self.pods.iter().flatten().map(|pod| MetaPod {
            uid: pod.metadata.uid.clone(),
        });
        MetaVictims {
            pods: Some(pods.collect()),
            pdb_violations: self.pdb_violations,
        }
    }

    /// The highest priority among them; pods without one have 0.
    pub(super) fn highest_priority(&self) -> i64 {
        let pods = self.pods.iter().flatten();
        let priorities = pods.map(|pod| pod.spec.priority.unwrap_or_default());
        priorities.max().unwrap_or(i64::MIN)
    }
}

/// `ExtenderPreemptionResult`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct ExtenderPreemptionResult {
    pub(super) node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}
