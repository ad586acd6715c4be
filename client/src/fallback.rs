//! Life without the service: when it is taken to be gone, and what is decided then.
//!
//! Like [`leases`](crate::leases) it knows no clock and no network, so that a simulator can drive it.
//!
//! What is leased is spent first. Then a sensitive class is denied, and any other gets a bucket of this gateway's
//! own, at the rate that the service gave it for such times. That bucket lives by the *time without the service*,
//! which stands still while there is one: however often the service comes and goes, all that is let through alone
//! is at most the bucket's burst + its rate x the time without.

use crate::clock::{Moment, micros};
use parking_lot::Mutex;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use std::time::Duration;

/// What to do with calls of a class while the service can not be asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fallback {
    /// Deny them: the class is sensitive, or nobody said what may pass.
    Deny,
    /// Let them pass: the class is never limited.
    Allow,
    /// Let so many pass.
    Limit {
        /// Tokens per second; above zero.
        rate_per_s: f64,
        /// Tokens of a full bucket; at least 1.
        burst: u64,
    },
}

impl Fallback {
    /// What a reply to Borrow says of its class.
    #[must_use]
    pub fn of(reply: &tollgate_proto::v1::BorrowResponse) -> Option<Self> {
        match &reply.fallback {
            Some(fallback) if fallback.deny => Some(Self::Deny),
            Some(fallback) => Some(Self::Limit { rate_per_s: fallback.rate_per_s, burst: fallback.burst }),
            None => (reply.cost == 0 && reply.granted > 0).then_some(Self::Allow),
        }
    }
}

/// The fallback of a class: as configured, until the service has said.
#[derive(Debug)]
pub struct Rule {
    kind: AtomicU8,
    /// Microseconds in which a token comes, times [`SCALE`].
    interval: AtomicU64,
    burst: AtomicU64,
    learned: AtomicU8,
}

const DENY: u8 = 0;
const ALLOW: u8 = 1;
const LIMIT: u8 = 2;

/// Intervals are in parts of a microsecond: at a million tokens a second one is a microsecond long.
const SCALE: u64 = 1_000;
/// A token a month: slower than any rule.
const SLOWEST: u64 = 31 * 86_400 * 1_000_000 * SCALE;

impl Rule {
    /// As configured.
    #[must_use]
    pub fn new(fallback: Fallback) -> Self {
        let rule = Self {
            kind: AtomicU8::new(DENY),
            interval: AtomicU64::new(SLOWEST),
            burst: AtomicU64::new(0),
            learned: AtomicU8::new(0),
        };
        rule.set(fallback);
        rule
    }

    /// The service has said.
    pub fn learn(&self, fallback: Fallback) {
        self.set(fallback);
        self.learned.store(1, Relaxed);
    }

    /// Has it?
    #[must_use]
    pub fn is_learned(&self) -> bool {
        self.learned.load(Relaxed) == 1
    }

    /// Are calls denied?
    #[must_use]
    pub fn denies(&self) -> bool {
        self.kind.load(Relaxed) == DENY
    }

    fn set(&self, fallback: Fallback) {
        match fallback {
            Fallback::Deny => self.kind.store(DENY, Relaxed),
            Fallback::Allow => self.kind.store(ALLOW, Relaxed),
            Fallback::Limit { rate_per_s, burst } => {
                self.interval.store(interval(rate_per_s), Relaxed);
                self.burst.store(burst.clamp(1, 1_000_000_000), Relaxed);
                self.kind.store(LIMIT, Relaxed);
            }
        }
    }
}

/// Rounded up, against the caller. What is no rate at all is the slowest.
#[expect(
    clippy::float_arithmetic,
    clippy::as_conversions,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate of the wire, once; `as` saturates"
)]
fn interval(rate_per_s: f64) -> u64 {
    let scaled = (SCALE * 1_000_000) as f64;
    let interval = (scaled / rate_per_s).ceil();
    if interval.is_finite() && interval > 0.0 { (interval as u64).clamp(1, SLOWEST) } else { SLOWEST }
}

/// A decision without the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alone {
    /// The class is denied.
    Denied,
    /// The class is never limited.
    Allowed,
    /// The bucket had the tokens.
    Passed {
        /// Tokens of a full bucket.
        limit: u64,
        /// Whole tokens left.
        remaining: u64,
        /// When it is full.
        reset_after: Duration,
    },
    /// It had not.
    Over {
        /// Tokens of a full bucket.
        limit: u64,
        /// When the call would fit.
        retry_after: Duration,
        /// When it is full.
        reset_after: Duration,
    },
}

