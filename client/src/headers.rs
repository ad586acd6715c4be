//! What an HTTP gateway says of a verdict: header fields and bodies.
//!
//! ```
//! use http::HeaderMap;
//! use std::time::Duration;
//! use tollgate_client::headers::{Shape, denial, describe};
//! use tollgate_client::{Denial, Verdict};
//!
//! let verdict = Verdict {
//!     denied: Some(Denial::OverLimit),
//!     limit: 200,
//!     remaining: 0,
//!     cost: 0,
//!     retry_after: Duration::from_millis(29_300),
//!     reset_after: Duration::from_secs(60),
//!     wait: Duration::ZERO,
//!     window: Duration::from_secs(60),
//!     degraded: false,
//! };
//! let mut fields = HeaderMap::new();
//! describe(&mut fields, &verdict);
//! assert_eq!(fields["x-ratelimit-limit"], "200");
//!
//! let response = denial(&verdict, Shape::Structured);
//! assert_eq!(response.status(), 429);
//! assert_eq!(response.headers()["retry-after"], "30");
//! assert_eq!(
//!     response.body(),
//!     r#"{"error":{"code":"RATE_LIMITED","message":"Too many requests. Try again in 30 seconds."}}"#
//! );
//! ```

use crate::clock::since_epoch;
use crate::verdict::Verdict;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use std::time::Duration;

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const SERVICE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// When to try again at a gateway that has too much to do.
pub const RETRY_OVERLOADED: Duration = Duration::from_secs(5);

/// The body of a refusal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shape {
    /// `{"error":{"code":"RATE_LIMITED","message":"Too many requests. Try again in 30 seconds."}}`
    #[default]
    Structured,
    /// `{"error":"rate_limited","retry_after":30}`
    Compact,
}

/// Whole seconds, rounded up, at least 1: for `Retry-After`. A zero there would say "at once".
#[must_use]
pub fn whole_seconds(span: Duration) -> u64 {
    rounded_up(span).max(1)
}

fn rounded_up(span: Duration) -> u64 {
    span.as_secs().saturating_add(u64::from(span.subsec_nanos() > 0))
}

/// Sets `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`, the last one in seconds since 1970,
/// rounded up. Nothing if the call is of a class that is never limited.
pub fn describe(fields: &mut HeaderMap, verdict: &Verdict) {
    describe_at(fields, verdict, since_epoch());
}

fn describe_at(fields: &mut HeaderMap, verdict: &Verdict, now: Duration) {
    if verdict.limit == 0 && verdict.allowed() {
        return;
    }
    fields.insert(LIMIT, verdict.limit.into());
    fields.insert(REMAINING, verdict.remaining.into());
    fields.insert(RESET, rounded_up(now.saturating_add(verdict.reset_after)).into());
}

/// Sets `RateLimit-Policy` and `RateLimit` as the IETF's draft 11 has them:
/// `"search";q=200;w=2` and `"search";r=50;t=30`. Nothing for a class that is never limited, and for one whose name
/// such a field can not hold.
pub fn describe_ietf(fields: &mut HeaderMap, verdict: &Verdict, class: &str) {
    let is_printable = |c: char| c == ' ' || c.is_ascii_graphic();
    if (verdict.limit == 0 && verdict.allowed()) || !class.chars().all(is_printable) {
        return;
    }
    let name = class.replace('\\', "\\\\").replace('"', "\\\"");
    let window = match verdict.window {
        Duration::ZERO => String::new(),
        window => format!(";w={}", whole_seconds(window)),
    };
    let policy = format!("\"{name}\";q={}{window}", verdict.limit);
    let now = format!("\"{name}\";r={};t={}", verdict.remaining, rounded_up(verdict.reset_after));
    for (field, value) in [(POLICY, policy), (SERVICE_LIMIT, now)] {
        if let Ok(value) = HeaderValue::try_from(value) {
            fields.insert(field, value);
        }
    }
}

/// The answer to a call that is denied: 429, `Retry-After`, the fields of [`describe`], and a body.
#[must_use]
pub fn denial(verdict: &Verdict, shape: Shape) -> Response<String> {
    let seconds = whole_seconds(verdict.retry_after);
    let s = if seconds == 1 { "" } else { "s" };
    let message = format!("Too many requests. Try again in {seconds} second{s}.");
    let mut response = refusal(StatusCode::TOO_MANY_REQUESTS, seconds, &message, shape);
    describe(response.headers_mut(), verdict);
    response
}

/// The answer to a call that is shed: 503, `Retry-After: 5`, and a body.
#[must_use]
pub fn overloaded(shape: Shape) -> Response<String> {
    let seconds = whole_seconds(RETRY_OVERLOADED);
    let message = format!("Too much to do. Try again in {seconds} seconds.");
    refusal(StatusCode::SERVICE_UNAVAILABLE, seconds, &message, shape)
}

