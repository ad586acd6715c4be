//! Peers that mean no good: however many connections, header fields, half requests and resets they send, what they
//! hold ends, and others are served meanwhile.

use crate::support::authority::Authority;
use crate::support::calls::{Caller, allowed, answer};
use crate::support::http::exchange;
use crate::support::raw::{SHOULD_RATE_LIMIT, framed};
use crate::support::{Tollgate, eventually};
use bytes::Bytes;
use h2::client::SendRequest;
use http::Request;
use rustix::process::Signal;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{interval, timeout};
use tollgate_proto::v1::ShouldRateLimitRequest;

const CLASSES: &str = "classes: { read: { rate: 1/h, burst: 1000000 } }";

/// Longer than a peer may take to begin.
const PATIENCE: Duration = Duration::from_secs(20);

/// The server is the same one, and others are served.
async fn unhurt(server: &mut Tollgate, caller: &Caller, after: &str) {
    assert!(allowed(&caller.ask("somebody else", "read", None).await), "{after}");
    assert!(server.process().is_running(), "{after}");
    assert!(!server.process().output().contains("panicked"), "{after}:\n{}", server.process().output());
}

/// Has the other side closed it?
fn is_closed(stream: &TcpStream) -> bool {
    let mut bytes = [0; 1024];
    loop {
        match stream.try_read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != ErrorKind::WouldBlock,
        }
    }
}

/// All that it says, until the other side closes it.
async fn until_closed(mut stream: TcpStream, what: &str) -> Vec<u8> {
    let mut said = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut said)).await;
    // A reset is an end as well.
    read.unwrap_or_else(|_| panic!("{what}: still open")).unwrap_or_default();
    said
}

/// HTTP/2 to that server, by hand.
async fn h2(server: SocketAddr) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>) {
    let tcp = TcpStream::connect(server).await.unwrap();
    let (client, connection) =
        h2::client::Builder::new().max_concurrent_reset_streams(0).handshake(tcp).await.unwrap();
    (client, tokio::spawn(connection))
}

fn call(server: SocketAddr) -> http::request::Builder {
    Request::post(format!("http://{server}{SHOULD_RATE_LIMIT}"))
        .header("te", "trailers")
        .header("content-type", "application/grpc")
}

