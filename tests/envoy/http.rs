//! What Envoy's rate limit service serves over HTTP.

use crate::support::Tollgate;
use crate::support::http::{Reply, exchange};
use serde_json::{Value, json};
use std::net::SocketAddr;

const RULES: &str = "
domain: edge
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 2, name: per_user, sensitive: true } }
  - { key: admin, rate_limit: { unlimited: true } }
";

async fn start(store: &str) -> (Tollgate, SocketAddr, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("edge.yaml"), RULES).unwrap();
    let domains = folder.path().display();
    let server = Tollgate::start(&format!("store: {{ url: \"{store}\" }}\ndomains: [ {domains} ]\n")).await;
    let http = server.http().await;
    (server, http, folder)
}

async fn send(at: SocketAddr, method: &str, path: &str, body: &str) -> Reply {
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: edge\r\nconnection: close\r\ncontent-length: {length}");
    exchange(at, &format!("{head}\r\n\r\n{body}")).await.expect("an answer")
}

fn user(name: &str) -> String {
    json!({ "domain": "edge", "descriptors": [{ "entries": [{ "key": "user", "value": name }] }] })
        .to_string()
}

#[tokio::test]
async fn decisions_are_json() {
    let (server, http, _folder) = start("memory").await;
    server.serving().await;
    for left in [1, 0] {
        let reply = send(http, "POST", "/json", &user("a")).await;
        assert_eq!((reply.status, reply.header("content-type")), (200, "application/json"), "{}", reply.body);
        let response: Value = serde_json::from_str(&reply.body).unwrap();
        assert_eq!(response["overallCode"], "OK");
        let limit = json!({ "requestsPerUnit": 2, "unit": "YEAR", "name": "per_user" });
        assert_eq!(response["statuses"][0]["currentLimit"], limit);
        assert_eq!(response["statuses"][0]["limitRemaining"].as_u64().unwrap_or(0), left);
        let reset = response["statuses"][0]["durationUntilReset"].as_str().unwrap();
        assert!(reset.strip_suffix('s').unwrap().parse::<u64>().is_ok(), "{reset}");
    }
    let reply = send(http, "POST", "/json", &user("a")).await;
    assert_eq!(reply.status, 429);
    assert!(reply.header("retry-after").parse::<u64>().unwrap() >= 1);
    let response: Value = serde_json::from_str(&reply.body).unwrap();
    assert_eq!(
        (&response["overallCode"], &response["dynamicMetadata"]["rule"]),
        (&json!("OVER_LIMIT"), &json!("user"))
    );

    // All that there is, in either spelling of names.
    let full = json!({ "domain": "edge", "hits_addend": 1, "descriptors": [{
        "entries": [{ "key": "k", "value": "v" }], "hitsAddend": "3", "isNegativeHits": false,
        "limit": { "requestsPerUnit": 5, "unit": "DAY", "unitMultiplier": 2 },
    }] });
    let reply = send(http, "POST", "/json", &full.to_string()).await;
    let response: Value = serde_json::from_str(&reply.body).unwrap();
    assert_eq!(response["statuses"][0]["limitRemaining"], 2, "{}", reply.body);
}

#[tokio::test]
async fn bad_bodies_are_400_and_the_rest_is_told() {
    let (server, http, folder) = start("memory").await;
    server.serving().await;
    for body in [
        "",
        "nonsense",
        "[]",
        "{}",
        r#"{"domain":"edge"}"#,
        r#"{"domain":"edge","descriptors":[{}]}"#,
        r#"{"domain":"edge","nope":1}"#,
        r#"{"domain":"edge","descriptors":[{"entries":[{"key":"k"}],"limit":{"requestsPerUnit":1}}]}"#,
        r#"{"domain":"edge","descriptors":[{"entries":[{"key":"k"}],"hitsAddend":"-1"}]}"#,
    ] {
        let reply = send(http, "POST", "/json", body).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.body);
        assert!(!reply.body.is_empty());
    }
    let nested = "[".repeat(100_000);
    assert_eq!(send(http, "POST", "/json", &nested).await.status, 400);
    assert_eq!(send(http, "GET", "/json", "").await.status, 405);
    assert_eq!(send(http, "GET", "/nowhere", "").await.status, 404);

    let reply = send(http, "GET", "/healthcheck", "").await;
    assert_eq!((reply.status, reply.body.as_str()), (200, "OK"));
    let reply = send(http, "GET", "/ready", "").await;
    assert_eq!((reply.status, reply.body.as_str()), (200, "ready"));
    let reply = send(http, "GET", "/rlconfig", "").await;
    let file = folder.path().join("edge.yaml");
    assert!(
        reply.body.contains(&format!("# {}: domain \"edge\", since 20", file.display())),
        "{}",
        reply.body
    );
    assert!(reply.body.contains("\nedge/user: 2 each year, fixed_window, sensitive\n"), "{}", reply.body);
    assert!(reply.body.contains("\nedge/admin: unlimited\n"));
}

#[tokio::test]
async fn without_an_authority_it_is_503() {
    let (server, http, _folder) = start("redis+unix:///nowhere/redis.sock").await;
    server.caller().await.until_it_serves().await;
    let reply = send(http, "POST", "/json", &user("a")).await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, "1"));
    assert_eq!(send(http, "GET", "/healthcheck", "").await.status, 200);
    let reply = send(http, "GET", "/ready", "").await;
    assert!(reply.status == 503 && !reply.body.is_empty(), "{}", reply.body);
    // What is not limited needs no authority.
    let admin =
        json!({ "domain": "edge", "descriptors": [{ "entries": [{ "key": "admin", "value": "x" }] }] });
    assert_eq!(send(http, "POST", "/json", &admin.to_string()).await.status, 200);
}
