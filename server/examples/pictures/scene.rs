//! Traffic, and what an algorithm lets pass of it.

use tollgate_server::algorithm::Algorithm;
use tollgate_server::limit::{Cost, Limit, State, Timestamp, Want};

/// A call on the one bucket of a scene.
pub(crate) struct Call {
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
}

/// When each call that is allowed passes, in microseconds and in order: at once, or when it has waited for its turn.
pub(crate) fn passed(algorithm: &Algorithm, limit: &Limit, calls: &[Call]) -> Vec<u64> {
    let mut state = State::default();
    let mut passed = vec![];
    for call in calls {
        let decision = (algorithm.decide)(limit, &state, call.at, Want::exactly(Cost::new(call.cost)));
        if decision.allowed() {
            (algorithm.charge)(limit, &mut state, call.at, decision.granted);
            passed.push(call.at.after(decision.wait).as_micros());
        }
    }
    passed
}

/// When each call comes, in microseconds.
pub(crate) fn asked(calls: &[Call]) -> Vec<u64> {
    calls.iter().map(|call| call.at.as_micros()).collect()
}

/// How many of `times` are in each of `bins` bins.
pub(crate) fn counted(times: &[u64], start: u64, bin: u64, bins: u64) -> Vec<u64> {
    (0..bins).map(|i| within(times, start + i * bin, start + (i + 1) * bin)).collect()
}

/// How many of `times` are not before `start` and before `end`.
pub(crate) fn within(times: &[u64], start: u64, end: u64) -> u64 {
    times.iter().filter(|&&at| (start..end).contains(&at)).map(|_| 1).sum()
}

/// The hour of `tests/data/access.log` with the most requests: the first minute that has any, and all requests.
pub(crate) fn busiest_hour() -> Option<(u64, Vec<Call>)> {
    let log = include_str!("../../../tests/data/access.log");
    let mut times: Vec<u64> = log.lines().filter_map(time).collect();
    times.sort_unstable();
    let hours: Vec<&[u64]> = times.chunk_by(|a, b| a / 3600 == b / 3600).collect();
    // The earlier one of two.
    let busiest = hours.into_iter().rev().max_by_key(|hour| hour.len())?;
    let start = busiest.first()? / 60 * 60;
    let call = |at: &u64| Call { at: Timestamp::from_micros(at * super::SECOND), cost: 1 };
    Some((start * super::SECOND, busiest.iter().map(call).collect()))
}

/// `198.18.0.2 - - [17/May/2015:10:05:03 +0000] …` in seconds since 1970.
fn time(line: &str) -> Option<u64> {
    const MAY_2015: u64 = 1_430_438_400;
    let (time, _) = line.split_once(" - - [")?.1.split_once(" +0000]")?;
    let (day, time) = time.split_once("/May/2015:")?;
    let mut at: u64 = day.parse::<u64>().ok()?.checked_sub(1)?;
    for (part, most) in time.split(':').zip([24, 60, 60]) {
        at = at * most + part.parse::<u64>().ok()?;
    }
    Some(MAY_2015 + at)
}
