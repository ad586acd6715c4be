//! The caller's own deadline: noted when the call arrives, before it is decoded, and told when it has passed.
//!
//! tonic keeps it too, but answers `CANCELLED`, which callers take for their own doing. Its timer wakes the call
//! and asks what is inside of it first; that is here, and sees that the time is over.

use crate::clock::instant;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::{Request, Status};
use tower::Layer;

#[derive(Clone, Copy)]
struct Deadline(Instant);

/// Surrounds services with their callers' deadlines.
#[derive(Clone, Copy)]
pub(super) struct Deadlines;

impl<S> Layer<S> for Deadlines {
    type Service = InTime<S>;

    fn layer(&self, inner: S) -> InTime<S> {
        InTime(inner)
    }
}

#[derive(Clone)]
pub(super) struct InTime<S>(S);

type Answer<S> = Result<http::Response<Body>, <S as Service<http::Request<Body>>>::Error>;

impl<S> Service<http::Request<Body>> for InTime<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Answer<S>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let timeout = request.headers().get("grpc-timeout").and_then(|value| parse(value.to_str().ok()?));
        let deadline = timeout.and_then(|timeout| instant().checked_add(timeout));
        if let Some(deadline) = deadline {
            request.extensions_mut().insert(Deadline(deadline));
        }
        let answer = self.0.call(request);
        Box::pin(async move {
            let mut answer = pin!(answer);
            poll_fn(|cx| match answer.as_mut().poll(cx) {
                Poll::Pending if deadline.is_some_and(|deadline| deadline <= instant()) => {
                    let late = Status::deadline_exceeded("deadline: passed while the call was in flight");
                    Poll::Ready(Ok(late.into_http()))
                }
                answer => answer,
            })
            .await
        })
    }
}

/// What was noted.
pub(super) fn of<T>(request: &Request<T>) -> Option<Instant> {
    request.extensions().get().map(|&Deadline(at)| at)
}

/// Reads a `grpc-timeout`: up to eight digits and a unit. What can not be read is as if it were not there.
fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(amount * 3600)),
        "M" => Some(Duration::from_secs(amount * 60)),
        "S" => Some(Duration::from_secs(amount)),
        "m" => Some(Duration::from_millis(amount)),
        "u" => Some(Duration::from_micros(amount)),
        "n" => Some(Duration::from_nanos(amount)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read() {
        for (text, read) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("20m", Some(Duration::from_millis(20))),
            ("0n", Some(Duration::ZERO)),
            ("123456789m", None),
            ("m", None),
            ("", None),
            ("-1m", None),
            ("1x", None),
            ("1é", None),
        ] {
            assert_eq!(parse(text), read, "{text}");
        }
    }
}
