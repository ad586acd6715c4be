//! What goes with an answer, and what is no question.

use super::{Served, descriptor, given_back, hits};
use crate::stores::{Kind, kinds};
use crate::support::Tollgate;
use crate::support::calls::answer;
use crate::support::raw;
use prost::Message as _;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_server::clock::Clock;
use tollgate_server::limit::Timestamp;
use tonic::Code as Grpc;

const EDGE: &str = "
domain: edge
response_headers: {}
over_limit_body: structured
descriptors:
  - { key: user, rate_limit: { unit: minute, requests_per_unit: 10 } }
  - { key: bob, rate_limit: { unit: minute, requests_per_unit: 3 } }
  - { key: bucket, rate_limit: { unit: second, requests_per_unit: 10, algorithm: token_bucket, burst: 30 } }
  - { key: spent, rate_limit: { unit: minute, requests_per_unit: 10, charge_denied: true } }
  - { key: login, rate_limit: { unit: minute, requests_per_unit: 1, penalty: { strikes: 0, base: 30s } } }
  - { key: path, value: '*', rate_limit: { unit: minute, requests_per_unit: 5 } }
";

const OTHER: &str = "
domain: other
over_limit_body: compact
response_headers: { limit: x-limit, remaining: x-left, reset: x-reset }
descriptors:
  - { key: user, rate_limit: { unit: minute, requests_per_unit: 10 } }
";

/// At 2222 seconds, which is 2 past a minute.
async fn served(kind: Kind) -> (Served, Clock) {
    let clock = Clock::manual(Timestamp::from_micros(2_222_000_000));
    (Served::start(kind, &clock, &[("edge.yaml", EDGE), ("other.yml", OTHER)]).await, clock)
}

fn headers(response: &RateLimitResponse) -> String {
    let header = |header: &_| {
        let tollgate_proto::envoy::config::core::v3::HeaderValue { key, value, .. } = header;
        format!("{key}: {value}")
    };
    response.response_headers_to_add.iter().map(header).collect::<Vec<_>>().join(", ")
}

fn metadata(response: &RateLimitResponse) -> Vec<(String, String)> {
    let fields = response.dynamic_metadata.iter().flat_map(|metadata| &metadata.fields);
    let text = |value: &prost_types::Value| match &value.kind {
        Some(prost_types::value::Kind::StringValue(text)) => text.clone(),
        other => panic!("{other:?}"),
    };
    fields.map(|(key, value)| (key.clone(), text(value))).collect()
}

