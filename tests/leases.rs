//! The bounds that leases keep, on every store: I1 and I2 (no more is admitted than without them), I5 (nothing
//! is ever minted), I6 (a Redis that was lost is owed nothing).

mod worlds;

use crate::naive::micros;
use crate::stores::{Ask, START, Tested, at_once, each, kinds, left, limit, memory, named, once};
use crate::support::eventually;
use deadpool_redis::redis::Value;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseResult, TestRunner};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_server::algorithm::ALL;
use tollgate_server::clock::Clock;
use tollgate_server::engine::Engine;
use tollgate_server::limit::{Cost, Decision, Limit, Rate, Timestamp, Want};
use tollgate_server::name::LeaseId;
use tollgate_server::request::{Borrow, Gateway, Hit, Return, Settlement};
use tollgate_server::rules::{Limited, Rule, Rules};
use tollgate_server::store::{Store, StoreError};
use tonic::async_trait;

/// What gateways do with one bucket.
#[derive(Clone, Copy, Debug)]
enum Act {
    Ask { cost: u64 },
    Borrow { gateway: usize, n: u64, valid_for: u64 },
    Spend { gateway: usize, n: u64 },
    Return { gateway: usize },
    Wait(u64),
}

const GATEWAYS: usize = 5;

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let gateway = || 0..GATEWAYS;
    let act = prop_oneof![
        3 => (1..6u64).prop_map(|cost| Act::Ask { cost }),
        4 => (gateway(), 1..15u64, 1..3_000_000u64)
            .prop_map(|(gateway, n, valid_for)| Act::Borrow { gateway, n, valid_for }),
        5 => (gateway(), 1..10u64).prop_map(|(gateway, n)| Act::Spend { gateway, n }),
        2 => gateway().prop_map(|gateway| Act::Return { gateway }),
        4 => (0..1_500_000u64).prop_map(Act::Wait),
        1 => (0..60_000_000u64).prop_map(Act::Wait),
    ];
    prop::collection::vec(act, 1..80)
}

fn small_limits() -> impl Strategy<Value = Limit> {
    (1..=30u64, 1..=20_000_000u64, 1..=40u64).prop_map(|(count, period, burst)| {
        Limit::new(Rate::new(count, Duration::from_micros(period.max(count))).unwrap(), burst).unwrap()
    })
}

#[test]
fn with_leases_out_no_more_is_admitted_than_without() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let clock = Clock::manual(START);
    let stores = runtime.block_on(each(&clock));
    let cases = AtomicU64::new(0);
    let config = Config {
        cases: 100,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/regressions/leases.txt"
        )))),
        max_shrink_iters: 2_000,
        ..Config::default()
    };
    let run = |(limit, acts): (Limit, Vec<Act>)| -> TestCaseResult {
        for tested in &stores {
            let key = format!("case {}", cases.fetch_add(1, Ordering::Relaxed));
            runtime.block_on(live(tested, &clock, Ask::new(&key, "c", limit, 1), &acts))?;
        }
        Ok(())
    };
    TestRunner::new(config).run(&(small_limits(), acts()), run).unwrap_or_else(|why| panic!("{why}"));
}

/// A lease, and what its gateway has not yet spent of it.
struct Held {
    ask: Ask,
    unspent: u64,
    ends: u64,
}

fn lease_key(ask: &Ask) -> String {
    format!("rl:lease:{}", ask.lease.as_ref().unwrap().id)
}

/// How things stood at some time.
struct Stand {
    at: u64,
    admitted: u64,
    outstanding: u64,
}

