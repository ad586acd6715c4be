//! A relay between a client and the real server: it counts and keeps what is asked, and loses what it is told to.

use super::calls::Caller;
use super::eventually;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio_stream::wrappers::TcpListenerStream;
use tollgate_proto::v1;
use tollgate_proto::v1::rate_limiter_server::{RateLimiter, RateLimiterServer};
use tonic::transport::{Server, ServerTlsConfig};
use tonic::{Request, Response, Status, async_trait};

/// What it does with a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Hands it on, and the answer back.
    #[default]
    Pass,
    /// Hands it on, and loses the answer: the caller waits.
    LoseReplies,
    /// Answers UNAVAILABLE in place of the server.
    Refuse,
}

/// It is gone when it is dropped.
pub(crate) struct Relay {
    address: SocketAddr,
    inner: Arc<Inner>,
    tls: Option<ServerTlsConfig>,
    serving: Option<Runtime>,
}

struct Inner {
    server: Caller,
    mode: Mutex<Mode>,
    asked: AtomicU64,
    borrows: Mutex<Vec<v1::BorrowRequest>>,
    returns: Mutex<Vec<v1::ReturnRequest>>,
}

impl Relay {
    pub(crate) async fn to(server: Caller) -> Self {
        Self::new(server, None).await
    }

    /// One that speaks TLS to its callers.
    pub(crate) async fn with_tls(server: Caller, tls: ServerTlsConfig) -> Self {
        Self::new(server, Some(tls)).await
    }

    async fn new(server: Caller, tls: Option<ServerTlsConfig>) -> Self {
        let inner = Inner {
            server,
            mode: Mutex::default(),
            asked: AtomicU64::new(0),
            borrows: Mutex::default(),
            returns: Mutex::default(),
        };
        let mut relay =
            Self { address: ([127, 0, 0, 1], 0).into(), inner: Arc::new(inner), tls, serving: None };
        relay.start().await;
        relay
    }

    /// Listens, at the same place as before.
    pub(crate) async fn start(&mut self) {
        // A runtime of its own: its connections end with it.
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let _inside = runtime.enter();
        let listener =
            eventually("its place is free", async || TcpListener::bind(self.address).await.ok()).await;
        self.address = listener.local_addr().unwrap();
        let service = RateLimiterServer::from_arc(self.inner.clone());
        let mut server = Server::builder();
        if let Some(tls) = self.tls.clone() {
            server = server.tls_config(tls).unwrap();
        }
        let serve = server.add_service(service).serve_with_incoming(TcpListenerStream::new(listener));
        runtime.spawn(serve);
        self.serving = Some(runtime);
    }

    /// Refuses connections; those that were open are cut.
    pub(crate) async fn stop(&mut self) {
        self.serving.take().into_iter().for_each(Runtime::shutdown_background);
        let address = self.address;
        eventually("it is gone", async || tokio::net::TcpStream::connect(address).await.err()).await;
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn set(&self, mode: Mode) {
        *self.inner.mode.lock().unwrap() = mode;
    }

    /// Calls of `ShouldRateLimit`.
    pub(crate) fn asked(&self) -> u64 {
        self.inner.asked.load(SeqCst)
    }

    /// All that was wished for, in order.
    pub(crate) fn borrows(&self) -> Vec<v1::BorrowRequest> {
        self.inner.borrows.lock().unwrap().clone()
    }

    /// Calls of any kind.
    pub(crate) fn calls(&self) -> u64 {
        let returns = self.inner.returns.lock().unwrap().len();
        self.asked() + u64::try_from(self.borrows().len() + returns).unwrap()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.serving.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

impl Inner {
    async fn relay<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        let mode = *self.mode.lock().unwrap();
        if mode == Mode::Refuse {
            return Err(Status::unavailable("told to refuse"));
        }
        let answer = call.await;
        if mode == Mode::LoseReplies {
            std::future::pending::<()>().await;
        }
        answer
    }
}

#[async_trait]
impl RateLimiter for Inner {
    async fn should_rate_limit(
        &self,
        request: Request<v1::ShouldRateLimitRequest>,
    ) -> Result<Response<v1::ShouldRateLimitResponse>, Status> {
        self.asked.fetch_add(1, SeqCst);
        self.relay(self.server.stub().should_rate_limit(request.into_inner())).await
    }

    async fn borrow(
        &self,
        request: Request<v1::BorrowRequest>,
    ) -> Result<Response<v1::BorrowResponse>, Status> {
        let request = request.into_inner();
        self.borrows.lock().unwrap().push(request.clone());
        self.relay(self.server.stub().borrow(request)).await
    }

    async fn r#return(
        &self,
        request: Request<v1::ReturnRequest>,
    ) -> Result<Response<v1::ReturnResponse>, Status> {
        let request = request.into_inner();
        self.returns.lock().unwrap().push(request.clone());
        self.relay(self.server.stub().r#return(request)).await
    }
}