#[tokio::test]
async fn headers_body_and_metadata_say_where_a_caller_stands() {
    for kind in kinds() {
        let (served, _) = served(kind).await;
        let both = || vec![descriptor("user=a"), descriptor("bob=a")];
        let response = served.ask("edge", both(), 0).await;
        assert_eq!(headers(&response), "RateLimit-Limit: 3, RateLimit-Remaining: 2, RateLimit-Reset: 58");
        assert!(response.raw_body.is_empty() && response.dynamic_metadata.is_none());

        let response = served.ask("edge", both(), 3).await;
        assert_eq!(response.overall_code(), Code::OverLimit);
        // V45
        let json = "content-type: application/json";
        let expected = "RateLimit-Limit: 3, RateLimit-Remaining: 0, RateLimit-Reset: 58";
        assert_eq!(headers(&response), format!("{expected}, {json}"));
        let body =
            r#"{"error":{"code":"RATE_LIMITED","message":"Too many requests. Try again in 58 seconds."}}"#;
        assert_eq!(String::from_utf8(response.raw_body.clone()).unwrap(), body);
        let said = [("domain", "edge"), ("rule", "bob")].map(|(key, text)| (key.into(), text.into()));
        assert_eq!(metadata(&response), said);

        // The bucket of the same descriptor in another domain is another.
        let response = served.ask("other", vec![descriptor("user=a")], 10).await;
        assert_eq!((response.overall_code(), response.statuses[0].limit_remaining), (Code::Ok, 0));
        let response = served.ask("other", vec![descriptor("user=a")], 11).await;
        let expected = "x-limit: 10, x-left: 0, x-reset: 58, content-type: application/json";
        assert_eq!(headers(&response), expected);
        assert_eq!(response.raw_body, br#"{"error":"rate_limited","retry_after":58}"#);

        // No rule, no headers.
        let response = served.ask("edge", vec![descriptor("nobody=knows")], 0).await;
        assert_eq!((headers(&response), response.overall_code()), (String::new(), Code::Ok));
    }
}

#[tokio::test]
async fn any_algorithm_and_penalty_serves_a_descriptor() {
    for kind in kinds() {
        let (served, clock) = served(kind).await;
        let response = served.ask("edge", vec![descriptor("bucket=a")], 25).await;
        assert_eq!(response.statuses[0].limit_remaining, 5);
        let response = served.ask("edge", vec![descriptor("bucket=a")], 25).await;
        // 20 tokens more, at 10 a second.
        let reset = response.statuses[0].duration_until_reset.as_ref().unwrap().seconds;
        assert_eq!((response.overall_code(), reset), (Code::OverLimit, 2));
        clock.set(Timestamp::from_micros(2_224_000_000));
        let response = served.ask("edge", vec![descriptor("bucket=a")], 25).await;
        assert_eq!((response.overall_code(), response.statuses[0].limit_remaining), (Code::Ok, 0));

        // The first denial blocks for twice the base, and only whom it is about.
        served.ask("edge", vec![descriptor("login=eve")], 0).await;
        let response = served.ask("edge", vec![descriptor("login=eve")], 0).await;
        let reset = response.statuses[0].duration_until_reset.as_ref().unwrap().seconds;
        assert_eq!((response.overall_code(), reset), (Code::OverLimit, 60));
        clock.set(Timestamp::from_micros(2_283_999_999));
        let response = served.ask("edge", vec![descriptor("login=eve")], 0).await;
        assert_eq!(response.overall_code(), Code::OverLimit);
        let response = served.ask("edge", vec![descriptor("login=bob")], 0).await;
        assert_eq!(response.overall_code(), Code::Ok);
        clock.set(Timestamp::from_micros(2_284_000_000));
        let response = served.ask("edge", vec![descriptor("login=eve")], 0).await;
        assert_eq!(response.overall_code(), Code::Ok);
    }
}

/// As `apply_on_stream_done` does: a check before, the real cost after.
#[tokio::test]
async fn what_was_spent_is_charged_and_a_check_writes_nothing() {
    for kind in kinds() {
        let (served, _) = served(kind).await;
        let check = async || {
            let response = served.ask("edge", vec![hits(0, descriptor("spent=a"))], 0).await;
            (response.overall_code(), response.statuses[0].limit_remaining)
        };
        assert_eq!(check().await, (Code::Ok, 10));
        served.ask("edge", vec![hits(0, descriptor("user=check"))], 0).await;
        if let Some(redis) = &served.store.redis {
            assert_eq!(redis.keys().await, Vec::<String>::new());
        }
        served.ask("edge", vec![hits(42, descriptor("spent=a"))], 0).await;
        assert_eq!(check().await, (Code::OverLimit, 0));
        served.ask("edge", vec![given_back(32, descriptor("spent=a"))], 0).await;
        assert_eq!(check().await, (Code::Ok, 0));
        served.ask("edge", vec![given_back(4, descriptor("spent=a"))], 0).await;
        assert_eq!(check().await, (Code::Ok, 4));
    }
}

#[tokio::test]
async fn what_can_not_be_asked_is_told() {
    let (served, _) = served(Kind::Memory).await;
    let bob = || descriptor("user=bob");
    let no_entries = RateLimitDescriptor::default();
    let many_entries = descriptor(&["k=v"; 33].join(","));
    for (domain, descriptors, message) in [
        ("", vec![bob()], "domain: empty; expected at least 1 byte"),
        ("edge", vec![], "descriptors: 0; expected 1 to 100"),
        ("edge", vec![bob(); 101], "descriptors: 101; expected 1 to 100"),
        ("edge", vec![bob(); 10_000], "descriptors: 10000; expected 1 to 100"),
        ("edge", vec![bob(), no_entries], "descriptors[1].entries: 0; expected 1 to 32"),
        ("edge", vec![many_entries], "descriptors[0].entries: 33; expected 1 to 32"),
    ] {
        let why = served.try_ask(domain, descriptors, 1).await.unwrap_err();
        assert_eq!((why.code(), why.message()), (Grpc::InvalidArgument, message));
    }
}

#[tokio::test]
async fn odd_texts_and_numbers_are_decided_like_any_others() {
    for kind in kinds() {
        let (served, _) = served(kind).await;
        let entry = |key: &str, value: &str| {
            let mut it = descriptor("k=v");
            it.entries[0].key = key.into();
            it.entries[0].value = value.into();
            it
        };
        let long = "x".repeat(1_000_000);
        let (longer, slashes) = (format!("{long}y"), "/*".repeat(10_000));
        for value in ["", "\0", "a\0b", "{", "}:rule", "%*", "ü:{}% \n", &long, &longer, &slashes] {
            let once = async || {
                let response = served.ask("edge", vec![entry("path", value)], 2).await;
                (response.overall_code(), response.statuses[0].limit_remaining)
            };
            let told: String = value.chars().take(20).collect();
            assert_eq!(once().await, (Code::Ok, 3), "{kind:?} {told:?}");
            assert_eq!(once().await, (Code::Ok, 1), "{kind:?} {told:?}");
            assert_eq!(once().await, (Code::OverLimit, 0), "{kind:?} {told:?}");
        }
        for key in ["", "\0", &long] {
            let response = served.ask("edge", vec![entry(key, "x")], 1).await;
            assert_eq!(response.statuses[0].current_limit, None);
        }
        // Never taken, so nothing to give; and no number is too large to be denied.
        let left = async |it| served.ask("edge", vec![it], 0).await.statuses[0].limit_remaining;
        for n in [1, u32::MAX.into(), u64::MAX] {
            assert_eq!(left(given_back(n, descriptor("user=never"))).await, 10, "{kind:?} {n}");
        }
        for n in [11, u32::MAX.into(), u64::MAX] {
            let response = served.ask("edge", vec![hits(n, descriptor("user=greedy"))], 0).await;
            assert_eq!(response.overall_code(), Code::OverLimit, "{kind:?} {n}");
            let two = vec![hits(n, descriptor("spent=x")), hits(n, descriptor("spent=x"))];
            assert_eq!(served.ask("edge", two, 0).await.overall_code(), Code::OverLimit);
        }
        assert_eq!(left(hits(0, descriptor("user=greedy"))).await, 10);
        assert_eq!(left(given_back(u64::MAX, descriptor("spent=x"))).await, 0, "it owes more than 2^32");
        // As many as may be, each with a bucket of its own.
        let hundred = (0..100).map(|n| descriptor(&format!("path=/{n}"))).collect();
        let response = served.ask("edge", hundred, 5).await;
        assert!(response.statuses.iter().all(|status| status.limit_remaining == 0));
    }
}

#[tokio::test]
async fn nothing_is_done_for_a_caller_that_has_gone() {
    for kind in kinds() {
        let (served, _) = served(kind).await;
        let descriptors = vec![descriptor("user=gone")];
        let request = RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 3 };
        let (path, late) =
            ("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", [("grpc-timeout", "0n")]);
        let reply = raw::call(served.address, path, &late, raw::framed(&request.encode_to_vec())).await;
        assert_eq!(reply.code(), Grpc::DeadlineExceeded, "{reply:?}");
        let response = served.ask("edge", vec![hits(0, descriptor("user=gone"))], 0).await;
        assert_eq!(response.statuses[0].limit_remaining, 10);
    }
}

