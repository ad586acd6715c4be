//! A bounded map whose entries end by themselves.
//!
//! An entry that has ended is not there. It is swept out by later insertions, a few looks each, so no
//! insertion takes long and no timer runs. A map that is full first drops, of a few entries, the one whose
//! end is nearest: of buckets that is the one closest to being as good as new, so whoever floods the map
//! with keys pushes out his own.

use crate::limit::Timestamp;
use indexmap::IndexMap;

/// Looks at old entries for each new one. More than one, so that sweeping outruns growth.
const LOOKS: usize = 3;
/// Entries among which the one to drop is chosen.
const CANDIDATES: usize = 16;

pub(super) struct Expiring<V> {
    entries: IndexMap<Box<str>, Entry<V>>,
    capacity: usize,
    /// Where sweeping goes on.
    cursor: usize,
}

struct Entry<V> {
    ends: Timestamp,
    value: V,
}

impl<V> Expiring<V> {
    /// A map of at most `capacity` entries, at least one.
    pub(super) fn new(capacity: usize) -> Self {
        Self { entries: IndexMap::new(), capacity: capacity.max(1), cursor: 0 }
    }

    /// The entry of that name, unless it has ended.
    pub(super) fn get(&self, name: &str, now: Timestamp) -> Option<&V> {
        self.entries.get(name).filter(|entry| entry.ends > now).map(|entry| &entry.value)
    }

    /// Files a value under a name until `ends`.
    pub(super) fn put(&mut self, name: &str, value: V, ends: Timestamp, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(name) {
            *entry = Entry { ends, value };
            return;
        }
        self.sweep(now);
        if self.entries.len() >= self.capacity {
            self.drop_nearest();
        }
        self.entries.insert(name.into(), Entry { ends, value });
    }

    /// Takes the entry of that name out, unless it has ended.
    pub(super) fn take(&mut self, name: &str, now: Timestamp) -> Option<V> {
        self.entries.swap_remove(name).filter(|entry| entry.ends > now).map(|entry| entry.value)
    }

    fn sweep(&mut self, now: Timestamp) {
        for _ in 0..LOOKS {
            let at = self.next();
            if self.entries.get_index(at).is_some_and(|(_, entry)| entry.ends <= now) {
                self.entries.swap_remove_index(at);
                self.cursor = at;
            }
        }
    }

    fn drop_nearest(&mut self) {
        // Spread over the whole map: entries that came together also lie together.
        let (start, len) = (self.next(), self.entries.len());
        let places = (0..CANDIDATES).map(|n| (start + n * len / CANDIDATES) % len);
        let ends = |at: &usize| self.entries.get_index(*at).map(|(_, entry)| entry.ends);
        if let Some(nearest) = places.min_by_key(ends) {
            self.entries.swap_remove_index(nearest);
        }
    }

    /// The place to look at now; goes round.
    fn next(&mut self) -> usize {
        let at = if self.cursor < self.entries.len() { self.cursor } else { 0 };
        self.cursor = at + 1;
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Timestamp {
        Timestamp::from_micros(micros)
    }

    #[test]
    fn what_has_ended_is_gone() {
        let mut map = Expiring::new(10);
        map.put("a", 1, at(5), at(0));
        assert_eq!(map.get("a", at(4)), Some(&1));
        assert_eq!(map.get("a", at(5)), None);
        assert_eq!(map.take("a", at(5)), None);
        map.put("a", 2, at(9), at(6));
        assert_eq!((map.take("a", at(6)), map.take("a", at(6))), (Some(2), None));
    }

    #[test]
    fn what_has_ended_is_swept_out_by_what_comes() {
        let mut map = Expiring::new(1_000_000);
        for n in 0..10_000_u64 {
            map.put(&n.to_string(), n, at(n + 10), at(n));
        }
        assert!(map.entries.len() < 100, "{} entries", map.entries.len());
    }

    #[test]
    fn a_full_map_drops_what_ends_soonest() {
        let mut map = Expiring::new(100);
        for n in 0..50 {
            map.put(&format!("lasting {n}"), (), at(1_000_000), at(0));
        }
        for n in 0..10_000 {
            map.put(&format!("flood {n}"), (), at(1_000), at(0));
        }
        assert_eq!(map.entries.len(), 100);
        let left = (0..50).filter(|n| map.get(&format!("lasting {n}"), at(0)).is_some()).count();
        assert_eq!(left, 50, "the flood pushed out what it should not");
    }
}
