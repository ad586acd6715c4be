//! The protocols in which a decision can be asked for. Each is a variant here and a service in `echo.rs`.

use tollgate_proto::v1;
use tollgate_proto::v1::rate_limiter_client::RateLimiterClient;
use tonic::Status;
use tonic::transport::Channel;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Api {
    /// `tollgate.v1.RateLimiter/ShouldRateLimit`
    Native,
}

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
}

impl Api {
    pub(crate) fn client(self, connection: Channel) -> Client {
        match self {
            Self::Native => Client::Native(RateLimiterClient::new(connection)),
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
        }
    }
}
