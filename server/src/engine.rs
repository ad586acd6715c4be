//! From a request to a verdict: which buckets it hits, what the store says of them, what that means.

mod descriptors;

use crate::algorithm::Algorithm;
use crate::clock::{Clock, instant};
use crate::lease;
use crate::limit::{Cost, Decision, Reason, Want};
use crate::name::{BucketName, LeaseId};
use crate::request::{
    Borrow, Charge, Denial, Gateway, Hit, Lease, NewLease, Request, Return, Settlement, Strikes, Verdict,
};
use crate::rules::{DEFAULT_CLASS, Limited, Live, Rule};
use crate::store::{Store, StoreError};
use crate::telemetry::metric::{self, Outcome};
use futures_util::future::try_join_all;
use metrics::counter;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// So many rules are remembered to have been in the log.
const MOST_SEEN: usize = 10_000;

/// Decides requests by rules and a store.
pub struct Engine {
    /// A call is decided by the rules that held when it came.
    rules: Live,
    store: Arc<dyn Store>,
    max_key_bytes: usize,
    /// For what ends by the calendar and nothing was taken of. Decisions are made by the clock of the store.
    clock: Clock,
    /// Rules whose buckets were seen to start anew, as the log says once.
    replaced: Mutex<BTreeSet<String>>,
}

impl Engine {
    /// Keys longer than `max_key_bytes` are refused. Whoever else holds the rules may change them.
    #[must_use]
    pub fn new(rules: Live, store: Arc<dyn Store>, max_key_bytes: usize, clock: Clock) -> Self {
        Self { rules, store, max_key_bytes, clock, replaced: Mutex::default() }
    }

    /// Is this a call that is always allowed, whatever the load?
    #[must_use]
    pub fn exempt(&self, class: &str) -> bool {
        self.rules.load().class(class).is_some_and(|rule| rule.limited.is_none())
    }

    /// Decides one call.
    ///
    /// # Errors
    /// The request can not be, or the store could not be asked.
    pub async fn should_rate_limit(&self, request: Request) -> Result<Verdict, Refusal> {
        let rule = self.rule(&request.key, &request.class)?;
        let Some(limited) = &rule.limited else {
            rule.count(Outcome::Allowed);
            return Ok(Verdict::unlimited(&rule));
        };
        let cost = request.cost.unwrap_or(limited.cost);
        let burst = limited.limit.burst();
        if cost.get() > burst {
            return Err(Refusal::NeverFits { cost, burst, class: rule.class.clone() });
        }
        in_time(request.deadline)?;

        let hit = Hit {
            bucket: BucketName::new(&request.key, &rule.class),
            limit: limited.limit,
            algorithm: limited.algorithm,
            want: Want::exactly(cost),
            shadow: limited.shadow,
            sensitive: limited.is_sensitive(),
            quota: false,
            charge: Charge::IfAllowed,
            strikes: limited.strikes(0, cost > Cost::ZERO),
            lease: None,
        };
        let decision = self.decide(&rule, hit, request.deadline).await?;
        rule.count(limited.outcome(&decision));
        Ok(Verdict::of(&rule, limited, &decision))
    }

    /// Takes tokens out of a bucket, for a gateway to spend on its own. Asked again while the lease lasts, by the same
    /// gateway with the same number, it is the same lease: the first answer may have been lost.
    ///
    /// # Errors
    /// The request can not be, or the store could not be asked.
    pub async fn borrow(&self, request: Borrow) -> Result<Lease, Refusal> {
        let rule = self.rule(&request.key, &request.class)?;
        if request.n == 0 {
            return Err(Refusal::NothingWished);
        }
        try_join_all(request.returns.iter().map(|back| self.settle(back, request.deadline))).await?;
        let n = Cost::from(request.n);
        let Some(limited) = &rule.limited else { return Ok(lease::unlimited(n)) };
        in_time(request.deadline)?;

        let leasable = lease::leasable(limited);
        let bucket = BucketName::new(&request.key, &rule.class);
        let named = !request.gateway.is_empty();
        let gateway = named.then(|| {
            let spends = request.demand.map(|demand| lease::spends(&limited.limit, demand));
            Gateway::named(&request.gateway, spends)
        });
        let again = named && request.seq > 0;
        let id = leasable.then(|| {
            if again { LeaseId::of(&bucket, &request.gateway, request.seq) } else { LeaseId::fresh(&bucket) }
        });
        let hit = Hit {
            bucket,
            limit: limited.limit,
            algorithm: limited.algorithm,
            want: if leasable {
                let at_least = n.min(limited.cost);
                Want { at_least, at_most: lease::wish(n, request.demand).max(at_least) }
            } else {
                Want::exactly(Cost::ZERO)
            },
            shadow: limited.shadow,
            sensitive: limited.is_sensitive(),
            quota: false,
            charge: Charge::IfAllowed,
            // The gateway reports what it denies; counting this refusal too would count it twice.
            strikes: limited.strikes(request.denied, false),
            lease: id.clone().map(|id| NewLease { id, valid_for: lease::VALID_FOR, again, gateway }),
        };
        let decision = self.decide(&rule, hit, request.deadline).await?;
        counter!(metric::LENT).increment(decision.granted.get());
        Ok(lease::of(limited, &decision, id, leasable, request.demand.filter(|_| named)))
    }

