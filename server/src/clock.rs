//! The only `now()`. Decisions in memory use it, Redis uses its own; tests make one that they move.

#![expect(clippy::disallowed_methods, reason = "this is the clock that everybody else is told to ask")]

use crate::limit::{Timestamp, micros};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Tells the time.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    /// The wall clock is read once; from then on time only runs forward, whatever is done to that clock.
    System {
        start: Instant,
        at_start: Timestamp,
    },
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's time, running evenly from now on.
    #[must_use]
    pub fn system() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at_start = Timestamp::from_micros(micros(since_epoch));
        Self(Source::System { start: Instant::now(), at_start })
    }

    /// A clock that stands still until it is [`set`](Self::set). Clones show the same time.
    #[must_use]
    pub fn manual(at: Timestamp) -> Self {
        Self(Source::Manual(Arc::new(AtomicU64::new(at.as_micros()))))
    }

    /// Moves a manual clock, forwards or backwards. The machine's time can not be set.
    pub fn set(&self, at: Timestamp) {
        if let Source::Manual(now) = &self.0 {
            now.store(at.as_micros(), Ordering::SeqCst);
        }
    }

    /// The time now.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        match &self.0 {
            Source::System { start, at_start } => at_start.after(start.elapsed()),
            Source::Manual(now) => Timestamp::from_micros(now.load(Ordering::SeqCst)),
        }
    }

    /// The time now if somebody else has to be told it, because the clock is moved by hand.
    #[must_use]
    pub fn manual_now(&self) -> Option<Timestamp> {
        matches!(self.0, Source::Manual(_)).then(|| self.now())
    }
}

/// Now, for deadlines.
#[must_use]
pub fn instant() -> tokio::time::Instant {
    tokio::time::Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_manual_clock_is_shared_and_moved() {
        let clock = Clock::manual(Timestamp::from_micros(5));
        let other = clock.clone();
        other.set(Timestamp::from_micros(3));
        assert_eq!(clock.now(), Timestamp::from_micros(3));
        assert_eq!(clock.manual_now(), Some(clock.now()));
    }

    #[test]
    fn the_system_clock_is_after_2020_and_never_runs_backwards() {
        let clock = Clock::system();
        let (one, two) = (clock.now(), clock.now());
        assert!(one <= two && two.since(Timestamp::default()) > Duration::from_secs(50 * 365 * 86400));
        assert_eq!(clock.manual_now(), None);
    }
}
