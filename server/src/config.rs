//! What the process is told: by a file, then by arguments and variables, which beat it.
//!
//! One file holds the server, the store and the rules, so that one path is all that a deployment passes on.

mod overrides;
mod setting;
mod store;
#[cfg(test)]
mod tests;
mod url;

pub use crate::yaml::{Fault, Faults};
pub use overrides::Overrides;
pub use store::{StoreConfig, StoreTls};
use store::{StoreSettings, store};
pub use url::{RedisUrl, StoreUrl, StoreUrlError, Topology};

use crate::rules::Rules;
use crate::rules::file::{Classes, compile};
use crate::tokens::Known;
use crate::yaml::{self, Given, Report, Scalar, Text};
use serde::Deserialize;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file that is used if none is named.
pub const DEFAULT_FILE: &str = "tollgate.yaml";

/// The file that is used if there is none.
pub const BUILT_IN: &str = include_str!("config/built_in.yaml");

/// All that the process is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// How it serves.
    pub server: Server,
    /// Where it keeps buckets.
    pub store: StoreConfig,
    /// What it decides by, without the domains.
    pub rules: Rules,
    /// Where the rules of Envoy's domains are: files, and folders of files.
    pub domains: Vec<PathBuf>,
    /// Who said so.
    pub source: Source,
    /// What beats the file.
    pub overrides: Overrides,
}

/// How the process serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Where gRPC listens.
    pub grpc: SocketAddr,
    /// Where HTTP listens.
    pub http: SocketAddr,
    /// The longest key, in bytes.
    pub max_key_bytes: usize,
    /// How many calls may be in flight; those above are shed.
    pub max_in_flight: usize,
    /// How many connections each of gRPC and HTTP may have at a time.
    pub max_connections: usize,
    /// And how many of these may be from one peer.
    pub max_connections_per_peer: usize,
    /// How long a gRPC connection is used; then its caller is asked to make another.
    pub max_connection_age: Duration,
    /// As who gRPC is served, if by TLS.
    pub tls: Option<ServerTls>,
    /// Who may ask; everybody if there are none.
    pub tokens: Vec<Known>,
}

/// As who gRPC is served, and to whom. Files in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerTls {
    /// The certificate that callers are shown, and those between it and its authority.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority of callers: who has no certificate by it is not served.
    pub client_ca: Option<PathBuf>,
}

/// The ports of envoyproxy/ratelimit, but on loopback.
impl Default for Server {
    fn default() -> Self {
        Self {
            grpc: (Ipv4Addr::LOCALHOST, 8081).into(),
            http: (Ipv4Addr::LOCALHOST, 8080).into(),
            max_key_bytes: 512,
            max_in_flight: 4096,
            max_connections: 8192,
            max_connections_per_peer: 1024,
            max_connection_age: Duration::from_secs(3600),
            tls: None,
            tokens: Vec::new(),
        }
    }
}

/// Who said what the rules are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file.
    File(PathBuf),
    /// Nobody: [`BUILT_IN`] holds.
    BuiltIn,
}

impl Source {
    /// What paths in it are relative to.
    fn folder(&self) -> &Path {
        match self {
            Self::File(path) => path.parent().unwrap_or(Path::new("")),
            Self::BuiltIn => Path::new(""),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::BuiltIn => f.write_str("<built-in>"),
        }
    }
}

impl Config {
    /// The file that is named, or else `./tollgate.yaml`, or if there is none the built-in rules; then the
    /// overrides.
    ///
    /// # Errors
    /// A file that can not be read or has faults, an override that can not be. No error holds a password.
    pub fn load(overrides: &Overrides) -> Result<Self, ConfigError> {
        Self::load_in(Path::new(""), overrides)
    }

    /// The file alone.
    ///
    /// # Errors
    /// A file that can not be read or has faults. No error holds a password.
    pub fn check(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        match yaml::text(path) {
            Ok(text) => {
                let mut config = Self::parse(Source::File(path.to_owned()), &text, None)?;
                config.overrides.config = Some(path.to_owned());
                Ok(config)
            }
            Err(error) => Err(ConfigError::Unreadable { file: path.display().to_string(), error }),
        }
    }

    fn load_in(directory: &Path, overrides: &Overrides) -> Result<Self, ConfigError> {
        let named = overrides.config.as_deref();
        let mut config = match Self::check(named.unwrap_or(&directory.join(DEFAULT_FILE))) {
            Err(ConfigError::Unreadable { error, .. })
                if named.is_none() && error.kind() == io::ErrorKind::NotFound =>
            {
                Self::parse(Source::BuiltIn, BUILT_IN.as_bytes(), None)
            }
            config => config,
        }?;
        overrides.apply(&mut config)?;
        config.overrides = overrides.clone();
        Ok(config)
    }

