//! Sliding window: two counters that estimate a window ending now: all of the current fixed window, and of the
//! previous one the share that the sliding window still overlaps, as if its calls had come evenly.
//!
//! With a limit of 100 a minute, 70 in the previous minute, 30 in this one and 40 % of it over, the estimate
//! is 30 + 70 x 60 % = 72, and a call is allowed.
//!
//! **State.** When something was last granted, how much in that window, and how much in the one before.
//!
//! **Invariant.** In any interval at most `burst + rate x time` is granted. Against a log of every call the
//! estimate can be wrong by what the previous window's calls were uneven: within a window up to twice the
//! burst may pass where a log lets the burst pass, and a call may be denied that a log allows.
//!
//! **Rounding.** The share of the previous window rounds up, so under steady overload about `(burst - 1) / burst`
//! of the rate passes: little to lose at a burst of 100, half of it at 1 or 2. Tokens given back are taken off the current
//! window only.
//!
//! **Time** never runs backwards, as in the fixed window. Under a changed window what is counted stays with
//! the moment of the last grant.
//!
//! Source: "How we built rate limiting capable of scaling to millions of domains", Cloudflare, 2017. Twin:
//! `sliding_window.lua`.

use super::{Algorithm, Lending, window};
use crate::limit::{Cost, Decision, Limit, LimitError, MAX_UNITS, State, Timestamp, Want};

pub(super) const SLIDING_WINDOW: Algorithm = Algorithm {
    name: "sliding_window",
    tag: 5,
    check,
    lending: Lending::Freely,
    queues: false,
    decide,
    charge,
    refund,
    lua: include_str!("sliding_window.lua"),
};

/// Counts are multiplied by lengths, which must stay exact.
fn check(limit: &Limit) -> Result<(), LimitError> {
    let fits = |burst: u64| {
        let length = (burst * limit.scale().get()).div_ceil(limit.refill().get());
        burst.saturating_mul(length) <= MAX_UNITS
    };
    let burst = limit.burst();
    if burst.saturating_mul(window::length(limit)) <= MAX_UNITS {
        return Ok(());
    }
    if !limit.flows() {
        return Err(LimitError::Burst { burst, most: MAX_UNITS / window::length(limit) });
    }
    // The length grows with the burst, so the bound is about a root; the length rounds up, so just below it.
    let root = (MAX_UNITS / limit.scale() * limit.refill().get()).isqrt();
    let most = (0..=root).rev().find(|&burst| fits(burst)).unwrap_or(0);
    Err(LimitError::Burst { burst, most })
}

fn decide(limit: &Limit, state: &State, now: Timestamp, want: Want) -> Decision {
    let seen = Seen::new(limit, state, now);
    let length = window::length(limit);
    let rest = length - seen.at % length;
    let used = seen.current + (seen.previous * rest).div_ceil(length);
    let step = seen.at - now.as_micros();

    let retry_after = || {
        let free = limit.burst().saturating_sub(want.at_least.get());
        // How much of a window may be left over it so that no more than `room` of `count` is counted.
        let left = |room: u64, count: u64| (room * length).checked_div(count).unwrap_or(length).min(length);
        step + match free.checked_sub(seen.current) {
            Some(room) => rest - left(room, seen.previous).min(rest),
            None => rest + length - left(free, seen.current),
        }
    };
    let reset_after = |granted| match (seen.current + granted, seen.previous) {
        (0, 0) => 0,
        (0, _) => step + rest,
        _ => step + rest + length,
    };
    window::decide(limit, used, want, retry_after, reset_after)
}

fn charge(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) {
    let seen = Seen::new(limit, state, now);
    let current = window::taken(seen.current, cost).min(most(limit));
    *state = State::Words([seen.at, current, seen.previous, 0, 0]);
}

fn refund(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) -> Cost {
    let seen = Seen::new(limit, state, now);
    // As in a level, nothing is given back to what counts more than this limit can tell.
    let credited = if seen.is_cut { 0 } else { cost.get().min(seen.current) };
    if credited > 0 {
        *state = State::Words([seen.at, seen.current - credited, seen.previous, 0, 0]);
    }
    Cost::new(credited)
}

