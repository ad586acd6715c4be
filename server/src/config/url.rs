//! Where the store is, without ever saying how it is unlocked.

use deadpool_redis::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};
use percent_encoding::percent_decode_str;
use std::fmt;

/// The URLs of a Redis, for messages.
const EXPECTED: &str = "`memory` or a URL: redis://host:port/db, redis+unix:///path?db=0, \
     redis-sentinel://host:port,host:port/name?db=0, redis-cluster://host:port,host:port; rediss… with TLS";

/// What a URL may begin with, and what it is then in the words of the redis library.
const SINGLE: [(&str, &str); 7] = [
    ("redis", "redis"),
    ("rediss", "rediss"),
    ("valkey", "redis"),
    ("valkeys", "rediss"),
    ("redis+unix", "redis+unix"),
    ("valkey+unix", "redis+unix"),
    ("unix", "redis+unix"),
];

/// Sentinels, and nodes of a cluster: as many as anybody has, and a bound.
const MOST_NODES: usize = 100;

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
    /// What is not `memory` and not the URL of a Redis. No error holds more of the text than its scheme.
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
        let unknown = || StoreUrlError::Scheme { scheme: crate::yaml::printable(scheme) };
        let (base, kind) = match scheme.split_once(['-', '+']) {
            Some((base, kind @ ("sentinel" | "cluster"))) => (base, kind),
            _ => (scheme, ""),
        };
        let (_, plain) = SINGLE.iter().find(|(name, _)| *name == base).ok_or_else(unknown)?;
        if !kind.is_empty() && *plain == "redis+unix" {
            return Err(unknown());
        }
        let invalid = |why: &str| StoreUrlError::Invalid { scheme: scheme.to_owned(), why: why.to_owned() };

        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, tail) = rest.split_at_checked(end).unwrap_or((rest, ""));
        let (user, hosts) = authority.rsplit_once('@').map_or(("", authority), |(user, hosts)| (user, hosts));
        let hosts: Vec<&str> = hosts.split(',').collect();
        if kind.is_empty() && hosts.len() > 1 {
            return Err(invalid("several hosts; one, or the scheme of sentinels or of a cluster"));
        }
        if hosts.len() > MOST_NODES {
            return Err(invalid("more than 100 hosts"));
        }
        let (topology, tail) = match kind {
            "sentinel" => {
                let (name, query) = tail.split_once('?').map_or((tail, ""), |(name, query)| (name, query));
                let name = name.strip_prefix('/').filter(|name| !name.is_empty() && !name.contains('/'));
                let name =
                    name.ok_or_else(|| invalid("no name of a primary; expected /name after the hosts"))?;
                let query = if query.is_empty() { String::new() } else { format!("?{query}") };
                (Topology::Sentinel { primary: name.to_owned() }, query)
            }
            "cluster" => (Topology::Cluster, tail.to_owned()),
            _ => (Topology::Single, tail.to_owned()),
        };
        let (tail, sentinels) = match topology {
            Topology::Sentinel { .. } => of_sentinels(&tail),
            _ => (tail, Login::default()),
        };
        let at = if user.is_empty() { "" } else { "@" };
        let mut nodes = Vec::new();
        for host in hosts {
            let port =
                if matches!(topology, Topology::Sentinel { .. }) && !has_port(host) { ":26379" } else { "" };
            let url = format!("{plain}://{user}{at}{host}{port}{tail}");
            let info = url.into_connection_info().map_err(|error| {
                // Only the part that never quotes the URL: what follows may be a piece of it.
                invalid(error.to_string().split(" - ").next().unwrap_or_default())
            })?;
            if topology == Topology::Cluster && info.redis_settings().db() != 0 {
                return Err(invalid("a cluster has one database, 0"));
            }
            nodes.push(info);
        }
        let shown = shown(scheme, &topology, &nodes);
        Ok(Self::Redis(RedisUrl { topology, nodes, sentinels, shown }))
    }
}

fn has_port(host: &str) -> bool {
    // The colons of an IPv6 address are in brackets.
    host.rsplit(']').next().is_some_and(|rest| rest.contains(':'))
}

/// The query of sentinels says two things more than that of a Redis: the database, since the path is the primary's name,
/// and as who sentinels are asked. The rest of the primary's URL, and that.
fn of_sentinels(query: &str) -> (String, Login) {
    let (mut db, mut login, mut others) = ("0", Login::default(), Vec::new());
    let decoded = |text: &str| Some(percent_decode_str(text).decode_utf8_lossy().into_owned());
    for part in query.trim_start_matches('?').split('&').filter(|part| !part.is_empty()) {
        match part.split_once('=') {
            Some(("db", number)) => db = number,
            Some(("sentinel_user", user)) => login.user = decoded(user),
            Some(("sentinel_pass", password)) => login.password = decoded(password),
            _ => others.push(part),
        }
    }
    (format!("/{db}?{}", others.join("&")), login)
}

/// As who somebody is asked.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// By which name, if not by the default one.
    pub user: Option<String>,
    /// If one is needed.
    pub password: Option<String>,
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Redis(url) => url.fmt(f),
        }
    }
}

/// How many there are, and who leads to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One Redis.
    Single,
    /// Sentinels, which know the primary of that name.
    Sentinel {
        /// Its name.
        primary: String,
    },
    /// A cluster, of which some nodes are known.
    Cluster,
}

/// The URL of a Redis. Prints without user and password.
#[derive(Clone)]
pub struct RedisUrl {
    topology: Topology,
    nodes: Vec<ConnectionInfo>,
    sentinels: Login,
    shown: String,
}

