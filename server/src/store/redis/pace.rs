//! How long script calls take these days, and so what is not worth sending.
//!
//! Where more comes than Redis can decide, all that is taken from a queue in its order is late when it is answered: it would
//! be charged, and nobody would hear of it. So what could not be answered in time is not sent. A call that has just come
//! always is: it may find that all is well again.

use crate::clock::instant;
use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// A moving average.
pub(super) struct Pace(Mutex<Seen>);

struct Seen {
    takes: Duration,
    at: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Self(Mutex::new(Seen { takes: Duration::ZERO, at: instant() }))
    }
}

impl Pace {
    /// When there will be an answer to what is sent now, for all that is known.
    pub(super) fn soon(&self, deadline: Duration) -> Instant {
        instant() + (self.0.lock().takes * 3 / 2).min(deadline * 7 / 8)
    }

    /// One more took so long.
    pub(super) fn took(&self, span: Duration) {
        let mut seen = self.0.lock();
        *seen = Seen { takes: (seen.takes + span) / 2, at: instant() };
    }

    /// Nothing is sent, so nothing says how long it would take. If that goes on, it is tried again with less care.
    pub(super) fn relax(&self) {
        let mut seen = self.0.lock();
        if seen.at.elapsed() > seen.takes {
            *seen = Seen { takes: seen.takes / 2, at: instant() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn what_has_just_come_is_sent_and_care_ends_with_time() {
        let (pace, deadline) = (Pace::default(), Duration::from_millis(100));
        let after = |pace: &Pace| pace.soon(deadline) - instant();
        assert_eq!(after(&pace), Duration::ZERO);
        pace.took(Duration::from_millis(16));
        assert_eq!(after(&pace), Duration::from_millis(12));
        for _ in 0..10 {
            pace.took(deadline);
        }
        assert_eq!(after(&pace), deadline * 7 / 8);
        // Many that are left out at once say no more than one.
        for (span, care) in [(0, 87), (110, 74), (0, 74), (60, 37)] {
            advance(Duration::from_millis(span)).await;
            (0..100).for_each(|_| pace.relax());
            assert_eq!(after(&pace).as_millis(), care);
        }
    }
}
