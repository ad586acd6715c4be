//! Leaky bucket: a queue that drains at the rate. A call goes to its end and has its turn when all before it
//! have drained; it is denied when the queue is full.
//!
//! It is the token bucket seen from the other side: what is missing there is what stands in the queue here.
//! An allowed call is told how long to [`wait`](Decision::wait); where nobody can wait it is the same bucket
//! as a meter.
//!
//! **State**, **invariant**, **rounding** and **time** are those of the token bucket. A call's own cost is not
//! part of its wait, and waits round up.
//!
//! Source: A. S. Tanenbaum, "Computer Networks", the leaky bucket as a queue. Twin: `leaky_bucket.lua`.

use super::token_bucket::{charge, missing, refund};
use super::{Algorithm, Lending, any_flow, level, token_bucket};
use crate::limit::{Decision, Limit, State, Timestamp, Want};

pub(super) const LEAKY_BUCKET: Algorithm = Algorithm {
    name: "leaky_bucket",
    tag: 2,
    check: any_flow,
    // A chunk would jump the queue.
    lending: Lending::Never,
    queues: true,
    decide,
    charge,
    refund,
    lua: include_str!("leaky_bucket.lua"),
};

fn decide(limit: &Limit, state: &State, now: Timestamp, want: Want) -> Decision {
    let decision = token_bucket::decide(limit, state, now, want);
    if !decision.allowed() {
        return decision;
    }
    let (queued, step) = missing(limit, state, now);
    Decision { wait: level::flow(limit, queued, step), ..decision }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::tests::table::{
        Do::{Call, Change, Refund},
        MS, S,
        Then::{Denied, Left, Waits},
        per, table,
    };

    #[test]
    fn calls_queue_until_the_queue_is_full() {
        table(
            &LEAKY_BUCKET,
            per(10, S, 3),
            &[
                (0, Call(1), Left(2)),
                (0, Call(1), Waits(100 * MS, 1)),
                (0, Call(1), Waits(200 * MS, 0)),
                (0, Call(1), Denied(0, 100 * MS)),
                (99_999, Call(1), Denied(0, 1)),
                (100 * MS, Call(1), Waits(200 * MS, 0)),
                // Idle for a second: the queue is empty, and no longer than it was.
                (S + 100 * MS, Call(3), Left(0)),
                (S + 100 * MS, Call(1), Denied(0, 100 * MS)),
            ],
        );
    }

    #[test]
    fn ones_own_cost_is_not_waited_for_but_that_of_the_others_is() {
        table(
            &LEAKY_BUCKET,
            per(10, S, 10),
            &[
                (0, Call(4), Left(6)),
                (0, Call(5), Waits(400 * MS, 1)),
                (0, Call(2), Denied(1, 100 * MS)),
                (50 * MS, Call(0), Waits(850 * MS, 1)),
                // Whoever leaves the queue makes room.
                (50 * MS, Refund(5), Waits(350 * MS, 6)),
                (50 * MS, Call(1), Waits(350 * MS, 5)),
            ],
        );
    }

    #[test]
    fn a_shorter_queue_is_in_debt_and_a_clock_behind_is_waited_for() {
        table(
            &LEAKY_BUCKET,
            per(1, S, 4),
            &[
                (10 * S, Call(4), Left(0)),
                (10 * S, Change(per(1, S, 3)), Denied(0, S)),
                (11 * S, Call(0), Waits(3 * S, 0)),
                (9 * S, Call(1), Denied(0, 3 * S)),
                (12 * S, Call(1), Waits(2 * S, 0)),
            ],
        );
    }
}
