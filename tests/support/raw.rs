//! gRPC by hand, on HTTP/2 as it is: what no well-behaved client sends.

use super::calls::answer;
use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, Request};
use std::net::SocketAddr;
use tokio::net::TcpStream;
use tonic::{Code, Status};

/// The path of the decision.
pub(crate) const SHOULD_RATE_LIMIT: &str = "/tollgate.v1.RateLimiter/ShouldRateLimit";

/// What came back.
#[derive(Debug)]
pub(crate) struct Reply {
    /// From the trailers, or from the headers where there is nothing else.
    pub(crate) status: Status,
    /// All that was sent between them, frames and all.
    pub(crate) body: Vec<u8>,
    /// Header fields and trailers together.
    pub(crate) fields: HeaderMap,
}

impl Reply {
    /// Its status code.
    pub(crate) fn code(&self) -> Code {
        self.status.code()
    }
}

/// A message as gRPC frames it: not compressed, its length, its bytes.
pub(crate) fn framed(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(message.len() + 5);
    frame.put_u8(0);
    frame.put_u32(message.len().try_into().unwrap());
    frame.put_slice(message);
    frame.freeze()
}

/// One call on a connection of its own: these header fields and these bytes, whatever they are.
pub(crate) async fn call(server: SocketAddr, path: &str, fields: &[(&str, &str)], body: Bytes) -> Reply {
    send(server, path, fields, Some(body)).await
}

/// One call that never says what it wants.
pub(crate) async fn call_without_end(server: SocketAddr, path: &str, fields: &[(&str, &str)]) -> Reply {
    send(server, path, fields, None).await
}

async fn send(server: SocketAddr, path: &str, fields: &[(&str, &str)], body: Option<Bytes>) -> Reply {
    answer(async {
        let tcp = TcpStream::connect(server).await.unwrap();
        let (mut client, connection) = h2::client::handshake(tcp).await.unwrap();
        let connection = tokio::spawn(connection);
        let mut request = Request::post(format!("http://{server}{path}"))
            .header("te", "trailers")
            .header("content-type", "application/grpc");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let (response, mut stream) = client.send_request(request.body(()).unwrap(), false).unwrap();
        if let Some(body) = body {
            // Refused before it is all sent, it need not be taken to the end.
            stream.send_data(body, true).ok();
        }

        let (head, mut incoming) = response.await.unwrap().into_parts();
        let mut body = Vec::new();
        while let Some(data) = incoming.data().await {
            let data = data.unwrap();
            incoming.flow_control().release_capacity(data.len()).unwrap();
            body.extend_from_slice(&data);
        }
        let mut fields = head.headers;
        fields.extend(incoming.trailers().await.unwrap().unwrap_or_default());
        connection.abort();
        let status = Status::from_header_map(&fields).expect("a grpc-status");
        Reply { status, body, fields }
    })
    .await
}
