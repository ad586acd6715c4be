//! What a bucket may admit, watched as it is admitted.
//!
//! With f(t) = admitted until t - rate x t, the bounds are I1: f(t) <= burst, and I2: f(t) - f(s) <= burst +
//! outstanding(s) for all s <= t. The least f(s) + outstanding(s) seen so far is all that has to be remembered.

use std::time::Duration;

/// The bounds of one bucket. All is in parts of a token: a token is as many as the period has microseconds.
#[derive(Debug)]
pub(crate) struct Bounds {
    count: i128,
    period: i128,
    burst: i128,
    admitted: i128,
    /// The least f(s) + outstanding(s).
    floor: i128,
    /// The least f(s).
    bare: i128,
    /// By how much any window was above burst + rate x time.
    excess: i128,
    /// What must not be.
    pub(crate) wrong: Option<String>,
}

impl Bounds {
    pub(crate) fn new(count: u64, period: Duration, burst: u64) -> Self {
        let period = i128::try_from(period.as_micros()).unwrap_or(i128::MAX);
        Self {
            count: count.into(),
            period,
            burst: i128::from(burst) * period,
            admitted: 0,
            floor: 0,
            bare: 0,
            excess: 0,
            wrong: None,
        }
    }

    fn f(&self, now: u64) -> i128 {
        self.admitted * self.period - self.count * i128::from(now)
    }

    /// So it stands: so many tokens are out of the bucket and may be spent yet, or come back.
    pub(crate) fn stand(&mut self, now: u64, outstanding: u64) {
        let f = self.f(now);
        self.floor = self.floor.min(f + i128::from(outstanding) * self.period);
        self.bare = self.bare.min(f);
    }

    pub(crate) fn admit(&mut self, now: u64, tokens: u64) {
        self.admitted += i128::from(tokens);
        let f = self.f(now);
        self.excess = self.excess.max(f - self.bare - self.burst);
        let broken = if f > self.burst {
            "I1"
        } else if f - self.floor > self.burst {
            "I2"
        } else {
            return;
        };
        if self.wrong.is_none() {
            self.wrong = Some(format!("{broken} at {now} us: {self:?}"));
        }
    }

    /// By how many tokens the worst window was above burst + rate x time.
    pub(crate) fn excess(&self) -> u64 {
        u64::try_from(self.excess.max(0) / self.period.max(1)).unwrap_or(0)
    }
}
