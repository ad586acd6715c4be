//! Where the store is, without ever saying how it is unlocked.

use deadpool_redis::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};
use std::fmt;

/// The URLs of a Redis, for messages.
const EXPECTED: &str = "`memory` or a URL: redis://host:port/db, redis+unix:///path?db=0";

const PLAIN: [&str; 5] = ["redis", "valkey", "redis+unix", "valkey+unix", "unix"];

/// What is understood, but can not be reached yet.
const LATER: [&str; 12] = [
    "rediss",
    "valkeys",
    "sentinel",
    "redis-sentinel",
    "redis+sentinel",
    "rediss-sentinel",
    "rediss+sentinel",
    "cluster",
    "redis-cluster",
    "redis+cluster",
    "rediss-cluster",
    "rediss+cluster",
];

/// Where buckets are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreUrl {
    /// In this process.
    Memory,
    /// In a Redis that all instances share.
    Redis(RedisUrl),
}

impl StoreUrl {
    /// The store that a text names.
    ///
    /// # Errors
    /// What is not `memory` and not the URL of a single Redis without TLS. No error holds more of the text
    /// than its scheme.
    pub fn new(text: &str) -> Result<Self, StoreUrlError> {
        if text == "memory" {
            return Ok(Self::Memory);
        }
        let (scheme, rest) = text.split_once("://").ok_or(StoreUrlError::NoUrl)?;
        // The scheme is quoted, so it must be one: in `user:secret://` it is not.
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
        if !scheme.chars().all(named) || !scheme.starts_with(|c: char| c.is_ascii_alphabetic()) {
            return Err(StoreUrlError::NoUrl);
        }
        if LATER.contains(&scheme) {
            return Err(StoreUrlError::NotYet { what: format!("{scheme}://") });
        }
        if !PLAIN.contains(&scheme) {
            return Err(StoreUrlError::Scheme { scheme: crate::yaml::printable(scheme) });
        }
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
        if hosts.contains(',') {
            return Err(StoreUrlError::NotYet { what: "a URL with several hosts".to_owned() });
        }
        let info = text.into_connection_info().map_err(|error| {
            // Only the part that never quotes the URL: what follows may be a piece of it.
            let error = error.to_string();
            StoreUrlError::Invalid {
                scheme: scheme.to_owned(),
                why: error.split(" - ").next().unwrap_or_default().to_owned(),
            }
        })?;
        Ok(Self::Redis(RedisUrl { shown: shown(scheme, &info), url: text.to_owned() }))
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Redis(url) => url.fmt(f),
        }
    }
}

/// The URL of a Redis. Prints without user and password.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    url: String,
    shown: String,
}

impl RedisUrl {
    /// The URL with its password: to connect, never to print.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.url
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

/// Put together from the parts that are no secret, rather than cut out of a text that has some.
fn shown(scheme: &str, info: &ConnectionInfo) -> String {
    let redis = info.redis_settings();
    let secret = redis.username().is_some() || redis.password().is_some();
    let user = if secret { "***@" } else { "" };
    let db = redis.db();
    match info.addr() {
        ConnectionAddr::Tcp(host, port) if host.contains(':') => {
            format!("{scheme}://{user}[{host}]:{port}/{db}")
        }
        ConnectionAddr::Tcp(host, port) => format!("{scheme}://{user}{host}:{port}/{db}"),
        ConnectionAddr::Unix(path) => format!("{scheme}://{user}{}?db={db}", path.display()),
        _ => format!("{scheme}://…"),
    }
}

/// A store that can not be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreUrlError {
    /// Not a URL at all. It is not quoted, because a password may be all that there is.
    #[error("not a store; expected {EXPECTED}")]
    NoUrl,
    /// A scheme that nobody knows.
    #[error("unknown scheme `{scheme}://`; expected {EXPECTED}")]
    Scheme {
        /// What was asked for.
        scheme: String,
    },
    /// Known, but not built.
    #[error("{what} is not supported yet; expected {EXPECTED}")]
    NotYet {
        /// What was asked for.
        what: String,
    },
    /// A URL that does not lead to a Redis.
    #[error("not a valid {scheme}:// URL ({why}); expected {EXPECTED}")]
    Invalid {
        /// Its scheme.
        scheme: String,
        /// What is wrong with it.
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_its_secrets() {
        for (url, shown) in [
            ("memory", "memory"),
            ("redis://127.0.0.1", "redis://127.0.0.1:6379/0"),
            ("redis://cache:7000/3", "redis://cache:7000/3"),
            ("redis://:hunter2@cache", "redis://***@cache:6379/0"),
            ("redis://hunter2@cache", "redis://***@cache:6379/0"),
            ("valkey://me:hunter2@cache/1?protocol=resp3", "valkey://***@cache:6379/1"),
            ("redis://me:hunter2@[::1]:7000", "redis://***@[::1]:7000/0"),
            (
                "redis+unix:///run/redis.sock?db=2&user=me&pass=hunter2",
                "redis+unix://***@/run/redis.sock?db=2",
            ),
            ("unix:///run/redis.sock", "unix:///run/redis.sock?db=0"),
        ] {
            let parsed = StoreUrl::new(url).unwrap();
            assert_eq!(parsed.to_string(), shown);
            assert!(!format!("{parsed:?}").contains("hunter2"));
            if let StoreUrl::Redis(parsed) = parsed {
                assert_eq!(parsed.reveal(), url);
            }
        }
    }

    #[test]
    fn an_error_tells_what_is_wrong_and_no_secret() {
        for (url, piece) in [
            ("", "not a store"),
            ("hunter2", "not a store"),
            ("hunter2@cache:6379", "not a store"),
            ("user:hunter2://cache", "not a store"),
            ("://hunter2", "not a store"),
            ("Memory", "not a store"),
            ("redis:/me:hunter2@cache", "not a store"),
            ("http://me:hunter2@cache", "unknown scheme `http://`; expected `memory` or a URL: redis://"),
            ("REDIS://cache", "unknown scheme `REDIS://`"),
            ("rediss://me:hunter2@cache", "rediss:// is not supported yet"),
            ("redis-sentinel://me:hunter2@cache", "redis-sentinel:// is not supported yet"),
            ("redis+cluster://me:hunter2@cache", "redis+cluster:// is not supported yet"),
            ("redis://me:hunter2@a:1,b:2", "a URL with several hosts is not supported yet"),
            ("redis://", "(Missing hostname)"),
            ("redis://me:hunter2@", "redis:// URL"),
            ("redis://me:hunter2@cache:99999", "redis:// URL"),
            ("redis://me:hunter2@cache:port", "redis:// URL"),
            ("redis://me:hunter2@cache/hunter2", "(Invalid database number)"),
            ("redis://cache?protocol=hunter2", "(Invalid protocol version)"),
            ("redis://0.0.0.0", "wildcard"),
            ("redis+unix://host:1?pass=hunter2", "redis+unix:// URL"),
        ] {
            let error = StoreUrl::new(url).unwrap_err();
            for text in [error.to_string(), format!("{error:?}")] {
                assert!(!text.contains("hunter2"), "{text}");
            }
            assert!(error.to_string().contains(piece), "{url}: {error}");
        }
    }
}
