//! However many ask at once, and through however many instances, a bucket gives what it has and no more.

use crate::stores::{Ask, START, Tested, at_once, each_and_topologies, left, once};
use std::sync::Arc;
use std::time::Duration;
use tollgate_server::algorithm::ALL;
use tollgate_server::clock::Clock;
use tollgate_server::limit::{Cost, Reason};
use tollgate_server::penalty::Penalty;
use tollgate_server::request::Strikes;
use tollgate_server::store::Store;

const CALLERS: usize = 64;
/// How many instances share a Redis.
const INSTANCES: [usize; 3] = [1, 2, 4];

fn instances(tested: &Tested, count: usize) -> Vec<Arc<dyn Store>> {
    (0..count).map(|n| if n == 0 { tested.store.clone() } else { tested.another() }).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_at_once_get_exactly_the_limit() {
    let clock = Clock::manual(START);
    for tested in each_and_topologies(&clock).await {
        for (algorithm, count) in ALL.iter().flat_map(|algorithm| INSTANCES.map(|count| (algorithm, count))) {
            let stores = instances(&tested, count);
            let ask = Ask::new(&format!("{algorithm:?} by {count}"), "c", once(100), 1).by(algorithm);
            let calls = (0..CALLERS).map(|n| {
                let (store, ask) = (stores[n % count].clone(), ask.clone());
                async move {
                    let mut allowed = 0;
                    for _ in 0..3 {
                        allowed += usize::from(ask.of(&*store).await.allowed());
                    }
                    allowed
                }
            });
            let allowed: usize = at_once(calls).await.iter().sum();
            assert_eq!(allowed, 100, "{algorithm:?} on {} by {count} instances", tested.name);
        }
    }
}

/// As above, but by the time of the machine and of Redis, as in life.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_at_once_get_exactly_the_limit_in_real_time() {
    for tested in each_and_topologies(&Clock::system()).await {
        for count in INSTANCES {
            let stores = instances(&tested, count);
            let ask = Ask::new(&format!("by {count}"), "c", once(40), 1);
            let calls = (0..CALLERS).map(|n| {
                let (store, ask) = (stores[n % count].clone(), ask.clone());
                async move { ask.of(&*store).await.allowed() }
            });
            let allowed = at_once(calls).await.into_iter().filter(|allowed| *allowed).count();
            assert_eq!(allowed, 40, "{} by {count} instances", tested.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_lost_between_callers_with_different_costs() {
    let clock = Clock::manual(START);
    for tested in each_and_topologies(&clock).await {
        for algorithm in ALL {
            let stores = instances(&tested, 2);
            let ask = |cost| Ask::new(&format!("{algorithm:?}"), "c", once(150), cost).by(algorithm);
            let calls = (0..CALLERS).map(|n| {
                let ask = ask(u64::try_from(n % 7).unwrap());
                let store = stores[n % 2].clone();
                async move { ask.of(&*store).await.granted.get() }
            });
            let granted: u64 = at_once(calls).await.into_iter().sum();
            assert_eq!(
                granted + left(&*tested.store, &ask(0)).await,
                150,
                "{algorithm:?} on {}",
                tested.name
            );
        }
    }
}

/// Two buckets a call, named in either order, so that stores which lock them one after the other would wait
/// for each other for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_buckets_are_charged_alike_or_not_at_all() {
    let clock = Clock::manual(START);
    for tested in each_and_topologies(&clock).await {
        for (algorithm, count) in ALL.iter().flat_map(|algorithm| INSTANCES.map(|count| (algorithm, count))) {
            let stores = instances(&tested, count);
            let of_key = |key, burst, cost| {
                Ask::new(&format!("{key} {algorithm:?} {count}"), "c", once(burst), cost).by(algorithm)
            };
            let (wide, narrow) = (|cost| of_key("wide", 90, cost), |cost| of_key("narrow", 70, cost));
            let calls = (0..CALLERS).map(|n| {
                let store = stores[n % count].clone();
                let cost = u64::try_from(n % 3).unwrap() + 1;
                let mut hits = vec![wide(cost).hit(), narrow(cost).hit()];
                if n % 2 == 1 {
                    hits.reverse();
                }
                async move {
                    let mut granted = 0;
                    for _ in 0..2 {
                        let decisions = store.decide(hits.clone(), None).await.unwrap();
                        let [one, other] = decisions[..] else { panic!("{decisions:?}") };
                        assert_eq!(one.granted, other.granted, "{one:?} and {other:?}");
                        assert!(one.granted == Cost::new(cost) || one.granted == Cost::ZERO);
                        granted += one.granted.get();
                    }
                    granted
                }
            });
            let granted: u64 = at_once(calls).await.into_iter().sum();
            let what = format!("{algorithm:?} on {} by {count} instances", tested.name);
            // In a cluster, calls that are held up have taken something for a moment, which others then miss.
            let least = if tested.cluster.is_some() { 10 } else { 68 };
            assert!((least..=70).contains(&granted), "{what}: {granted} of 70");
            assert_eq!(left(&*tested.store, &wide(0)).await, 90 - granted, "{what}");
            assert_eq!(left(&*tested.store, &narrow(0)).await, 70 - granted, "{what}");
        }
    }
}

/// Strikes come from everywhere, and none is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn strikes_of_callers_at_once_are_all_counted() {
    let day = Duration::from_secs(86_400);
    let most = u32::try_from(CALLERS).unwrap();
    let penalty = Penalty::new(most, day, day / 2, day).unwrap();
    let strikes = Some(Strikes { penalty, reported: 0, on_denial: true });
    let clock = Clock::manual(START);
    for tested in each_and_topologies(&clock).await {
        let stores = instances(&tested, 4);
        let ask = Ask { strikes, ..Ask::new("k", "c", once(1), 1) };
        assert!(ask.of(&*tested.store).await.allowed());
        let calls = (0..CALLERS).map(|n| {
            let (store, ask) = (stores[n % 4].clone(), ask.clone());
            async move { ask.of(&*store).await }
        });
        for decision in at_once(calls).await {
            assert_eq!(decision.denied, Some(Reason::OverLimit), "{}", tested.name);
        }
        let last = ask.of(&*tested.store).await;
        assert!(last.retry_after >= day, "{}: the strike too many blocks: {last:?}", tested.name);
        clock.set(START.after(Duration::from_micros(1)));
        let blocked = ask.of(&*tested.store).await;
        assert_eq!(blocked.denied, Some(Reason::Blocked), "{}", tested.name);
        clock.set(START);
    }
}
