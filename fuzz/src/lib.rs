//! What is done with any bytes there are. Nothing may panic, and:
//!
//! - [`rules`]: a file is loaded, or it is said in which line it is wrong;
//! - [`matcher`]: a descriptor meets the rule that a naive matcher finds;
//! - [`requests`]: each call over gRPC is answered, and the next one too;
//! - [`leases`]: no sequence of Borrows, Returns and calls gives out more than the bucket had.

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::client::SendRequest;
use http::Request;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tollgate_server::algorithm::Algorithm;
use tollgate_server::app;
use tollgate_server::clock::Clock;
use tollgate_server::config::Config;
use tollgate_server::engine::Engine;
use tollgate_server::limit::{Cost, Limit, Rate, Timestamp};
use tollgate_server::request::{self, Borrow, Return};
use tollgate_server::rules::files::Files;
use tollgate_server::rules::matcher::Node;
use tollgate_server::rules::{Limited, Rule, Rules};
use tollgate_server::store::memory::Memory;

/// Bytes, a few at a time.
struct Reader<'d>(&'d [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Of an alphabet in which texts meet each other.
    fn text(&mut self) -> String {
        (0..self.byte() % 4).map(|_| ["a", "b", "é", "*"][usize::from(self.byte() % 4)]).collect()
    }
}

/// As a configuration, and as the rules of a domain.
pub fn rules(data: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("rules.yaml");
    std::fs::write(&file, data).expect("a file");
    if let Err(error) = Config::check(&file) {
        says_where(&error.to_string(), &file);
    }
    let files = Files::read(std::slice::from_ref(&file), &Files::default(), Timestamp::from_micros(1));
    files.wrong().for_each(|wrong| says_where(wrong, &file));
    assert!(files.domains().count() + files.wrong().count() > 0, "it is right or wrong");
    for domain in files.domains() {
        // Whatever they are called, the rules can be asked for.
        let met = domain.tree.find([("user", "alice"), ("", "")]);
        assert!(met.is_none() || !domain.tree.rules().is_empty());
    }
}

fn says_where(error: &str, file: &Path) {
    let place = format!("{}:", file.display());
    for line in error.lines().filter(|line| line.contains("rules.yaml")) {
        let told = line.split_once(&place).map(|(_, rest)| rest.trim_start_matches(' '));
        assert!(told.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())), "{error}");
    }
    assert!(!error.is_empty());
}

/// A tree of rules as naive as can be.
#[derive(Debug)]
struct Naive {
    rule: Option<u8>,
    children: Vec<(String, Option<String>, Naive)>,
}

impl Naive {
    fn read(from: &mut Reader<'_>, depth: u8) -> Self {
        let rule = Some(from.byte()).filter(|rule| rule % 2 == 0);
        let count = if depth == 0 { 0 } else { from.byte() % 6 };
        let mut children: Vec<(String, Option<String>, Self)> = Vec::new();
        for _ in 0..count {
            let (key, value) = (from.text(), (!from.byte().is_multiple_of(4)).then(|| from.text()));
            let child = Self::read(from, depth - 1);
            if !children.iter().any(|(other, its, _)| (other, its) == (&key, &value)) {
                children.push((key, value, child));
            }
        }
        Self { rule, children }
    }

    fn node(&self) -> Node<u8> {
        let mut node = Node::default();
        node.rule = self.rule;
        for (key, value, child) in &self.children {
            assert!(node.insert(key, value.as_deref(), child.node()).is_ok(), "{key:?} {value:?} twice");
            assert!(node.insert(key, value.as_deref(), child.node()).is_err(), "{key:?} {value:?}");
        }
        node
    }

    fn find(&self, entries: &[(String, String)]) -> Option<u8> {
        let Some(((key, value), rest)) = entries.split_first() else { return self.rule };
        let of_key = || self.children.iter().filter(|(its, ..)| its == key);
        let wild = |pattern: &Option<String>| pattern.as_ref().is_some_and(|it| it.contains('*'));
        let exact = of_key().find(|(_, its, _)| !wild(its) && its.as_ref() == Some(value));
        let (_, _, child) = exact
            .or_else(|| {
                of_key().find(|(_, its, _)| wild(its) && its.as_ref().is_some_and(|its| fits(its, value)))
            })
            .or_else(|| of_key().find(|(_, its, _)| its.is_none()))?;
        child.find(rest)
    }
}

