//! The client as a gateway uses it.

use crate::clock::{Clock, micros, since_epoch};
use crate::error::Error;
use crate::fallback::{Fallback, Outage, Rule};
use crate::keeper::{END, keep};
use crate::keys::{Key, Keys};
use crate::service::{Authorization, Service};
use crate::shared::Shared;
use crate::verdict::{Answer, Denial, Verdict};
use async_channel::Sender;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::watch;
use tonic::transport::Endpoint;

/// How long an answer may take unless it is said otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_millis(50);

/// Keys that are remembered unless it is said otherwise.
pub const DEFAULT_MAX_KEYS: usize = 50_000;

/// Calls to the service at a time, of those that the client makes by itself.
const MOST_IN_FLIGHT: usize = 128;

/// Keys that wait for a Borrow.
const MOST_WANTED: usize = 1_024;

/// A client of Tollgate. Clones share everything; when the last one is dropped, what it held goes back.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    end: Arc<End>,
}

/// Tells the keeper to end.
#[derive(Debug)]
struct End {
    wanted: Sender<Arc<Key>>,
    done: watch::Receiver<bool>,
}

impl Drop for End {
    fn drop(&mut self) {
        self.wanted.close();
    }
}

impl Client {
    /// A client of the service at `url`, such as `http://127.0.0.1:8081`, with every setting at its default.
    ///
    /// # Errors
    /// As [`Builder::build`].
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(url: impl Into<String>) -> Result<Self, Error> {
        Self::builder(url).build()
    }

    /// A client of the service at `url`, to be set up.
    pub fn builder(url: impl Into<String>) -> Builder {
        Builder {
            endpoints: vec![url.into()],
            deadline: DEFAULT_DEADLINE,
            gateway: None,
            max_keys: DEFAULT_MAX_KEYS,
            fallback: Fallback::Deny,
            fallbacks: HashMap::new(),
            tls: None,
            token: None,
        }
    }

    /// Decides a call from what is at hand: borrowed tokens, a denial that still stands, or, while the service is
    /// gone, the fallback. `None` if there is nothing to decide it from: then [`decide`](Self::decide), which asks.
    ///
    /// Takes no lock, and does not allocate.
    #[must_use]
    pub fn check(&self, key: &str, class: &str) -> Option<Verdict> {
        self.shared.check(key, class, None)
    }

    /// Decides a call: by [`check`](Self::check) if it can, else by asking the service, else, if that does not
    /// answer, by the fallback of the class ([`degraded`](Verdict::degraded) then). `cost` is the class's if it is
    /// `None`.
    ///
    /// # Errors
    /// The request can not be: [`Error::is_refusal`] holds. A service that is gone is no error.
    pub async fn decide(&self, key: &str, class: &str, cost: Option<u32>) -> Result<Verdict, Error> {
        self.shared.decide(key, class, cost).await
    }

    /// Asks the service whether a call may pass, whatever is at hand. `cost` is the class's if it is `None`; zero
    /// only looks.
    ///
    /// # Errors
    /// The service refused the request, or did not answer in time.
    pub async fn should_rate_limit(
        &self,
        key: &str,
        class: &str,
        cost: Option<u32>,
    ) -> Result<Answer, Error> {
        self.shared.ask(key, class, cost).await
    }

