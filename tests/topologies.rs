//! Redis in several servers: a cluster, and a primary under a sentinel; and Redis by TLS.

mod failover;
mod locked;
mod overload;

use crate::stores::{Ask, START, Tested, config, kinds_and_topologies, left, named, once, open};
use crate::stores::{Kind, at_once};
use crate::support::several::{Cluster, Watched};
use crate::support::{Tollgate, engines, eventually, say};
use deadpool_redis::redis::{Value, cmd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tollgate_server::algorithm::ALL;
use tollgate_server::clock::Clock;
use tollgate_server::limit::{Cost, Reason, Timestamp, Want};
use tollgate_server::request::Charge;
use tollgate_server::store::{Store, connect};

async fn clusters(clock: &Clock) -> Vec<Tested> {
    let mut clusters = Vec::new();
    for kind in kinds_and_topologies() {
        if matches!(kind, Kind::Cluster(_)) {
            clusters.push(kind.start(clock).await);
        }
    }
    clusters
}

/// A call of several slots is charged everywhere or nowhere, and tells what one Redis would.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_over_several_slots_is_held_up_as_on_one_redis() {
    let clock = Clock::manual(START);
    for tested in clusters(&clock).await {
        let one = crate::stores::memory(&clock);
        let store = &tested.store;
        let mut at = START.as_micros();
        for algorithm in ALL {
            let ask = |key: &str, burst, cost| {
                Ask::new(&format!("{key} {}", algorithm.name), "c", once(burst), cost).by(algorithm)
            };
            for step in 0..12 {
                at += 1_000;
                clock.set(Timestamp::from_micros(at));
                // The narrow one denies from its third call on; what is watched or one of two ways to pay does not.
                let wide = ask("wide", 40, 3);
                let narrow = ask("narrow", 5, 2);
                let watched = Ask { shadow: true, ..ask("watched", 1, 1) };
                let quotas = [Ask { quota: true, ..ask("a", 3, 1) }, Ask { quota: true, ..ask("b", 6, 1) }];
                let always = Ask { charge: Charge::Always(Cost::new(2)), ..ask("always", 4, 2) };
                let calls = [
                    vec![wide.clone(), narrow],
                    vec![watched, wide.clone()],
                    [vec![wide], quotas.to_vec()].concat(),
                    vec![always, ask("empty", 1, 2 * (step % 2))],
                ];
                for call in calls {
                    let hits = || call.iter().map(Ask::hit).collect();
                    let expected = one.decide(hits(), None).await.unwrap();
                    let decided = store.decide(hits(), None).await.unwrap();
                    assert_eq!(decided, expected, "{} by {algorithm:?}, step {step}: {call:#?}", tested.name);
                }
            }
        }
    }
}

/// What belongs to one key is in one slot, so strikes, blocks and leases are decided in one step.
#[tokio::test(flavor = "multi_thread")]
async fn everything_of_a_key_is_in_one_slot() {
    for tested in clusters(&Clock::system()).await {
        let cluster = tested.cluster.as_ref().unwrap();
        let hits = (0..100).map(|n| Ask::new(&format!("key:{n} {{é}}"), "c", once(10), 1));
        let calls = hits.map(|ask| {
            let store = tested.store.clone();
            async move { ask.of(&*store).await.allowed() }
        });
        assert!(at_once(calls).await.into_iter().all(|allowed| allowed), "{}", tested.name);
        assert_eq!(cluster.keys().await.len(), 100, "{}", tested.name);
        for node in &cluster.nodes {
            assert!(node.keys().await.len() > 10, "{}: every node has some", tested.name);
        }
    }
}

