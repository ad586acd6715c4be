//! The store in Redis (or Valkey): shared by every instance, decided inside Redis.
//!
//! A call becomes a job in one bounded queue. A few *lanes*, each with one connection, take whatever
//! waits and send it as one script call. While the lanes are idle a decision costs one round trip and no
//! wait; under load the script calls grow larger instead of more. What Redis has denied and would deny again
//! does not even become a job.
//!
//! Keys are `<prefix>:{<key>}:<class>` for buckets, `<prefix>:strikes:{<key>}`, `<prefix>:block:{<key>}` and
//! `<prefix>:lease:{<key>}:<class>:<nonce>`. Every key that is written expires.

// Public for what measures packing.
#[doc(hidden)]
pub mod batch;
mod denials;
mod lane;
mod presence;
mod script;

use super::{Store, StoreError};
use crate::clock::{Clock, instant};
use crate::config::{RedisUrl, StoreConfig};
use crate::limit::{Cost, Decision};
use crate::request::{Hit, Settlement};
use async_trait::async_trait;
use batch::{Answer, Call};
use deadpool_redis::redis::{AsyncConnectionConfig, Client, RedisError, Script};
use deadpool_redis::{Connection, Manager, Pool, PoolError, Runtime};
use denials::Denials;
use lane::{Job, Lane};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::sync::{Mutex, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout, timeout_at};

/// Calls that may wait for a lane.
const WAITING: usize = 8192;

/// Does what decisions need to be able to do: run a script that writes; nobody ever sees the key. Then it tells how
/// many instances [listen](presence), if it may know.
static HEARTBEAT: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "redis.call('SET', KEYS[1], '', 'PX', 1000)\n\
         redis.call('DEL', KEYS[1])\n\
         return redis.pcall('PUBSUB', 'NUMSUB', ARGV[1])[2] or 0",
    )
});

/// Keeps everything in Redis.
pub struct Redis {
    queue: async_channel::Sender<Job>,
    pool: Pool,
    link: Arc<Link>,
    denials: Arc<Denials>,
    /// The connection of the probe, and from which generation it is. It is kept, since a pool would replace one
    /// that has died without a word.
    probing: Mutex<Option<(Connection, u64)>>,
    prefix: String,
    deadline: Duration,
    presence: AbortHandle,
}

/// What lanes and probes know together of the way to Redis.
#[derive(Default)]
struct Link {
    /// Counts the times that Redis was lost. A connection from before the last one is not used again.
    lost: AtomicU64,
}

impl Link {
    fn generation(&self) -> u64 {
        self.lost.load(Ordering::Acquire)
    }

    /// The connections of `generation` are dead.
    fn lose(&self, generation: u64) {
        // Whoever comes second finds it moved on already.
        self.lost.fetch_max(generation + 1, Ordering::AcqRel);
    }
}

impl Redis {
    /// Connects in the background and whenever a connection is lost.
    ///
    /// # Errors
    /// The URL can not be used.
    pub fn connect(url: &RedisUrl, config: &StoreConfig, clock: &Clock) -> Result<Self, StoreError> {
        let unusable = |why: &dyn std::fmt::Display| StoreError::Unreachable(why.to_string());
        let timeouts = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(config.deadline))
            .set_response_timeout(Some(config.deadline));
        let manager = Manager::new_with_config(url.reveal(), timeouts).map_err(|e| unusable(&e))?;
        let pool = Pool::builder(manager)
            // One more for the probe.
            .max_size(config.connections + 1)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(config.deadline))
            .create_timeout(Some(config.deadline))
            .recycle_timeout(Some(config.deadline))
            .build()
            .map_err(|e| unusable(&e))?;

        let client = Client::open(url.reveal()).map_err(|e| unusable(&e))?;

        let (queue, jobs) = async_channel::bounded(WAITING);
        let link = Arc::new(Link::default());
        let denials = Arc::new(Denials::new(clock.clone()));
        for _ in 0..config.connections {
            let lane = Lane {
                jobs: jobs.clone(),
                pool: pool.clone(),
                link: link.clone(),
                denials: denials.clone(),
                prefix: config.prefix.clone(),
                clock: clock.clone(),
                deadline: config.deadline,
                held: None,
            };
            tokio::spawn(lane.run());
        }
        Ok(Self {
            queue,
            pool,
            link,
            denials,
            probing: Mutex::default(),
            prefix: config.prefix.clone(),
            deadline: config.deadline,
            presence: tokio::spawn(presence::listen(client, channel(&config.prefix))).abort_handle(),
        })
    }

    async fn ask(&self, call: Call, deadline: Option<Instant>) -> Result<Answer, StoreError> {
        let ours = instant() + self.deadline;
        let until = deadline.map_or(ours, |theirs| theirs.min(ours));
        let (reply, answer) = oneshot::channel();
        self.queue.try_send(Job { call, reply }).map_err(|_| StoreError::Overloaded(WAITING))?;
        match timeout_at(until, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(StoreError::Failed("the call was dropped".into())),
            Err(_) if until < ours => Err(StoreError::DeadlinePassed),
            Err(_) => Err(StoreError::Timeout(self.deadline)),
        }
    }
}

