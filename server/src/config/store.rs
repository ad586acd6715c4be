//! Where the process keeps buckets: what is said of it, and what holds if nothing is.

use super::{StoreUrl, set, setting};
use crate::yaml::{Given, Report, Scalar, Text};
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the process keeps buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// Which store.
    pub url: StoreUrl,
    /// The password of Redis, in place of the URL's.
    pub password_file: Option<PathBuf>,
    /// The password of its sentinels, in place of the URL's.
    pub sentinel_password_file: Option<PathBuf>,
    /// For a Redis that is asked by TLS.
    pub tls: StoreTls,
    /// What every key in Redis begins with.
    pub prefix: String,
    /// How long an answer of Redis may take.
    pub deadline: Duration,
    /// How many connections to Redis there are at most.
    pub connections: usize,
    /// How many instances are thought to share it until it tells.
    pub instances: u32,
    /// How many buckets memory holds at most.
    pub max_keys: usize,
    /// How many bytes memory takes for them at most.
    pub max_bytes: usize,
}

/// Who is believed to be Redis, and as who it is asked. Files in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreTls {
    /// The authority that has signed Redis's certificate, in place of the system's.
    pub ca: Option<PathBuf>,
    /// A certificate of our own, and its key.
    pub cert: Option<PathBuf>,
    /// The key of that.
    pub key: Option<PathBuf>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            url: StoreUrl::Memory,
            password_file: None,
            sentinel_password_file: None,
            tls: StoreTls::default(),
            prefix: "rl".to_owned(),
            deadline: Duration::from_millis(25),
            connections: 4,
            instances: 1,
            max_keys: 1_000_000,
            max_bytes: 1 << 30,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct StoreMapping {
    url: Given<Scalar>,
    password_file: Given<Text>,
    sentinel_password_file: Given<Text>,
    tls: Given<TlsSettings>,
    prefix: Given<Scalar>,
    deadline: Given<Scalar>,
    connections: Given<Scalar>,
    instances: Given<Scalar>,
    max_keys: Given<Scalar>,
    max_bytes: Given<Scalar>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct TlsSettings {
    ca: Given<Text>,
    cert: Given<Text>,
    key: Given<Text>,
}

pub(super) enum StoreSettings {
    /// What should be a URL.
    Url(Scalar),
    Mapping(Box<StoreMapping>),
}

impl<'de> Deserialize<'de> for StoreSettings {
    fn deserialize<D: Deserializer<'de>>(yaml: D) -> Result<Self, D::Error> {
        yaml.deserialize_any(StoreVisitor)
    }
}

struct StoreVisitor;

impl<'de> Visitor<'de> for StoreVisitor {
    type Value = StoreSettings;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`memory`, a URL such as redis://host:port/db, or a mapping")
    }

    fn visit_str<E>(self, text: &str) -> Result<StoreSettings, E> {
        Ok(StoreSettings::Url(Scalar::Text(text.to_owned())))
    }

    // The rest is wrong, but an error from here would have no place.

    fn visit_unit<E>(self) -> Result<StoreSettings, E> {
        Ok(StoreSettings::Url(Scalar::Null))
    }

    fn visit_bool<E>(self, flag: bool) -> Result<StoreSettings, E> {
        Ok(StoreSettings::Url(Scalar::Flag(flag)))
    }

    fn visit_u64<E>(self, n: u64) -> Result<StoreSettings, E> {
        Ok(StoreSettings::Url(Scalar::Whole(n)))
    }

    fn visit_i64<E>(self, n: i64) -> Result<StoreSettings, E> {
        Ok(StoreSettings::Url(Scalar::Other(n.to_string())))
    }

    fn visit_f64<E>(self, n: f64) -> Result<StoreSettings, E> {
        Ok(StoreSettings::Url(Scalar::Other(n.to_string())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<StoreSettings, A::Error> {
        Scalar::deserialize(SeqAccessDeserializer::new(list)).map(StoreSettings::Url)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<StoreSettings, A::Error> {
        StoreMapping::deserialize(MapAccessDeserializer::new(map))
            .map(|it| StoreSettings::Mapping(Box::new(it)))
    }
}

pub(super) fn store(given: &Given<StoreSettings>, folder: &Path, report: &mut Report) -> StoreConfig {
    let file = |path: &Text| setting::there(folder.join(path.bounded(1..=4096)?));
    let mut store = StoreConfig::default();
    match given.value() {
        None => {}
        Some(StoreSettings::Url(url)) => match setting::store(url) {
            Ok(url) => store.url = url,
            Err(message) => report.section("store", given.place()).fault("", None, message),
        },
        Some(StoreSettings::Mapping(settings)) => {
            let mut at = report.section("store", given.place());
            set(&mut store.url, at.get("url", &settings.url, setting::store));
            store.password_file = at.get("password_file", &settings.password_file, file);
            store.sentinel_password_file =
                at.get("sentinel_password_file", &settings.sentinel_password_file, file);
            if let Some(tls) = settings.tls.value() {
                let mut at = at.section("tls", settings.tls.place());
                store.tls.ca = at.get("ca", &tls.ca, file);
                store.tls.cert = at.get("cert", &tls.cert, file);
                store.tls.key = at.get("key", &tls.key, file);
                if tls.cert.value().is_some() != tls.key.value().is_some() {
                    at.fault("", None, "one of cert and key; expected both or none");
                }
            }
            set(&mut store.prefix, at.get("prefix", &settings.prefix, setting::prefix));
            set(&mut store.deadline, at.get("deadline", &settings.deadline, setting::deadline));
            set(&mut store.connections, at.get("connections", &settings.connections, setting::connections));
            set(&mut store.instances, at.get("instances", &settings.instances, setting::instances));
            set(&mut store.max_keys, at.get("max_keys", &settings.max_keys, setting::max_keys));
            set(&mut store.max_bytes, at.get("max_bytes", &settings.max_bytes, setting::max_bytes));
        }
    }
    store
}
