//! The store in Redis (or Valkey): shared by every instance, decided inside Redis.
//!
//! A call becomes a job in one bounded queue. A few *lanes*, each with one connection, take whatever
//! waits and send it as one script call. While the lanes are idle a decision costs one round trip and no
//! wait; under load the script calls grow larger instead of more. What Redis has denied and would deny again
//! does not even become a job.
//!
//! Keys are `<prefix>:{<key>}:<class>` for buckets, `<prefix>:strikes:{<key>}`, `<prefix>:block:{<key>}` and
//! `<prefix>:lease:{<key>}:<class>:<nonce>`, and `<prefix>:gateways:{<key>}:<class>` of those who borrow by name. Every key that is written expires.

mod apart;
// Public for what measures packing.
#[doc(hidden)]
pub mod batch;
mod cluster;
mod connections;
mod denials;
mod lane;
mod pace;
mod presence;
mod script;

use super::{Store, StoreError};
use crate::clock::{Clock, instant};
use crate::config::{RedisUrl, StoreConfig, StoreTls, Topology};
use crate::limit::{Cost, Decision};
use crate::request::{Hit, Settlement};
use async_trait::async_trait;
use batch::{Answer, Call};
use connections::{Connections, Held, Way};
use deadpool::managed::{Object, PoolError};
use deadpool_redis::redis::{ClientTlsConfig, RedisError, TlsCertificates};
use denials::Denials;
use lane::{Job, Lane, Road};
use pace::Pace;
use script::HEARTBEAT;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Mutex, Semaphore, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout, timeout_at};

/// Calls that may wait for a lane.
const WAITING: usize = 8192;

/// What is read of a password or certificates at most.
const MOST_BYTES: u64 = 1 << 20;

/// Script calls of a cluster that may be on their way, or wait for their node.
const IN_FLIGHT: usize = 4096;

/// Keys in several slots of a cluster, for a heartbeat that is not answered where instances are counted.
const ELSEWHERE: [&str; 3] = ["a", "b", "c"];

/// What stands in the braces of the channel on which instances are counted.
const INSTANCES: &str = "instances";

/// Keeps everything in Redis.
pub struct Redis {
    queue: async_channel::Sender<Job>,
    connections: Connections,
    road: Arc<Road>,
    is_cluster: bool,
    /// The connection of heartbeats, and from which generation it is. It is kept, since a pool would replace one
    /// that has died without a word.
    beating: Mutex<Option<(Held, u64)>>,
    presence: AbortHandle,
}

/// What lanes and heartbeats know together of the way to Redis.
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
        let unusable = |error: RedisError| StoreError::Unreachable(error.to_string());
        let (url, certificates) = (with_passwords(url, config)?, certificates(config)?);
        let way = || Way::to(&url, &certificates, config.deadline).map_err(unusable);
        let connections = way()?.pool(config)?;

        let (queue, jobs) = async_channel::bounded(WAITING);
        let road = Arc::new(Road {
            link: Link::default(),
            denials: Denials::new(clock.clone()),
            prefix: config.prefix.clone(),
            clock: clock.clone(),
            deadline: config.deadline,
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT)),
        });
        for _ in 0..config.connections {
            let (jobs, connections, road) = (jobs.clone(), connections.clone(), road.clone());
            tokio::spawn(Lane { jobs, connections, held: None, pace: Pace::default(), road }.run());
        }
        Ok(Self {
            queue,
            connections,
            road,
            is_cluster: *url.topology() == Topology::Cluster,
            beating: Mutex::default(),
            presence: tokio::spawn(presence::listen(way()?, channel(&config.prefix))).abort_handle(),
        })
    }

    async fn ask(&self, call: Call, deadline: Option<Instant>) -> Result<Answer, StoreError> {
        let patience = self.road.deadline;
        let ours = instant() + patience;
        let until = deadline.map_or(ours, |theirs| theirs.min(ours));
        let (reply, answer) = oneshot::channel();
        self.queue.try_send(Job { call, until, reply }).map_err(|_| StoreError::Overloaded(WAITING))?;
        match timeout_at(until, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(StoreError::Failed("the call was dropped".into())),
            Err(_) if until < ours => Err(StoreError::DeadlinePassed),
            Err(_) => Err(StoreError::Timeout(patience)),
        }
    }

    /// All of it in one step.
    async fn decide_together(
        &self,
        hits: Vec<Hit>,
        deadline: Option<Instant>,
    ) -> Result<Vec<Decision>, StoreError> {
        if let [hit] = hits.as_slice()
            && let Some(denied) = self.road.denials.certain(hit)
        {
            return Ok(vec![denied]);
        }
        match self.ask(Call::Decide(hits), deadline).await? {
            Answer::Decided(told) => Ok(told.into_iter().map(|told| told.decision).collect()),
            Answer::Settled(_) => Err(StoreError::Failed("the answer to another call".into())),
        }
    }
}

