//! The example gateway, as its reader runs it: server, gateway and upstream by one command.

use crate::support::calls::answer;
use crate::support::{Process, Tollgate, eventually};
use rustix::process::Signal;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::process::Command;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

struct Gateway {
    address: SocketAddr,
    process: Process,
}

/// What came back.
#[derive(Debug)]
struct Reply {
    status: u16,
    fields: HashMap<String, String>,
    body: String,
}

impl Gateway {
    /// Before that Tollgate: an address, or a program that it starts.
    async fn start(tollgate: &OsStr, arguments: &[&str]) -> Self {
        let example = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("examples/gateway");
        assert!(example.is_file(), "{} is not built: run tests/run", example.display());
        let mut command = Command::new(example);
        command.args(["--listen", "127.0.0.1:0", "--tollgate"]).arg(tollgate).args(arguments);
        let process = Process::spawn(&mut command);
        let line = process.says("where it listens", |line| line.starts_with("gateway ")).await;
        let (_, address) = line.rsplit_once("http://").unwrap();
        Self { address: address.parse().unwrap(), process }
    }

    /// One call on a connection of its own, as curl makes it.
    async fn get(&self, path: &str, user: Option<&str>) -> Reply {
        let mut connection = TcpStream::connect(self.address).await.unwrap();
        let user = user.map_or_else(String::new, |user| format!("authorization: Bearer {user}\r\n"));
        let request = format!("GET {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n{user}\r\n");
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut reply = String::new();
        answer(connection.read_to_string(&mut reply)).await.unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let fields = lines.map(|line| line.split_once(": ").unwrap());
        let fields = fields.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
        Reply { status, fields, body: body.to_owned() }
    }
}

#[tokio::test]
async fn the_gateway_says_what_is_left_and_denies_what_is_too_much() {
    // It starts its own, and ends it when it is told to end.
    let mut gateway = Gateway::start(Tollgate::command().get_program(), &[]).await;
    let hello = gateway.get("/hello", Some("alice")).await;
    assert_eq!((hello.status, &*hello.body), (200, "hello from the upstream: /hello\n"));
    assert_eq!((&*hello.fields["x-ratelimit-limit"], &*hello.fields["x-ratelimit-remaining"]), ("10", "9"));
    assert!(hello.fields["x-ratelimit-reset"].parse::<u64>().unwrap() > 1_700_000_000, "{hello:?}");
    assert_eq!(hello.fields["ratelimit-policy"], "\"read\";q=10;w=2");

    // Before authentication it is the coarse limit that speaks.
    let nobody = gateway.get("/hello", None).await;
    assert_eq!((nobody.status, &*nobody.fields["x-ratelimit-limit"]), (401, "40"));

    // A search costs ten of twenty.
    let search = gateway.get("/search?q=x", Some("bob")).await;
    assert_eq!((search.status, &*search.fields["x-ratelimit-remaining"]), (200, "10"));
    let denied = eventually("a third search is one too many", async || {
        let reply = gateway.get("/search", Some("bob")).await;
        (reply.status == 429).then_some(reply)
    })
    .await;
    assert!((1..=2).contains(&denied.fields["retry-after"].parse().unwrap()), "{denied:?}");
    assert_eq!(denied.fields["content-type"], "application/json");
    assert!(
        denied.body.starts_with(r#"{"error":{"code":"RATE_LIMITED","message":"Too many requests."#),
        "{denied:?}"
    );
    assert!(denied.fields.contains_key("x-ratelimit-reset"));

    let health = gateway.get("/healthz", None).await;
    assert_eq!((health.status, &*health.body), (200, "ok\n"));
    assert!(!health.fields.contains_key("x-ratelimit-limit"));

    gateway.process.signal(Signal::TERM);
    assert!(gateway.process.exit().await.success());
}

#[tokio::test]
async fn a_flooded_gateway_sheds_and_stays_healthy() {
    let tollgate = Tollgate::start(include_str!("../client/examples/gateway/rules.yaml")).await;
    let address = format!("http://{}", tollgate.grpc());
    let gateway = Gateway::start(address.as_ref(), &["--max-in-flight", "2"]).await;
    let calls = (0..8).map(|_| gateway.get("/slow", Some("carol")));
    let replies = futures_util::future::join_all(calls).await;
    let (shed, served): (Vec<_>, Vec<_>) = replies.into_iter().partition(|reply| reply.status == 503);
    assert!(!shed.is_empty() && served.len() >= 2, "{} shed, {} served", shed.len(), served.len());
    for reply in &shed {
        assert_eq!(reply.fields["retry-after"], "5");
        assert!(
            reply.body.contains("OVERLOADED") && !reply.fields.contains_key("x-ratelimit-limit"),
            "{reply:?}"
        );
    }
    assert_eq!(gateway.get("/healthz", None).await.status, 200);
    assert_eq!(gateway.get("/hello", Some("dave")).await.status, 200, "there is room again");
}
