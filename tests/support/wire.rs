//! A network between Tollgate and a Redis, or a gateway and Tollgate, that can be slow and be cut.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::sleep_until;
use tollgate_server::clock::instant;

/// What happens on it. It is gone when it is dropped.
pub(crate) struct Wire {
    address: SocketAddr,
    weather: Arc<Weather>,
    accepting: JoinHandle<()>,
}

#[derive(Default)]
struct Weather {
    /// In milliseconds, on the way back.
    delay: AtomicU64,
    /// Nobody gets through: what comes is taken and forgotten, both ways.
    parted: AtomicBool,
    cut: Notify,
    connections: AtomicU64,
}

impl Wire {
    /// To whoever listens on that port.
    pub(crate) async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let weather = Arc::new(Weather::default());
        let of_connections = weather.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let weather = of_connections.clone();
                weather.connections.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move {
                    let Ok(far) = TcpStream::connect(("127.0.0.1", port)).await else { return };
                    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
                    let cut = weather.cut.notified();
                    tokio::select! {
                        () = carry(near_in, far_out, &weather, false) => {}
                        () = carry(far_in, near_out, &weather, true) => {}
                        // What was on its way is lost.
                        () = cut => {}
                    }
                });
            }
        });
        Self { address, weather, accepting }
    }

    /// As Tollgate's `store` takes it.
    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// As a gateway takes it.
    pub(crate) fn http(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How many connections were made so far.
    pub(crate) fn connections(&self) -> u64 {
        self.weather.connections.load(Ordering::Relaxed)
    }

    /// From now on answers take that much longer.
    pub(crate) fn delay(&self, by: Duration) {
        self.weather.delay.store(by.as_millis().try_into().unwrap(), Ordering::Relaxed);
    }

    /// Ends all connections, with what was on its way. New ones can be made.
    pub(crate) fn cut(&self) {
        self.weather.cut.notify_waiters();
    }

    /// Nothing gets through until it does again; connections stay.
    pub(crate) fn part(&self, parted: bool) {
        self.weather.parted.store(parted, Ordering::Relaxed);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

async fn carry(mut from: tcp::OwnedReadHalf, mut to: tcp::OwnedWriteHalf, weather: &Weather, is_back: bool) {
    let mut bytes = vec![0; 1 << 16];
    loop {
        let Ok(read @ 1..) = from.read(&mut bytes).await else { return };
        if is_back {
            let delay = Duration::from_millis(weather.delay.load(Ordering::Relaxed));
            sleep_until(instant() + delay).await;
        }
        if !weather.parted.load(Ordering::Relaxed) && to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}