#[tokio::test]
async fn without_an_authority_what_is_sensitive_is_over_the_limit() {
    let rules = "
domain: edge
descriptors:
  - { key: login, rate_limit: { unit: hour, requests_per_unit: 5, sensitive: true } }
  - { key: watched, shadow_mode: true, rate_limit: { unit: hour, requests_per_unit: 5, sensitive: true } }
  - { key: user, rate_limit: { unit: hour, requests_per_unit: 5 } }
";
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("edge.yaml"), rules).unwrap();
    let domains = folder.path().display();
    let store = "{ url: redis+unix:///nowhere/redis.sock }";
    let server = Tollgate::start(&format!("store: {store}\ndomains: [ {domains} ]\n")).await;
    let client = RateLimitServiceClient::new(server.caller().await.channel());
    let ask = async |entries: &[&str]| {
        let descriptors = entries.iter().map(|entries| descriptor(entries)).collect();
        let request = RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 1 };
        answer(client.clone().should_rate_limit(request)).await.map(tonic::Response::into_inner)
    };
    let response = ask(&["user=a", "login=a"]).await.unwrap();
    assert_eq!(response.overall_code(), Code::OverLimit);
    let codes: Vec<_> = response.statuses.iter().map(DescriptorStatus::code).collect();
    assert_eq!(codes, [Code::Ok, Code::OverLimit]);
    assert_eq!(response.statuses[1].duration_until_reset.as_ref().unwrap().seconds, 1);
    assert!(is_degraded(&response), "{response:?}");
    // The rest is decided without it, and what was denied took nothing.
    for (others, left) in [(&["user=a"][..], 4), (&["watched=a"], 4), (&["user=a"], 3)] {
        let response = ask(others).await.unwrap();
        assert_eq!(response.overall_code(), Code::Ok, "{response:?}");
        assert!(response.statuses[0].limit_remaining == left && is_degraded(&response), "{response:?}");
    }
    assert_eq!(ask(&["nobody=knows"]).await.unwrap().overall_code(), Code::Ok);
}

fn is_degraded(response: &RateLimitResponse) -> bool {
    let metadata = response.dynamic_metadata.as_ref();
    let told = metadata.and_then(|metadata| metadata.fields.get("degraded"));
    told.is_some_and(|told| told.kind == Some(prost_types::value::Kind::BoolValue(true)))
}
