//! Sliding log: every grant is remembered until it is a window old, so what was granted in the window that ends
//! now is known exactly.
//!
//! **State.** The grants of the last window in order of time, each with the tokens granted until then. The
//! difference of two of these is what was granted between them, so a decision is a binary search, and a new
//! grant is put at the end.
//!
//! **Invariant.** In every window-long interval at most `burst` is granted, wherever it begins. That is the
//! strictest of all six, and within `burst + rate x time`.
//!
//! **Rounding.** Nothing is rounded but the window, which is a part of a microsecond longer where it has to be.
//!
//! **Cost.** An entry a grant, at most the burst, so the burst is bounded. Debt of a forced charge is at most
//! another burst, and kept in one entry.
//!
//! **Time** never runs backwards: at a time before the last grant it is the time of the grant. A grant that is
//! given back takes its time with it; should the clock be behind just then, what was older can be granted again.
//!
//! Source: folklore; the running totals are ours. Twin: `sliding_log.lua`, where the log is a sorted set.

use super::{Algorithm, Lending, window};
use crate::limit::{Cost, Decision, Limit, LimitError, Log, State, Timestamp, Want};

pub(super) const SLIDING_LOG: Algorithm = Algorithm {
    name: "sliding_log",
    tag: 4,
    check,
    lending: Lending::Freely,
    queues: false,
    decide,
    charge,
    refund,
    lua: include_str!("sliding_log.lua"),
};

/// The most that is remembered of one bucket.
const MOST_BURST: u64 = 10_000;

fn check(limit: &Limit) -> Result<(), LimitError> {
    match limit.burst() {
        burst if burst > MOST_BURST => Err(LimitError::Log { burst, most: MOST_BURST }),
        _ => Ok(()),
    }
}

fn decide(limit: &Limit, state: &State, now: Timestamp, want: Want) -> Decision {
    let State::Log(log) = state else { return decide(limit, &empty(), now, want) };
    let (seen, now) = (Seen::new(limit, log, now), now.as_micros());
    let length = window::length(limit);

    let retry_after = || {
        // A cost above the burst never fits; any grant that goes is as good.
        let to_go =
            (seen.used() + want.at_least.get().min(limit.burst())).saturating_sub(limit.burst()).max(1);
        let goes = log.granted.partition_point(|&(_, total)| total < seen.before + to_go);
        log.granted.get(goes).map_or(0, |&(at, _)| at + length - now)
    };
    let reset_after = |granted| match (granted, log.granted.back()) {
        (0, Some(&(last, _))) if seen.used() > 0 => last + length - now,
        (0, _) => 0,
        _ => seen.at + length - now,
    };
    window::decide(limit, seen.used(), want, retry_after, reset_after)
}

fn charge(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) {
    let mut log = taken(state);
    let seen = Seen::new(limit, &log, now);
    seen.forget_older(&mut log);
    // Nobody owes more than another burst.
    let cost = cost.get().min((2 * limit.burst()).saturating_sub(seen.used()));
    if cost > 0 {
        if seen.used() > limit.burst() {
            // In debt the last grant grows, so that there are never more of them than tokens in a burst, and one.
            log.granted.pop_back();
        }
        log.granted.push_back((seen.at, log.forgotten + seen.used() + cost));
    }
    *state = State::Log(log);
}

fn refund(limit: &Limit, state: &mut State, now: Timestamp, cost: Cost) -> Cost {
    let mut log = taken(state);
    let seen = Seen::new(limit, &log, now);
    let credited = cost.get().min(seen.used());
    if credited == 0 {
        *state = State::Log(log);
        return Cost::ZERO;
    }
    // What is older would be back if the time of the last grant goes with it.
    seen.forget_older(&mut log);
    // The latest grants are the ones that are given back.
    let total = log.forgotten + seen.used() - credited;
    let kept = log.granted.partition_point(|&(_, until)| until < total);
    let is_cut = |&(_, until): &(u64, u64)| until > total;
    log.granted.truncate(kept + usize::from(total > log.forgotten));
    if let Some(last) = log.granted.back_mut().filter(|last| is_cut(last)) {
        last.1 = total;
    }
    *state = State::Log(log);
    Cost::new(credited)
}

/// What of a log is within the window.
struct Seen {
    /// The bucket's time.
    at: u64,
    /// How many grants are older.
    older: usize,
    /// Tokens granted until the window began, and until now.
    before: u64,
    until: u64,
}

impl Seen {
    fn new(limit: &Limit, log: &Log, now: Timestamp) -> Self {
        let (last, until) = log.granted.back().copied().unwrap_or((0, log.forgotten));
        let at = now.as_micros().max(last);
        let length = window::length(limit);
        let older = log.granted.partition_point(|&(granted, _)| granted + length <= at);
        let before = older.checked_sub(1).and_then(|place| log.granted.get(place));
        Self { at, older, before: before.map_or(log.forgotten, |&(_, total)| total), until }
    }

    fn used(&self) -> u64 {
        self.until - self.before
    }

    fn forget_older(&self, log: &mut Log) {
        log.granted.drain(..self.older);
        log.forgotten = if log.granted.is_empty() { 0 } else { self.before };
    }
}

fn empty() -> State {
    State::Log(Box::default())
}

/// The log, out of the state.
#[expect(clippy::unnecessary_box_returns, reason = "it goes back into the state as it is")]
fn taken(state: &mut State) -> Box<Log> {
    match std::mem::take(state) {
        State::Log(log) => log,
        State::Words(_) => Box::default(),
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

    #[test]
    fn every_grant_comes_back_a_window_after_it() {
        table(
            &SLIDING_LOG,
            per(3, S, 3),
            &[
                (900 * MS, Call(1), Left(2)),
                (950 * MS, Call(2), Left(0)),
                (950 * MS, Call(1), Denied(0, 950 * MS)),
                (950 * MS, Call(2), Denied(0, S)),
                (1900 * MS - 1, Call(1), Denied(0, 1)),
                (1900 * MS, Call(1), Left(0)),
                (1900 * MS, Call(3), Denied(0, S)),
                (1950 * MS, Call(2), Left(0)),
                (3600 * S, Call(3), Left(0)),
            ],
        );
    }

    #[test]
    fn the_latest_grants_are_given_back_first() {
        table(
            &SLIDING_LOG,
            per(5, S, 5),
            &[
                (0, Call(2), Left(3)),
                (500 * MS, Call(3), Left(0)),
                (600 * MS, Refund(4), Left(4)),
                // One of those at 0 is left.
                (600 * MS, Call(5), Denied(4, 400 * MS)),
                (600 * MS, Refund(9), Left(5)),
                (600 * MS, Call(5), Left(0)),
                (S, Call(1), Denied(0, 600 * MS)),
            ],
        );
    }

    #[test]
    fn a_changed_limit_holds_at_once_and_a_clock_behind_is_waited_for() {
        table(
            &SLIDING_LOG,
            per(5, S, 5),
            &[
                (10 * S, Call(1), Left(4)),
                (10_500 * MS, Call(3), Left(1)),
                (10_500 * MS, Change(per(10, S, 10)), Left(6)),
                (10_500 * MS, Change(per(3, S, 3)), Denied(0, 500 * MS)),
                (9 * S, Call(1), Denied(0, 2500 * MS)),
                (11_500 * MS, Call(3), Left(0)),
            ],
        );
    }
}