    /// Waits for its turn: decides as [`decide`](Self::decide) does, waits as long as a leaky bucket says, and tries
    /// a denied call again when it would fit. The verdict is a denial if that would take longer than `within`,
    /// said as soon as it is known, or if the key is blocked.
    ///
    /// A turn that a leaky bucket has given beyond `within` is not waited for and is lost: then too the verdict is a
    /// denial.
    ///
    /// # Errors
    /// As [`decide`](Self::decide).
    pub async fn acquire(
        &self,
        key: &str,
        class: &str,
        cost: Option<u32>,
        within: Duration,
    ) -> Result<Verdict, Error> {
        let until = self.shared.clock.now().after(within);
        loop {
            let verdict = self.decide(key, class, cost).await?;
            let left = until.since(self.shared.clock.now());
            match verdict.denied {
                None if verdict.wait <= left => {
                    tokio::time::sleep(verdict.wait).await;
                    return Ok(verdict);
                }
                None => {
                    let denied = Some(Denial::OverLimit);
                    return Ok(Verdict { denied, cost: 0, retry_after: verdict.wait, ..verdict });
                }
                Some(Denial::OverLimit) if verdict.retry_after <= left && !left.is_zero() => {
                    // At least a little, so that nobody spins.
                    tokio::time::sleep(verdict.retry_after.max(Duration::from_millis(1))).await;
                }
                Some(_) => return Ok(verdict),
            }
        }
    }

    /// Whether the service is taken to be gone: several calls in a row were not answered. It is being looked for.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        self.shared.outage.is_gone()
    }

    /// How many calls were made to the service, of all kinds: what decisions at hand save.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.shared.service.calls()
    }

    /// How many keys are remembered.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.shared.keys.len()
    }

    /// Gives back what is held, for all clones, in 50 ms at most. Afterwards every call is asked for.
    pub async fn shutdown(&self) {
        self.end.wanted.close();
        let mut done = self.end.done.clone();
        // The keeper keeps to its own time; this is for one that was stopped with its runtime.
        drop(tokio::time::timeout(2 * END, done.wait_for(|done| *done)).await);
    }
}

/// Sets up a [`Client`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it builds"]
pub struct Builder {
    endpoints: Vec<String>,
    deadline: Duration,
    gateway: Option<String>,
    max_keys: usize,
    fallback: Fallback,
    fallbacks: HashMap<String, Fallback>,
    tls: Option<Tls>,
    /// Sensitive, so it is never printed; an error where the text can be no header field.
    token: Option<Result<Authorization, ()>>,
}

impl Builder {
    /// One more instance of the service, on the same store. One is used until it fails.
    pub fn endpoint(mut self, url: impl Into<String>) -> Self {
        self.endpoints.push(url.into());
        self
    }

    /// How long an answer may take: 1 ms to a minute, [`DEFAULT_DEADLINE`] unless set. Connecting is within it.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The name of this gateway, 1 to 128 bytes. No two that run at a time may have the same. Random unless set.
    pub fn gateway(mut self, name: impl Into<String>) -> Self {
        self.gateway = Some(name.into());
        self
    }

    /// How many keys are remembered, [`DEFAULT_MAX_KEYS`] unless set. Each takes about 600 bytes and its names. When
    /// there are more, those used longest ago are dropped, and their tokens go back. One that is longer than 1024 bytes
    /// with its class is not remembered: each call is asked for.
    pub fn max_keys(mut self, most: usize) -> Self {
        self.max_keys = most;
        self
    }

    /// What to do with calls of any class while the service is gone and has never been heard of that class:
    /// [`Fallback::Deny`] unless set.
    pub fn fallback(mut self, fallback: Fallback) -> Self {
        self.fallback = fallback;
        self
    }

    /// The same for one class.
    pub fn class_fallback(mut self, class: impl Into<String>, fallback: Fallback) -> Self {
        self.fallbacks.insert(class.into(), fallback);
        self
    }

    /// The bearer token that is shown with each call. It is a secret by TLS only.
    pub fn token(mut self, token: &str) -> Self {
        let mut shown = Authorization::try_from(format!("Bearer {token}")).map_err(drop);
        if let Ok(shown) = &mut shown {
            shown.set_sensitive(true);
        }
        self.token = Some(shown);
        self
    }

