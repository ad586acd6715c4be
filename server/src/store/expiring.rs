//! A bounded map whose entries end by themselves.
//!
//! An entry that has ended is not there. It is swept out by later insertions, a few looks each, so no
//! insertion takes long and no timer runs. A map that is full first drops, of a few entries, the one whose
//! end is nearest: of buckets that is the one closest to being as good as new, so whoever floods the map
//! with keys of one class pushes out his own. Where ends differ much, what ends sooner goes first.

use crate::limit::Timestamp;
use crate::telemetry::metric;
use indexmap::IndexMap;
use metrics::counter;

/// Looks at old entries for each new one. More than one, so that sweeping outruns growth.
const LOOKS: usize = 3;
/// Entries among which the one to drop is chosen.
const CANDIDATES: usize = 16;

/// By which part a map that is full of entries grows.
const GROWTH: usize = 32;

/// What an entry takes beside its name and what it keeps elsewhere: itself, its place in the index, and the
/// room that both keep for growth.
const OVERHEAD: usize = 132;

pub(super) struct Expiring<V> {
    entries: IndexMap<Box<str>, Entry<V>>,
    bound: Bound,
    bytes: usize,
    /// Where sweeping goes on.
    cursor: usize,
    dropped: u64,
}

/// How much a map holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    pub(super) entries: usize,
    pub(super) bytes: usize,
}

struct Entry<V> {
    ends: Timestamp,
    value: V,
}

/// Bytes that a value keeps elsewhere.
pub(super) trait Weigh {
    fn heap_bytes(&self) -> usize {
        0
    }
}

impl<V: Weigh> Expiring<V> {
    /// An empty map. One entry always fits.
    pub(super) fn new(bound: Bound) -> Self {
        Self { entries: IndexMap::new(), bound, bytes: 0, cursor: 0, dropped: 0 }
    }

    /// How many entries there are, ended ones that were not swept yet among them.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// About how many bytes they take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many entries were dropped before their end, because the map was full.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The entry of that name, unless it has ended.
    pub(super) fn get(&self, name: &str, now: Timestamp) -> Option<&V> {
        self.entries.get(name).filter(|entry| entry.ends > now).map(|entry| &entry.value)
    }

    /// Files a value under a name until `ends`.
    pub(super) fn put(&mut self, name: &str, value: V, ends: Timestamp, now: Timestamp) {
        self.remove(name);
        self.sweep(now);
        let weight = weight(name, &value);
        while !self.entries.is_empty()
            && (self.entries.len() >= self.bound.entries || self.bytes + weight > self.bound.bytes)
        {
            self.drop_nearest();
        }
        self.bytes += weight;
        if self.entries.len() == self.entries.capacity() {
            // Twice as many at a time would leave half of a large map unused.
            self.entries.reserve_exact(self.entries.len() / GROWTH + 1);
        }
        self.entries.insert(name.into(), Entry { ends, value });
    }

    /// Changes the entry of that name, unless it has ended; `change` tells its new end, if it has one.
    pub(super) fn update<T>(
        &mut self,
        name: &str,
        now: Timestamp,
        change: impl FnOnce(&mut V) -> (T, Option<Timestamp>),
    ) -> Option<T> {
        let entry = self.entries.get_mut(name).filter(|entry| entry.ends > now)?;
        let before = entry.value.heap_bytes();
        let (told, ends) = change(&mut entry.value);
        entry.ends = ends.unwrap_or(entry.ends);
        let is_over = entry.ends <= now;
        self.bytes = self.bytes + entry.value.heap_bytes() - before;
        if is_over {
            self.remove(name);
        }
        while self.bytes > self.bound.bytes && self.entries.len() > 1 {
            self.drop_nearest();
        }
        Some(told)
    }

    /// Takes the entry of that name out, unless it has ended.
    pub(super) fn take(&mut self, name: &str, now: Timestamp) -> Option<V> {
        self.remove(name).filter(|entry| entry.ends > now).map(|entry| entry.value)
    }

    fn remove(&mut self, name: &str) -> Option<Entry<V>> {
        let place = self.entries.get_index_of(name)?;
        self.remove_at(place)
    }

