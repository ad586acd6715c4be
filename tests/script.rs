//! How Redis is asked: once a decision or less, whatever it has forgotten, and nobody gets another's answer.

use crate::stores::{Ask, Tested, at_once, kinds, left, limit, once};
use deadpool_redis::redis::FromRedisValue as _;
use tollgate_server::clock::Clock;
use tollgate_server::limit::Cost;
use tollgate_server::store::StoreError;

async fn each_on_redis() -> Vec<Tested> {
    let mut all = Vec::new();
    for kind in kinds() {
        let tested = kind.start(&Clock::system()).await;
        all.extend(tested.redis.is_some().then_some(tested));
    }
    all
}

async fn command(tested: &Tested, words: &[&str]) -> String {
    let answer = tested.redis.as_ref().unwrap().command(words).await;
    String::from_redis_value(answer).unwrap()
}

/// How often clients have called that command.
async fn calls(tested: &Tested, name: &str) -> u64 {
    let stats = command(tested, &["INFO", "commandstats"]).await;
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{name}:calls=")));
    line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
}

#[tokio::test]
async fn a_decision_is_one_script_call() {
    for tested in each_on_redis().await {
        let ask = Ask::new("k", "c", once(1000), 1);
        // The first one also brings the script.
        ask.of(&*tested.store).await;
        let before = calls(&tested, "evalsha").await;
        for _ in 0..100 {
            assert!(ask.of(&*tested.store).await.allowed());
        }
        assert_eq!(calls(&tested, "evalsha").await - before, 100, "{}", tested.name);
        assert_eq!(calls(&tested, "eval").await, 0, "{}", tested.name);
        assert_eq!(calls(&tested, "script|load").await, 1, "{}", tested.name);
    }
}

#[tokio::test]
async fn a_call_of_several_buckets_is_one_script_call() {
    for tested in each_on_redis().await {
        let hits = || (0..20).map(|n| Ask::new(&format!("key {n}"), "c", once(10), 1).hit()).collect();
        tested.store.decide(hits(), None).await.unwrap();
        let before = calls(&tested, "evalsha").await;
        tested.store.decide(hits(), None).await.unwrap();
        assert_eq!(calls(&tested, "evalsha").await - before, 1, "{}", tested.name);
    }
}

#[tokio::test]
async fn decisions_that_come_together_share_script_calls() {
    for tested in each_on_redis().await {
        let ask = Ask::new("k", "c", once(1000), 1);
        ask.of(&*tested.store).await;
        let before = calls(&tested, "evalsha").await;
        let calls_at_once = (0..500).map(|_| {
            let (store, ask) = (tested.store.clone(), ask.clone());
            async move { ask.of(&*store).await.allowed() }
        });
        assert!(at_once(calls_at_once).await.into_iter().all(|allowed| allowed));
        let sent = calls(&tested, "evalsha").await - before;
        assert!(sent < 250, "{}: {sent} script calls for 500 decisions", tested.name);
        assert_eq!(left(&*tested.store, &ask).await, 499, "{}", tested.name);
    }
}

#[tokio::test]
async fn a_redis_that_forgot_the_script_is_told_it_again_within_the_call() {
    for tested in each_on_redis().await {
        let ask = Ask::new("k", "c", once(50), 1);
        for n in 1..=50 {
            if n % 10 == 0 {
                command(&tested, &["SCRIPT", "FLUSH"]).await;
            }
            let decision = ask.of(&*tested.store).await;
            // Charged, and once.
            assert_eq!((decision.granted, decision.remaining), (Cost::ONE, 50 - n), "{}", tested.name);
        }
        assert!(!ask.of(&*tested.store).await.allowed(), "{}", tested.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_redis_that_forgot_the_script_is_told_it_again_by_whoever_asks() {
    for tested in each_on_redis().await {
        let ask = Ask::new("k", "c", once(100), 1);
        let mut allowed = 0;
        for _ in 0..10 {
            command(&tested, &["SCRIPT", "FLUSH"]).await;
            let calls = (0..16).map(|_| {
                let (store, ask) = (tested.store.clone(), ask.clone());
                async move { ask.of(&*store).await.allowed() }
            });
            allowed += at_once(calls).await.into_iter().filter(|allowed| *allowed).count();
        }
        assert_eq!(allowed, 100, "{}", tested.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn everybody_gets_their_own_answer() {
    for kind in kinds() {
        let tested = kind.start(&Clock::system()).await;
        let calls = (1..=200_u64).map(|n| {
            let store = tested.store.clone();
            async move {
                for turn in 1..=3 {
                    // Every third call has two buckets, so that calls take different numbers of keys.
                    let mut asks = vec![Ask::new(&format!("key {n}"), "c", limit(1, 86_400, 10_000 + n), n)];
                    if n % 3 == 0 {
                        asks.push(Ask::new(&format!("other {n}"), "c", limit(1, 86_400, 20_000 + n), 2 * n));
                    }
                    let hits = asks.iter().map(Ask::hit).collect();
                    let decisions = store.decide(hits, None).await.unwrap();
                    assert_eq!(decisions.len(), asks.len());
                    for (ask, decision) in asks.iter().zip(decisions) {
                        let cost = ask.want.at_least;
                        let left = ask.limit.burst() - turn * cost.get();
                        assert_eq!((decision.granted, decision.remaining), (cost, left), "{}", ask.key);
                    }
                }
            }
        });
        at_once(calls).await;
    }
}

/// A call that fails inside the script fails alone, wherever in it that is.
#[tokio::test]
async fn a_key_that_holds_something_else_spoils_its_own_call_only() {
    for tested in each_on_redis().await {
        // The start of a long msgpack string, and no more.
        assert_eq!(command(&tested, &["SET", "rl:{spoilt}:c", "Å"]).await, "OK");
        let calls = (0..40).map(|n| {
            let store = tested.store.clone();
            let hit = |key: &str| Ask::new(key, "c", once(5), 1).hit();
            let spoilt = n % 4 == 0;
            let mut hits = vec![hit(&format!("key {n}")), hit(&format!("other {n}"))];
            if spoilt {
                hits.insert(n % 3, hit("spoilt"));
            }
            async move {
                let decided = store.decide(hits, None).await;
                (
                    spoilt,
                    decided.map(|decisions| decisions.iter().map(|one| one.remaining).collect::<Vec<_>>()),
                )
            }
        });
        for (n, (spoilt, remaining)) in at_once(calls).await.into_iter().enumerate() {
            if spoilt {
                assert!(matches!(remaining, Err(StoreError::Failed(_))), "{}: {remaining:?}", tested.name);
            } else {
                assert_eq!(remaining, Ok(vec![4, 4]), "{}: call {n}", tested.name);
            }
            let untouched = if spoilt { 5 } else { 4 };
            let ask = Ask::new(&format!("key {n}"), "c", once(5), 0);
            assert_eq!(left(&*tested.store, &ask).await, untouched, "{}: call {n}", tested.name);
        }
    }
}
