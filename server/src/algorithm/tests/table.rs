//! Step tables that read like a trace: at which microsecond, what is done, what comes of it.

use crate::algorithm::Algorithm;
use crate::limit::{Cost, Limit, Rate, State, Timestamp, Want, micros};
use std::time::Duration;

pub(in crate::algorithm) const MS: u64 = 1000;
pub(in crate::algorithm) const S: u64 = 1000 * MS;

/// `count` tokens each `period` microseconds, at most `burst` at once.
pub(in crate::algorithm) fn per(count: u64, period: u64, burst: u64) -> Limit {
    Limit::new(Rate::new(count, Duration::from_micros(period)).unwrap(), burst).unwrap()
}

pub(in crate::algorithm) enum Do {
    /// A call of that cost.
    Call(u64),
    /// So many tokens are given back, and the bucket is looked at.
    Refund(u64),
    /// Another limit holds from now on, and the bucket is looked at.
    Change(Limit),
}

#[derive(Debug, PartialEq)]
pub(in crate::algorithm) enum Then {
    /// Allowed, and so many tokens remain.
    Left(u64),
    /// Allowed after so many microseconds, and so many tokens remain.
    Waits(u64, u64),
    /// So many tokens remain, too few; the call fits after so many microseconds.
    Denied(u64, u64),
}

pub(in crate::algorithm) fn table(algorithm: &Algorithm, mut limit: Limit, steps: &[(u64, Do, Then)]) {
    let mut state = State::default();
    for (i, (at, act, then)) in steps.iter().enumerate() {
        let now = Timestamp::from_micros(*at);
        let cost = match act {
            Do::Call(cost) => *cost,
            Do::Refund(tokens) => {
                (algorithm.refund)(&limit, &mut state, now, Cost::new(*tokens));
                0
            }
            Do::Change(to) => {
                limit = *to;
                0
            }
        };
        let decision = (algorithm.decide)(&limit, &state, now, Want::exactly(Cost::new(cost)));
        if decision.granted > Cost::ZERO {
            (algorithm.charge)(&limit, &mut state, now, decision.granted);
        }
        let came = match (decision.allowed(), micros(decision.wait)) {
            (true, 0) => Then::Left(decision.remaining),
            (true, wait) => Then::Waits(wait, decision.remaining),
            (false, wait) => {
                assert_eq!(wait, 0, "{algorithm:?}, step {}: nobody waits for a denied call", i + 1);
                Then::Denied(decision.remaining, micros(decision.retry_after))
            }
        };
        assert_eq!(came, *then, "{algorithm:?}, step {} at {at} us", i + 1);
    }
}