    fn remove_at(&mut self, place: usize) -> Option<Entry<V>> {
        let (name, entry) = self.entries.swap_remove_index(place)?;
        self.bytes -= weight(&name, &entry.value);
        Some(entry)
    }

    /// Drops all that has ended, and the room that it took.
    pub(super) fn drop_ended(&mut self, now: Timestamp) {
        let before = self.entries.len();
        self.entries.retain(|_, entry| entry.ends > now);
        if self.entries.len() < before {
            self.entries.shrink_to_fit();
            self.bytes = self.entries.iter().map(|(name, entry)| weight(name, &entry.value)).sum();
        }
    }

    fn sweep(&mut self, now: Timestamp) {
        for _ in 0..LOOKS {
            let at = self.next();
            if self.entries.get_index(at).is_some_and(|(_, entry)| entry.ends <= now) {
                self.remove_at(at);
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
            self.remove_at(nearest);
            self.dropped += 1;
            counter!(metric::DROPPED).increment(1);
        }
    }

    /// The place to look at now; goes round.
    fn next(&mut self) -> usize {
        let at = if self.cursor < self.entries.len() { self.cursor } else { 0 };
        self.cursor = at + 1;
        at
    }
}

fn weight(name: &str, value: &impl Weigh) -> usize {
    OVERHEAD + name.len() + value.heap_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Weigh for i32 {}
    impl Weigh for u64 {}
    impl Weigh for () {}
    impl Weigh for Vec<u8> {
        fn heap_bytes(&self) -> usize {
            self.capacity()
        }
    }

    const fn entries(entries: usize) -> Bound {
        Bound { entries, bytes: usize::MAX }
    }

    fn at(micros: u64) -> Timestamp {
        Timestamp::from_micros(micros)
    }

    #[test]
    fn what_has_ended_is_gone() {
        let mut map = Expiring::new(entries(10));
        map.put("a", 1, at(5), at(0));
        assert_eq!(map.get("a", at(4)), Some(&1));
        assert_eq!(map.get("a", at(5)), None);
        assert_eq!(map.take("a", at(5)), None);
        map.put("a", 2, at(9), at(6));
        assert_eq!((map.take("a", at(6)), map.take("a", at(6))), (Some(2), None));
    }

    #[test]
    fn all_that_has_ended_can_be_dropped_at_once() {
        let mut map = Expiring::new(entries(100));
        for n in 0..100 {
            map.put(&n.to_string(), n, at(n), at(0));
        }
        map.drop_ended(at(90));
        assert_eq!((map.len(), map.get("91", at(90))), (9, Some(&91)));
        map.drop_ended(at(200));
        assert_eq!((map.len(), map.bytes(), map.dropped()), (0, 0, 0));
    }

    #[test]
    fn what_has_ended_is_swept_out_by_what_comes() {
        let mut map = Expiring::new(entries(1_000_000));
        for n in 0..10_000_u64 {
            map.put(&n.to_string(), n, at(n + 10), at(n));
        }
        assert!(map.entries.len() < 100, "{} entries", map.entries.len());
    }

    #[test]
    fn a_full_map_drops_what_ends_soonest() {
        let mut map = Expiring::new(entries(100));
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

    #[test]
    fn bytes_are_counted_and_bounded_however_values_change() {
        let mut map = Expiring::new(Bound { entries: usize::MAX, bytes: 100_000 });
        for n in 0..2_000_u64 {
            map.put(&n.to_string(), vec![0_u8; 100], at(1_000_000 + n), at(0));
            map.update(&(n / 2).to_string(), at(0), |value| (value.reserve_exact(500), Some(at(2_000_000))));
            assert!(map.bytes() <= 100_000, "{} bytes", map.bytes());
        }
        assert!(map.len() > 50 && map.dropped() > 1_000, "{} left, {} dropped", map.len(), map.dropped());
        let counted: usize = map.entries.iter().map(|(name, entry)| weight(name, &entry.value)).sum();
        assert_eq!(counted, map.bytes());
        for n in 0..2_000_u64 {
            map.take(&n.to_string(), at(0));
        }
        assert_eq!((map.len(), map.bytes()), (0, 0));
    }
}
