//! The only `now()` of the client.
//!
//! A decision has tens of nanoseconds, and reading the machine's clock takes most of them, so this one reads the
//! processor's counter where it can ([`quanta`]). Leases, held denials and local buckets take the time as an
//! argument: tests and simulators give them any.

#![expect(clippy::disallowed_methods, reason = "this is the clock that everybody else is told to ask")]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A point in time: microseconds since a start that is the same for one client. The start itself is not used: as a
/// number it stands for "never".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// Before everything.
    pub const NEVER: Self = Self(0);

    /// That many microseconds after the start.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the start.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// So much later.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(micros(span)))
    }

    /// How long ago `earlier` was; zero if it is yet to come.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// Whole microseconds of a span.
pub(crate) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// Tells the time. Clones tell the same.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    source: quanta::Clock,
    start: u64,
}

impl Clock {
    pub(crate) fn system() -> Self {
        let source = quanta::Clock::new();
        let start = source.raw();
        Self { source, start }
    }

    pub(crate) fn now(&self) -> Moment {
        // One more, so that no time is "never".
        Moment(self.source.delta_as_nanos(self.start, self.source.raw()) / 1_000 + 1)
    }
}

/// Since 1970, for headers that say when in seconds of the calendar.
pub(crate) fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
