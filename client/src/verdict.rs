//! What is said of a call.

use std::ops::Deref;
use std::time::Duration;
use tollgate_proto::v1;

/// What is decided of one call, by the service or here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Why not, if not.
    pub denied: Option<Denial>,
    /// What a full bucket holds; zero if the class is never limited, or if that is not known.
    pub limit: u64,
    /// Whole tokens left. Decided here: what the bucket held when the chunk was borrowed, and what is left of it.
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
    /// Decided without the authority.
    pub degraded: bool,
}

impl Verdict {
    /// May the call pass?
    #[must_use]
    pub fn allowed(&self) -> bool {
        self.denied.is_none()
    }
}

/// What the service says of a call. It reads as a [`Verdict`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What it decided.
    pub verdict: Verdict,
    /// The rule that decided.
    pub rule: String,
}

impl Deref for Answer {
    type Target = Verdict;

    fn deref(&self) -> &Verdict {
        &self.verdict
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
    /// The class is sensitive and nobody can be asked.
    Unavailable,
    /// For a reason that this client does not know.
    Other,
}

impl From<v1::Reason> for Denial {
    fn from(reason: v1::Reason) -> Self {
        match reason {
            v1::Reason::OverLimit => Self::OverLimit,
            v1::Reason::Blocked => Self::Blocked,
            v1::Reason::Unavailable => Self::Unavailable,
            v1::Reason::Unspecified => Self::Other,
        }
    }
}

impl From<v1::ShouldRateLimitResponse> for Answer {
    fn from(response: v1::ShouldRateLimitResponse) -> Self {
        let denied = match response.verdict() {
            v1::Verdict::Allow => None,
            _ => Some(response.reason().into()),
        };
        let verdict = Verdict {
            denied,
            limit: response.limit,
            remaining: response.remaining,
            cost: response.cost,
            retry_after: span(response.retry_after),
            reset_after: span(response.reset_after),
            wait: span(response.wait),
            window: span(response.window),
            degraded: response.degraded,
        };
        Self { verdict, rule: response.rule }
    }
}

/// A span of the wire; none, or a negative one, is zero.
pub(crate) fn span(span: Option<prost_types::Duration>) -> Duration {
    span.and_then(|span| Duration::try_from(span).ok()).unwrap_or_default()
}
