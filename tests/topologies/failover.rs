//! A primary is lost, stands still, or hands over, under load: nobody else's calls fail, its own are answered in time,
//! nothing is charged twice, and where there is a replica its keys are decided again.

use crate::stores::{Ask, config, left, once};
use crate::support::several::{Cluster, Watched};
use crate::support::{DEADLINE, Engine, Redis, engines, eventually, say};
use deadpool_redis::redis::{Value, from_redis_value};
use futures_util::future::join_all;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tollgate_server::clock::{Clock, instant};
use tollgate_server::config::{StoreConfig, StoreUrl};
use tollgate_server::store::{Store, connect};

const BURST: u64 = 1_000_000;

/// Long enough for a busy machine, and what a call takes at most that is not answered.
const PATIENCE: Duration = Duration::from_secs(1);

fn ask(key: &str) -> Ask {
    Ask::new(key, "c", once(BURST), 1)
}

fn open(url: &str) -> Arc<dyn Store> {
    connect(&StoreConfig { deadline: PATIENCE, ..config(url) }, Clock::system()).unwrap()
}

async fn until_it_decides(store: &dyn Store, key: &str) {
    let decided = async || store.decide(vec![ask(key).hit()], None).await.ok().map(drop);
    eventually("a decision", decided).await;
}

/// What became of the calls on some keys.
#[derive(Default)]
struct Count {
    allowed: AtomicU64,
    failed: AtomicU64,
}

impl Count {
    fn allowed(&self) -> u64 {
        self.allowed.load(Ordering::Relaxed)
    }

    fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}

/// Two callers for each key, that ask on until they are told to stop.
struct Traffic {
    counts: Vec<(String, Arc<Count>)>,
    callers: JoinSet<Duration>,
    stop: Arc<AtomicBool>,
}

impl Traffic {
    fn on(store: &Arc<dyn Store>, keys: impl IntoIterator<Item = String>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut callers = JoinSet::new();
        let mut counts = Vec::new();
        for key in keys {
            let count = Arc::new(Count::default());
            for _ in 0..2 {
                callers.spawn(call_on(store.clone(), key.clone(), count.clone(), stop.clone()));
            }
            counts.push((key, count));
        }
        Self { counts, callers, stop }
    }

    fn of(&self, key: &str) -> &Count {
        &self.counts.iter().find(|(its, _)| its == key).unwrap().1
    }

    /// Stops, and how long the longest call took.
    async fn stop(&mut self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let mut longest = Duration::ZERO;
        while let Some(took) = self.callers.join_next().await {
            longest = longest.max(took.unwrap());
        }
        longest
    }

    /// Tells what was counted; a token is spent once for each call that was allowed, and at most once for each that failed.
    async fn check(&mut self, what: &str, store: &dyn Store, lossy: &[String]) {
        let longest = self.stop().await;
        let (mut made, mut failed, mut lost) = (0, 0, 0);
        for (key, count) in &self.counts {
            made += count.allowed() + count.failed();
            failed += count.failed();
            let spent = BURST - left(store, &ask(key)).await;
            assert!(spent <= count.allowed() + count.failed(), "{what}: {key}: {spent} spent, charged twice");
            let missing = count.allowed().saturating_sub(spent);
            assert!(missing == 0 || lossy.contains(key), "{what}: {key}: {missing} were forgotten");
            lost += missing;
        }
        say(&format!(
            "{what}: {made} made, {} decided, {failed} not, 0 wrong, {lost} that the replica had not heard of, longest {longest:?}",
            made - failed
        ));
        // No measurement, only a guard: nothing hangs.
        assert!(longest < DEADLINE, "{what}: {longest:?}");
    }
}

