//! Keys in etcd. docs/cluster.md lists all keys.

/// Number of digits of a generation in a key: as many as the largest u64 has, so that the order of keys is that
/// of numbers.
const GENERATION_DIGITS: usize = 20;

/// Keys under a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    /// Prefix, which ends with `/`.
    prefix: String,
}

impl Keys {
    pub(crate) fn new(prefix: &str) -> Self {
        Self {
            prefix: format!("{}/", prefix.trim_end_matches('/')),
        }
    }

    /// Returns the key of a live node, which is bound to the node's lease.
    pub(crate) fn node(&self, name: &str) -> String {
        format!("{}{}", self.nodes(), encoded(name))
    }

    pub(crate) fn nodes(&self) -> String {
        format!("{}nodes/", self.prefix)
    }

    /// Returns the key of a member: a node that has ever been registered.
    pub(crate) fn member(&self, name: &str) -> String {
        format!("{}{}", self.members(), encoded(name))
    }

    /// Returns the key of the version of the registry that the cluster uses.
    pub(crate) fn level(&self) -> String {
        format!("{}level", self.prefix)
    }

    pub(crate) fn members(&self) -> String {
        format!("{}members/", self.prefix)
    }

    /// Returns the range (begin and exclusive end) of the members and the live nodes. Nothing else lies between
    /// them, so that one watch sees both in order.
    pub(crate) fn members_and_nodes(&self) -> (String, String) {
        // '0' follows '/'.
        (self.members(), format!("{}nodes0", self.prefix))
    }

    /// Returns the key of a job's lock, which is bound to its holder's lease.
    pub(crate) fn lock(&self, job: &str) -> String {
        format!("{}locks/{}", self.prefix, encoded(job))
    }

    /// Returns the key of the last generation that was handed out to a job.
    pub(crate) fn generation(&self, job: &str) -> String {
        format!("{}generations/{}", self.prefix, encoded(job))
    }

    /// Returns the key of a checkpoint; a parked one, which has no generation, is identified by its id.
    pub(crate) fn checkpoint(&self, job: &str, generation: u64, id: &str) -> String {
        if generation == 0 {
            return self.parked(id);
        }
        format!(
            "{}{generation:0width$}",
            self.checkpoints_of(job),
            width = GENERATION_DIGITS
        )
    }

    pub(crate) fn checkpoints(&self) -> String {
        format!("{}checkpoints/", self.prefix)
    }

    pub(crate) fn checkpoints_of(&self, job: &str) -> String {
        format!("{}{}/", self.checkpoints(), encoded(job))
    }

    pub(crate) fn parked(&self, id: &str) -> String {
        format!("{}{}", self.all_parked(), encoded(id))
    }

    pub(crate) fn all_parked(&self) -> String {
        format!("{}parked/", self.prefix)
    }

    /// Returns the key of the record that a checkpoint was taken off the list, which exists as long as its lease.
    pub(crate) fn withdrawn(&self, id: &str) -> String {
        format!("{}withdrawn/{}", self.prefix, encoded(id))
    }

    /// Returns the key of the id of etcd's data.
    pub(crate) fn cluster(&self) -> String {
        format!("{}cluster", self.prefix)
    }

    /// Returns the key of the list of denied certificates.
    pub(crate) fn denied(&self) -> String {
        format!("{}denied", self.prefix)
    }

    /// Returns the key of the policies of retention.
    pub(crate) fn retention(&self) -> String {
        format!("{}retention", self.prefix)
    }

    /// Returns the key of the node that leads the background work.
    pub(crate) fn leader(&self) -> String {
        format!("{}leader", self.prefix)
    }
}

/// Returns the first key after all that begin with `prefix`.
pub(crate) fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // A prefix ends with '/', so its last byte can be one more.
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}

/// Encodes a name as one part of a key: every byte but letters, digits, `-`, `_` and `.` becomes `%` and two
/// hex digits, so that no name has a `/` and no name's keys are a prefix of another's.
pub(crate) fn encoded(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.') {
            encoded.push(char::from(byte));
        } else {
            encoded += &format!("%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_sort_as_numbers() {
        let keys = Keys::new("/permafrost/v1");
        assert!(keys.checkpoint("j", 9, "a") < keys.checkpoint("j", 10, "a"));
        assert!(keys.checkpoint("j", 10, "a") < keys.checkpoint("j", u64::MAX, "a"));
        assert_eq!(
            keys.checkpoint("j", 1, "a"),
            "/permafrost/v1/checkpoints/j/00000000000000000001"
        );
    }

    #[test]
    fn no_job_reaches_into_another() {
        let keys = Keys::new("/p/");
        assert_eq!(keys.checkpoints_of("a/b %"), "/p/checkpoints/a%2Fb%20%25/");
        assert!(
            !keys
                .checkpoint("a/b", 1, "")
                .starts_with(&keys.checkpoints_of("a"))
        );
    }

    #[test]
    fn the_range_of_nodes_holds_members_and_nodes_alone() {
        let keys = Keys::new("/p");
        let (from, to) = keys.members_and_nodes();
        for inside in [keys.node("n"), keys.member("m")] {
            assert!(from <= inside && inside < to, "{inside}");
        }
        for outside in [
            keys.lock("l"),
            keys.leader(),
            keys.cluster(),
            keys.retention(),
            keys.parked("x"),
            keys.checkpoints(),
            keys.generation("g"),
        ] {
            assert!(outside < from || outside >= to, "{outside}");
        }
    }
}
