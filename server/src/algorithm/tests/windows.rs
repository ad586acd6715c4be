//! The error of a sliding window, measured against the log of the same calls.

use super::table::{S, per};
use super::trace::{Act, Bucket, Step, fitted, limits, new, starts, steady};
use crate::limit::{Cost, Limit, State, Timestamp, Want, micros};
use proptest::prelude::*;

/// A sliding window and a log with the same limit.
fn both(start: Timestamp, limit: Limit) -> (Bucket, Bucket) {
    let of = |name: &str, limit| new(start, limit).find(|bucket| bucket.algorithm.name == name).unwrap();
    // Either takes some limits that are too large for the other.
    let limit = fitted(of("sliding_window", limit).algorithm, of("sliding_log", limit).limit);
    (of("sliding_window", limit), of("sliding_log", limit))
}

fn used(bucket: &Bucket) -> u64 {
    bucket.limit.burst() - bucket.peek().remaining
}

/// Tokens granted in a stretch of time.
fn sum(granted: &[(u64, u64)], is_in: impl Fn(u64) -> bool) -> u64 {
    granted.iter().filter(|(at, _)| is_in(*at)).map(|(_, tokens)| tokens).sum()
}

proptest! {
    #[test]
    fn in_a_window_a_log_lets_the_burst_pass_and_an_estimate_at_most_twice_that(
        start in starts(), limit in limits(), trace in steady()
    ) {
        let (window, log) = both(start, limit);
        for (mut bucket, bursts) in [(window, 2), (log, 1)] {
            let mut granted = vec![];
            for step in &trace {
                let Step { tick, act: Act::Take(want) } = *step else { continue };
                let before = bucket.now;
                bucket.tick(tick);
                bucket.now = bucket.now.max(before);
                granted.push((bucket.now.as_micros(), bucket.take(want).granted.get()));
            }
            let length = micros(bucket.limit.window());
            for &(from, _) in &granted {
                let passed = sum(&granted, |at| (from..from + length).contains(&at));
                prop_assert!(passed <= bursts * bucket.limit.burst(), "{} from {}: {:?}", passed, from, bucket);
            }
        }
    }

    /// It is wrong by no more than the previous window's calls, whenever these came.
    #[test]
    fn an_estimate_is_wrong_by_the_previous_window_at_most(
        start in starts(), limit in limits(), trace in steady()
    ) {
        let (mut window, mut log) = both(start, limit);
        let length = micros(window.limit.window());
        let mut granted = vec![];
        for step in &trace {
            let Step { tick, act: Act::Take(want) } = *step else { continue };
            let before = window.now;
            window.tick(tick);
            window.now = window.now.max(before);
            log.now = window.now;
            // What both would let pass.
            let cost = window.decide(want).granted.min(log.decide(want).granted);
            if cost > Cost::ZERO {
                window.charge(cost);
                log.charge(cost);
                granted.push((window.now.as_micros(), cost.get()));
            }
            let this = window.now.as_micros() / length;
            let previous = sum(&granted, |at| at / length + 1 == this);
            prop_assert!(used(&window).abs_diff(used(&log)) <= previous, "{:?} {:?}", window, log);
        }
    }

    /// `count` calls at even distances: the share is theirs to a token, the one that may be within the part of
    /// a distance where the window begins, and it errs on the side of the limit.
    #[test]
    fn an_estimate_of_even_calls_is_exact(
        distance in 1..1000u64, count in 1..100u64, offset in 0..1000u64, x in 0..100_000u64, more in 0..100u64
    ) {
        let (length, offset) = (distance * count, offset % distance);
        let x = x % length;
        // A window of that length has place for as many in the next, whatever is left of these.
        let (mut window, mut log) = both(Timestamp::from_micros(0), per(count, length, count));
        for bucket in [&mut window, &mut log] {
            for call in 0..count {
                bucket.now = Timestamp::from_micros(S * length + call * distance + offset);
                prop_assert!(bucket.take(Want::exactly(Cost::new(1))).allowed());
            }
            bucket.now = Timestamp::from_micros((S + 1) * length + x);
        }
        let late = u64::from(x % distance >= offset);
        prop_assert_eq!(used(&window), used(&log) + late);
        // Calls of this window are within the one that ends now: they count the same for both.
        let cost = Cost::new(more.min(window.peek().remaining));
        for bucket in [&mut window, &mut log] {
            bucket.take(Want::exactly(cost));
        }
        prop_assert_eq!(used(&window), used(&log) + late);
    }
}

proptest! {
    #[test]
    fn a_log_remembers_what_is_in_its_window_and_no_more(start in starts(), limit in limits(), trace in steady()) {
        let (_, mut log) = both(start, limit);
        for step in &trace {
            if log.live(step).is_none_or(|decision| decision.granted == Cost::ZERO) {
                continue;
            }
            let State::Log(kept) = &log.state else { panic!("{log:?}") };
            let (last, _) = *kept.granted.back().unwrap();
            let length = micros(log.limit.window());
            prop_assert!(kept.granted.iter().all(|(at, _)| at + length > last), "{:?}", log);
        }
    }
}