    /// Gives the unspent tokens of a lease back; returns how many went into the bucket.
    ///
    /// # Errors
    /// The store could not be asked.
    pub async fn settle(&self, back: &Return, deadline: Option<Instant>) -> Result<Cost, Refusal> {
        in_time(deadline)?;
        let known = Some(&back.lease_id).filter(|id| id.len() <= LeaseId::longest(self.max_key_bytes));
        let Some(id) = known.and_then(|id| LeaseId::parse(id)) else { return Ok(Cost::ZERO) };
        let Some(Limited { limit, algorithm, .. }) =
            self.rules.load().class(&id.class()).and_then(|rule| rule.limited.clone())
        else {
            return Ok(Cost::ZERO);
        };
        let settlement = Settlement { id, limit, algorithm, unused: back.unused.into() };
        let credited = self.store.settle(settlement, deadline).await?;
        counter!(metric::RETURNED).increment(credited.get());
        Ok(credited)
    }

    fn rule(&self, key: &str, class: &str) -> Result<Arc<Rule>, Refusal> {
        let unknown = || Refusal::UnknownClass { class: shortened(class) };
        let rule = self.rules.load().class(class).ok_or_else(unknown)?.clone();
        if rule.limited.is_none() {
            // Always allowed, so no bucket is looked for under this key.
            return Ok(rule);
        }
        if key.is_empty() {
            return Err(Refusal::EmptyKey);
        }
        if key.len() > self.max_key_bytes {
            return Err(Refusal::KeyTooLong { bytes: key.len(), most: self.max_key_bytes });
        }
        Ok(rule)
    }

    async fn decide(&self, rule: &Rule, hit: Hit, deadline: Option<Instant>) -> Result<Decision, Refusal> {
        let algorithm = hit.algorithm;
        let decisions = self.store.decide(vec![hit], deadline).await?;
        let none = || StoreError::Failed("no decision".into());
        let decision = decisions.into_iter().next().ok_or_else(none)?;
        if decision.replaced {
            self.starts_anew(&format!("class {:?}", rule.class), algorithm);
        }
        Ok(decision)
    }

    /// Says in the log, once, that the buckets of a rule start anew.
    fn starts_anew(&self, rule: &str, algorithm: &Algorithm) {
        let mut seen = self.replaced.lock();
        if seen.len() < MOST_SEEN && seen.insert(rule.to_owned()) {
            tracing::warn!("{rule} is decided by {algorithm:?} now: its buckets start anew");
        }
    }
}

/// No store work for a caller that has gone.
fn in_time(deadline: Option<Instant>) -> Result<(), Refusal> {
    if deadline.is_some_and(|deadline| deadline <= instant()) { Err(Refusal::DeadlinePassed) } else { Ok(()) }
}

/// Enough of a name that somebody sent to know it again.
fn shortened(name: &str) -> String {
    const MOST: usize = 64;
    let start: String = name.chars().take(MOST).collect();
    if start.len() < name.len() { format!("{start}…") } else { start }
}

