//! What a gateway holds of one bucket: tokens that were borrowed, and denials that still stand.
//!
//! Two purses of tokens, so that the next lease can arrive before the last one is spent. [`Leases::spend`] decides
//! a call from them and takes no lock; everything else (when to borrow and how much, what a reply brings, what
//! goes back) is slow, rare, and behind a lock, in `books.rs`.
//!
//! Nothing here knows a clock or a network: time is an argument, a [`Wish`] is to be sent by somebody, and a
//! [`Grant`] is what came back. So a simulator drives the same code as a gateway does.
//!
//! What always holds:
//! - never more is spent of a lease than was granted, and nothing once it has ended, counted from when it was asked
//!   for: the service began to count later;
//! - of a lease that is spread over time, never more than its line has reached, counted from when it came;
//! - each lease goes back once at most, with exactly what was not spent;
//! - a denial is held until the time that came with it, or for [`HOLD_MOST`], and not after.

mod books;
mod grant;
mod purse;

pub use self::books::{HOLD_MOST, REASK, Return, Wish};
pub use self::grant::Grant;

use self::books::Books;
use self::purse::{Purse, Short, Spent};
use crate::clock::{Moment, micros};
use crate::verdict::{Denial, Verdict};
use parking_lot::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};
use std::time::Duration;

/// A key is worth borrowing for when it is asked for twice within the time that a chunk should last.
pub const CHUNK_LASTS: Duration = Duration::from_millis(250);

/// What is held of one bucket.
#[derive(Debug, Default)]
pub struct Leases {
    purses: [Purse; 2],
    /// The purse that is spent first: the one that ends first.
    first: AtomicU8,
    facts: Facts,
    hold: Hold,
    /// No borrowing before.
    quiet_until: AtomicU64,
    /// When a call was last decided.
    used: AtomicU64,
    /// Denied here and not yet told.
    denied: AtomicU32,
    books: Mutex<Books>,
}

/// What the service has said of the bucket.
#[derive(Debug)]
struct Facts {
    /// Tokens that a call costs. [`UNKNOWN`] until the service has said: more than any lease holds.
    cost: AtomicU32,
    limit: AtomicU64,
    /// The time in which an empty bucket refills, and that for one token, in nanoseconds.
    window: AtomicU64,
    nanos_per_token: AtomicU64,
    /// It decides without its store for now.
    degraded: AtomicBool,
}

const UNKNOWN: u32 = u32::MAX;

impl Default for Facts {
    fn default() -> Self {
        Self {
            cost: AtomicU32::new(UNKNOWN),
            limit: AtomicU64::default(),
            window: AtomicU64::default(),
            nanos_per_token: AtomicU64::default(),
            degraded: AtomicBool::default(),
        }
    }
}

impl Facts {
    fn cost(&self) -> Option<u32> {
        Some(self.cost.load(Relaxed)).filter(|cost| *cost != UNKNOWN)
    }
}

/// A denial that stands for a while.
#[derive(Debug, Default)]
struct Hold {
    until: AtomicU64,
    /// When the call would fit. Later than `until` if that was far away.
    fits: AtomicU64,
    blocked: AtomicU8,
}

/// What a call comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spend {
    /// Decided from what is held. If `low`, it is time to [`borrow`](Leases::borrow) again.
    Decided {
        /// What is decided.
        verdict: Verdict,
        /// Little is left.
        low: bool,
    },
    /// Nothing is held that decides it.
    Nothing,
}

impl Leases {
    /// Decides a call from what is held. Takes no lock and allocates nothing. `cost` is the class's if it is `None`.
    #[inline]
    pub fn spend(&self, now: Moment, cost: Option<u32>) -> Spend {
        let cost = cost.unwrap_or_else(|| self.facts.cost.load(Relaxed));
        let first = usize::from(self.first.load(Relaxed) % 2);
        let mut fits = None;
        for at in [first, 1 - first] {
            let [Some(purse), Some(other)] = [self.purses.get(at), self.purses.get(1 - at)] else { continue };
            match purse.spend(now, cost) {
                Ok(spent) => {
                    self.used.store(now.as_micros(), Relaxed);
                    let left = spent.left.saturating_add(other.left());
                    let low = (left <= spent.granted / 4 || (spent.late && other.left() == 0))
                        && !self.is_quiet(now);
                    return Spend::Decided { verdict: self.allowed(&spent, left, cost), low };
                }
                Err(Short::Until(at)) => fits = Some(fits.map_or(at, |fits: Moment| fits.min(at))),
                Err(Short::Empty) => {}
            }
        }
        if let Some(fits) = fits {
            return Spend::Decided { verdict: self.deny(now, fits, Denial::OverLimit), low: false };
        }
        if now.as_micros() < self.hold.until.load(Relaxed) {
            let why = if self.hold.blocked.load(Relaxed) == 0 { Denial::OverLimit } else { Denial::Blocked };
            let fits = Moment::from_micros(self.hold.fits.load(Relaxed));
            return Spend::Decided { verdict: self.deny(now, fits, why), low: false };
        }
        Spend::Nothing
    }

