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
//! step is added to the waits. A changed rate counts from the last charge on, because a state does not know
//! when the rule changed.
//!
//! Source: J. Turner, "New directions in communications (or which way to the information age?)", IEEE
//! Communications Magazine 24(10), 1986, as a meter. Twin: `token_bucket.lua`.

use super::{Algorithm, Lending, any_flow, level};
use crate::limit::{Cost, Decision, Limit, State, Timestamp, Want};

pub(super) const TOKEN_BUCKET: Algorithm = Algorithm {
    name: "token_bucket",
    tag: 1,
    check: any_flow,
    lending: Lending::Freely,
    queues: false,
    decide,
    charge,
    refund,
    lua: include_str!("token_bucket.lua"),
};

pub(super) fn decide(limit: &Limit, state: &State, now: Timestamp, want: Want) -> Decision {
    let (missing, step) = missing(limit, state, now);
    level::decide(limit, missing, step, want)
}

pub(super) fn charge(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) {
    let (missing, step) = missing(limit, state, now);
    *state = put(limit, level::taken(limit, missing, cost), now, step);
}

pub(super) fn refund(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) -> Cost {
    if written(limit, state) > level::owed(limit) {
        return Cost::ZERO;
    }
    let (missing, step) = missing(limit, state, now);
    let credited = level::room(limit, missing, cost);
    if credited > Cost::ZERO {
        *state = put(limit, missing.saturating_sub(level::units(limit, credited)), now, step);
    }
    credited
}

/// What is missing now, in units of this limit, and how far the state is ahead of `now`, in microseconds.
pub(super) fn missing(limit: &Limit, state: &State, now: Timestamp) -> (u64, u64) {
    let [_, at, ..] = state.words();
    level::missing(limit, written(limit, state), at, now)
}

/// What was missing when the state was written, in units of this limit.
fn written(limit: &Limit, state: &State) -> u64 {
    let [missing, _, scale, ..] = state.words();
    level::rescaled(limit, missing, scale)
}

