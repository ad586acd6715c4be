//! A level that flows: what is missing from a full bucket comes back at the rate. Token bucket, leaky bucket
//! and GCRA differ in what they remember of it; the decision is the same.
//!
//! Twin: `level.lua`.

use crate::limit::{Cost, Decision, EXACT, Limit, Reason, Timestamp, Want};
use std::time::Duration;

/// Decides by what is missing now, in units, in a state that is `step` microseconds ahead of the clock.
pub(super) fn decide(limit: &Limit, missing: u64, step: u64, want: Want) -> Decision {
    let tokens = limit.capacity().saturating_sub(missing) / limit.scale();
    let in_debt = missing > limit.capacity();

    if in_debt || tokens < want.at_least.get() {
        let room = limit.capacity().saturating_sub(units(limit, want.at_least));
        return Decision {
            denied: Some(Reason::OverLimit),
            granted: Cost::ZERO,
            remaining: tokens,
            retry_after: flow(limit, missing.saturating_sub(room), step),
            reset_after: flow(limit, missing, step),
            wait: Duration::ZERO,
            replaced: false,
            degraded: false,
            gateways: 0,
        };
    }
    let granted = Cost::new(tokens.min(want.at_most.get()));
    Decision {
        denied: None,
        granted,
        remaining: tokens - granted.get(),
        retry_after: Duration::ZERO,
        reset_after: flow(limit, missing + units(limit, granted), step),
        wait: Duration::ZERO,
        replaced: false,
        degraded: false,
        gateways: 0,
    }
}

/// So many tokens in units.
pub(super) fn units(limit: &Limit, cost: Cost) -> u64 {
    cost.get().saturating_mul(limit.scale().get())
}

/// What was missing under a scale, in units of this limit: a part of a used token becomes a whole one.
pub(super) fn rescaled(limit: &Limit, missing: u64, scale: u64) -> u64 {
    let missing = match missing.checked_div(scale) {
        Some(whole) if scale != limit.scale().get() => {
            let used = whole + u64::from(!missing.is_multiple_of(scale));
            used.saturating_mul(limit.scale().get())
        }
        _ => missing,
    };
    // More than can be exact is more than anybody may owe.
    missing.min(EXACT)
}

/// What may be missing at most: nobody owes more than another burst. A state in which more is missing was
/// written under a larger limit, maybe one that another instance still holds; nothing is given back to it
/// here, or what it owes there would be forgiven.
pub(super) fn owed(limit: &Limit) -> u64 {
    2 * limit.capacity()
}

/// What is missing at `now` if so much was at `at`, and how far `at` is ahead of `now`, in microseconds.
pub(super) fn missing(limit: &Limit, written: u64, at: u64, now: Timestamp) -> (u64, u64) {
    let missing = written.min(owed(limit));
    let elapsed = now.as_micros().saturating_sub(at);
    let step = at.saturating_sub(now.as_micros());
    let flowed = elapsed.saturating_mul(limit.refill().get());
    // Full is as good as new: it does not remember when it became so.
    if flowed >= missing { (0, 0) } else { (missing - flowed, step) }
}

/// What is missing when so many tokens are taken from what is there or, forced, from what is not.
pub(super) fn taken(limit: &Limit, missing: u64, cost: Cost) -> u64 {
    missing.saturating_add(units(limit, cost)).min(owed(limit))
}

/// How many of the tokens given back find room. A part of a missing token makes room for a whole one: the
/// bucket is full then, and no more than full.
pub(super) fn room(limit: &Limit, missing: u64, cost: Cost) -> Cost {
    Cost::new(cost.get().min(missing.div_ceil(limit.scale().get())))
}

/// The time in which so many units flow in, from a time `step` microseconds before the state's.
pub(super) fn flow(limit: &Limit, units: u64, step: u64) -> Duration {
    match units.div_ceil(limit.refill().get()) {
        0 => Duration::ZERO,
        micros => Duration::from_micros(step.saturating_add(micros)),
    }
}
