//! A real Envoy that asks a real Tollgate, on loopback.

use super::{descriptor, hits};
use crate::support::calls::answer;
use crate::support::http::{Reply, exchange};
use crate::support::{Engine, Process, Redis, Tollgate, eventually, free_port, peer_unless_skipped};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tollgate_proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tonic::transport::{Channel, Endpoint};

const RULES: &str = "
domain: edge
over_limit_body: structured
descriptors:
  - { key: user, rate_limit: { unit: day, requests_per_unit: 10, name: per_user } }
  - key: route
    value: two
    rate_limit: { unit: day, requests_per_unit: 8 }
    descriptors:
      - { key: remote_address, rate_limit: { unit: day, unit_multiplier: 5, requests_per_unit: 5, name: per_ip } }
  - { key: llm, rate_limit: { unit: day, requests_per_unit: 100, charge_denied: true } }
";

/// Tollgate, and an Envoy in front of it. Tests use days, of which none ends while they run, or very rarely.
struct Edge {
    at: SocketAddr,
    envoy: Process,
    tollgate: Process,
    port: u16,
    folder: TempDir,
}

/// Nothing where there is no Envoy. Without an answer within its patience, it denies or lets pass.
async fn edge(deny: bool, patience: &str, store: &str) -> Option<Edge> {
    let program = peer_unless_skipped("envoy", "TOLLGATE_TEST_ENVOY")?;
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("rules")).unwrap();
    std::fs::write(folder.path().join("rules/edge.yaml"), RULES).unwrap();
    let port = free_port();
    let tollgate = tollgate(folder.path(), port, store).await;

    let bootstrap = include_str!("bootstrap.yaml")
        .replace("FOLDER", folder.path().to_str().unwrap())
        .replace("TOLLGATE", &port.to_string())
        .replace("DENY", &deny.to_string())
        .replace("TIMEOUT", patience);
    let file = folder.path().join("envoy.yaml");
    std::fs::write(&file, bootstrap).unwrap();
    let admin = folder.path().join("admin");
    let mut command = Command::new(program);
    command.arg("-c").arg(file).arg("--admin-address-path").arg(&admin);
    command.args(["--concurrency", "1", "--disable-hot-restart", "-l", "warn"]);
    let mut envoy = Process::spawn(&mut command);
    let at = eventually("Envoy listens", async || {
        assert!(envoy.is_running(), "Envoy ended:\n{}", envoy.output());
        let admin: SocketAddr = std::fs::read_to_string(&admin).ok()?.trim().parse().ok()?;
        let listeners = get(admin, "/listeners", None).await?.body;
        let open = listeners.lines().find_map(|line| line.strip_prefix("open::"))?;
        open.parse().ok()
    })
    .await;
    Some(Edge { at, envoy, tollgate, port, folder })
}

/// At that port, so that another can take the place of one.
async fn tollgate(folder: &Path, port: u16, store: &str) -> Process {
    let mut command = Tollgate::command();
    command.current_dir(folder).args(["--domains", "rules", "--http", "127.0.0.1:0", "--store", store]);
    // A busy machine is no sick store.
    command.args(["--grpc", &format!("127.0.0.1:{port}"), "--store-deadline", "5s"]);
    let tollgate = Process::spawn(&mut command);
    tollgate.says("that it serves", |line| line.contains("the store is reached: serving")).await;
    tollgate
}

/// Nothing if it can not be had.
async fn get(at: SocketAddr, path: &str, user: Option<&str>) -> Option<Reply> {
    let user = user.map_or_else(String::new, |user| format!("x-user: {user}\r\n"));
    exchange(at, &format!("GET {path} HTTP/1.1\r\nhost: edge\r\nconnection: close\r\n{user}\r\n")).await
}

impl Edge {
    async fn get(&self, path: &str, user: Option<&str>) -> Reply {
        get(self.at, path, user).await.unwrap_or_else(|| panic!("no answer:\n{}", self.envoy.output()))
    }

    async fn client(&self) -> RateLimitServiceClient<Channel> {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", self.port)).unwrap();
        RateLimitServiceClient::new(answer(endpoint.connect()).await.unwrap())
    }

    /// The statuses of so many calls, one after the other.
    async fn statuses(&self, path: &str, user: Option<&str>, calls: usize) -> Vec<u16> {
        let mut statuses = Vec::new();
        for _ in 0..calls {
            statuses.push(self.get(path, user).await.status);
        }
        statuses
    }
}

