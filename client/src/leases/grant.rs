//! What a Borrow brings.

use crate::verdict::span;
use std::time::Duration;
use tollgate_proto::v1::{BorrowResponse, Reason};

/// What the service granted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Names the lease; empty if nothing was taken from a bucket.
    pub lease_id: String,
    /// Tokens.
    pub granted: u32,
    /// The lease ends after this long.
    pub valid_for: Duration,
    /// They are to be spent evenly over this long; zero: at once, if need be.
    pub spread_over: Duration,
    /// The burst.
    pub limit: u64,
    /// Left in the bucket.
    pub remaining: u64,
    /// Nothing is to be had before, if nothing was granted.
    pub retry_after: Duration,
    /// Nothing is to be had because the key is blocked.
    pub blocked: bool,
    /// Whether to borrow for this bucket at all.
    pub leasable: bool,
    /// Tokens that a call costs.
    pub cost: u32,
    /// The service was without its store.
    pub degraded: bool,
}

impl Grant {
    /// What a reply of the service says.
    #[must_use]
    pub fn from_reply(reply: &BorrowResponse) -> Self {
        Self {
            lease_id: reply.lease_id.clone(),
            granted: reply.granted,
            valid_for: span(reply.valid_for),
            spread_over: span(reply.spread_over),
            limit: reply.limit,
            remaining: reply.remaining,
            retry_after: span(reply.retry_after),
            blocked: reply.reason() == Reason::Blocked,
            leasable: reply.leasable,
            cost: reply.cost,
            degraded: reply.degraded,
        }
    }
}
