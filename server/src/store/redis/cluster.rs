//! A cluster: which node has a slot, and one connection to each node.
//!
//! The redis crate's own client stops everybody while it looks for a node that is lost, goes on asking one that stands
//! still after its replica has taken over, and by default sends again what may have been done. So who is asked is
//! decided here: a node holds up its own calls alone, whatever becomes of it, and nothing waits for a look at who has
//! which slot.

use super::connections::{TRIES, client};
use super::pace::Pace;
use crate::clock::instant;
use crc16::{State, XMODEM};
use deadpool_redis::redis::aio::{ConnectionLike as _, MultiplexedConnection};
use deadpool_redis::redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, Pipeline, RedisError,
    RedisResult, ServerErrorKind, TlsCertificates, Value, cmd,
};
use futures_util::future::{BoxFuture, Shared};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use parking_lot::RwLock;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, sleep, timeout};

const SLOTS: u16 = 16_384;

/// Between two tries where a cluster changes, and between two looks.
const CHANGING: Duration = Duration::from_millis(5);
/// For which a node that could not be reached is not tried again.
const UNREACHED: Duration = Duration::from_millis(20);
/// For making a connection, which calls do not wait for longer than for anything else.
const CONNECTING: Duration = Duration::from_millis(500);
/// For a look.
const LOOKING: Duration = Duration::from_secs(2);

/// Script calls that may be on their way to one node: more would only wait there, where nobody can leave them out.
const IN_TURN: usize = 64;

/// The slot of keys with that text in their braces.
pub(super) fn slot(braced: &str) -> u16 {
    State::<XMODEM>::calculate(braced.as_bytes()) % SLOTS
}

/// Clones share everything.
#[derive(Clone)]
pub(super) struct Cluster(Arc<Inner>);

struct Inner {
    /// The nodes that are named, as which others are asked, too.
    named: Vec<ConnectionInfo>,
    certificates: Option<TlsCertificates>,
    timeouts: AsyncConnectionConfig,
    known: RwLock<Known>,
    looking: Arc<Mutex<()>>,
}

/// `host:port`, as nodes call each other.
type Node = Arc<str>;

#[derive(Default)]
struct Known {
    /// By slot. Empty before the first look.
    owners: Vec<Option<Node>>,
    connections: HashMap<Node, Connecting>,
    turns: HashMap<Node, Arc<Turns>>,
}

/// Script calls to one node.
pub(super) struct Turns {
    pub(super) places: Semaphore,
    pub(super) pace: Pace,
}

impl Default for Turns {
    fn default() -> Self {
        Self { places: Semaphore::new(IN_TURN), pace: Pace::default() }
    }
}

/// A connection that is there or will be, for whoever waits for it.
#[derive(Clone)]
struct Connecting {
    connection: Shared<BoxFuture<'static, RedisResult<MultiplexedConnection>>>,
    since: Instant,
}

