//! An upstream to call: it says hello, and takes its time over `/slow`.

use axum::Router;
use axum::extract::Request;
use axum::routing;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use tokio::net::TcpListener;

/// How long `/slow` takes.
const SLOW: Duration = Duration::from_secs(1);

/// Serves on a free port until the program ends.
pub(crate) async fn start() -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let hello = async |request: Request| format!("hello from the upstream: {}\n", request.uri().path());
    let slow = async || {
        tokio::time::sleep(SLOW).await;
        "at last\n"
    };
    let router = Router::new().route("/slow", routing::get(slow)).fallback(hello);
    tokio::spawn(async { axum::serve(listener, router).await });
    Ok(address)
}
