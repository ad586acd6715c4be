//! How Redis is asked: once a decision or less, whatever it has forgotten, and nobody gets another's answer.

use crate::stores::{Ask, at_once, config, each_on_redis, kinds, left, limit, named, once};
use futures_util::future::join_all;
use std::time::Duration;
use tollgate_server::clock::Clock;
use tollgate_server::config::StoreConfig;
use tollgate_server::limit::Cost;
use tollgate_server::request::Charge;
use tollgate_server::store::{StoreError, connect};

#[tokio::test]
async fn a_decision_is_one_script_call() {
    for tested in each_on_redis(&Clock::system()).await {
        let ask = Ask::new("k", "c", once(1000), 1);
        // The first one also brings the script.
        ask.of(&*tested.store).await;
        let before = tested.calls("evalsha").await;
        for _ in 0..100 {
            assert!(ask.of(&*tested.store).await.allowed());
        }
        assert_eq!(tested.calls("evalsha").await - before, 100, "{}", tested.name);
        assert_eq!(tested.calls("eval").await, 1, "{}", tested.name);
    }
}

#[tokio::test]
async fn a_call_of_several_buckets_is_one_script_call() {
    for tested in each_on_redis(&Clock::system()).await {
        let hits = || (0..20).map(|n| Ask::new(&format!("key {n}"), "c", once(10), 1).hit()).collect();
        tested.store.decide(hits(), None).await.unwrap();
        let before = tested.calls("evalsha").await;
        tested.store.decide(hits(), None).await.unwrap();
        assert_eq!(tested.calls("evalsha").await - before, 1, "{}", tested.name);
    }
}

#[tokio::test]
async fn decisions_that_come_together_share_script_calls() {
    for tested in each_on_redis(&Clock::system()).await {
        let ask = Ask::new("k", "c", once(1000), 1);
        ask.of(&*tested.store).await;
        let before = tested.calls("evalsha").await;
        let calls_at_once = (0..500).map(|_| {
            let (store, ask) = (tested.store.clone(), ask.clone());
            async move { ask.of(&*store).await.allowed() }
        });
        assert!(at_once(calls_at_once).await.into_iter().all(|allowed| allowed));
        let sent = tested.calls("evalsha").await - before;
        assert!(sent < 250, "{}: {sent} script calls for 500 decisions", tested.name);
        assert_eq!(left(&*tested.store, &ask).await, 499, "{}", tested.name);
    }
}

/// Equal keys of a batch are read and written once, and the grants are given in the order of arrival.
#[tokio::test]
async fn a_hot_key_is_read_and_written_once_a_script_call() {
    for tested in each_on_redis(&Clock::system()).await {
        let ask = Ask::new("k", "c", once(300), 1);
        // On one connection, or the batches may overtake each other.
        let config = StoreConfig { connections: 1, ..config(&tested.redis.as_ref().unwrap().url()) };
        let store = connect(&config, Clock::system()).unwrap();
        ask.of(&*store).await;
        let commands = ["evalsha", "mget", "set"];
        let before = [tested.calls("evalsha").await, tested.calls("mget").await, tested.calls("set").await];
        let mut asked = Vec::new();
        for _ in 0..400 {
            asked.push(ask.of(&*store));
        }
        let decisions = join_all(asked).await;
        let remaining: Vec<_> = decisions.iter().map(|decision| decision.remaining).collect();
        let expected: Vec<_> = (0..299).rev().chain(std::iter::repeat_n(0, 101)).collect();
        assert_eq!(remaining, expected, "{}", tested.name);
        assert_eq!(decisions.iter().filter(|decision| decision.allowed()).count(), 299, "{}", tested.name);
        for (command, before) in commands.into_iter().zip(before) {
            let calls = tested.calls(command).await - before;
            assert!(calls <= 400 / 40 + 4, "{}: {calls} times {command}", tested.name);
        }
    }
}

