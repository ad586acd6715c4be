//! Asking the server as a client does: over gRPC, by the wire types, each call with an end.

use super::{DEADLINE, Engine, Redis, Tollgate, engines};
use deadpool_redis::redis;
use std::future::Future;
use std::time::Duration;
use tokio::task::JoinHandle;
use tollgate_proto::v1::rate_limiter_client::RateLimiterClient;
use tollgate_proto::v1::{
    BorrowRequest, BorrowResponse, Reason, ReturnRequest, ShouldRateLimitRequest, ShouldRateLimitResponse,
    Verdict,
};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// Waits for an answer, and panics if there is none: a call that hangs is worse than one that fails.
pub(crate) async fn answer<T>(call: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, call).await.expect("every call is answered")
}

/// A client of one server, with a connection of its own. Clones share it.
#[derive(Clone)]
pub(crate) struct Caller(Channel);

impl Tollgate {
    /// A client of it.
    pub(crate) async fn caller(&self) -> Caller {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.grpc())).unwrap();
        Caller(answer(endpoint.connect()).await.expect("the server takes connections"))
    }

    /// A client of it, once it says that it serves with its store.
    pub(crate) async fn serving(&self) -> Caller {
        let caller = self.caller().await;
        caller.until_ready(true).await;
        caller
    }
}

impl Caller {
    /// Its connection, for another service on it.
    pub(crate) fn channel(&self) -> Channel {
        self.0.clone()
    }

    /// The stub, for what there is no shorter word for.
    pub(crate) fn stub(&self) -> RateLimiterClient<Channel> {
        RateLimiterClient::new(self.0.clone())
    }

    /// One decision, or why there is none.
    pub(crate) async fn try_ask(
        &self,
        key: &str,
        class: &str,
        cost: impl Into<Option<u32>>,
    ) -> Result<ShouldRateLimitResponse, Status> {
        let request = ShouldRateLimitRequest { key: key.into(), class: class.into(), cost: cost.into() };
        answer(self.stub().should_rate_limit(request)).await.map(tonic::Response::into_inner)
    }

    /// One decision. `None` costs what the class does.
    pub(crate) async fn ask(
        &self,
        key: &str,
        class: &str,
        cost: impl Into<Option<u32>>,
    ) -> ShouldRateLimitResponse {
        self.try_ask(key, class, cost).await.unwrap_or_else(|why| panic!("{key} {class}: {why:?}"))
    }

    /// What is left in a bucket, by a look that changes nothing.
    pub(crate) async fn remaining(&self, key: &str, class: &str) -> u64 {
        self.ask(key, class, 0).await.remaining
    }

    /// Some tokens ahead. `..BorrowRequest::default()` is for what is not of interest.
    pub(crate) async fn borrow(&self, request: BorrowRequest) -> BorrowResponse {
        answer(self.stub().borrow(request)).await.unwrap().into_inner()
    }

    /// Gives a lease back; returns what was credited.
    pub(crate) async fn give_back(&self, lease_id: &str, unused: u32) -> u32 {
        let request = ReturnRequest { lease_id: lease_id.into(), unused };
        answer(self.stub().r#return(request)).await.unwrap().into_inner().credited
    }

    /// What the health service says of the whole.
    pub(crate) async fn health(&self) -> ServingStatus {
        self.health_of("").await
    }

    /// What it says of a service.
    pub(crate) async fn health_of(&self, service: &str) -> ServingStatus {
        let request = HealthCheckRequest { service: service.into() };
        answer(HealthClient::new(self.channel()).check(request)).await.unwrap().into_inner().status()
    }

    /// Waits until the health service says that it serves, with its store or without.
    pub(crate) async fn until_it_serves(&self) {
        super::eventually("it serves", async || {
            (self.health().await == ServingStatus::Serving).then_some(())
        })
        .await;
    }

    /// Waits until the health service says that decisions are made with the store, or without.
    pub(crate) async fn until_ready(&self, ready: bool) {
        let wanted = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        let what = format!("readiness is {wanted:?}");
        super::eventually(&what, async || (self.health_of("ready").await == wanted).then_some(())).await;
    }
}

/// May the call pass?
pub(crate) fn allowed(response: &ShouldRateLimitResponse) -> bool {
    match response.verdict() {
        Verdict::Allow => true,
        Verdict::Deny => false,
        Verdict::Unspecified => panic!("no verdict in {response:?}"),
    }
}

/// Why it may not.
pub(crate) fn denied(response: &ShouldRateLimitResponse) -> Reason {
    assert!(!allowed(response), "{response:?}");
    response.reason()
}

/// A duration of the wire, which must be there.
pub(crate) fn span(span: Option<prost_types::Duration>) -> Duration {
    span.expect("a duration").try_into().expect("no negative one")
}

/// A span that time has run off since it was right: at most that long, and not much less.
pub(crate) fn is_just_below(span: Duration, most: Duration) -> bool {
    span <= most && span + 3 * DEADLINE > most
}

/// Two calls at a server that lets one in: which of them is not known, but the one that is answered is the one
/// that was shed, and then the other is inside.
pub(crate) async fn one_shed_one_held(
    caller: &Caller,
    class: &'static str,
) -> (Status, JoinHandle<ShouldRateLimitResponse>) {
    let ask = |key: &'static str| {
        let caller = caller.clone();
        tokio::spawn(async move { caller.try_ask(key, class, None).await })
    };
    let (mut one, mut other) = (ask("one"), ask("other"));
    let (shed, held) = answer(async {
        tokio::select! {
            shed = &mut one => (shed, other),
            shed = &mut other => (shed, one),
        }
    })
    .await;
    let held = tokio::spawn(async { held.await.unwrap().expect("a call that is let in is decided") });
    (shed.unwrap().expect_err("one too many"), held)
}

/// Where the buckets of a server under test are.
pub(crate) enum Backing {
    /// In itself.
    Memory,
    /// In a Redis of the test's own.
    Redis(Engine, Redis),
}

/// Every place where buckets can be: a test of what the server means runs on all of them.
pub(crate) async fn backings() -> Vec<Backing> {
    let mut backings = vec![Backing::Memory];
    for engine in engines() {
        backings.push(Backing::Redis(engine, Redis::start(engine).await));
    }
    backings
}

impl std::fmt::Display for Backing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Redis(engine, _) => write!(f, "{engine:?}"),
        }
    }
}

impl Backing {
    /// A server with its buckets there. It waits for its store as long as the tests do, so that a busy
    /// machine is not taken for a sick one.
    pub(crate) async fn serve(&self, classes: &str) -> (Tollgate, Caller) {
        let url = match self {
            Self::Memory => "memory".to_owned(),
            Self::Redis(_, redis) => redis.url(),
        };
        let config = format!("store: {{ url: \"{url}\", deadline: 10s }}\nclasses:\n{classes}");
        let server = Tollgate::start(&config).await;
        let caller = server.serving().await;
        (server, caller)
    }

    /// The Redis, if there is one.
    pub(crate) fn redis(&mut self) -> Option<&mut Redis> {
        match self {
            Self::Memory => None,
            Self::Redis(_, redis) => Some(redis),
        }
    }
}

impl Redis {
    /// All its keys, in order.
    pub(crate) async fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = redis::from_redis_value(self.command(&["KEYS", "*"]).await).unwrap();
        keys.sort();
        keys
    }
}
