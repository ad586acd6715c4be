//! What happens to callers when Redis is away, stalls, comes back empty: counted, on every engine.
//!
//! Until there is a local fallback, a call that Redis can not decide is refused with UNAVAILABLE and says when to
//! ask again. What must hold in any case: every call is answered, no answer is wrong, nothing piles up.

use crate::support::calls::{Caller, allowed, denied, span};
use crate::support::{Redis, Tollgate, engines, eventually, say};
use deadpool_redis::redis::Value;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tollgate_proto::v1::Reason;
use tollgate_server::clock::instant;
use tonic::{Code, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_types::StatusExt as _;

const CALLERS: u32 = 64;

/// More than all of them spend.
const BURST: u64 = 1_250_000;

/// Buckets that nothing flows into while a test looks.
const CLASSES: &str = "classes: { read: { rate: 1/h, burst: 1250000 }, few: { rate: 1/h, burst: 10 } }";

/// A server with the deadline of its store that it has in production.
async fn serve(redis: &Redis) -> Tollgate {
    Tollgate::start(&format!("store: {}\n{CLASSES}", redis.url())).await
}

/// The refusal that a caller can live with: it knows when to ask again.
fn is_unavailable(status: &Status) {
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    let retry = status.get_details_retry_info().expect("google.rpc.RetryInfo");
    assert!(retry.retry_delay.is_some_and(|delay| delay > Duration::ZERO), "{retry:?}");
    assert!(status.metadata().contains_key("retry-after"), "{status:?}");
}

/// Decisions are authoritative again.
async fn until_it_decides(caller: &Caller) {
    eventually("a decision", async || caller.try_ask("anybody", "read", 0).await.ok()).await;
}

fn unhurt(server: &mut Tollgate) {
    assert!(server.process().is_running(), "{}", server.process().output());
    assert!(!server.process().output().contains("panicked"), "{}", server.process().output());
}

/// What became of many calls.
#[derive(Default)]
struct Count {
    made: u64,
    decided: u64,
    refused: u64,
    /// How long each took.
    took: Vec<Duration>,
}

impl Count {
    fn add(&mut self, other: Self) {
        self.made += other.made;
        self.decided += other.decided;
        self.refused += other.refused;
        self.took.extend(other.took);
    }

    /// No call was lost; an answer that is wrong has failed the test by now.
    fn check(&mut self, what: &str) {
        let Self { made, decided, refused, took } = self;
        took.sort_unstable();
        let (median, longest) = (took[took.len() / 2], took[took.len() - 1]);
        say(&format!(
            "{what}: {made} made, {decided} decided, {refused} UNAVAILABLE, {} lost; median {median:?}, longest {longest:?}",
            *made - *decided - *refused
        ));
        assert_eq!(*made, *decided + *refused, "{what}");
        // No measurement, only a guard: a call that hangs takes longer than this on any machine.
        assert!(longest < Duration::from_secs(5), "{what}: {longest:?}");
    }
}

/// What happens to Redis meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mishap {
    /// It stands still and goes on.
    Stalls,
    /// It is killed and starts empty, so that buckets are full again.
    Restarts,
}

/// Callers that ask again and again until they are told to stop, each for a bucket of its own, and each sure of
/// what is left in it.
struct Callers {
    tasks: JoinSet<Count>,
    stop: Arc<AtomicBool>,
}

impl Callers {
    /// Half of them share one connection, and each of the others has one.
    async fn start(server: &Tollgate, mishap: Mishap) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        let shared = server.caller().await;
        for number in 0..CALLERS {
            let caller = if number % 2 == 0 { shared.clone() } else { server.caller().await };
            tasks.spawn(ask_on(caller, number, mishap, stop.clone()));
        }
        Self { tasks, stop }
    }

    async fn stop(mut self) -> Count {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Count::default();
        while let Some(count) = self.tasks.join_next().await {
            all.add(count.unwrap());
        }
        all
    }
}