/// While slots move from node to node under load every call is decided, and no token is spent twice or lost.
#[tokio::test(flavor = "multi_thread")]
async fn slots_move_under_load() {
    const BURST: u64 = 1_000_000;
    for tested in clusters(&Clock::system()).await {
        let cluster = tested.cluster.as_ref().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let keys = ["a", "b", "c", "d"];
        let callers: Vec<_> = (0..16)
            .map(|n| {
                let (store, stop) = (tested.store.clone(), stop.clone());
                let ask = Ask::new(keys[n % 4], "c", once(BURST), 1);
                tokio::spawn(async move {
                    let (mut allowed, mut failed) = (0_u64, 0_u64);
                    while !stop.load(Ordering::Relaxed) {
                        match store.decide(vec![ask.hit()], None).await {
                            Ok(decisions) => allowed += u64::from(decisions[0].allowed()),
                            Err(_) => failed += 1,
                        }
                    }
                    (n % 4, allowed, failed)
                })
            })
            .collect();
        for key in keys {
            for round in 0..2 {
                migrate(cluster, &format!("rl:{{{key}}}:c"), round).await;
            }
        }
        stop.store(true, Ordering::Relaxed);
        let (mut allowed, mut failed) = ([0; 4], 0);
        for caller in callers {
            let (key, its_allowed, its_failed) = caller.await.unwrap();
            allowed[key] += its_allowed;
            failed += its_failed;
        }
        let mut all = 0;
        for (key, allowed) in keys.iter().zip(allowed) {
            all += allowed;
            let spent = BURST - left(&*tested.store, &Ask::new(key, "c", once(BURST), 1)).await;
            assert!(spent >= allowed && spent <= allowed + failed, "{}: {spent} of {allowed}", tested.name);
        }
        say(&format!("{}: 8 slots moved, {all} decided, {failed} not, 0 lost", tested.name));
        assert!(failed * 20 < all, "{}: {failed} of {all}", tested.name);
    }
}

/// Moves the slot of that key to the next primary, as `redis-cli` would.
async fn migrate(cluster: &Cluster, key: &str, _round: usize) {
    let slot: u16 = from(&cluster.nodes[0].command(&["CLUSTER", "KEYSLOT", key]).await);
    let slot = slot.to_string();
    let mut ids = Vec::new();
    let mut owner = None;
    for (place, node) in cluster.nodes.iter().enumerate() {
        let id: String = from(&node.command(&["CLUSTER", "MYID"]).await);
        ids.push(id);
        if node.try_command(&["EXISTS", key]).await.is_ok() {
            owner = Some(place);
        }
    }
    let source = owner.expect("some node owns it");
    let target = (source + 1) % 3;
    let (from_node, to_node) = (&cluster.nodes[source], &cluster.nodes[target]);
    to_node.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &ids[source]]).await;
    from_node.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &ids[target]]).await;
    loop {
        let keys: Vec<String> = from(&from_node.command(&["CLUSTER", "GETKEYSINSLOT", &slot, "10"]).await);
        if keys.is_empty() {
            break;
        }
        let port = to_node.port().to_string();
        for key in keys {
            from_node.command(&["MIGRATE", "127.0.0.1", &port, &key, "0", "5000"]).await;
        }
    }
    for node in [to_node, from_node].into_iter().chain(&cluster.nodes) {
        node.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &ids[target]]).await;
    }
}

fn from<T: deadpool_redis::redis::FromRedisValue>(value: &Value) -> T {
    deadpool_redis::redis::from_redis_value(value.clone()).unwrap()
}

/// A primary of a cluster dies; its replica takes over, and until then its keys are decided here.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_takes_over_in_a_cluster() {
    for engine in engines() {
        let mut cluster = Cluster::start(engine, true).await;
        let text = format!(
            "store: {{ url: \"{}\", deadline: 1s }}\nclasses: {{ read: {{ rate: 1/h, burst: 100000 }} }}",
            cluster.url()
        );
        let server = Tollgate::start(&text).await;
        let caller = server.serving().await;
        let mut key = None;
        for n in 0..100 {
            let name = format!("rl:{{key{n}}}:read");
            if cluster.nodes[0].try_command(&["EXISTS", &name]).await.is_ok() {
                key = Some(format!("key{n}"));
                break;
            }
        }
        let key = key.unwrap();
        for _ in 0..10 {
            assert!(!caller.ask(&key, "read", None).await.degraded);
        }
        let replica = &cluster.nodes[3];
        eventually("the replica knows", async || {
            let mut connection = replica.connection(Duration::from_secs(1)).await.ok()?;
            cmd("READONLY").exec_async(&mut connection).await.ok()?;
            let name = format!("rl:{{{key}}}:read");
            let there: u64 = cmd("EXISTS").arg(name).query_async(&mut connection).await.ok()?;
            (there == 1).then_some(())
        })
        .await;
        cluster.nodes[0].kill();
        let mut degraded = 0;
        let back = eventually("the replica has taken over", async || {
            let answer = caller.ask(&key, "read", None).await;
            degraded += u64::from(answer.degraded);
            (!answer.degraded).then_some(answer)
        })
        .await;
        say(&format!("{engine:?} cluster: {degraded} calls were decided here until the replica took over"));
        // A call whose answer was lost may have been charged.
        let spent = 100_000 - back.remaining;
        assert!((11..=11 + degraded).contains(&spent), "{engine:?}: {spent} spent, {degraded} degraded");
    }
}

