//! `tollgate.v1.RateLimiter`: wire types to requests, answers to wire types.

use super::{deadline, status};
use crate::engine::{Engine, Refusal};
use crate::limit::Cost;
use crate::request::{Borrow, Denial, Fallback, Lease, Request as Ask, Return, Verdict};
use crate::shed::{Gate, Place};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;
use tollgate_proto::v1;
use tonic::{Request, Response, Status, async_trait};

/// Leases that one Borrow may give back.
const MOST_RETURNS: usize = 100;

pub(super) struct Native {
    engine: Arc<Engine>,
    gate: Arc<Gate>,
}

impl Native {
    pub(super) fn new(engine: Arc<Engine>, gate: Arc<Gate>) -> Self {
        Self { engine, gate }
    }

    /// Lets a call in, unless there are too many. A class that is never limited is never refused.
    fn enter(&self, class: &str) -> Result<Option<Place<'_>>, Status> {
        if self.engine.exempt(class) {
            return Ok(None);
        }
        self.place().map(Some)
    }

    fn place(&self) -> Result<Place<'_>, Status> {
        self.gate.enter().map_err(status::shed)
    }
}

#[async_trait]
impl v1::rate_limiter_server::RateLimiter for Native {
    async fn should_rate_limit(
        &self,
        request: Request<v1::ShouldRateLimitRequest>,
    ) -> Result<Response<v1::ShouldRateLimitResponse>, Status> {
        let deadline = deadline::of(&request);
        let v1::ShouldRateLimitRequest { key, class, cost } = request.into_inner();
        let _place = self.enter(&class)?;
        let ask = Ask { key, class, cost: cost.map(Cost::from), deadline };
        let verdict = self.engine.should_rate_limit(ask).await.map_err(|r| status::refused(&r))?;
        Ok(Response::new(verdict.into()))
    }

    async fn borrow(
        &self,
        request: Request<v1::BorrowRequest>,
    ) -> Result<Response<v1::BorrowResponse>, Status> {
        let deadline = deadline::of(&request);
        let v1::BorrowRequest { key, class, n, gateway, seq, demand_per_s, denied, returns } =
            request.into_inner();
        let demand = NonZeroU32::new(demand_per_s);
        // A class that is never limited asks the store nothing, but what is returned with it does.
        let _place = if returns.is_empty() { self.enter(&class)? } else { Some(self.place()?) };
        if returns.len() > MOST_RETURNS {
            let refusal = Refusal::TooManyReturns { returns: returns.len(), most: MOST_RETURNS };
            return Err(status::refused(&refusal));
        }
        let returns =
            returns.into_iter().map(|r| Return { lease_id: r.lease_id, unused: r.unused }).collect();
        let borrow = Borrow { key, class, n, gateway, seq, demand, denied, returns, deadline };
        let lease = self.engine.borrow(borrow).await.map_err(|r| status::refused(&r))?;
        Ok(Response::new(lease.into()))
    }

    async fn r#return(
        &self,
        request: Request<v1::ReturnRequest>,
    ) -> Result<Response<v1::ReturnResponse>, Status> {
        let deadline = deadline::of(&request);
        let v1::ReturnRequest { lease_id, unused } = request.into_inner();
        let _place = self.place()?;
        let back = Return { lease_id, unused };
        let credited = self.engine.settle(&back, deadline).await.map_err(|r| status::refused(&r))?;
        Ok(Response::new(v1::ReturnResponse { credited: tokens(credited) }))
    }
}

impl From<Verdict> for v1::ShouldRateLimitResponse {
    fn from(verdict: Verdict) -> Self {
        let denied = verdict.denied;
        Self {
            verdict: if denied.is_some() { v1::Verdict::Deny } else { v1::Verdict::Allow }.into(),
            limit: verdict.limit,
            remaining: verdict.remaining,
            retry_after: denied.and_then(|_| span(verdict.retry_after)),
            reset_after: span(verdict.reset_after),
            reason: reason(denied),
            degraded: verdict.degraded,
            wait: span(verdict.wait).filter(|_| verdict.wait > Duration::ZERO),
            rule: verdict.rule,
            cost: tokens(verdict.cost),
            window: span(verdict.window),
        }
    }
}

impl From<Lease> for v1::BorrowResponse {
    fn from(lease: Lease) -> Self {
        Self {
            lease_id: lease.id.map(|id| id.as_str().to_owned()).unwrap_or_default(),
            granted: tokens(lease.granted),
            valid_for: span(lease.valid_for).filter(|_| lease.granted > Cost::ZERO),
            spread_over: span(lease.spread_over).filter(|_| lease.spread_over > Duration::ZERO),
            limit: lease.limit,
            remaining: lease.remaining,
            retry_after: lease.denied.and_then(|_| span(lease.retry_after)),
            reason: reason(lease.denied),
            leasable: lease.leasable,
            fallback: lease.fallback.map(fallback),
            degraded: lease.degraded,
            gateways: lease.gateways,
            cost: tokens(lease.cost),
        }
    }
}

#[expect(
    clippy::float_arithmetic,
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "no decision"
)]
fn fallback(fallback: Fallback) -> v1::Fallback {
    match fallback {
        Fallback::Deny => v1::Fallback { deny: true, ..v1::Fallback::default() },
        Fallback::Limit(limit) => v1::Fallback {
            rate_per_s: limit.rate().count() as f64 / limit.rate().period().as_secs_f64(),
            burst: limit.burst(),
            deny: false,
        },
    }
}

fn reason(denied: Option<Denial>) -> i32 {
    match denied {
        None => v1::Reason::Unspecified,
        Some(Denial::OverLimit) => v1::Reason::OverLimit,
        Some(Denial::Blocked) => v1::Reason::Blocked,
        Some(Denial::Unavailable) => v1::Reason::Unavailable,
    }
    .into()
}

/// No wait in here is longer than a protobuf duration can say.
fn span(span: Duration) -> Option<prost_types::Duration> {
    span.try_into().ok()
}

/// No cost in here is above what was asked for in 32 bits.
fn tokens(cost: Cost) -> u32 {
    u32::try_from(cost.get()).unwrap_or(u32::MAX)
}
