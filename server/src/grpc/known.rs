//! Only who shows a token is heard, before anything of his call is read. Health is told to everybody.

use crate::tokens::Tokens;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tower::Layer;

/// What paths of the health service begin with.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// Surrounds services with these tokens.
#[derive(Clone)]
pub(super) struct Known(pub(super) Arc<Tokens>);

impl<S> Layer<S> for Known {
    type Service = OfKnown<S>;

    fn layer(&self, inner: S) -> OfKnown<S> {
        OfKnown { inner, tokens: self.0.clone() }
    }
}

#[derive(Clone)]
pub(super) struct OfKnown<S> {
    inner: S,
    tokens: Arc<Tokens>,
}

type Answer<S> = Result<http::Response<Body>, <S as Service<http::Request<Body>>>::Error>;

impl<S> Service<http::Request<Body>> for OfKnown<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Answer<S>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let shown = request.headers().get(http::header::AUTHORIZATION);
        match self.tokens.check(shown.map(http::HeaderValue::as_bytes)) {
            Err(stranger) if !request.uri().path().starts_with(HEALTH) => {
                let refused = Status::unauthenticated(stranger.to_string()).into_http();
                Box::pin(async move { Ok(refused) })
            }
            _ => Box::pin(self.inner.call(request)),
        }
    }
}