fn fits(pattern: &str, value: &str) -> bool {
    let Some(first) = pattern.chars().next() else { return value.is_empty() };
    let rest = &pattern[first.len_utf8()..];
    if first == '*' {
        let ends = value.char_indices().map(|(at, _)| at).chain([value.len()]);
        return ends.into_iter().any(|at| fits(rest, &value[at..]));
    }
    value.strip_prefix(first).is_some_and(|value| fits(rest, value))
}

/// A tree, and then descriptors.
pub fn matcher(data: &[u8]) {
    let mut from = Reader(data);
    let naive = Naive::read(&mut from, 3);
    let node = naive.node();
    for _ in 0..8 {
        let entries: Vec<_> = (0..from.byte() % 4).map(|_| (from.text(), from.text())).collect();
        let found = node.find(entries.iter().map(|(key, value)| (key.as_str(), value.as_str())));
        assert_eq!(found.copied(), naive.find(&entries), "{entries:?} in {naive:?}");
    }
}

const SERVED: &str = "
classes:
  default: { rate: 100/s }
  login: { rate: 5/m, burst: 5, sensitive: true, penalty: { strikes: 2, window: 1m, base: 1s, cap: 10s } }
  log: { rate: 10/s, algorithm: sliding_log }
  window: { rate: 10/s, algorithm: sliding_window }
  fixed: { rate: 10/s, algorithm: fixed_window }
  queue: { rate: 10/s, algorithm: leaky_bucket }
  free: { cost: 0 }
domains: [ edge.yaml ]
";

const EDGE: &str = "
domain: edge
descriptors:
- { key: user, rate_limit: { unit: minute, requests_per_unit: 10 } }
- { key: path, value: '/a/*', rate_limit: { unit: second, requests_per_unit: 3 } }
- key: tenant
  descriptors: [ { key: user, rate_limit: { unit: hour, requests_per_unit: 100 } } ]
";

/// What can be called.
const METHODS: [&str; 5] = [
    "/tollgate.v1.RateLimiter/ShouldRateLimit",
    "/tollgate.v1.RateLimiter/Borrow",
    "/tollgate.v1.RateLimiter/Return",
    "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
    "/grpc.health.v1.Health/Check",
];

struct Served {
    runtime: Runtime,
    client: SendRequest<Bytes>,
}

static SERVED_AT: LazyLock<Mutex<Served>> = LazyLock::new(|| {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let client = runtime.block_on(async {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("rules.yaml");
        std::fs::write(&file, SERVED).expect("a file");
        std::fs::write(folder.path().join("edge.yaml"), EDGE).expect("a file");
        let app = app::build(Config::check(&file).expect("right rules"), Clock::system()).expect("a server");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        // Its folder is watched as long as it serves.
        tokio::spawn(async move {
            app.serve(listener, std::future::pending()).await.expect("it serves");
            drop(folder);
        });
        let stream = TcpStream::connect(address).await.expect("a connection");
        let (client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
        tokio::spawn(connection);
        client
    });
    Mutex::new(Served { runtime, client })
});

/// The first byte says what is called, and whether the rest is framed as a message should be.
pub fn requests(data: &[u8]) {
    let Some((&how, message)) = data.split_first() else { return };
    let method = METHODS[usize::from(how) % METHODS.len()];
    let mut body = BytesMut::new();
    if how < 128 {
        body.put_u8(0);
        body.put_u32(message.len().try_into().expect("a short one"));
    }
    body.put_slice(message);
    // Whoever panicked has left it as it was.
    let mut served = SERVED_AT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Served { runtime, client } = &mut *served;
    let code = runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(10), call(client, method, body.freeze())).await
    });
    let code = code.expect("an answer in time").unwrap_or_else(|error| panic!("{method}: {error}"));
    assert!(code.parse::<u8>().is_ok_and(|code| code <= 16), "{method}: grpc-status {code}");
}

