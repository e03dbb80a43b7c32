//! Metrics of retention: what its rules have removed, and how full the quotas of policies are.

use std::collections::BTreeMap;
use std::fmt;

use permafrost_clustered::{ClusteredStore, PolicyUsage};

use super::tell::Told;

impl Told<'_> {
    /// Exports removals by rule, and the use of the namespaces that a policy limits: policies bound the number of label
    /// values.
    pub(super) fn retention(&mut self, store: &ClusteredStore) -> fmt::Result {
        let numbers = store.retention_numbers();
        let of = |value: fn(u64, u64) -> u64| -> BTreeMap<String, u64> {
            let removed = numbers.removed();
            let by_rule = removed
                .map(|(rule, checkpoints, bytes)| (rule.to_owned(), value(checkpoints, bytes)));
            by_rule.collect()
        };
        self.counters_by(
            "retention_removed",
            "Checkpoints that a rule of retention has removed",
            "rule",
            &of(|checkpoints, _| checkpoints),
        )?;
        self.counters_by(
            "retention_removed_bytes",
            "Bytes that these counted in quotas",
            "rule",
            &of(|_, bytes| bytes),
        )?;
        self.counter(
            "retention_failed",
            "Checkpoints that were not removed although they go by the rules",
            numbers.failed.value(),
        )?;
        let usage = store.policy_usage();
        if usage.is_empty() {
            return Ok(());
        }
        type Gauge = fn(&PolicyUsage) -> Option<u64>;
        let gauges: [(&str, &str, Gauge); 4] = [
            (
                "retention_namespace_bytes",
                "Bytes that count in the quota of a namespace's policy",
                |one| Some(one.used.bytes),
            ),
            (
                "retention_namespace_bytes_limit",
                "Most bytes by that policy",
                |one| one.max_bytes,
            ),
            (
                "retention_namespace_checkpoints",
                "Checkpoints that count in the quota of a namespace's policy",
                |one| Some(one.used.checkpoints),
            ),
            (
                "retention_namespace_checkpoints_limit",
                "Most checkpoints by that policy",
                |one| one.max_checkpoints,
            ),
        ];
        for (name, help, of) in gauges {
            let values: BTreeMap<String, u64> = usage
                .iter()
                .filter_map(|one| Some((one.namespace.clone(), of(one)?)))
                .collect();
            self.gauges(name, help, "namespace", &values)?;
        }
        Ok(())
    }
}
