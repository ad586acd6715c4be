//! gRPC: which services are mounted, and what surrounds them.

mod deadline;
mod envoy_rls;
mod known;
mod native;
mod status;

use crate::config::ServerTls;
use crate::engine::Engine;
use crate::shed::Gate;
use crate::tokens::Token;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpListener;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_server as rls;
use tollgate_proto::v1::rate_limiter_server::{RateLimiterServer, SERVICE_NAME};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic_health::pb::health_server::{Health, HealthServer};

/// The services whose health is told: the server as a whole, and each of its own.
/// Envoy's own rate limit service calls itself `ratelimit`.
pub(crate) const SERVICES: [&str; 4] = ["", SERVICE_NAME, rls::SERVICE_NAME, "ratelimit"];

/// Under this name health tells whether the store is asked as well: a server that decides without it serves, and is
/// not ready.
pub(crate) const READY: &str = "ready";

/// Calls that one connection may have in flight.
const MAX_STREAMS: u32 = 1024;

/// Serves on `listener` until `shutdown`, then finishes what is in flight.
///
/// # Errors
/// The transport broke down.
pub(crate) async fn serve(
    engine: Arc<Engine>,
    gate: Arc<Gate>,
    health: HealthServer<impl Health>,
    listener: TcpListener,
    tls: Option<ServerTls>,
    tokens: Arc<[Token]>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let native = native::Native::new(engine.clone(), gate.clone());
    let envoy = envoy_rls::Rls::new(engine, gate);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(tollgate_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET)
            .include_reflection_service(false)
    };
    let mut server = Server::builder();
    match tls {
        Some(tls) => server = server.tls_config(identity(&tls)?)?,
        None if !listener.local_addr()?.ip().is_loopback() => {
            tracing::warn!(
                "gRPC is served beyond loopback without TLS: whoever reaches it can ask and borrow"
            );
        }
        None => {}
    }
    server
        .max_concurrent_streams(MAX_STREAMS)
        .layer(known::Known(tokens))
        .layer(deadline::Deadlines)
        .add_service(RateLimiterServer::new(native))
        .add_service(rls::RateLimitServiceServer::new(envoy))
        .add_service(health)
        .add_service(reflection().build_v1()?)
        // grpcurl asks for either, depending on its age.
        .add_service(reflection().build_v1alpha()?)
        .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), shutdown)
        .await?;
    Ok(())
}

/// As who it is served, and to whom. The files are read once, at the start.
fn identity(tls: &ServerTls) -> Result<ServerTlsConfig, String> {
    let read = |name: &str, path: &Path| {
        std::fs::read(path)
            .map_err(|error| format!("server.tls.{name}: {}: can not be read: {error}", path.display()))
    };
    let identity = Identity::from_pem(read("cert", &tls.cert)?, read("key", &tls.key)?);
    let config = ServerTlsConfig::new().identity(identity);
    Ok(match &tls.client_ca {
        Some(ca) => config.client_ca_root(Certificate::from_pem(read("client_ca", ca)?)),
        None => config,
    })
}