    /// Certificates and names for `https` endpoints. Unless set, the roots of the web are trusted.
    #[cfg(feature = "tls")]
    pub fn tls(mut self, tls: tonic::transport::ClientTlsConfig) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Makes the client. It connects with the first call.
    ///
    /// # Errors
    /// A setting can not be.
    ///
    /// # Panics
    /// Outside of a tokio runtime: a client has a task.
    pub fn build(self) -> Result<Client, Error> {
        let bounds = Duration::from_millis(1)..=Duration::from_secs(60);
        let deadline = self.deadline;
        let wrong = |setting, value: String, expected| Err(Error::Setting { setting, value, expected });
        if !bounds.contains(&deadline) {
            return wrong("deadline", format!("{deadline:?}"), "1ms to 60s");
        }
        if !(1..=10_000_000).contains(&self.max_keys) {
            return wrong("max_keys", self.max_keys.to_string(), "1 to 10000000");
        }
        let gateway = self.gateway.clone().unwrap_or_else(|| format!("gateway-{:016x}", fastrand::u64(..)));
        if !(1..=128).contains(&gateway.len()) {
            return wrong("gateway", format!("{} bytes", gateway.len()), "1 to 128 bytes");
        }
        for fallback in self.fallbacks.values().chain([&self.fallback]) {
            if let Fallback::Limit { rate_per_s, burst } = *fallback
                && !(rate_per_s > 0.0 && rate_per_s.is_finite() && burst > 0)
            {
                return wrong("fallback", format!("{burst} at {rate_per_s} a second"), "both above zero");
            }
        }
        let Ok(token) = self.token.transpose() else {
            return wrong("token", "***".to_owned(), "printable characters of ASCII");
        };
        let endpoints =
            self.endpoints.iter().map(|url| reach(url, self.tls.as_ref())).collect::<Result<Vec<_>, _>>()?;
        let (wanted, wants) = async_channel::bounded(MOST_WANTED);
        let (done, is_done) = watch::channel(false);
        let classes =
            self.fallbacks.into_iter().map(|(class, fallback)| (class, Arc::new(Rule::new(fallback))));
        let shared = Arc::new(Shared {
            clock: Clock::system(),
            keys: Keys::new(self.max_keys),
            service: Service::new(endpoints, deadline, gateway, token),
            outage: Outage::default(),
            wanted: wanted.clone(),
            // Above all numbers of an earlier life under the same name.
            seq: AtomicU64::new(micros(since_epoch())),
            unanswered: parking_lot::Mutex::default(),
            gone: tokio::sync::Notify::new(),
            classes: parking_lot::Mutex::new(classes.collect()),
            fallback: self.fallback,
        });
        tokio::spawn(keep(shared.clone(), wants, MOST_IN_FLIGHT, done));
        Ok(Client { shared, end: Arc::new(End { wanted, done: is_done }) })
    }
}

/// Late answers, to calls that were given up, are no fault of the service, however many: nobody else's calls may be lost
/// for them.
fn reach(url: &str, tls: Option<&Tls>) -> Result<Endpoint, Error> {
    let endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|_| Error::Url(url.to_owned()))?
        .http2_max_local_error_reset_streams(None);
    if endpoint.uri().scheme_str() == Some("https") { secured(endpoint, tls) } else { Ok(endpoint) }
}

#[cfg(feature = "tls")]
type Tls = tonic::transport::ClientTlsConfig;

#[cfg(feature = "tls")]
fn secured(endpoint: Endpoint, tls: Option<&Tls>) -> Result<Endpoint, Error> {
    let tls = tls.cloned().unwrap_or_else(|| Tls::new().with_enabled_roots());
    endpoint.tls_config(tls).map_err(|error| Error::Tls(error.to_string()))
}

#[cfg(not(feature = "tls"))]
type Tls = std::convert::Infallible;

#[cfg(not(feature = "tls"))]
fn secured(_endpoint: Endpoint, _tls: Option<&Tls>) -> Result<Endpoint, Error> {
    Err(Error::Tls("an https endpoint needs the feature `tls` of this crate".into()))
}
