//! The service as it is reached: its endpoints, one at a time, and a deadline on every call.
//!
//! All endpoints are instances on one store, so any of them will do. One is used until it fails; then the next one
//! is. A call that could not even be sent goes to the next endpoint at once, within the same deadline. One that may
//! have arrived is not sent again: it may have been charged.

use crate::error::Error;
use crate::leases::{Return, Wish};
use std::future::Future;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;
use tollgate_proto::v1;
use tollgate_proto::v1::rate_limiter_client::RateLimiterClient;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, ConnectError, Request, Response, Status};

type Stub = RateLimiterClient<Channel>;

pub(crate) type Authorization = MetadataValue<Ascii>;

/// An idle connection is looked after, so that a dead one is noticed before it is needed.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(2));

#[derive(Debug)]
pub(crate) struct Service {
    stubs: Vec<Stub>,
    current: AtomicUsize,
    deadline: Duration,
    gateway: String,
    /// What each call shows.
    token: Option<Authorization>,
    calls: AtomicU64,
}

impl Service {
    /// Connects with the first call. There is at least one endpoint.
    pub(crate) fn new(
        endpoints: Vec<Endpoint>,
        deadline: Duration,
        gateway: String,
        token: Option<Authorization>,
    ) -> Self {
        let connect = |endpoint: Endpoint| {
            let endpoint = endpoint
                .connect_timeout(deadline)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(KEEP_ALIVE.0)
                .keep_alive_timeout(KEEP_ALIVE.1)
                .keep_alive_while_idle(true);
            RateLimiterClient::new(endpoint.connect_lazy())
        };
        // Gateways that start together do not all begin with the same instance.
        let current = AtomicUsize::new(fastrand::usize(..endpoints.len().max(1)));
        Self {
            stubs: endpoints.into_iter().map(connect).collect(),
            current,
            deadline,
            gateway,
            token,
            calls: AtomicU64::new(0),
        }
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// How often it has been called.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    pub(crate) async fn ask(
        &self,
        key: &str,
        class: &str,
        cost: Option<u32>,
    ) -> Result<v1::ShouldRateLimitResponse, Error> {
        let ask = v1::ShouldRateLimitRequest { key: key.into(), class: class.into(), cost };
        self.call(ask, async |mut stub: Stub, ask| stub.should_rate_limit(ask).await).await
    }

    pub(crate) async fn borrow(
        &self,
        key: &str,
        class: &str,
        wish: Wish,
    ) -> Result<v1::BorrowResponse, Error> {
        let borrow = v1::BorrowRequest {
            key: key.into(),
            class: class.into(),
            n: wish.n,
            gateway: self.gateway.clone(),
            seq: wish.seq,
            demand_per_s: wish.demand_per_s,
            returns: wish.returns.into_iter().map(Into::into).collect(),
            denied: wish.denied,
        };
        self.call(borrow, async |mut stub: Stub, borrow| stub.borrow(borrow).await).await
    }

    pub(crate) async fn give_back(&self, back: Return) -> Result<v1::ReturnResponse, Error> {
        let back = v1::ReturnRequest::from(back);
        self.call(back, async |mut stub: Stub, back| stub.r#return(back).await).await
    }

    async fn call<M, R, F>(&self, message: M, send: impl Fn(Stub, Request<M>) -> F) -> Result<R, Error>
    where
        M: Clone,
        F: Future<Output = Result<Response<R>, Status>>,
    {
        self.calls.fetch_add(1, Relaxed);
        let calling = async {
            let mut status = Status::unavailable("there is no endpoint");
            for _ in &self.stubs {
                let at = self.current.load(Relaxed);
                let Some(stub) = self.stubs.get(at % self.stubs.len()) else { break };
                let mut request = Request::new(message.clone());
                request.set_timeout(self.deadline);
                if let Some(token) = &self.token {
                    request.metadata_mut().insert("authorization", token.clone());
                }
                status = match send(stub.clone(), request).await {
                    Ok(response) => return Ok(response.into_inner()),
                    Err(status) => status,
                };
                if matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded) {
                    self.leave(at);
                }
                if !was_never_sent(&status) {
                    break;
                }
            }
            Err(status.into())
        };
        let began_at = self.current.load(Relaxed);
        if let Ok(result) = tokio::time::timeout(self.deadline, calling).await {
            return result;
        }
        self.leave(began_at);
        Err(Error::Timeout(self.deadline))
    }

    /// Goes on to the next endpoint, unless somebody else has.
    fn leave(&self, at: usize) {
        let next = at.wrapping_add(1) % self.stubs.len().max(1);
        self.current.compare_exchange(at, next, Relaxed, Relaxed).ok();
    }
}

fn was_never_sent(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

impl From<Return> for v1::ReturnRequest {
    fn from(back: Return) -> Self {
        Self { lease_id: back.lease_id, unused: back.unused }
    }
}