#[tokio::test]
async fn a_redis_that_forgot_the_script_is_told_it_again_within_the_call() {
    for tested in each_on_redis(&Clock::system()).await {
        let ask = Ask::new("k", "c", once(50), 1);
        for n in 1..=50 {
            if n % 10 == 0 {
                tested.command(&["SCRIPT", "FLUSH"]).await;
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
    for tested in each_on_redis(&Clock::system()).await {
        let ask = Ask::new("k", "c", once(100), 1);
        let mut allowed = 0;
        for _ in 0..10 {
            tested.command(&["SCRIPT", "FLUSH"]).await;
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

/// What is stored there was not written by any version of this: each of it once spoilt the answers of all.
#[tokio::test]
async fn an_odd_value_spoils_its_own_call_only() {
    for tested in each_on_redis(&Clock::system()).await {
        let url = tested.redis.as_ref().unwrap().url();
        let store = connect(&StoreConfig { connections: 1, ..config(&url) }, Clock::system()).unwrap();
        let word = |n: u64| [&[0xcf][..], &n.to_be_bytes()].concat();
        let odd = 17_999_999_999.5_f64.to_be_bytes();
        let states = [
            // Tag, end, and three words of five; a half; one below zero; one too many.
            [&[1][..], &word(9), &word(1 << 52), &word(9), &word(9)].concat(),
            [&[1][..], &word(9), &[0xcb], &odd, &[9, 9, 0, 0]].concat(),
            [&[1][..], &word(9), &[0xff], &[9, 9, 0, 0]].concat(),
            [&[1][..], &word(9), &word(u64::MAX), &word(9), &[9, 0, 0]].concat(),
        ];
        let mut asks = Vec::new();
        for (n, state) in states.iter().enumerate() {
            tested.set(&format!("rl:{{odd {n}}}:c").replace(' ', "%20"), state).await;
            asks.push(Ask::new(&format!("odd {n}"), "c", once(5), 1));
        }
        tested.command_of(&["ZADD", "rl:{log}:c", "1.5", "0000000000000001:1"]).await;
        asks.push(Ask::new("log", "c", once(5), 1).by(named("sliding_log")));
        let odd = asks.len();
        asks.extend((0..8).map(|n| Ask::new(&format!("key {n}"), "c", once(5), 1)));
        let calls = asks.iter().map(|ask| store.decide(vec![ask.hit()], None));
        for (n, decided) in join_all(calls).await.into_iter().enumerate() {
            match decided {
                Err(StoreError::Failed(_)) => assert!(n < odd, "{}: {n}", tested.name),
                decided => {
                    assert_eq!((n >= odd, decided.unwrap()[0].remaining), (true, 4), "{}: {n}", tested.name);
                }
            }
        }
    }
}

/// Redis is full until a key is deleted in the same script call; from then on it takes what is written.
#[tokio::test]
async fn a_call_that_fails_halfway_has_charged_nothing_and_given_nothing_back() {
    for tested in each_on_redis(&Clock::system()).await {
        let url = tested.redis.as_ref().unwrap().url();
        let store = connect(&StoreConfig { connections: 1, ..config(&url) }, Clock::system()).unwrap();
        let ask = |key: &str, cost| Ask::new(key, "c", once(5), cost);
        let held = ask("held", 1).leased(1, Duration::from_secs(60));
        held.of(&*store).await;
        assert!(ask("used", 3).of(&*store).await.allowed());
        tested.command(&["CONFIG", "SET", "maxmemory", "1"]).await;

        let log = || ask("log", 1).by(named("sliding_log")).hit();
        let back = Ask { charge: Charge::GiveBack(Cost::ONE), ..ask("used", 0) };
        let failing = [
            vec![ask("lent", 5).leased(5, Duration::from_secs(60)).hit()],
            vec![ask("both", 5).hit(), log()],
            vec![back.hit(), log()],
        ];
        let sound = [ask("lent", 1), ask("both", 1), ask("used", 0)];
        // Should the first one go out alone, it writes nothing.
        let first = store.decide(vec![ask("other", 0).hit()], None);
        let calls = failing.into_iter().chain(sound.iter().map(|ask| vec![ask.hit()]));
        let (_, decided, settled) = tokio::join!(
            first,
            join_all(calls.map(|hits| store.decide(hits, None))),
            store.settle(held.settlement(1), None),
        );
        assert_eq!(settled, Ok(Cost::ONE), "{}", tested.name);
        for failed in &decided[..3] {
            assert!(matches!(failed, Err(StoreError::Failed(_))), "{}: {failed:?}", tested.name);
        }
        let left: Vec<_> =
            decided[3..].iter().map(|decided| decided.as_ref().unwrap()[0].remaining).collect();
        assert_eq!(left, [4, 4, 2], "{}", tested.name);
        tested.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
        for (ask, left) in sound.iter().zip(left) {
            assert_eq!(crate::stores::left(&*store, ask).await, left, "{}: {}", tested.name, ask.key);
        }
    }
}

/// A bucket that can not be read leaves the lease as it is.
#[tokio::test]
async fn a_settlement_that_fails_can_be_made_again() {
    for tested in each_on_redis(&Clock::system()).await {
        let lease = Ask::new("k", "c", once(5), 1).leased(3, Duration::from_secs(60));
        lease.of(&*tested.store).await;
        let bucket = "rl:{k}:c";
        tested.command_of(&["RENAME", bucket, "aside"]).await;
        tested.set(bucket, "Å".as_bytes()).await;
        assert!(tested.store.settle(lease.settlement(3), None).await.is_err(), "{}", tested.name);
        tested.command_of(&["RENAME", "aside", bucket]).await;
        assert_eq!(tested.store.settle(lease.settlement(3), None).await, Ok(Cost::new(3)), "{}", tested.name);
    }
}

#[tokio::test]
async fn a_call_of_nothing_is_answered_with_nothing() {
    for tested in each_on_redis(&Clock::system()).await {
        assert_eq!(tested.store.decide(Vec::new(), None).await, Ok(Vec::new()), "{}", tested.name);
    }
}

/// A call that fails inside the script fails alone, wherever in it that is.
#[tokio::test]
async fn a_key_that_holds_something_else_spoils_its_own_call_only() {
    for tested in each_on_redis(&Clock::system()).await {
        // The start of a long msgpack string, and no more.
        assert_eq!(tested.command(&["SET", "rl:{spoilt}:c", "Å"]).await, "OK");
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
