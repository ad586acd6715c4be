//! The protocols in which a decision can be asked for. Each is a variant here and a service in `echo.rs`.

use tollgate_proto::envoy::extensions::common::ratelimit::v3::{
    RateLimitDescriptor, rate_limit_descriptor::Entry,
};
use tollgate_proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate_proto::v1;
use tollgate_proto::v1::rate_limiter_client::RateLimiterClient;
use tonic::Status;
use tonic::transport::Channel;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Api {
    /// `tollgate.v1.RateLimiter/ShouldRateLimit`
    Native,
    /// `envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit`, of the domain `load`
    Envoy,
}

/// The rules of that domain: what the classes of the budgets are to a native call, by class and then by key.
pub(crate) const DOMAIN: &str = "
domain: load
descriptors:
  - { key: class, value: read,   descriptors: [ { key: key, rate_limit: { unit: second, requests_per_unit: 2000 } } ] }
  - { key: class, value: search, descriptors: [ { key: key, rate_limit: { unit: second, requests_per_unit: 200 } } ] }
  - key: class
    value: write
    descriptors: [ { key: key, rate_limit: { unit: second, requests_per_unit: 1000, algorithm: gcra } } ]
  - { key: class, value: export, descriptors: [ { key: key, rate_limit: { unit: minute, requests_per_unit: 1 } } ] }
";

/// One question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) key: String,
    pub(crate) class: String,
    pub(crate) cost: Option<u32>,
}

/// What is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Allowed,
    Denied,
    /// Decided by a share, without the store.
    Degraded,
}

/// Asks over one connection. A clone asks over the same one.
#[derive(Clone)]
pub(crate) enum Client {
    Native(RateLimiterClient<Channel>),
    Envoy(RateLimitServiceClient<Channel>),
}

impl Api {
    pub(crate) fn client(self, connection: Channel) -> Client {
        match self {
            Self::Native => Client::Native(RateLimiterClient::new(connection)),
            Self::Envoy => Client::Envoy(RateLimitServiceClient::new(connection)),
        }
    }
}

impl Client {
    /// Is it allowed?
    pub(crate) async fn ask(&mut self, call: Call) -> Result<Answer, Status> {
        let Call { key, class, cost } = call;
        match self {
            Self::Native(client) => {
                let asked = v1::ShouldRateLimitRequest { key, class, cost };
                let answer = client.should_rate_limit(asked).await?.into_inner();
                Ok(match answer.verdict() {
                    _ if answer.degraded => Answer::Degraded,
                    v1::Verdict::Allow => Answer::Allowed,
                    _ => Answer::Denied,
                })
            }
            Self::Envoy(client) => {
                let entries =
                    [("class", class), ("key", key)].map(|(key, value)| Entry { key: key.into(), value });
                let descriptor =
                    RateLimitDescriptor { entries: entries.into(), ..RateLimitDescriptor::default() };
                let asked = RateLimitRequest {
                    domain: "load".into(),
                    descriptors: vec![descriptor],
                    hits_addend: cost.unwrap_or_default(),
                };
                let answer = client.should_rate_limit(asked).await?.into_inner();
                let is_over = answer.overall_code() == Code::OverLimit;
                Ok(if is_over { Answer::Denied } else { Answer::Allowed })
            }
        }
    }
}