fn put(limit: &Limit, missing: u64, now: Timestamp, step: u64) -> State {
    State::Words([missing, now.as_micros() + step, limit.scale().get(), 0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::tests::model::{self, Rule};
    use crate::algorithm::tests::table::{Do, MS, S, Then, per, table};
    use crate::algorithm::tests::trace::{Act, Bucket, answer, limits, new, starts, unsteady};
    use crate::limit::micros;
    use Do::{Call, Change, Refund};
    use Then::{Denied, Left};
    use proptest::prelude::*;

    fn trace(limit: Limit, steps: &[(u64, Do, Then)]) {
        table(&TOKEN_BUCKET, limit, steps);
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        trace(
            per(10, S, 3),
            &[
                (0, Call(1), Left(2)),
                (0, Call(1), Left(1)),
                (0, Call(1), Left(0)),
                (0, Call(1), Denied(0, 100 * MS)),
                (99_999, Call(1), Denied(0, 1)),
                (100_000, Call(1), Left(0)),
                (150_000, Call(1), Denied(0, 50 * MS)),
                (200_000, Call(1), Left(0)),
            ],
        );
    }

    #[test]
    fn a_token_that_comes_between_two_microseconds_is_there_at_the_later() {
        trace(
            per(3, S, 3),
            &[
                (0, Call(3), Left(0)),
                (0, Call(1), Denied(0, 333_334)),
                (333_333, Call(1), Denied(0, 1)),
                (333_334, Call(0), Left(1)),
                // Nothing was rounded away: three whole tokens after a whole second.
                (999_999, Call(3), Denied(2, 1)),
                (S, Call(3), Left(0)),
            ],
        );
    }

    #[test]
    fn idling_never_gives_more_than_the_burst() {
        trace(
            per(1, S, 5),
            &[
                (0, Call(5), Left(0)),
                (3600 * S, Call(5), Left(0)),
                (3600 * S, Call(1), Denied(0, S)),
                (3605 * S, Call(5), Left(0)),
                (3605 * S, Call(5), Denied(0, 5 * S)),
            ],
        );
    }

    #[test]
    fn a_dear_call_waits_for_all_of_its_cost_and_a_denied_one_is_free() {
        trace(
            per(100, S, 100),
            &[
                (0, Call(25), Left(75)),
                (0, Call(80), Denied(75, 50 * MS)),
                (0, Call(75), Left(0)),
                (0, Call(25), Denied(0, 250 * MS)),
                (100 * MS, Call(25), Denied(10, 150 * MS)),
                (100 * MS, Call(10), Left(0)),
                (350 * MS, Call(25), Left(0)),
            ],
        );
    }

    #[test]
    fn a_peek_is_allowed_as_long_as_there_is_no_debt() {
        trace(
            per(1, S, 2),
            &[
                (0, Call(0), Left(2)),
                (0, Call(2), Left(0)),
                (0, Call(0), Left(0)),
                (0, Change(per(1, S, 1)), Denied(0, S)),
                (999_999, Call(0), Denied(0, 1)),
                (S, Call(0), Left(0)),
                (2 * S, Call(0), Left(1)),
            ],
        );
    }

    #[test]
    fn a_changed_burst_holds_at_once_and_usage_stays() {
        trace(
            per(1, S, 10),
            &[
                (0, Call(8), Left(2)),
                (0, Change(per(1, S, 20)), Left(12)),
                (0, Change(per(1, S, 8)), Left(0)),
                (0, Change(per(1, S, 6)), Denied(0, 2 * S)),
                (0, Call(1), Denied(0, 3 * S)),
                // At most one burst of 3 is owed, not 5.
                (0, Change(per(1, S, 3)), Denied(0, 3 * S)),
                (4 * S, Call(1), Left(0)),
            ],
        );
    }

    #[test]
    fn a_changed_rate_holds_at_once_and_a_part_of_a_used_token_counts_as_one() {
        trace(
            per(1, S, 10),
            &[
                (0, Call(6), Left(4)),
                (500 * MS, Call(1), Left(3)),
                // Used are 6.5: to a rate that can not tell halves these are 7.
                (500 * MS, Change(per(1, 3, 10)), Left(3)),
                (500 * MS, Call(4), Denied(3, 3)),
                (500_002, Call(4), Denied(3, 1)),
                (500_003, Call(4), Left(0)),
            ],
        );
        trace(
            per(1, 3600 * S, 10),
            &[
                (0, Call(10), Left(0)),
                (0, Call(1), Denied(0, 3600 * S)),
                (S, Change(per(5, S, 10)), Left(5)),
                (S, Call(6), Denied(5, 200 * MS)),
            ],
        );
    }

    #[test]
    fn a_clock_that_steps_back_gives_nothing_twice() {
        trace(
            per(1, S, 2),
            &[
                (10 * S, Call(2), Left(0)),
                (7 * S, Call(1), Denied(0, 4 * S)),
                (10 * S, Call(1), Denied(0, S)),
                (11 * S, Call(1), Left(0)),
                (9 * S, Refund(1), Left(1)),
                (9 * S, Call(1), Left(0)),
                (9 * S, Call(1), Denied(0, 3 * S)),
            ],
        );
    }

    #[test]
    fn a_full_bucket_forgets_the_time() {
        trace(
            per(1, S, 2),
            &[
                (10 * S, Call(1), Left(1)),
                (10 * S, Refund(1), Left(2)),
                (5 * S, Call(2), Left(0)),
                (5 * S, Call(1), Denied(0, S)),
            ],
        );
    }

    #[test]
    fn giving_nothing_back_does_not_move_the_time() {
        trace(
            per(1, S, 2),
            &[
                (10 * S, Call(2), Left(0)),
                (11 * S, Refund(0), Left(1)),
                (10_200 * MS, Call(1), Denied(0, 800 * MS)),
            ],
        );
    }

    #[test]
    fn no_more_is_given_back_than_is_missing() {
        trace(
            per(1, S, 5),
            &[
                (0, Refund(3), Left(5)),
                (0, Call(4), Left(1)),
                (0, Refund(3), Left(4)),
                (0, Refund(3), Left(5)),
                (0, Call(5), Left(0)),
                // 4.5 are missing: there is room for five, and no more than full.
                (500 * MS, Refund(4), Left(4)),
                (500 * MS, Refund(1), Left(5)),
                (500 * MS, Call(5), Left(0)),
                (500 * MS, Call(1), Denied(0, S)),
            ],
        );
    }

    proptest! {
        /// The model knows neither units nor states: only what was taken, and fractions.
        #[test]
        fn decides_as_the_naive_model(start in starts(), limit in limits(), trace in unsteady()) {
            for mut bucket in new(start, limit).filter(|bucket| bucket.algorithm.tag == TOKEN_BUCKET.tag) {
                let mut model = model::TokenBucket::default();
                for step in &trace {
                    let decision = bucket.live(step);
                    let (rule, now) = (rule(&bucket), bucket.now.as_micros());
                    match step.act {
                        Act::Take(want) => {
                            let want = bucket.fitting(want);
                            let wanted = model.decide(rule, now, want.at_least.get(), want.at_most.get());
                            prop_assert_eq!(decision.as_ref().map(answer), Some(wanted), "{:?}", bucket);
                            if wanted.granted > 0 {
                                model.take(rule, now, wanted.granted);
                            }
                        }
                        Act::Refund(tokens) => {
                            model.give_back(rule, now, tokens);
                        }
                        Act::Change(_) | Act::Burst(_) => {}
                    }
                    prop_assert_eq!(answer(&bucket.peek()), model.decide(rule, now, 0, 0), "{:?}", bucket);
                }
            }
        }
    }

    fn rule(bucket: &Bucket) -> Rule {
        let (rate, burst) = (bucket.limit.rate(), bucket.limit.burst());
        Rule { count: rate.count(), period: micros(rate.period()), burst }
    }
}
