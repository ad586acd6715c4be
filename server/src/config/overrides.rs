//! Arguments and `TOLLGATE_…` variables that beat the file.

use super::{Config, ConfigError, ServerTls, set, setting};
use crate::tokens::Known;
use crate::yaml::Scalar;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

// What the command line and the environment say. The command line beats the environment, and both beat the
// file.
#[expect(missing_docs, reason = "clap would show them as the description of the program that has these")]
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Overrides {
    /// The file with server, store and rules [default: ./tollgate.yaml, or else a built-in set of rules]
    #[arg(short, long, value_name = "FILE", env = "TOLLGATE_CONFIG")]
    pub(super) config: Option<PathBuf>,

    /// A file or a folder with rules of Envoy's domains, in place of those that the file names; more than once for more
    #[arg(long, value_name = "PATH", env = "TOLLGATE_DOMAINS", value_delimiter = ',')]
    domains: Vec<PathBuf>,

    /// Where gRPC listens [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDR", env = "TOLLGATE_GRPC", value_parser = by(setting::address))]
    grpc: Option<SocketAddr>,

    /// Where HTTP listens [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", env = "TOLLGATE_HTTP", value_parser = by(setting::address))]
    http: Option<SocketAddr>,

    /// The longest key, in bytes [default: 512]
    #[arg(long, value_name = "BYTES", env = "TOLLGATE_MAX_KEY_BYTES", value_parser = by(setting::max_key_bytes))]
    max_key_bytes: Option<usize>,

    /// How many calls may be in flight before more are shed [default: 4096]
    #[arg(long, value_name = "CALLS", env = "TOLLGATE_MAX_IN_FLIGHT", value_parser = by(setting::max_in_flight))]
    max_in_flight: Option<usize>,

    /// How many connections each of gRPC and HTTP may have at a time [default: 8192]
    #[arg(long, value_name = "N", env = "TOLLGATE_MAX_CONNECTIONS", value_parser = by(setting::max_connections))]
    max_connections: Option<usize>,

    /// And how many of these may be from one peer [default: 1024]
    #[arg(long, value_name = "N", env = "TOLLGATE_MAX_CONNECTIONS_PER_PEER", value_parser = by(setting::max_connections))]
    max_connections_per_peer: Option<usize>,

    /// How long a gRPC connection is used; then its caller is asked to make another [default: 1h]
    #[arg(long, value_name = "TIME", env = "TOLLGATE_MAX_CONNECTION_AGE", value_parser = by(setting::max_connection_age))]
    max_connection_age: Option<Duration>,

    /// The certificate that gRPC is served with, in PEM [default: none, so without TLS]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// The key of that certificate, in PEM [default: none]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// The authority of callers, in PEM: who has no certificate by it is not served [default: none, so all are]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CLIENT_CA", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,

    /// A file with a bearer token; more than once for more: who shows none of them is not heard [default: none, so all are]
    #[arg(long = "token-file", value_name = "FILE", env = "TOLLGATE_TOKEN_FILES", value_delimiter = ',')]
    token_files: Vec<PathBuf>,

    /// Where buckets are kept: `memory`, `redis://host:port/db`, `redis+unix:///path?db=0`,
    /// `redis-sentinel://host:port,host:port/name`, `redis-cluster://host:port,host:port`; `rediss…` by TLS [default: memory]
    #[arg(long, value_name = "URL", env = "TOLLGATE_STORE", hide_env_values = true)]
    store: Option<Hidden>,

    /// A file with the password of Redis, in place of the URL's [default: none]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_STORE_PASSWORD_FILE")]
    store_password_file: Option<PathBuf>,

    /// A file with the password of its sentinels, in place of the URL's [default: none]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_STORE_SENTINEL_PASSWORD_FILE")]
    store_sentinel_password_file: Option<PathBuf>,

    /// The authority that has signed the certificate of a Redis by TLS, in PEM [default: the system's]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_STORE_TLS_CA")]
    store_tls_ca: Option<PathBuf>,

    /// A certificate to show to Redis, in PEM [default: none]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_STORE_TLS_CERT", requires = "store_tls_key")]
    store_tls_cert: Option<PathBuf>,

    /// The key of that certificate, in PEM [default: none]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_STORE_TLS_KEY", requires = "store_tls_cert")]
    store_tls_key: Option<PathBuf>,

    /// What every key in Redis begins with [default: rl]
    #[arg(long, value_name = "TEXT", env = "TOLLGATE_PREFIX", value_parser = text(setting::prefix))]
    prefix: Option<String>,

    /// How long an answer of Redis may take [default: 25ms]
    #[arg(long, value_name = "DURATION", env = "TOLLGATE_STORE_DEADLINE", value_parser = text(setting::deadline))]
    store_deadline: Option<Duration>,

    /// How many connections to Redis there are at most [default: 4]
    #[arg(long, value_name = "N", env = "TOLLGATE_STORE_CONNECTIONS", value_parser = by(setting::connections))]
    store_connections: Option<usize>,

    /// How many instances are thought to share Redis until it tells [default: 1]
    #[arg(long, value_name = "N", env = "TOLLGATE_STORE_INSTANCES", value_parser = by(setting::instances))]
    store_instances: Option<u32>,

    /// How many buckets memory holds at most, and as many records and leases [default: 1000000]
    #[arg(long, value_name = "N", env = "TOLLGATE_MAX_KEYS", value_parser = by(setting::max_keys))]
    max_keys: Option<usize>,

    /// How many bytes memory takes at most for each of the three [default: 1073741824]
    #[arg(long, value_name = "BYTES", env = "TOLLGATE_MAX_BYTES", value_parser = by(setting::max_bytes))]
    max_bytes: Option<usize>,
}

