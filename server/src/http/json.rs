//! `POST /json`: a `RateLimitRequest` as proto3 JSON, answered by a `RateLimitResponse` as proto3 JSON.

use super::State;
use crate::clock::instant;
use crate::engine::Refusal;
use crate::rls;
use crate::shed::{Full, RETRY_AFTER};
use axum::body::Bytes;
use axum::extract::State as Of;
use axum::extract::rejection::BytesRejection;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use prost_types::Duration;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration as Span;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

/// Nobody waits longer for an answer.
const PATIENCE: Span = Span::from_secs(5);

/// What the messages look like, for their JSON.
#[derive(Clone)]
pub(super) struct Messages(Arc<Option<(MessageDescriptor, MessageDescriptor)>>);

impl Default for Messages {
    fn default() -> Self {
        let found = DescriptorPool::decode(tollgate_proto::DESCRIPTORS).ok().and_then(|pool| {
            let message =
                |name: &str| pool.get_message_by_name(&format!("envoy.service.ratelimit.v3.{name}"));
            Some((message("RateLimitRequest")?, message("RateLimitResponse")?))
        });
        Self(Arc::new(found))
    }
}

impl Messages {
    fn read(&self, body: &[u8]) -> Result<RateLimitRequest, String> {
        let Some((request, _)) = &*self.0 else { return Err("no such message".to_owned()) };
        let mut json = serde_json::Deserializer::from_slice(body);
        let message =
            DynamicMessage::deserialize(request.clone(), &mut json).map_err(|error| error.to_string())?;
        json.end().map_err(|error| error.to_string())?;
        message.transcode_to().map_err(|error| error.to_string())
    }

    fn write(&self, response: &RateLimitResponse) -> Result<String, String> {
        let Some((_, message)) = &*self.0 else { return Err("no such message".to_owned()) };
        let mut dynamic = DynamicMessage::new(message.clone());
        dynamic.transcode_from(response).map_err(|error| error.to_string())?;
        serde_json::to_string(&dynamic).map_err(|error| error.to_string())
    }
}

/// 200 and 429; 400 for what can not be asked, 503 where the store can not be.
pub(super) async fn decide(Of(state): Of<State>, body: Result<Bytes, BytesRejection>) -> Response {
    let body = match body {
        Ok(body) => body,
        Err(rejected) => return full(&rejected).map_or_else(|| rejected.into_response(), shed),
    };
    let _place = match state.gate.enter() {
        Ok(place) => place,
        Err(full) => return shed(full),
    };
    let asked = match state.messages.read(&body) {
        Ok(request) => rls::described(request, instant().checked_add(PATIENCE)),
        Err(wrong) => return (StatusCode::BAD_REQUEST, format!("body: {wrong}")).into_response(),
    };
    let decided = match asked {
        Ok(asked) => state.engine.should_descriptors_pass(asked).await,
        Err(refusal) => Err(refusal),
    };
    let joined = match decided.inspect_err(Refusal::count) {
        Ok(joined) => joined,
        Err(refusal @ (Refusal::Store(_) | Refusal::DeadlinePassed)) => {
            return (StatusCode::SERVICE_UNAVAILABLE, refusal.to_string()).into_response();
        }
        Err(refusal) => return (StatusCode::BAD_REQUEST, refusal.to_string()).into_response(),
    };
    let unavailable = joined.unavailable;
    let response = RateLimitResponse::from(joined);
    let status = match response.overall_code() {
        Code::OverLimit if unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
        Code::Ok | Code::Unknown => StatusCode::OK,
    };
    match state.messages.write(&response) {
        Ok(json) => {
            let mut answer = (status, [(header::CONTENT_TYPE, "application/json")], json).into_response();
            if status != StatusCode::OK {
                answer.headers_mut().insert(header::RETRY_AFTER, retry_after(&response).into());
            }
            answer
        }
        Err(wrong) => (StatusCode::INTERNAL_SERVER_ERROR, wrong).into_response(),
    }
}

/// Refused by load.
fn shed(full: Full) -> Response {
    let wait = [(header::RETRY_AFTER, RETRY_AFTER.as_secs().to_string())];
    (StatusCode::SERVICE_UNAVAILABLE, wait, full.to_string()).into_response()
}

/// Is that why a body did not come in?
fn full(error: &(dyn Error + 'static)) -> Option<Full> {
    error.downcast_ref().copied().or_else(|| full(error.source()?))
}

/// The longest of those that are over.
fn retry_after(response: &RateLimitResponse) -> u64 {
    let over = response.statuses.iter().filter(|status| status.code() == Code::OverLimit);
    let resets = over.filter_map(|status| status.duration_until_reset.as_ref());
    let longest = resets.map(|Duration { seconds, .. }| *seconds).max();
    longest.and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or(1)
}
