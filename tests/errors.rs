//! Whatever is sent: the right code, a message that names the field, the value and the limit, and a server
//! that serves on.

use crate::support::calls::{Caller, allowed, answer, one_shed_one_held};
use crate::support::raw::{self, SHOULD_RATE_LIMIT, framed};
use crate::support::{Redis, Tollgate, engines, grpcurl};
use bytes::Bytes;
use std::time::Duration;
use tollgate_proto::v1::{BorrowRequest, ReturnRequest, ShouldRateLimitRequest};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

const CONFIG: &str = "
classes:
  read:  { rate: 1/h, burst: 200 }
  login: { rate: 1/h, burst: 5, sensitive: true }
";

/// The server is the same one, and decides.
async fn still_serves(server: &mut Tollgate, caller: &Caller, after: &str) {
    assert!(allowed(&caller.ask(&format!("after {after}"), "read", None).await), "{after}");
    assert!(server.process().is_running(), "{after}");
    assert!(!server.process().output().contains("panicked"), "{after}:\n{}", server.process().output());
}

/// It says that the field is wrong, in the message and in the details.
fn blames(status: &Status, field: &str, wrong: &str, case: &str) {
    assert_eq!(status.code(), Code::InvalidArgument, "{case}: {status:?}");
    assert_eq!(status.message(), format!("{field}: {wrong}"), "{case}");
    let violations = status.get_details_bad_request().expect("google.rpc.BadRequest").field_violations;
    assert_eq!(violations.len(), 1, "{case}: {violations:?}");
    assert_eq!((violations[0].field.as_str(), violations[0].description.as_str()), (field, wrong), "{case}");
}

#[tokio::test]
async fn a_decision_that_can_not_be_says_why() {
    let mut server = Tollgate::start(CONFIG).await;
    let caller = server.caller().await;
    let (key_512, key_513, key_1m) = ("k".repeat(512), "k".repeat(513), "k".repeat(1 << 20));
    let long_class = "c".repeat(1000);
    let unknown_class = |class: &str| format!("{class} has no rule, and there is no class \"default\"");
    for (case, key, class, cost, wrong) in [
        ("an empty key", "", "read", None, Some(("key", "empty; expected at least 1 byte".to_owned()))),
        ("a key of 512 bytes", &key_512, "read", None, None),
        ("a key of 513", &key_513, "read", None, Some(("key", "513 bytes; expected at most 512".to_owned()))),
        ("1 MB", &key_1m, "read", None, Some(("key", "1048576 bytes; expected at most 512".to_owned()))),
        ("NUL in the key", "a\0b", "read", None, None),
        ("odd text in the key", "\u{202e}\u{feff}\u{10ffff}{}:%\r\n", "read", None, None),
        ("no class", "a", "", None, Some(("class", unknown_class("\"\"")))),
        ("an unknown class", "a", "wirte", None, Some(("class", unknown_class("\"wirte\"")))),
        (
            "a long class",
            "a",
            &long_class,
            None,
            Some(("class", unknown_class(&format!("\"{}…\"", "c".repeat(64))))),
        ),
        ("the burst", "b", "read", Some(200), None),
        (
            "more than the burst",
            "a",
            "read",
            Some(201),
            Some(("cost", "201 is above the burst of 200 of class \"read\" and can never fit".to_owned())),
        ),
        (
            "the highest cost there is",
            "a",
            "login",
            Some(u32::MAX),
            Some((
                "cost",
                "4294967295 is above the burst of 5 of class \"login\" and can never fit".to_owned(),
            )),
        ),
    ] {
        match (caller.try_ask(key, class, cost).await, wrong) {
            (Ok(response), None) => assert!(allowed(&response), "{case}: {response:?}"),
            (Err(status), Some((field, wrong))) => blames(&status, field, &wrong, case),
            (other, wrong) => panic!("{case}: {other:?}, not {wrong:?}"),
        }
        still_serves(&mut server, &caller, case).await;
    }
    assert_eq!(caller.remaining("a", "read").await, 200, "nothing of this was charged");
}

#[tokio::test]
async fn an_unknown_class_is_no_error_where_there_is_a_default() {
    let server = Tollgate::start("classes: { default: { rate: 1/h, burst: 3 } }").await;
    let response = server.caller().await.ask("a", "no such class", None).await;
    assert_eq!((allowed(&response), response.rule.as_str()), (true, "default"));
}