async fn live(tested: &Tested, clock: &Clock, bucket: Ask, acts: &[Act]) -> TestCaseResult {
    let (store, name) = (&*tested.store, &tested.name);
    let mut now = START.as_micros();
    let mut held: Vec<Vec<Held>> = std::iter::repeat_with(Vec::new).take(GATEWAYS).collect();
    let mut admitted = 0;
    let mut stands = vec![Stand { at: now, admitted: 0, outstanding: 0 }];
    for act in acts {
        clock.set(Timestamp::from_micros(now));
        match *act {
            Act::Ask { cost } => {
                let cost = cost.min(bucket.limit.burst());
                let want = Want::exactly(Cost::new(cost));
                admitted += Ask { want, ..bucket.clone() }.of(store).await.granted.get();
            }
            Act::Borrow { gateway, n, valid_for } => {
                let ask = bucket.clone().leased(n, Duration::from_micros(valid_for));
                let unspent = ask.of(store).await.granted.get();
                held[gateway].push(Held { ask, unspent, ends: now + valid_for });
            }
            Act::Spend { gateway, n } => {
                // What has ended is not spent any more.
                let mut n = n;
                for lease in held[gateway].iter_mut().filter(|lease| lease.ends > now) {
                    let spent = n.min(lease.unspent);
                    lease.unspent -= spent;
                    n -= spent;
                    admitted += spent;
                }
            }
            Act::Return { gateway } => {
                // In time or not.
                for lease in held[gateway].drain(..) {
                    if let Some(redis) = tested.redis.as_ref().filter(|_| lease.ends <= now) {
                        // The time is not its own, so it can not end what has ended.
                        redis.command(&["DEL", &lease_key(&lease.ask)]).await;
                    }
                    let settlement = lease.ask.settlement(lease.unspent);
                    let credited = store.settle(settlement, None).await.unwrap().get();
                    prop_assert!(credited <= lease.unspent, "{}: {} of {}", name, credited, lease.unspent);
                }
            }
            Act::Wait(span) => now += span,
        }
        let alive = held.iter().flatten().filter(|lease| lease.ends > now);
        let outstanding = alive.map(|lease| lease.unspent).sum();
        stands.push(Stand { at: now, admitted, outstanding });
        for since in &stands {
            let rate = bucket.limit.rate();
            let came = u128::from(now - since.at) * u128::from(rate.count());
            let may =
                u128::from(bucket.limit.burst() + since.outstanding) * u128::from(micros(rate.period()));
            let did = u128::from(admitted - since.admitted) * u128::from(micros(rate.period()));
            prop_assert!(
                did <= may + came,
                "{}: {} admitted in {} us, with {} outstanding at their start",
                name,
                admitted - since.admitted,
                now - since.at,
                since.outstanding
            );
        }
    }
    Ok(())
}

async fn settle(store: &dyn Store, ask: &Ask, unused: u64) -> u64 {
    store.settle(ask.settlement(unused), None).await.unwrap().get()
}

