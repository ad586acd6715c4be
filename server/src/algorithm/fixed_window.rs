//! Fixed window: a counter that starts anew at each multiple of the window since 1970.
//!
//! **State.** When something was last granted, and how much in that window.
//!
//! **Invariant, a weaker one.** In each window at most `burst` is granted; around the border of two windows
//! that can be twice the burst in a moment, so in any interval it is `2 x burst + rate x time`. Who minds takes
//! another algorithm; this one is for numbers that match those of other services, and calendars.
//!
//! **Rounding.** A window that is no whole number of microseconds is a part of one longer.
//!
//! **Time** never runs backwards: at a time before the last grant the window is still that of the grant.
//!
//! Source: folklore. Twin: `fixed_window.lua`.

use super::{Algorithm, Lending, any_limit, window};
use crate::limit::{Cost, Decision, Limit, State, Timestamp, Want};

pub(super) const FIXED_WINDOW: Algorithm = Algorithm {
    name: "fixed_window",
    tag: 3,
    check: any_limit,
    lending: Lending::UntilReset,
    decide,
    charge,
    refund,
    lua: include_str!("fixed_window.lua"),
};

fn decide(limit: &Limit, state: &State, now: Timestamp, want: Want) -> Decision {
    let (used, at) = used(limit, state, now);
    let length = window::length(limit);
    let end = at - at % length + length;
    let rest = end - now.as_micros();
    window::decide(limit, used, want, || rest, |granted| if used + granted == 0 { 0 } else { rest })
}

fn charge(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) {
    let (used, at) = used(limit, state, now);
    *state = State::Words([at, used + cost.get(), 0, 0, 0]);
}

fn refund(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) -> Cost {
    let (used, at) = used(limit, state, now);
    let credited = cost.get().min(used);
    if credited > 0 {
        *state = State::Words([at, used - credited, 0, 0, 0]);
    }
    Cost::new(credited)
}

/// What is used in the window that it is now, and the bucket's time.
fn used(limit: &Limit, state: &State, now: Timestamp) -> (u64, u64) {
    let [last, used, ..] = state.words();
    let at = last.max(now.as_micros());
    let length = window::length(limit);
    if used > 0 && last / length == at / length { (used, at) } else { (0, now.as_micros()) }
}