impl Limited {
    /// What became of a call, for people.
    fn outcome(&self, decision: &Decision) -> Outcome {
        match decision.denied {
            None => Outcome::Allowed,
            Some(_) if self.shadow => Outcome::Watched,
            Some(Reason::OverLimit) => Outcome::OverLimit,
            Some(Reason::Blocked) => Outcome::Blocked,
            Some(Reason::Unavailable) => Outcome::Unavailable,
        }
    }

    fn strikes(&self, reported: u32, on_denial: bool) -> Option<Strikes> {
        // A shadow rule must not shut anybody out.
        let penalty = self.penalty.filter(|_| !self.shadow)?;
        Some(Strikes { penalty, reported, on_denial })
    }
}

impl From<Reason> for Denial {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::OverLimit => Self::OverLimit,
            Reason::Blocked => Self::Blocked,
            Reason::Unavailable => Self::Unavailable,
        }
    }
}

impl Verdict {
    fn of(rule: &Rule, limited: &Limited, decision: &Decision) -> Self {
        let denied = decision.denied.filter(|_| !limited.shadow);
        Self {
            denied: denied.map(Denial::from),
            rule: rule.class.clone(),
            limit: limited.limit.burst(),
            remaining: decision.remaining,
            cost: decision.granted,
            retry_after: denied.map_or(Duration::ZERO, |_| decision.retry_after),
            reset_after: decision.reset_after,
            wait: if limited.wait { decision.wait } else { Duration::ZERO },
            window: limited.limit.window(),
            degraded: decision.degraded,
        }
    }

    fn unlimited(rule: &Rule) -> Self {
        Self {
            denied: None,
            rule: rule.class.clone(),
            limit: 0,
            remaining: 0,
            cost: Cost::ZERO,
            retry_after: Duration::ZERO,
            reset_after: Duration::ZERO,
            wait: Duration::ZERO,
            window: Duration::ZERO,
            degraded: false,
        }
    }
}

impl Refusal {
    /// Counts it.
    pub fn count(&self) {
        let why = match self {
            Self::DeadlinePassed | Self::Store(StoreError::DeadlinePassed) => "deadline",
            Self::Store(_) => "store",
            _ => "invalid",
        };
        counter!(metric::REFUSED, "why" => why).increment(1);
    }
}

/// Why there is no verdict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The key is empty.
    #[error("key: empty; expected at least 1 byte")]
    EmptyKey,
    /// The key is too long.
    #[error("key: {bytes} bytes; expected at most {most}")]
    KeyTooLong {
        /// Its length.
        bytes: usize,
        /// The bound.
        most: usize,
    },
    /// No rule for the class.
    #[error("class: {class:?} has no rule, and there is no class {DEFAULT_CLASS:?}")]
    UnknownClass {
        /// Its name, shortened.
        class: String,
    },
    /// More than the bucket ever holds.
    #[error("cost: {} is above the burst of {burst} of class {class:?} and can never fit", .cost.get())]
    NeverFits {
        /// What was asked for.
        cost: Cost,
        /// The bound.
        burst: u64,
        /// Whose bound.
        class: String,
    },
    /// No domain.
    #[error("domain: empty; expected at least 1 byte")]
    EmptyDomain,
    /// No descriptors, or too many.
    #[error("descriptors: {got}; expected 1 to {most}")]
    Descriptors {
        /// How many.
        got: usize,
        /// The bound.
        most: usize,
    },
    /// A descriptor without entries, or with too many.
    #[error("descriptors[{place}].entries: {got}; expected 1 to {most}")]
    Entries {
        /// Which descriptor, from 0.
        place: usize,
        /// How many.
        got: usize,
        /// The bound.
        most: usize,
    },
    /// A limit of the request's own that can not be.
    #[error("descriptors[{place}].limit: {wrong}")]
    Override {
        /// Which descriptor, from 0.
        place: usize,
        /// Why.
        wrong: String,
    },
    /// A borrow of nothing.
    #[error("n: 0; expected at least 1")]
    NothingWished,
    /// More leases given back with one borrow than may be.
    #[error("returns: {returns} leases; expected at most {most}")]
    TooManyReturns {
        /// How many.
        returns: usize,
        /// The bound.
        most: usize,
    },
    /// The caller has gone.
    #[error("deadline: passed before the work began")]
    DeadlinePassed,
    /// The store could not be asked.
    #[error(transparent)]
    Store(#[from] StoreError),
}
