//! The network between the instances and their Redis is slow, is cut in the middle of calls, and is parted.

use super::{unhurt, until_it_decides};
use crate::support::calls::{Caller, allowed};
use crate::support::wire::Wire;
use crate::support::{Redis, Tollgate, engines, eventually, say};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::interval;

/// More than is spent. Nothing flows in while a test looks.
const BURST: u64 = 1_000_000;

/// Where it is not to be missed, the deadline is longer than a busy machine takes.
fn config(wire: &Wire, deadline: &str) -> String {
    format!(
        "store: {{ url: \"{}\", deadline: {deadline} }}\nclasses: {{ read: {{ rate: 1/h, burst: {BURST} }}, few: {{ rate: 1/h, \
         burst: 1000 }} }}",
        wire.url()
    )
}

/// Calls that were made, decided by Redis, and decided without it.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    made: u64,
    decided: u64,
    degraded: u64,
}

/// Sixteen callers, who ask for one key until they are told to stop.
struct Load {
    callers: JoinSet<Count>,
    stop: Arc<AtomicBool>,
}

impl Load {
    fn on(caller: &Caller, key: &'static str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut callers = JoinSet::new();
        for _ in 0..16 {
            let (caller, stop) = (caller.clone(), stop.clone());
            callers.spawn(async move {
                let mut count = Count::default();
                while !stop.load(Ordering::Relaxed) {
                    let response = caller.ask(key, "read", None).await;
                    assert!(allowed(&response), "{response:?}");
                    count.made += 1;
                    count.degraded += u64::from(response.degraded);
                    count.decided += u64::from(!response.degraded);
                }
                count
            });
        }
        Self { callers, stop }
    }

    async fn stop(mut self) -> Count {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Count::default();
        while let Some(count) = self.callers.join_next().await {
            let Count { made, decided, degraded } = count.unwrap();
            all = Count {
                made: all.made + made,
                decided: all.decided + decided,
                degraded: all.degraded + degraded,
            };
        }
        all
    }
}

/// Each call that Redis decided is charged once; one whose answer was lost is charged at most once.
#[tokio::test]
async fn connections_that_are_cut_charge_nobody_twice() {
    for engine in engines() {
        let redis = Redis::start_on_port(engine).await;
        let wire = Wire::to(redis.port()).await;
        let mut server = Tollgate::start(&config(&wire, "25ms")).await;
        let caller = server.serving().await;
        // Answers are on their way for a while, so that a cut meets some.
        wire.delay(Duration::from_millis(3));
        let load = Load::on(&caller, "alice");
        let mut cuts = interval(Duration::from_millis(20));
        for _ in 0..50 {
            cuts.tick().await;
            wire.cut();
        }
        let count = load.stop().await;
        wire.delay(Duration::ZERO);
        caller.until_ready(true).await;
        until_it_decides(&caller).await;
        let spent = BURST - caller.remaining("alice", "read").await;
        assert!(count.decided <= spent && spent <= count.made, "{engine:?}: {spent} spent, {count:?}");
        assert!(count.degraded > 0, "{engine:?}: no cut met a call, {count:?}");
        say(&format!("{engine:?}, 50 cuts: {count:?}, {spent} spent, 0 wrong, 0 lost"));
        unhurt(&mut server);
    }
}

/// Slower than the deadline is as good as away; what comes late meets no other call.
#[tokio::test]
async fn a_slow_network_is_a_degraded_one_and_what_comes_late_meets_nobody() {
    for engine in engines() {
        let redis = Redis::start_on_port(engine).await;
        let wire = Wire::to(redis.port()).await;
        let mut server = Tollgate::start(&config(&wire, "500ms")).await;
        let caller = server.serving().await;
        for _ in 0..3 {
            wire.delay(Duration::from_secs(2));
            caller.until_ready(false).await;
            let slow = caller.ask("bob", "few", 7).await;
            assert!(slow.degraded && allowed(&slow) && slow.cost == 7, "{engine:?}: {slow:?}");
            wire.delay(Duration::ZERO);
            caller.until_ready(true).await;
            until_it_decides(&caller).await;
            let now = caller.ask("bob", "few", 11).await;
            assert!(!now.degraded && allowed(&now) && now.cost == 11, "{engine:?}: {now:?}");
            // Of each call all or nothing was taken there.
            let spent = 1000 - now.remaining;
            assert!((0..=3).any(|late| (spent - 7 * late) % 11 == 0), "{engine:?}: {now:?}");
        }
        unhurt(&mut server);
    }
}

