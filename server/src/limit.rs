//! The words that every layer shares: rates, limits, costs, points in time, states, decisions.
//!
//! Everything here is an integer and nothing here knows a clock. All numbers that reach an algorithm stay
//! below 2^53, because the same arithmetic runs in Redis, where a number is a double.

mod error;

pub use error::LimitError;

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;

/// The largest integer that a double holds exactly together with all smaller ones.
pub(crate) const EXACT: u64 = 1 << 53;

/// What the arithmetic of one bucket may reach. A bucket can owe as much again as it holds, and both have
/// to stay below that.
pub(crate) const MAX_UNITS: u64 = (EXACT - 1) / 2;

/// A point in time: microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The time `micros` microseconds after the Unix epoch.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The time from `earlier` until this one; zero if it is not earlier.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }

    /// The time `span` later, or the end of time.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(micros(span)))
    }
}

/// `span` in whole microseconds, rounded up, at most `u64::MAX`.
#[must_use]
pub fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX)
}

/// Tokens of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cost(u64);

impl Cost {
    /// No tokens: as a class's cost "never limited", as a call's cost a peek.
    pub const ZERO: Self = Self(0);
    /// One token.
    pub const ONE: Self = Self(1);

    /// `tokens` tokens.
    #[must_use]
    pub const fn new(tokens: u64) -> Self {
        Self(tokens)
    }

    /// The number of tokens.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl From<u32> for Cost {
    fn from(tokens: u32) -> Self {
        Self(tokens.into())
    }
}

/// `count` tokens each `period`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    count: NonZeroU64,
    /// Microseconds.
    period: NonZeroU64,
}

impl Rate {
    /// The slowest rate: one token in this time.
    pub const LONGEST_PERIOD: Duration = Duration::from_secs(30 * 24 * 3600);
    /// The fastest rate, in tokens per second.
    pub const MOST_PER_SECOND: u64 = 1_000_000;

    /// `count` tokens each `period`.
    ///
    /// # Errors
    /// A rate that is zero, faster than [`MOST_PER_SECOND`](Self::MOST_PER_SECOND), or a period that is
    /// zero or longer than [`LONGEST_PERIOD`](Self::LONGEST_PERIOD).
    pub fn new(count: u64, period: Duration) -> Result<Self, LimitError> {
        let count = NonZeroU64::new(count).ok_or(LimitError::NoRate)?;
        let longest = Self::LONGEST_PERIOD;
        if period > longest || period.is_zero() {
            return Err(LimitError::Period { period, longest });
        }
        let period = NonZeroU64::new(micros(period)).ok_or(LimitError::NoRate)?;
        let per_second = (u128::from(count.get()) * 1_000_000).div_ceil(u128::from(period.get()));
        if per_second > u128::from(Self::MOST_PER_SECOND) {
            return Err(LimitError::TooFast { per_second, most: Self::MOST_PER_SECOND });
        }
        Ok(Self { count, period })
    }

    /// Tokens each [`period`](Self::period).
    #[must_use]
    pub const fn count(self) -> u64 {
        self.count.get()
    }

    /// The time in which [`count`](Self::count) tokens come.
    #[must_use]
    pub const fn period(self) -> Duration {
        Duration::from_micros(self.period.get())
    }
}

/// What a bucket may give: a rate and a burst.
///
/// Levels are counted in *units*, so that whatever flows in during a microsecond is a whole number of them:
/// a token is [`scale`](Self::scale) units, and [`refill`](Self::refill) units come each microsecond.
/// `refill / scale` is the rate in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    rate: Rate,
    burst: NonZeroU64,
    refill: NonZeroU64,
    scale: NonZeroU64,
    /// Microseconds.
    window: u64,
    flows: bool,
}

impl Limit {
    /// The largest burst.
    pub const MOST_BURST: u64 = 1_000_000_000;

    /// A bucket of `burst` tokens that refills at `rate`.
    ///
    /// # Errors
    /// A burst of zero, above [`MOST_BURST`](Self::MOST_BURST), or so large for a rate so slow that its
    /// units do not fit the exact range; the error says the largest burst that does.
    pub fn new(rate: Rate, burst: u64) -> Result<Self, LimitError> {
        let burst = NonZeroU64::new(burst).ok_or(LimitError::NoBurst)?;
        let common = gcd(rate.count, rate.period);
        let scale = NonZeroU64::new(rate.period.get() / common).ok_or(LimitError::NoRate)?;
        let refill = NonZeroU64::new(rate.count.get() / common).ok_or(LimitError::NoRate)?;
        let most = Self::MOST_BURST.min(MAX_UNITS / scale);
        if burst.get() > most {
            return Err(LimitError::Burst { burst: burst.get(), most });
        }
        let window = (burst.get() * scale.get()).div_ceil(refill.get());
        Ok(Self { rate, burst, refill, scale, window, flows: true })
    }

    /// The longest window of [`per_window`](Self::per_window).
    pub const LONGEST_WINDOW: Duration = Duration::from_secs(3650 * 24 * 3600);

