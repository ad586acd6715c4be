//! Denials that are certain cost Redis nothing, and nobody is denied who would be allowed there.

use crate::naive::Naive;
use crate::stores::{Ask, START, Tested, each_on_redis, limit};
use crate::support::eventually;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseResult, TestRunner};
use std::sync::Arc;
use std::time::Duration;
use tollgate_server::algorithm::{ALL, Algorithm};
use tollgate_server::clock::Clock;
use tollgate_server::limit::{Cost, Reason, Timestamp, Want};
use tollgate_server::penalty::Penalty;
use tollgate_server::request::{Charge, Strikes};
use tollgate_server::store::Store;

fn at(millis: u64) -> Timestamp {
    Timestamp::from_micros(START.as_micros() - START.as_micros() % 1_000_000 + 1_000 * millis)
}

fn strict() -> Strikes {
    let span = Duration::from_secs;
    Strikes { penalty: Penalty::new(1, span(60), span(30), span(60)).unwrap(), reported: 0, on_denial: true }
}

/// How often its Redis decides while `asked`.
async fn scripts(tested: &Tested, asked: impl Future<Output = ()>) -> u64 {
    let before = tested.calls("evalsha").await;
    asked.await;
    tested.calls("evalsha").await - before
}

#[tokio::test]
async fn a_denial_that_is_certain_is_told_without_redis_until_the_call_fits() {
    let clock = Clock::manual(at(0));
    for tested in each_on_redis(&clock).await {
        for algorithm in ALL {
            clock.set(at(0));
            let ask = |cost| Ask::new(algorithm.name, "c", limit(10, 5, 10), cost).by(algorithm);
            assert!(ask(10).of(&*tested.store).await.allowed());
            let first = ask(1).of(&*tested.store).await;
            let until = START.as_micros() / 1_000_000 * 1_000_000
                + u64::try_from(first.retry_after.as_micros()).unwrap();
            let asked = async {
                for left in [999, 500, 1] {
                    clock.set(Timestamp::from_micros(until - left));
                    let denied = ask(1).of(&*tested.store).await;
                    assert_eq!(denied.denied, Some(Reason::OverLimit), "{algorithm:?}");
                    assert_eq!(denied.retry_after, Duration::from_micros(left), "{algorithm:?}");
                    assert_eq!(denied.remaining, 0, "{algorithm:?}");
                }
            };
            assert_eq!(scripts(&tested, asked).await, 0, "{algorithm:?} on {}", tested.name);
            clock.set(Timestamp::from_micros(until));
            assert!(ask(1).of(&*tested.store).await.allowed(), "{algorithm:?} on {}", tested.name);
        }
    }
}

#[tokio::test]
async fn a_higher_cost_is_as_certain_and_a_lower_one_is_asked() {
    let clock = Clock::manual(at(0));
    for tested in each_on_redis(&clock).await {
        clock.set(at(0));
        let ask = |cost| Ask::new("k", "c", limit(1, 1, 10), cost);
        assert!(ask(5).of(&*tested.store).await.allowed());
        assert!(!ask(8).of(&*tested.store).await.allowed());
        let asked = async {
            for (millis, cost, remaining, retry) in
                [(0, 8, 5, 3_000), (1_500, 8, 6, 1_500), (1_500, 10, 6, 3_500)]
            {
                clock.set(at(millis));
                let denied = ask(cost).of(&*tested.store).await;
                assert_eq!((denied.remaining, denied.retry_after), (remaining, Duration::from_millis(retry)));
            }
        };
        assert_eq!(scripts(&tested, asked).await, 0, "{}", tested.name);
        let asked = async { assert!(ask(6).of(&*tested.store).await.allowed()) };
        assert_eq!(scripts(&tested, asked).await, 1, "{}", tested.name);
        // It was taken by this instance, so what remains is asked for.
        assert_eq!(ask(8).of(&*tested.store).await.remaining, 0, "{}", tested.name);
    }
}