/// Two instances, one of which is parted from Redis: over all of the time no more is admitted than a burst and the parted
/// one's share of one.
#[tokio::test]
async fn who_is_parted_from_redis_gives_its_share_and_no_more() {
    for engine in engines() {
        let redis = Redis::start_on_port(engine).await;
        let (far, near) = (Wire::to(redis.port()).await, Wire::to(redis.port()).await);
        let (mut parted, mut other) =
            (Tollgate::start(&config(&far, "100ms")).await, Tollgate::start(&config(&near, "5s")).await);
        let callers = [parted.serving().await, other.serving().await];
        parted.says("instances=2").await;
        other.says("instances=2").await;
        far.part(true);
        callers[0].until_ready(false).await;
        let mut admitted = 0_u64;
        for caller in &callers {
            for _ in 0..1100 {
                admitted += u64::from(allowed(&caller.ask("carol", "few", None).await));
            }
        }
        assert_eq!(admitted, 1000 + 500, "{engine:?}");
        far.part(false);
        callers[0].until_ready(true).await;
        eventually("it is denied as by Redis", async || {
            let response = callers[0].ask("carol", "few", None).await;
            assert!(!allowed(&response), "{response:?}");
            (!response.degraded).then_some(())
        })
        .await;
        unhurt(&mut parted);
        unhurt(&mut other);
    }
}

/// One of two instances dies without a word; the other and its callers are not hurt, and leases live on.
#[tokio::test]
async fn an_instance_that_dies_takes_nothing_with_it() {
    for engine in engines() {
        let redis = Redis::start_on_port(engine).await;
        let wire = Wire::to(redis.port()).await;
        let (mut dying, mut other) =
            (Tollgate::start(&config(&wire, "5s")).await, Tollgate::start(&config(&wire, "5s")).await);
        let (caller, survivor) = (dying.serving().await, other.serving().await);
        other.says("instances=2").await;
        let wish = tollgate_proto::v1::BorrowRequest {
            key: "dave".into(),
            class: "few".into(),
            n: 400,
            gateway: "gateway".into(),
            seq: 1,
            ..tollgate_proto::v1::BorrowRequest::default()
        };
        let lease = caller.borrow(wish).await;
        assert_eq!(lease.granted, 400, "{engine:?}");
        let load = Load::on(&survivor, "alice");
        dying.process().kill();
        // What was lent through the dead one comes back through the other.
        assert_eq!(survivor.remaining("dave", "few").await, 600, "{engine:?}");
        let credited = survivor.give_back(&lease.lease_id, 100).await;
        // A busy machine may have taken a second for this.
        assert!(credited == 100 || credited == 0, "{engine:?}: {credited}");
        assert_eq!(survivor.remaining("dave", "few").await, 600 + u64::from(credited), "{engine:?}");
        eventually("500 calls after that", async || {
            (survivor.remaining("alice", "read").await + 500 <= BURST).then_some(())
        })
        .await;
        let count = load.stop().await;
        assert_eq!(count.degraded, 0, "{engine:?}: {count:?}");
        assert_eq!(BURST - survivor.remaining("alice", "read").await, count.decided, "{engine:?}: {count:?}");
        say(&format!("{engine:?}, an instance killed: {count:?}, 0 wrong, 0 lost"));
        unhurt(&mut other);
    }
}

/// What is dropped when Redis is full is told before it is.
#[tokio::test]
async fn a_redis_that_evicts_is_warned_of() {
    for engine in engines() {
        let redis = Redis::start(engine).await;
        let serve = async || {
            let server =
                Tollgate::start(&format!("store: {}\nclasses: {{ read: {{ rate: 1/h }} }}", redis.url()))
                    .await;
            server.serving().await;
            server
        };
        redis.command(&["CONFIG", "SET", "maxmemory", "1gb"]).await;
        let mut sound = serve().await;
        redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;
        let evicting = serve().await;
        evicting.says("maxmemory-policy is allkeys-lru").await;
        let said = sound.process().output();
        assert!(!said.contains("maxmemory-policy"), "{engine:?}: {said}");
    }
}

/// More comes at once than Redis can decide before the deadline. What it could not answer in time is not sent to it, so
/// all that it charges somebody hears of.
#[tokio::test]
async fn what_could_not_be_answered_in_time_is_not_charged() {
    const CALLERS: u64 = 1000;
    for engine in engines() {
        let redis = Redis::start_on_port(engine).await;
        let wire = Wire::to(redis.port()).await;
        // One script call at a time, of 64 calls at most.
        let text = config(&wire, "4s").replace("deadline:", "connections: 1, deadline:");
        let mut server = Tollgate::start(&text).await;
        let caller = server.serving().await;
        wire.delay(Duration::from_millis(600));
        // How long a script call takes is known from the last one.
        caller.ask("somebody", "read", None).await;
        let mut callers = JoinSet::new();
        for _ in 0..CALLERS {
            let caller = caller.clone();
            callers.spawn(async move { caller.ask("alice", "read", None).await });
        }
        let answers = callers.join_all().await;
        let decided = u64::try_from(answers.iter().filter(|answer| !answer.degraded).count()).unwrap();
        wire.delay(Duration::ZERO);
        caller.until_ready(true).await;
        until_it_decides(&caller).await;
        let spent = BURST - caller.remaining("alice", "read").await;
        say(&format!("{engine:?}, overload: {CALLERS} calls, {decided} decided, {spent} spent"));
        assert!((64..CALLERS).contains(&decided), "{engine:?}: {decided} decided");
        assert_eq!(spent, decided, "{engine:?}: charged, and nobody heard of it");
        unhurt(&mut server);
    }
}