impl RedisUrl {
    /// How many there are, and who leads to whom.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Is everything that is said to it encrypted?
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.nodes.iter().any(|node| matches!(node.addr(), ConnectionAddr::TcpTls { .. }))
    }

    /// The servers that are named, of sentinels these, with user and password: to connect, never to print.
    #[must_use]
    pub fn reveal(&self) -> &[ConnectionInfo] {
        &self.nodes
    }

    /// As who sentinels are asked: to connect, never to print.
    #[must_use]
    pub fn reveal_sentinels(&self) -> &Login {
        &self.sentinels
    }

    /// With this password of the sentinels in place of its own.
    #[must_use]
    pub fn with_sentinel_password(mut self, password: &str) -> Self {
        self.sentinels.password = Some(password.to_owned());
        self
    }

    /// With this password in place of its own.
    #[must_use]
    pub fn with_password(mut self, password: &str) -> Self {
        for node in &mut self.nodes {
            let settings = node.redis_settings().clone().set_password(password);
            *node = node.clone().set_redis_settings(settings);
        }
        self
    }
}

impl PartialEq for RedisUrl {
    fn eq(&self, other: &Self) -> bool {
        let said = |url: &Self| {
            url.nodes
                .iter()
                .map(|node| format!("{:?}", (node.addr(), node.redis_settings())))
                .collect::<Vec<_>>()
        };
        self.topology == other.topology
            && self.sentinels == other.sentinels
            && self.shown == other.shown
            && said(self) == said(other)
    }
}

impl Eq for RedisUrl {}

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
fn shown(scheme: &str, topology: &Topology, nodes: &[ConnectionInfo]) -> String {
    let host = |info: &ConnectionInfo| match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } if host.contains(':') => {
            format!("[{host}]:{port}")
        }
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            format!("{host}:{port}")
        }
        ConnectionAddr::Unix(path) => path.display().to_string(),
        _ => "…".to_owned(),
    };
    let hosts = nodes.iter().map(host).collect::<Vec<_>>().join(",");
    let Some(first) = nodes.first() else { return format!("{scheme}://") };
    let redis = first.redis_settings();
    let secret = redis.username().is_some() || redis.password().is_some();
    let user = if secret { "***@" } else { "" };
    let db = redis.db();
    let tail = match (topology, first.addr()) {
        (Topology::Cluster, _) => String::new(),
        (Topology::Sentinel { primary }, _) => format!("/{primary}?db={db}"),
        (Topology::Single, ConnectionAddr::Unix(_)) => format!("?db={db}"),
        (Topology::Single, _) => format!("/{db}"),
    };
    format!("{scheme}://{user}{hosts}{tail}")
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
            ("rediss://me:hunter2@cache/2", "rediss://***@cache:6379/2"),
            (
                "redis-sentinel://me:hunter2@a,b:7,[::1]/main?db=3",
                "redis-sentinel://***@a:26379,b:7,[::1]:26379/main?db=3",
            ),
            (
                "redis-sentinel://a/main?sentinel_user=watch&sentinel_pass=hunter2&db=1",
                "redis-sentinel://a:26379/main?db=1",
            ),
            ("rediss+sentinel://a/main", "rediss+sentinel://a:26379/main?db=0"),
            ("redis-cluster://:hunter2@a:1,b:2", "redis-cluster://***@a:1,b:2"),
            ("valkeys-cluster://a", "valkeys-cluster://a:6379"),
        ] {
            let parsed = StoreUrl::new(url).unwrap();
            assert_eq!(parsed.to_string(), shown);
            assert!(!format!("{parsed:?}").contains("hunter2"));
            if let StoreUrl::Redis(parsed) = parsed {
                let secret = parsed.reveal().iter().all(|node| node.redis_settings().password().is_some())
                    || parsed.reveal_sentinels().password.is_some();
                assert_eq!(secret, url.contains("hunter2") && !url.contains("://hunter2"), "{url}");
                let other = parsed.with_password("another");
                assert!(
                    other.reveal().iter().all(|node| node.redis_settings().password() == Some("another"))
                );
            }
        }
    }

    #[test]
    fn sentinels_are_asked_as_somebody_else() {
        let StoreUrl::Redis(url) =
            StoreUrl::new("redis-sentinel://me:mine@a/b?db=2&sentinel_user=w%40tch&sentinel_pass=a%26b")
                .unwrap()
        else {
            panic!("no Redis")
        };
        let login = url.reveal_sentinels().clone();
        assert_eq!((login.user.as_deref(), login.password.as_deref()), (Some("w@tch"), Some("a&b")));
        let settings = url.reveal()[0].redis_settings();
        assert_eq!((settings.username(), settings.password(), settings.db()), (Some("me"), Some("mine"), 2));
        let other = url.clone().with_sentinel_password("c");
        assert_eq!(other.reveal_sentinels().password.as_deref(), Some("c"));
        assert_ne!(url, other);
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
            ("redis://me:hunter2@a:1,b:2", "(several hosts; one, or the scheme of"),
            ("redis-sentinel://me:hunter2@a", "(no name of a primary; expected /name"),
            ("redis-sentinel://me:hunter2@a/", "(no name of a primary"),
            ("redis-sentinel://me:hunter2@a/b/c", "(no name of a primary"),
            ("redis-sentinel://me:hunter2@a/b?db=hunter2", "(Invalid database number)"),
            ("redis-sentinel://a/b?sentinel_pass=hunter2&db=hunter2", "(Invalid database number)"),
            ("redis-sentinel://me:hunter2@a,,b/c", "redis-sentinel:// URL"),
            ("redis-cluster://me:hunter2@a,b:x", "redis-cluster:// URL"),
            ("redis-cluster://me:hunter2@a/1", "(a cluster has one database, 0)"),
            ("unix-cluster://hunter2", "unknown scheme `unix-cluster://`"),
            ("sentinel://me:hunter2@a/b", "unknown scheme `sentinel://`"),
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
