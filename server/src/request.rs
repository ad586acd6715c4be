//! What is asked and what is answered, in words that no protocol owns.

use crate::algorithm::Algorithm;
use crate::limit::{Cost, Limit, Want};
use crate::name::{BucketName, LeaseId};
use crate::penalty::Penalty;
use crate::rules::domain::{Domain, DomainRule, Said};
use sha2::{Digest as _, Sha256};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// May this call pass?
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Who calls.
    pub key: String,
    /// The kind of call.
    pub class: String,
    /// Tokens to take; `None` for what the class costs, zero for a peek.
    pub cost: Option<Cost>,
    /// After this nobody waits for the answer.
    pub deadline: Option<Instant>,
}

/// May the call pass that these descriptors tell of?
#[derive(Clone, Debug, Default)]
pub struct Described {
    /// Which set of rules.
    pub domain: String,
    /// What is limited.
    pub descriptors: Vec<Descriptor>,
    /// After this nobody waits for the answer.
    pub deadline: Option<Instant>,
}

/// Something that is limited: a path of keys and values, of which the rules know some.
#[derive(Clone, Debug, Default)]
pub struct Descriptor {
    /// The keys and values.
    pub entries: Vec<(String, String)>,
    /// What is taken or given back; taking nothing is a check.
    pub hits: Hits,
    /// A limit that holds whether or not a rule is met.
    pub limit: Option<Said>,
}

/// Hits of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hits {
    /// So many are taken.
    Take(u64),
    /// So many are given back.
    GiveBack(u64),
}

impl Default for Hits {
    fn default() -> Self {
        Self::Take(1)
    }
}

/// May this gateway have some tokens ahead?
#[derive(Clone, Debug, Default)]
pub struct Borrow {
    /// Who calls.
    pub key: String,
    /// The kind of call.
    pub class: String,
    /// Tokens wished for.
    pub n: u32,
    /// Who wishes, and the number of the wish: sent again, it is the same one. Empty or zero: none is.
    pub gateway: String,
    /// See `gateway`.
    pub seq: u64,
    /// Tokens that the gateway spends in a second, if it knows.
    pub demand: Option<NonZeroU32>,
    /// Calls that the gateway denied by itself since it last asked.
    pub denied: u32,
    /// Leases given back before this one is granted.
    pub returns: Vec<Return>,
    /// After this nobody waits for the answer.
    pub deadline: Option<Instant>,
}

/// A lease given back.
#[derive(Clone, Debug, Default)]
pub struct Return {
    /// Its name, as it was told.
    pub lease_id: String,
    /// Tokens that were not spent.
    pub unused: u32,
}

/// One bucket of a call, and what is wished of it.
#[derive(Clone, Debug)]
pub struct Hit {
    /// Which bucket. A call has at most one hit on each.
    pub bucket: BucketName,
    /// How much it may give.
    pub limit: Limit,
    /// How it is counted.
    pub algorithm: &'static Algorithm,
    /// What is wished.
    pub want: Want,
    /// A denial of this hit holds nothing up.
    pub shadow: bool,
    /// Denied when no authority can be asked.
    pub sensitive: bool,
    /// One of several ways to pay: denials of such hits hold the call up only together, all of them.
    pub quota: bool,
    /// What is done to the bucket.
    pub charge: Charge,
    /// What denials lead to, and how many there are.
    pub strikes: Option<Strikes>,
    /// Files what is granted under this name, until it ends.
    pub lease: Option<NewLease>,
}

/// What a hit does to its bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Charge {
    /// Takes what is granted, if nothing holds the call up.
    #[default]
    IfAllowed,
    /// Takes that many, allowed or not: for what was spent already. The wish must be as many, or more than
    /// there ever is. A blocked key is charged nothing.
    Always(Cost),
    /// Gives that many back, at least one, as far as there is room, and is never denied. The wish must be a peek.
    GiveBack(Cost),
}

/// The strikes that come with a hit.
#[derive(Clone, Copy, Debug)]
pub struct Strikes {
    /// What they lead to.
    pub penalty: Penalty,
    /// Denials made elsewhere, counted whatever becomes of this hit.
    pub reported: u32,
    /// Does a denial of this hit count?
    pub on_denial: bool,
}

/// A lease to be.
#[derive(Clone, Debug)]
pub struct NewLease {
    /// Its name.
    pub id: LeaseId,
    /// How long its tokens may be spent or returned.
    pub valid_for: Duration,
    /// May it have been granted before, so that this is only asked again? Then the same is granted, and paid once.
    pub again: bool,
    /// Who takes it, if that is to be counted.
    pub gateway: Option<Gateway>,
}

