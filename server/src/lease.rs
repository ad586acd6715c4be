//! How much of a bucket a gateway may take ahead, until when, and what it does without the service.
//!
//! Tokens are taken out of the bucket before they are spent, so whatever is said here, the limit holds; what is at stake
//! is who gets them, and how often the service is asked. A gateway that tells what it spends gets what it spends in a
//! quarter of a second, and at most its share: of what is in the bucket, half is left, and the other half is for all
//! gateways alike that were heard of in the last seconds. Where that is less than it spends in a while (25 to 250 ms),
//! all of it is for them alike; where that is still less, it is to be spent evenly over the while, and who gets nothing is
//! told to wait for as long: so a bucket that is asked for three times what it has is not asked more often. Nothing is
//! lent that is not there, spread or not.

use crate::algorithm::Lending;
use crate::limit::{Cost, Decision, Limit, Reason, micros};
use crate::name::LeaseId;
use crate::request::{Denial, Fallback, Lease};
use crate::rules::Limited;
use std::num::NonZeroU32;
use std::time::Duration;

/// A block reaches a gateway when its lease ends, so leases are short.
pub(crate) const VALID_FOR: Duration = Duration::from_secs(1);

/// A grant is for so long, by what the gateway spends.
const AHEAD: Duration = Duration::from_millis(250);

/// Who gets little makes do with it until so much of the burst has flowed in, in hundredths, and within these bounds.
const SCARCE: (u64, Duration, Duration) = (6, Duration::from_millis(25), Duration::from_millis(250));

/// Of several gateways, one takes ahead only where its share of the rate is so many calls a second, at least: what one
/// holds is missing to the others. And any only
const LEAST_RATE: u64 = 20;
/// where the burst is what flows in in so long, at least;
const LEAST_BURST: Duration = Duration::from_millis(500);
/// and where the largest grant is so many calls.
const LEAST_CALLS: u64 = 4;

/// May tokens of this class be spent elsewhere? Not if a denial must hold at once, not if a gateway would
/// enforce what is only to be watched, and not if each call has its turn.
pub(crate) fn leasable(limited: &Limited) -> bool {
    !limited.sensitive && !limited.shadow && limited.algorithm.lending != Lending::Never
}

/// What is wished for, by one that spends so much a second.
pub(crate) fn wish(n: Cost, demand: Option<NonZeroU32>) -> Cost {
    let Some(demand) = demand else { return n };
    let ahead = u64::from(demand.get()) * micros(AHEAD);
    n.min(Cost::new(ahead.div_ceil(1_000_000)))
}

/// Is it worth it, with so many gateways? Else each call asks, which is more exact and not more often.
fn worthwhile(limited: &Limited, gateways: u32) -> bool {
    let (limit, cost) = (&limited.limit, limited.cost.get());
    let gateways = u64::from(gateways.max(1));
    let seconds = micros(limit.rate().period());
    let per_second = u128::from(limit.rate().count()) * 1_000_000 / u128::from(seconds);
    limit.window() >= LEAST_BURST
        && (gateways == 1 || per_second >= u128::from(LEAST_RATE * cost * gateways))
        && limit.burst() >= 2 * gateways * LEAST_CALLS * cost
}

/// How long to make do with little, or with nothing.
fn scarce(limit: &Limit) -> Duration {
    let (hundredths, least, most) = SCARCE;
    Duration::from_micros(micros(limit.window()) / 100 * hundredths).clamp(least, most)
}

/// What is spent in that time, by one that spends so much a second.
pub(crate) fn spends(limit: &Limit, demand: NonZeroU32) -> Cost {
    Cost::new(u64::from(demand.get()) * micros(scarce(limit)) / 1_000_000)
}

/// Over what time a grant is to be spent, by one that spends so much a second: at once, if its share would last longer.
fn spread(limit: &Limit, decision: &Decision, demand: NonZeroU32) -> Duration {
    let share = (decision.remaining + decision.granted.get()) / u64::from(decision.gateways.max(1));
    if share < spends(limit, demand).get() { scarce(limit) } else { Duration::ZERO }
}

/// When to ask again after nothing was granted; a tenth to a fifth later, so that not all come at once. Which part is
/// the lease's that was not granted, so the same wish has the same answer.
fn again_after(limit: &Limit, retry_after: Duration, id: Option<&LeaseId>) -> Duration {
    let wait = retry_after.max(scarce(limit));
    let part = id.map_or(0, LeaseId::part);
    wait + wait / 10 + wait / 10 / 255 * u32::from(part)
}

/// `demand`: what a gateway spends that has told its name too, so that it can be advised.
pub(crate) fn of(
    limited: &Limited,
    decision: &Decision,
    id: Option<LeaseId>,
    leasable: bool,
    demand: Option<NonZeroU32>,
) -> Lease {
    let granted = decision.granted;
    let taken = granted > Cost::ZERO;
    let gateways = decision.gateways;
    let retry_after = if demand.is_some() && decision.denied == Some(Reason::OverLimit) {
        again_after(&limited.limit, decision.retry_after, id.as_ref())
    } else {
        decision.retry_after
    };
    let valid_for =
        if taken { limited.algorithm.lend(VALID_FOR, decision.reset_after) } else { Duration::ZERO };
    let spread_over = demand.map_or(Duration::ZERO, |demand| spread(&limited.limit, decision, demand));
    let share = limited.algorithm.share(&limited.limit, gateways, limited.cost);
    Lease {
        id: id.filter(|_| taken),
        granted,
        valid_for,
        spread_over: spread_over.min(valid_for),
        limit: limited.limit.burst(),
        remaining: decision.remaining,
        denied: decision.denied.map(Denial::from),
        retry_after,
        leasable: leasable && (demand.is_none() || worthwhile(limited, gateways)),
        cost: limited.cost,
        fallback: Some(if limited.sensitive { Fallback::Deny } else { Fallback::Limit(share) }),
        degraded: decision.degraded,
        gateways,
    }
}

