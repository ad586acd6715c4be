//! Several Redis that belong together: a cluster, and a primary with its replica under a sentinel.

use super::{Engine, Process, Redis, eventually, free_port};
use deadpool_redis::redis::{Value, from_redis_value};
use std::fmt::Write as _;
use std::process::Command;
use tempfile::TempDir;

/// Slots of a cluster, of which each of three primaries has a third.
const SLOTS: [(u16, u16); 3] = [(0, 5460), (5461, 10_922), (10_923, 16_383)];

/// A cluster of three primaries, and if it is to survive one of them a replica of each.
pub(crate) struct Cluster {
    /// The primaries first.
    pub(crate) nodes: Vec<Redis>,
}

impl Cluster {
    pub(crate) async fn start(engine: Engine, replicas: bool) -> Self {
        loop {
            // Now and then somebody else takes a port meanwhile.
            if let Some(cluster) = Self::try_start(engine, replicas).await {
                return cluster;
            }
        }
    }

    /// Each node is told of all others by the file in which it would remember them.
    async fn try_start(engine: Engine, replicas: bool) -> Option<Self> {
        let count = if replicas { 6 } else { 3 };
        let ports: Vec<(u16, u16)> = (0..count).map(|_| (free_port(), free_port())).collect();
        let id = |node: usize| format!("{node:040x}");
        let mut starting = Vec::new();
        for (this, (port, bus)) in ports.iter().enumerate() {
            let mut known = String::new();
            for (node, (port, bus)) in ports.iter().enumerate() {
                let myself = if node == this { "myself," } else { "" };
                let (role, primary) =
                    if node < 3 { ("master", "-".to_owned()) } else { ("slave", id(node - 3)) };
                let slots = SLOTS.get(node).map(|(from, to)| format!(" {from}-{to}")).unwrap_or_default();
                writeln!(
                    known,
                    "{} 127.0.0.1:{port}@{bus} {myself}{role} {primary} 0 0 {} connected{slots}",
                    id(node),
                    node % 3 + 1
                )
                .unwrap();
            }
            known.push_str("vars currentEpoch 3 lastVoteEpoch 0\n");
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("nodes.conf"), known).unwrap();
            let (port, bus) = (*port, bus.to_string());
            starting.push(async move {
                let more = [
                    "--cluster-enabled",
                    "yes",
                    "--cluster-config-file",
                    "nodes.conf",
                    "--cluster-port",
                    &bus,
                    "--cluster-node-timeout",
                    "1500",
                    // A node that is lost takes its own slots away and no others.
                    "--cluster-require-full-coverage",
                    "no",
                    "--repl-diskless-sync-delay",
                    "0",
                ];
                Redis::start_with(engine, port, folder, &more).await
            });
        }
        let nodes = futures_util::future::join_all(starting).await.into_iter().collect::<Option<Vec<_>>>()?;
        let cluster = Self { nodes };
        for node in &cluster.nodes {
            eventually("the cluster is there", async || {
                let told: String =
                    from_redis_value(node.try_command(&["CLUSTER", "INFO"]).await.ok()?).ok()?;
                let known = format!("cluster_known_nodes:{count}");
                (told.contains("cluster_state:ok") && told.contains(&known)).then_some(())
            })
            .await;
        }
        for node in cluster.nodes.iter().skip(3) {
            eventually("the replica follows, or else it would not take over", async || {
                let told: String =
                    from_redis_value(node.try_command(&["INFO", "replication"]).await.ok()?).ok()?;
                told.contains("master_link_status:up").then_some(())
            })
            .await;
        }
        Some(cluster)
    }

    pub(crate) fn url(&self) -> String {
        let hosts: Vec<_> = self.nodes.iter().map(|node| node.url().replace("redis://", "")).collect();
        format!("redis-cluster://{}", hosts.join(","))
    }

    /// Which of the primaries has the bucket of that key and class.
    pub(crate) async fn owner(&self, key: &str, class: &str) -> usize {
        let bucket = format!("rl:{{{key}}}:{class}");
        // On a busy machine a node may take another for lost, for a moment.
        eventually(&format!("somebody has {key}"), async || {
            for (place, node) in self.nodes.iter().take(3).enumerate() {
                if node.try_command(&["EXISTS", &bucket]).await.is_ok() {
                    return Some(place);
                }
            }
            None
        })
        .await
    }

    /// All its keys, in order.
    pub(crate) async fn keys(&self) -> Vec<String> {
        let mut all = Vec::new();
        for node in self.nodes.iter().take(3) {
            all.extend(node.keys().await);
        }
        all.sort();
        all
    }
}

/// A primary, its replica, and a sentinel that makes the one of the other.
pub(crate) struct Watched {
    pub(crate) primary: Redis,
    pub(crate) replica: Redis,
    sentinel: Process,
    port: u16,
    _folder: TempDir,
}

impl Watched {
    pub(crate) async fn start(engine: Engine) -> Self {
        let primary = Redis::start_on_port(engine).await;
        let port = primary.port().to_string();
        let replica = loop {
            let more = ["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"];
            if let Some(replica) =
                Redis::start_with(engine, free_port(), tempfile::tempdir().unwrap(), &more).await
            {
                break replica;
            }
        };
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sentinel.conf");
        let sentinel_port = free_port();
        let text = format!(
            "port {sentinel_port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {port} 1\n\
             sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 2000\n"
        );
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(engine.program());
        command.arg(&file).arg("--sentinel").current_dir(folder.path());
        let sentinel = Process::spawn(&mut command);
        let watched = Self { primary, replica, sentinel, port: sentinel_port, _folder: folder };
        eventually("the replica follows, and the sentinel knows it", async || {
            let told: String =
                from_redis_value(watched.replica.try_command(&["INFO", "replication"]).await.ok()?).ok()?;
            let knows = watched.sentinel(&["SENTINEL", "REPLICAS", "main"]).await?;
            let knows = matches!(knows, Value::Array(replicas) if !replicas.is_empty());
            (told.contains("master_link_status:up") && knows).then_some(())
        })
        .await;
        watched
    }

    pub(crate) fn url(&self) -> String {
        format!("redis-sentinel://127.0.0.1:{}/main", self.port)
    }

    /// Says a command to the sentinel.
    pub(crate) async fn sentinel(&self, words: &[&str]) -> Option<Value> {
        let client = deadpool_redis::redis::Client::open(format!("redis://127.0.0.1:{}", self.port)).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.ok()?;
        let mut command = deadpool_redis::redis::Cmd::new();
        command.arg(words);
        command.query_async(&mut connection).await.ok()
    }

    /// What the sentinel has said.
    pub(crate) fn output(&self) -> String {
        self.sentinel.output()
    }
}
