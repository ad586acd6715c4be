use super::*;
use crate::algorithm::ALL;
use crate::limit::{Limit, Rate, Reason, Timestamp};
use crate::name::{BucketName, LeaseId};
use crate::penalty::Penalty;
use crate::request::{NewLease, Strikes};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// An authority that does as it is told.
struct Puppet {
    calls: AtomicU32,
    /// `None`: all is well.
    fails: Mutex<Option<StoreError>>,
    /// Are heartbeats answered all the same?
    only_calls: AtomicBool,
    /// What its heartbeats tell.
    instances: AtomicU32,
    /// How long it takes to answer, at most as long as the caller waits.
    takes: Mutex<Duration>,
}

impl Puppet {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            calls: AtomicU32::new(0),
            fails: Mutex::new(None),
            only_calls: AtomicBool::new(false),
            instances: AtomicU32::new(4),
            takes: Mutex::default(),
        })
    }

    fn fails(&self, with: Option<StoreError>) {
        *self.fails.lock() = with;
    }

    async fn answer<T>(&self, answer: T, deadline: Option<Instant>) -> Result<T, StoreError> {
        let done = instant() + *self.takes.lock();
        tokio::time::sleep_until(deadline.map_or(done, |deadline| deadline.min(done))).await;
        if deadline.is_some_and(|deadline| deadline < done) {
            return Err(StoreError::DeadlinePassed);
        }
        self.fails.lock().clone().map_or(Ok(answer), Err)
    }

    fn asked(&self) -> u32 {
        self.calls.swap(0, Ordering::Relaxed)
    }
}

#[async_trait]
impl Store for Puppet {
    async fn decide(&self, hits: Vec<Hit>, deadline: Option<Instant>) -> Result<Vec<Decision>, StoreError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let blocked = Decision::blocked(Duration::from_secs(77));
        self.answer(vec![blocked; hits.len()], deadline).await
    }

    async fn settle(&self, _: Settlement, deadline: Option<Instant>) -> Result<Cost, StoreError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.answer(Cost::new(77), deadline).await
    }

    async fn heartbeat(&self) -> Result<u32, StoreError> {
        let late = |_| Err(StoreError::Timeout(DEADLINE));
        tokio::time::timeout(DEADLINE, self.beat()).await.unwrap_or_else(late)
    }
}

impl Puppet {
    async fn beat(&self) -> Result<u32, StoreError> {
        let instances = self.instances.load(Ordering::Relaxed);
        if self.only_calls.load(Ordering::Relaxed) {
            return Ok(instances);
        }
        self.answer(instances, None).await
    }
}

const DEADLINE: Duration = Duration::from_millis(25);

fn around(puppet: &Arc<Puppet>) -> (Degraded, watch::Receiver<Health>) {
    let config = StoreConfig { deadline: DEADLINE, ..StoreConfig::default() };
    let clock = Clock::manual(Timestamp::from_micros(1_000_000_000));
    Degraded::around(puppet.clone(), &config, clock)
}

/// Of a bucket of 100 that nothing flows into.
fn hit(key: &str) -> Hit {
    Hit {
        bucket: BucketName::new(key, "class"),
        limit: Limit::new(Rate::new(1, Duration::from_secs(3600)).unwrap(), 100).unwrap(),
        algorithm: &ALL[0],
        want: Want::exactly(Cost::ONE),
        shadow: false,
        sensitive: false,
        quota: false,
        charge: Charge::IfAllowed,
        strikes: None,
        lease: None,
    }
}

async fn of(store: &Degraded, hit: Hit) -> Decision {
    let decisions = store.decide(vec![hit], None).await.unwrap();
    let [decision] = decisions.as_slice() else { panic!("{decisions:?}") };
    *decision
}

async fn until(health: &mut watch::Receiver<Health>, degraded: bool) {
    health.wait_for(|health| health.degraded.is_some() == degraded).await.unwrap();
}

fn lost() -> StoreError {
    StoreError::Unreachable("no route".into())
}

