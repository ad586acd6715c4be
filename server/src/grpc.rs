//! gRPC: which services are mounted, and what surrounds them.

mod deadline;
mod envoy_rls;
mod known;
mod native;
mod status;

use crate::engine::Engine;
use crate::listen::Connection;
use crate::shed::Gate;
use crate::tokens::Tokens;
use http_body_util::BodyExt as _;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::Stream;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_server as rls;
use tollgate_proto::v1::rate_limiter_server::{RateLimiterServer, SERVICE_NAME};
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic::transport::Server;
use tonic_health::pb::health_server::{Health, HealthServer};
use tower::util::MapRequestLayer;

/// The services whose health is told: the server as a whole, and each of its own.
/// Envoy's own rate limit service calls itself `ratelimit`.
pub(crate) const SERVICES: [&str; 4] = ["", SERVICE_NAME, rls::SERVICE_NAME, "ratelimit"];

/// Under this name health tells whether the store is asked as well: a server that decides without it serves, and is
/// not ready.
pub(crate) const READY: &str = "ready";

/// What HTTP/2 begins with, in bytes: a preface, and a frame of settings that may be empty.
pub(crate) const BEGINNING: usize = 24 + 9;

/// Calls that one connection may have in flight.
const MAX_STREAMS: u32 = 1024;

/// Calls of one connection that were given up before they were looked at. A gateway may give up all that it has in flight
/// at once, as when this process stood still for a moment; more than that ends the connection, and all calls on it.
const MAX_GIVEN_UP: usize = 1024;

/// All header fields of a call together, in bytes.
const MAX_HEADERS: u32 = 16 << 10;

/// A peer that nothing was heard of for so long is asked whether it is there, and has so long to answer.
const SILENCE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// A call has so long to say what it wants and to be answered. More than any wait for the store.
const LONGEST: Duration = Duration::from_secs(20);

/// How long calls in flight may take to finish when their connection has come of age.
const GRACE: Duration = Duration::from_secs(30);

/// Serves these connections until `shutdown`, then finishes what is in flight.
///
/// # Errors
/// The transport broke down.
pub(crate) async fn serve(
    engine: Arc<Engine>,
    gate: Arc<Gate>,
    health: HealthServer<impl Health>,
    incoming: impl Stream<Item = io::Result<Connection>>,
    age: Duration,
    tokens: Arc<Tokens>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let native = native::Native::new(engine.clone(), gate.clone());
    let envoy = envoy_rls::Rls::new(engine, gate.clone());
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(tollgate_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET)
            .include_reflection_service(false)
    };
    Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_pending_accept_reset_streams(Some(MAX_GIVEN_UP))
        .http2_max_header_list_size(MAX_HEADERS)
        .http2_keepalive_interval(Some(SILENCE.0))
        .http2_keepalive_timeout(Some(SILENCE.1))
        .max_connection_age(age)
        .max_connection_age_grace(GRACE)
        .timeout(LONGEST)
        .layer(known::Known(tokens))
        .layer(deadline::Deadlines)
        .layer(MapRequestLayer::new(move |request: Request<Body>| {
            request.map(|body| Body::new(gate.measure(body).map_err(status::broken)))
        }))
        .add_service(RateLimiterServer::new(native))
        .add_service(rls::RateLimitServiceServer::new(envoy))
        .add_service(health)
        .add_service(reflection().build_v1()?)
        // grpcurl asks for either, depending on its age.
        .add_service(reflection().build_v1alpha()?)
        .serve_with_incoming_shutdown(incoming, shutdown)
        .await?;
    Ok(())
}
