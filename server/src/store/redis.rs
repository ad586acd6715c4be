//! The store in Redis (or Valkey): shared by every instance, decided inside Redis.
//!
//! A call becomes a job in one bounded queue. A few *lanes*, each with one connection, take whatever
//! waits and send it as one script call. While the lanes are idle a decision costs one round trip and no
//! wait; under load the script calls grow larger instead of more.
//!
//! Keys are `<prefix>:{<key>}:<class>` for buckets, `<prefix>:strikes:{<key>}`, `<prefix>:block:{<key>}` and
//! `<prefix>:lease:{<key>}:<class>:<nonce>`. Every key that is written expires.

mod lane;
mod script;

use super::{Store, StoreError};
use crate::clock::{Clock, instant};
use crate::config::{RedisUrl, StoreConfig};
use crate::limit::{Cost, Decision};
use crate::request::{Hit, Settlement};
use async_trait::async_trait;
use deadpool_redis::redis::{AsyncConnectionConfig, Script};
use deadpool_redis::{Connection, Manager, Pool, PoolError, Runtime};
use lane::{Job, Lane};
use script::Call;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

/// Calls that may wait for a lane.
const WAITING: usize = 8192;

/// Does what decisions need to be able to do: run a script that writes. Nobody ever sees the key.
static PROBE: LazyLock<Script> =
    LazyLock::new(|| Script::new("redis.call('SET', KEYS[1], '', 'PX', 1000) redis.call('DEL', KEYS[1])"));

/// Keeps everything in Redis.
pub struct Redis {
    queue: async_channel::Sender<Job>,
    pool: Pool,
    link: Arc<Link>,
    prefix: String,
    deadline: Duration,
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

        let (queue, jobs) = async_channel::bounded(WAITING);
        let link = Arc::new(Link::default());
        for _ in 0..config.connections {
            let lane = Lane::new(jobs.clone(), pool.clone(), link.clone(), clock.clone(), config.deadline);
            tokio::spawn(lane.run());
        }
        Ok(Self { queue, pool, link, prefix: config.prefix.clone(), deadline: config.deadline })
    }

    async fn ask(&self, call: Call, deadline: Option<Instant>) -> Result<Vec<script::Row>, StoreError> {
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
        let rows = self.ask(Call::decide(&self.prefix, &hits), deadline).await?;
        let decisions: Vec<Decision> = rows.iter().map(script::decision).collect::<Result<_, _>>()?;
        if decisions.len() != hits.len() {
            return Err(StoreError::Failed(format!("{} answers to {} hits", decisions.len(), hits.len())));
        }
        Ok(decisions)
    }

    async fn settle(&self, settlement: Settlement, deadline: Option<Instant>) -> Result<Cost, StoreError> {
        let rows = self.ask(Call::settle(&self.prefix, &settlement), deadline).await?;
        match rows.first().and_then(|row| row.first()) {
            Some(&credited) => Ok(Cost::new(credited)),
            None => Err(StoreError::Failed("an empty answer".into())),
        }
    }

    async fn ping(&self) -> Result<(), StoreError> {
        let generation = self.link.generation();
        let mut connection = match self.pool.get().await {
            Ok(connection) => connection,
            Err(error) => {
                self.link.lose(generation);
                return Err(unreachable(error));
            }
        };
        let mut probe = PROBE.prepare_invoke();
        probe.key(format!("{}:probe", self.prefix));
        let probed = timeout(self.deadline, probe.invoke_async::<()>(&mut *connection)).await;
        probed.map_or_else(
            |_| {
                // An answer that comes too late must not meet another probe.
                drop(Connection::take(connection));
                Err(StoreError::Timeout(self.deadline))
            },
            |answer| answer.map_err(|error| StoreError::Failed(error.to_string())),
        )
    }
}

/// In the words of what went wrong, without those of the pool.
fn unreachable(error: PoolError) -> StoreError {
    match error {
        PoolError::Backend(error) => StoreError::Unreachable(error.to_string()),
        error => StoreError::Unreachable(error.to_string()),
    }
}