#[async_trait]
impl Store for Redis {
    async fn decide(&self, hits: Vec<Hit>, deadline: Option<Instant>) -> Result<Vec<Decision>, StoreError> {
        if hits.is_empty() {
            return Ok(Vec::new());
        }
        if self.is_cluster && !batch::in_one_slot(&hits) {
            return self.decide_apart(hits, deadline).await;
        }
        self.decide_together(hits, deadline).await
    }

    async fn settle(&self, settlement: Settlement, deadline: Option<Instant>) -> Result<Cost, StoreError> {
        match self.ask(Call::Settle(settlement), deadline).await? {
            Answer::Settled(credited) => Ok(credited),
            Answer::Decided(_) => Err(StoreError::Failed("the answer to another call".into())),
        }
    }

    async fn heartbeat(&self) -> Result<u32, StoreError> {
        let mut beating = self.beating.lock().await;
        if let Some((connection, generation)) = beating.take()
            && generation == self.road.link.generation()
        {
            match self.beat(&mut beating, connection, generation, false).await {
                // It has died meanwhile. Redis may be there again.
                Err(StoreError::Unreachable(_)) => {}
                told => return told,
            }
        }
        let generation = self.road.link.generation();
        let connection = match self.connections.get().await {
            Ok(connection) => connection,
            Err(error) => {
                self.road.lose(generation);
                return Err(unreachable(error));
            }
        };
        self.beat(&mut beating, connection, generation, true).await
    }
}

impl Redis {
    async fn beat(
        &self,
        held: &mut Option<(Held, u64)>,
        mut connection: Held,
        generation: u64,
        is_first: bool,
    ) -> Result<u32, StoreError> {
        let mut told = self.beat_at(INSTANCES, &mut connection, is_first).await;
        if connection.is_cluster() {
            // Who counts may be the one that is gone; then it is not known how many there are.
            for elsewhere in ELSEWHERE {
                if told.is_err() {
                    told = self.beat_at(elsewhere, &mut connection, false).await.map(|_| 0);
                }
            }
        }
        match &told {
            Ok(_) => *held = Some((connection, generation)),
            Err(error) => {
                if is_demoted(error) || matches!(error, StoreError::Unreachable(_)) {
                    self.road.lose(generation);
                }
                // An answer that comes too late must not meet another heartbeat.
                drop(Object::take(connection));
            }
        }
        told
    }