/// A bucket for the time without the service. It is full at first.
#[derive(Debug, Default)]
pub struct Bucket {
    /// When it is full again, in time without the service and parts of a microsecond.
    full_at: AtomicU64,
}

impl Bucket {
    /// Decides a call at a time that is counted without the service only.
    pub fn take(&self, rule: &Rule, without: Duration, cost: u32) -> Alone {
        match rule.kind.load(Relaxed) {
            ALLOW => return Alone::Allowed,
            LIMIT => {}
            _ => return Alone::Denied,
        }
        let (interval, limit) = (rule.interval.load(Relaxed), rule.burst.load(Relaxed));
        let now = micros(without).saturating_mul(SCALE);
        let takes = interval.saturating_mul(u64::from(cost));
        let most = interval.saturating_mul(limit);
        let span = |parts: u64| Duration::from_micros(parts.div_ceil(SCALE));
        let mut full_at = self.full_at.load(SeqCst);
        loop {
            // A rule that was lowered meanwhile must not lock anybody out for longer than its own bucket takes.
            let missing = full_at.saturating_sub(now).min(most);
            let then = missing.saturating_add(takes);
            if then > most {
                return Alone::Over { limit, retry_after: span(then - most), reset_after: span(missing) };
            }
            match self.full_at.compare_exchange_weak(full_at, now.saturating_add(then), SeqCst, SeqCst) {
                Ok(_) => {
                    return Alone::Passed {
                        limit,
                        remaining: (most - then) / interval,
                        reset_after: span(then),
                    };
                }
                Err(changed) => full_at = changed,
            }
        }
    }
}

/// Calls that fail in a row until the service is taken to be gone.
const FAILURES: u32 = 3;

/// When the service is back, keys go on alone for up to this long, each for another part of it: not all gateways
/// and all keys ask at once.
const RETURN_WITHIN: Duration = Duration::from_millis(500);

/// Whether the service is there. The first failures cost their callers a wait, then nobody asks but the prober.
#[derive(Debug, Default)]
pub struct Outage {
    failures: AtomicU32,
    /// Since when it is gone; zero if it is there.
    since: AtomicU64,
    /// Microseconds without it, up to the last time it came back.
    before: AtomicU64,
    /// When it came back.
    back: AtomicU64,
    /// Held while it goes or comes.
    turn: Mutex<()>,
}

impl Outage {
    /// Is it gone?
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.since.load(SeqCst) != 0
    }

    /// Is a key still to be decided alone? `part` of 256 says when it is its turn to ask again.
    #[must_use]
    pub fn covers(&self, now: Moment, part: u8) -> bool {
        if self.is_gone() {
            return true;
        }
        let back = self.back.load(SeqCst);
        back != 0 && now < Moment::from_micros(back).after(RETURN_WITHIN * u32::from(part) / 256)
    }

    /// A call was not answered; true if that makes the service gone.
    pub fn failed(&self, now: Moment) -> bool {
        if self.failures.fetch_add(1, SeqCst).saturating_add(1) < FAILURES || self.is_gone() {
            return false;
        }
        let _turn = self.turn.lock();
        self.since.compare_exchange(0, now.as_micros().max(1), SeqCst, SeqCst).is_ok()
    }

    /// A call was answered; true if the service was gone before.
    pub fn answered(&self, now: Moment) -> bool {
        if self.failures.load(Relaxed) != 0 {
            self.failures.store(0, SeqCst);
        }
        if !self.is_gone() {
            return false;
        }
        let _turn = self.turn.lock();
        let without = self.without(now);
        let was_gone = self.since.swap(0, SeqCst) != 0;
        if was_gone {
            self.before.store(micros(without), SeqCst);
            self.back.store(now.as_micros(), SeqCst);
        }
        was_gone
    }

    /// The time without the service, all in all.
    #[must_use]
    pub fn without(&self, now: Moment) -> Duration {
        let before = Duration::from_micros(self.before.load(SeqCst));
        match self.since.load(SeqCst) {
            0 => before,
            since => before + now.since(Moment::from_micros(since)),
        }
    }
}