#[tokio::test(start_paused = true)]
async fn while_it_answers_it_decides() {
    let puppet = Puppet::new();
    let (store, mut health) = around(&puppet);
    until(&mut health, false).await;
    assert_eq!(health.borrow().instances, 4);
    assert_eq!(of(&store, hit("a")).await, Decision::blocked(Duration::from_secs(77)));
    assert_eq!(puppet.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn after_a_few_failures_it_is_not_asked_until_a_heartbeat_is_answered() {
    let puppet = Puppet::new();
    let (store, mut health) = around(&puppet);
    until(&mut health, false).await;
    puppet.fails(Some(lost()));
    for n in 1..=10 {
        let decision = of(&store, hit("a")).await;
        // A quarter of a hundred, from the first failure on.
        assert_eq!((decision.remaining, decision.degraded), (25 - n, true));
        if n == 5 {
            // The heartbeat that follows at once.
            until(&mut health, true).await;
            assert_eq!(puppet.asked(), 5);
        }
    }
    assert_eq!(puppet.asked(), 0);
    assert!(health.borrow().degraded.as_ref().is_some_and(|why| why.contains("no route")));

    let since = instant();
    puppet.fails(None);
    until(&mut health, false).await;
    assert!(instant() - since <= Duration::from_millis(100));
    assert!(!of(&store, hit("a")).await.degraded);

    // What was taken is remembered, so that a flapping authority gives nothing twice.
    puppet.fails(Some(lost()));
    assert_eq!(of(&store, hit("a")).await.remaining, 14);
}

#[tokio::test(start_paused = true)]
async fn failures_with_answers_between_them_open_nothing() {
    let puppet = Puppet::new();
    let (store, mut health) = around(&puppet);
    until(&mut health, false).await;
    for _ in 0..10 {
        for failing in [true, true, true, true, false] {
            puppet.fails(failing.then(lost));
            assert_eq!(of(&store, hit("a")).await.degraded, failing);
        }
    }
    assert_eq!((puppet.asked(), health.borrow().degraded.as_ref()), (50, None));
}

/// It may be about one key, so it is the heartbeat that tells.
#[tokio::test(start_paused = true)]
async fn one_that_answers_with_errors_is_asked_until_its_heartbeat_is_such_an_error() {
    let puppet = Puppet::new();
    let (store, mut health) = around(&puppet);
    until(&mut health, false).await;
    puppet.fails(Some(StoreError::Failed("OOM".into())));
    for _ in 0..20 {
        assert!(of(&store, hit("a")).await.degraded);
    }
    assert_eq!(puppet.asked(), 20);
    until(&mut health, true).await;
    assert!(of(&store, hit("a")).await.degraded);
    assert_eq!(puppet.asked(), 0);
}

#[tokio::test(start_paused = true)]
async fn one_that_is_not_there_at_the_start_is_found_out_without_calls() {
    let puppet = Puppet::new();
    puppet.fails(Some(lost()));
    let (store, mut health) = around(&puppet);
    let unknown = health.borrow_and_update().clone();
    assert_eq!((unknown.degraded.is_some(), unknown.instances), (true, 1));
    health.changed().await.unwrap();
    assert!(health.borrow().degraded.as_ref().is_some_and(|why| why.contains("no route")));
    // That was the first heartbeat; a few more, and nobody asks.
    tokio::time::sleep(Duration::from_secs(1)).await;
    // Nobody has told that there are others.
    assert_eq!(of(&store, hit("a")).await.remaining, 99);
    assert_eq!(puppet.asked(), 0);
}

/// A caller in a hurry is answered in time, and its hurry is a failure only if it had waited long enough.
#[tokio::test(start_paused = true)]
async fn a_stall_is_seen_by_callers_with_a_deadline_of_their_own() {
    for (own, opens) in [(20, true), (10, false)] {
        let puppet = Puppet::new();
        let (store, mut health) = around(&puppet);
        until(&mut health, false).await;
        *puppet.takes.lock() = Duration::from_secs(3600);
        for _ in 0..5 {
            let deadline = instant() + Duration::from_millis(own);
            let decided = store.decide(vec![hit("a")], Some(deadline)).await.unwrap();
            assert!(decided[0].degraded && instant() < deadline, "{own}");
        }
        let beat = instant();
        if opens {
            until(&mut health, true).await;
            assert!(instant() - beat < Duration::from_millis(100), "{own}");
        }
        assert_eq!(health.borrow().degraded.is_some(), opens, "{own}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_sensitive_denies_and_charges_nothing_else() {
    let puppet = Puppet::new();
    puppet.fails(Some(lost()));
    let (store, _) = around(&puppet);
    let penalty =
        Penalty::new(0, Duration::from_secs(60), Duration::from_secs(60), Duration::from_secs(60)).unwrap();
    let sensitive =
        Hit { sensitive: true, strikes: Some(Strikes { penalty, reported: 9, on_denial: true }), ..hit("b") };
    for _ in 0..3 {
        let decided = store.decide(vec![hit("a"), sensitive.clone(), hit("c")], None).await.unwrap();
        assert_eq!(decided[1], Decision::unavailable(RETRY_UNAVAILABLE));
        for other in [decided[0], decided[2]] {
            assert_eq!((other.denied, other.granted, other.remaining), (None, Cost::ZERO, 100));
        }
    }
    assert_eq!(of(&store, sensitive).await.denied, Some(Reason::Unavailable));
    assert_eq!(of(&store, hit("b")).await.remaining, 99);
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_here_comes_back_here_and_what_is_taken_in_any_case_is_taken() {
    let puppet = Puppet::new();
    let (store, mut health) = around(&puppet);
    until(&mut health, false).await;
    puppet.fails(Some(lost()));
    let bucket = BucketName::new("a", "class");
    let id = LeaseId::fresh(&bucket);
    let lease = NewLease { id: id.clone(), valid_for: Duration::from_secs(1), again: false, gateway: None };
    let want = Want { at_least: Cost::ONE, at_most: Cost::new(60) };
    let lent = of(&store, Hit { want, lease: Some(lease), ..hit("a") }).await;
    assert_eq!((lent.granted, lent.degraded), (Cost::new(25), true));
    let Hit { limit, algorithm, .. } = hit("a");
    let settlement = Settlement { id, limit, algorithm, unused: Cost::new(20) };
    assert_eq!(store.settle(settlement.clone(), None).await, Ok(Cost::new(20)));
    assert_eq!(store.settle(settlement, None).await, Ok(Cost::ZERO));
    let always = Hit { charge: Charge::Always(Cost::new(7)), want: Want::exactly(Cost::new(7)), ..hit("a") };
    assert_eq!(of(&store, always).await.remaining, 13);
}

/// When the authority is back, the others may not be yet.
#[tokio::test(start_paused = true)]
async fn more_instances_are_believed_at_once_and_fewer_after_a_while() {
    let puppet = Puppet::new();
    let (_store, mut health) = around(&puppet);
    until(&mut health, false).await;
    // Between two of them.
    tokio::time::sleep(Duration::from_millis(500)).await;
    // What is told from now on, and what is known after so many heartbeats.
    for (told, known) in
        [(6, [(1, 6), (5, 6)]), (1, [(9, 6), (1, 1)]), (0, [(1, 1), (20, 1)]), (7, [(1, 7), (1, 7)])]
    {
        puppet.instances.store(told, Ordering::Relaxed);
        for (beats, known) in known {
            tokio::time::sleep(Duration::from_secs(beats)).await;
            assert_eq!(health.borrow().instances, known, "{told}");
        }
    }
}

/// Calls fail, and the heartbeat does not: one node of several, or one connection.
#[tokio::test(start_paused = true)]
async fn what_only_calls_meet_opens_nothing() {
    let puppet = Puppet::new();
    let (store, mut health) = around(&puppet);
    until(&mut health, false).await;
    puppet.only_calls.store(true, Ordering::Relaxed);
    puppet.fails(Some(lost()));
    for _ in 0..50 {
        assert!(of(&store, hit("a")).await.degraded);
        tokio::task::yield_now().await;
    }
    assert_eq!((puppet.asked(), health.borrow().degraded.as_ref()), (50, None));
}