async fn call(client: &mut SendRequest<Bytes>, method: &str, body: Bytes) -> Result<String, h2::Error> {
    *client = client.clone().ready().await?;
    let request = Request::post(format!("http://localhost{method}"))
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .body(())
        .expect("a request");
    let (response, mut stream) = client.send_request(request, false)?;
    stream.send_data(body, true)?;
    let (head, mut incoming) = response.await?.into_parts();
    while let Some(data) = incoming.data().await {
        let data = data?;
        incoming.flow_control().release_capacity(data.len())?;
    }
    let trailers = incoming.trailers().await?.unwrap_or_default();
    let status = head.headers.get("grpc-status").or_else(|| trailers.get("grpc-status"));
    Ok(status.and_then(|status| status.to_str().ok()).unwrap_or("none").to_owned())
}

const RATE: u64 = 100;
const BURST: u64 = 50;

/// Each step is four bytes or so: what is done, and how much of it.
pub fn leases(data: &[u8]) {
    let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let mut from = Reader(data);
        let start = 1_700_000_000_000_000;
        let clock = Clock::manual(Timestamp::from_micros(start));
        let name = ["token_bucket", "gcra"][usize::from(from.byte() % 2)];
        let limited = Limited {
            limit: Limit::new(Rate::new(RATE, Duration::from_secs(1)).expect("a rate"), BURST)
                .expect("a limit"),
            algorithm: Algorithm::named(name).expect("an algorithm"),
            cost: Cost::new(1),
            sensitive: false,
            penalty: None,
            shadow: false,
            wait: true,
        };
        let rules = Rules::new([Rule { class: "c".into(), limited: Some(limited) }]);
        let store = Memory::new(1 << 10, 1 << 20, clock.clone());
        let engine = Engine::new(rules.live(), Arc::new(store), 512, clock.clone());
        // What was lent and may come back, by the name of the lease.
        let mut lent: HashMap<String, u64> = HashMap::new();
        let mut names = Vec::new();
        let (mut at, mut latest, mut given) = (start, start, 0_u64);
        while !from.0.is_empty() {
            match from.byte() % 5 {
                0 => {
                    let borrow = Borrow {
                        key: "k".into(),
                        class: "c".into(),
                        n: u32::from(from.byte()) + 1,
                        gateway: ["", "a", "b"][usize::from(from.byte() % 3)].into(),
                        seq: u64::from(from.byte() % 4),
                        demand: u32::from(from.byte()).try_into().ok(),
                        denied: 0,
                        returns: Vec::new(),
                        deadline: None,
                    };
                    let lease = engine.borrow(borrow).await.expect("it can be");
                    if let Some(id) = lease.id {
                        let granted = lease.granted.get();
                        let before = lent.insert(id.as_str().to_owned(), granted);
                        // The same wish again is the same lease, unless that has ended or come back.
                        if before.is_none() {
                            names.push(id.as_str().to_owned());
                            given += granted;
                            latest = latest.max(at);
                        } else if before != Some(granted) {
                            given += granted;
                            latest = latest.max(at);
                        }
                    }
                }
                1 if !names.is_empty() => {
                    let id = names[usize::from(from.byte()) % names.len()].clone();
                    let unused = u32::from(from.byte());
                    let back = Return { lease_id: id.clone(), unused };
                    let credited = engine.settle(&back, None).await.expect("it can be").get();
                    let most = lent.insert(id, 0).unwrap_or(0).min(unused.into());
                    assert!(credited <= most, "{credited} of {most} came back");
                    given -= credited;
                }
                2 => {
                    let request = request::Request {
                        key: "k".into(),
                        class: "c".into(),
                        cost: Some(Cost::new(u64::from(from.byte()) % BURST)),
                        deadline: None,
                    };
                    let cost = request.cost.map_or(0, Cost::get);
                    if engine.should_rate_limit(request).await.expect("it can be").denied.is_none() {
                        given += cost;
                        latest = latest.max(at);
                    }
                }
                _ => {
                    let millis = u64::from(from.byte()) * u64::from(from.byte() % 16);
                    at += millis * 1_000;
                    clock.set(Timestamp::from_micros(at));
                }
            }
            let most = BURST + RATE * (latest - start) / 1_000_000;
            assert!(given <= most, "{given} given of {most}");
        }
    });
}
