//! A service in this process, for what needs one to borrow from: a bucket for each key, lent out as a service does
//! that knows how to. Plenty is granted at once, what is scarce is spread over a while, and a denial comes with a
//! time that it stands for.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tollgate_proto::v1;
use tollgate_proto::v1::rate_limiter_server::{RateLimiter, RateLimiterServer};
use tonic::{Request, Response, Status, async_trait};

/// How it lends.
const LIFE: Duration = Duration::from_millis(500);
const SPREAD: Duration = Duration::from_millis(60);

pub(crate) struct Stub {
    rate: u64,
    burst: u64,
    clock: quanta::Clock,
    start: quanta::Instant,
    buckets: Mutex<HashMap<String, (u64, Duration)>>,
    seq: AtomicU64,
}

impl Stub {
    /// Serves buckets of this rate a second and burst until the runtime ends.
    pub(crate) async fn serve(rate: u64, burst: u64) -> String {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let clock = quanta::Clock::new();
        let start = clock.now();
        let stub = Self { rate, burst, clock, start, buckets: Mutex::default(), seq: AtomicU64::default() };
        let server = tonic::transport::Server::builder().add_service(RateLimiterServer::new(stub));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        url
    }

    /// Takes up to `n` out of a bucket, in millionths of a token; returns what was taken and what is left.
    fn take(&self, key: &str, n: u64, at_least: u64) -> (u64, u64) {
        let now = self.clock.now() - self.start;
        let mut buckets = self.buckets.lock().unwrap();
        let full = self.burst * 1_000_000;
        let (level, at) = buckets.entry(key.into()).or_insert((full, now));
        let came = u64::try_from(now.saturating_sub(*at).as_micros()).unwrap() * self.rate;
        (*level, *at) = ((*level + came).min(full), now);
        let taken = n.min(*level / 1_000_000);
        let taken = if taken < at_least { 0 } else { taken };
        *level -= taken * 1_000_000;
        (taken, *level)
    }
}

fn span(span: Duration) -> Option<prost_types::Duration> {
    span.try_into().ok()
}

#[async_trait]
impl RateLimiter for Stub {
    async fn should_rate_limit(
        &self,
        request: Request<v1::ShouldRateLimitRequest>,
    ) -> Result<Response<v1::ShouldRateLimitResponse>, Status> {
        let v1::ShouldRateLimitRequest { key, cost, .. } = request.into_inner();
        let cost = cost.unwrap_or(1);
        let (taken, level) = self.take(&key, cost.into(), cost.into());
        let verdict = if taken == u64::from(cost) { v1::Verdict::Allow } else { v1::Verdict::Deny };
        Ok(Response::new(v1::ShouldRateLimitResponse {
            verdict: verdict.into(),
            limit: self.burst,
            remaining: level / 1_000_000,
            retry_after: span(Duration::from_micros(1_000_000_u64.saturating_sub(level).div_ceil(self.rate))),
            reason: v1::Reason::OverLimit.into(),
            window: span(Duration::from_secs(1) * u32::try_from(self.burst / self.rate).unwrap_or(1)),
            ..v1::ShouldRateLimitResponse::default()
        }))
    }

    async fn borrow(
        &self,
        request: Request<v1::BorrowRequest>,
    ) -> Result<Response<v1::BorrowResponse>, Status> {
        let v1::BorrowRequest { key, n, returns, demand_per_s, .. } = request.into_inner();
        for back in returns {
            self.give_back(&back);
        }
        let (_, level) = self.take(&key, 0, 0);
        let plenty = level / 2_000_000 >= u64::from(n.min(demand_per_s / 4 + 1));
        let wish = if plenty { u64::from(n).min(level / 2_000_000) } else { u64::from(n) };
        let (granted, level) = self.take(&key, wish, 1);
        let lease_id = format!("{}:{key}", self.seq.fetch_add(1, Relaxed));
        Ok(Response::new(v1::BorrowResponse {
            lease_id: if granted > 0 { lease_id } else { String::new() },
            granted: u32::try_from(granted).unwrap(),
            valid_for: span(LIFE),
            spread_over: span(SPREAD).filter(|_| !plenty),
            limit: self.burst,
            remaining: level / 1_000_000,
            retry_after: span(SPREAD).filter(|_| granted == 0),
            leasable: true,
            cost: 1,
            ..v1::BorrowResponse::default()
        }))
    }

    async fn r#return(
        &self,
        request: Request<v1::ReturnRequest>,
    ) -> Result<Response<v1::ReturnResponse>, Status> {
        let back = request.into_inner();
        self.give_back(&back);
        Ok(Response::new(v1::ReturnResponse { credited: back.unused }))
    }
}

impl Stub {
    fn give_back(&self, back: &v1::ReturnRequest) {
        let Some((_, key)) = back.lease_id.split_once(':') else { return };
        if let Some((level, _)) = self.buckets.lock().unwrap().get_mut(key) {
            *level = (*level + u64::from(back.unused) * 1_000_000).min(self.burst * 1_000_000);
        }
    }
}
