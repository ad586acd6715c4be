//! `envoy.service.ratelimit.v3.RateLimitService`: what Envoy asks, and what its own rate limit service answers.

use super::{deadline, status};
use crate::engine::Engine;
use crate::rls;
use crate::shed::Gate;
use std::sync::Arc;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::{Request, Response, Status, async_trait};

pub(super) struct Rls {
    engine: Arc<Engine>,
    gate: Arc<Gate>,
}

impl Rls {
    pub(super) fn new(engine: Arc<Engine>, gate: Arc<Gate>) -> Self {
        Self { engine, gate }
    }
}

#[async_trait]
impl RateLimitService for Rls {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let deadline = deadline::of(&request);
        let _place = self.gate.enter().map_err(status::shed)?;
        let asked = rls::described(request.into_inner(), deadline).map_err(|r| status::refused(&r))?;
        let joined = self.engine.should_descriptors_pass(asked).await.map_err(|r| status::refused(&r))?;
        Ok(Response::new(joined.into()))
    }
}
