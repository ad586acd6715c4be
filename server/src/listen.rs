//! Connections: how many there may be at a time, of all peers and of one, and how long one may take to begin.
//!
//! What is beyond a bound is closed at once, so that who is served goes on being served; what is slow to begin waits
//! for nobody but itself.

use crate::clock::instant;
use crate::telemetry::metric;
use crate::tls::Identity;
use metrics::{Gauge, counter, gauge};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Sender, channel};
use tokio::time::{Instant, sleep, timeout};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::either::Either;
use tonic::transport::server::Connected;

/// How long a handshake may take, or the header fields of a request.
pub(crate) const BEGINNING: Duration = Duration::from_secs(5);

/// How long a peer may read nothing of what it is told.
const UNREAD: Duration = Duration::from_secs(20);

/// After the system could not make a connection, which it may have no files left for.
const PAUSE: Duration = Duration::from_millis(50);

/// Refusals are told so often in the log at most.
const TELL: Duration = Duration::from_secs(10);

/// Connections that have begun and wait to be served.
const WAITING: usize = 16;

/// What is asked of connections, and how many there may be at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// What the metrics call where they come to.
    pub(crate) listener: &'static str,
    /// Bytes that a peer has to say before it may be silent. Until then each wait is as short as that for a handshake.
    pub(crate) beginning: usize,
    /// Of all peers.
    pub(crate) most: usize,
    /// Of one: an address, or the first half of one where addresses are long.
    pub(crate) most_by_peer: usize,
}

/// The connections that come to this listener, until it is dropped. By TLS, if there is somebody to be.
pub(crate) fn incoming(
    listener: TcpListener,
    bounds: Bounds,
    identity: Option<Arc<Identity>>,
) -> ReceiverStream<io::Result<Connection>> {
    let (begun, incoming) = channel(WAITING);
    tokio::spawn(accept(listener, bounds, identity, begun));
    ReceiverStream::new(incoming)
}

async fn accept(
    listener: TcpListener,
    bounds: Bounds,
    identity: Option<Arc<Identity>>,
    begun: Sender<io::Result<Connection>>,
) {
    let open = Arc::new(Mutex::new(Open::default()));
    let mut refusals = Refusals::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = begun.closed() => return,
        };
        match accepted {
            Ok((stream, peer)) => match Place::take(&open, &bounds, peer.ip()) {
                Ok(place) => {
                    tokio::spawn(begin(stream, place, bounds.beginning, identity.clone(), begun.clone()));
                }
                Err(full) => refusals.note(&full),
            },
            Err(error) => {
                refusals.note(&error.to_string());
                sleep(PAUSE).await;
            }
        }
    }
}

async fn begin(
    stream: TcpStream,
    place: Place,
    beginning: usize,
    identity: Option<Arc<Identity>>,
    begun: Sender<io::Result<Connection>>,
) {
    // Without it a small answer waits for more to come; a connection that is gone already is seen below.
    stream.set_nodelay(true).unwrap_or_default();
    let stream = match identity {
        None => Either::Left(stream),
        Some(identity) => match timeout(BEGINNING, identity.acceptor().accept(stream)).await {
            Ok(Ok(stream)) => Either::Right(Box::new(stream)),
            Ok(Err(error)) => return tracing::debug!("a handshake failed: {error}"),
            Err(_) => return tracing::debug!("a handshake took longer than {BEGINNING:?}"),
        },
    };
    // If nobody takes it any more the server is ending.
    begun.send(Ok(Connection::new(stream, beginning, place))).await.unwrap_or_default();
}

/// How many connections are open.
#[derive(Debug, Default)]
struct Open {
    all: usize,
    by_peer: HashMap<IpAddr, usize>,
}

/// A place for one connection, until it is dropped.
#[derive(Debug)]
struct Place {
    open: Arc<Mutex<Open>>,
    peer: IpAddr,
    listener: &'static str,
}

impl Place {
    fn take(open: &Arc<Mutex<Open>>, bounds: &Bounds, address: IpAddr) -> Result<Self, String> {
        let peer = peer(address);
        let mut now = open.lock();
        if now.all >= bounds.most {
            return Err(format!("max_connections: {} are open, as many as may be", bounds.most));
        }
        let by_peer = now.by_peer.entry(peer).or_default();
        if *by_peer >= bounds.most_by_peer {
            return Err(format!(
                "max_connections_per_peer: {} are open from {peer}, as many as may be",
                bounds.most_by_peer
            ));
        }
        *by_peer += 1;
        now.all += 1;
        drop(now);
        let place = Self { open: open.clone(), peer, listener: bounds.listener };
        place.gauge().increment(1);
        Ok(place)
    }

    fn gauge(&self) -> Gauge {
        gauge!(metric::CONNECTIONS, "listener" => self.listener)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.gauge().decrement(1);
        let mut open = self.open.lock();
        open.all -= 1;
        if let Some(by_peer) = open.by_peer.get_mut(&self.peer) {
            *by_peer -= 1;
            if *by_peer == 0 {
                open.by_peer.remove(&self.peer);
            }
        }
    }
}

/// Whoever has an IPv6 address has 2^64 of them.
fn peer(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        IpAddr::V4(address) => address.into(),
    }
}

/// What was refused and not yet told.
#[derive(Debug, Default)]
struct Refusals {
    count: u64,
    told: Option<Instant>,
}

impl Refusals {
    fn note(&mut self, why: &str) {
        self.count += 1;
        counter!(metric::CONNECTIONS_REFUSED).increment(1);
        if self.told.is_none_or(|told| told.elapsed() >= TELL) {
            tracing::warn!(connections = self.count, "refused: {why}");
            *self = Self { count: 0, told: Some(instant()) };
        }
    }
}

type Stream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// A connection that has begun. It fails where a peer does not go on with that, and where it does not read.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Pin<Box<TimeoutStream<Stream>>>,
    beginning: usize,
    _place: Place,
}

impl Connection {
    fn new(stream: Stream, beginning: usize, place: Place) -> Self {
        let mut stream = TimeoutStream::new(stream);
        stream.set_read_timeout((beginning > 0).then_some(BEGINNING));
        stream.set_write_timeout(Some(UNREAD));
        Self { stream: Box::pin(stream), beginning, _place: place }
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = self.stream.as_mut().poll_read(cx, buffer);
        if self.beginning > 0 {
            self.beginning = self.beginning.saturating_sub(buffer.filled().len() - before);
            if self.beginning == 0 {
                self.stream.as_mut().set_read_timeout_pinned(None);
            }
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_as_may_be_of_all_and_of_one() {
        let open = Arc::new(Mutex::new(Open::default()));
        let bounds = Bounds { listener: "grpc", beginning: 0, most: 4, most_by_peer: 2 };
        let take = |address: &str| Place::take(&open, &bounds, address.parse().unwrap());
        let two = [take("10.0.0.1").unwrap(), take("::ffff:10.0.0.1").unwrap()];
        let error = take("10.0.0.1").unwrap_err();
        assert_eq!(error, "max_connections_per_peer: 2 are open from 10.0.0.1, as many as may be");
        let long = [take("2001:db8::1").unwrap(), take("2001:db8::ffff:0:0:2").unwrap()];
        assert_eq!(take("10.0.0.2").unwrap_err(), "max_connections: 4 are open, as many as may be");
        drop(two);
        assert!(take("2001:db8::3").unwrap_err().contains("from 2001:db8::"));
        let again = [take("2001:db8:0:1::1").unwrap(), take("10.0.0.1").unwrap()];
        drop((long, again));
        assert!(open.lock().all == 0 && open.lock().by_peer.is_empty(), "{open:?}");
    }
}