#[tokio::test]
async fn what_comes_back_here_is_seen_at_once_and_elsewhere_within_ten_seconds() {
    let clock = Clock::manual(at(0));
    for tested in each_on_redis(&clock).await {
        let other = tested.another();
        for (key, gives_back, seen_at) in [("here", &tested.store, 0), ("there", &other, 10_000)] {
            clock.set(at(0));
            let ask = Ask::new(key, "c", limit(1, 3600, 5), 1);
            let lease = ask.clone().leased(5, Duration::from_secs(60));
            lease.of(&*tested.store).await;
            assert!(!ask.of(&*tested.store).await.allowed());
            gives_back.settle(lease.settlement(2), None).await.unwrap();
            if seen_at > 0 {
                clock.set(at(seen_at - 1));
                assert!(!ask.of(&*tested.store).await.allowed(), "{}", tested.name);
            }
            clock.set(at(seen_at));
            assert!(ask.of(&*tested.store).await.allowed(), "{}: {key}", tested.name);
        }
    }
}

/// As Envoy gives hits back and charges what was spent already.
#[tokio::test]
async fn what_is_charged_in_any_case_is_asked_and_what_gives_back_is_seen() {
    for tested in each_on_redis(&Clock::manual(at(0))).await {
        let ask = |charge| Ask { charge, ..Ask::new("k", "c", limit(1, 3600, 2), 1) };
        let (plain, always) = (ask(Charge::IfAllowed), ask(Charge::Always(Cost::ONE)));
        for _ in 0..3 {
            plain.of(&*tested.store).await;
        }
        let asked = async { assert!(!always.of(&*tested.store).await.allowed()) };
        assert_eq!(scripts(&tested, asked).await, 1, "{}", tested.name);
        // One more is owed now, and is waited for as well.
        let denied = plain.of(&*tested.store).await;
        assert_eq!(denied.retry_after, Duration::from_secs(2 * 3600), "{}", tested.name);
        let want = Want::exactly(Cost::ZERO);
        for left in [0, 1] {
            let back = Ask { want, ..ask(Charge::GiveBack(Cost::ONE)) };
            assert_eq!(back.of(&*tested.store).await.remaining, left, "{}", tested.name);
        }
        assert!(plain.of(&*tested.store).await.allowed(), "{}", tested.name);
    }
}

#[tokio::test]
async fn another_rule_is_asked_at_once() {
    for tested in each_on_redis(&Clock::manual(at(0))).await {
        let ask = |burst| Ask::new("k", "c", limit(1, 3600, burst), 1);
        for _ in 0..4 {
            ask(3).of(&*tested.store).await;
        }
        assert_eq!(ask(5).of(&*tested.store).await.remaining, 1, "{}", tested.name);
        let gcra = Algorithm::named("gcra").unwrap();
        assert!(ask(3).by(gcra).of(&*tested.store).await.allowed(), "{}", tested.name);
    }
}

#[tokio::test]
async fn a_block_is_told_without_redis_for_a_second_in_all_classes() {
    let clock = Clock::manual(at(0));
    for tested in each_on_redis(&clock).await {
        clock.set(at(0));
        let ask = |class| Ask::new("k", class, limit(1, 3600, 1), 1);
        let login = Ask { strikes: Some(strict()), ..ask("login") };
        for _ in 0..2 {
            ask("read").of(&*tested.store).await;
            login.of(&*tested.store).await;
        }
        // The second denial blocks, although that of reads was certain.
        assert_eq!(login.of(&*tested.store).await.denied, Some(Reason::OverLimit), "{}", tested.name);
        assert_eq!(ask("read").of(&*tested.store).await.denied, Some(Reason::Blocked), "{}", tested.name);
        let asked = async {
            clock.set(at(999));
            for ask in [ask("read"), login.clone(), ask("other")] {
                let denied = ask.of(&*tested.store).await;
                assert_eq!(denied.denied, Some(Reason::Blocked), "{}", tested.name);
                assert_eq!(denied.retry_after, Duration::from_millis(60_000 - 999), "{}", tested.name);
            }
        };
        assert_eq!(scripts(&tested, asked).await, 0, "{}", tested.name);
        tested.command(&["GETDEL", "rl:block:{k}"]).await;
        clock.set(at(1_000));
        assert_eq!(ask("other").of(&*tested.store).await.denied, None, "{}", tested.name);
        // And what was known of reads before the block is not believed after it.
        assert_eq!(ask("read").of(&*tested.store).await.denied, Some(Reason::OverLimit), "{}", tested.name);
    }
}

#[tokio::test]
async fn denials_that_are_strikes_are_counted_in_redis() {
    for tested in each_on_redis(&Clock::manual(at(0))).await {
        let penalty =
            Penalty::new(1_000, Duration::from_secs(60), Duration::from_secs(1), Duration::from_secs(1));
        let strikes = Strikes { penalty: penalty.unwrap(), ..strict() };
        let login = Ask { strikes: Some(strikes), ..Ask::new("k", "login", limit(1, 3600, 1), 1) };
        for _ in 0..11 {
            login.of(&*tested.store).await;
        }
        assert!(tested.command(&["GET", "rl:strikes:{k}"]).await.starts_with("10 "), "{}", tested.name);
    }
}