#[async_trait]
impl Store for Redis {
    async fn decide(&self, hits: Vec<Hit>, deadline: Option<Instant>) -> Result<Vec<Decision>, StoreError> {
        if hits.is_empty() {
            return Ok(Vec::new());
        }
        if let [hit] = hits.as_slice()
            && let Some(denied) = self.denials.certain(hit)
        {
            return Ok(vec![denied]);
        }
        match self.ask(Call::Decide(hits), deadline).await? {
            Answer::Decided(told) => Ok(told.into_iter().map(|told| told.decision).collect()),
            Answer::Settled(_) => Err(StoreError::Failed("the answer to another call".into())),
        }
    }

    async fn settle(&self, settlement: Settlement, deadline: Option<Instant>) -> Result<Cost, StoreError> {
        match self.ask(Call::Settle(settlement), deadline).await? {
            Answer::Settled(credited) => Ok(credited),
            Answer::Decided(_) => Err(StoreError::Failed("the answer to another call".into())),
        }
    }

    async fn heartbeat(&self) -> Result<u32, StoreError> {
        let mut probing = self.probing.lock().await;
        if let Some((connection, generation)) = probing.take()
            && generation == self.link.generation()
        {
            match self.probe(&mut probing, connection, generation).await {
                // It has died meanwhile. Redis may be there again.
                Err(StoreError::Unreachable(_)) => {}
                probed => return probed,
            }
        }
        let generation = self.link.generation();
        let connection = match self.pool.get().await {
            Ok(connection) => connection,
            Err(error) => {
                self.lose(generation);
                return Err(unreachable(error));
            }
        };
        self.probe(&mut probing, connection, generation).await
    }
}

impl Redis {
    async fn probe(
        &self,
        held: &mut Option<(Connection, u64)>,
        mut connection: Connection,
        generation: u64,
    ) -> Result<u32, StoreError> {
        let mut beat = HEARTBEAT.prepare_invoke();
        beat.key(format!("{}:probe", self.prefix)).arg(channel(&self.prefix));
        let error = match timeout(self.deadline, beat.invoke_async(&mut *connection)).await {
            Ok(Ok(instances)) => {
                *held = Some((connection, generation));
                return Ok(instances);
            }
            Ok(Err(error)) if error.code().is_some() => StoreError::Failed(error.to_string()),
            Ok(Err(error)) => lost(&error),
            Err(_) => StoreError::Timeout(self.deadline),
        };
        if is_demoted(&error) || matches!(error, StoreError::Unreachable(_)) {
            self.lose(generation);
        }
        // An answer that comes too late must not meet another probe.
        drop(Connection::take(connection));
        Err(error)
    }

    fn lose(&self, generation: u64) {
        self.link.lose(generation);
        self.denials.forget_all();
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.presence.abort();
    }
}

/// Where instances listen that share these keys.
fn channel(prefix: &str) -> String {
    format!("{prefix}:instances")
}

/// Is that what a replica says?
fn is_demoted(error: &StoreError) -> bool {
    matches!(error, StoreError::Failed(why) if why.contains("READONLY"))
}

fn lost(error: &RedisError) -> StoreError {
    StoreError::Unreachable(error.to_string())
}

/// In the words of what went wrong, without those of the pool.
fn unreachable(error: PoolError) -> StoreError {
    match error {
        PoolError::Backend(error) => StoreError::Unreachable(error.to_string()),
        error => StoreError::Unreachable(error.to_string()),
    }
}