/// The primary dies; the sentinel makes its replica the primary, and nobody is told.
#[tokio::test(flavor = "multi_thread")]
async fn a_sentinel_names_another_primary() {
    for engine in engines() {
        let mut watched = Watched::start(engine).await;
        let text = format!(
            "store: {{ url: \"{}\", deadline: 1s }}\nclasses: {{ read: {{ rate: 1/h, burst: 100000 }} }}",
            watched.url()
        );
        let server = Tollgate::start(&text).await;
        let caller = server.serving().await;
        for _ in 0..10 {
            assert!(!caller.ask("alice", "read", None).await.degraded);
        }
        eventually("the replica knows", async || {
            let keys = watched.replica.keys().await;
            keys.contains(&"rl:{alice}:read".to_owned()).then_some(())
        })
        .await;
        watched.primary.kill();
        caller.until_ready(false).await;
        assert!(caller.ask("alice", "read", None).await.degraded);
        caller.until_ready(true).await;
        let answer = caller.ask("alice", "read", None).await;
        assert!(!answer.degraded, "{engine:?}: {answer:?}\n{}", watched.output());
        assert_eq!(answer.remaining, 100_000 - 11, "{engine:?}: what the replica knew is still spent");
    }
}

/// The differential test asks one slot at a time: there a cluster is as exact as one Redis.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_and_a_penalty_work_in_a_cluster() {
    let clock = Clock::manual(START);
    for tested in clusters(&clock).await {
        let ask = Ask::new("k", "c", once(10), 1).by(named("token_bucket"));
        let want = Want { at_least: Cost::ONE, at_most: Cost::new(6) };
        let lease = Ask { want, ..ask.clone() }.leased(6, Duration::from_secs(1));
        assert_eq!(lease.of(&*tested.store).await.granted, Cost::new(6), "{}", tested.name);
        assert_eq!(left(&*tested.store, &ask).await, 4);
        assert_eq!(tested.store.settle(lease.settlement(5), None).await, Ok(Cost::new(5)));
        assert_eq!(tested.store.settle(lease.settlement(5), None).await, Ok(Cost::ZERO));
        assert_eq!(left(&*tested.store, &ask).await, 9);
        let other = tested.another();
        assert_eq!(left(&*other, &ask).await, 9, "{}", tested.name);
        let nine = Ask { want: Want::exactly(Cost::new(9)), ..ask.clone() };
        assert!(nine.of(&*other).await.allowed());
        assert_eq!(ask.of(&*tested.store).await.denied, Some(Reason::OverLimit));
    }
}

/// Instances of a cluster are counted as those of one Redis.
#[tokio::test(flavor = "multi_thread")]
async fn instances_are_counted_everywhere() {
    for engine in engines() {
        let cluster = Cluster::start(engine, false).await;
        let watched = Watched::start(engine).await;
        for url in [cluster.url(), watched.url()] {
            let stores: Vec<Arc<dyn Store>> = (0..3).map(|_| open(&url, &Clock::system())).collect();
            for store in &stores {
                eventually("all are counted", async || (store.heartbeat().await == Ok(3)).then_some(()))
                    .await;
            }
        }
    }
}

#[tokio::test]
async fn what_can_not_be_reached_is_told_without_a_secret() {
    for url in [
        "redis-sentinel://:hunter2@127.0.0.1:1/main",
        "redis-cluster://:hunter2@127.0.0.1:1",
        "rediss://:hunter2@127.0.0.1:1",
    ] {
        let store = connect(&config(url), Clock::system()).unwrap();
        let error = store.heartbeat().await.unwrap_err().to_string();
        assert!(!error.contains("hunter2"), "{error}");
    }
}
