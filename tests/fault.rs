//! What happens to callers when Redis is away, stalls, comes back empty: counted, on every engine.
//!
//! What must hold in any case: every call is answered, no answer is wrong, nothing piles up, and what is decided
//! without Redis says so.

mod network;
mod shares;

use crate::support::calls::{Caller, allowed, denied, span};
use crate::support::{Redis, Tollgate, engines, eventually, say};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tollgate_proto::v1::{Reason, ShouldRateLimitResponse};
use tollgate_server::clock::instant;
use tonic_health::pb::health_check_response::ServingStatus;

const CALLERS: u32 = 64;

/// More than all of them spend.
const BURST: u64 = 1_250_000;

/// Buckets that nothing flows into while a test looks.
const CLASSES: &str = "classes:
  read:  { rate: 1/h, burst: 1250000 }
  few:   { rate: 1/h, burst: 10 }
  login: { rate: 1/h, burst: 10, sensitive: true }";

/// A server with the deadline of its store that it has in production.
async fn serve(redis: &Redis) -> Tollgate {
    Tollgate::start(&format!("store: {}\n{CLASSES}", redis.url())).await
}

/// Decided here: what is sensitive is denied, the rest by a share, and both say so.
async fn decides_alone(caller: &Caller, key: &str) {
    let shared = caller.ask(key, "few", None).await;
    assert!(allowed(&shared) && shared.degraded && shared.limit == 10, "{shared:?}");
    let sensitive = caller.ask(key, "login", None).await;
    assert!(sensitive.degraded, "{sensitive:?}");
    assert_eq!(denied(&sensitive), Reason::Unavailable, "{sensitive:?}");
    assert_eq!(span(sensitive.retry_after), Duration::from_secs(1), "{sensitive:?}");
    // Without its store it serves all the same.
    for service in ["", "tollgate.v1.RateLimiter", "ratelimit"] {
        assert_eq!(caller.health_of(service).await, ServingStatus::Serving, "{service}");
    }
}

/// Decisions are authoritative again.
async fn until_it_decides(caller: &Caller) {
    let ask = async || Some(caller.ask("anybody", "read", 0).await).filter(|answer| !answer.degraded);
    eventually("a decision of Redis", ask).await;
}

fn unhurt(server: &mut Tollgate) {
    assert!(server.process().is_running(), "{}", server.process().output());
    assert!(!server.process().output().contains("panicked"), "{}", server.process().output());
}

/// What became of many calls. One that is not answered, or wrongly, fails the test before it is counted.
#[derive(Default)]
struct Count {
    decided: u64,
    degraded: u64,
    /// How long each took.
    took: Vec<Duration>,
}

impl Count {
    fn one(answer: &ShouldRateLimitResponse, took: Duration) -> Self {
        let degraded = u64::from(answer.degraded);
        Self { decided: 1 - degraded, degraded, took: vec![took] }
    }

    fn add(&mut self, other: Self) {
        self.decided += other.decided;
        self.degraded += other.degraded;
        self.took.extend(other.took);
    }

    fn check(&mut self, what: &str) {
        let Self { decided, degraded, took } = self;
        took.sort_unstable();
        let at = |part: usize| took[(took.len() - 1) * part / 1000];
        // In time: within the deadline of the store and 5 ms.
        let in_time = took.partition_point(|took| *took <= Duration::from_millis(30));
        say(&format!(
            "{what}: {} made, {decided} decided, {degraded} degraded, 0 wrong, 0 lost; {in_time} within 30 ms; median {:?}, \
             p99.9 {:?}, longest {:?}",
            took.len(),
            at(500),
            at(999),
            at(1000)
        ));
        // No measurement, only a guard: a call that hangs takes longer than this on any machine.
        assert!(at(1000) < Duration::from_secs(5), "{what}: {:?}", at(1000));
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
    let (mut left_in_redis, mut left_alone, mut made) = (BURST, BURST, 0);
    while !stop.load(Ordering::Relaxed) {
        made += 1;
        let asked = instant();
        let response = caller.ask(&key, "read", cost).await;
        count.add(Count::one(&response, asked.elapsed()));
        assert!(allowed(&response), "{key}: {response:?}");
        assert_eq!((response.cost, response.limit), (cost, BURST), "{key}");
        // A call that was decided here may have been charged there too: its answer was lost, or came late.
        let charged = BURST - response.remaining;
        let calls = charged / u64::from(cost);
        let is_its_own = charged.is_multiple_of(u64::from(cost)) && (1..=made).contains(&calls);
        assert!(is_its_own, "{key}: {response:?} after {made} calls of {cost}");
        let left = if response.degraded { &mut left_alone } else { &mut left_in_redis };
        let is_spent = response.remaining < *left || mishap == Mishap::Restarts && !response.degraded;
        assert!(is_spent, "{key}: {response:?} after {left} were left");
        *left = response.remaining;
    }
    count
}

#[tokio::test]
async fn a_redis_that_is_not_there_at_the_start_is_not_waited_for() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        redis.kill();
        let mut server = serve(&redis).await;
        let caller = server.caller().await;
        caller.until_it_serves().await;
        decides_alone(&caller, "alice").await;
        let said = server.says("degraded: ").await;
        assert!(said.contains("the store can not be reached"), "{engine:?}: {said}");
        caller.until_ready(false).await;
        assert_eq!(caller.ask("alice", "few", None).await.remaining, 8, "{engine:?}");