fn refusal(status: StatusCode, seconds: u64, message: &str, shape: Shape) -> Response<String> {
    let code = if status == StatusCode::TOO_MANY_REQUESTS { "RATE_LIMITED" } else { "OVERLOADED" };
    // Nothing in here needs to be escaped.
    let body = match shape {
        Shape::Structured => format!(r#"{{"error":{{"code":"{code}","message":"{message}"}}}}"#),
        Shape::Compact => format!(r#"{{"error":"{}","retry_after":{seconds}}}"#, code.to_ascii_lowercase()),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let fields = response.headers_mut();
    fields.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    fields.insert(RETRY_AFTER, seconds.into());
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Denial;

    fn verdict(denied: Option<Denial>) -> Verdict {
        Verdict {
            denied,
            limit: 200,
            remaining: 50,
            cost: 1,
            retry_after: Duration::from_micros(29_000_001),
            reset_after: Duration::from_millis(1_500),
            wait: Duration::ZERO,
            window: Duration::from_millis(1_700),
            degraded: false,
        }
    }

    #[test]
    fn seconds_are_rounded_up_and_never_zero() {
        for (nanos, seconds) in
            [(0, 1), (1, 1), (999_999_999, 1), (1_000_000_000, 1), (1_000_000_001, 2), (30_000_000_000, 30)]
        {
            assert_eq!(whole_seconds(Duration::from_nanos(nanos)), seconds, "{nanos} ns");
        }
    }

    #[test]
    fn three_fields_on_every_answer() {
        for denied in [None, Some(Denial::OverLimit)] {
            let mut fields = HeaderMap::new();
            describe_at(&mut fields, &verdict(denied), Duration::from_millis(1_000_000_600));
            let fields = [LIMIT, REMAINING, RESET].map(|name| fields[name].to_str().unwrap().to_owned());
            assert_eq!(fields, ["200", "50", "1000003"]);
        }
    }

    #[test]
    fn a_class_that_is_never_limited_has_nothing_to_say() {
        let mut fields = HeaderMap::new();
        let free = Verdict { limit: 0, ..verdict(None) };
        describe(&mut fields, &free);
        describe_ietf(&mut fields, &free, "health");
        assert!(fields.is_empty());
        // But a denial that knows no limit is one.
        describe(&mut fields, &Verdict { denied: Some(Denial::Unavailable), ..free });
        assert_eq!(fields[LIMIT], "0");
    }

    #[test]
    fn the_fields_of_the_draft() {
        let told = |class: &str, verdict: &Verdict| {
            let mut fields = HeaderMap::new();
            describe_ietf(&mut fields, verdict, class);
            [POLICY, SERVICE_LIMIT]
                .map(|name| fields.get(name).map(|value| value.to_str().unwrap().to_owned()))
        };
        let some = |policy: &str, now: &str| [Some(policy.to_owned()), Some(now.to_owned())];
        assert_eq!(told("search", &verdict(None)), some("\"search\";q=200;w=2", "\"search\";r=50;t=2"));
        assert_eq!(
            told(r#"a "b" \c"#, &Verdict { window: Duration::ZERO, ..verdict(None) }),
            some(r#""a \"b\" \\c";q=200"#, r#""a \"b\" \\c";r=50;t=2"#)
        );
        assert_eq!(told("über", &verdict(None)), [None, None]);
        assert_eq!(told("a\nb", &verdict(None)), [None, None]);
    }

    #[test]
    fn refusals_in_both_shapes() {
        let denied = verdict(Some(Denial::OverLimit));
        let at_once = Verdict { retry_after: Duration::from_nanos(1), ..denied };
        for (response, status, retry_after, body) in [
            (
                denial(&denied, Shape::Structured),
                429,
                "30",
                r#"{"error":{"code":"RATE_LIMITED","message":"Too many requests. Try again in 30 seconds."}}"#,
            ),
            (denial(&denied, Shape::Compact), 429, "30", r#"{"error":"rate_limited","retry_after":30}"#),
            (
                denial(&at_once, Shape::Structured),
                429,
                "1",
                r#"{"error":{"code":"RATE_LIMITED","message":"Too many requests. Try again in 1 second."}}"#,
            ),
            (
                overloaded(Shape::Structured),
                503,
                "5",
                r#"{"error":{"code":"OVERLOADED","message":"Too much to do. Try again in 5 seconds."}}"#,
            ),
            (overloaded(Shape::Compact), 503, "5", r#"{"error":"overloaded","retry_after":5}"#),
        ] {
            assert_eq!(response.status(), status);
            assert_eq!(response.headers()[RETRY_AFTER], retry_after);
            assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
            assert_eq!(response.headers().contains_key(LIMIT), status == 429);
            assert_eq!(response.body(), body);
        }
    }
}
