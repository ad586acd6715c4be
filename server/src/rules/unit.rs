//! The units in which Envoy's rules and requests say how long a window is.

use crate::limit::Limit;
use std::time::Duration;

const DAY: u64 = 86_400;

/// A unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "their names say it")]
pub enum Unit {
    Second,
    Minute,
    Hour,
    Day,
    Week,
    /// 30 days.
    Month,
    /// 365 days.
    Year,
}

impl Unit {
    const ALL: [(Self, &'static str, u64); 7] = [
        (Self::Second, "second", 1),
        (Self::Minute, "minute", 60),
        (Self::Hour, "hour", 3600),
        (Self::Day, "day", DAY),
        (Self::Week, "week", 7 * DAY),
        (Self::Month, "month", 30 * DAY),
        (Self::Year, "year", 365 * DAY),
    ];

    /// The names of all, for messages.
    pub const NAMES: &'static str = "second, minute, hour, day, week, month, year";

    /// The unit of that name, in upper or lower case.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, its, _)| its.eq_ignore_ascii_case(name)).map(|(unit, ..)| *unit)
    }

    /// What rules call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(unit, ..)| *unit == self).map_or("", |(_, name, _)| name)
    }

    /// How long so many of them are; more than can be is the longest that there is.
    #[must_use]
    pub fn times(self, multiplier: u32) -> Duration {
        let seconds = Self::ALL.iter().find(|(unit, ..)| *unit == self).map_or(0, |(.., seconds)| *seconds);
        Duration::from_secs(seconds * u64::from(multiplier))
    }

    /// How many of them the longest window has.
    #[must_use]
    pub fn most(self) -> u32 {
        let most = Limit::LONGEST_WINDOW.as_secs() / self.times(1).as_secs().max(1);
        u32::try_from(most).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_named_in_any_case_and_have_their_lengths() {
        for name in Unit::NAMES.split(", ") {
            assert_eq!(Unit::named(name).unwrap().name(), name);
            assert_eq!(Unit::named(&name.to_uppercase()), Unit::named(name));
        }
        assert_eq!(Unit::named("fortnight"), None);
        assert_eq!(Unit::Minute.times(5), Duration::from_secs(300));
        assert_eq!(Unit::Month.times(1), Duration::from_secs(2_592_000));
        assert_eq!(Unit::Year.times(1), Duration::from_secs(31_536_000));
        assert_eq!(Unit::Year.most(), 10);
    }
}