impl Cluster {
    pub(super) fn of(
        named: &[ConnectionInfo],
        certificates: Option<TlsCertificates>,
        deadline: Duration,
    ) -> RedisResult<Self> {
        let timeouts = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(deadline.max(CONNECTING)))
            .set_response_timeout(Some(deadline));
        let cluster = Self(Arc::new(Inner {
            named: named.to_vec(),
            certificates,
            timeouts,
            known: RwLock::default(),
            looking: Arc::default(),
        }));
        // Whatever is wrong with the settings is wrong with those of any node.
        cluster.client("localhost:6379").map(|_| cluster)
    }

    /// Who has which slot is known, or becomes so.
    ///
    /// # Errors
    /// No node tells.
    pub(super) async fn is_there(&self) -> RedisResult<()> {
        if self.0.known.read().owners.is_empty() { self.learn().await } else { Ok(()) }
    }

    /// Sends a command about keys of that slot to the node that has it. A node that refuses it as none of its own, or
    /// for now, has not executed it: then it is sent again, to the node that it names. One whose answer was lost is not.
    ///
    /// # Errors
    /// No answer, or one that is an error.
    pub(super) async fn ask(&self, slot: u16, command: &Cmd) -> RedisResult<Value> {
        let mut asking = None;
        for tried in 1.. {
            let (node, is_guest) = match asking.take() {
                Some(node) => (node, true),
                None => (self.owner(slot).ok_or_else(nobody)?, false),
            };
            let answer = self.say(&node, command, is_guest).await;
            let Err(error) = &answer else { return answer };
            let ErrorKind::Server(kind) = error.kind() else { return answer };
            let named = error.redirect_node().and_then(|(named, _)| address(named, &node));
            if tried == TRIES {
                return answer;
            }
            match (kind, named) {
                (ServerErrorKind::Ask, Some(named)) => asking = Some(named),
                (ServerErrorKind::Moved, Some(named)) => {
                    self.moved(slot, named);
                    self.look();
                    // The first time it is told who has it now.
                    if tried > 1 {
                        sleep(CHANGING).await;
                    }
                }
                (
                    ServerErrorKind::TryAgain
                    | ServerErrorKind::ClusterDown
                    | ServerErrorKind::MasterDown
                    | ServerErrorKind::BusyLoading
                    | ServerErrorKind::ReadOnly,
                    _,
                ) => {
                    self.look();
                    sleep(CHANGING).await;
                }
                _ => return answer,
            }
        }
        Err(nobody())
    }

    /// What was asked of that slot's node at that time was not answered: it is asked on another connection from now on,
    /// and another node may have the slot.
    pub(super) fn doubt(&self, slot: u16, asked: Instant) {
        if let Some(node) = self.owner(slot) {
            let mut known = self.0.known.write();
            // Of many calls that had no answer the first does this.
            if known.connections.get(&node).is_some_and(|connecting| connecting.since <= asked) {
                known.connections.remove(&node);
            }
        }
        self.look();
    }

    /// Script calls to the node that has that slot. Of a slot that nobody has they are refused one by one.
    pub(super) fn turns(&self, slot: u16) -> Arc<Turns> {
        let Some(node) = self.owner(slot) else { return Arc::default() };
        if let Some(turns) = self.0.known.read().turns.get(&node) {
            return turns.clone();
        }
        self.0.known.write().turns.entry(node).or_default().clone()
    }

    pub(super) fn owner(&self, slot: u16) -> Option<Node> {
        self.0.known.read().owners.get(usize::from(slot))?.clone()
    }

    /// For connections to that node.
    pub(super) fn client(&self, node: &str) -> RedisResult<Client> {
        let like = self.0.named.first().ok_or_else(nobody)?;
        let (host, port) = host_and_port(node).ok_or_else(nobody)?;
        let host = host.to_owned();
        let address = match like.addr() {
            ConnectionAddr::TcpTls { insecure, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: None }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        client(like.clone().set_addr(address), self.0.certificates.as_ref())
    }

    async fn say(&self, node: &Node, command: &Cmd, is_guest: bool) -> RedisResult<Value> {
        let mut connection = self.connection(node).connection.await?;
        if !is_guest {
            return connection.req_packed_command(command).await?.extract_error();
        }
        let mut both = Pipeline::with_capacity(2);
        both.cmd("ASKING").add_command(command.clone());
        let mut answers = connection.req_packed_commands(&both, 0, 2).await?;
        answers.pop().map_or(Ok(Value::Nil), Value::extract_error)
    }

    /// The connection to that node. It is made whether or not who waits for it goes.
    fn connection(&self, node: &Node) -> Connecting {
        if let Some(connecting) = self.0.known.read().connections.get(node) {
            return connecting.clone();
        }
        let mut known = self.0.known.write();
        let made = known.connections.entry(node.clone()).or_insert_with(|| {
            let (client, timeouts) = (self.client(node), self.0.timeouts.clone());
            let connection =
                async move { client?.get_multiplexed_async_connection_with_config(&timeouts).await };
            let connecting = Connecting { connection: connection.boxed().shared(), since: instant() };
            tokio::spawn(self.clone().follow(node.clone(), connecting.clone()));
            connecting
        });
        made.clone()
    }

    /// Until that connection is made, or may be tried again.
    async fn follow(self, node: Node, connecting: Connecting) {
        if connecting.connection.clone().await.is_ok() {
            return;
        }
        sleep(UNREACHED).await;
        let mut known = self.0.known.write();
        if known.connections.get(&node).is_some_and(|now| now.connection.ptr_eq(&connecting.connection)) {
            known.connections.remove(&node);
        }
    }

    fn moved(&self, slot: u16, to: Node) {
        if let Some(owner) = self.0.known.write().owners.get_mut(usize::from(slot)) {
            *owner = Some(to);
        }
    }

    /// Looks who has which slot, unless somebody does.
    fn look(&self) {
        let Ok(looking) = self.0.looking.clone().try_lock_owned() else { return };
        let cluster = self.clone();
        tokio::spawn(async move {
            match timeout(LOOKING, cluster.learn()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!("no node tells who has which slot: {error}"),
                Err(_) => tracing::debug!("no node tells who has which slot"),
            }
            sleep(CHANGING).await;
            drop(looking);
        });
    }

    /// Asks all nodes at once, and believes the first that knows of every slot, or else who knows of most.
    async fn learn(&self) -> RedisResult<()> {
        let command = cmd("CLUSTER").arg("SLOTS").take();
        let mut told: FuturesUnordered<_> = self
            .nodes()
            .into_iter()
            .map(|node| {
                let command = &command;
                async move { self.say(&node, command, false).await.map(|slots| owners(&slots, &node)) }
            })
            .collect();
        let (mut most, mut best, mut failed) = (0, Vec::new(), nobody());
        while let Some(told) = told.next().await {
            match told {
                Ok((count, owners)) if count > most => (most, best) = (count, owners),
                Ok(_) => {}
                Err(error) => failed = error,
            }
            if most == usize::from(SLOTS) {
                break;
            }
        }
        if most == 0 {
            return Err(failed);
        }
        let mut known = self.0.known.write();
        let there: HashSet<&Node> = best.iter().flatten().collect();
        known.connections.retain(|node, _| there.contains(node));
        known.turns.retain(|node, _| there.contains(node));
        known.owners = best;
        Ok(())
    }

    /// Those that have slots, and those that are named.
    fn nodes(&self) -> HashSet<Node> {
        let named = self.0.named.iter().filter_map(|node| match node.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                Some(joined(host, *port))
            }
            _ => None,
        });
        self.0.known.read().owners.iter().flatten().cloned().chain(named).collect()
    }
}