    /// The same, with the rules and the domains that its file has now. What else is in it holds from the start to the
    /// end, so what is wrong with that does not matter: a file with a secret may be gone by now.
    ///
    /// # Errors
    /// A file that can not be read or has faults.
    pub fn again(&self) -> Result<Self, ConfigError> {
        let Source::File(path) = &self.source else { return Ok(self.clone()) };
        let text = yaml::text(path)
            .map_err(|error| ConfigError::Unreadable { file: path.display().to_string(), error })?;
        let mut config = Self::parse(self.source.clone(), &text, Some(self))?;
        if self.overrides.are_domains() {
            config.domains.clone_from(&self.domains);
        }
        Ok(config)
    }

    /// `held`: whose settings hold, if not those of the text.
    fn parse(source: Source, text: &[u8], held: Option<&Self>) -> Result<Self, ConfigError> {
        let name = source.to_string();
        let file: Settings = yaml::read(&name, text)?;
        let mut report = Report::new(&name);
        let (server, store, overrides) = match held {
            Some(held) => (held.server.clone(), held.store.clone(), held.overrides.clone()),
            None => (
                server(&file.server, source.folder(), &mut report),
                store(&file.store, source.folder(), &mut report),
                Overrides::default(),
            ),
        };
        let domains = domains(&file.domains, &source, &mut report);
        let rules = if file.domains.value().is_some() && file.classes.value().is_none() {
            Rules::new([])
        } else {
            compile(&file.classes, &mut report)
        };
        Ok(report.end(Self { server, store, rules, domains, source, overrides })?)
    }
}

/// The files and folders of a list, which are relative to the file.
fn domains(given: &Given<Vec<Given<Text>>>, source: &Source, report: &mut Report) -> Vec<PathBuf> {
    let folder = source.folder();
    let mut at = report.section("domains", given.place());
    let list = given.value().into_iter().flatten().enumerate();
    list.filter_map(|(n, given)| {
        at.get(&n.to_string(), given, |path| setting::there(folder.join(path.bounded(1..=4096)?)))
    })
    .collect()
}

/// A file as it is written.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Settings {
    server: Given<ServerSettings>,
    store: Given<StoreSettings>,
    classes: Given<Classes>,
    domains: Given<Vec<Given<Text>>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ServerSettings {
    grpc: Given<Scalar>,
    http: Given<Scalar>,
    max_key_bytes: Given<Scalar>,
    max_in_flight: Given<Scalar>,
    max_connections: Given<Scalar>,
    max_connections_per_peer: Given<Scalar>,
    max_connection_age: Given<Scalar>,
    tls: Given<TlsSettings>,
    tokens: Given<Vec<Given<Text>>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TlsSettings {
    cert: Given<Text>,
    key: Given<Text>,
    client_ca: Given<Text>,
}

fn server(given: &Given<ServerSettings>, folder: &Path, report: &mut Report) -> Server {
    let mut server = Server::default();
    let Some(settings) = given.value() else { return server };
    let mut at = report.section("server", given.place());
    set(&mut server.grpc, at.get("grpc", &settings.grpc, setting::address));
    set(&mut server.http, at.get("http", &settings.http, setting::address));
    set(&mut server.max_key_bytes, at.get("max_key_bytes", &settings.max_key_bytes, setting::max_key_bytes));
    set(&mut server.max_in_flight, at.get("max_in_flight", &settings.max_in_flight, setting::max_in_flight));
    for (setting, name, given) in [
        (&mut server.max_connections, "max_connections", &settings.max_connections),
        (
            &mut server.max_connections_per_peer,
            "max_connections_per_peer",
            &settings.max_connections_per_peer,
        ),
    ] {
        set(setting, at.get(name, given, setting::max_connections));
    }
    let age = at.get("max_connection_age", &settings.max_connection_age, setting::max_connection_age);
    set(&mut server.max_connection_age, age);
    let tokens = settings.tokens.value().into_iter().flatten().enumerate();
    for (n, path) in tokens {
        let read = |path: &Text| Known::read(folder.join(path.bounded(1..=4096)?));
        let mut at = at.section("tokens", settings.tokens.place());
        server.tokens.extend(at.get(&n.to_string(), path, read));
    }
    if let Some(tls) = settings.tls.value() {
        let mut at = at.section("tls", settings.tls.place());
        let file = |path: &Text| setting::there(folder.join(path.bounded(1..=4096)?));
        let client_ca = at.get("client_ca", &tls.client_ca, file);
        match (at.get("cert", &tls.cert, file), at.get("key", &tls.key, file)) {
            (Some(cert), Some(key)) => server.tls = Some(ServerTls { cert, key, client_ca }),
            _ if tls.cert.value().is_some() && tls.key.value().is_some() => {}
            _ => at.fault("", None, "no cert or no key; expected both"),
        }
    }
    server
}

fn set<T>(setting: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *setting = value;
    }
}

/// A config that can not be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A file can not be read.
    #[error("{file}: can not be read: {error}")]
    Unreadable {
        /// The file, as it was named.
        file: String,
        /// What the system says. Part of the text, so it is not the source as well.
        error: io::Error,
    },
    /// A file has faults.
    #[error(transparent)]
    Faults(#[from] Faults),
    /// An argument or a variable is wrong.
    #[error("{name}: {message}")]
    Override {
        /// The argument and the variable.
        name: &'static str,
        /// What is wrong, and what is expected.
        message: String,
    },
}
