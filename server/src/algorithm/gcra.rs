//! GCRA, the generic cell rate algorithm: each token moves a *theoretical arrival time* (TAT) on by an
//! increment of `1 / rate`; a call may come before it by a tolerance of `burst / rate` at most, its own
//! increments included.
//!
//! **State.** The TAT in whole microseconds, the part of a microsecond above it, when it was written, and the
//! rate then, as refill and scale (see [`Limit`]). The part is counted in units, `refill` to the microsecond,
//! so that increments such as a third of a second add up exactly. A textbook keeps the TAT alone; the rest is
//! for changed rules: what was used is kept in tokens, so a raised rate helps at once.
//!
//! **Invariant.** In any interval at most `burst + rate x time` is granted. `TAT = max(TAT, now)` before it
//! moves, so an idle bucket gives exactly its burst; a refused call does not move it.
//!
//! **Equal to the token bucket** with the same limit, decision by decision: `TAT - now` is the time in which
//! what is missing there comes back. A property says so.
//!
//! **Time** and **rounding** are those of the token bucket.
//!
//! Source: ITU-T I.371, annex A, the virtual scheduling algorithm. Twin: `gcra.lua`.

use super::{Algorithm, Lending, any_flow, level};
use crate::limit::{Cost, Decision, Limit, LimitError, MAX_UNITS, State, Timestamp, Want, micros};

pub(super) const GCRA: Algorithm = Algorithm {
    name: "gcra",
    tag: 6,
    check,
    lending: Lending::Freely,
    queues: false,
    decide,
    charge,
    refund,
    lua: include_str!("gcra.lua"),
};

/// A TAT twice the window ahead of now still has to be exact.
fn check(limit: &Limit) -> Result<(), LimitError> {
    any_flow(limit)?;
    let longest = MAX_UNITS / 2;
    if micros(limit.window()) <= longest {
        return Ok(());
    }
    let most = u128::from(longest) * u128::from(limit.refill().get()) / u128::from(limit.scale().get());
    let most = u64::try_from(most).unwrap_or(u64::MAX);
    Err(LimitError::Burst { burst: limit.burst(), most })
}

fn decide(limit: &Limit, state: &State, now: Timestamp, want: Want) -> Decision {
    let (ahead, step) = ahead(limit, state, now);
    level::decide(limit, ahead, step, want)
}

fn charge(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) {
    let (ahead, step) = ahead(limit, state, now);
    *state = put(limit, level::taken(limit, ahead, cost), now, step);
}

fn refund(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) -> Cost {
    if written(limit, state) > level::owed(limit) {
        return Cost::ZERO;
    }
    let (ahead, step) = ahead(limit, state, now);
    let credited = level::room(limit, ahead, cost);
    if credited > Cost::ZERO {
        *state = put(limit, ahead.saturating_sub(level::units(limit, credited)), now, step);
    }
    credited
}

/// How far the TAT is ahead of now, in units of this limit, and how far the state is, in microseconds.
fn ahead(limit: &Limit, state: &State, now: Timestamp) -> (u64, u64) {
    let [_, _, at, ..] = state.words();
    // At zero TAT = max(TAT, now), and then nothing is left to remember.
    level::missing(limit, written(limit, state), at, now)
}

/// How far the TAT was ahead when the state was written, in units of this limit.
fn written(limit: &Limit, state: &State) -> u64 {
    let [tat, part, at, refill, scale] = state.words();
    level::rescaled(limit, tat.saturating_sub(at) * refill + part, scale)
}

fn put(limit: &Limit, ahead: u64, now: Timestamp, step: u64) -> State {
    let at = now.as_micros() + step;
    let refill = limit.refill();
    State::Words([at + ahead / refill, ahead % refill, at, refill.get(), limit.scale().get()])
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
    fn an_idle_bucket_gives_exactly_its_burst() {
        table(
            &GCRA,
            per(10, S, 3),
            &[
                (0, Call(3), Left(0)),
                (0, Call(1), Denied(0, 100 * MS)),
                (3600 * S, Call(3), Left(0)),
                // A refused call does not move the TAT.
                (3600 * S, Call(1), Denied(0, 100 * MS)),
                (3600 * S, Call(3), Denied(0, 300 * MS)),
                (3600 * S + 100 * MS, Call(1), Left(0)),
            ],
        );
    }

    #[test]
    fn thirds_of_a_second_add_up_to_whole_ones() {
        table(
            &GCRA,
            per(3, S, 1),
            &[
                (0, Call(1), Left(0)),
                (0, Call(1), Denied(0, 333_334)),
                (333_333, Call(1), Denied(0, 1)),
                (333_334, Call(1), Left(0)),
                (666_667, Call(1), Denied(0, 1)),
                (666_668, Call(1), Left(0)),
            ],
        );
        table(
            &GCRA,
            per(3, S, 3),
            &[(0, Call(3), Left(0)), (S - 1, Call(3), Denied(2, 1)), (S, Call(3), Left(0))],
        );
    }

    #[test]
    fn usage_stays_in_tokens_when_the_rate_changes() {
        table(
            &GCRA,
            per(1, 60 * S, 5),
            &[
                (0, Call(5), Left(0)),
                (0, Change(per(100, 60 * S, 100)), Left(95)),
                (0, Change(per(1, S, 4)), Denied(0, S)),
                (0, Refund(2), Left(1)),
                (2 * S, Call(3), Left(0)),
                (S, Call(1), Denied(0, 2 * S)),
            ],
        );
    }
}