async fn call_on(store: Arc<dyn Store>, key: String, count: Arc<Count>, stop: Arc<AtomicBool>) -> Duration {
    let mut longest = Duration::ZERO;
    let mut turns = interval(Duration::from_millis(1));
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !stop.load(Ordering::Relaxed) {
        let asked = instant();
        let answer = store.decide(vec![ask(&key).hit()], None).await;
        longest = longest.max(asked.elapsed());
        match answer {
            Ok(decisions) => count.allowed.fetch_add(u64::from(decisions[0].allowed()), Ordering::Relaxed),
            Err(_) => count.failed.fetch_add(1, Ordering::Relaxed),
        };
        // Else a call that fails at once takes the machine from those that do not.
        turns.tick().await;
    }
    longest
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mishap {
    /// It stands still: its connections stay, and nothing is answered.
    Stalls,
    /// It is killed, and its host refuses connections.
    Refuses,
    /// It is killed, and what has its place takes connections and says nothing.
    IsSilent,
    /// It is told to let its replica take over.
    HandsOver,
}

/// The second primary of a cluster is away.
async fn one_of_three(engine: Engine, mishap: Mishap, replicas: bool) {
    let what = format!("{engine:?} cluster, {mishap:?}, {} replicas", if replicas { "with" } else { "no" });
    let mut cluster = Cluster::start(engine, replicas).await;
    let store = open(&cluster.url());
    let mut keys = vec![Vec::new(); 3];
    for n in 0..12 {
        let key = format!("key{n}");
        keys[cluster.owner(&key, "c").await].push(key);
    }
    assert!(keys.iter().all(|keys| !keys.is_empty()), "{keys:?}");
    for key in keys.iter().flatten() {
        until_it_decides(&*store, key).await;
    }
    // One more was spent of each.
    let store_again = open(&cluster.url());
    let mut traffic = Traffic::on(&store, keys.iter().flatten().cloned());
    for (_, count) in &traffic.counts {
        count.allowed.fetch_add(1, Ordering::Relaxed);
    }
    eventually("traffic", async || {
        traffic.counts.iter().all(|(_, count)| count.allowed() > 10).then_some(())
    })
    .await;

    let port = cluster.nodes[1].port();
    let mut silent = None;
    match mishap {
        Mishap::Stalls => cluster.nodes[1].stop(),
        Mishap::Refuses => cluster.nodes[1].kill(),
        Mishap::IsSilent => {
            cluster.nodes[1].kill();
            silent =
                eventually("its port", async || TcpListener::bind(("127.0.0.1", port)).ok().map(Some)).await;
        }
        Mishap::HandsOver => drop(cluster.nodes[4].command(&["CLUSTER", "FAILOVER"]).await),
    }
    if replicas {
        eventually("the replica has taken over", async || cluster.nodes[4].is_primary().await.then_some(()))
            .await;
        for key in &keys[1] {
            until_it_decides(&*store_again, key).await;
            traffic.of(key).allowed.fetch_add(1, Ordering::Relaxed);
            let before = traffic.of(key).allowed();
            eventually("it follows", async || (traffic.of(key).allowed() > before + 10).then_some(())).await;
        }
    } else {
        for key in &keys[1] {
            eventually("its keys fail", async || (traffic.of(key).failed() > 4).then_some(())).await;
        }
    }
    for key in [&keys[0], &keys[2]].into_iter().flatten() {
        let before = traffic.of(key).allowed();
        eventually("others go on", async || (traffic.of(key).allowed() > before + 10).then_some(())).await;
        assert_eq!(traffic.of(key).failed(), 0, "{what}: {key} is another node's");
    }
    drop(silent);
    if replicas {
        let lossy = if mishap == Mishap::HandsOver { &[][..] } else { &keys[1] };
        traffic.check(&what, &*store, lossy).await;
        if mishap == Mishap::HandsOver {
            for (key, count) in &traffic.counts {
                assert_eq!(count.failed(), 0, "{what}: {key}");
            }
        }
    } else {
        let longest = traffic.stop().await;
        let sum =
            |keys: &[String], of: fn(&Count) -> u64| keys.iter().map(|key| of(traffic.of(key))).sum::<u64>();
        let others = [&keys[0][..], &keys[2][..]].concat();
        say(&format!(
            "{what}: its keys {} decided, {} not; others {} decided, {} not; 0 wrong, 0 lost, longest {longest:?}",
            sum(&keys[1], Count::allowed),
            sum(&keys[1], Count::failed),
            sum(&others, Count::allowed),
            sum(&others, Count::failed)
        ));
        for key in &others {
            let spent = BURST - left(&*store, &ask(key)).await;
            assert_eq!(spent, traffic.of(key).allowed(), "{what}: {key}");
        }
    }
}

async fn everywhere(mishap: Mishap, replicas: &[bool]) {
    let each = engines().into_iter().flat_map(|engine| replicas.iter().map(move |it| (engine, *it)));
    join_all(each.map(|(engine, replicas)| one_of_three(engine, mishap, replicas))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stalls_holds_up_its_own_keys_until_its_replica_takes_over() {
    everywhere(Mishap::Stalls, &[false, true]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_killed_holds_up_its_own_keys_until_its_replica_takes_over() {
    everywhere(Mishap::Refuses, &[false, true]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_says_nothing_holds_up_its_own_keys_until_its_replica_takes_over() {
    everywhere(Mishap::IsSilent, &[false, true]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_hands_over_holds_up_nobody() {
    everywhere(Mishap::HandsOver, &[true]).await;
}

/// Killed, and told to: the sentinel makes the replica the primary, and calls follow.
async fn under_a_sentinel(engine: Engine, mishap: Mishap) {
    let what = format!("{engine:?} sentinel, {mishap:?}");
    let mut watched = Watched::start(engine).await;
    let store = open(&watched.url());
    let keys: Vec<String> = (0..8).map(|n| format!("key{n}")).collect();
    let mut traffic = Traffic::on(&store, keys.clone());
    eventually("traffic", async || {
        traffic.counts.iter().all(|(_, count)| count.allowed() > 10).then_some(())
    })
    .await;
    match mishap {
        Mishap::HandsOver => {
            let told = watched.sentinel(&["SENTINEL", "FAILOVER", "main"]).await;
            assert_eq!(told, Some(Value::Okay), "{what}");
        }
        Mishap::Stalls => watched.primary.stop(),
        _ => watched.primary.kill(),
    }
    eventually("the replica is the primary", async || watched.replica.is_primary().await.then_some(())).await;
    for key in &keys {
        let before = traffic.of(key).allowed();
        eventually("calls follow", async || (traffic.of(key).allowed() > before + 10).then_some(())).await;
    }
    // Replication is asynchronous, also where it is told to hand over.
    traffic.check(&what, &*store, &keys).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_follow_a_sentinel() {
    let mishaps = [Mishap::Refuses, Mishap::Stalls, Mishap::HandsOver];
    let each = engines().into_iter().flat_map(|engine| mishaps.map(|mishap| (engine, mishap)));
    join_all(each.map(|(engine, mishap)| under_a_sentinel(engine, mishap))).await;
}

/// A primary that has become a replica refuses, so the same call is sent to who is at its address now.
#[tokio::test]
async fn what_a_replica_refuses_is_asked_of_the_primary_inside_the_call() {
    for engine in engines() {
        let (one, other) = (Redis::start(engine).await, Redis::start(engine).await);
        let folder = tempfile::tempdir().unwrap();
        let address = folder.path().join("redis.sock");
        let points_to = |redis: &Redis| {
            let StoreUrl::Redis(url) = StoreUrl::new(&redis.url()).unwrap() else { panic!("no Redis") };
            let next = folder.path().join("next");
            symlink(url.to_string().trim_start_matches("redis+unix://").split('?').next().unwrap(), &next)
                .unwrap();
            std::fs::rename(next, &address).unwrap();
        };
        points_to(&one);
        let store = open(&format!("redis+unix://{}", address.display()));
        // Each lane has its connection.
        let warm = crate::stores::at_once((0..64).map(|n| {
            let store = store.clone();
            async move { ask(&format!("warm{n}")).of(&*store).await.allowed() }
        }));
        assert!(warm.await.into_iter().all(|allowed| allowed));
        one.command(&["REPLICAOF", "127.0.0.1", "1"]).await;
        points_to(&other);
        let calls = crate::stores::at_once((0..64).map(|n| {
            let store = store.clone();
            async move { store.decide(vec![ask(&format!("key{}", n % 4)).hit()], None).await }
        }));
        for answer in calls.await {
            assert!(answer.as_ref().is_ok_and(|decisions| decisions[0].allowed()), "{engine:?}: {answer:?}");
        }
        for n in 0..4 {
            assert_eq!(left(&*store, &ask(&format!("key{n}"))).await, BURST - 16, "{engine:?}");
        }
        // Where both refuse it is said why, and it is not tried for ever.
        other.command(&["REPLICAOF", "127.0.0.1", "1"]).await;
        let error = store.decide(vec![ask("key0").hit()], None).await.unwrap_err().to_string();
        assert!(error.contains("READONLY"), "{engine:?}: {error}");
    }
}

/// What a server says that it is.
impl Redis {
    async fn is_primary(&self) -> bool {
        let Ok(role) = self.try_command(&["ROLE"]).await else { return false };
        matches!(role, Value::Array(told) if told.first().is_some_and(|role| {
            from_redis_value::<String>(role.clone()).is_ok_and(|role| role == "master")
        }))
    }
}
