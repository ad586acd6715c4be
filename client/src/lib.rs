//! A client of Tollgate, a rate-limit decision service.
//!
//! [`Client::should_rate_limit`] asks the service for each call. Every call has a deadline, and a lost
//! connection is made anew by the next one.

use std::time::Duration;
use tollgate_proto::v1::rate_limiter_client::RateLimiterClient;
use tollgate_proto::v1::{Reason, ShouldRateLimitRequest, ShouldRateLimitResponse, Verdict};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

/// How long an answer may take unless it is said otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_millis(50);

/// Asks one Tollgate. Clones share its connection.
#[derive(Clone, Debug)]
pub struct Client {
    inner: RateLimiterClient<Channel>,
    deadline: Duration,
}

impl Client {
    /// A client of the service at `url`, such as `http://127.0.0.1:8081`. Connects with the first call.
    /// Needs a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Url`] if that is no URL.
    pub fn new(url: &str, deadline: Duration) -> Result<Self, Error> {
        let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|_| Error::Url(url.to_owned()))?;
        let channel = endpoint.connect_timeout(deadline).tcp_nodelay(true).connect_lazy();
        Ok(Self { inner: RateLimiterClient::new(channel), deadline })
    }

    /// Asks whether a call may pass. `cost` is the class's if it is `None`; zero only looks.
    ///
    /// # Errors
    /// The service refused the request, or did not answer in time.
    pub async fn should_rate_limit(
        &self,
        key: &str,
        class: &str,
        cost: Option<u32>,
    ) -> Result<Answer, Error> {
        let mut request = Request::new(ShouldRateLimitRequest { key: key.into(), class: class.into(), cost });
        request.set_timeout(self.deadline);
        let call = async { self.inner.clone().should_rate_limit(request).await };
        match tokio::time::timeout(self.deadline, call).await {
            Ok(Ok(response)) => Ok(response.into_inner().into()),
            Ok(Err(status)) => Err(status.into()),
            Err(_) => Err(Error::Timeout(self.deadline)),
        }
    }
}

/// What the service says of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Why not, if not.
    pub denied: Option<Denial>,
    /// What a full bucket holds; zero if the class is never limited.
    pub limit: u64,
    /// Whole tokens left.
    pub remaining: u64,
    /// What was charged.
    pub cost: u32,
    /// When the same call would fit; zero if it may pass.
    pub retry_after: Duration,
    /// When the bucket is as good as new.
    pub reset_after: Duration,
    /// Pass after this long.
    pub wait: Duration,
    /// The time in which an empty bucket refills.
    pub window: Duration,
    /// The rule that decided.
    pub rule: String,
    /// Decided without the authority.
    pub degraded: bool,
}

impl Answer {
    /// May the call pass?
    #[must_use]
    pub fn allowed(&self) -> bool {
        self.denied.is_none()
    }
}

/// Why a call is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Denial {
    /// The bucket does not hold the cost.
    OverLimit,
    /// The key was denied too often and is blocked.
    Blocked,
    /// The class is sensitive and the service has lost its store.
    Unavailable,
    /// For a reason that this client does not know.
    Other,
}

impl From<ShouldRateLimitResponse> for Answer {
    fn from(response: ShouldRateLimitResponse) -> Self {
        let span = |span: Option<_>| span.and_then(|span| Duration::try_from(span).ok()).unwrap_or_default();
        let denied = match (response.verdict(), response.reason()) {
            (Verdict::Allow, _) => None,
            (_, Reason::OverLimit) => Some(Denial::OverLimit),
            (_, Reason::Blocked) => Some(Denial::Blocked),
            (_, Reason::Unavailable) => Some(Denial::Unavailable),
            (_, Reason::Unspecified) => Some(Denial::Other),
        };
        Self {
            denied,
            limit: response.limit,
            remaining: response.remaining,
            cost: response.cost,
            retry_after: span(response.retry_after),
            reset_after: span(response.reset_after),
            wait: span(response.wait),
            window: span(response.window),
            rule: response.rule,
            degraded: response.degraded,
        }
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No URL.
    #[error("{0:?} is no URL; expected one such as http://127.0.0.1:8081")]
    Url(String),
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The service can not be reached, or can not decide now.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// The service says that the request can not be.
    #[error("{0}")]
    Invalid(String),
    /// Anything else that a service may answer.
    #[error("{code:?}: {message}")]
    Other {
        /// The status code.
        code: Code,
        /// What the service says.
        message: String,
    },
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        let message = status.message().to_owned();
        match status.code() {
            Code::Unavailable => Self::Unavailable(message),
            Code::InvalidArgument => Self::Invalid(message),
            code => Self::Other { code, message },
        }
    }
}