fn nobody() -> RedisError {
    RedisError::from((ErrorKind::ClusterConnectionNotFound, "no node is known to have the slot"))
}

fn joined(host: &str, port: u16) -> Node {
    let host = host.trim_matches(['[', ']']);
    if host.contains(':') { format!("[{host}]:{port}").into() } else { format!("{host}:{port}").into() }
}

fn host_and_port(node: &str) -> Option<(&str, u16)> {
    let (host, port) = node.rsplit_once(':')?;
    Some((host.trim_matches(['[', ']']), port.parse().ok()?))
}

/// A node as it is called by another. One without a host has that of who says it.
fn address(named: &str, by: &str) -> Option<Node> {
    let (host, port) = host_and_port(named)?;
    let host = if host.is_empty() || host == "?" { host_and_port(by)?.0 } else { host };
    Some(joined(host, port))
}

/// The primary of each slot in what `by` answers to `CLUSTER SLOTS`, and how many have one.
fn owners(slots: &Value, by: &str) -> (usize, Vec<Option<Node>>) {
    let mut owners = vec![None; usize::from(SLOTS)];
    let mut count = 0;
    for range in list(slots) {
        let [first, last, primary, ..] = list(range) else { continue };
        let [host, port, ..] = list(primary) else { continue };
        let (Some(first), Some(last), Some(port)) = (number(first), number(last), number(port)) else {
            continue;
        };
        let host = match host {
            Value::BulkString(host) => std::str::from_utf8(host).unwrap_or_default(),
            Value::SimpleString(host) => host,
            _ => "",
        };
        let Ok(port) = u16::try_from(port) else { continue };
        let Some(node) = address(&joined(host, port), by) else { continue };
        for owner in owners.get_mut(first..=last).into_iter().flatten() {
            count += usize::from(owner.is_none());
            *owner = Some(node.clone());
        }
    }
    (count, owners)
}

fn list(value: &Value) -> &[Value] {
    if let Value::Array(values) = value { values } else { &[] }
}

fn number(value: &Value) -> Option<usize> {
    if let Value::Int(number) = value { usize::try_from(*number).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_what_others_call_it() {
        for (named, node) in [
            ("10.0.0.1:7000", Some("10.0.0.1:7000")),
            ("redis-1.local:7000", Some("redis-1.local:7000")),
            ("[::1]:7000", Some("[::1]:7000")),
            ("::1:7000", Some("[::1]:7000")),
            // It does not know its own name: it is where it was asked.
            (":7000", Some("asked:7000")),
            ("?:7000", Some("asked:7000")),
            ("10.0.0.1", None),
            ("10.0.0.1:70000", None),
            ("", None),
        ] {
            assert_eq!(address(named, "asked:1").as_deref(), node, "{named}");
        }
    }

    #[test]
    fn what_is_told_of_slots_is_taken_as_far_as_it_makes_sense() {
        let text = |text: &str| Value::BulkString(text.into());
        let range = |first, last, host, port| {
            let node = Value::Array(vec![host, Value::Int(port), text("id")]);
            Value::Array(vec![Value::Int(first), Value::Int(last), node])
        };
        let told = Value::Array(vec![
            range(0, 1, text("a"), 1),
            range(2, 2, Value::Nil, 2),
            range(16_383, 16_383, text("::1"), 3),
            // None of these is a range of a node.
            range(5, 16_384, text("a"), 1),
            range(9, 8, text("a"), 1),
            range(-1, 3, text("a"), 1),
            range(3, 3, text("a"), 70_000),
            Value::Array(vec![Value::Int(4), Value::Int(4)]),
            Value::Nil,
        ]);
        let (count, owners) = owners(&told, "asked:1");
        let known: Vec<_> =
            owners.iter().enumerate().filter_map(|(n, it)| Some((n, it.as_deref()?))).collect();
        assert_eq!(known, [(0, "a:1"), (1, "a:1"), (2, "asked:2"), (16_383, "[::1]:3")]);
        assert_eq!(count, 4);
        assert_eq!(super::owners(&Value::Nil, "a:1").0, 0);
    }

    #[test]
    fn slots_are_those_of_redis() {
        // As CLUSTER KEYSLOT tells.
        for (key, expected) in [("foo", 12_182), ("a", 15_495), ("123456789", 12_739), ("", 0)] {
            assert_eq!(slot(key), expected, "{key}");
        }
    }
}
