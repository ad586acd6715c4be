//! What each setting may be: the same for a file, an argument and a variable.

use super::StoreUrl;
use crate::limit::Limit;
use crate::yaml::Scalar;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// In bytes.
const LONGEST_PREFIX: usize = 64;

const DEADLINE: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(10);

const AGE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(30 * 86_400);

/// A file or a folder that is there.
pub(super) fn there(path: PathBuf) -> Result<PathBuf, String> {
    match path.metadata() {
        Ok(_) => Ok(path),
        Err(error) => Err(format!("{}: can not be read: {error}", path.display())),
    }
}

pub(super) fn address(given: &Scalar) -> Result<SocketAddr, String> {
    given.parse("an IP address and a port, such as 127.0.0.1:8081 or \"[::1]:8081\"")
}

pub(super) fn max_key_bytes(given: &Scalar) -> Result<usize, String> {
    given.within(1..=65_536)
}

pub(super) fn max_in_flight(given: &Scalar) -> Result<usize, String> {
    given.within(1..=1_000_000)
}

/// Also of one peer.
pub(super) fn max_connections(given: &Scalar) -> Result<usize, String> {
    given.within(1..=1_000_000)
}

pub(super) fn max_connection_age(given: &Scalar) -> Result<Duration, String> {
    given.span_within(&AGE)
}

/// The error never quotes the text.
pub(super) fn store(given: &Scalar) -> Result<StoreUrl, String> {
    let text = if let Scalar::Text(text) = given { text } else { "" };
    StoreUrl::new(text).map_err(|error| error.to_string())
}

pub(super) fn prefix(given: &Scalar) -> Result<String, String> {
    let expected =
        format!("a text of 1 to {LONGEST_PREFIX} bytes without braces, spaces and control characters");
    let prefix = given.text(&expected)?;
    // Braces say which part of a key places it in a cluster.
    let odd = |c: char| matches!(c, '{' | '}') || c.is_whitespace() || c.is_control();
    if prefix.is_empty() || prefix.len() > LONGEST_PREFIX || prefix.contains(odd) {
        return Err(given.instead_of(&expected));
    }
    Ok(prefix.to_owned())
}

pub(super) fn deadline(given: &Scalar) -> Result<Duration, String> {
    given.span_within(&DEADLINE)
}

pub(super) fn connections(given: &Scalar) -> Result<usize, String> {
    given.within(1..=64)
}

pub(super) fn instances(given: &Scalar) -> Result<u32, String> {
    given.within(1..=Limit::MOST_SHARES)
}

pub(super) fn max_keys(given: &Scalar) -> Result<usize, String> {
    given.within(1..=100_000_000)
}

pub(super) fn max_bytes(given: &Scalar) -> Result<usize, String> {
    given.within(1_000_000..=1_000_000_000_000)
}