fn so_many(ok: usize, over: usize) -> Vec<u16> {
    [vec![200; ok], vec![429; over]].concat()
}

#[tokio::test]
async fn callers_get_what_they_may_and_are_told() {
    let Some(edge) = edge(false, "9s", "memory").await else { return };
    for left in (0..10).rev() {
        let reply = edge.get("/user", Some("alice")).await;
        assert_eq!((reply.status, reply.body.contains("from upstream")), (200, true));
        assert_eq!(reply.header("x-ratelimit-limit"), "10, 10;w=86400;name=\"per_user\"");
        assert_eq!(reply.header("x-ratelimit-remaining"), left.to_string());
        let reset: u64 = reply.header("x-ratelimit-reset").parse().unwrap();
        assert!((1..=86_400).contains(&reset));
    }
    for _ in 0..3 {
        let reply = edge.get("/user", Some("alice")).await;
        assert_eq!((reply.status, reply.header("x-ratelimit-remaining")), (429, "0"));
        assert_eq!(reply.header("x-envoy-ratelimited"), "true");
        let wait: u64 = reply.header("retry-after").parse().unwrap();
        assert!((1..=86_400).contains(&wait));
        assert_eq!(reply.header("content-type"), "application/json");
        let body = format!("Too many requests. Try again in {wait} second");
        assert!(reply.body.contains(&body) && reply.body.contains("RATE_LIMITED"), "{}", reply.body);
    }
    let denied_by = edge.envoy.says("who denied", |line| line.contains("/user 429")).await;
    assert!(
        denied_by.contains(r#""rule":"user""#) && denied_by.contains(r#""domain":"edge""#),
        "{denied_by}"
    );
    assert_eq!(edge.statuses("/user", Some("bob"), 11).await, so_many(10, 1));
    // Without a descriptor nobody is asked.
    let reply = edge.get("/user", None).await;
    assert_eq!((reply.status, reply.header("x-ratelimit-limit")), (200, ""));

    // Two descriptors: the lower one ends first, and what it denies takes nothing from the other.
    let first = edge.get("/two", None).await;
    assert_eq!(first.header("x-ratelimit-limit"), "5, 8;w=86400, 5;w=432000;name=\"per_ip\"");
    assert_eq!(edge.statuses("/two", None, 9).await, so_many(4, 5));
    // A limit that the route brings along.
    let first = edge.get("/override", None).await;
    assert_eq!(first.header("x-ratelimit-limit"), "7, 7;w=86400");
    assert_eq!(edge.statuses("/override", None, 8).await, so_many(6, 2));
}

#[tokio::test]
async fn tokens_are_checked_before_and_charged_after() {
    let Some(edge) = edge(false, "9s", "memory").await else { return };
    // Envoy charges after it has answered, so the bucket is looked at until it has.
    let left = async |expected: u32| {
        let mut client = edge.client().await;
        eventually(&format!("{expected} tokens are left"), async || {
            let descriptors = vec![hits(0, descriptor("llm=tokens"))];
            let request = RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 0 };
            let response = answer(client.should_rate_limit(request)).await.unwrap().into_inner();
            (response.statuses[0].limit_remaining == expected).then_some(response.overall_code())
        })
        .await
    };
    // Each call costs 42 of 100: the third is let in by what is left, and owes the rest.
    for (then, code) in [(58, Code::Ok), (16, Code::Ok), (0, Code::OverLimit)] {
        assert_eq!(edge.get("/tokens", None).await.status, 200);
        assert_eq!(left(then).await, code);
    }
    assert_eq!(edge.get("/tokens", None).await.status, 429);
    // 26 are owed, and 5 come back each time.
    for (call, then) in [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 4), (7, 9)] {
        assert_eq!(edge.get("/refund", None).await.status, 200, "{call}");
        left(then).await;
    }
    assert_eq!(edge.get("/tokens", None).await.status, 200);
    left(0).await;
}