/// What may be counted: under a larger limit or by force it was more, but it still has to be multiplied, and
/// it is gone after two windows.
fn most(limit: &Limit) -> u64 {
    (2 * MAX_UNITS) / window::length(limit)
}

/// What is counted now, and the bucket's time.
struct Seen {
    at: u64,
    current: u64,
    previous: u64,
    is_cut: bool,
}

impl Seen {
    fn new(limit: &Limit, state: &State, now: Timestamp) -> Self {
        let [last, current, previous, ..] = state.words();
        let at = last.max(now.as_micros());
        let length = window::length(limit);
        let most = most(limit);
        let is_cut = current.max(previous) > most;
        let (current, previous) = (current.min(most), previous.min(most));
        let (current, previous) = match at / length - last / length {
            0 => (current, previous),
            1 => (0, current),
            _ => (0, 0),
        };
        let at = if current + previous > 0 { at } else { now.as_micros() };
        Self { at, current, previous, is_cut }
    }
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

    /// 70 in the previous minute, 30 in this one, 40 % of it over: the estimate is 72.
    #[test]
    fn the_worked_example() {
        table(
            &SLIDING_WINDOW,
            per(100, 60 * S, 100),
            &[
                (30 * S, Call(70), Left(30)),
                (60 * S, Call(30), Left(0)),
                (84 * S, Call(0), Left(28)),
                (84 * S, Call(1), Left(27)),
                (84 * S, Call(28), Denied(27, 857_143)),
                (84 * S + 857_142, Call(28), Denied(27, 1)),
                (84 * S + 857_143, Call(28), Left(0)),
            ],
        );
    }

    #[test]
    fn a_full_window_is_waited_out_in_the_next() {
        table(
            &SLIDING_WINDOW,
            per(10, S, 10),
            &[
                (900 * MS, Call(10), Left(0)),
                // Half of the ten have to be gone, half through the next second.
                (900 * MS, Call(5), Denied(0, 600 * MS)),
                (S, Call(1), Denied(0, 100 * MS)),
                (1500 * MS, Call(5), Left(0)),
                (2 * S, Call(0), Left(5)),
                (3 * S, Call(10), Left(0)),
            ],
        );
    }

    #[test]
    fn a_count_too_large_for_a_long_window_is_owed_and_not_forgiven_there() {
        let (short, long) = (per(1000, S, 1000), per(1, 30 * 86_400 * S, 41));
        table(
            &SLIDING_WINDOW,
            short,
            &[
                (0, Call(500), Left(500)),
                (0, Change(long), Denied(0, 160_673_142_857_143)),
                (0, Refund(9), Denied(0, 160_673_142_857_143)),
                (0, Change(short), Left(500)),
            ],
        );
    }

    /// Nineteen within a second: the ten came late in their window, and are counted as if they had come evenly.
    #[test]
    fn up_to_twice_the_burst_may_pass_in_a_window() {
        table(
            &SLIDING_WINDOW,
            per(10, S, 10),
            &[
                (S - 1, Call(10), Left(0)),
                (1900 * MS, Call(9), Left(0)),
                (1900 * MS, Call(1), Denied(0, 100 * MS)),
                (2 * S, Call(1), Left(0)),
            ],
        );
    }

    #[test]
    fn what_is_given_back_is_taken_off_the_current_window() {
        table(
            &SLIDING_WINDOW,
            per(10, S, 10),
            &[
                (0, Call(6), Left(4)),
                (0, Refund(2), Left(6)),
                (1500 * MS, Call(3), Left(5)),
                (1500 * MS, Refund(9), Left(8)),
                (1500 * MS, Change(per(20, S, 20)), Left(18)),
                (1500 * MS, Change(per(1, S, 1)), Denied(0, 250 * MS)),
                // A clock behind waits for its own step as well.
                (1400 * MS, Call(0), Denied(0, 350 * MS)),
            ],
        );
    }
}
