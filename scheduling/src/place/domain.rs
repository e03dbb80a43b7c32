//! Numbers for failure domains, which have names.

use std::collections::HashMap;

use super::Domain;

/// Names of zones, racks and hosts, and their numbers. Unknown parts of a name are equal for all nodes, but for the
/// host: a node without one fails alone.
#[derive(Debug, Default)]
pub struct DomainNumbers {
    zones: HashMap<String, u32>,
    racks: HashMap<(String, String), u32>,
    hosts: HashMap<(Option<(String, String)>, String), u32>,
}

impl DomainNumbers {
    /// Returns the domain of the node `name`. Racks and hosts are compared within their zone and rack, as names may be
    /// used twice.
    pub fn number(&mut self, name: &str, zone: &str, rack: &str, host: &str) -> Domain {
        let in_zone = (zone.to_owned(), rack.to_owned());
        let host = if host.is_empty() {
            (None, name.to_owned())
        } else {
            (Some(in_zone.clone()), host.to_owned())
        };
        Domain {
            zone: number(&mut self.zones, zone.to_owned()),
            rack: number(&mut self.racks, in_zone),
            host: number(&mut self.hosts, host),
        }
    }

    /// Returns the number of different hosts or racks so far, whichever is larger.
    #[must_use]
    pub fn len(&self) -> usize {
        self.racks.len().max(self.hosts.len())
    }

    /// Returns true if there is none yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }
}

/// Returns the number of a name. Numbers are consecutive, and never reused.
fn number<K: std::hash::Hash + Eq>(numbers: &mut HashMap<K, u32>, name: K) -> u32 {
    let next = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
    *numbers.entry(name).or_insert(next)
}
