//! Fixed window: a counter that starts anew at each multiple of the window since 1970.
//!
//! **State.** When something was last granted, and how much in that window.
//!
//! **Invariant, a weaker one.** In each window at most `burst` is granted; around the border of two windows
//! that can be twice the burst in a moment, so in any interval it is `2 x burst + rate x time`. Who minds takes
//! another algorithm; this one is for numbers that match those of other services, and calendars.
//!
//! **Debt** of a forced charge is counted in full, and forgotten with its window.
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
    queues: false,
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
    *state = State::Words([at, window::taken(used, cost), 0, 0, 0]);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::tests::table::{
        Do::{Call, Change, Refund},
        MS, S,
        Then::{Denied, Left},
        per, table,
    };

    #[test]
    fn the_border_of_a_window_gives_a_double_dose() {
        table(
            &FIXED_WINDOW,
            per(3, S, 3),
            &[
                (900 * MS, Call(3), Left(0)),
                (900 * MS, Call(1), Denied(0, 100 * MS)),
                (S - 1, Call(1), Denied(0, 1)),
                // Six within a tenth of a second.
                (S, Call(3), Left(0)),
                (S, Call(1), Denied(0, S)),
                (3600 * S, Call(3), Left(0)),
                (3600 * S, Call(1), Denied(0, S)),
            ],
        );
    }

    #[test]
    fn what_is_given_back_is_for_this_window_only() {
        table(
            &FIXED_WINDOW,
            per(5, S, 5),
            &[
                (0, Call(4), Left(1)),
                (500 * MS, Refund(2), Left(3)),
                (500 * MS, Refund(9), Left(5)),
                (600 * MS, Call(5), Left(0)),
                (S, Refund(5), Left(5)),
                (S, Call(5), Left(0)),
            ],
        );
    }

    #[test]
    fn a_changed_limit_holds_at_once_and_a_clock_behind_stays_in_the_window() {
        table(
            &FIXED_WINDOW,
            per(5, S, 5),
            &[
                (10 * S, Call(4), Left(1)),
                (10 * S, Change(per(10, S, 10)), Left(6)),
                (10 * S, Change(per(4, S, 4)), Left(0)),
                (10 * S, Change(per(3, S, 3)), Denied(0, S)),
                (10 * S, Call(1), Denied(0, S)),
                (8 * S, Call(1), Denied(0, 3 * S)),
                (11 * S, Call(3), Left(0)),
            ],
        );
    }
}