/// Asks until it is told to stop. Its cost is no other caller's, so an answer to another would not fit.
async fn ask_on(caller: Caller, number: u32, mishap: Mishap, stop: Arc<AtomicBool>) -> Count {
    let cost = 100 + number;
    let key = format!("caller {number}");
    let mut count = Count::default();
    let mut left = BURST;
    while !stop.load(Ordering::Relaxed) {
        count.made += 1;
        let asked = instant();
        let answer = caller.try_ask(&key, "read", cost).await;
        count.took.push(asked.elapsed());
        match answer {
            Ok(response) => {
                count.decided += 1;
                assert!(allowed(&response), "{key}: {response:?}");
                assert_eq!((response.cost, response.limit), (cost, BURST), "{key}");
                // A call that was refused may have been charged too: its answer was lost, or came late.
                let charged = BURST - response.remaining;
                let calls = charged / u64::from(cost);
                let is_its_own = charged.is_multiple_of(u64::from(cost)) && (1..=count.made).contains(&calls);
                assert!(is_its_own, "{key}: {response:?} after {} calls of {cost}", count.made);
                let is_spent = response.remaining < left || mishap == Mishap::Restarts;
                assert!(is_spent, "{key}: {response:?} after {left} were left");
                left = response.remaining;
            }
            Err(status) => {
                is_unavailable(&status);
                count.refused += 1;
            }
        }
    }
    count
}

#[tokio::test]
async fn a_redis_that_is_not_there_at_the_start_is_waited_for() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        redis.kill();
        let mut server = serve(&redis).await;
        let said = server.says("not serving").await;
        assert!(said.contains("the store can not be reached"), "{engine:?}: {said}");

        let caller = server.caller().await;
        assert_eq!(caller.health().await, ServingStatus::NotServing, "{engine:?}");
        assert_eq!(
            caller.health_of("tollgate.v1.RateLimiter").await,
            ServingStatus::NotServing,
            "{engine:?}"
        );
        is_unavailable(&caller.try_ask("alice", "few", None).await.unwrap_err());

        redis.restart().await;
        caller.until_health_is(ServingStatus::Serving).await;
        server.says("the store is reached: serving").await;
        until_it_decides(&caller).await;
        assert_eq!(caller.ask("alice", "few", None).await.remaining, 9, "{engine:?}");
        unhurt(&mut server);
    }
}

/// It answers, but decisions need more.
#[tokio::test]
async fn a_redis_that_can_not_be_written_is_not_one_that_is_reached() {
    let mishaps = [
        ("READONLY", ["REPLICAOF", "127.0.0.1", "1"].as_slice(), ["REPLICAOF", "NO", "ONE"].as_slice()),
        ("OOM", &["CONFIG", "SET", "maxmemory", "1"], &["CONFIG", "SET", "maxmemory", "0"]),
    ];
    for engine in engines() {
        let redis = Redis::start(engine).await;
        let mut server = serve(&redis).await;
        let caller = server.serving().await;
        for (why, mishap, remedy) in mishaps {
            redis.command(mishap).await;
            caller.until_health_is(ServingStatus::NotServing).await;
            is_unavailable(&caller.try_ask("alice", "few", None).await.unwrap_err());
            let says_why = |line: &str| line.contains("not serving") && line.to_uppercase().contains(why);
            server.process().says(why, says_why).await;
            redis.command(remedy).await;
            caller.until_health_is(ServingStatus::Serving).await;
            until_it_decides(&caller).await;
        }
        let keys = redis.command(&["KEYS", "*probe*"]).await;
        assert_eq!(keys, Value::Array(vec![]), "{engine:?}: a probe leaves nothing behind");

        redis.command(&["CONFIG", "SET", "requirepass", "hunter2"]).await;
        let mut other = serve(&redis).await;
        let said = other.says("not serving").await;
        assert!(said.to_uppercase().contains("NOAUTH"), "{engine:?}: {said}");
        assert_eq!(other.caller().await.health().await, ServingStatus::NotServing, "{engine:?}");
        unhurt(&mut server);
        unhurt(&mut other);
    }
}

#[tokio::test]
async fn killed_under_load_every_call_is_answered_and_it_recovers_by_itself() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let mut server = serve(&redis).await;
        let caller = server.serving().await;
        let callers = Callers::start(&server, Mishap::Restarts).await;
        for _ in 0..2 {
            until_it_decides(&caller).await;
            redis.kill();
            caller.until_health_is(ServingStatus::NotServing).await;
            is_unavailable(&caller.try_ask("alice", "few", None).await.unwrap_err());
            redis.restart().await;
            caller.until_health_is(ServingStatus::Serving).await;
        }
        until_it_decides(&caller).await;
        let mut count = callers.stop().await;
        count.check(&format!("{engine:?} killed"));
        assert!(count.decided > 0 && count.refused > 0, "{engine:?}");
        unhurt(&mut server);
    }
}

