//! How much of a bucket a gateway may take ahead, until when, and what it does without the service.

use crate::algorithm::Lending;
use crate::limit::{Cost, Decision};
use crate::name::LeaseId;
use crate::request::{Denial, Fallback, Lease};
use crate::rules::Limited;
use std::time::Duration;

/// A block reaches a gateway when its lease ends, so leases are short.
pub(crate) const VALID_FOR: Duration = Duration::from_secs(1);

/// May tokens of this class be spent elsewhere? Not if a denial must hold at once, not if a gateway would
/// enforce what is only to be watched, and not if each call has its turn.
pub(crate) fn leasable(limited: &Limited) -> bool {
    !limited.sensitive && !limited.shadow && limited.algorithm.lending != Lending::Never
}

pub(crate) fn of(limited: &Limited, decision: &Decision, id: Option<LeaseId>, leasable: bool) -> Lease {
    let granted = decision.granted;
    let taken = granted > Cost::ZERO;
    Lease {
        id: id.filter(|_| taken),
        granted,
        valid_for: if taken {
            limited.algorithm.lend(VALID_FOR, decision.reset_after)
        } else {
            Duration::ZERO
        },
        limit: limited.limit.burst(),
        remaining: decision.remaining,
        denied: decision.denied.map(Denial::from),
        retry_after: decision.retry_after,
        leasable,
        cost: limited.cost,
        fallback: Some(if limited.sensitive { Fallback::Deny } else { Fallback::Limit(limited.limit) }),
        degraded: decision.degraded,
    }
}

/// A class that is never limited: everything is granted, and no bucket knows of it.
pub(crate) fn unlimited(n: Cost) -> Lease {
    Lease {
        id: None,
        granted: n,
        valid_for: VALID_FOR,
        limit: 0,
        remaining: 0,
        denied: None,
        retry_after: Duration::ZERO,
        leasable: true,
        cost: Cost::ZERO,
        fallback: None,
        degraded: false,
    }
}
