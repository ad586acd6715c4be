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
use super::{Algorithm, Lending, any_limit, level, token_bucket};
use crate::limit::{Decision, Limit, State, Timestamp, Want};

pub(super) const LEAKY_BUCKET: Algorithm = Algorithm {
    name: "leaky_bucket",
    tag: 2,
    check: any_limit,
    // A chunk would jump the queue.
    lending: Lending::Never,
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
