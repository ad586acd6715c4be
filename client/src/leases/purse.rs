//! The tokens of one lease, spent by many threads at once: one compare-and-swap a call, no lock.
//!
//! `word` holds what is left and, above it, a count that changes whenever the purse is closed or filled. A thread
//! reads the word, then what the lease allows, then swaps the word for one with less left. If the purse was
//! closed in between, and maybe filled again, the count has changed and the swap fails, so what it read can not have
//! been of another lease. All is sequentially consistent: it costs nothing to read, and the order is the one written here.

use crate::clock::Moment;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// What a lease is, beside what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) granted: u32,
    /// Tokens the bucket held when these had been taken out.
    pub(super) remaining: u64,
    pub(super) start: Moment,
    /// Nothing is spent from here on.
    pub(super) ends: Moment,
    /// From here on it is time for the next one.
    pub(super) late: Moment,
    /// Tokens become usable evenly over this long; zero: all at once.
    pub(super) spread: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Purse {
    word: AtomicU64,
    granted: AtomicU32,
    remaining: AtomicU64,
    start: AtomicU64,
    ends: AtomicU64,
    late: AtomicU64,
    spread: AtomicU64,
}

/// What a call took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spent {
    /// Of the lease, after the call.
    pub(super) left: u32,
    pub(super) granted: u32,
    pub(super) remaining: u64,
    /// The lease is near its end.
    pub(super) late: bool,
}

/// Why a call took nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Short {
    /// Less is left than it costs, or the lease has ended.
    Empty,
    /// Tokens are left and not usable yet; the call fits at this time.
    Until(Moment),
}

const COUNT: u64 = 1 << 32;

fn left_of(word: u64) -> u32 {
    u32::try_from(word % COUNT).unwrap_or(0)
}

impl Purse {
    /// Takes `cost` tokens, all or none.
    pub(super) fn spend(&self, now: Moment, cost: u32) -> Result<Spent, Short> {
        let mut word = self.word.load(SeqCst);
        loop {
            let left = left_of(word);
            // A closed purse is empty also to a call that costs nothing: its end has been set to "never".
            if left < cost || now.as_micros() >= self.ends.load(SeqCst) {
                return Err(Short::Empty);
            }
            let granted = self.granted.load(SeqCst);
            if let Some(until) =
                self.usable_from(granted, (granted - left.min(granted)).saturating_add(cost), now)
            {
                let again = self.word.load(SeqCst);
                if again == word {
                    return Err(Short::Until(until));
                }
                word = again;
                continue;
            }
            let remaining = self.remaining.load(SeqCst);
            let late = now.as_micros() >= self.late.load(SeqCst);
            match self.word.compare_exchange_weak(word, word - u64::from(cost), SeqCst, SeqCst) {
                Ok(_) => return Ok(Spent { left: left - cost, granted, remaining, late }),
                Err(changed) => word = changed,
            }
        }
    }

    /// When the first `spent` tokens of the lease may have been spent, if that is yet to come. The line runs from
    /// nothing at the start to all at the end of the spread, and tokens are whole: never ahead of it.
    fn usable_from(&self, granted: u32, spent: u32, now: Moment) -> Option<Moment> {
        let spread = self.spread.load(SeqCst);
        if spread == 0 || granted == 0 {
            return None;
        }
        let takes = (u64::from(spent) * spread).div_ceil(u64::from(granted));
        let from = self.start.load(SeqCst).saturating_add(takes);
        (now.as_micros() < from).then_some(Moment::from_micros(from))
    }

    /// What is left, ended or not.
    pub(super) fn left(&self) -> u32 {
        left_of(self.word.load(SeqCst))
    }

    pub(super) fn has_ended(&self, now: Moment) -> bool {
        now.as_micros() >= self.ends.load(SeqCst)
    }

    pub(super) fn is_late(&self, now: Moment) -> bool {
        now.as_micros() >= self.late.load(SeqCst)
    }

    /// Takes everything out that is left. Only its keeper closes and fills a purse, one at a time.
    pub(super) fn close(&self) -> u32 {
        let next = |word: u64| (word / COUNT).wrapping_add(1).wrapping_mul(COUNT);
        let mut word = self.word.load(SeqCst);
        while let Err(changed) = self.word.compare_exchange_weak(word, next(word), SeqCst, SeqCst) {
            word = changed;
        }
        self.ends.store(0, SeqCst);
        left_of(word)
    }

    /// Puts a new lease into a closed purse.
    pub(super) fn fill(&self, terms: &Terms) {
        self.granted.store(terms.granted, SeqCst);
        self.remaining.store(terms.remaining, SeqCst);
        self.start.store(terms.start.as_micros(), SeqCst);
        self.ends.store(terms.ends.as_micros(), SeqCst);
        self.late.store(terms.late.as_micros(), SeqCst);
        self.spread.store(u64::try_from(terms.spread.as_micros()).unwrap_or(u64::MAX), SeqCst);
        self.word.fetch_add(u64::from(terms.granted), SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(spread: u64) -> Terms {
        Terms {
            granted: 10,
            remaining: 5,
            start: Moment::from_micros(1_000),
            ends: Moment::from_micros(3_000),
            late: Moment::from_micros(2_500),
            spread: Duration::from_micros(spread),
        }
    }

    #[test]
    fn a_swap_that_read_another_lease_fails() {
        let purse = Purse::default();
        let mut words = std::collections::HashSet::new();
        for _ in 0..100 {
            purse.fill(&terms(0));
            assert!(words.insert(purse.word.load(SeqCst)), "the same lease is not the same word");
            assert_eq!(purse.close(), 10);
        }
        // The count begins anew when it is full.
        purse.word.store(u64::MAX, SeqCst);
        assert_eq!((purse.close(), purse.word.load(SeqCst)), (u32::MAX, 0));
    }

    #[test]
    fn a_spread_lease_is_spent_along_its_line() {
        let purse = Purse::default();
        purse.fill(&terms(900));
        let until = |micros| Err(Short::Until(Moment::from_micros(micros)));
        for (at, cost, expected) in [
            (1_000, 1, until(1_090)),
            (1_089, 1, until(1_090)),
            (1_090, 1, Ok(9)),
            (1_090, 1, until(1_180)),
            (1_359, 3, until(1_360)),
            (1_360, 3, Ok(6)),
            (1_360, 7, Err(Short::Empty)),
            (1_900, 6, Ok(0)),
            (1_900, 1, Err(Short::Empty)),
        ] {
            let spent = purse.spend(Moment::from_micros(at), cost).map(|spent| spent.left);
            assert_eq!(spent, expected, "{cost} at {at}");
        }
    }

    #[test]
    fn nothing_is_spent_before_a_lease_or_after_it() {
        let purse = Purse::default();
        let at = Moment::from_micros;
        for cost in [0, 1] {
            assert_eq!(purse.spend(at(1_000), cost), Err(Short::Empty), "never filled");
        }
        purse.fill(&terms(0));
        assert_eq!(purse.spend(at(2_499), 1), Ok(Spent { left: 9, granted: 10, remaining: 5, late: false }));
        assert_eq!(purse.spend(at(2_500), 0).map(|spent| spent.late), Ok(true));
        assert_eq!(purse.spend(at(3_000), 0), Err(Short::Empty));
        assert_eq!(purse.close(), 9);
        assert_eq!(purse.spend(at(2_000), 0), Err(Short::Empty));
    }
}