/// How long until the service that is gone is looked for again, after that many looks: from 50 to 100 ms at first,
/// up to 1 s. Any two gateways choose differently.
#[must_use]
pub fn pause(looks: u32) -> Duration {
    let most = Duration::from_millis(100 << looks.min(4)).min(Duration::from_secs(1));
    most / 2 + (most / 2).mul_f64(fastrand::f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(millis: u64) -> Moment {
        Moment::from_micros(1 + millis * 1_000)
    }

    fn rule(rate_per_s: f64, burst: u64) -> Rule {
        Rule::new(Fallback::Limit { rate_per_s, burst })
    }

    fn lose(outage: &Outage, now: u64) {
        for _ in 0..FAILURES {
            outage.failed(at(now));
        }
    }

    #[test]
    fn a_bucket_of_its_own() {
        let (rule, bucket) = (rule(10.0, 3), Bucket::default());
        let millis = Duration::from_millis;
        for (now, cost, expected) in [
            (0, 2, Alone::Passed { limit: 3, remaining: 1, reset_after: millis(200) }),
            (0, 2, Alone::Over { limit: 3, retry_after: millis(100), reset_after: millis(200) }),
            (99, 2, Alone::Over { limit: 3, retry_after: millis(1), reset_after: millis(101) }),
            (100, 2, Alone::Passed { limit: 3, remaining: 0, reset_after: millis(300) }),
            (100, 0, Alone::Passed { limit: 3, remaining: 0, reset_after: millis(300) }),
            (10_000, 1, Alone::Passed { limit: 3, remaining: 2, reset_after: millis(100) }),
        ] {
            assert_eq!(bucket.take(&rule, millis(now), cost), expected, "at {now} ms, {cost}");
        }
        assert_eq!(bucket.take(&Rule::new(Fallback::Deny), millis(0), 1), Alone::Denied);
        assert_eq!(bucket.take(&Rule::new(Fallback::Allow), millis(0), 1), Alone::Allowed);
    }

    #[test]
    fn a_rate_of_the_wire_is_never_rounded_up() {
        for (rate, expected) in [
            (1e6, SCALE),
            (3.0, 333_333_334),
            (0.5, 2_000_000 * SCALE),
            (0.0, SLOWEST),
            (-1.0, SLOWEST),
            (f64::NAN, SLOWEST),
            (f64::INFINITY, SLOWEST),
            (1e300, 1),
            (1e-300, SLOWEST),
        ] {
            assert_eq!(interval(rate), expected, "{rate} a second");
        }
    }

    #[test]
    fn the_service_is_gone_after_three_failures_and_back_with_one_answer() {
        let outage = Outage::default();
        assert!(!outage.failed(at(0)) && !outage.failed(at(1)));
        outage.answered(at(2));
        assert!(!outage.failed(at(3)) && !outage.failed(at(4)) && !outage.is_gone());
        assert!(outage.failed(at(5)), "the one that makes it gone");
        assert!(outage.is_gone() && !outage.failed(at(6)));
        assert!(outage.answered(at(1_005)) && !outage.answered(at(1_006)));
        assert_eq!(outage.without(at(5_000)), Duration::from_secs(1));
    }

    #[test]
    fn keys_come_back_in_turn() {
        let outage = Outage::default();
        assert!(!outage.covers(at(0), 255), "nobody waits before there was an outage");
        lose(&outage, 0);
        assert!(outage.covers(at(100), 0) && outage.covers(at(100), 255));
        outage.answered(at(1_000));
        let alone = |now| (0..=255_u8).filter(|part| outage.covers(at(now), *part)).count();
        assert_eq!(alone(1_000), 255);
        assert_eq!(alone(1_250), 127);
        assert_eq!(alone(1_500), 0);
    }

    proptest! {
        #[test]
        fn however_often_it_comes_and_goes_no_more_passes_than_the_time_without_allows(
            rate in 1..200_u32,
            burst in 1..50_u64,
            steps in prop::collection::vec((0..2_000_u64, prop::bool::ANY, 1..8_u32), 1..80),
        ) {
            let (outage, bucket, rule) = (Outage::default(), Bucket::default(), rule(f64::from(rate), burst));
            let mut now = 0;
            let (mut passed, mut without) = (0_u64, 0_u64);
            for (span, is_gone, calls) in steps {
                if is_gone {
                    lose(&outage, now);
                } else {
                    outage.answered(at(now));
                }
                now += span;
                without += if is_gone { span } else { 0 };
                for _ in 0..calls {
                    let taken = bucket.take(&rule, outage.without(at(now)), 1);
                    passed += u64::from(matches!(taken, Alone::Passed { .. }));
                }
                prop_assert!(passed * 1_000 <= burst * 1_000 + u64::from(rate) * without);
            }
        }
    }

    #[test]
    fn looks_for_the_service_come_less_and_less_often() {
        for (looks, least, most) in
            [(0, 50, 100), (1, 100, 200), (3, 400, 800), (4, 500, 1_000), (60, 500, 1_000)]
        {
            for _ in 0..100 {
                let pause = pause(looks).as_millis();
                assert!((least..=most).contains(&pause), "look {looks}: {pause} ms");
            }
        }
    }
}
