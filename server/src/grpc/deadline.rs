//! The caller's own deadline: noted when the call arrives, before it is decoded.

use crate::clock::instant;
use std::time::Duration;
use tokio::time::Instant;
use tonic::{Request, Status};

#[derive(Clone, Copy)]
struct Deadline(Instant);

/// Notes when the caller stops waiting, if it says so.
#[expect(clippy::unnecessary_wraps, reason = "an interceptor's signature")]
pub(super) fn note(mut request: Request<()>) -> Result<Request<()>, Status> {
    let timeout = request.metadata().get("grpc-timeout").and_then(|value| parse(value.to_str().ok()?));
    if let Some(deadline) = timeout.and_then(|timeout| instant().checked_add(timeout)) {
        request.extensions_mut().insert(Deadline(deadline));
    }
    Ok(request)
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