    /// `count` tokens each `window`, for algorithms that only count: no units flow, so their bounds are none
    /// here. Such a limit does not [`flow`](Self::flows).
    ///
    /// # Errors
    /// A count of zero or above 2^32 - 1, a window of zero or above [`LONGEST_WINDOW`](Self::LONGEST_WINDOW).
    pub fn per_window(count: u64, window: Duration) -> Result<Self, LimitError> {
        let most = u64::from(u32::MAX);
        let count = NonZeroU64::new(count).ok_or(LimitError::NoBurst)?;
        if count.get() > most {
            return Err(LimitError::Burst { burst: count.get(), most });
        }
        let longest = Self::LONGEST_WINDOW;
        let period = NonZeroU64::new(micros(window)).filter(|_| window <= longest);
        let period = period.ok_or(LimitError::Period { period: window, longest })?;
        let rate = Rate { count, period };
        let one = NonZeroU64::MIN;
        Ok(Self { rate, burst: count, refill: one, scale: one, window: period.get(), flows: false })
    }

    /// Has so many shares at most, whatever there is to share: the arithmetic of a slower rate would not fit.
    pub const MOST_SHARES: u32 = 500;

    /// What one of `shares` may give if together they are to give no more than this: the rate and the burst divided,
    /// but at least one call of `cost` at once.
    ///
    /// # Errors
    /// That cost at once does not fit a rate so slow. A cost of zero always does.
    pub fn share(&self, shares: u32, cost: Cost) -> Result<Self, LimitError> {
        let shares = u64::from(shares.clamp(1, Self::MOST_SHARES));
        let burst = (self.burst.get() / shares).max(cost.get()).max(1);
        if !self.flows {
            return Self::per_window(burst, self.window());
        }
        let period = NonZeroU64::new(self.rate.period.get() * shares).ok_or(LimitError::NoRate)?;
        Self::new(Rate { count: self.rate.count, period }, burst)
    }

    /// Are there units that flow? If not, this limit is for algorithms that count within its window.
    #[must_use]
    pub const fn flows(&self) -> bool {
        self.flows
    }

    /// The rate as it was given.
    #[must_use]
    pub const fn rate(&self) -> Rate {
        self.rate
    }

    /// What a full bucket holds, in tokens.
    #[must_use]
    pub const fn burst(&self) -> u64 {
        self.burst.get()
    }

    /// What a full bucket holds, in units.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.burst.get() * self.scale.get()
    }

    /// Units each microsecond.
    #[must_use]
    pub const fn refill(&self) -> NonZeroU64 {
        self.refill
    }

    /// Units of one token.
    #[must_use]
    pub const fn scale(&self) -> NonZeroU64 {
        self.scale
    }

    /// The time in which an empty bucket refills.
    #[must_use]
    pub const fn window(&self) -> Duration {
        Duration::from_micros(self.window)
    }
}

fn gcd(a: NonZeroU64, b: NonZeroU64) -> NonZeroU64 {
    match NonZeroU64::new(a.get() % b) {
        None => b,
        Some(rest) => gcd(b, rest),
    }
}

/// A few integers below 2^53, which only the algorithm that wrote them can read.
pub type Words = [u64; 5];

/// What a bucket remembers. The default is a bucket that is as good as new.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Enough for most algorithms. All zeros is as good as new.
    Words(Words),
    /// Everything that was granted within the window.
    Log(Box<Log>),
}

impl Default for State {
    fn default() -> Self {
        Self::Words(Words::default())
    }
}

impl State {
    /// The words; of a log, those of a new bucket.
    #[must_use]
    pub fn words(&self) -> Words {
        match self {
            Self::Words(words) => *words,
            Self::Log(_) => Words::default(),
        }
    }
}

/// Grants in order of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// Tokens granted before those below.
    pub forgotten: u64,
    /// When something was granted, in microseconds since 1970, and all tokens granted until then.
    pub granted: VecDeque<(u64, u64)>,
}

impl Log {
    /// Bytes that it takes.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        size_of::<Self>() + self.granted.capacity() * size_of::<(u64, u64)>()
    }
}

/// What a call wishes of a bucket: at least this, and if it is there up to that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// With less than this the call is denied.
    pub at_least: Cost,
    /// More than this is never granted.
    pub at_most: Cost,
}

impl Want {
    /// All of it or nothing.
    #[must_use]
    pub const fn exactly(cost: Cost) -> Self {
        Self { at_least: cost, at_most: cost }
    }
}

/// Why a bucket is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The bucket does not hold the cost.
    OverLimit,
    /// The key is blocked.
    Blocked,
    /// The authority can not be asked, and the rule is a sensitive one.
    Unavailable,
}

/// What becomes of a call on one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Why not, if not.
    pub denied: Option<Reason>,
    /// Tokens granted: what was wished, or less if the wish allows it; zero on a denial.
    pub granted: Cost,
    /// Whole tokens left after this decision.
    pub remaining: u64,
    /// When the same call would fit, at the earliest; zero if it is allowed now.
    pub retry_after: Duration,
    /// When the bucket is as good as new, if nothing else happens.
    pub reset_after: Duration,
    /// How long an allowed call has to wait for its turn.
    pub wait: Duration,
    /// The bucket was written by another algorithm, and so was taken for new.
    pub replaced: bool,
    /// Decided without the authority.
    pub degraded: bool,
    /// Of a hit that tells its gateway: how many are known to take ahead from that bucket, this one among them.
    pub gateways: u32,
}

