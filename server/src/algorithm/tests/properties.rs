//! What holds for every algorithm, tried on random limits and traces.

use super::model::{Counted, Grants, Rule};
use super::trace::{
    Act, Bucket, Step, Tick, amounts, answer, fitted, limit, limits, lived, new, starts, steady, unsteady,
    wants,
};
use crate::algorithm::ALL;
use crate::limit::{Cost, Limit, Rate, State, Timestamp, micros};
use proptest::prelude::*;
use std::time::Duration;

/// What an algorithm promises that others do not.
struct Promise {
    name: &'static str,
    /// In any interval at most so many bursts, and rate x time, are granted.
    bursts: u64,
    /// Under another burst or rate the window is another one, and so is what was used in it.
    has_windows: bool,
    /// A debt is gone after so many windows.
    debt: u32,
    /// What is given back takes its time with it: should the clock be behind, the bucket is behind as well.
    gives_time_back: bool,
}

const PROMISES: &[Promise] = &[
    Promise { name: "token_bucket", bursts: 1, has_windows: false, debt: 1, gives_time_back: false },
    Promise { name: "leaky_bucket", bursts: 1, has_windows: false, debt: 1, gives_time_back: false },
    Promise { name: "gcra", bursts: 1, has_windows: false, debt: 1, gives_time_back: false },
    // Twice around the border of two windows.
    Promise { name: "fixed_window", bursts: 2, has_windows: true, debt: 1, gives_time_back: true },
    Promise { name: "sliding_log", bursts: 1, has_windows: true, debt: 1, gives_time_back: true },
    Promise { name: "sliding_window", bursts: 1, has_windows: true, debt: 2, gives_time_back: false },
];

fn promise(bucket: &Bucket) -> &'static Promise {
    let is_its = |promise: &&Promise| promise.name == bucket.algorithm.name;
    PROMISES.iter().find(is_its).expect("every algorithm has a row in PROMISES")
}

const MICRO: Duration = Duration::from_micros(1);

/// State words are doubles in Lua.
const EXACT: u64 = 1 << 53;

/// Time only goes on.
fn onward(trace: &[Step]) -> Vec<Step> {
    let onward = |tick| match tick {
        Tick::Micros(by) => Tick::Micros(by.abs()),
        Tick::Window(by) => Tick::Window(by.abs()),
    };
    trace.iter().map(|step| Step { tick: onward(step.tick), ..*step }).collect()
}

#[test]
fn names_and_tags_are_given_once() {
    for (i, one) in ALL.iter().enumerate() {
        assert!(one.tag > 0, "{one:?}: tag 0 marks what was never written");
        for other in &ALL[..i] {
            assert!(one.tag != other.tag && one.name != other.name, "{one:?} and {other:?}");
        }
    }
}