    /// Notes a call that nothing here decides. Is the key hot: was there another one within the time that a chunk
    /// should last?
    pub fn touch(&self, now: Moment) -> bool {
        let before = Moment::from_micros(self.used.swap(now.as_micros(), Relaxed));
        before > Moment::NEVER && now.since(before) <= CHUNK_LASTS
    }

    /// May tokens be asked for? Not while a denial is held, after a failure, and for a class that is not leasable.
    #[must_use]
    pub fn is_quiet(&self, now: Moment) -> bool {
        now.as_micros() < self.quiet_until.load(Relaxed)
    }

    /// What to ask the service for, if it is time: not while another wish is out. `seq` names the wish if it is a
    /// new one; one whose reply was lost is sent again as it was. `waiting` calls have nothing to be decided from.
    ///
    /// Each wish is to be answered by [`granted`](Self::granted) or [`failed`](Self::failed).
    pub fn borrow(&self, now: Moment, seq: u64, waiting: u32) -> Option<Wish> {
        if self.is_quiet(now) {
            return None;
        }
        self.books.lock().borrow(self, now, seq, waiting)
    }

    /// What the service has granted, or not.
    pub fn granted(&self, now: Moment, grant: Grant) {
        self.books.lock().granted(self, now, grant);
    }

    /// The wish was not answered. It may have been granted all the same, so it is sent again as it was, within the
    /// time that a lease lives.
    pub fn failed(&self, now: Moment) {
        self.books.lock().failed(self, now);
    }

    /// The wish can not be: asked for again after [`REASK`].
    pub fn refused(&self, now: Moment) {
        self.books.lock().refused(self, now);
    }

    /// What is to go back because it is not being used, or will not be before it ends. To be asked for a few times
    /// in the life of a lease, until [`is_empty`](Self::is_empty).
    pub fn sweep(&self, now: Moment) -> Vec<Return> {
        self.books.lock().sweep(self, now)
    }

    /// Everything that is held, to go back. From then on nothing is held: what comes later goes back with the next
    /// [`sweep`](Self::sweep).
    pub fn close(&self, now: Moment) -> Vec<Return> {
        self.books.lock().close(self, now)
    }

    /// Nothing is held, nothing is to go back, and no wish is out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.books.lock().is_empty()
    }

    /// Tokens that are held and not spent, also of leases that have ended meanwhile.
    #[must_use]
    pub fn outstanding(&self) -> u64 {
        self.purses.iter().map(|purse| u64::from(purse.left())).sum()
    }

    /// When a call was last decided.
    #[must_use]
    pub fn last_used(&self) -> Moment {
        Moment::from_micros(self.used.load(Relaxed))
    }

    /// Tokens that a call of the class costs; `None` until the service has said.
    #[must_use]
    pub fn cost(&self) -> Option<u32> {
        self.facts.cost()
    }

    /// What the service said of a call that it was asked about.
    pub fn learn(&self, verdict: &Verdict) {
        self.facts.degraded.store(verdict.degraded, Relaxed);
        if verdict.limit > 0 {
            self.facts.limit.store(verdict.limit, Relaxed);
            self.facts.window.store(micros(verdict.window), Relaxed);
            let nanos = micros(verdict.window).saturating_mul(1_000).div_ceil(verdict.limit);
            self.facts.nanos_per_token.store(nanos, Relaxed);
        }
    }

    #[inline]
    fn allowed(&self, spent: &Spent, left: u32, cost: u32) -> Verdict {
        Verdict { denied: None, cost, ..self.verdict(spent.remaining.saturating_add(u64::from(left))) }
    }

    fn deny(&self, now: Moment, fits: Moment, why: Denial) -> Verdict {
        self.used.store(now.as_micros(), Relaxed);
        self.denied.fetch_add(1, Relaxed);
        let retry_after = fits.since(now);
        let mut verdict = Verdict { denied: Some(why), retry_after, ..self.verdict(0) };
        if why == Denial::Blocked {
            verdict.reset_after = retry_after;
        }
        verdict
    }

    #[inline]
    fn verdict(&self, remaining: u64) -> Verdict {
        let limit = self.facts.limit.load(Relaxed);
        let remaining = remaining.min(limit);
        let reset = (limit - remaining).saturating_mul(self.facts.nanos_per_token.load(Relaxed));
        Verdict {
            denied: None,
            limit,
            remaining,
            cost: 0,
            retry_after: Duration::ZERO,
            reset_after: Duration::from_nanos(reset),
            wait: Duration::ZERO,
            window: Duration::from_micros(self.facts.window.load(Relaxed)),
            degraded: self.facts.degraded.load(Relaxed),
        }
    }
}

#[cfg(test)]
mod tests;