impl Decision {
    /// Denied because the authority can not be asked, and whoever guesses must not be wrong.
    #[must_use]
    pub const fn unavailable(retry_after: Duration) -> Self {
        Self { denied: Some(Reason::Unavailable), degraded: true, ..Self::blocked(retry_after) }
    }

    /// Denied because the key is blocked for that long yet. The bucket was not looked at.
    #[must_use]
    pub const fn blocked(retry_after: Duration) -> Self {
        Self {
            denied: Some(Reason::Blocked),
            granted: Cost::ZERO,
            remaining: 0,
            retry_after,
            reset_after: retry_after,
            wait: Duration::ZERO,
            replaced: false,
            degraded: false,
            gateways: 0,
        }
    }

    /// May the call pass?
    #[must_use]
    pub const fn allowed(&self) -> bool {
        self.denied.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per(count: u64, period: u64) -> Rate {
        Rate::new(count, Duration::from_secs(period)).unwrap()
    }

    #[test]
    fn a_limit_is_kept_in_lowest_terms() {
        let limit = Limit::new(per(100, 60), 50).unwrap();
        assert_eq!((limit.refill().get(), limit.scale().get()), (1, 600_000));
        assert_eq!(limit.capacity(), 30_000_000);
        assert_eq!(limit.window(), Duration::from_secs(30));
    }

    #[test]
    fn bounds_are_told() {
        assert_eq!(Rate::new(0, Duration::from_secs(1)), Err(LimitError::NoRate));
        assert!(matches!(Rate::new(1, Duration::ZERO), Err(LimitError::Period { .. })));
        assert!(matches!(
            Rate::new(1, Rate::LONGEST_PERIOD + Duration::from_micros(1)),
            Err(LimitError::Period { .. })
        ));
        assert!(matches!(
            Rate::new(1_000_001, Duration::from_secs(1)),
            Err(LimitError::TooFast { per_second: 1_000_001, .. })
        ));
        assert_eq!(Limit::new(per(1, 1), 0), Err(LimitError::NoBurst));
        assert_eq!(
            Limit::new(per(1, 1), 1_000_000_001),
            Err(LimitError::Burst { burst: 1_000_000_001, most: 1_000_000_000 })
        );
        let slow = Rate::new(1, Rate::LONGEST_PERIOD).unwrap();
        let Err(LimitError::Burst { most, .. }) = Limit::new(slow, 1_000_000) else {
            panic!("a burst that does not fit was accepted")
        };
        assert!(Limit::new(slow, most).is_ok());
        assert!(Limit::new(slow, most + 1).is_err());
    }

    #[test]
    fn the_extremes_fit() {
        assert!(Limit::new(per(1_000_000, 1), 1_000_000_000).is_ok());
        assert!(Limit::new(per(1, 1), 1_000_000_000).is_ok());
        assert!(Limit::new(Rate::new(1, Rate::LONGEST_PERIOD).unwrap(), 1).is_ok());
    }

    #[test]
    fn a_bucket_in_full_debt_is_still_exact() {
        // A token is 2^23 units, so bursts reach the bound without a rest.
        let rate = Rate::new(1, Duration::from_micros(1 << 23)).unwrap();
        assert_eq!(Limit::new(rate, 1 << 29), Err(LimitError::Burst { burst: 1 << 29, most: (1 << 29) - 1 }));
        assert!(2 * Limit::new(rate, (1 << 29) - 1).unwrap().capacity() < EXACT);
    }

    #[test]
    fn what_is_only_counted_needs_no_units() {
        let (day, year) = (Duration::from_secs(86_400), Duration::from_secs(365 * 86_400));
        let prime = 99_991;
        assert!(Limit::new(Rate::new(prime, day).unwrap(), prime).is_err());
        for (count, window) in [(prime, day), (u32::MAX.into(), Duration::from_secs(1)), (1, 10 * year)] {
            let limit = Limit::per_window(count, window).unwrap();
            assert_eq!((limit.burst(), limit.window(), limit.flows()), (count, window, false));
        }
        assert_eq!(Limit::per_window(0, day), Err(LimitError::NoBurst));
        assert!(matches!(Limit::per_window(1 << 32, day), Err(LimitError::Burst { .. })));
        assert!(matches!(Limit::per_window(1, Duration::ZERO), Err(LimitError::Period { .. })));
        assert!(matches!(Limit::per_window(1, 11 * year), Err(LimitError::Period { .. })));
    }

    #[test]
    fn time_never_runs_below_zero() {
        let (early, late) = (Timestamp::from_micros(5), Timestamp::from_micros(9));
        assert_eq!(late.since(early), Duration::from_micros(4));
        assert_eq!(early.since(late), Duration::ZERO);
        assert_eq!(micros(Duration::from_nanos(1)), 1);
    }
}