#[tokio::test]
async fn a_borrow_that_can_not_be_says_why() {
    let mut server = Tollgate::start(CONFIG).await;
    let caller = server.caller().await;
    let borrow = |key: &str, class: &str, n, returns| BorrowRequest {
        key: key.into(),
        class: class.into(),
        n,
        returns: vec![ReturnRequest::default(); returns],
        ..BorrowRequest::default()
    };
    for (case, request, field, wrong) in [
        ("no key", borrow("", "read", 1, 0), "key", "empty; expected at least 1 byte"),
        ("a long key", borrow(&"k".repeat(513), "read", 1, 0), "key", "513 bytes; expected at most 512"),
        ("nothing", borrow("a", "read", 0, 0), "n", "0; expected at least 1"),
        (
            "an unknown class",
            borrow("a", "wirte", 1, 0),
            "class",
            "\"wirte\" has no rule, and there is no class \"default\"",
        ),
        ("101 returns", borrow("a", "read", 1, 101), "returns", "101 leases; expected at most 100"),
    ] {
        let status = answer(caller.stub().borrow(request)).await.expect_err(case);
        blames(&status, field, wrong, case);
        still_serves(&mut server, &caller, case).await;
    }
    assert_eq!(caller.borrow(borrow("a", "read", 1, 100)).await.granted, 1, "as many as may be");
    // More than there ever is is no error: a borrow takes what there is.
    assert_eq!(caller.borrow(borrow("b", "read", u32::MAX, 0)).await.granted, 200);
}

/// A field of the wire format: number, length-delimited, its bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
}

#[tokio::test]
async fn bytes_that_are_no_request_are_refused() {
    let mut server = Tollgate::start(CONFIG).await;
    let caller = server.caller().await;
    let good = [field(1, b"a"), field(2, b"read")].concat();
    let truncated = Bytes::copy_from_slice(&framed(&good)[..8]);
    let compressed = {
        let mut frame = framed(&good).to_vec();
        frame[0] = 1;
        Bytes::from(frame)
    };
    let huge = framed(&field_of_10_mb());
    for (case, path, body, code, says) in [
        (
            "a key that is no UTF-8",
            SHOULD_RATE_LIMIT,
            framed(&[field(1, b"\xff\xfe"), field(2, b"read")].concat()),
            Code::Internal,
            "ShouldRateLimitRequest.key: invalid string value: data is not UTF-8 encoded",
        ),
        (
            "a class that is no UTF-8",
            SHOULD_RATE_LIMIT,
            framed(&[field(1, b"a"), field(2, b"\xc0\x80")].concat()),
            Code::Internal,
            "ShouldRateLimitRequest.class: invalid string value: data is not UTF-8 encoded",
        ),
        (
            "garbage",
            SHOULD_RATE_LIMIT,
            framed(&[0xff; 64]),
            Code::Internal,
            "failed to decode Protobuf message",
        ),
        ("half a message", SHOULD_RATE_LIMIT, truncated, Code::Internal, "Unexpected EOF"),
        ("no message", SHOULD_RATE_LIMIT, Bytes::new(), Code::Internal, "Missing request message"),
        ("what is compressed", SHOULD_RATE_LIMIT, compressed, Code::Internal, "compressed-flag"),
        ("10 MB", SHOULD_RATE_LIMIT, huge, Code::OutOfRange, "the limit is: 4194304 bytes"),
        ("an unknown method", "/tollgate.v1.RateLimiter/Nope", framed(&good), Code::Unimplemented, ""),
        (
            "an unknown service",
            "/tollgate.v2.RateLimiter/ShouldRateLimit",
            framed(&good),
            Code::Unimplemented,
            "",
        ),
    ] {
        let reply = raw::call(server.grpc(), path, &[], body).await;
        assert_eq!(reply.code(), code, "{case}: {reply:?}");
        assert!(reply.status.message().contains(says), "{case}: {reply:?}");
        still_serves(&mut server, &caller, case).await;
    }
    assert_eq!(caller.remaining("a", "read").await, 200, "nothing of this was charged");
}

/// A request whose key is ten megabytes long.
fn field_of_10_mb() -> Vec<u8> {
    prost::Message::encode_to_vec(&ShouldRateLimitRequest {
        key: "k".repeat(10_000_000),
        class: "read".into(),
        cost: None,
    })
}

#[tokio::test]
async fn fields_of_later_versions_are_ignored() {
    let server = Tollgate::start(CONFIG).await;
    let caller = server.caller().await;
    let later = [field(1, b"a"), field(15, b"what is this"), field(2, b"read")].concat();
    let reply = raw::call(server.grpc(), SHOULD_RATE_LIMIT, &[], framed(&later)).await;
    assert_eq!(reply.code(), Code::Ok, "{reply:?}");
    assert_eq!(caller.remaining("a", "read").await, 199);
}

fn request(key: &str) -> Bytes {
    let request = ShouldRateLimitRequest { key: key.into(), class: "read".into(), cost: None };
    framed(&prost::Message::encode_to_vec(&request))
}

