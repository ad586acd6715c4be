//! Tower layers for HTTP gateways: they work in axum, hyper and tonic servers.
//!
//! A gateway has up to three, the outermost first: [`ShedLayer`] refuses what is too much at the least cost; a coarse
//! [`RateLimitLayer`] by address stands before authentication, so that guessing passwords is limited too; a fine one
//! by user stands after it.
//!
//! ```no_run
//! use http::{Request, Response};
//! use http_body_util::Full;
//! use tollgate_client::Client;
//! use tollgate_client::layer::{RateLimitLayer, ShedLayer, by};
//! use tower::{ServiceBuilder, service_fn};
//!
//! /// What authentication leaves in the extensions of a request.
//! #[derive(Clone)]
//! struct User(String);
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tollgate_client::Error> {
//! # let client = Client::new("http://127.0.0.1:8081")?;
//! let service = ServiceBuilder::new()
//!     .layer(ShedLayer::new(1_000).exempt("/healthz"))
//!     .layer(RateLimitLayer::new(client.clone(), by::address).class("coarse").exempt("/healthz"))
//!     // .layer(authentication)
//!     .layer(
//!         RateLimitLayer::new(client, by::extension(|user: &User| user.0.clone()))
//!             .class_by(by::path([("/search", "search"), ("/", "read")]))
//!             .ietf(),
//!     )
//!     .service(service_fn(async |_request: Request<Full<bytes::Bytes>>| {
//!         Ok::<_, std::convert::Infallible>(Response::new(Full::<bytes::Bytes>::from("hello")))
//!     }));
//! # drop(service);
//! # Ok(())
//! # }
//! ```

pub mod by;
mod shed;

pub use self::by::Peer;
pub use self::shed::{Shed, ShedLayer};

use crate::client::Client;
use crate::headers::{Shape, denial, describe, describe_ietf};
use crate::verdict::{Denial, Verdict};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tower_layer::Layer;
use tower_service::Service;

/// The body of an answer: of the service within, or of a refusal.
pub type Body<B> = Either<B, Full<Bytes>>;

type Answering<B, E> = Pin<Box<dyn Future<Output = Result<Response<Body<B>>, E>> + Send>>;

type Extract = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

/// What calls without a key share: a bucket of this key.
pub const NO_KEY: &str = "unknown";

/// How long a call is held until its turn by a leaky bucket, unless it is said otherwise.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(1);

/// Limits the calls of a service. Each answer says what is left; a denied call is answered with 429, or in a gRPC
/// service with `RESOURCE_EXHAUSTED`. The [`Verdict`] is in the extensions of the request and of the answer.
///
/// Within another such layer, the answer's fields are those of the inner one, unless the outer one denies.
#[derive(Clone)]
pub struct RateLimitLayer {
    client: Client,
    stage: Arc<Stage>,
}

#[derive(Clone)]
struct Stage {
    key: Extract,
    class: Extract,
    exempt: Vec<String>,
    shape: Shape,
    ietf: bool,
    max_wait: Duration,
}

impl RateLimitLayer {
    /// Limits by the key that `key` finds in a request, in the class `default`. Requests without one share the key
    /// [`NO_KEY`]. See [`by`] for what is often used.
    pub fn new(client: Client, key: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        let stage = Stage {
            key: Arc::new(key),
            class: Arc::new(|_| Some("default".into())),
            exempt: vec![],
            shape: Shape::default(),
            ietf: false,
            max_wait: DEFAULT_MAX_WAIT,
        };
        Self { client, stage: Arc::new(stage) }
    }

    /// All calls are of this class.
    #[must_use]
    pub fn class(self, class: impl Into<String>) -> Self {
        let class = class.into();
        self.class_by(move |_| Some(class.clone()))
    }

    /// The class is found in the request. Requests without one are not limited.
    #[must_use]
    pub fn class_by(self, class: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        self.with(|stage| stage.class = Arc::new(class))
    }

    /// Does not limit this path, or, if it ends in `/*`, what is below it: health, metrics.
    #[must_use]
    pub fn exempt(self, path: impl Into<String>) -> Self {
        self.with(|stage| stage.exempt.push(path.into()))
    }

    /// The body of a denial; [`Shape::Structured`] unless set.
    #[must_use]
    pub fn shape(self, shape: Shape) -> Self {
        self.with(|stage| stage.shape = shape)
    }

    /// Answers have the IETF's fields as well.
    #[must_use]
    pub fn ietf(self) -> Self {
        self.with(|stage| stage.ietf = true)
    }

    /// How long a call may be held until its turn by a leaky bucket, [`DEFAULT_MAX_WAIT`] unless set. One that would
    /// have to wait longer is denied.
    #[must_use]
    pub fn max_wait(self, most: Duration) -> Self {
        self.with(|stage| stage.max_wait = most)
    }

    fn with(mut self, change: impl FnOnce(&mut Stage)) -> Self {
        change(Arc::make_mut(&mut self.stage));
        self
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> RateLimit<S> {
        RateLimit { inner, client: self.client.clone(), stage: self.stage.clone() }
    }
}

/// A service whose calls are limited by a [`RateLimitLayer`].
#[derive(Clone)]
pub struct RateLimit<S> {
    inner: S,
    client: Client,
    stage: Arc<Stage>,
}

impl<S, Q, A> Service<Request<Q>> for RateLimit<S>
where
    S: Service<Request<Q>, Response = Response<A>> + Clone + Send + 'static,
    S::Future: Send,
    Q: Send + 'static,
{
    type Response = Response<Body<A>>;
    type Error = S::Error;
    type Future = Answering<A, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        // The one that is ready is the one to call.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let (client, stage) = (self.client.clone(), self.stage.clone());
        Box::pin(async move {
            let (mut parts, body) = request.into_parts();
            let Some(class) = stage.class_of(&parts) else {
                return Ok(inner.call(Request::from_parts(parts, body)).await?.map(Either::Left));
            };
            let key = (stage.key)(&parts).unwrap_or_else(|| NO_KEY.into());
            let verdict = match client.decide(&key, &class, None).await {
                Ok(verdict) => stage.in_time(verdict),
                Err(_) => return Ok(unlimitable()),
            };
            if !verdict.allowed() {
                return Ok(stage.denied(&parts.headers, &verdict, &class));
            }
            if !verdict.wait.is_zero() {
                tokio::time::sleep(verdict.wait).await;
            }
            parts.extensions.insert(verdict);
            let mut response = inner.call(Request::from_parts(parts, body)).await?.map(Either::Left);
            if response.extensions().get::<Verdict>().is_none() {
                stage.describe(response.headers_mut(), &verdict, &class);
                response.extensions_mut().insert(verdict);
            }
            Ok(response)
        })
    }
}

impl Stage {
    /// The class of a call that is to be limited.
    fn class_of(&self, parts: &Parts) -> Option<String> {
        if by::is_one_of(&self.exempt, parts.uri.path()) { None } else { (self.class)(parts) }
    }

    /// Denies a call whose turn is too far away.
    fn in_time(&self, verdict: Verdict) -> Verdict {
        if verdict.allowed() && verdict.wait > self.max_wait {
            return Verdict { denied: Some(Denial::OverLimit), retry_after: verdict.wait, ..verdict };
        }
        verdict
    }

    fn describe(&self, fields: &mut HeaderMap, verdict: &Verdict, class: &str) {
        describe(fields, verdict);
        if self.ietf {
            describe_ietf(fields, verdict, class);
        }
    }

    fn denied<A>(&self, asked: &HeaderMap, verdict: &Verdict, class: &str) -> Response<Body<A>> {
        let mut response = for_caller(denial(verdict, self.shape), asked, "8");
        self.describe(response.headers_mut(), verdict, class);
        response.extensions_mut().insert(*verdict);
        response
    }
}

/// A refusal as its caller understands it: as it is, or with a gRPC status in place of the body.
fn for_caller<A>(
    refusal: Response<String>,
    asked: &HeaderMap,
    grpc_status: &'static str,
) -> Response<Body<A>> {
    let content_type = asked.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    if !content_type.is_some_and(|value| value.starts_with(b"application/grpc")) {
        return refusal.map(|body| Either::Right(Full::from(body)));
    }
    let mut response = Response::new(Either::Right(Full::default()));
    let fields = response.headers_mut();
    fields.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    fields.insert("grpc-status", HeaderValue::from_static(grpc_status));
    if let Some(seconds) = refusal.headers().get(RETRY_AFTER) {
        fields.insert(RETRY_AFTER, seconds.clone());
    }
    response
}

/// The rules have no such class, or the key can not be one: nobody knows whether the call may pass, so it does not.
fn unlimitable<A>() -> Response<Body<A>> {
    let body = r#"{"error":{"code":"INTERNAL","message":"The rate of this call can not be limited."}}"#;
    let mut response = Response::new(Either::Right(Full::from(body)));
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests;
