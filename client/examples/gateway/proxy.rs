//! Hands calls on to the upstream.

use axum::body::Body;
use axum::extract::Request;
use axum::http::uri::{Authority, Scheme};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use std::convert::Infallible;
use std::net::SocketAddr;
use tower::Service;

/// A service that hands each call on to there.
pub(crate) fn to(
    upstream: SocketAddr,
) -> impl Service<Request, Response = Response, Error = Infallible, Future: Send> + Clone + Send + Sync + 'static
{
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    tower::service_fn(move |mut request: Request| {
        let client = client.clone();
        async move {
            let mut uri = std::mem::take(request.uri_mut()).into_parts();
            uri.scheme = Some(Scheme::HTTP);
            uri.authority = Authority::try_from(upstream.to_string()).ok();
            let Ok(uri) = Uri::from_parts(uri) else { return Ok(StatusCode::BAD_REQUEST.into_response()) };
            *request.uri_mut() = uri;
            Ok(match client.request(request).await {
                Ok(answer) => answer.map(Body::new),
                Err(_) => (StatusCode::BAD_GATEWAY, "the upstream does not answer\n").into_response(),
            })
        }
    })
}