    /// The first one on a connection looks at Redis's settings, too.
    async fn beat_at(&self, place: &str, connection: &mut Held, is_first: bool) -> Result<u32, StoreError> {
        let prefix = &self.road.prefix;
        let mut beat = HEARTBEAT.by_hash(4, 128);
        beat.arg(1).arg(format!("{prefix}:probe:{{{place}}}")).arg(channel(prefix)).arg(u8::from(is_first));
        let (slot, asked) = (cluster::slot(place), instant());
        match timeout(self.road.deadline, script::call(&HEARTBEAT, slot, &beat, connection)).await {
            Ok(Ok((instances, memory))) => {
                let memory: String = memory;
                if let Some(policy) = evicting(&memory) {
                    tracing::warn!(
                        "maxmemory-policy is {policy}: a Redis that is full drops buckets and blocks, as if they had \
                         never been; expected noeviction"
                    );
                }
                Ok(instances)
            }
            Ok(Err(error)) => Err(refused(&error).unwrap_or_else(|| {
                connection.doubt(slot, asked);
                lost(&error)
            })),
            Err(_) => {
                connection.doubt(slot, asked);
                Err(StoreError::Timeout(self.road.deadline))
            }
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.presence.abort();
    }
}

/// With the passwords that are in files.
fn with_passwords(url: &RedisUrl, config: &StoreConfig) -> Result<RedisUrl, StoreError> {
    let mut url = url.clone();
    if let Some(path) = &config.password_file {
        url = url.with_password(&password("password_file", path)?);
    }
    if let Some(path) = &config.sentinel_password_file {
        url = url.with_sentinel_password(&password("sentinel_password_file", path)?);
    }
    Ok(url)
}

fn password(setting: &str, path: &Path) -> Result<String, StoreError> {
    let password = String::from_utf8(read(setting, path)?);
    let password =
        password.map_err(|_| StoreError::Failed(format!("{setting}: {}: no text", path.display())))?;
    Ok(password.trim_end_matches(['\r', '\n']).to_owned())
}

fn certificates(config: &StoreConfig) -> Result<TlsCertificates, StoreError> {
    let StoreTls { ca, cert, key } = &config.tls;
    let root_cert = ca.as_deref().map(|ca| read("tls.ca", ca)).transpose()?;
    let client_tls = match (cert, key) {
        (Some(cert), Some(key)) => {
            Some(ClientTlsConfig { client_cert: read("tls.cert", cert)?, client_key: read("tls.key", key)? })
        }
        _ => None,
    };
    Ok(TlsCertificates { client_tls, root_cert })
}

/// A small file that a setting names.
fn read(setting: &str, path: &Path) -> Result<Vec<u8>, StoreError> {
    let unreadable =
        |why: &dyn std::fmt::Display| StoreError::Failed(format!("{setting}: {}: {why}", path.display()));
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| unreadable(&error))?;
    file.take(MOST_BYTES).read_to_end(&mut bytes).map_err(|error| unreadable(&error))?;
    Ok(bytes)
}

/// By which policy does a Redis that says this of its memory drop keys, if it does?
fn evicting(memory: &str) -> Option<&str> {
    let said = |name: &str| memory.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    said("maxmemory").filter(|bytes| *bytes != "0")?;
    said("maxmemory_policy").filter(|policy| *policy != "noeviction")
}

/// Where instances listen that share these keys. The braces are for clusters: it is where heartbeats are.
fn channel(prefix: &str) -> String {
    format!("{prefix}:{{{INSTANCES}}}")
}

/// Is that what a replica says? Then nothing was done.
fn is_demoted(error: &StoreError) -> bool {
    matches!(error, StoreError::Failed(why) if why.contains("READONLY") || why.contains("MASTERDOWN"))
}

/// An error that Redis answered, in its own words.
fn refused(error: &RedisError) -> Option<StoreError> {
    let code = error.code()?;
    let told = error.detail().map_or_else(|| code.to_owned(), |detail| format!("{code} {detail}"));
    Some(StoreError::Failed(told))
}

fn lost(error: &RedisError) -> StoreError {
    StoreError::Unreachable(error.to_string())
}

/// In the words of what went wrong, without those of the pool.
fn unreachable(error: PoolError<RedisError>) -> StoreError {
    match error {
        PoolError::Backend(error) => StoreError::Unreachable(error.to_string()),
        error => StoreError::Unreachable(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_drops_keys_is_known_by_what_it_says_of_its_memory() {
        for (memory, policy) in [
            (
                "# Memory\r\nmaxmemory:100\r\nmaxmemory_human:100B\r\nmaxmemory_policy:volatile-ttl\r\n",
                Some("volatile-ttl"),
            ),
            ("maxmemory:100\r\nmaxmemory_policy:noeviction\r\n", None),
            ("maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", None),
            ("maxmemory_policy:allkeys-lru\r\n", None),
            ("", None),
        ] {
            assert_eq!(evicting(memory), policy, "{memory}");
        }
    }
}