impl Overrides {
    /// Do they name the domains?
    pub(super) fn are_domains(&self) -> bool {
        !self.domains.is_empty()
    }

    pub(super) fn apply(&self, config: &mut Config) -> Result<(), ConfigError> {
        let Config { server, store, .. } = config;
        set(&mut server.grpc, self.grpc);
        set(&mut server.http, self.http);
        set(&mut server.max_key_bytes, self.max_key_bytes);
        set(&mut server.max_in_flight, self.max_in_flight);
        set(&mut server.max_connections, self.max_connections);
        set(&mut server.max_connections_per_peer, self.max_connections_per_peer);
        set(&mut server.max_connection_age, self.max_connection_age);
        if let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) {
            let client_ca = self.tls_client_ca.clone();
            server.tls = Some(ServerTls { cert: cert.clone(), key: key.clone(), client_ca });
        }
        if !self.token_files.is_empty() {
            let read = self.token_files.iter().cloned().map(Known::read).collect::<Result<_, _>>();
            server.tokens = read.map_err(|message| ConfigError::Override {
                name: "--token-file or TOLLGATE_TOKEN_FILES",
                message,
            })?;
        }
        for (setting, path) in [
            (&mut store.password_file, &self.store_password_file),
            (&mut store.sentinel_password_file, &self.store_sentinel_password_file),
            (&mut store.tls.ca, &self.store_tls_ca),
            (&mut store.tls.cert, &self.store_tls_cert),
            (&mut store.tls.key, &self.store_tls_key),
        ] {
            if path.is_some() {
                setting.clone_from(path);
            }
        }
        set(&mut store.prefix, self.prefix.clone());
        set(&mut store.deadline, self.store_deadline);
        set(&mut store.connections, self.store_connections);
        set(&mut store.instances, self.store_instances);
        set(&mut store.max_keys, self.max_keys);
        set(&mut store.max_bytes, self.max_bytes);
        if self.are_domains() {
            let there = self.domains.iter().cloned().map(setting::there).collect::<Result<_, _>>();
            config.domains = there.map_err(|message| ConfigError::Override {
                name: "--domains or TOLLGATE_DOMAINS",
                message,
            })?;
        }
        if let Some(Hidden(url)) = &self.store {
            store.url = setting::store(&Scalar::Text(url.clone()))
                .map_err(|message| ConfigError::Override { name: "--store or TOLLGATE_STORE", message })?;
        }
        Ok(())
    }
}

type Read<T> = fn(&Scalar) -> Result<T, String>;

/// A setting that may be a number.
fn by<T>(read: Read<T>) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |given| read(&Scalar::argument(given))
}

/// A setting that is a text, even if it looks like a number.
fn text<T>(read: Read<T>) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |given| read(&Scalar::Text(given.to_owned()))
}

/// A store's URL as it was given. It is not parsed with the other arguments, because what does not parse is
/// printed there in full.
#[derive(Clone)]
struct Hidden(String);

impl From<String> for Hidden {
    fn from(url: String) -> Self {
        Self(url)
    }
}

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
