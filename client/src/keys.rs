//! The keys that are being decided for: a bounded map that is read without a lock.

use crate::fallback;
use crate::leases::Leases;
use parking_lot::Mutex;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use tokio::sync::Notify;

/// A bucket as this gateway knows it.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) name: Box<str>,
    pub(crate) class: Box<str>,
    pub(crate) leases: Leases,
    /// For the time without the service.
    pub(crate) alone: fallback::Bucket,
    /// Shared by all keys of the class.
    pub(crate) rule: Arc<fallback::Rule>,
    /// When it is this key's turn after an outage.
    pub(crate) part: u8,
    /// Calls that wait for the Borrow that is under way.
    pub(crate) waiting: AtomicU32,
    /// Told when it has landed.
    pub(crate) landed: Notify,
    /// A Borrow is wanted or under way.
    wanted: AtomicBool,
    /// The Borrow that landed last was not answered.
    pub(crate) failed: AtomicBool,
    /// It is on the keeper's list.
    pub(crate) listed: AtomicBool,
    /// It is in the map no longer: nothing may be held for it.
    dropped: AtomicBool,
}

impl Key {
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped.load(SeqCst)
    }

    /// Asks for a Borrow; true if none was wanted before.
    pub(crate) fn want(&self) -> bool {
        !self.wanted.load(SeqCst) && !self.wanted.swap(true, SeqCst)
    }

    /// The Borrow has been answered, or will not be.
    pub(crate) fn land(&self) {
        self.wanted.store(false, SeqCst);
        self.landed.notify_waiters();
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.class == other.class
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Name { key: &self.name, class: &self.class }.hash(state);
    }
}

/// A key to look for.
#[derive(Clone, Copy, Hash)]
struct Name<'a> {
    key: &'a str,
    class: &'a str,
}

impl papaya::Equivalent<Arc<Key>> for Name<'_> {
    fn equivalent(&self, key: &Arc<Key>) -> bool {
        *self.key == *key.name && *self.class == *key.class
    }
}

type Hashing = foldhash::quality::RandomState;

/// At most so many keys. A full map drops, of [`LOOKED_AT`] keys in turn, the one that was used longest ago.
#[derive(Debug)]
pub(crate) struct Keys {
    map: papaya::HashSet<Arc<Key>, Hashing>,
    /// The same keys, to go round. Whoever adds or drops one holds this.
    ring: Mutex<Ring>,
    most: usize,
}

#[derive(Debug, Default)]
struct Ring {
    all: Vec<Arc<Key>>,
    hand: usize,
}

const LOOKED_AT: usize = 16;

/// Longer names than these, key and class together and in bytes, are not remembered: a map that is bounded in keys
/// alone would be as large as somebody's names. Twice what the service takes of a key unless it is told otherwise.
pub(crate) const LONGEST: usize = 1024;

impl Keys {
    pub(crate) fn new(most: usize) -> Self {
        Self { map: papaya::HashSet::with_hasher(Hashing::default()), ring: Mutex::default(), most }
    }

    /// Does something with a key, if it is known.
    pub(crate) fn with<T>(&self, key: &str, class: &str, look: impl FnOnce(&Arc<Key>) -> T) -> Option<T> {
        let map = self.map.pin();
        map.get(&Name { key, class }).map(look)
    }

    /// The key, from now on known. One whose names are too long is new each time, and nothing may be held for it.
    pub(crate) fn get(&self, key: &str, class: &str, rule: impl FnOnce() -> Arc<fallback::Rule>) -> Arc<Key> {
        if let Some(key) = self.with(key, class, Arc::clone) {
            return key;
        }
        let rule = rule();
        let is_long = key.len() + class.len() > LONGEST;
        let new = move || Key {
            name: key.into(),
            class: class.into(),
            leases: Leases::default(),
            alone: fallback::Bucket::default(),
            rule,
            part: fastrand::u8(..),
            waiting: AtomicU32::default(),
            landed: Notify::default(),
            wanted: AtomicBool::default(),
            failed: AtomicBool::default(),
            listed: AtomicBool::default(),
            dropped: AtomicBool::new(is_long),
        };
        if is_long {
            return Arc::new(new());
        }
        let mut ring = self.ring.lock();
        if let Some(key) = self.with(key, class, Arc::clone) {
            return key;
        }
        let new = Arc::new(new());
        if ring.all.len() < self.most {
            ring.all.push(new.clone());
        } else if let Some(old) = ring.replace(new.clone()) {
            self.map.pin().remove(&old);
            // What it holds goes back with the keeper's next round.
            old.dropped.store(true, SeqCst);
        }
        self.map.pin().insert(new.clone());
        new
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.ring.lock().all.len()
    }
}

