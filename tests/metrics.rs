//! What operators see at `/metrics`.

use crate::support::calls::{Caller, allowed};
use crate::support::http::exchange;
use crate::support::{Redis, Tollgate, engines, eventually};
use tollgate_proto::envoy::extensions::common::ratelimit::v3::{
    RateLimitDescriptor, rate_limit_descriptor::Entry,
};
use tollgate_proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate_proto::v1::{BorrowRequest, ReturnRequest};

const SOURCE: &str = include_str!("../server/src/telemetry/metric.rs");
const DOCS: &str = include_str!("../docs/operations.md");

const CLASSES: &str = "classes:
  read: { rate: 1/h, burst: 2 }
  watched: { rate: 1/h, burst: 1, shadow: true }
  strict: { rate: 1/h, burst: 1, penalty: { strikes: 0, window: 1h, base: 60s, cap: 1h } }
  login: { rate: 1/h, burst: 10, sensitive: true }
  lent: { rate: 100/s, burst: 100 }
  health: { cost: 0 }
";

/// It becomes that, or was it already.
async fn becomes(server: &Tollgate, series: &str, is: u64) {
    let what = format!("{series} is {is}");
    eventually(&what, async || (server.metric(series).await == is).then_some(())).await;
}

async fn envoy_asks(server: &Tollgate, user: &str) {
    let mut envoy = RateLimitServiceClient::connect(format!("http://{}", server.grpc())).await.unwrap();
    let entry = Entry { key: "user".into(), value: user.into() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    let request = RateLimitRequest { domain: "edge".into(), descriptors: vec![descriptor], hits_addend: 1 };
    envoy.should_rate_limit(request).await.unwrap();
}

async fn times(caller: &Caller, class: &str, times: u32) {
    for _ in 0..times {
        caller.ask("a-secret", class, None).await;
    }
}

#[tokio::test]
async fn decisions_are_counted_by_rule_and_verdict() {
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("edge.yaml");
    let rule = "{ key: user, rate_limit: { unit: hour, requests_per_unit: 1 } }";
    std::fs::write(&rules, format!("domain: edge\ndescriptors: [ {rule} ]\n")).unwrap();
    let server = Tollgate::start(&format!("{CLASSES}domains: [ \"{}\" ]\n", rules.display())).await;
    let caller = server.serving().await;
    for (class, calls) in [("read", 5), ("watched", 3), ("strict", 4), ("health", 2)] {
        times(&caller, class, calls).await;
    }
    envoy_asks(&server, "a-secret").await;
    envoy_asks(&server, "a-secret").await;
    caller.stub().borrow(BorrowRequest::default()).await.unwrap_err();
    let wish =
        BorrowRequest { key: "b-secret".into(), class: "lent".into(), n: 10, ..BorrowRequest::default() };
    let lease = caller.stub().borrow(wish).await.unwrap().into_inner();
    caller.stub().r#return(ReturnRequest { lease_id: lease.lease_id, unused: 4 }).await.unwrap();
    for (series, count) in [
        (r#"tollgate_decisions_total{class="read",verdict="allow"}"#, 2),
        (r#"tollgate_decisions_total{class="read",verdict="over_limit"}"#, 3),
        (r#"tollgate_decisions_total{class="watched",verdict="shadow_deny"}"#, 2),
        (r#"tollgate_decisions_total{class="strict",verdict="over_limit"}"#, 1),
        (r#"tollgate_decisions_total{class="strict",verdict="blocked"}"#, 2),
        (r#"tollgate_decisions_total{class="health",verdict="allow"}"#, 2),
        (r#"tollgate_descriptors_total{domain="edge",rule="user",verdict="allow"}"#, 1),
        (r#"tollgate_descriptors_total{domain="edge",rule="user",verdict="over_limit"}"#, 1),
        (r#"tollgate_refused_total{why="invalid"}"#, 1),
        ("tollgate_lent_tokens_total", 10),
        ("tollgate_returned_tokens_total", 4),
        ("tollgate_degraded", 0),
        ("tollgate_instances", 1),
        ("tollgate_rules_wrong", 0),
    ] {
        assert_eq!(server.metric(series).await, count, "{series}");
    }
    let request = "GET /metrics HTTP/1.1\r\nhost: edge\r\nconnection: close\r\n\r\n";
    let reply = exchange(server.http().await, request).await.unwrap();
    assert_eq!(
        (reply.status, reply.header("content-type")),
        (200, "text/plain; version=0.0.4; charset=utf-8")
    );
    assert!(!reply.body.contains("secret"), "{}", reply.body);

    // New rules count on.
    std::fs::write(&rules, "domain: edge\ndescriptors: 7\n").unwrap();
    becomes(&server, "tollgate_rules_wrong", 1).await;
    std::fs::write(&rules, format!("domain: edge\ndescriptors: [ {rule} ]\n# mended\n")).unwrap();
    becomes(&server, "tollgate_rules_wrong", 0).await;
    envoy_asks(&server, "another").await;
    becomes(&server, r#"tollgate_descriptors_total{domain="edge",rule="user",verdict="allow"}"#, 2).await;
}

#[tokio::test]
async fn faults_of_the_store_are_seen() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let server =
            Tollgate::start(&format!("store: {{ url: \"{}\", deadline: 5s }}\n{CLASSES}", redis.url())).await;
        let caller = server.serving().await;
        assert!(allowed(&caller.ask("k", "login", None).await));
        becomes(&server, "tollgate_degraded", 0).await;
        assert!(server.metric("tollgate_store_seconds_count").await >= 1);

        redis.kill();
        becomes(&server, "tollgate_degraded", 1).await;
        times(&caller, "login", 3).await;
        assert!(server.metric("tollgate_degraded_calls_total").await >= 3);
        assert!(server.metric(r#"tollgate_decisions_total{class="login",verdict="unavailable"}"#).await >= 3);
        redis.restart().await;
        becomes(&server, "tollgate_degraded", 0).await;
    }
}

/// A metric that nobody can look up is none.
#[test]
fn every_metric_is_in_the_docs() {
    let names: Vec<&str> = SOURCE.split('"').filter(|text| text.starts_with("tollgate_")).collect();
    assert!(names.len() > 10);
    for name in names {
        assert!(DOCS.contains(&format!("`{name}`")), "docs/operations.md does not tell of {name}");
        let described = SOURCE.matches(&format!("\"{name}\"")).count();
        assert_eq!(described, 1, "{name}");
    }
}
