//! Each call over gRPC is answered by what can be, and the next one too.

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::client::SendRequest;
use http::Request;
use prost::Message as _;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_proto::v1;
use tollgate_server::app;
use tollgate_server::clock::Clock;
use tollgate_server::config::Config;

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

const ASK: &str = "/tollgate.v1.RateLimiter/ShouldRateLimit";
const BORROW: &str = "/tollgate.v1.RateLimiter/Borrow";
const RETURN: &str = "/tollgate.v1.RateLimiter/Return";
const DESCRIBE: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// What can be called.
const METHODS: [&str; 5] = [ASK, BORROW, RETURN, DESCRIBE, "/grpc.health.v1.Health/Check"];

struct Served {
    runtime: Runtime,
    client: SendRequest<Bytes>,
}

static SERVED_AT: LazyLock<Mutex<Served>> = LazyLock::new(|| {
    // Nothing is done but while somebody waits for it, so the same bytes take the same way each time.
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
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
        // Head and body are two writes.
        stream.set_nodelay(true).expect("a socket");
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
    let answered = runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(10), call(client, method, body.freeze())).await
    });
    let Answered { code, body } =
        answered.expect("an answer in time").unwrap_or_else(|error| panic!("{method}: {error}"));
    assert!(code.parse::<u8>().is_ok_and(|code| code <= 16), "{method}: grpc-status {code}");
    if code == "0" && how < 128 {
        // A byte says that it is not compressed, four how long it is.
        can_be(method, message, body.get(5..).expect("a message"));
    }
}

/// Can that be the answer?
fn can_be(method: &str, asked: &[u8], answer: &[u8]) {
    match method {
        ASK => {
            let asked = v1::ShouldRateLimitRequest::decode(asked).expect("it was understood");
            let it = v1::ShouldRateLimitResponse::decode(answer).expect("an answer");
            let allowed = it.verdict() == v1::Verdict::Allow;
            assert!(allowed || it.verdict() == v1::Verdict::Deny, "{asked:?}: {it:?}");
            assert_eq!(allowed, it.reason() == v1::Reason::Unspecified, "{asked:?}: {it:?}");
            assert_eq!(allowed, it.retry_after.is_none(), "{asked:?}: {it:?}");
            assert!(it.remaining <= it.limit && !it.degraded, "{asked:?}: {it:?}");
            assert!(if allowed {
                asked.cost.is_none_or(|cost| cost == it.cost || it.limit == 0)
            } else {
                it.cost == 0
            });
        }
        BORROW => {
            let asked = v1::BorrowRequest::decode(asked).expect("it was understood");
            let it = v1::BorrowResponse::decode(answer).expect("an answer");
            // One that is sent again is answered as it was the first time, whatever it says now.
            let again = !asked.gateway.is_empty() && asked.seq > 0;
            assert!(again || it.granted <= asked.n, "{asked:?}: {it:?}");
            assert!(it.lease_id.is_empty() || it.granted > 0, "{asked:?}: {it:?}");
            assert!(it.granted == 0 || it.valid_for.is_some(), "{asked:?}: {it:?}");
            assert!(it.granted == 0 || it.reason() == v1::Reason::Unspecified, "{asked:?}: {it:?}");
        }
        RETURN => {
            let asked = v1::ReturnRequest::decode(asked).expect("it was understood");
            let it = v1::ReturnResponse::decode(answer).expect("an answer");
            assert!(it.credited <= asked.unused, "{asked:?}: {it:?}");
        }
        DESCRIBE => {
            let asked = RateLimitRequest::decode(asked).expect("it was understood");
            let it = RateLimitResponse::decode(answer).expect("an answer");
            assert_eq!(asked.descriptors.len(), it.statuses.len(), "{asked:?}: {it:?}");
            let over = it.statuses.iter().any(|status| status.code() == Code::OverLimit);
            assert_eq!(it.overall_code(), if over { Code::OverLimit } else { Code::Ok }, "{asked:?}: {it:?}");
        }
        _ => {}
    }
}

struct Answered {
    code: String,
    body: Vec<u8>,
}

async fn call(client: &mut SendRequest<Bytes>, method: &str, body: Bytes) -> Result<Answered, h2::Error> {
    *client = client.clone().ready().await?;
    let request = Request::post(format!("http://localhost{method}"))
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .body(())
        .expect("a request");
    let (response, mut stream) = client.send_request(request, false)?;
    stream.send_data(body, true)?;
    let (head, mut incoming) = response.await?.into_parts();
    let mut body = Vec::new();
    while let Some(data) = incoming.data().await {
        let data = data?;
        body.extend_from_slice(&data);
        incoming.flow_control().release_capacity(data.len())?;
    }
    let trailers = incoming.trailers().await?.unwrap_or_default();
    let status = head.headers.get("grpc-status").or_else(|| trailers.get("grpc-status"));
    let code = status.and_then(|status| status.to_str().ok()).unwrap_or("none").to_owned();
    Ok(Answered { code, body })
}