        redis.restart().await;
        caller.until_ready(true).await;
        server.says("the store is reached: serving").await;
        until_it_decides(&caller).await;
        assert_eq!(
            caller.ask("alice", "few", 2).await.remaining,
            8,
            "{engine:?}: what was taken here is not known there"
        );
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
            decides_alone(&caller, "alice").await;
            caller.until_ready(false).await;
            decides_alone(&caller, "alice").await;
            let says_why = |line: &str| line.contains("degraded: ") && line.to_uppercase().contains(why);
            server.process().says(why, says_why).await;
            redis.command(remedy).await;
            caller.until_ready(true).await;
            until_it_decides(&caller).await;
        }
        assert_eq!(redis.keys().await, [""; 0], "{engine:?}: nothing was decided there");

        redis.command(&["CONFIG", "SET", "requirepass", "hunter2"]).await;
        let mut other = serve(&redis).await;
        let said = other.says("degraded: ").await;
        assert!(said.to_uppercase().contains("NOAUTH"), "{engine:?}: {said}");
        other.caller().await.until_it_serves().await;
        decides_alone(&other.caller().await, "alice").await;
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
        let mut back = Duration::ZERO;
        for _ in 0..2 {
            until_it_decides(&caller).await;
            redis.kill();
            caller.until_ready(false).await;
            decides_alone(&caller, "alice").await;
            redis.restart().await;
            let since = instant();
            caller.until_ready(true).await;
            until_it_decides(&caller).await;
            back = back.max(since.elapsed());
        }
        let mut count = callers.stop().await;
        count.check(&format!("{engine:?} killed"));
        say(&format!("{engine:?} killed: decides again after {back:?}; {}", server.process().most()));
        assert!(count.decided > 0 && count.degraded > 0, "{engine:?}");
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
        let mut back = Duration::ZERO;
        for _ in 0..2 {
            until_it_decides(&caller).await;
            redis.stop();
            caller.until_ready(false).await;
            decides_alone(&caller, "alice").await;
            redis.cont();
            let since = instant();
            caller.until_ready(true).await;
            until_it_decides(&caller).await;
            back = back.max(since.elapsed());
        }
        let mut count = callers.stop().await;
        count.check(&format!("{engine:?} stalled"));
        say(&format!("{engine:?} stalled: decides again after {back:?}; {}", server.process().most()));
        assert!(count.decided > 0 && count.degraded > 0, "{engine:?}");
        unhurt(&mut server);
    }
}

/// As many calls at once as ten times what is let in: those above are refused at once, those inside are answered, and
/// then all places are free again.
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
            match call.unwrap() {
                (Ok(response), took) => {
                    assert!(allowed(&response) && response.degraded, "{response:?}");
                    count.add(Count::one(&response, took));
                }
                (Err(status), _) => {
                    assert!(status.message().contains("calls are in flight"), "{engine:?}: {status:?}");
                    shed += 1;
                }
            }
        }
        count.check(&format!("{engine:?} stalled, {PLACES} places, {shed} shed"));

        redis.cont();
        until_it_decides(&caller).await;
        // Every place is free: as many calls as there are places pass at once.
        let mut calls = JoinSet::new();
        for number in 0..PLACES {
            let caller = caller.clone();
            calls.spawn(async move { caller.ask(&format!("again {number}"), "read", None).await });
        }
        assert_eq!(calls.join_all().await.len(), PLACES, "{engine:?}");
        unhurt(&mut server);
    }
}

/// A caller that waits less long than the store may take is answered before it goes.
#[tokio::test]
async fn a_caller_in_a_hurry_is_answered_without_a_stalled_redis() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let server =
            Tollgate::start(&format!("store: {{ url: \"{}\", deadline: 10s }}\n{CLASSES}", redis.url()))
                .await;
        let caller = server.serving().await;
        redis.stop();
        let mut request = tonic::Request::new(tollgate_proto::v1::ShouldRateLimitRequest {
            key: "alice".into(),
            class: "few".into(),
            cost: None,
        });
        request.set_timeout(Duration::from_secs(4));
        let response = caller.stub().should_rate_limit(request).await.unwrap().into_inner();
        assert!(
            allowed(&response) && response.degraded && response.remaining == 9,
            "{engine:?}: {response:?}"
        );
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
