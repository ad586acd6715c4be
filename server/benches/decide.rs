//! What a decision costs below the transport. `cargo bench -p tollgate-server`.
//!
//! These are for comparing two versions of this code on one machine. What a decision costs a process, with the
//! transport, is measured by `examples/load`.

#![expect(clippy::expect_used, reason = "a benchmark that can not be set up has nothing to say")]

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use futures_util::FutureExt as _;
use std::hint::black_box;
use std::time::Duration;
use tollgate_server::algorithm::{ALL, Algorithm};
use tollgate_server::clock::Clock;
use tollgate_server::limit::{Cost, Limit, Rate, State, Timestamp, Want};
use tollgate_server::name::BucketName;
use tollgate_server::request::{Charge, Hit};
use tollgate_server::rules::{Limited, Rule, Rules};
use tollgate_server::store::Store as _;
use tollgate_server::store::memory::Memory;
use tollgate_server::store::redis::batch::{Call, pack};

const ONE: Want = Want { at_least: Cost::ONE, at_most: Cost::ONE };

/// From one to the next that is asked for: not in the order in which they are kept, which a processor foresees.
const STRIDE: usize = 7919;

fn limit(count: u64, seconds: u64, burst: u64) -> Limit {
    let rate = Rate::new(count, Duration::from_secs(seconds)).expect("a rate that can be");
    Limit::new(rate, burst).expect("a burst that can be")
}

/// One bucket at half of its limit: each call is decided and charged.
fn algorithms(c: &mut Criterion) {
    let mut group = c.benchmark_group("algorithm");
    let limit = limit(1000, 1, 1000);
    for algorithm in ALL {
        let (mut state, mut now) = (State::default(), 1_700_000_000_000_000);
        group.bench_function(algorithm.name, |b| {
            b.iter(|| {
                now += 2000;
                let at = Timestamp::from_micros(now);
                let decision = (algorithm.decide)(&limit, black_box(&state), at, ONE);
                (algorithm.charge)(&limit, &mut state, at, decision.granted);
                decision
            });
        });
    }
    group.finish();
}

/// The rule of a class, of few and of many.
fn rules(c: &mut Criterion) {
    let mut group = c.benchmark_group("rule of a class");
    for classes in [10_usize, 10_000] {
        let names: Vec<_> = (0..classes).map(|n| format!("class-{n:05}")).collect();
        let rules = Rules::new(names.iter().map(|class| rule(class)));
        let mut at = 0;
        group.bench_function(format!("{classes} classes"), |b| {
            b.iter(|| {
                at = (at + STRIDE) % classes;
                names.get(at).and_then(|class| rules.class(black_box(class)))
            });
        });
    }
    group.finish();
}

fn rule(class: &str) -> Rule {
    let limited = Limited {
        limit: limit(1000, 1, 1000),
        algorithm: token_bucket(),
        cost: Cost::ONE,
        sensitive: false,
        penalty: None,
        shadow: false,
        wait: true,
    };
    Rule::new(class, Some(limited))
}

/// One hit, allowed and charged, in a store with few and with many buckets, and always on the same one.
fn memory(c: &mut Criterion) {
    let mut group = c.benchmark_group("memory store");
    // Neither is ever empty here, and nothing is forgotten of the first.
    let (kept, hot) = (limit(1, 3600, 1_000_000), limit(1_000_000, 1, Limit::MOST_BURST));
    let names: Vec<_> = (0..1_000_000).map(|n| BucketName::new(&format!("user-{n:08}"), "read")).collect();
    for (what, keys, limit) in
        [("a hot key", 1, hot), ("1000 keys", 1_000, kept), ("1000000 keys", 1_000_000, kept)]
    {
        let memory = Memory::new(2_000_000, 1 << 30, Clock::system());
        let decide = |hit: Hit| memory.decide(vec![hit], None).now_or_never();
        for name in names.iter().take(keys) {
            decide(hit(name, limit));
        }
        let mut at = 0;
        group.bench_function(what, |b| {
            let next = || {
                at = (at + STRIDE) % keys;
                hit(names.get(at).expect("there are so many"), limit)
            };
            b.iter_batched(next, decide, BatchSize::SmallInput);
        });
    }
    group.finish();
}

/// What waits is made one script call: all of one class, and each key once or all calls on one key.
fn packing(c: &mut Criterion) {
    let mut group = c.benchmark_group("script packing");
    let limit = limit(100, 1, 200);
    for (what, calls, keys) in
        [("1 call", 1, 1), ("64 calls, 64 keys", 64, 64), ("64 calls, a hot key", 64, 1)]
    {
        let name = |n: usize| BucketName::new(&format!("user-{:08}", n % keys), "read");
        let waiting: Vec<_> = (0..calls).map(|n| Call::Decide(vec![hit(&name(n), limit)])).collect();
        let waiting: Vec<_> = waiting.iter().collect();
        group.throughput(Throughput::Elements(u64::try_from(calls).expect("they are few")));
        group.bench_function(what, |b| b.iter(|| pack("rl", None, black_box(&waiting))));
    }
    group.finish();
}

fn hit(bucket: &BucketName, limit: Limit) -> Hit {
    Hit {
        bucket: bucket.clone(),
        limit,
        algorithm: token_bucket(),
        want: ONE,
        shadow: false,
        sensitive: false,
        quota: false,
        charge: Charge::IfAllowed,
        strikes: None,
        lease: None,
    }
}

/// The default.
fn token_bucket() -> &'static Algorithm {
    ALL.first().expect("there are algorithms")
}

criterion_group!(benches, algorithms, rules, memory, packing);
criterion_main!(benches);
