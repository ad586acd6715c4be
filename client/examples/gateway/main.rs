//! A small reverse proxy that limits rates in two stages, in front of an upstream that is only there to be called.
//!
//! ```console
//! $ cargo run -p tollgate-client --example gateway
//! tollgate http://127.0.0.1:43211
//! upstream http://127.0.0.1:40123
//! gateway  http://127.0.0.1:8000
//! $ curl -i -H 'authorization: Bearer alice' http://127.0.0.1:8000/hello
//! ```
//!
//! A call goes through, from outside in: shedding, a coarse limit by address, authentication, a fine limit by user,
//! the proxy. `/healthz` is answered by the gateway itself and passes every limit.

mod proxy;
mod tollgate;
mod upstream;

use axum::extract::{ConnectInfo, Request};
use axum::http::StatusCode;
use axum::http::header::AUTHORIZATION;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use axum::{Router, routing};
use clap::Parser;
use std::error::Error;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tollgate_client::layer::{RateLimitLayer, ShedLayer, by};
use tollgate_client::{Client, Fallback};
use tower::ServiceBuilder;

/// A gateway that limits rates in two stages
#[derive(Parser)]
struct Arguments {
    /// Where it listens
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// A service that runs (http://…), or a program to start one [default: built from this workspace]
    #[arg(long)]
    tollgate: Option<String>,
    /// Calls at a time before more are shed
    #[arg(long, default_value_t = 100)]
    max_in_flight: usize,
}

/// Who calls, as authentication has found out.
#[derive(Clone)]
struct User(String);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let service = tollgate::reach(arguments.tollgate).await?;
    println!("tollgate {}", service.url());
    let upstream = upstream::start().await?;
    println!("upstream http://{upstream}");

    let client = Client::builder(service.url())
        .gateway(format!("example {}", std::process::id()))
        // Until the service has said what to do without it.
        .fallback(Fallback::Limit { rate_per_s: 5.0, burst: 10 })
        .build()?;
    let gateway = gateway(&client, arguments.max_in_flight, upstream);
    let listener = TcpListener::bind(arguments.listen).await?;
    println!("gateway  http://{}", listener.local_addr()?);
    axum::serve(listener, gateway.into_make_service_with_connect_info::<SocketAddr>())
        .with_graceful_shutdown(ended())
        .await?;
    // What it holds of buckets goes back.
    client.shutdown().await;
    Ok(())
}

fn gateway(client: &Client, max_in_flight: usize, upstream: SocketAddr) -> Router {
    let address = |parts: &http::request::Parts| {
        let ConnectInfo(address) = parts.extensions.get::<ConnectInfo<SocketAddr>>()?;
        Some(by::network(address.ip()))
    };
    let user = by::extension(|user: &User| user.0.clone());
    let layers = ServiceBuilder::new()
        .layer(ShedLayer::new(max_in_flight).exempt("/healthz"))
        .layer(RateLimitLayer::new(client.clone(), address).class("coarse").exempt("/healthz"))
        .layer(from_fn(authenticate))
        .layer(
            RateLimitLayer::new(client.clone(), user)
                .class_by(by::path([("/search", "search"), ("/", "read")]))
                .exempt("/healthz")
                .ietf(),
        );
    Router::new()
        .route("/healthz", routing::get(async || "ok\n"))
        .fallback_service(proxy::to(upstream))
        .layer(layers)
}

/// Stands for the real thing: whoever has a token is the user of that name.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let token =
        request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let user = token.filter(|token| (1..=100).contains(&token.len())).map(|token| User(token.to_owned()));
    match user {
        Some(user) => {
            request.extensions_mut().insert(user);
            next.run(request).await
        }
        None if request.uri().path() == "/healthz" => next.run(request).await,
        None => {
            (StatusCode::UNAUTHORIZED, "who are you? try: -H 'authorization: Bearer alice'\n").into_response()
        }
    }
}

async fn ended() {
    let interrupted = tokio::signal::ctrl_c();
    match signal(SignalKind::terminate()) {
        Ok(mut terminated) => {
            tokio::select! {
                _ = interrupted => {}
                _ = terminated.recv() => {}
            }
        }
        Err(_) => drop(interrupted.await),
    }
}
