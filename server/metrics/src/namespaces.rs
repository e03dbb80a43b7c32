//! Namespaces and their quotas, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt;

use permafrost_protocol::control::NamespaceUsage;

use super::tell::Told;

impl Told<'_> {
    /// Exports the usage of namespaces. Only where there are quotas, as they bound the number of label values.
    pub(super) fn namespaces(&mut self, namespaces: &[NamespaceUsage]) -> fmt::Result {
        if namespaces.is_empty() {
            return Ok(());
        }
        type Gauge = fn(&NamespaceUsage) -> Option<u64>;
        let gauges: [(&str, &str, Gauge); 5] = [
            (
                "namespace_bytes",
                "Bytes that the checkpoints of a namespace take on this node",
                |one| Some(one.bytes),
            ),
            ("namespace_bytes_limit", "Bytes that they may take", |one| {
                one.bytes_limit
            }),
            (
                "namespace_checkpoints",
                "Checkpoints of a namespace on this node",
                |one| Some(one.checkpoints),
            ),
            (
                "namespace_checkpoints_limit",
                "Checkpoints that there may be of it",
                |one| one.checkpoints_limit,
            ),
            (
                "namespace_sessions",
                "Dumps of a namespace that are open",
                |one| Some(one.sessions),
            ),
        ];
        for (name, help, of) in gauges {
            let values: BTreeMap<String, u64> = namespaces
                .iter()
                .filter_map(|one| Some((one.namespace.clone(), of(one)?)))
                .collect();
            self.gauges(name, help, "namespace", &values)?;
        }
        Ok(())
    }
}
