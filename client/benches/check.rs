//! What a decision at hand costs: on one thread, and on several, each with its own key or all with one.
//!
//! `cargo bench -p tollgate-client --bench check`. Times of shared machines are not comparable, ratios of one run
//! are: `clock` is what reading the time takes, which is a part of every decision.
#![allow(missing_docs, clippy::unwrap_used, clippy::disallowed_methods, reason = "a bench")]

#[path = "../tests/stub/mod.rs"]
mod stub;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rustix::time::{ClockId, clock_gettime};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Duration;
use stub::Stub;
use tokio::runtime::{Handle, Runtime};
use tollgate_client::Client;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// A client of a service that has plenty.
fn client(runtime: &Runtime) -> Client {
    runtime.block_on(async {
        let url = Stub::serve(1_000_000_000, 1_000_000_000).await;
        Client::builder(url).deadline(Duration::from_secs(1)).build().unwrap()
    })
}

/// What this thread has computed: on a shared machine, unlike the time of the day, not what others have.
fn processor_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// The time of so many decisions at hand, as one thread makes them. What it waits for the next chunk is not counted.
fn at_hand(client: &Client, runtime: &Handle, key: &str, decisions: u64) -> Duration {
    const RUN: u64 = 1_000;
    let check = || client.check(black_box(key), black_box("read"));
    let (mut made, mut took) = (0, Duration::ZERO);
    while made < decisions {
        if check().is_none() {
            runtime.block_on(client.decide(key, "read", None)).unwrap();
            continue;
        }
        let run = RUN.min(decisions - made);
        let start = processor_time();
        let at_hand = (0..run).take_while(|_| black_box(check()).is_some()).count();
        let its = processor_time().saturating_sub(start);
        if u64::try_from(at_hand) == Ok(run) {
            made += run;
            took += its;
        }
    }
    took
}

fn one_thread(c: &mut Criterion) {
    let runtime = runtime();
    let client = client(&runtime);
    let clock = quanta::Clock::new();
    c.bench_function("clock", |b| b.iter(|| black_box(&clock).raw()));
    c.bench_function("check/allowed", |b| {
        b.iter_custom(|decisions| at_hand(&client, runtime.handle(), "user-17", decisions));
    });
    let denied = runtime.block_on(async { Client::new(Stub::serve(1, 1).await).unwrap() });
    c.bench_function("check/denied", |b| {
        b.iter_custom(|decisions| at_hand(&denied, runtime.handle(), "user-17", decisions));
    });
}

/// The time of one decision of each of so many threads: as that of one thread, as long as there is a core for each.
fn threads(c: &mut Criterion) {
    let runtime = runtime();
    let client = client(&runtime);
    let mut group = c.benchmark_group("check/threads");
    for (name, distinct) in [("a key each", true), ("one key", false)] {
        for threads in [1_usize, 2] {
            group.bench_function(BenchmarkId::new(name, threads), |b| {
                b.iter_custom(|decisions| {
                    let barrier = Barrier::new(threads);
                    let run = |at: usize| {
                        let key = format!("{name} {}", if distinct { at } else { 0 });
                        barrier.wait();
                        at_hand(&client, runtime.handle(), &key, decisions)
                    };
                    std::thread::scope(|scope| {
                        let run = &run;
                        let running: Vec<_> = (0..threads).map(|at| scope.spawn(move || run(at))).collect();
                        running.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
                    })
                });
            });
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    targets = one_thread, threads
}
criterion_main!(benches);