#[tokio::test]
async fn a_redis_that_was_lost_is_asked_again() {
    for mut tested in each_on_redis(&Clock::system()).await {
        let ask = Ask::new("k", "c", limit(1, 3600, 1), 1);
        for _ in 0..2 {
            ask.of(&*tested.store).await;
        }
        tested.store.heartbeat().await.unwrap();
        tested.redis.as_mut().unwrap().restart().await;
        // Nobody but the probe has anything to say to Redis: each call is denied from memory.
        eventually("Redis is there again", async || tested.store.heartbeat().await.ok()).await;
        assert!(ask.of(&*tested.store).await.allowed(), "{}", tested.name);
    }
}

/// What happens on one of two instances: a call of so many tokens, or all that were taken last come back there.
#[derive(Clone, Debug)]
struct Step {
    /// Microseconds.
    after: u64,
    here: bool,
    at_least: u64,
    at_most: u64,
    comes_back: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let after = prop_oneof![3 => Just(0), 3 => 1..400_000u64, 1 => 1..12_000_000u64];
    let step = (after, any::<bool>(), 0..9u64, 0..3u64, prop::bool::weighted(0.15));
    let step = step.prop_map(|(after, here, at_least, more, comes_back)| Step {
        after,
        here,
        at_least,
        at_most: at_least + more,
        comes_back,
    });
    prop::collection::vec(step, 1..60)
}

/// Against a naive model that all instances share: tokens come back only by way of the instance that is asked,
/// so each verdict is the model's.
#[test]
fn nobody_is_denied_who_would_be_allowed() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let clock = Clock::manual(START);
    let tested = runtime.block_on(each_on_redis(&clock));
    let both: Vec<[Arc<dyn Store>; 2]> = runtime
        .block_on(async { tested.iter().map(|tested| [tested.store.clone(), tested.another()]).collect() });
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/regressions/denials.txt");
    let mut config = Config {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(path))),
        ..Config::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 60;
    }
    let case = std::cell::Cell::new(0);
    let run = |(algorithm, steps): (usize, Vec<Step>)| {
        case.set(case.get() + 1);
        let key = format!("case {}", case.get());
        runtime.block_on(async {
            for instances in &both {
                verdicts_are_the_models(&clock, instances, &key, &ALL[algorithm], &steps).await?;
            }
            Ok(())
        })
    };
    TestRunner::new(config).run(&(0..ALL.len(), steps()), run).unwrap_or_else(|why| panic!("{why}"));
}

async fn verdicts_are_the_models(
    clock: &Clock,
    instances: &[Arc<dyn Store>; 2],
    key: &str,
    algorithm: &'static Algorithm,
    steps: &[Step],
) -> TestCaseResult {
    let [here, there] = instances;
    let (mut naive, mut now, mut lease, mut came_back) =
        (Naive::default(), START.as_micros(), None::<Ask>, false);
    for step in steps {
        now += step.after;
        clock.set(Timestamp::from_micros(now));
        naive.forget(now);
        if step.comes_back
            && let Some(lease) = lease.take()
        {
            let expected = Cost::new(naive.settle(&lease, step.at_least, now));
            prop_assert_eq!(here.settle(lease.settlement(step.at_least), None).await.unwrap(), expected);
            came_back = true;
        }
        // From then on the other may deny what it remembers.
        let asked = if step.here || came_back { here } else { there };
        let want = Want { at_least: Cost::new(step.at_least), at_most: Cost::new(step.at_most) };
        let ask = Ask { want, ..Ask::new(key, "c", limit(4, 1, 8), 0).by(algorithm) };
        let ask = ask.leased(step.at_most, Duration::from_secs(30));
        let [expected] = naive.decide(std::slice::from_ref(&ask), now)[..] else { panic!("one for one") };
        let decision = ask.of(&**asked).await;
        prop_assert_eq!(decision.denied, expected.denied, "{:?} at {}: {:?}", algorithm, now, steps);
        prop_assert_eq!(decision.granted, expected.granted);
        if decision.granted > Cost::ZERO {
            lease = Some(ask);
        }
    }
    Ok(())
}