fn a_second() -> Duration {
    Duration::from_secs(1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_lease_that_many_return_at_once_is_settled_once() {
    let clock = Clock::manual(START);
    for tested in each(&clock).await {
        for algorithm in ALL {
            let lease =
                Ask::new(&format!("{algorithm:?}"), "c", once(20), 1).by(algorithm).leased(10, a_second());
            assert_eq!(lease.of(&*tested.store).await.granted.get(), 10);
            let stores = [tested.store.clone(), tested.another()];
            let returns = (0..64_usize).map(|n| {
                let (store, lease) = (stores[n % 2].clone(), lease.clone());
                async move { settle(&*store, &lease, 7).await }
            });
            let mut credited = at_once(returns).await;
            credited.sort_unstable();
            let (last, others) = credited.split_last().unwrap();
            assert!(others.iter().all(|credited| *credited == 0), "{}: {credited:?}", tested.name);
            // Some algorithms keep no room for what comes back.
            assert!(*last <= 7, "{}: {credited:?}", tested.name);
            if algorithm.name == "token_bucket" {
                assert_eq!(*last, 7, "{}", tested.name);
            }
            assert_eq!(left(&*tested.store, &lease).await, 10 + last, "{algorithm:?} on {}", tested.name);
        }
    }
}

#[tokio::test]
async fn no_more_comes_back_than_is_out_and_than_there_is_room_for() {
    let clock = Clock::manual(START);
    for tested in each(&clock).await {
        for algorithm in ALL {
            clock.set(START);
            let ask = |key| Ask::new(&format!("{algorithm:?} {key}"), "c", limit(1, 1, 10), 1).by(algorithm);
            let what = format!("{algorithm:?} on {}", tested.name);

            let much = ask("much").leased(4, a_second());
            ask("much").of(&*tested.store).await;
            assert_eq!(much.of(&*tested.store).await.granted.get(), 4, "{what}");
            let credited = settle(&*tested.store, &much, u32::MAX.into()).await;
            assert!(credited <= 4, "{what}: {credited} of 4");
            assert!(left(&*tested.store, &much).await <= 9, "{what}");

            // It fills up meanwhile.
            let full = ask("full").leased(4, Duration::from_secs(60));
            full.of(&*tested.store).await;
            clock.set(START.after(Duration::from_secs(3)));
            let credited = settle(&*tested.store, &full, 4).await;
            assert!(left(&*tested.store, &full).await <= 10 && credited <= 4, "{what}: {credited}");
            if algorithm.name == "token_bucket" {
                assert_eq!(credited, 1, "{what}");
            }
        }
    }
}

#[tokio::test]
async fn what_is_no_lease_of_ours_is_worth_nothing() {
    let clock = Clock::manual(START);
    for tested in each(&clock).await {
        let lease = Ask::new("k", "c", once(20), 1).leased(10, a_second());
        let other = Ask::new("other", "c", once(20), 1).leased(10, a_second());
        lease.of(&*tested.store).await;
        other.of(&*tested.store).await;
        let id = lease.lease.as_ref().unwrap().id.to_string();
        let nonce = id.rsplit(':').next().unwrap();

        // Never given out; of another key, class; spelt otherwise.
        let never = Ask::new("k", "c", once(20), 1).leased(10, a_second());
        assert_eq!(settle(&*tested.store, &never, 10).await, 0, "{}", tested.name);
        for foreign in [
            format!("{{other}}:c:{nonce}"),
            format!("{{k}}:d:{nonce}"),
            format!("{{%6B}}:c:{nonce}"),
            format!("{{k}}:c:{}", nonce.to_uppercase().replace(char::is_numeric, "A")),
        ] {
            let id = LeaseId::parse(&foreign).unwrap();
            let settlement = Settlement { id, ..lease.settlement(10) };
            let credited = tested.store.settle(settlement, None).await.unwrap();
            assert_eq!(credited, Cost::ZERO, "{}: {foreign}", tested.name);
        }
        assert_eq!(left(&*tested.store, &lease).await, 10, "{}", tested.name);
        assert_eq!(
            settle(&*tested.store, &lease, 10).await,
            10,
            "{}: the real one is as it was",
            tested.name
        );
        assert_eq!(settle(&*tested.store, &other, 10).await, 10, "{}", tested.name);
    }
}

fn engine(store: &Arc<dyn Store>) -> Engine {
    let limited = Limited {
        limit: once(20),
        algorithm: &ALL[0],
        cost: Cost::ONE,
        sensitive: false,
        penalty: None,
        shadow: false,
        wait: true,
    };
    let rules = Rules::new([Rule::new("default", Some(limited))]);
    Engine::new(rules.live(), store.clone(), 512, Clock::system())
}

async fn give_back(engine: &Engine, lease: &str, unused: u32) -> Cost {
    engine.settle(&Return { lease_id: lease.into(), unused }, None).await.unwrap()
}

#[tokio::test]
async fn a_return_of_anything_else_is_taken_and_credits_nothing() {
    for tested in each(&Clock::manual(START)).await {
        let engine = engine(&tested.store);
        let borrow = Borrow { key: "k".into(), class: "c".into(), n: 10, ..Borrow::default() };
        let lease = engine.borrow(borrow).await.unwrap().id.unwrap().to_string();
        for garbage in [
            String::new(),
            "garbage".into(),
            "k".into(),
            "{k}:c".into(),
            format!("{lease} "),
            format!(" {lease}"),
            format!("lease:{lease}"),
            lease.replace('}', "%7D"),
            lease[..lease.len() - 1].to_owned(),
            format!("{lease}0"),
            "\0".repeat(100),
            "x".repeat(1 << 20),
        ] {
            let credited = give_back(&engine, &garbage, 10).await;
            assert_eq!(credited, Cost::ZERO, "{}: {:.80}", tested.name, garbage);
        }
        assert_eq!(give_back(&engine, &lease, 3).await, Cost::new(3), "{}", tested.name);
        assert_eq!(give_back(&engine, &lease, 3).await, Cost::ZERO, "{}: again", tested.name);
    }
}

/// A store that must not be asked.
struct Untouched;

#[async_trait]
impl Store for Untouched {
    async fn decide(&self, _: Vec<Hit>, _: Option<Instant>) -> Result<Vec<Decision>, StoreError> {
        panic!("it is asked to decide")
    }

    async fn settle(&self, settlement: Settlement, _: Option<Instant>) -> Result<Cost, StoreError> {
        panic!("it is asked to settle a name of {} bytes", settlement.id.as_str().len())
    }

    async fn heartbeat(&self) -> Result<u32, StoreError> {
        panic!("it is asked whether it is there")
    }
}

/// Many of them in one script call would hold everybody up.
#[tokio::test]
async fn a_name_that_is_too_long_for_a_lease_reaches_no_store() {
    let untouched: Arc<dyn Store> = Arc::new(Untouched);
    let nonce = "0".repeat(32);
    for key in ["k".repeat(3 * (512 + 128)), "k".repeat(4 << 20)] {
        let lease = format!("{{{key}}}:c:{nonce}");
        assert_eq!(give_back(&engine(&untouched), &lease, 10).await, Cost::ZERO, "{} bytes", lease.len());
    }
    // The longest there can be, all of it escaped.
    let engine = engine(&memory(&Clock::manual(START)));
    let borrow = Borrow { key: "é".repeat(256), class: "c".into(), n: 10, ..Borrow::default() };
    let lease = engine.borrow(borrow).await.unwrap().id.unwrap().to_string();
    assert_eq!(give_back(&engine, &lease, 10).await, Cost::new(10), "{} bytes", lease.len());
}

#[tokio::test]
async fn a_lease_that_has_ended_is_worth_nothing() {
    let clock = Clock::manual(START);
    let in_memory = memory(&clock);
    let lease = Ask::new("k", "c", once(20), 1).leased(10, a_second());
    lease.of(&*in_memory).await;
    clock.set(START.after(a_second()));
    assert_eq!(settle(&*in_memory, &lease, 10).await, 0);
    assert_eq!(left(&*in_memory, &lease).await, 10);

    // A Redis ends it in its own time.
    for kind in kinds() {
        let tested = kind.start(&Clock::system()).await;
        let Some(redis) = &tested.redis else { continue };
        let lease = lease.clone().leased(10, Duration::from_millis(20));
        assert_eq!(lease.of(&*tested.store).await.granted.get(), 10);
        let name = lease_key(&lease);
        eventually("the lease ends", async || {
            (redis.command(&["EXISTS", &name]).await == Value::Int(0)).then_some(())
        })
        .await;
        assert_eq!(settle(&*tested.store, &lease, 10).await, 0, "{}", tested.name);
        assert_eq!(left(&*tested.store, &lease).await, 10, "{}", tested.name);
    }
}

#[tokio::test]
async fn a_redis_that_was_emptied_is_owed_nothing() {
    for kind in kinds() {
        let mut tested = kind.start(&Clock::system()).await;
        let Some(mut redis) = tested.redis.take() else { continue };
        let store: Arc<dyn Store> = tested.store.clone();
        for restarted in [false, true] {
            let ask = Ask::new("k", "c", once(20), 1);
            let lease = ask.clone().leased(15, Duration::from_secs(600));
            assert_eq!(lease.of(&*store).await.granted.get(), 15, "{}", tested.name);
            if restarted {
                redis.restart().await;
            } else {
                redis.command(&["FLUSHALL"]).await;
            }
            // The first calls may still find the old connections.
            let taken = Ask::new("k", "c", once(20), 1);
            eventually("it decides again", async || store.decide(vec![taken.hit()], None).await.ok()).await;
            let before = left(&*store, &ask).await;
            assert_eq!(settle(&*store, &lease, 15).await, 0, "{}, restarted: {restarted}", tested.name);
            assert_eq!(left(&*store, &ask).await, before, "{}, restarted: {restarted}", tested.name);
        }
    }
}

/// The end of a log is that of its latest grant, and a grant that is given back was none.
#[tokio::test]
async fn what_a_log_gets_back_leaves_the_end_of_what_is_left() {
    let clock = Clock::manual(START);
    let half = Duration::from_secs(1800);
    for tested in each(&clock).await {
        clock.set(START);
        let ask = Ask::new("alice", "read", limit(5, 3600, 5), 1).by(named("sliding_log"));
        ask.of(&*tested.store).await;
        clock.set(START.after(half));
        let lease = ask.clone().leased(3, half);
        assert_eq!(lease.of(&*tested.store).await.granted, Cost::new(3), "{}", tested.name);
        assert_eq!(tested.store.settle(lease.settlement(3), None).await.unwrap(), Cost::new(3));
        let peek = Ask { want: Want::exactly(Cost::ZERO), ..ask }.of(&*tested.store).await;
        assert_eq!((peek.remaining, peek.reset_after), (4, half), "{}", tested.name);
    }
}

/// Under a window so long that a count can not be told exactly, nothing of it is forgiven.
#[tokio::test]
async fn what_comes_back_under_a_much_longer_window_forgives_nothing() {
    let clock = Clock::manual(START);
    for tested in each(&clock).await {
        let ask = Ask::new("alice", "read", limit(1000, 3600, 1000), 1).by(named("sliding_window"));
        let lease = ask.clone().leased(500, Duration::from_secs(60));
        assert_eq!(lease.of(&*tested.store).await.remaining, 500, "{}", tested.name);
        let long = Ask { limit: limit(1, 30 * 86_400, 41), ..lease };
        assert_eq!(
            tested.store.settle(long.settlement(9), None).await.unwrap(),
            Cost::ZERO,
            "{}",
            tested.name
        );
        assert_eq!(left(&*tested.store, &ask).await, 500, "{}", tested.name);
    }
}

/// Who takes ahead is counted, and who tells what it spends gets its share of what there is: alike on every
/// store, through any instance.
#[tokio::test]
async fn gateways_are_counted_and_get_shares_alike() {
    let clock = Clock::manual(START);
    let mut told = Vec::new();
    for tested in each(&clock).await {
        let other = tested.another();
        let mut said = Vec::new();
        // No matter which numbers, as long as they are the same for all.
        let mut random = 7_u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let mut at = START.as_micros();
        for _ in 0..300 {
            at +=
                if draw(60) == 0 { 5_000_000 } else { [0, 1_000, 50_000][usize::try_from(draw(3)).unwrap()] };
            clock.set(Timestamp::from_micros(at));
            let name = format!("gateway {}", draw(6));
            let gateway = Gateway::named(&name, (draw(3) > 0).then(|| Cost::new(draw(30))));
            let algorithm =
                ["token_bucket", "fixed_window", "sliding_log"][usize::try_from(draw(3)).unwrap()];
            let ask = Ask::new(algorithm, "c", limit(20, 1, 100), 1).by(named(algorithm));
            let mut ask = ask.leased(1 + draw(90), Duration::from_secs(1));
            ask.lease.as_mut().unwrap().gateway = Some(gateway);
            ask.lease.as_mut().unwrap().again = draw(2) > 0;
            let store = if draw(2) > 0 { &other } else { &tested.store };
            let decision = ask.of(&**store).await;
            let gateways = u64::from(decision.gateways);
            assert!((1..=6).contains(&decision.gateways), "{}: {decision:?}", tested.name);
            if let Some(spends) = gateway.spends {
                let share = (100 / (2 * gateways)).max(spends.get().min(100 / gateways));
                assert!(decision.granted.get() <= share.max(1), "{}: {decision:?}", tested.name);
            }
            said.push(decision);
        }
        told.push((tested.name, said));
    }
    let (_, first) = &told[0];
    assert!(
        first.iter().any(|decision| decision.gateways == 6)
            && first.iter().any(|decision| decision.gateways == 1)
    );
    for (name, said) in &told[1..] {
        assert_eq!(said, first, "{name}");
    }
}