#[tokio::test]
async fn there_are_no_more_connections_than_may_be() {
    for (bounds, told) in [
        ("max_connections_per_peer: 4", "max_connections_per_peer: 4 are open from 127.0.0.1"),
        ("max_connections: 4", "max_connections: 4 are open, as many as may be"),
    ] {
        let mut server = Tollgate::start(&format!("server: {{ {bounds} }}\n{CLASSES}")).await;
        let caller = server.serving().await;
        // That of the caller is one of those of gRPC.
        for (address, most) in [(server.grpc(), 3), (server.http().await, 4)] {
            let mut held = Vec::new();
            for _ in 0..20 {
                held.push(TcpStream::connect(address).await.unwrap());
            }
            eventually("as many are open as may be", async || {
                let open = held.iter().filter(|stream| !is_closed(stream)).count();
                (open == most).then_some(())
            })
            .await;
            unhurt(&mut server, &caller, "connections were refused").await;
        }
        server.says(told).await;
        assert_eq!(server.process().output().matches(told).count(), 2, "{}", server.process().output());
        eventually("refused and open connections are counted", async || {
            let refused = server.metric("tollgate_connections_refused_total").await;
            let open = server.metric(r#"tollgate_connections{listener="grpc"}"#).await;
            (refused >= 33 && (1..=4).contains(&open)).then_some(())
        })
        .await;
        // What was given up can be had again.
        let again = eventually("a connection", async || {
            let stream = TcpStream::connect(server.grpc()).await.ok()?;
            let asked = timeout(PATIENCE, h2::client::handshake(stream)).await.ok()?.ok()?;
            let (mut client, connection) = asked;
            let connection = tokio::spawn(connection);
            let (response, mut body) = client.send_request(call(server.grpc()).body(()).ok()?, false).ok()?;
            body.send_data(framed(b""), true).ok()?;
            let answered = answer(response).await.is_ok();
            connection.abort();
            answered.then_some(())
        });
        again.await;
    }
}

#[tokio::test]
async fn who_does_not_begin_is_not_waited_for() {
    let authority = Authority::new();
    let folder = tempfile::tempdir().unwrap();
    let [_, cert, key] = authority.files(folder.path(), "localhost");
    let tls = format!("tls: {{ cert: \"{}\", key: \"{}\" }}", cert.display(), key.display());
    let secured = Tollgate::start(&format!("server: {{ {tls} }}\n{CLASSES}")).await;
    let mut open = Tollgate::start(CLASSES).await;
    let caller = open.serving().await;

    let silent = TcpStream::connect(secured.grpc()).await.unwrap();
    let mut prefaces = Vec::new();
    for said in [&b""[..], b"PRI * HTTP/2.0\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut preface = TcpStream::connect(open.grpc()).await.unwrap();
        preface.write_all(said).await.unwrap();
        prefaces.push((preface, said));
    }
    let mut slow = TcpStream::connect(open.http().await).await.unwrap();
    slow.write_all(b"GET /healthcheck HTTP/1.1\r\nhost: a\r\nx-a: ").await.unwrap();
    let (mut slow, mut feed) = slow.into_split();
    // One byte after the other, for as long as it is taken.
    let feeding = tokio::spawn(async move {
        let mut turns = interval(Duration::from_millis(100));
        while feed.write_all(b"a").await.is_ok() {
            turns.tick().await;
        }
    });
    assert_eq!(until_closed(silent, "a handshake that never begins").await, b"");
    for (preface, said) in prefaces {
        until_closed(preface, &format!("after {said:?}")).await;
    }
    let mut said = Vec::new();
    timeout(PATIENCE, slow.read_to_end(&mut said)).await.expect("a slow header field: still open").ok();
    timeout(PATIENCE, feeding).await.expect("it can not be written to").unwrap();
    unhurt(&mut open, &caller, "slow peers").await;
}

#[tokio::test]
async fn header_fields_are_bounded() {
    let mut server = Tollgate::start(CLASSES).await;
    let caller = server.serving().await;
    let address = server.grpc();

    // Too many of them: that call is refused, by the peer's own library or by the server.
    let (mut client, connection) = h2(address).await;
    let mut request = call(address);
    for n in 0..1000 {
        request = request.header(format!("x-{n}"), "0123456789012345678901234567890123456789");
    }
    if let Ok((response, _)) = client.send_request(request.body(()).unwrap(), true) {
        match answer(response).await {
            Ok(response) => assert_eq!(response.status(), 431),
            Err(error) => assert!(error.is_remote() || error.is_go_away() || error.is_reset(), "{error}"),
        }
    }
    connection.abort();
    unhurt(&mut server, &caller, "many header fields").await;

    // Fields that never end: a HEADERS frame, and CONTINUATION frames without END_HEADERS.
    let mut endless = TcpStream::connect(address).await.unwrap();
    endless.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let frame = |kind: u8| {
        // Of a field that is not to be remembered: a name of one byte, and a value of 100.
        let field = [&[0x00, 1, b'a', 100][..], &[b'b'; 100]].concat();
        let block = field.repeat(150);
        let length = u32::try_from(block.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, 0, 0, 0, 0, 1], &block].concat()
    };
    let mut frames = 0;
    endless.write_all(&frame(1)).await.unwrap();
    while timeout(PATIENCE, endless.write_all(&frame(9))).await.expect("it is read or closed").is_ok() {
        frames += 1;
        assert!(frames < 10_000, "150 MB of header fields were taken");
    }
    unhurt(&mut server, &caller, "header fields without an end").await;
}

#[tokio::test]
async fn requests_that_are_reset_at_once_end_the_connection_and_no_other() {
    let mut server = Tollgate::start(CLASSES).await;
    let caller = server.serving().await;
    let address = server.grpc();
    let mut sent = 0;
    eventually("the server has had enough", async || {
        let (mut client, connection) = h2(address).await;
        for _ in 0..5_000 {
            let Ok(mut ready) = client.clone().ready().await else { break };
            let Ok((_, mut stream)) = ready.send_request(call(address).body(()).unwrap(), false) else {
                break;
            };
            stream.send_reset(h2::Reason::CANCEL);
            client = ready;
            sent += 1;
        }
        let ended = connection.is_finished();
        connection.abort();
        (ended || sent >= 20_000).then_some(())
    })
    .await;
    unhurt(&mut server, &caller, "20000 resets").await;
}

/// A server that stands still for a moment finds their calls and their resets at the same time, and in between those of
/// others by the same gateway, who wait longer.
#[tokio::test]
async fn callers_that_give_up_together_do_not_end_the_calls_of_others() {
    let mut server = Tollgate::start(CLASSES).await;
    let caller = server.serving().await;
    server.process().signal(Signal::STOP);
    let mut hasty = JoinSet::new();
    for n in 0..500 {
        let mut stub = caller.stub();
        hasty.spawn(async move {
            let ask = ShouldRateLimitRequest { key: n.to_string(), class: "read".into(), cost: None };
            timeout(Duration::from_millis(50), stub.should_rate_limit(ask)).await
        });
    }
    let patient = tokio::spawn({
        let caller = caller.clone();
        async move { caller.ask("patient", "read", None).await }
    });
    let answers = hasty.join_all().await;
    server.process().signal(Signal::CONT);
    assert!(answers.iter().all(Result::is_err), "nobody answers");
    assert!(allowed(&patient.await.expect("the call is answered")));
    unhurt(&mut server, &caller, "500 calls that were given up").await;
}