#[tokio::test]
async fn without_an_answer_envoy_does_what_it_was_told() {
    for (deny, status) in [(false, 200), (true, 500)] {
        let Some(mut edge) = edge(deny, "1s", "memory").await else { return };
        assert_eq!(edge.statuses("/user", Some("a"), 11).await, so_many(10, 1));
        // No answer in time, once the signal has arrived.
        edge.tollgate.signal(Signal::STOP);
        eventually("Envoy decides alone", async || {
            (edge.get("/user", Some("a")).await.status == status).then_some(())
        })
        .await;
        edge.tollgate.signal(Signal::CONT);
        eventually("Envoy is answered again", async || {
            (edge.get("/user", Some("a")).await.status == 429).then_some(())
        })
        .await;
        // Nobody there.
        edge.tollgate.kill();
        assert_eq!(edge.get("/user", Some("a")).await.status, status);
    }
}

/// Calls of one user, again and again, until it is dropped or told to stop: how many of them passed.
struct Traffic {
    stop: Arc<AtomicBool>,
    passed: Arc<AtomicUsize>,
    denied: Arc<AtomicUsize>,
    callers: Vec<JoinHandle<()>>,
}

impl Traffic {
    fn start(at: SocketAddr) -> Self {
        let (stop, passed, denied) = (Arc::default(), Arc::default(), Arc::default());
        let mut traffic = Self { stop, passed, denied, callers: Vec::new() };
        for _ in 0..2 {
            let (stop, passed, denied) =
                (traffic.stop.clone(), traffic.passed.clone(), traffic.denied.clone());
            traffic.callers.push(tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let reply = get(at, "/user", Some("many")).await.expect("every call is answered");
                    match reply.status {
                        200 => passed.fetch_add(1, Ordering::Relaxed),
                        429 => denied.fetch_add(1, Ordering::Relaxed),
                        other => panic!("{other}: {}", reply.body),
                    };
                }
            }));
        }
        traffic
    }

    /// Waits until so many more were denied.
    async fn denied(&self, more: usize) {
        let before = self.denied.load(Ordering::Relaxed);
        eventually("some are denied", async || {
            (self.denied.load(Ordering::Relaxed) >= before + more).then_some(())
        })
        .await;
    }

    async fn end(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        for caller in self.callers {
            caller.await.unwrap();
        }
        self.passed.load(Ordering::Relaxed)
    }
}

#[tokio::test]
async fn rules_change_under_traffic_and_the_numbers_are_right() {
    let Some(edge) = edge(true, "9s", "memory").await else { return };
    let traffic = Traffic::start(edge.at);
    traffic.denied(20).await;
    assert_eq!(traffic.passed.load(Ordering::Relaxed), 10);
    let file = edge.folder.path().join("rules/edge.yaml");
    for limit in [15, 40] {
        std::fs::write(&file, RULES.replace("requests_per_unit: 10", &format!("requests_per_unit: {limit}")))
            .unwrap();
        eventually("as many more pass", async || {
            (traffic.passed.load(Ordering::Relaxed) == limit).then_some(())
        })
        .await;
    }
    std::fs::write(&file, "domain: [").unwrap();
    edge.tollgate.says("what is wrong", |line| line.contains("edge.yaml:1:")).await;
    traffic.denied(20).await;
    assert_eq!(traffic.end().await, 40);
}

#[tokio::test]
async fn a_restart_under_traffic_forgets_nothing_that_redis_keeps() {
    let redis = Redis::start(Engine::Valkey).await;
    let Some(mut edge) = edge(true, "9s", &redis.url()).await else { return };
    let traffic = Traffic::start(edge.at);
    traffic.denied(20).await;
    assert_eq!(traffic.end().await, 10);

    // Those who call while nobody is there are denied by Envoy, with a 500.
    let at = edge.at;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let calls = tokio::spawn(async move {
        let mut statuses = BTreeMap::new();
        while !stopped.load(Ordering::Relaxed) {
            let reply = get(at, "/user", Some("many")).await.expect("every call is answered");
            *statuses.entry(reply.status).or_insert(0) += 1;
        }
        statuses
    });
    edge.tollgate.signal(Signal::TERM);
    assert!(edge.tollgate.exit().await.success());
    edge.tollgate = tollgate(edge.folder.path(), edge.port, &redis.url()).await;
    eventually("Envoy is answered again", async || {
        (edge.get("/user", Some("many")).await.status == 429).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    let statuses = calls.await.unwrap();
    assert!(statuses.keys().all(|status| [429, 500].contains(status)), "{statuses:?}");
    assert_eq!(edge.statuses("/user", Some("new"), 11).await, so_many(10, 1));
}
