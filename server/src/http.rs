//! HTTP: what Envoy's rate limit service serves beside gRPC.

mod json;
mod metrics;

use crate::engine::Engine;
use crate::listen::{BEGINNING, Connection};
use crate::reload::Reload;
use crate::shed::Gate;
use crate::store::Health;
use crate::tokens::Tokens;
use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request, State as Of};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use metrics_exporter_prometheus::PrometheusHandle;
use std::fmt::Write as _;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tokio_stream::{Stream, StreamExt as _};
use tower::util::MapRequestLayer;

/// No body is larger, in bytes.
const MOST_BYTES: usize = 1 << 20;

/// A request has so long to say what it wants and to be answered.
const LONGEST: Duration = Duration::from_secs(20);

/// What the answers are made of.
#[derive(Clone)]
pub(crate) struct State {
    engine: Arc<Engine>,
    gate: Arc<Gate>,
    reload: Arc<Reload>,
    health: watch::Receiver<Health>,
    serving: Arc<AtomicBool>,
    tokens: Arc<Tokens>,
    counted: Option<PrometheusHandle>,
    messages: json::Messages,
}

impl State {
    pub(crate) fn new(
        engine: Arc<Engine>,
        gate: Arc<Gate>,
        reload: Arc<Reload>,
        health: watch::Receiver<Health>,
        serving: Arc<AtomicBool>,
        tokens: Arc<Tokens>,
        counted: Option<PrometheusHandle>,
    ) -> Self {
        let messages = json::Messages::default();
        Self { engine, gate, reload, health, serving, tokens, counted, messages }
    }
}

/// Serves these connections until it ended, then finishes what is in flight.
pub(crate) async fn serve(
    state: State,
    incoming: impl Stream<Item = io::Result<Connection>>,
    ended: Arc<Notify>,
) {
    let gate = state.gate.clone();
    let router = Router::new()
        .route("/json", post(json::decide))
        .route("/rlconfig", get(rlconfig))
        .route("/metrics", get(metrics::scrape))
        .route_layer(from_fn_with_state(state.clone(), known))
        .route("/healthcheck", get(healthcheck))
        .route("/ready", get(ready))
        .layer(DefaultBodyLimit::max(MOST_BYTES))
        .layer(MapRequestLayer::new(move |request: Request| {
            request.map(|body| Body::new(gate.measure(body)))
        }))
        .layer(from_fn(in_time))
        .with_state(state);
    // What axum would serve by has no clock, and so waits for header fields for ever.
    let mut http = auto::Builder::new(TokioExecutor::new()).http1_only();
    http.http1().timer(TokioTimer::new()).header_read_timeout(BEGINNING);
    let connections = GracefulShutdown::new();
    let mut incoming = pin!(incoming);
    loop {
        let connection = tokio::select! {
            connection = incoming.next() => connection,
            () = ended.notified() => break,
        };
        let Some(Ok(connection)) = connection else { break };
        let service = TowerToHyperService::new(router.clone());
        let served = http.serve_connection(TokioIo::new(connection), service).into_owned();
        let served = connections.watch(served);
        tokio::spawn(async move {
            if let Err(error) = served.await {
                tracing::debug!("a connection of HTTP failed: {error}");
            }
        });
    }
    connections.shutdown().await;
}

async fn in_time(request: Request, next: Next) -> Response {
    match timeout(LONGEST, next.run(request)).await {
        Ok(answer) => answer,
        Err(_) => (StatusCode::REQUEST_TIMEOUT, format!("not said within {LONGEST:?}")).into_response(),
    }
}

/// Only who shows a token is heard. Health is told to everybody.
async fn known(Of(state): Of<State>, request: Request, next: Next) -> Response {
    let shown = request.headers().get(header::AUTHORIZATION);
    match state.tokens.check(shown.map(HeaderValue::as_bytes)) {
        Ok(()) => next.run(request).await,
        Err(stranger) => {
            let how = [(header::WWW_AUTHENTICATE, "Bearer")];
            (StatusCode::UNAUTHORIZED, how, stranger.to_string()).into_response()
        }
    }
}

/// Does it serve? It does until it is told to stop, with its store or without.
async fn healthcheck(Of(state): Of<State>) -> (StatusCode, &'static str) {
    if state.serving.load(Ordering::Relaxed) {
        (StatusCode::OK, "OK")
    } else {
        (StatusCode::INTERNAL_SERVER_ERROR, "stopping")
    }
}

/// Does it serve with its store? If not, why.
async fn ready(Of(state): Of<State>) -> (StatusCode, String) {
    let not = if state.serving.load(Ordering::Relaxed) {
        state.health.borrow().degraded.as_ref().map(|why| format!("degraded: {why}"))
    } else {
        Some("stopping".to_owned())
    };
    not.map_or_else(|| (StatusCode::OK, "ready".to_owned()), |not| (StatusCode::SERVICE_UNAVAILABLE, not))
}

/// What is loaded, since when, and what is wrong: for people.
async fn rlconfig(Of(state): Of<State>) -> String {
    let mut text = String::new();
    let files = state.reload.files();
    for (path, read) in files.iter() {
        // Writing to a string can not fail.
        if let Some(domain) = &read.domain {
            let since = humantime::format_rfc3339_seconds(
                std::time::UNIX_EPOCH + Duration::from_micros(read.since.as_micros()),
            );
            writeln!(text, "# {}: domain {:?}, since {since}", path.display(), domain.name)
                .unwrap_or_default();
            let mut rules = domain.tree.rules();
            rules.sort_by(|a, b| a.path.cmp(&b.path));
            for rule in rules {
                let limit = rule.meter.as_ref().map_or("unlimited".to_owned(), ToString::to_string);
                writeln!(text, "{}/{}: {limit}", domain.name, rule.path).unwrap_or_default();
            }
        }
    }
    for wrong in files.wrong() {
        writeln!(text, "# wrong: {wrong}").unwrap_or_default();
    }
    text
}
