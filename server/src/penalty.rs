//! Strikes and blocks: whoever is denied again and again is shut out for longer and longer.
//!
//! Each denial by limit is a *strike* for the key, over all its classes. Past [`strikes`](Penalty::strikes)
//! of them the key is *blocked* for `2^(count - strikes) x base`, at most [`cap`](Penalty::cap): with 3
//! strikes, a base of 60 s and a cap of 1 h for 120, 240, 480, 960, 1920, 3600, 3600, … seconds.
//!
//! A strike lives [`window`](Penalty::window) from the last one, and never less than twice the block that it
//! led to: a block as long as the window would otherwise end together with its own count, and the second
//! 3600 of the series could not be.
//!
//! Pure, like an algorithm. Twin: `penalty.lua`.

use crate::limit::{Timestamp, micros};
use std::time::Duration;

/// The same in Lua: a chunk that returns `strike`.
pub(crate) const LUA: &str = include_str!("penalty.lua");

/// What denials lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Penalty {
    strikes: u32,
    window: Duration,
    base: Duration,
    cap: Duration,
}

impl Penalty {
    /// No strike lives and no block lasts longer than this.
    pub const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

    /// The key is blocked past `strikes` denials with less than `window` between them.
    ///
    /// # Errors
    /// A span that is shorter than a millisecond or longer than [`LONGEST`](Self::LONGEST), or a base above
    /// the cap.
    pub fn new(strikes: u32, window: Duration, base: Duration, cap: Duration) -> Result<Self, PenaltyError> {
        for (name, span) in [("window", window), ("base", base), ("cap", cap)] {
            if span < Duration::from_millis(1) || span > Self::LONGEST {
                return Err(PenaltyError::Span { name, span, longest: Self::LONGEST });
            }
        }
        if base > cap {
            return Err(PenaltyError::BaseAboveCap { base, cap });
        }
        Ok(Self { strikes, window, base, cap })
    }

    /// How many strikes a key may have without being blocked.
    #[must_use]
    pub const fn strikes(&self) -> u32 {
        self.strikes
    }

    /// How long a strike lives.
    #[must_use]
    pub const fn window(&self) -> Duration {
        self.window
    }

    /// The block is twice this after the first strike too many.
    #[must_use]
    pub const fn base(&self) -> Duration {
        self.base
    }

    /// The longest block.
    #[must_use]
    pub const fn cap(&self) -> Duration {
        self.cap
    }

    /// What `more` strikes at `now` lead to.
    #[must_use]
    pub fn strike(&self, record: Record, now: Timestamp, more: u32) -> Record {
        let remembered = now < record.forgotten;
        let before = if remembered { record.count } else { 0 };
        // A strike of a class with a short window does not shorten the life of earlier ones.
        let until = if remembered { record.forgotten } else { Timestamp::default() };
        let count = before.saturating_add(more);
        let block = self.block(count);
        let life = micros(self.window).max(2 * micros(block));
        // A strike that leads to no block leaves no end of one: after a clock stepped back it would be ahead.
        let ends = if block.is_zero() { Timestamp::default() } else { now.after(block) };
        Record {
            count,
            forgotten: until.max(now.after(Duration::from_micros(life))),
            blocked_until: record.blocked_until.max(ends),
        }
    }

    fn block(&self, count: u32) -> Duration {
        match count.saturating_sub(self.strikes) {
            0 => Duration::ZERO,
            // A base is a millisecond or more, and 2^32 of those are above every cap.
            over => Duration::from_micros(micros(self.base).saturating_mul(1 << over.min(32))).min(self.cap),
        }
    }
}

/// What is remembered of a key's denials. The default is a clean record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Strikes so far.
    pub count: u32,
    /// When the count starts anew.
    pub forgotten: Timestamp,
    /// When the block ends; in the past if there is none.
    pub blocked_until: Timestamp,
}

/// A penalty that can not be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PenaltyError {
    /// A span is out of bounds.
    #[error(
        "a {name} of {}; expected at least 1ms and at most {}",
        humantime::format_duration(*.span), humantime::format_duration(*.longest)
    )]
    Span {
        /// Which one.
        name: &'static str,
        /// What was asked for.
        span: Duration,
        /// The bound.
        longest: Duration,
    },
    /// The base is longer than the cap.
    #[error(
        "a base of {} above the cap of {}",
        humantime::format_duration(*.base), humantime::format_duration(*.cap)
    )]
    BaseAboveCap {
        /// The base.
        base: Duration,
        /// The cap.
        cap: Duration,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    fn login() -> Penalty {
        Penalty::new(3, seconds(3600), seconds(60), seconds(3600)).unwrap()
    }

    #[test]
    fn the_series() {
        let mut record = Record::default();
        let mut now = Timestamp::from_micros(1_000_000);
        let mut blocks = Vec::new();
        for _ in 0..10 {
            record = login().strike(record, now, 1);
            let block = record.blocked_until.since(now);
            blocks.push(block.as_secs());
            now = now.after(block);
        }
        assert_eq!(blocks, [0, 0, 0, 120, 240, 480, 960, 1920, 3600, 3600]);
    }

    #[test]
    fn strikes_are_forgotten_a_window_after_the_last() {
        let at = |s: u64| Timestamp::from_micros(s * 1_000_000);
        let mut record = Record::default();
        for s in [0_u64, 3599, 7198] {
            record = login().strike(record, at(s), 1);
        }
        assert_eq!(record.count, 3);
        assert_eq!(login().strike(record, at(7198 + 3599), 1).count, 4);
        assert_eq!(login().strike(record, at(7198 + 3600), 1).count, 1);
    }

    #[test]
    fn a_strike_that_is_forgiven_shuts_nobody_out_when_the_clock_steps_back() {
        let record = login().strike(Record::default(), Timestamp::from_micros(5_000_000), 1);
        assert!(record.blocked_until <= Timestamp::from_micros(4_000_000), "{record:?}");
    }

    #[test]
    fn a_short_window_does_not_shorten_a_long_one() {
        let short = Penalty::new(3, seconds(1), seconds(1), seconds(1)).unwrap();
        let at = |s: u64| Timestamp::from_micros(s * 1_000_000);
        let mut record = Record::default();
        for s in [0, 1, 2] {
            record = login().strike(record, at(s), 1);
        }
        record = short.strike(record, at(3), 1);
        assert_eq!(login().strike(record, at(10), 1).blocked_until.since(at(10)), seconds(240));
        // And once all of it is forgotten, a new life is as short as its own window.
        record = short.strike(record, at(9999), 1);
        assert_eq!((record.count, record.forgotten), (1, at(10_000)));
    }

    #[test]
    fn many_at_once_are_counted_one_by_one() {
        let now = Timestamp::from_micros(7);
        let once = login().strike(Record::default(), now, 5);
        assert_eq!((once.count, once.blocked_until.since(now)), (5, seconds(240)));
        let most = login().strike(once, now, u32::MAX);
        assert_eq!((most.count, most.blocked_until.since(now)), (u32::MAX, seconds(3600)));
    }

    #[test]
    fn bounds_are_told() {
        assert!(matches!(
            Penalty::new(3, Duration::ZERO, seconds(1), seconds(2)),
            Err(PenaltyError::Span { name: "window", .. })
        ));
        assert!(matches!(
            Penalty::new(3, seconds(1), seconds(3), seconds(2)),
            Err(PenaltyError::BaseAboveCap { .. })
        ));
    }
}
