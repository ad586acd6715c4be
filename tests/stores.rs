//! What the tests of stores share: one store of each kind, and what one is asked.

use crate::support::several::{Cluster, Watched};
use crate::support::{DEADLINE, Engine, Redis, engines};
use deadpool_redis::redis::{FromRedisValue as _, cmd};
use futures_util::future::join_all;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Barrier;
use tollgate_server::algorithm::Algorithm;
use tollgate_server::clock::Clock;
use tollgate_server::config::{StoreConfig, StoreUrl};
use tollgate_server::limit::{Cost, Decision, Limit, Rate, Timestamp, Want};
use tollgate_server::name::{BucketName, LeaseId};
use tollgate_server::request::{Charge, Hit, NewLease, Settlement, Strikes};
use tollgate_server::store::{Store, connect};

/// A time to begin at: in 2023, and no round number of anything.
pub(crate) const START: Timestamp = Timestamp::from_micros(1_700_000_000_123_457);

/// A store, and the Redis below it if there is one.
pub(crate) struct Tested {
    pub(crate) name: String,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) redis: Option<Redis>,
    /// Or the cluster.
    pub(crate) cluster: Option<Cluster>,
    /// Or the pair under a sentinel.
    watched: Option<Watched>,
    clock: Clock,
}

impl Tested {
    /// As another instance of Tollgate would: a store of its own on the same Redis. Memory can not be shared,
    /// so there it is the same one.
    pub(crate) fn another(&self) -> Arc<dyn Store> {
        match self.url() {
            Some(url) => open(&url, &self.clock),
            None => self.store.clone(),
        }
    }

    /// Where its Redis is, if it has one.
    pub(crate) fn url(&self) -> Option<String> {
        let cluster = || self.cluster.as_ref().map(Cluster::url);
        let watched = || self.watched.as_ref().map(Watched::url);
        self.redis.as_ref().map(Redis::url).or_else(cluster).or_else(watched)
    }

    /// The servers that have its keys.
    pub(crate) fn servers(&self) -> impl Iterator<Item = &Redis> {
        let one = self.redis.iter().chain(self.watched.iter().map(|watched| &watched.primary));
        one.chain(self.cluster.iter().flat_map(|cluster| &cluster.nodes))
    }

    /// Says a command to its Redis.
    pub(crate) async fn command(&self, words: &[&str]) -> String {
        String::from_redis_value(self.redis.as_ref().unwrap().command(words).await).unwrap()
    }

    /// The same, whatever it answers.
    pub(crate) async fn command_of(&self, words: &[&str]) {
        self.redis.as_ref().unwrap().command(words).await;
    }

    /// Puts bytes at a key of its Redis.
    pub(crate) async fn set(&self, key: &str, bytes: &[u8]) {
        let mut connection = self.redis.as_ref().unwrap().connection(DEADLINE).await.unwrap();
        cmd("SET").arg(key).arg(bytes).exec_async(&mut connection).await.unwrap();
    }

    /// How often that command was called in its Redis.
    pub(crate) async fn calls(&self, name: &str) -> u64 {
        let stats = self.command(&["INFO", "commandstats"]).await;
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{name}:calls=")));
        line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
    }
}

/// A kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    On(Engine),
    Cluster(Engine),
    Watched(Engine),
}

/// Memory, and Redis by each engine that is here.
pub(crate) fn kinds() -> Vec<Kind> {
    let on_redis = engines().into_iter().map(Kind::On);
    [Kind::Memory].into_iter().chain(on_redis).collect()
}

/// Those, a cluster by each engine, and a pair under a sentinel: for what must hold wherever a call's buckets are.
pub(crate) fn kinds_and_topologies() -> Vec<Kind> {
    let clusters = engines().into_iter().map(Kind::Cluster);
    kinds().into_iter().chain(clusters).chain([Kind::Watched(Engine::Valkey)]).collect()
}

impl Kind {
    /// A new and empty one.
    pub(crate) async fn start(self, clock: &Clock) -> Tested {
        let (mut redis, mut cluster, mut watched) = (None, None, None);
        match self {
            Self::Memory => {}
            Self::On(engine) => redis = Some(Redis::start(engine).await),
            Self::Cluster(engine) => cluster = Some(Cluster::start(engine, false).await),
            Self::Watched(engine) => watched = Some(Watched::start(engine).await),
        }
        let store = memory(clock);
        let mut tested =
            Tested { name: format!("{self:?}"), store, redis, cluster, watched, clock: clock.clone() };
        tested.store = tested.another();
        tested
    }
}

/// One of each kind, new and by the same clock.
pub(crate) async fn each(clock: &Clock) -> Vec<Tested> {
    let mut all = Vec::new();
    for kind in kinds() {
        all.push(kind.start(clock).await);
    }
    all
}

/// One of each kind, on clusters, and under a sentinel, new and by the same clock.
pub(crate) async fn each_and_topologies(clock: &Clock) -> Vec<Tested> {
    join_all(kinds_and_topologies().into_iter().map(|kind| kind.start(clock))).await
}

