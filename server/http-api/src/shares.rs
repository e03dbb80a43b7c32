//! Limits the share of a common resource that one caller may hold.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

pub(super) use permafrost_transport::shares::{Share, Shares};

/// Reservations of each caller that have not lapsed. One that was taken up counts until it would have lapsed,
/// because the API does not see it being taken up.
#[derive(Debug, Default)]
pub(super) struct Booked(Mutex<HashMap<String, Vec<(String, Instant)>>>);

impl Booked {
    /// Counts the reservations of a caller.
    pub(super) fn count(&self, caller: &str) -> usize {
        let now = Instant::now();
        let mut booked = self.booked();
        booked.retain(|_, places| {
            places.retain(|(_, lapses)| *lapses > now);
            !places.is_empty()
        });
        booked.get(caller).map_or(0, Vec::len)
    }

    /// Records a reservation that lapses in `lapses_in`.
    pub(super) fn add(&self, caller: &str, token: &str, lapses_in: Duration) {
        let Some(lapses) = Instant::now().checked_add(lapses_in) else {
            return;
        };
        let mut booked = self.booked();
        let places = booked.entry(caller.to_owned()).or_default();
        places.push((token.to_owned(), lapses));
    }

    /// Forgets a cancelled reservation of any caller.
    pub(super) fn remove(&self, token: &str) {
        for places in self.booked().values_mut() {
            places.retain(|(known, _)| known != token);
        }
    }

    fn booked(&self) -> MutexGuard<'_, HashMap<String, Vec<(String, Instant)>>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_count_until_they_lapse_or_are_given_back() {
        let booked = Booked::default();
        booked.add("a", "1", Duration::from_secs(60));
        booked.add("a", "2", Duration::ZERO);
        booked.add("b", "3", Duration::from_secs(60));
        assert_eq!((booked.count("a"), booked.count("b")), (1, 1));
        booked.remove("1");
        assert_eq!(booked.count("a"), 0);
    }
}
