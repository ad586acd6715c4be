//! A count within a window. Fixed window, sliding window and sliding log differ in what they count and in when
//! it ends; the decision is the same.
//!
//! Twin: `window.lua`.

use crate::limit::{Cost, Decision, Limit, MAX_UNITS, Reason, Want, micros};
use std::time::Duration;

/// The length of the window, in microseconds.
pub(super) fn length(limit: &Limit) -> u64 {
    micros(limit.window())
}

/// What is used when so many tokens are taken; forced ones may be any number, and the count stays exact.
pub(super) fn taken(used: u64, cost: Cost) -> u64 {
    used.saturating_add(cost.get()).min(MAX_UNITS)
}

/// Decides by the tokens used. A denied call would fit after `retry_after`; with so many granted the bucket is
/// as good as new after `reset_after`. Both are in microseconds.
pub(super) fn decide(
    limit: &Limit,
    used: u64,
    want: Want,
    retry_after: impl FnOnce() -> u64,
    reset_after: impl FnOnce(u64) -> u64,
) -> Decision {
    let remaining = limit.burst().saturating_sub(used);
    let in_debt = used > limit.burst();

    if in_debt || remaining < want.at_least.get() {
        return Decision {
            denied: Some(Reason::OverLimit),
            granted: Cost::ZERO,
            remaining,
            retry_after: Duration::from_micros(retry_after()),
            reset_after: Duration::from_micros(reset_after(0)),
            wait: Duration::ZERO,
            replaced: false,
            degraded: false,
            gateways: 0,
        };
    }
    let granted = remaining.min(want.at_most.get());
    Decision {
        denied: None,
        granted: Cost::new(granted),
        remaining: remaining - granted,
        retry_after: Duration::ZERO,
        reset_after: Duration::from_micros(reset_after(granted)),
        wait: Duration::ZERO,
        replaced: false,
        degraded: false,
        gateways: 0,
    }
}
