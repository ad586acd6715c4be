//! Keys that come and go, for a while: memory, threads and files of the server stay what they are, and so does the
//! number of keys in Redis. In memory there are as many as may be all the time.
//!
//! `TOLLGATE_SOAK=10m tests/run soak` runs it for ten minutes on each store; without that it is short. What is lost by
//! the byte takes long to be seen, a file or a task does not.

use crate::support::calls::{Caller, answer};
use crate::support::http::exchange;
use crate::support::{Engine, Redis, Tollgate, engines, say};
use deadpool_redis::redis::from_redis_value;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};
use tollgate_client::Client;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::{
    RateLimitDescriptor, rate_limit_descriptor::Entry,
};
use tollgate_proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate_proto::v1::{BorrowRequest, ReturnRequest, ShouldRateLimitRequest};

/// How often it is looked: as often in each third.
const LOOKS: usize = 30;

/// As long as it runs on each store.
fn span() -> Duration {
    let said = std::env::var("TOLLGATE_SOAK").unwrap_or_else(|_| "12s".into());
    humantime::parse_duration(&said).unwrap_or_else(|error| panic!("TOLLGATE_SOAK={said}: {error}"))
}

/// What a process has.
#[derive(Clone, Copy, Debug, Default)]
struct Has {
    kilobytes: u64,
    threads: u64,
    files: u64,
    /// Keys in Redis.
    keys: u64,
}

impl Has {
    async fn now(server: &mut Tollgate, redis: Option<&Redis>) -> Self {
        let folder = format!("/proc/{}", server.process().pid().as_raw_nonzero());
        let status = std::fs::read_to_string(format!("{folder}/status")).unwrap();
        let said = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        let keys = match redis {
            Some(redis) => from_redis_value(redis.command(&["DBSIZE"]).await).unwrap(),
            None => 0,
        };
        Self {
            kilobytes: said("VmRSS:"),
            threads: said("Threads:"),
            files: std::fs::read_dir(format!("{folder}/fd")).unwrap().count().try_into().unwrap(),
            keys,
        }
    }

    /// The most of each.
    fn most(all: &[Self]) -> Self {
        let most = |of: fn(&Self) -> u64| all.iter().map(of).max().unwrap();
        Self {
            kilobytes: most(|it| it.kilobytes),
            threads: most(|it| it.threads),
            files: most(|it| it.files),
            keys: most(|it| it.keys),
        }
    }

    /// How much more than before may be chance: what an allocator keeps wavers, a thread that reads files stays for a
    /// while, connections end a little later, and keys in Redis by the tenth of a second.
    fn with_allowance(self) -> Self {
        Self {
            kilobytes: self.kilobytes + self.kilobytes / 50 + 4096,
            threads: self.threads + 2,
            files: self.files + 4,
            keys: 2 * self.keys + 200,
        }
    }
}

/// Tells the most of each in each third; no more of any in the last than in the one before.
fn flat(what: &str, thirds: &[Has]) {
    let mut table =
        format!("{what}\n| at most | first third | second | last | may be |\n|---|---|---|---|---|\n");
    let mut row = |name: &str, of: fn(&Has) -> u64| {
        let [first, before, after] = thirds else { panic!("three thirds") };
        let most = of(&before.with_allowance());
        writeln!(table, "| {name} | {} | {} | {} | {most} |", of(first), of(before), of(after)).unwrap();
        of(after) <= most
    };
    let is_flat = [
        row("resident memory, kB", |it| it.kilobytes),
        row("threads", |it| it.threads),
        row("open files", |it| it.files),
        row("keys in Redis", |it| it.keys),
    ];
    say(&table);
    assert!(is_flat.iter().all(|is_flat| *is_flat), "it grows:\n{table}");
}