/// A class that is never limited: everything is granted, and no bucket knows of it.
pub(crate) fn unlimited(n: Cost) -> Lease {
    Lease {
        id: None,
        granted: n,
        valid_for: VALID_FOR,
        spread_over: Duration::ZERO,
        limit: 0,
        remaining: 0,
        denied: None,
        retry_after: Duration::ZERO,
        leasable: true,
        cost: Cost::ZERO,
        fallback: None,
        degraded: false,
        gateways: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::ALL;
    use crate::limit::{Rate, Reason};
    use crate::name::BucketName;
    use std::collections::BTreeSet;

    fn limited(per_second: u64, burst: u64, cost: u64) -> Limited {
        let rate = Rate::new(per_second, Duration::from_secs(1)).unwrap();
        Limited {
            limit: Limit::new(rate, burst).unwrap(),
            algorithm: &ALL[0],
            cost: Cost::new(cost),
            sensitive: false,
            penalty: None,
            shadow: false,
            wait: false,
        }
    }

    #[test]
    fn a_quarter_of_a_second_is_wished_for() {
        for (n, demand, wished) in
            [(100, 0, 100), (100, 40, 10), (100, 41, 11), (100, 4000, 100), (100, 1, 1)]
        {
            assert_eq!(wish(Cost::new(n), NonZeroU32::new(demand)), Cost::new(wished), "{n} {demand}");
        }
    }

    #[test]
    fn it_is_worth_it_where_shares_are_large() {
        for (limited, gateways, worth) in [
            (limited(1000, 1000, 1), 1, true),
            (limited(1000, 1000, 1), 50, true),
            (limited(1000, 1000, 1), 51, false),
            // The burst is less than half a second of the rate.
            (limited(1000, 499, 1), 1, false),
            (limited(1000, 500, 1), 1, true),
            // Each has 19 calls a second.
            (limited(190, 1000, 1), 10, false),
            (limited(200, 1000, 1), 10, true),
            (limited(200, 1000, 10), 1, true),
            (limited(200, 1000, 10), 2, false),
            (limited(1, 1000, 1), 1, true),
            (limited(100, 79, 1), 10, false),
        ] {
            assert_eq!(worthwhile(&limited, gateways), worth, "{limited:?} {gateways}");
        }
    }

    #[test]
    fn what_does_not_last_is_spread() {
        let limited = limited(1000, 1000, 1);
        let id = LeaseId::fresh(&BucketName::new("k", "c"));
        for (granted, remaining, gateways, demand, spread) in [
            // The share is 6, which is what a gateway spends in 60 ms if it spends 100 a second.
            (6, 54, 10, 0, 0),
            (6, 54, 10, 100, 0),
            (6, 54, 10, 116, 0),
            (6, 54, 10, 117, 60),
            (6, 54, 10, 1_000_000, 60),
            (1, 59, 10, 117, 60),
            (60, 0, 1, 1_000, 0),
            (59, 0, 1, 1_000, 60),
            (1, 0, 1, 10, 0),
            (1, 0, 50, 17, 60),
            (0, 0, 10, 1_000, 0),
        ] {
            let decision = Decision {
                denied: (granted == 0).then_some(Reason::OverLimit),
                granted: Cost::new(granted),
                remaining,
                gateways,
                ..Decision::blocked(Duration::from_secs(1))
            };
            let lease = of(&limited, &decision, Some(id.clone()), true, NonZeroU32::new(demand));
            let told = (granted, remaining, gateways, demand);
            assert_eq!(lease.spread_over, Duration::from_millis(spread), "{told:?}");
        }
        // Never longer than the lease.
        for (count, burst, spread) in [(1000, 100, 25), (10, 10_000, 250)] {
            let rate = Rate::new(count, Duration::from_secs(1)).unwrap();
            assert_eq!(scarce(&Limit::new(rate, burst).unwrap()), Duration::from_millis(spread));
        }
    }

    #[test]
    fn who_gets_nothing_waits_a_while_if_it_knows_itself() {
        let limited = limited(1000, 1000, 1);
        let decision = Decision {
            denied: Some(Reason::OverLimit),
            gateways: 4,
            retry_after: Duration::from_millis(1),
            ..Decision::blocked(Duration::ZERO)
        };
        let id = |seq| Some(LeaseId::of(&BucketName::new("k", "c"), "gw", seq));
        let asked = |seq, demand| of(&limited, &decision, id(seq), true, NonZeroU32::new(demand));
        assert_eq!(asked(1, 0).retry_after, Duration::from_millis(1));
        let waits: BTreeSet<_> = (1..=100).map(|seq| asked(seq, 10).retry_after).collect();
        assert!(waits.len() > 50, "not all at once: {waits:?}");
        for seq in 1..=100 {
            let advised = asked(seq, 10);
            assert_eq!(advised, asked(seq, 10), "the same wish has the same answer");
            // Six hundredths of a second, and a tenth to a fifth of that.
            let bounds = Duration::from_millis(66)..=Duration::from_millis(72);
            assert!(bounds.contains(&advised.retry_after), "{advised:?}");
            let Some(Fallback::Limit(share)) = advised.fallback else { panic!("{advised:?}") };
            assert_eq!((share.burst(), advised.gateways), (250, 4));
        }
    }
}
