//! HTTP by hand: one exchange on a connection of its own.

use super::DEADLINE;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// What came back.
pub(crate) struct Reply {
    pub(crate) status: u16,
    headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

/// What an HTTP/1.1 server answers before it closes the connection; nothing if it can not be asked.
pub(crate) async fn exchange(at: SocketAddr, request: &str) -> Option<Reply> {
    let exchange = async {
        let mut stream = TcpStream::connect(at).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await?;
        std::io::Result::Ok(reply)
    };
    let reply = timeout(DEADLINE, exchange).await.expect("an answer in time").ok()?;
    let (head, body) = reply.split_once("\r\n\r\n")?;
    let mut lines = head.lines();
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let header = |line: &str| {
        let (name, value) = line.split_once(": ").unwrap();
        (name.to_owned(), value.to_owned())
    };
    Some(Reply { status, headers: lines.map(header).collect(), body: body.to_owned() })
}