/// Everybody who calls, each as fast as it is answered, with keys that nobody had before.
struct Load {
    calls: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl Load {
    fn on(caller: &Caller, hasty: &Caller, url: &str, http: SocketAddr) -> Self {
        let mut load = Self { calls: Arc::default(), stop: Arc::default(), tasks: JoinSet::new() };
        for who in 0..4_u64 {
            let caller = caller.clone();
            load.run(move |n| {
                let caller = caller.clone();
                async move {
                    caller.ask(&format!("new {who} {n}"), "read", None).await;
                    caller.ask(&format!("denied {}", n % 64), "few", None).await;
                    // Strikes and blocks are kept as well.
                    caller.ask(&format!("bad {who} {}", n / 4), "login", 5).await;
                }
            });
        }
        // Who does not wait for the answer. Of many late ones its own library ends its connection, so it has one of its
        // own.
        let hasty = hasty.clone();
        load.run(move |n| {
            let mut stub = hasty.stub();
            async move {
                let ask =
                    ShouldRateLimitRequest { key: format!("gone {n}"), class: "slow".into(), cost: None };
                timeout(Duration::from_micros(n % 4 * 100), stub.should_rate_limit(ask)).await.ok();
            }
        });
        let borrower = caller.clone();
        load.run(move |n| {
            let caller = borrower.clone();
            async move {
                let wish = BorrowRequest {
                    key: format!("lent {}", n / 8),
                    class: "read".into(),
                    n: 10,
                    gateway: format!("gateway {n}"),
                    seq: n,
                    demand_per_s: 100,
                    ..BorrowRequest::default()
                };
                let lease = caller.borrow(wish).await;
                if n % 2 == 0 {
                    let back = ReturnRequest { lease_id: lease.lease_id, unused: 10 };
                    answer(caller.stub().r#return(back)).await.ok();
                }
            }
        });
        let envoy = RateLimitServiceClient::new(caller.channel());
        load.run(move |n| {
            let mut envoy = envoy.clone();
            async move {
                let entry = Entry { key: "user".into(), value: format!("user {n}") };
                let descriptor =
                    RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
                let request = RateLimitRequest {
                    domain: "edge".into(),
                    descriptors: vec![descriptor],
                    ..RateLimitRequest::default()
                };
                answer(envoy.should_rate_limit(request)).await.unwrap();
            }
        });
        // A connection for each call.
        load.run(move |n| async move {
            let entries = format!(r#"[{{"key":"user","value":"over http {n}"}}]"#);
            let body = format!(r#"{{"domain":"edge","descriptors":[{{"entries":{entries}}}]}}"#);
            let head = "POST /json HTTP/1.1\r\nhost: edge\r\nconnection: close\r\ncontent-length";
            let reply = exchange(http, &format!("{head}: {}\r\n\r\n{body}", body.len())).await;
            assert_eq!(reply.expect("an answer").status, 200);
        });
        // A gateway that lives for a hundred calls, then another.
        let url = url.to_owned();
        load.run(move |n| {
            let url = url.clone();
            async move {
                let client =
                    Client::builder(&url).deadline(Duration::from_secs(5)).max_keys(16).build().unwrap();
                for call in 0..100 {
                    answer(client.decide(&format!("of a gateway {n} {}", call / 5), "read", None))
                        .await
                        .unwrap();
                }
                answer(client.shutdown()).await;
            }
        });
        load
    }

    fn run<F: Future<Output = ()> + Send>(&mut self, call: impl Fn(u64) -> F + Send + 'static) {
        let (calls, stop) = (self.calls.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            for n in 0.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                call(n).await;
                calls.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    async fn stop(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
        self.calls.load(Ordering::Relaxed)
    }
}

/// The rules of a domain, another time each.
fn put_rules(file: &Path, turn: usize) {
    let rule = format!("{{ key: user, rate_limit: {{ unit: second, requests_per_unit: {} }} }}", 5 + turn);
    std::fs::write(file, format!("domain: edge\ndescriptors:\n- {rule}\n")).unwrap();
}

async fn soak(engine: Option<Engine>) {
    let redis = match engine {
        Some(engine) => Some(Redis::start(engine).await),
        None => None,
    };
    let store = redis.as_ref().map_or_else(|| "memory".into(), Redis::url);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("edge.yaml");
    put_rules(&file, 0);
    let config = format!(
        "store: {{ url: \"{store}\", max_keys: 5000, deadline: 5s }}\ndomains: [ \"{}\" ]\nclasses:\n  \
         read: {{ rate: 1000/s, burst: 1000 }}\n  few: {{ rate: 1/m, burst: 1 }}\n  slow: {{ rate: 1/s }}\n  \
         login: {{ rate: 5/s, burst: 5, penalty: {{ strikes: 1, window: 1s, base: 1s, cap: 1s }} }}\n",
        file.display()
    );
    let mut server = Tollgate::start(&config).await;
    let caller = server.serving().await;
    let hasty = server.caller().await;
    let load = Load::on(&caller, &hasty, &format!("http://{}", server.grpc()), server.http().await);

    let mut looks = Vec::new();
    let mut turns = interval(span() / u32::try_from(LOOKS).unwrap());
    turns.tick().await;
    for turn in 0..LOOKS {
        turns.tick().await;
        looks.push(Has::now(&mut server, redis.as_ref()).await);
        put_rules(&file, turn);
    }
    let calls = load.stop().await;
    assert!(server.process().is_running(), "{}", server.process().output());
    assert!(!server.process().output().contains("panicked"), "{}", server.process().output());
    let kind = engine.map_or_else(|| "memory".to_owned(), |engine| format!("{engine:?}"));
    let thirds: Vec<Has> = looks.chunks(LOOKS / 3).map(Has::most).collect();
    flat(&format!("{kind}, {:?}, {calls} rounds of calls", span()), &thirds);
}

#[tokio::test(flavor = "multi_thread")]
async fn in_memory() {
    soak(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_redis() {
    for engine in engines().into_iter().take(1) {
        soak(Some(engine)).await;
    }
}