#[tokio::test]
async fn nothing_is_charged_for_a_caller_that_has_gone() {
    let server = Tollgate::start(CONFIG).await;
    let caller = server.caller().await;
    for timeout in ["0n", "1n", "0m", "0H"] {
        // By hand: a client of its own would have given up before it asked.
        let fields = [("grpc-timeout", timeout)];
        let reply = raw::call(server.grpc(), SHOULD_RATE_LIMIT, &fields, request("late")).await;
        assert_eq!(reply.code(), Code::DeadlineExceeded, "{timeout}: {reply:?}");
        assert_eq!(reply.status.message(), "deadline: passed before the work began", "{timeout}");
        assert_eq!(caller.remaining("late", "read").await, 200, "{timeout}");
    }
    // What is no timeout is as if it were not there.
    for (charged, timeout) in (1..).zip(["1H", "99999999H", "123456789n", "", "m", "-1m", "soon"]) {
        let fields = [("grpc-timeout", timeout)];
        let reply = raw::call(server.grpc(), SHOULD_RATE_LIMIT, &fields, request("late")).await;
        assert_eq!(reply.code(), Code::Ok, "{timeout}: {reply:?}");
        assert_eq!(caller.remaining("late", "read").await, 200 - charged, "{timeout}");
    }
}

/// A caller whose request does not come is told so, and one that Redis does not answer in time is told that or gets
/// an answer without Redis: in three milliseconds either may come first. Many times, because two timers run for each.
#[tokio::test]
async fn a_deadline_that_passes_on_the_way_is_told_as_one() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let server = Tollgate::start(&patient(&redis, 4096)).await;
        let caller = server.serving().await;
        redis.stop();
        for _ in 0..20 {
            let fields = [("grpc-timeout", "3m")];
            let reply = raw::call(server.grpc(), SHOULD_RATE_LIMIT, &fields, request("late")).await;
            assert!(matches!(reply.code(), Code::DeadlineExceeded | Code::Ok), "{engine:?}: {reply:?}");
            let reply = raw::call_without_end(server.grpc(), SHOULD_RATE_LIMIT, &fields).await;
            assert_eq!(reply.code(), Code::DeadlineExceeded, "{engine:?}: {reply:?}");
        }
        redis.cont();
        // Those that reached Redis before it stopped may be charged, one for each connection.
        assert!(caller.remaining("late", "read").await >= 196, "{engine:?}");
    }
}

/// A server that waits long for its Redis, and lets so many calls wait.
fn patient(redis: &Redis, max_in_flight: usize) -> String {
    format!(
        "server: {{ max_in_flight: {max_in_flight} }}\nstore: {{ url: \"{}\", deadline: 10s }}\nclasses:\n  \
         read: {{ rate: 1/h, burst: 200 }}\n  health: {{ cost: 0 }}\n",
        redis.url()
    )
}

#[tokio::test]
async fn calls_above_the_maximum_are_shed_and_probes_are_not() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let mut server = Tollgate::start(&patient(&redis, 1)).await;
        let caller = server.serving().await;
        redis.stop();

        let (status, held) = one_shed_one_held(&caller, "read").await;
        assert_eq!(status.code(), Code::Unavailable, "{engine:?}: {status:?}");
        assert_eq!(status.message(), "1 calls are in flight, as many as may be");
        let retry = status.get_details_retry_info().expect("google.rpc.RetryInfo");
        assert_eq!(retry.retry_delay, Some(Duration::from_secs(5)), "{engine:?}");
        assert_eq!(status.metadata().get("retry-after").unwrap(), "5", "{engine:?}");
        // On the wire it is a field of the last frame, after no message.
        let reply = raw::call(server.grpc(), SHOULD_RATE_LIMIT, &[], request("raw")).await;
        assert_eq!((reply.code(), reply.body.len()), (Code::Unavailable, 0), "{engine:?}: {reply:?}");
        assert_eq!(reply.fields["retry-after"], "5", "{engine:?}: {reply:?}");

        assert!(allowed(&caller.ask("prober", "health", None).await), "{engine:?}");
        caller.health().await;
        let listed = grpcurl(&["-plaintext", &server.grpc().to_string(), "list"]).await;
        assert!(listed.status.success(), "{engine:?}: {listed:?}");

        redis.cont();
        assert!(allowed(&answer(held).await.unwrap()), "{engine:?}: it waited for nothing less");
        caller.until_ready(true).await;
        assert!(server.metric(r#"tollgate_shed_total{full="calls"}"#).await >= 2, "{engine:?}");
        still_serves(&mut server, &caller, "load").await;
    }
}
