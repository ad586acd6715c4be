//! `GET /metrics`: for Prometheus.

use super::State;
use crate::telemetry::metric;
use axum::extract::State as Of;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use metrics::gauge;

/// What the text is, in the words of its format.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What was counted so far, and how it is now.
pub(super) async fn scrape(Of(state): Of<State>) -> Response {
    let Some(counted) = &state.counted else {
        return (StatusCode::NOT_FOUND, "nothing is counted here").into_response();
    };
    gauge!(metric::IN_FLIGHT).set(metric::many(state.gate.inside()));
    gauge!(metric::MESSAGE_BYTES).set(metric::many(state.gate.held()));
    ([(header::CONTENT_TYPE, TEXT)], counted.render()).into_response()
}