proptest! {
    /// A denied call is free, and so is whatever else is granted nothing: even if it is charged for that
    /// nothing, all later decisions stay the same.
    #[test]
    fn what_takes_nothing_leaves_no_trace(start in starts(), limit in limits(), trace in steady()) {
        for mut bare in new(start, limit) {
            let mut charged = bare.clone();
            for step in onward(&trace) {
                let decision = bare.live(&step);
                match step.act {
                    Act::Take(want) => {
                        charged.tick(step.tick);
                        let same = charged.decide(want);
                        prop_assert_eq!(Some(same), decision);
                        prop_assert!(same.allowed() || same.granted == Cost::ZERO);
                        charged.charge(same.granted);
                    }
                    _ => { charged.live(&step); }
                }
            }
        }
    }

    #[test]
    fn retry_after_is_exact(start in starts(), limit in limits(), trace in unsteady(), want in wants()) {
        for bucket in lived(start, limit, &trace) {
            let decision = bucket.decide(want);
            if decision.allowed() {
                prop_assert_eq!(decision.retry_after, Duration::ZERO);
                continue;
            }
            prop_assert!(decision.retry_after > Duration::ZERO);
            let then = bucket.after(decision.retry_after);
            prop_assert!(then.decide(want).allowed(), "{:?} {:?}", bucket, decision);
            let just_before = then.before(MICRO).decide(want);
            prop_assert!(!just_before.allowed(), "{:?} {:?}", bucket, decision);
            prop_assert_eq!(just_before.retry_after, MICRO);
        }
    }

    /// What others take meanwhile lets nobody pass, and nor does it to have been asked earlier: so a denial can
    /// be remembered with the state that it was made on.
    #[test]
    fn what_is_denied_on_an_old_state_is_denied_on_the_new(
        start in starts(), limit in limits(), trace in unsteady(), more in steady(), want in wants()
    ) {
        for mut bucket in lived(start, limit, &trace) {
            let mut old = bucket.clone();
            for step in onward(&more) {
                bucket.tick(step.tick);
                if let Act::Take(want) = step.act {
                    bucket.take(want);
                }
                let before = old.decide(want);
                old.now = bucket.now;
                let (then, now) = (old.decide(want), bucket.decide(want));
                if !then.allowed() {
                    prop_assert!(!now.allowed() && now.retry_after >= then.retry_after);
                    prop_assert!(!before.allowed());
                }
            }
        }
    }

    #[test]
    fn what_remains_still_fits_and_no_more(
        start in starts(), limit in limits(), trace in unsteady(), want in wants()
    ) {
        for mut bucket in lived(start, limit, &trace) {
            let told = bucket.take(want);
            let seen = bucket.peek();
            prop_assert_eq!((told.remaining, told.reset_after), (seen.remaining, seen.reset_after));
            prop_assert!(told.remaining <= bucket.limit.burst());
            // A bucket in debt does not even give nothing.
            prop_assert_eq!(bucket.exactly(told.remaining).allowed(), seen.allowed());
            prop_assert!(!bucket.exactly(told.remaining + 1).allowed());
        }
    }

    #[test]
    fn a_bucket_is_as_good_as_new_after_reset_after_and_not_before(
        start in starts(), limit in limits(), trace in unsteady(), more in steady()
    ) {
        for bucket in lived(start, limit, &trace) {
            let reset_after = bucket.peek().reset_after;
            if reset_after > Duration::ZERO {
                let just_before = bucket.after(reset_after).before(MICRO).peek();
                prop_assert!(just_before.remaining < bucket.limit.burst());
                prop_assert_eq!(just_before.reset_after, MICRO);
            }
            let mut old = bucket.after(reset_after);
            let mut fresh = Bucket { state: State::default(), ..old.clone() };
            prop_assert_eq!(old.peek().remaining, old.limit.burst());
            for step in onward(&more) {
                prop_assert_eq!(old.live(&step), fresh.live(&step), "{:?}", bucket);
                prop_assert_eq!(old.peek(), fresh.peek(), "{:?}", bucket);
            }
        }
    }

    /// Measured in the time that has flowed in the bucket, which stands still while the clock is behind.
    /// What was given back counts as not granted.
    #[test]
    fn in_any_interval_at_most_a_burst_and_rate_x_time_is_granted(
        start in starts(), limit in limits(), trace in steady()
    ) {
        for mut bucket in new(start, limit) {
            let (mut flowed, mut last) = (0, start);
            let mut taken = vec![];
            let trace = if promise(&bucket).gives_time_back { onward(&trace) } else { trace.clone() };
            for step in &trace {
                bucket.tick(step.tick);
                let is_new = bucket.peek().reset_after.is_zero();
                let net = match step.act {
                    Act::Take(want) => i128::from(bucket.take(want).granted.get()),
                    Act::Refund(cost) => -i128::from(bucket.refund(cost)),
                    Act::Change(_) | Act::Burst(_) => 0,
                };
                if net != 0 {
                    flowed += bucket.now.since(last).as_micros();
                    // A bucket as good as new has forgotten the time.
                    last = if is_new { bucket.now } else { last.max(bucket.now) };
                    taken.push((flowed, net));
                }
            }
            within(&bucket, &taken)?;
        }
    }

    #[test]
    fn nothing_is_denied_to_a_peek_but_a_debt(start in starts(), limit in limits(), trace in steady()) {
        for bucket in lived(start, limit, &trace) {
            let peek = bucket.peek();
            prop_assert!(peek.allowed());
            prop_assert_eq!((peek.granted, peek.retry_after), (Cost::ZERO, Duration::ZERO));
        }
    }

    #[test]
    fn a_part_is_granted_where_not_all_fits(
        start in starts(), limit in limits(), trace in unsteady(), want in wants()
    ) {
        for bucket in lived(start, limit, &trace) {
            let (before, want) = (bucket.peek(), bucket.fitting(want));
            let decision = bucket.decide(want);
            let enough = before.allowed() && before.remaining >= want.at_least.get();
            prop_assert_eq!(decision.allowed(), enough);
            let granted = if enough { before.remaining.min(want.at_most.get()) } else { 0 };
            prop_assert_eq!(decision.granted.get(), granted);
            prop_assert_eq!(decision.remaining, before.remaining - granted);
        }
    }

    #[test]
    fn no_more_comes_back_than_was_taken(start in starts(), limit in limits(), trace in steady()) {
        for mut bucket in new(start, limit) {
            let mut taken = 0;
            for step in &trace {
                bucket.tick(step.tick);
                let since_full = if bucket.peek().reset_after.is_zero() { 0 } else { taken };
                match step.act {
                    Act::Take(want) => {
                        let granted = bucket.take(want).granted.get();
                        if granted > 0 {
                            taken = since_full + granted;
                        }
                    }
                    Act::Refund(cost) => {
                        let before = bucket.peek().remaining;
                        let credited = bucket.refund(cost);
                        prop_assert!(credited <= cost && credited <= since_full);
                        prop_assert_eq!(bucket.peek().remaining, before + credited);
                        taken -= credited;
                    }
                    Act::Change(_) | Act::Burst(_) => {}
                }
            }
        }
    }

    #[test]
    fn what_is_given_back_at_once_was_never_taken(
        start in starts(), limit in limits(), trace in unsteady(), want in wants(), more in steady()
    ) {
        for mut bucket in lived(start, limit, &trace) {
            let mut never = bucket.clone();
            let granted = bucket.take(want).granted;
            prop_assert_eq!(bucket.refund(granted.get()), granted.get());
            if granted > Cost::ZERO {
                // A grant settles what a lower burst has forgiven, and that stays settled.
                never.charge(Cost::ZERO);
            }
            prop_assert_eq!(bucket.decide(want), never.decide(want));
            for step in onward(&more) {
                prop_assert_eq!(bucket.live(&step), never.live(&step));
            }
        }
    }

    #[test]
    fn another_burst_holds_at_once_and_usage_stays(
        start in starts(), old in limits(), trace in steady(), want in wants(), burst in amounts()
    ) {
        for mut bucket in lived(start, old, &trace) {
            if promise(&bucket).has_windows {
                continue;
            }
            let old = bucket.limit;
            let told = bucket.take(want);
            let used = old.burst() - told.remaining;
            bucket.limit = fitted(bucket.algorithm, limit(old.rate(), burst));
            let (new, peek) = (bucket.limit.burst(), bucket.peek());
            // What a lower burst forgives, it forgives from the last call on.
            if new >= old.burst() || told.granted > Cost::ZERO {
                prop_assert_eq!(peek.remaining, new.saturating_sub(used));
                prop_assert_eq!(peek.allowed(), used <= new);
            } else {
                prop_assert!(peek.remaining >= new.saturating_sub(used));
            }
        }
    }

    /// From the last call on, as if the new rate had held since.
    #[test]
    fn another_rate_holds_at_once_and_usage_stays_to_a_token(
        start in starts(), old in limits(), trace in steady(), want in wants(), new in limits()
    ) {
        for mut bucket in lived(start, old, &trace) {
            let told = bucket.take(want);
            if told.granted == Cost::ZERO || promise(&bucket).has_windows {
                continue;
            }
            let used = bucket.limit.burst() - told.remaining;
            bucket.limit = fitted(bucket.algorithm, new);
            let (left, new) = (bucket.peek().remaining, bucket.limit);
            prop_assert!(left <= new.burst().saturating_sub(used));
            prop_assert!(left >= new.burst().saturating_sub(used + 1));
        }
    }

    /// A limit that is larger or smaller in the same window holds at once, and usage stays to a token.
    #[test]
    fn as_much_more_or_less_is_left_as_the_limit_is_changed_by(
        start in starts(), old in limits(), trace in steady(), want in wants(), factor in 2..5u64
    ) {
        let (rate, burst) = (old.rate(), old.burst());
        let Ok(larger) = Rate::new(rate.count() * factor, rate.period())
            .and_then(|rate| Limit::new(rate, burst * factor)) else { return Ok(()) };
        let in_turn = |mut bucket: Bucket, to: Limit| {
            let told = bucket.take(want);
            let (granted, used) = (told.granted, bucket.limit.burst() - told.remaining);
            bucket.limit = to;
            (granted, used, bucket.peek())
        };
        for (from, to) in [(old, larger), (larger, old)] {
            for bucket in lived(start, from, &trace) {
                if bucket.limit != from || (bucket.algorithm.check)(&to).is_err() {
                    continue;
                }
                let (granted, used, seen) = in_turn(bucket, to);
                if granted > Cost::ZERO {
                    prop_assert!(seen.remaining <= to.burst().saturating_sub(used));
                    prop_assert!(seen.remaining >= to.burst().saturating_sub(used + 1));
                }
            }
        }
    }

    #[test]
    fn gcra_is_the_token_bucket_told_in_time(start in starts(), limit in limits(), trace in unsteady()) {
        let of = |name| new(start, limit).find(|bucket| bucket.algorithm.name == name).unwrap();
        let (mut gcra, mut tokens) = (of("gcra"), of("token_bucket"));
        for step in &trace {
            // The one takes some limits that are too large for the other.
            tokens.limit = gcra.limit;
            prop_assert_eq!(gcra.live(step), tokens.live(step));
            tokens.limit = gcra.limit;
            prop_assert_eq!(gcra.peek(), tokens.peek(), "{:?} {:?}", gcra, tokens);
        }
    }

    /// Windows count what a list of all grants counts.
    #[test]
    fn windows_decide_as_a_list_of_grants(start in starts(), limit in limits(), trace in steady()) {
        for (name, counted) in
            [("sliding_log", Counted::Log), ("fixed_window", Counted::Fixed), ("sliding_window", Counted::Sliding)]
        {
            let mut bucket = new(start, limit).find(|bucket| bucket.algorithm.name == name).unwrap();
            let rate = bucket.limit.rate();
            let rule = Rule { count: rate.count(), period: micros(rate.period()), burst: bucket.limit.burst() };
            let mut grants = Grants::new(counted);
            for step in &trace {
                let decision = bucket.live(step);
                let now = bucket.now.as_micros();
                match step.act {
                    Act::Take(want) => {
                        let want = bucket.fitting(want);
                        let wanted = grants.decide(rule, now, want.at_least.get(), want.at_most.get());
                        prop_assert_eq!(decision.as_ref().map(answer), Some(wanted), "{:?}", bucket);
                        grants.take(rule, now, wanted.granted);
                    }
                    Act::Refund(tokens) => {
                        grants.give_back(rule, now, tokens);
                    }
                    Act::Change(_) | Act::Burst(_) => {}
                }
                prop_assert_eq!(answer(&bucket.peek()), grants.decide(rule, now, 0, 0), "{:?}", bucket);
            }
        }
    }

    #[test]
    fn a_queue_is_waited_for(start in starts(), limit in limits(), trace in unsteady(), want in wants()) {
        for mut bucket in lived(start, limit, &trace) {
            let before = bucket.peek();
            let decision = bucket.take(want);
            if !bucket.algorithm.queues || !decision.allowed() {
                prop_assert_eq!(decision.wait, Duration::ZERO);
                continue;
            }
            // One's turn is when all that came before is gone; one's own cost is not waited for.
            prop_assert_eq!(decision.wait, before.reset_after);
        }
    }

    /// Two instances may hold two bursts for a while.
    #[test]
    fn what_is_given_back_under_another_burst_forgives_no_more(
        start in starts(), old in limits(), trace in steady(), want in wants(), burst in amounts(), back in amounts()
    ) {
        for mut bucket in lived(start, old, &trace) {
            if promise(&bucket).has_windows {
                continue;
            }
            bucket.take(want);
            let (mine, before) = (bucket.limit, bucket.peek().remaining);
            bucket.limit = fitted(bucket.algorithm, limit(mine.rate(), burst));
            let credited = bucket.refund(back);
            bucket.limit = mine;
            prop_assert!(bucket.peek().remaining <= before + credited, "{:?}", bucket);
        }
    }

    #[test]
    fn nobody_owes_more_than_another_burst(
        start in starts(), limit in limits(), trace in unsteady(), new in limits()
    ) {
        for mut bucket in lived(start, limit, &trace) {
            // The clock of a bucket that was stepped back has to catch up first.
            bucket.now = bucket.now.max(Timestamp::from_micros(1 << 52));
            bucket.limit = fitted(bucket.algorithm, new);
            prop_assert!(bucket.peek().retry_after <= bucket.limit.window() * promise(&bucket).debt);
        }
    }

    #[test]
    fn numbers_stay_exact(start in starts(), limit in limits(), trace in unsteady()) {
        for mut bucket in new(start, limit) {
            for step in &trace {
                bucket.live(step);
                prop_assert!(numbers(&bucket.state).all(|number| number < EXACT), "{:?}", bucket);
                prop_assert!(!bucket.exactly(u64::MAX).allowed());
            }
        }
    }
}

fn numbers(state: &State) -> Box<dyn Iterator<Item = u64> + '_> {
    match state {
        State::Words(words) => Box::new(words.iter().copied()),
        State::Log(log) => Box::new(log.granted.iter().flat_map(|&(at, total)| [at, total])),
    }
}

fn within(bucket: &Bucket, taken: &[(u128, i128)]) -> Result<(), TestCaseError> {
    let rate = bucket.limit.rate();
    let burst = u128::from(bucket.limit.burst()) * u128::from(promise(bucket).bursts);
    for (i, &(from, _)) in taken.iter().enumerate() {
        let mut sum = 0;
        for &(to, net) in &taken[i..] {
            sum += net;
            let granted = u128::try_from(sum).unwrap_or(0) * rate.period().as_micros();
            let most = burst * rate.period().as_micros() + u128::from(rate.count()) * (to - from);
            prop_assert!(granted <= most, "{} in {} us: {:?}", sum, to - from, bucket);
        }
    }
    Ok(())
}