/// One on Redis by each engine that is here.
pub(crate) async fn each_on_redis(clock: &Clock) -> Vec<Tested> {
    let mut all = each(clock).await;
    all.retain(|tested| tested.redis.is_some());
    all
}

pub(crate) fn memory(clock: &Clock) -> Arc<dyn Store> {
    connect(&StoreConfig::default(), clock.clone()).unwrap()
}

/// A store at that URL.
pub(crate) fn open(url: &str, clock: &Clock) -> Arc<dyn Store> {
    connect(&config(url), clock.clone()).unwrap()
}

/// A store at that URL as everybody has it, but with patience for a busy machine.
pub(crate) fn config(url: &str) -> StoreConfig {
    let url = StoreUrl::new(url).unwrap();
    StoreConfig { url, deadline: Duration::from_secs(10), ..StoreConfig::default() }
}

/// What is asked of one bucket, before anything is escaped or packed.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) key: String,
    pub(crate) class: String,
    pub(crate) limit: Limit,
    pub(crate) algorithm: &'static Algorithm,
    pub(crate) want: Want,
    pub(crate) shadow: bool,
    pub(crate) quota: bool,
    pub(crate) charge: Charge,
    pub(crate) strikes: Option<Strikes>,
    pub(crate) lease: Option<NewLease>,
}

impl Ask {
    /// A plain call.
    pub(crate) fn new(key: &str, class: &str, limit: Limit, cost: u64) -> Self {
        Self {
            key: key.into(),
            class: class.into(),
            limit,
            algorithm: named("token_bucket"),
            want: Want::exactly(Cost::new(cost)),
            shadow: false,
            quota: false,
            charge: Charge::IfAllowed,
            strikes: None,
            lease: None,
        }
    }

    pub(crate) fn by(self, algorithm: &'static Algorithm) -> Self {
        Self { algorithm, ..self }
    }

    /// As a lease of that many tokens, or of less.
    pub(crate) fn leased(self, at_most: u64, valid_for: Duration) -> Self {
        let id = LeaseId::fresh(&self.bucket());
        let want = Want { at_most: Cost::new(at_most), ..self.want };
        Self { want, lease: Some(NewLease { id, valid_for, again: true, gateway: None }), ..self }
    }

    pub(crate) fn bucket(&self) -> BucketName {
        BucketName::new(&self.key, &self.class)
    }

    pub(crate) fn hit(&self) -> Hit {
        Hit {
            bucket: self.bucket(),
            limit: self.limit,
            algorithm: self.algorithm,
            want: self.want,
            shadow: self.shadow,
            sensitive: false,
            quota: self.quota,
            charge: self.charge,
            strikes: self.strikes,
            lease: self.lease.clone(),
        }
    }

    /// Its lease comes back with that many tokens.
    pub(crate) fn settlement(&self, unused: u64) -> Settlement {
        let id = self.lease.as_ref().expect("it is a lease").id.clone();
        Settlement { id, limit: self.limit, algorithm: self.algorithm, unused: Cost::new(unused) }
    }

    /// Asks that alone.
    pub(crate) async fn of(&self, store: &dyn Store) -> Decision {
        let decisions = store.decide(vec![self.hit()], None).await.unwrap();
        let [decision] = decisions.as_slice() else { panic!("{} decisions for one hit", decisions.len()) };
        *decision
    }
}

pub(crate) fn named(name: &str) -> &'static Algorithm {
    Algorithm::named(name).unwrap()
}

/// `count` tokens each `seconds`, at most `burst` at once.
pub(crate) fn limit(count: u64, seconds: u64, burst: u64) -> Limit {
    Limit::new(Rate::new(count, Duration::from_secs(seconds)).unwrap(), burst).unwrap()
}

/// A limit of `burst`, and no more within the life of a test.
pub(crate) fn once(burst: u64) -> Limit {
    // An hour, since some algorithms refuse windows of many years.
    Limit::new(Rate::new(1, Duration::from_secs(3600)).unwrap(), burst).unwrap()
}

/// Asks nothing of that bucket but what it holds.
pub(crate) async fn left(store: &dyn Store, ask: &Ask) -> u64 {
    let peek = Ask { want: Want::exactly(Cost::ZERO), strikes: None, lease: None, ..ask.clone() };
    peek.of(store).await.remaining
}

/// Runs all of them at once, and returns what each gives, in their order.
pub(crate) async fn at_once<T: Send + 'static>(
    calls: impl IntoIterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    let calls: Vec<_> = calls.into_iter().collect();
    let start = Arc::new(Barrier::new(calls.len()));
    let calls: Vec<_> = calls
        .into_iter()
        .map(|call| {
            let start = start.clone();
            tokio::spawn(async move {
                start.wait().await;
                call.await
            })
        })
        .collect();
    let mut given = Vec::new();
    for call in calls {
        given.push(call.await.unwrap());
    }
    given
}