/// Who takes tokens ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Instead of its name; below 2^53.
    pub hash: u64,
    /// What it spends in a while, if it has told; then it gets no more than its share.
    pub spends: Option<Cost>,
}

impl Gateway {
    /// Those that were not heard of for so long are not counted any more.
    pub const COUNTED_FOR: Duration = Duration::from_secs(5);
    /// So many are counted of a bucket at most.
    pub const MOST: usize = 256;

    /// The gateway of that name.
    #[must_use]
    pub fn named(name: &str, spends: Option<Cost>) -> Self {
        let hash = Sha256::digest(name);
        let hash = hash.iter().take(6).fold(0, |hash, byte| hash << 8 | u64::from(*byte));
        Self { hash, spends }
    }

    /// How much one of so many may take of what remains, if it wishes for that, or for less: half is left, and the other
    /// half is for all alike; but where that would not last a while, all of it is.
    #[must_use]
    pub fn share(self, want: Want, remaining: u64, gateways: u32) -> Want {
        let Some(spends) = self.spends else { return want };
        let gateways = u64::from(gateways.max(1));
        let share = (remaining / (2 * gateways)).max(spends.get().min(remaining / gateways));
        Want { at_most: want.at_most.min(Cost::new(share).max(want.at_least)), ..want }
    }
}

/// The end of a lease: its unspent tokens go back.
#[derive(Clone, Debug)]
pub struct Settlement {
    /// Which lease.
    pub id: LeaseId,
    /// The limit of its bucket.
    pub limit: Limit,
    /// How that is counted.
    pub algorithm: &'static Algorithm,
    /// Tokens that were not spent.
    pub unused: Cost,
}

/// Why a call is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// The bucket does not hold the cost.
    OverLimit,
    /// The key is blocked.
    Blocked,
    /// The class is sensitive and the authority can not be asked.
    Unavailable,
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Why not, if not.
    pub denied: Option<Denial>,
    /// The rule that decided.
    pub rule: String,
    /// What a full bucket holds; zero if the class is never limited.
    pub limit: u64,
    /// Whole tokens left.
    pub remaining: u64,
    /// What was charged.
    pub cost: Cost,
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

/// The answer to a [`Borrow`].
#[derive(Clone, Debug, PartialEq)]
pub struct Lease {
    /// Its name; `None` if nothing was taken from a bucket.
    pub id: Option<LeaseId>,
    /// Tokens taken.
    pub granted: Cost,
    /// How long they may be spent.
    pub valid_for: Duration,
    /// They are to be spent evenly over this long; zero: at once, if need be.
    pub spread_over: Duration,
    /// What a full bucket holds.
    pub limit: u64,
    /// Whole tokens left.
    pub remaining: u64,
    /// Why nothing was granted, if it was wished.
    pub denied: Option<Denial>,
    /// When a token could be granted.
    pub retry_after: Duration,
    /// May this class be borrowed at all?
    pub leasable: bool,
    /// What one call of this class costs.
    pub cost: Cost,
    /// What to do alone; `None` if the class is never limited.
    pub fallback: Option<Fallback>,
    /// Decided without the authority.
    pub degraded: bool,
    /// Gateways that take ahead from this bucket, if they were counted.
    pub gateways: u32,
}

/// What a gateway does when the service is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// Deny every call.
    Deny,
    /// Decide by this limit.
    Limit(Limit),
}

/// The answer to a [`Described`].
#[derive(Clone, Debug)]
pub struct Joined {
    /// The rules that it was decided by; `None` where there are none for the domain.
    pub domain: Option<Arc<Domain>>,
    /// The path of the rule that denied, if the call is denied.
    pub denied_by: Option<String>,
    /// Was it decided without the authority?
    pub degraded: bool,
    /// Was something sensitive denied for that?
    pub unavailable: bool,
    /// One for each descriptor, in their order.
    pub statuses: Vec<Status>,
}

/// What became of one descriptor.
#[derive(Clone, Debug)]
pub enum Status {
    /// No rule is met, or one that another replaces.
    Free,
    /// The rule that is met does not limit.
    Unlimited,
    /// A limit was asked.
    Met {
        /// Is it over?
        over: bool,
        /// Which.
        limit: Said,
        /// The rule; `None` for a limit of the request's own.
        rule: Option<Arc<DomainRule>>,
        /// Whole tokens left; none if it is over.
        remaining: u64,
        /// Over: when the call would fit. Else: when the bucket is as good as new.
        reset: Duration,
    },
}
