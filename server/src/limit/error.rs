//! Why a limit can not be.

use std::time::Duration;

/// A rate or a burst that can not be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// The rate is zero.
    #[error("a rate of 0 never lets anything pass; expected at least 1 a period")]
    NoRate,
    /// The period is out of bounds.
    #[error("a period of {}; expected more than 0 and at most {}", told(*.period), told(*.longest))]
    Period {
        /// What was asked for.
        period: Duration,
        /// The bound.
        longest: Duration,
    },
    /// The rate is above the bound.
    #[error("a rate of {per_second} a second; expected at most {most} a second")]
    TooFast {
        /// What was asked for.
        per_second: u128,
        /// The bound.
        most: u64,
    },
    /// The burst is zero.
    #[error("a burst of 0 never lets anything pass; expected at least 1")]
    NoBurst,
    /// The burst is above the bound for this rate.
    #[error("a burst of {burst}; expected at most {most} at this rate")]
    Burst {
        /// What was asked for.
        burst: u64,
        /// The bound.
        most: u64,
    },
    /// A limit of a window, for an algorithm with a level that flows.
    #[error("so many tokens each such a window can only be counted; expected an algorithm with windows")]
    NoFlow,
    /// The burst is above what an algorithm that remembers every grant takes.
    #[error("a burst of {burst}; a log remembers every grant and takes at most {most}: use sliding_window")]
    Log {
        /// What was asked for.
        burst: u64,
        /// The bound.
        most: u64,
    },
}

/// Whole days as such: years and months of the calendar are none of them.
fn told(span: Duration) -> String {
    const DAY: u64 = 86_400;
    match (span.as_secs() / DAY, span.as_secs() % DAY, span.subsec_nanos()) {
        (days, 0, 0) if days > 0 => format!("{days} days"),
        _ => humantime::format_duration(span).to_string(),
    }
}
