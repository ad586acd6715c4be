//! Token bucket: tokens flow in at the rate until the bucket is full; a call takes its cost out, or is denied.
//!
//! **State.** What is *missing* from a full bucket, in units (see [`Limit`]), when that was so, and the
//! units of a token then. Keeping what is missing rather than what is there makes all zeros a full bucket,
//! and lets usage stand when the burst changes. More than the burst may be missing after the burst was
//! lowered: the bucket is in debt, for at most one more burst.
//!
//! **Invariant.** In any interval at most `burst + rate x time` is granted.
//!
//! **Rounding.** Refill is exact: a microsecond brings a whole number of units. Waits round up, remaining
//! rounds down, and when the rate changes a part of a used token becomes a whole one.
//!
//! **Time** never runs backwards: at a time before the last one seen, nothing has flowed in since, and the
//! step is added to the waits.
//!
//! Source: J. Turner, "New directions in communications (or which way to the information age?)", IEEE
//! Communications Magazine 24(10), 1986, as a meter. Twin: `token_bucket.lua`.

use super::Algorithm;
use crate::limit::{Cost, Decision, Limit, Reason, State, Timestamp, Want};
use std::time::Duration;

pub(super) const TOKEN_BUCKET: Algorithm =
    Algorithm { name: "token_bucket", tag: 1, decide, charge, refund, lua: include_str!("token_bucket.lua") };

fn decide(limit: &Limit, state: &State, now: Timestamp, want: Want) -> Decision {
    let (missing, step) = missing(limit, state, now);
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
    }
}

fn charge(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) {
    let (missing, step) = missing(limit, state, now);
    *state = [missing + units(limit, cost), now.as_micros() + step, limit.scale().get()];
}

fn refund(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) -> Cost {
    let (missing, step) = missing(limit, state, now);
    let credited = Cost::new(cost.get().min(missing / limit.scale()));
    *state = [missing - units(limit, credited), now.as_micros() + step, limit.scale().get()];
    credited
}

/// What is missing now, in units of this limit, and how far the state is ahead of `now`, in microseconds.
fn missing(limit: &Limit, &[missing, at, scale]: &State, now: Timestamp) -> (u64, u64) {
    let missing = match missing.checked_div(scale) {
        Some(whole) if scale != limit.scale().get() => {
            let used = whole + u64::from(missing % scale > 0);
            used.saturating_mul(limit.scale().get())
        }
        _ => missing,
    };
    let missing = missing.min(2 * limit.capacity());

    let elapsed = now.as_micros().saturating_sub(at);
    let step = at.saturating_sub(now.as_micros());
    if elapsed >= missing.div_ceil(limit.refill().get()) {
        (0, step)
    } else {
        (missing - elapsed * limit.refill().get(), step)
    }
}

fn units(limit: &Limit, cost: Cost) -> u64 {
    cost.get().saturating_mul(limit.scale().get())
}

/// The time in which so many units flow in, from a time `step` microseconds before the state's.
fn flow(limit: &Limit, units: u64, step: u64) -> Duration {
    match units.div_ceil(limit.refill().get()) {
        0 => Duration::ZERO,
        micros => Duration::from_micros(step.saturating_add(micros)),
    }
}
