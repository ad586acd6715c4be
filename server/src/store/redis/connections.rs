//! The ways to Redis: one server, the primary that sentinels name, or a cluster. Above this nobody tells them apart,
//! but for what a cluster can not do in one step.
//!
//! The pools of deadpool-redis can not be told how often a cluster is asked again, and the default would charge a call
//! twice whose answer was lost. So the pool is deadpool's, and what it makes is made here.

use crate::config::{RedisUrl, StoreConfig, Topology};
use crate::store::StoreError;
use deadpool::managed::{Manager, Metrics, Object, Pool, RecycleResult};
use deadpool_redis::Runtime;
use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::cluster::ClusterClient;
use deadpool_redis::redis::cluster_async::ClusterConnection;
use deadpool_redis::redis::cluster_routing::SingleNodeRoutingInfo;
use deadpool_redis::redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use deadpool_redis::redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, Pipeline, ProtocolVersion, RedisError, RedisFuture,
    RedisResult, ServerErrorKind, TlsCertificates, TlsMode, Value,
};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::sleep;

pub(super) type Connections = Pool<Way>;
pub(super) type Held = Object<Way>;

/// Finding a primary or the nodes of a cluster takes several trips, some of them to who does not answer. Calls do not
/// wait for it.
const FINDING: Duration = Duration::from_secs(2);

/// Between two tries where a cluster changes.
const CHANGING: Duration = Duration::from_millis(5);
/// How often a refused command is sent again. It ends sooner: with the store's deadline.
const TRIES: usize = 16;

/// How connections are made.
pub(super) enum Way {
    One(Client, AsyncConnectionConfig),
    Sentinel(Mutex<SentinelClient>, AsyncConnectionConfig),
    Cluster(ClusterClient),
}

/// To one server, or to all of a cluster. Clones share it.
#[derive(Clone)]
pub(super) enum Connection {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
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
            Topology::Single => Ok(Self::One(single(url, certificates)?, timeouts)),
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
                let mut builder = ClusterClient::builder(nodes.iter().cloned())
                    // Also a command whose answer was lost would be sent again. What is safe is, in `ask`.
                    .retries(0)
                    // Only so can it be subscribed to a channel.
                    .use_protocol(ProtocolVersion::RESP3)
                    .connection_timeout(deadline)
                    .response_timeout(deadline)
                    .overall_response_timeout(Some(deadline));
                if url.is_tls() {
                    builder = builder.tls(TlsMode::Secure).certs(certificates.clone());
                }
                Ok(Self::Cluster(builder.build()?))
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

/// The only server, or the first that is named.
fn single(url: &RedisUrl, certificates: &TlsCertificates) -> RedisResult<Client> {
    let node = url.reveal().first().cloned();
    let node = node.ok_or_else(|| RedisError::from((ErrorKind::InvalidClientConfig, "no host")))?;
    if url.is_tls() { Client::build_with_tls(node, certificates.clone()) } else { Client::open(node) }
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
            Self::Cluster(client) => client.get_async_connection().await.map(Connection::Cluster),
        }
    }

    /// What is given back is sound: whoever doubts a connection closes it.
    async fn recycle(&self, _: &mut Connection, _: &Metrics) -> RecycleResult<RedisError> {
        Ok(())
    }
}

impl Connection {
    /// Sends a command. Where a cluster changes, it refuses what is not for it: then it is sent again, to the node that
    /// it names. A command whose answer was lost is not.
    ///
    /// # Errors
    /// No answer, or one that is an error.
    pub(super) async fn ask(&mut self, command: &Cmd) -> RedisResult<Value> {
        let mut answer = say(self, command).await;
        let Self::Cluster(cluster) = self else { return answer };
        for _ in 0..TRIES {
            let Err(error) = &answer else { break };
            answer = match (error.kind(), error.redirect_node()) {
                (ErrorKind::Server(ServerErrorKind::Ask), Some((node, _))) => {
                    let Some(node) = at(node) else { break };
                    asking(cluster, command, node).await
                }
                // It has looked where slots are before it takes the next command.
                (ErrorKind::Server(ServerErrorKind::Moved), _) => say(cluster, command).await,
                (
                    ErrorKind::ClusterConnectionNotFound
                    | ErrorKind::Server(
                        ServerErrorKind::TryAgain
                        | ServerErrorKind::ClusterDown
                        | ServerErrorKind::MasterDown
                        | ServerErrorKind::BusyLoading
                        | ServerErrorKind::ReadOnly,
                    ),
                    _,
                ) => {
                    sleep(CHANGING).await;
                    say(cluster, command).await
                }
                _ => break,
            };
        }
        answer
    }

    pub(super) const fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }
}

async fn say(connection: &mut impl ConnectionLike, command: &Cmd) -> RedisResult<Value> {
    connection.req_packed_command(command).await?.extract_error()
}

/// `host:port`, or `[host]:port`.
fn at(node: &str) -> Option<SingleNodeRoutingInfo> {
    let (host, port) = node.rsplit_once(':')?;
    let host = host.trim_matches(['[', ']']);
    Some(SingleNodeRoutingInfo::ByAddress { host: host.to_owned(), port: port.parse().ok()? })
}

/// To a node that gets the key's slot just now.
async fn asking(
    cluster: &mut ClusterConnection,
    command: &Cmd,
    node: SingleNodeRoutingInfo,
) -> RedisResult<Value> {
    let mut both = Pipeline::with_capacity(2);
    both.cmd("ASKING").add_command(command.clone());
    let mut answers = cluster.route_pipeline(both, 0, 2, node).await?;
    answers.pop().map_or(Ok(Value::Nil), Value::extract_error)
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::One(one) => one.req_packed_command(command),
            Self::Cluster(cluster) => cluster.req_packed_command(command),
        }
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::One(one) => one.req_packed_commands(commands, offset, count),
            Self::Cluster(cluster) => cluster.req_packed_commands(commands, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::One(one) => one.get_db(),
            Self::Cluster(cluster) => cluster.get_db(),
        }
    }
}
