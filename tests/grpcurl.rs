//! Asked by grpcurl, a client that shares no code with us and knows nothing but what reflection tells it.

use crate::support::{Tollgate, grpcurl};
use tokio_stream::StreamExt as _;
use tonic_reflection::pb::{v1, v1alpha};

const CONFIG: &str = "classes: { read: { rate: 1/h, burst: 2 } }";

/// What it printed, if all went well.
async fn said(arguments: &[&str]) -> String {
    let output = grpcurl(arguments).await;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// One call to a method, with that message.
async fn called(address: &str, message: &str, method: &str) -> serde_json::Value {
    serde_json::from_str(&said(&["-plaintext", "-d", message, address, method]).await).unwrap()
}

#[tokio::test]
async fn the_services_are_listed_and_described_without_a_proto_file() {
    let server = Tollgate::start(CONFIG).await;
    let address = server.grpc().to_string();

    let services = said(&["-plaintext", &address, "list"]).await;
    for service in ["tollgate.v1.RateLimiter", "grpc.health.v1.Health"] {
        assert!(services.lines().any(|line| line == service), "{service} in:\n{services}");
    }

    let service = said(&["-plaintext", &address, "describe", "tollgate.v1.RateLimiter"]).await;
    for method in [
        "rpc ShouldRateLimit ( .tollgate.v1.ShouldRateLimitRequest ) returns ( .tollgate.v1.ShouldRateLimitResponse );",
        "rpc Borrow ( .tollgate.v1.BorrowRequest ) returns ( .tollgate.v1.BorrowResponse );",
        "rpc Return ( .tollgate.v1.ReturnRequest ) returns ( .tollgate.v1.ReturnResponse );",
    ] {
        assert!(service.contains(method), "{method} in:\n{service}");
    }

    for (message, fields) in [
        (
            ".tollgate.v1.ShouldRateLimitRequest",
            &["string key = 1;", "string class = 2;", "optional uint32 cost = 3;"][..],
        ),
        (
            ".tollgate.v1.ShouldRateLimitResponse",
            &[
                ".tollgate.v1.Verdict verdict = 1;",
                "uint64 limit = 2;",
                "uint64 remaining = 3;",
                ".google.protobuf.Duration retry_after = 4;",
                ".google.protobuf.Duration reset_after = 5;",
                ".tollgate.v1.Reason reason = 6;",
                "bool degraded = 7;",
                ".google.protobuf.Duration wait = 8;",
                "string rule = 9;",
                "uint32 cost = 10;",
                ".google.protobuf.Duration window = 11;",
            ],
        ),
    ] {
        let described = said(&["-plaintext", &address, "describe", message]).await;
        for field in fields {
            assert!(described.contains(field), "{field} in:\n{described}");
        }
    }
}

#[tokio::test]
async fn calls_are_decided() {
    let server = Tollgate::start(CONFIG).await;
    let address = server.grpc().to_string();
    let ask = async |message| called(&address, message, "tollgate.v1.RateLimiter/ShouldRateLimit").await;

    let first = ask(r#"{"key":"alice","class":"read"}"#).await;
    assert_eq!(first["verdict"], "VERDICT_ALLOW", "{first}");
    // JSON has no 64-bit numbers, so these are texts.
    assert_eq!((&first["limit"], &first["remaining"]), (&"2".into(), &"1".into()), "{first}");
    assert_eq!((&first["cost"], &first["rule"]), (&1.into(), &"read".into()), "{first}");
    assert_eq!((&first["window"], &first["resetAfter"]), (&"7200s".into(), &"3600s".into()), "{first}");
    assert_eq!(first.get("retryAfter"), None, "{first}");

    ask(r#"{"key":"alice","class":"read"}"#).await;
    let third = ask(r#"{"key":"alice","class":"read"}"#).await;
    assert_eq!((&third["verdict"], &third["reason"]), (&"VERDICT_DENY".into(), &"REASON_OVER_LIMIT".into()));
    let retry_after: f64 = third["retryAfter"].as_str().unwrap().strip_suffix('s').unwrap().parse().unwrap();
    assert!((3500.0..=3600.0).contains(&retry_after), "{third}");
    // Another's bucket is as it was.
    assert_eq!(ask(r#"{"key":"bob","class":"read"}"#).await["verdict"], "VERDICT_ALLOW");
}

#[tokio::test]
async fn health_is_told_of_the_whole_and_of_each_service() {
    let server = Tollgate::start(CONFIG).await;
    server.serving().await;
    let address = server.grpc().to_string();
    for service in ["", "tollgate.v1.RateLimiter"] {
        let message = format!(r#"{{"service":"{service}"}}"#);
        let health = called(&address, &message, "grpc.health.v1.Health/Check").await;
        assert_eq!(health["status"], "SERVING", "{service:?}");
    }
    let method = "grpc.health.v1.Health/Check";
    let output = grpcurl(&["-plaintext", "-d", r#"{"service":"x"}"#, &address, method]).await;
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("Code: NotFound"), "{errors}");
}

#[tokio::test]
async fn an_error_says_what_is_wrong_and_where() {
    let server = Tollgate::start(CONFIG).await;
    let address = server.grpc().to_string();
    let message = r#"{"key":"alice","class":"read","cost":3}"#;
    let output =
        grpcurl(&["-plaintext", "-d", message, &address, "tollgate.v1.RateLimiter/ShouldRateLimit"]).await;
    assert!(!output.status.success());
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("Code: InvalidArgument"), "{errors}");
    assert!(
        errors.contains(r#"Message: cost: 3 is above the burst of 2 of class "read" and can never fit"#),
        "{errors}"
    );
}

/// grpcurl asks for one version or the other, depending on its age; this asks for both.
#[tokio::test]
async fn both_versions_of_reflection_answer() {
    let server = Tollgate::start(CONFIG).await;
    let channel = server.caller().await.channel();

    let request = v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1::server_reflection_request::MessageRequest::ListServices(String::new())),
    };
    let mut client = v1::server_reflection_client::ServerReflectionClient::new(channel.clone());
    let mut replies = client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
    let reply = replies.next().await.unwrap().unwrap().message_response.unwrap();
    let v1::server_reflection_response::MessageResponse::ListServicesResponse(listed) = reply else {
        panic!("{reply:?}");
    };
    let names: Vec<_> = listed.service.into_iter().map(|service| service.name).collect();
    assert!(names.iter().any(|name| name == "tollgate.v1.RateLimiter"), "{names:?}");

    let request = v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(
            v1alpha::server_reflection_request::MessageRequest::ListServices(String::new()),
        ),
    };
    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
    let mut replies = client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
    let reply = replies.next().await.unwrap().unwrap().message_response.unwrap();
    let v1alpha::server_reflection_response::MessageResponse::ListServicesResponse(listed) = reply else {
        panic!("{reply:?}");
    };
    let names: Vec<_> = listed.service.into_iter().map(|service| service.name).collect();
    assert!(names.iter().any(|name| name == "tollgate.v1.RateLimiter"), "{names:?}");
}