impl Ring {
    /// Puts a key in the place of the one that was used longest ago of the next few.
    fn replace(&mut self, new: Arc<Key>) -> Option<Arc<Key>> {
        let places = self.all.len();
        let next = (0..LOOKED_AT.min(places)).map(|step| (self.hand + step) % places);
        let oldest = next.min_by_key(|at| self.all.get(*at).map(|key| key.leases.last_used()))?;
        self.hand = (self.hand + LOOKED_AT) % places;
        self.all.get_mut(oldest).map(|place| std::mem::replace(place, new))
    }
}

/// A call that waits for a key's Borrow, counted until it no longer does.
pub(crate) struct Waiting<'a>(&'a Key);

impl<'a> Waiting<'a> {
    pub(crate) fn at(key: &'a Key) -> Self {
        key.waiting.fetch_add(1, Relaxed);
        Self(key)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Moment;
    use crate::fallback::{Fallback, Rule};

    fn rule() -> Arc<Rule> {
        Arc::new(Rule::new(Fallback::Deny))
    }

    #[test]
    fn a_key_is_of_its_class() {
        let keys = Keys::new(10);
        let read = keys.get("k", "read", rule);
        assert!(Arc::ptr_eq(&read, &keys.get("k", "read", rule)));
        assert!(!Arc::ptr_eq(&read, &keys.get("k", "write", rule)));
        assert!(!Arc::ptr_eq(&keys.get("ab", "c", rule), &keys.get("a", "bc", rule)));
        assert!(keys.with("other", "read", |_| ()).is_none());
    }

    #[test]
    fn a_full_map_drops_what_was_used_longest_ago() {
        let keys = Keys::new(8);
        let old: Vec<_> = (0..8_u64)
            .map(|n| {
                let key = keys.get(&n.to_string(), "c", rule);
                key.leases.touch(Moment::from_micros(100 - n));
                key
            })
            .collect();
        let new = keys.get("new", "c", rule);
        new.leases.touch(Moment::from_micros(200));
        assert!(old[7].is_dropped() && keys.with("7", "c", |_| ()).is_none());
        assert_eq!(old.iter().filter(|key| key.is_dropped()).count(), 1);
        assert_eq!(keys.len(), 8);
        keys.get("newer", "c", rule);
        assert!(old[6].is_dropped());
    }

    #[test]
    fn names_that_are_too_long_are_not_remembered() {
        let keys = Keys::new(8);
        let (fits, long) = ("k".repeat(LONGEST - 1), "k".repeat(LONGEST));
        for (key, class, is_known) in [(&*fits, "c", true), (&*long, "c", false), ("k", &*long, false)] {
            let got = keys.get(key, class, rule);
            assert_eq!((&*got.name, &*got.class), (key, class));
            assert_eq!((keys.with(key, class, |_| ()).is_some(), got.is_dropped()), (is_known, !is_known));
        }
        assert_eq!(keys.len(), 1);
    }

    #[test]
    fn however_many_come_at_once_there_is_one_of_each_and_no_more_than_may_be() {
        let keys = Keys::new(50);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for n in 0..1000 {
                        keys.get(&(n % 70).to_string(), "c", rule);
                    }
                });
            }
        });
        assert_eq!(keys.len(), 50);
        assert_eq!(keys.map.pin().len(), 50);
    }
}
