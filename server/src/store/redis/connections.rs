//! The ways to Redis: one server, the primary that sentinels name, or a cluster. Above this nobody tells them apart,
//! but for what a cluster can not do in one step.
//!
//! The pools of deadpool-redis can not be given certificates, nor can a cluster be asked through them as
//! [`cluster`](super::cluster) does. So the pool is deadpool's, and what it makes is made here.

use super::cluster::{Cluster, Turns};
use crate::config::{RedisUrl, StoreConfig, Topology};
use crate::store::StoreError;
use deadpool::managed::{Manager, Metrics, Object, Pool, RecycleResult};
use deadpool_redis::Runtime;
use deadpool_redis::redis::aio::{ConnectionLike as _, MultiplexedConnection};
use deadpool_redis::redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use deadpool_redis::redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, ErrorKind, RedisError, RedisResult, TlsCertificates,
    TlsMode, Value,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

pub(super) type Connections = Pool<Way>;
pub(super) type Held = Object<Way>;

/// Finding a primary or the nodes of a cluster takes several trips, some of them to who does not answer. Calls do not
/// wait for it.
const FINDING: Duration = Duration::from_secs(2);

/// How often a command is sent that a cluster refuses. It ends sooner: with the store's deadline.
pub(super) const TRIES: usize = 16;

/// How connections are made.
pub(super) enum Way {
    One(Client, AsyncConnectionConfig),
    Sentinel(Mutex<SentinelClient>, AsyncConnectionConfig),
    Cluster(Cluster),
}

/// To one server, or to all of a cluster. Clones share it.
#[derive(Clone)]
pub(super) enum Connection {
    One(MultiplexedConnection),
    Cluster(Cluster),
}

impl Way {
    /// # Errors
    /// The URL can not be used.
    pub(super) fn to(
        url: &RedisUrl,
        certificates: &TlsCertificates,
        deadline: Duration,
    ) -> RedisResult<Self> {
        let timeouts = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(deadline))
            .set_response_timeout(Some(deadline));
        let nodes = url.reveal();
        match url.topology() {
            Topology::Single => {
                let server = nodes.first().cloned();
                let server =
                    server.ok_or_else(|| RedisError::from((ErrorKind::InvalidClientConfig, "no host")))?;
                Ok(Self::One(client(server, url.is_tls().then_some(certificates))?, timeouts))
            }
            Topology::Sentinel { primary } => {
                let addresses = nodes.iter().map(|node| node.addr().clone());
                let mut builder = SentinelClientBuilder::new(addresses, primary, SentinelServerType::Master)?;
                if let Some(node) = nodes.first() {
                    let settings = node.redis_settings();
                    builder = builder.set_client_to_redis_db(settings.db());
                    if let Some(user) = settings.username() {
                        builder = builder.set_client_to_redis_username(user);
                    }
                    if let Some(password) = settings.password() {
                        builder = builder.set_client_to_redis_password(password);
                    }
                }
                let sentinels = url.reveal_sentinels();
                if let Some(user) = &sentinels.user {
                    builder = builder.set_client_to_sentinel_username(user);
                }
                if let Some(password) = &sentinels.password {
                    builder = builder.set_client_to_sentinel_password(password);
                }
                if url.is_tls() {
                    builder = builder
                        .set_client_to_redis_tls_mode(TlsMode::Secure)
                        .set_client_to_redis_certificates(certificates.clone())
                        .set_client_to_sentinel_tls_mode(TlsMode::Secure)
                        .set_client_to_sentinel_certificates(certificates.clone());
                }
                Ok(Self::Sentinel(Mutex::new(builder.build()?), timeouts))
            }
            Topology::Cluster => {
                Cluster::of(nodes, url.is_tls().then(|| certificates.clone()), deadline).map(Self::Cluster)
            }
        }
    }

    /// So many of them at most.
    ///
    /// # Errors
    /// The pool can not be.
    pub(super) fn pool(self, config: &StoreConfig) -> Result<Connections, StoreError> {
        let finding = match self {
            Self::One(..) => config.deadline,
            Self::Sentinel(..) | Self::Cluster(_) => config.deadline.max(FINDING),
        };
        Pool::builder(self)
            // One more for heartbeats.
            .max_size(config.connections + 1)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(config.deadline))
            .create_timeout(Some(finding))
            .build()
            .map_err(|error| StoreError::Unreachable(error.to_string()))
    }
}

/// For connections to that server.
pub(super) fn client(server: ConnectionInfo, certificates: Option<&TlsCertificates>) -> RedisResult<Client> {
    match certificates {
        Some(certificates) => Client::build_with_tls(server, certificates.clone()),
        None => Client::open(server),
    }
}

impl Manager for Way {
    type Type = Connection;
    type Error = RedisError;

    async fn create(&self) -> RedisResult<Connection> {
        match self {
            Self::One(client, timeouts) => {
                client.get_multiplexed_async_connection_with_config(timeouts).await.map(Connection::One)
            }
            Self::Sentinel(client, timeouts) => {
                let mut client = client.lock().await;
                client.get_async_connection_with_config(timeouts).await.map(Connection::One)
            }
            Self::Cluster(cluster) => {
                cluster.is_there().await?;
                Ok(Connection::Cluster(cluster.clone()))
            }
        }
    }

    /// What is given back is sound: whoever doubts a connection closes it.
    async fn recycle(&self, _: &mut Connection, _: &Metrics) -> RecycleResult<RedisError> {
        Ok(())
    }
}

impl Connection {
    /// Sends a command about keys of that slot.
    ///
    /// # Errors
    /// No answer, or one that is an error.
    pub(super) async fn ask(&mut self, slot: u16, command: &Cmd) -> RedisResult<Value> {
        match self {
            Self::One(one) => one.req_packed_command(command).await?.extract_error(),
            Self::Cluster(cluster) => cluster.ask(slot, command).await,
        }
    }

    pub(super) const fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    /// Script calls to the node that has that slot. One server is asked in turn anyway.
    pub(super) fn turns(&self, slot: u16) -> Arc<Turns> {
        match self {
            Self::One(_) => Arc::default(),
            Self::Cluster(cluster) => cluster.turns(slot),
        }
    }

    /// What was asked about that slot at that time was not answered.
    pub(super) fn doubt(&self, slot: u16, asked: Instant) {
        if let Self::Cluster(cluster) = self {
            cluster.doubt(slot, asked);
        }
    }
}
