//! The cheapest refusal: a gateway that has too much to do says so before it does anything.

use super::by::is_one_of;
use super::{Answering, Body, for_caller};
use crate::headers::{Shape, overloaded};
use http::{Request, Response};
use http_body_util::Either;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use tower_layer::Layer;
use tower_service::Service;

/// Lets at most so many calls in at a time. Those above are answered with 503 and `Retry-After: 5`, or in a gRPC
/// service with `UNAVAILABLE`. A call is in from its head until the head of its answer.
#[derive(Clone, Debug)]
pub struct ShedLayer {
    most: usize,
    exempt: Arc<Vec<String>>,
    shape: Shape,
    inside: Arc<AtomicUsize>,
}

impl ShedLayer {
    /// At most so many, over all services of this layer and its clones.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, exempt: Arc::default(), shape: Shape::default(), inside: Arc::default() }
    }

    /// Does not refuse or count this path, or, if it ends in `/*`, what is below it.
    #[must_use]
    pub fn exempt(mut self, path: impl Into<String>) -> Self {
        Arc::make_mut(&mut self.exempt).push(path.into());
        self
    }

    /// The body of a refusal; [`Shape::Structured`] unless set.
    #[must_use]
    pub fn shape(mut self, shape: Shape) -> Self {
        self.shape = shape;
        self
    }

    /// How many calls are in.
    #[must_use]
    pub fn inside(&self) -> usize {
        self.inside.load(Relaxed)
    }

    fn enter(&self) -> Option<Inside> {
        let more = |inside: usize| (inside < self.most).then_some(inside + 1);
        let entered = self.inside.fetch_update(Relaxed, Relaxed, more).is_ok();
        entered.then(|| Inside(self.inside.clone()))
    }
}

/// A call that is in, until this is dropped.
struct Inside(Arc<AtomicUsize>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl<S> Layer<S> for ShedLayer {
    type Service = Shed<S>;

    fn layer(&self, inner: S) -> Shed<S> {
        Shed { inner, layer: self.clone() }
    }
}

/// A service behind a [`ShedLayer`].
#[derive(Clone, Debug)]
pub struct Shed<S> {
    inner: S,
    layer: ShedLayer,
}

impl<S, Q, A> Service<Request<Q>> for Shed<S>
where
    S: Service<Request<Q>, Response = Response<A>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    Q: Send + 'static,
    A: Send + 'static,
{
    type Response = Response<Body<A>>;
    type Error = S::Error;
    type Future = Answering<A, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let inside = if is_one_of(&self.layer.exempt, request.uri().path()) {
            None
        } else {
            let Some(inside) = self.layer.enter() else {
                let refusal = for_caller(overloaded(self.layer.shape), request.headers(), "14");
                return Box::pin(std::future::ready(Ok(refusal)));
            };
            Some(inside)
        };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let _inside = inside;
            Ok(answer.await?.map(Either::Left))
        })
    }
}