#[tokio::test]
async fn stalled_every_call_is_answered_and_no_answer_is_anothers() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let mut server = serve(&redis).await;
        let caller = server.serving().await;
        let callers = Callers::start(&server, Mishap::Stalls).await;
        for _ in 0..2 {
            until_it_decides(&caller).await;
            redis.stop();
            caller.until_health_is(ServingStatus::NotServing).await;
            let status = caller.try_ask("alice", "few", None).await.unwrap_err();
            is_unavailable(&status);
            redis.cont();
            caller.until_health_is(ServingStatus::Serving).await;
        }
        until_it_decides(&caller).await;
        let mut count = callers.stop().await;
        count.check(&format!("{engine:?} stalled"));
        assert!(count.decided > 0 && count.refused > 0, "{engine:?}");
        unhurt(&mut server);
    }
}

/// As many calls at once as ten times what is let in: those above are refused at once, those inside within the
/// store's deadline, and then all places are free again.
#[tokio::test]
async fn nothing_piles_up_at_a_stalled_redis() {
    const PLACES: usize = 32;
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let config = format!("server: {{ max_in_flight: {PLACES} }}\nstore: {}\n{CLASSES}", redis.url());
        let mut server = Tollgate::start(&config).await;
        let caller = server.serving().await;
        redis.stop();
        let mut count = Count::default();
        let mut shed = 0;
        let mut calls = JoinSet::new();
        for number in 0..10 * PLACES {
            let caller = caller.clone();
            calls.spawn(async move {
                let asked = instant();
                let answer = caller.try_ask(&format!("caller {number}"), "read", None).await;
                (answer, asked.elapsed())
            });
        }
        while let Some(call) = calls.join_next().await {
            let (answer, took) = call.unwrap();
            let status = answer.expect_err("nobody decides");
            is_unavailable(&status);
            shed += usize::from(status.message().contains("calls are in flight"));
            count.add(Count { made: 1, refused: 1, took: vec![took], decided: 0 });
        }
        count.check(&format!("{engine:?} stalled, {PLACES} places, {shed} shed"));

        redis.cont();
        until_it_decides(&caller).await;
        // Every place is free: as many calls as there are places pass at once.
        let mut calls = JoinSet::new();
        for number in 0..PLACES {
            let caller = caller.clone();
            calls.spawn(async move { caller.try_ask(&format!("again {number}"), "read", None).await });
        }
        while let Some(call) = calls.join_next().await {
            if let Err(status) = call.unwrap() {
                assert!(!status.message().contains("calls are in flight"), "{engine:?}: {status:?}");
            }
        }
        unhurt(&mut server);
    }
}

#[tokio::test]
async fn restarted_empty_buckets_start_full_once() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let config = format!("store: {{ url: \"{}\", deadline: 10s }}\n{CLASSES}", redis.url());
        let mut server = Tollgate::start(&config).await;
        let caller = server.serving().await;
        for restarted in [false, true] {
            if restarted {
                redis.restart().await;
                until_it_decides(&caller).await;
            }
            let mut left = HashSet::new();
            for _ in 0..10 {
                let response = caller.ask("alice", "few", None).await;
                assert!(allowed(&response), "{engine:?}: {response:?}");
                left.insert(response.remaining);
            }
            assert_eq!(left, (0..10).collect(), "{engine:?}: one burst, no more");
            let response = caller.ask("alice", "few", None).await;
            assert_eq!(denied(&response), Reason::OverLimit, "{engine:?}");
            assert!(span(response.retry_after) > Duration::ZERO);
        }
        unhurt(&mut server);
    }
}

/// The server sends its script by hash, and only once by text.
#[tokio::test]
async fn a_flushed_script_is_sent_again_inside_the_call() {
    for engine in engines() {
        let redis = Redis::start(engine).await;
        let config = format!("store: {{ url: \"{}\", deadline: 10s }}\n{CLASSES}", redis.url());
        let server = Tollgate::start(&config).await;
        let caller = server.serving().await;
        for remaining in (0..10).rev() {
            redis.command(&["SCRIPT", "FLUSH"]).await;
            assert_eq!(caller.ask("alice", "few", None).await.remaining, remaining, "{engine:?}");
        }
    }
}
