//! The wiring: what is made of a configuration, and how it lives. The same for `main` and for tests.

use crate::clock::Clock;
use crate::config::Config;
use crate::engine::Engine;
use crate::grpc;
use crate::http;
use crate::listen::{self, Bounds};
use crate::reload::Reload;
use crate::shed::Gate;
use crate::store::{self, Health, StoreError};
use crate::telemetry::metric;
use crate::tls::Identity;
use crate::tokens::Tokens;
use metrics::gauge;
use metrics_exporter_prometheus::PrometheusHandle;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::time::interval;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// How long calls in flight may take to finish at the end.
const GRACE: Duration = Duration::from_secs(10);

/// How often that is put together which was measured.
const UPKEEP: Duration = Duration::from_secs(5);

/// A server that is ready to serve.
pub struct App {
    engine: Arc<Engine>,
    reload: Arc<Reload>,
    health: watch::Receiver<Health>,
    gate: Arc<Gate>,
    http: Option<TcpListener>,
    counted: Option<PrometheusHandle>,
    bounds: Bounds,
    age: Duration,
    identity: Option<Arc<Identity>>,
    tokens: Arc<Tokens>,
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The store's address can not be used at all.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The certificate can not be used.
    #[error("{0}")]
    Tls(String),
}

/// Makes a server of a configuration. Needs a tokio runtime; does not wait for the store.
///
/// # Errors
/// Its store or its certificate can not be used at all.
pub fn build(config: Config, clock: Clock) -> Result<App, BuildError> {
    let (store, health) = store::open(&config.store, &clock)?;
    let server = config.server.clone();
    let identity = server.tls.map(Identity::read).transpose().map_err(BuildError::Tls)?.map(Arc::new);
    let tokens = Arc::new(Tokens::new(server.tokens));
    let reload = Arc::new(Reload::new(config, identity.clone(), tokens.clone(), clock.clone()));
    let engine = Arc::new(Engine::new(reload.rules(), store, server.max_key_bytes, clock));
    let gate = Arc::new(Gate::new(server.max_in_flight));
    Ok(App {
        engine,
        reload,
        health,
        gate,
        http: None,
        counted: None,
        bounds: Bounds {
            listener: "grpc",
            beginning: grpc::BEGINNING,
            most: server.max_connections,
            most_by_peer: server.max_connections_per_peer,
        },
        age: server.max_connection_age,
        identity,
        tokens,
    })
}

impl App {
    /// What reads the rules anew, to look at it or to ask it to.
    #[must_use]
    pub fn reload(&self) -> Arc<Reload> {
        self.reload.clone()
    }

    /// Serves HTTP too, on this listener.
    #[must_use]
    pub fn with_http(self, listener: TcpListener) -> Self {
        Self { http: Some(listener), ..self }
    }

    /// Tells over HTTP what was counted, by the recorder that this is of.
    #[must_use]
    pub fn with_metrics(self, counted: PrometheusHandle) -> Self {
        Self { counted: Some(counted), ..self }
    }

    /// Serves until `shutdown`; then health says so, calls in flight finish, and it returns.
    ///
    /// # Errors
    /// The transport broke down.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let (reporter, health) = tonic_health::server::health_reporter();
        report(&reporter, ServingStatus::NotServing).await;
        reporter.set_service_status(grpc::READY, ServingStatus::NotServing).await;
        let serving = Arc::new(AtomicBool::new(false));
        let watch = tokio::spawn(watch(self.health.clone(), reporter.clone(), serving.clone()));
        let reload = tokio::spawn(self.reload.clone().watch());

        let ended = Arc::new(Notify::new());
        let state = http::State::new(
            self.engine.clone(),
            self.gate.clone(),
            self.reload.clone(),
            self.health,
            serving.clone(),
            self.tokens.clone(),
            self.counted.clone(),
        );
        let upkeep = tokio::spawn(upkeep(self.counted));
        let http = self.http.map(|listener| {
            let bounds = Bounds { listener: "http", beginning: 0, ..self.bounds };
            let incoming = listen::incoming(listener, bounds, None);
            tokio::spawn(http::serve(state, incoming, ended.clone()))
        });
        if self.identity.is_none() && !listener.local_addr()?.ip().is_loopback() {
            tracing::warn!(
                "gRPC is served beyond loopback without TLS: whoever reaches it can ask and borrow"
            );
        }
        let incoming = listen::incoming(listener, self.bounds, self.identity);

        let ending = Notify::new();
        let shutdown = async {
            shutdown.await;
            watch.abort();
            reload.abort();
            upkeep.abort();
            report(&reporter, ServingStatus::NotServing).await;
            reporter.set_service_status(grpc::READY, ServingStatus::NotServing).await;
            serving.store(false, Ordering::Relaxed);
            ended.notify_one();
            tracing::info!("stopping: calls in flight finish, new connections are refused");
            ending.notify_one();
        };
        let too_long = async {
            ending.notified().await;
            // Whoever watches has been told, and would not leave by itself.
            let mut reporter = reporter.clone();
            for service in grpc::SERVICES.into_iter().chain([grpc::READY]) {
                reporter.clear_service_status(service).await;
            }
            tokio::time::sleep(GRACE).await;
        };
        let serve = async {
            let served =
                grpc::serve(self.engine, self.gate, health, incoming, self.age, self.tokens, shutdown).await;
            if let Some(http) = http {
                http.await?;
            }
            served
        };
        tokio::select! {
            served = serve => served,
            () = too_long => {
                tracing::warn!("calls were still in flight after {GRACE:?}; they are cut off");
                Ok(())
            }
        }
    }
}

/// Tells in the health service and in the log how it is with the store. It serves as soon as that is known, however it
/// is.
async fn watch(mut health: watch::Receiver<Health>, reporter: HealthReporter, serving: Arc<AtomicBool>) {
    let mut reached = false;
    loop {
        let Health { asked, degraded, instances } = health.borrow_and_update().clone();
        let status = if degraded.is_none() { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status(grpc::READY, status).await;
        gauge!(metric::DEGRADED).set(u8::from(degraded.is_some()));
        gauge!(metric::INSTANCES).set(instances);
        match &degraded {
            None if reached => tracing::info!(instances, "instances come or go"),
            None => tracing::info!(instances, "the store is reached: serving"),
            Some(why) if asked => {
                tracing::warn!("degraded: {why}; deciding alone, by a share of 1/{instances} of each limit");
            }
            Some(_) => {}
        }
        if asked && !serving.swap(true, Ordering::Relaxed) {
            report(&reporter, ServingStatus::Serving).await;
        }
        reached = degraded.is_none();
        if health.changed().await.is_err() {
            return;
        }
    }
}

/// What was measured and not looked at is put together now and then, so that it does not grow.
async fn upkeep(counted: Option<PrometheusHandle>) {
    let Some(counted) = counted else { return };
    let mut turns = interval(UPKEEP);
    loop {
        turns.tick().await;
        counted.run_upkeep();
    }
}

async fn report(reporter: &HealthReporter, status: ServingStatus) {
    for service in grpc::SERVICES {
        reporter.set_service_status(service, status).await;
    }
}