#[tokio::test]
async fn calls_that_never_say_what_they_want_hold_up_nobody() {
    let mut server = Tollgate::start(&format!("server: {{ max_in_flight: 8 }}\n{CLASSES}")).await;
    let caller = server.serving().await;
    let mut held = Vec::new();
    for _ in 0..4 {
        let (mut client, connection) = h2(server.grpc()).await;
        for _ in 0..500 {
            client = answer(client.ready()).await.unwrap();
            held.push(client.send_request(call(server.grpc()).body(()).unwrap(), false).unwrap());
        }
        held.last_mut().unwrap().1.send_data(framed(b"half")[..3].to_vec().into(), false).unwrap();
        std::mem::forget(connection);
    }
    for _ in 0..20 {
        unhurt(&mut server, &caller, "2000 calls are open").await;
    }
    // They are not held for ever.
    let (response, _) = held.pop().unwrap();
    let ended = timeout(2 * PATIENCE, response).await.expect("it is ended");
    assert!(ended.is_ok_and(|response| response.headers().contains_key("grpc-status")));
}

/// Over HTTP and over gRPC: a peer asks and asks and reads nothing of what it is told.
#[tokio::test]
async fn who_does_not_read_is_not_written_to_for_ever() {
    let mut server = Tollgate::start(CLASSES).await;
    let caller = server.serving().await;
    let ask = b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n".repeat(100);
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let ping = b"\0\0\x08\x06\0\0\0\0\0pingpong".repeat(100);
    for (address, first, again) in [(server.http().await, &b""[..], ask), (server.grpc(), preface, ping)] {
        let mut deaf = TcpStream::connect(address).await.unwrap();
        deaf.write_all(first).await.unwrap();
        // It is not taken without end, and then the connection ends.
        let ended = async { while deaf.write_all(&again).await.is_ok() {} };
        timeout(3 * PATIENCE, ended).await.unwrap_or_else(|_| panic!("{address}: still open"));
    }
    unhurt(&mut server, &caller, "deaf peers").await;
}

/// Messages of 4 MiB that are never finished, as many as may be held.
#[tokio::test]
async fn messages_that_are_not_finished_are_held_up_to_a_bound() {
    const ROOM: usize = 64 << 20;
    const FREE: usize = 4 << 10;
    let mut server = Tollgate::start(CLASSES).await;
    let caller = server.serving().await;
    let message = framed(&vec![0; 4 << 20]);
    let (mut client, connection) = h2(server.grpc()).await;
    let mut begin = async |bytes: usize| {
        client = answer(client.clone().ready()).await.unwrap();
        let request = call(server.grpc()).body(()).unwrap();
        let (response, mut body) = client.send_request(request, false).unwrap();
        body.send_data(message.slice(..bytes), false).unwrap();
        (response, body)
    };
    let mut calls = Vec::new();
    let mut held = 0;
    while held < ROOM {
        let more = (message.len() - 1).min(ROOM - held + FREE);
        calls.push(begin(more).await);
        held += more - FREE;
        eventually("it is held", async || {
            let bytes = server.metric("tollgate_message_bytes").await;
            (bytes == u64::try_from(held).unwrap()).then_some(())
        })
        .await;
    }
    let (response, _body) = begin(message.len() - 1).await;
    let refused = timeout(PATIENCE, response).await.expect("an answer").unwrap();
    let field = |name: &str| refused.headers().get(name).map(|value| value.to_str().unwrap());
    assert_eq!((field("grpc-status"), field("retry-after")), (Some("14"), Some("5")));
    // Over HTTP they are counted with them, and who has little to say is heard.
    let http = server.http().await;
    let large = async |status| {
        let body = "x".repeat(5000);
        let post = "POST /json HTTP/1.1\r\nhost: edge\r\nconnection: close\r\ncontent-length";
        let reply = exchange(http, &format!("{post}: {}\r\n\r\n{body}", body.len())).await?;
        (reply.status == status).then_some(reply)
    };
    let refused = eventually("a large body is refused", async || large(503).await).await;
    assert_eq!(refused.header("retry-after"), "5");
    assert!(server.metric(r#"tollgate_shed_total{full="messages"}"#).await >= 2);
    unhurt(&mut server, &caller, "half messages").await;
    assert!(server.process().peak() < 256 << 20, "{}", server.process().most());

    connection.abort();
    eventually("there is room for it again", async || large(400).await).await;
}
