//! Denials that are certain: while the answer can be nothing else, Redis is not asked.
//!
//! Of a bucket that was over its limit its state is remembered. A call is decided on it once more, with the
//! same algorithm and the time that has passed since; if that denies, so would Redis: whatever others have done
//! meanwhile, they have taken tokens. What was not the last word is asked again: a bucket is remembered until
//! the denied call would fit, at most [`BUCKETS_FOR`]; a block at most [`BLOCKS_FOR`], so that one that is
//! lifted by hand is seen.
//!
//! Denials that are counted, as those of a class with a penalty, are never remembered: Redis has to count them.
//!
//! Nor are calls of several hits answered from here: they need to know what all of their buckets hold.
//!
//! **What can be wrong.** What others do is seen that much later: tokens that come back by way of another
//! instance, a limit that is raised there first, a bucket that is removed by hand, by FLUSHALL or by eviction, or
//! that ends by the rule it was written by and not by a slower one, a Redis clock that is set forward; and that a key was blocked there, which is denied then for another reason. A
//! log's `remaining` is that of its last denial. What comes back or is blocked by way of this instance is seen at
//! once, as long as there is room for it. When a connection is lost all is forgotten: Redis may have.
//!
//! **Time.** Redis's clock runs on from the moment of its answer as the clock of this process does. That moment
//! is known to lie between sending and receiving: what is certain is told from the earlier, how long to wait from
//! the later.

use super::batch::{Answer, Call, Told};
use crate::algorithm::Algorithm;
use crate::clock::Clock;
use crate::limit::{Cost, Decision, Limit, Reason, State, Timestamp, micros};
use crate::name::BucketName;
use crate::request::{Charge, Hit, NewLease};
use crate::store::expiring::{Bound, Expiring, Weigh};
use parking_lot::Mutex;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a bucket is remembered at most.
const BUCKETS_FOR: Duration = Duration::from_secs(10);
/// How long a block is remembered at most.
const BLOCKS_FOR: Duration = Duration::from_secs(1);

/// So that cores seldom wait for each other.
const SHARDS: usize = 32;
/// In each shard, of buckets and of blocks.
const BOUND: Bound = Bound { entries: 2048, bytes: 1 << 20 };

/// What Redis has denied and would deny again.
pub(super) struct Denials {
    shards: [Shard; SHARDS],
    hasher: RandomState,
    clock: Clock,
}

#[derive(Default)]
struct Shard {
    /// Counts what has come back and who was struck. An answer that was on its way meanwhile may be from before.
    turn: AtomicU64,
    known: Mutex<Known>,
}

struct Known {
    buckets: Expiring<Bucket>,
    keys: Expiring<Key>,
    /// When the latest of those buckets was seen.
    latest: Timestamp,
}

/// What was so when a script call was sent.
pub(super) struct Sent {
    at: Timestamp,
    turns: [u64; SHARDS],
}

struct Bucket {
    limit: Limit,
    algorithm: &'static Algorithm,
    evidence: Evidence,
    sight: Sight,
    turn: u64,
}

/// From what a denial follows.
enum Evidence {
    State(State),
    /// Of an algorithm that keeps more than words: what was denied, and how.
    Denial(Cost, Decision),
}

/// When something was seen: at some moment between sending and receiving, which was that time in Redis.
#[derive(Clone, Copy)]
struct Sight {
    sent: Timestamp,
    received: Timestamp,
    told: Timestamp,
}

/// What strikes led to, as far as it was seen. Buckets of earlier turns are not believed: the key may be blocked
/// since, in all of its classes.
struct Key {
    turn: u64,
    block: Option<Block>,
}

struct Block {
    /// In Redis.
    ends: Timestamp,
    believed_until: Timestamp,
    sight: Sight,
}

impl Denials {
    pub(super) fn new(clock: Clock) -> Self {
        Self { shards: Default::default(), hasher: RandomState::new(), clock }
    }

    /// The denial of that hit, if it can be nothing else and changes nothing.
    pub(super) fn certain(&self, hit: &Hit) -> Option<Decision> {
        // A lease that was granted before is granted again, whatever is denied now.
        // Nor is a gateway counted here.
        let asks = |lease: &NewLease| lease.again || lease.gateway.is_some();
        if hit.charge != Charge::IfAllowed || hit.lease.as_ref().is_some_and(asks) {
            return None;
        }
        let now = self.clock.now();
        let known = self.shard(hit.bucket.subject())?.known.lock();
        let key = known.keys.get(hit.bucket.subject(), now);
        if let Some(block) = key.and_then(|key| key.block.as_ref())
            && now < block.believed_until
        {
            return Some(Decision::blocked(block.ends.since(block.sight.at_least(now))));
        }
        let bucket = known.buckets.get(hit.bucket.as_str(), now)?;
        if key.is_some_and(|key| bucket.turn < key.turn) { None } else { bucket.denies(hit, now) }
    }

    /// To be called before a script call is sent.
    pub(super) fn sent(&self) -> Sent {
        let turns = self.shards.each_ref().map(|shard| shard.turn.load(Ordering::Acquire));
        Sent { at: self.clock.now(), turns }
    }

    /// Remembers what was denied, and forgets what no longer holds. `told` is Redis's time. Without an answer the
    /// call may have been decided all the same.
    pub(super) fn settle(&self, sent: &Sent, told: Timestamp, call: &Call, answer: Option<&Answer>) {
        self.forget(call);
        let sight = Sight { sent: sent.at, received: self.clock.now(), told };
        if let (Call::Decide(hits), Some(Answer::Decided(decided))) = (call, answer) {
            for (hit, told) in hits.iter().zip(decided) {
                self.see(sent, sight, hit, told);
            }
        }
    }

    /// Forgets where tokens have come back with this call, or may have.
    fn forget(&self, call: &Call) {
        match call {
            Call::Settle(settlement) => self.came_back(settlement.id.bucket()),
            Call::Decide(hits) => {
                let backs = hits.iter().filter(|hit| matches!(hit.charge, Charge::GiveBack(_)));
                backs.for_each(|hit| self.came_back(&hit.bucket));
            }
        }
    }

    fn came_back(&self, bucket: &BucketName) {
        let Some(shard) = self.shard(bucket.subject()) else { return };
        let mut known = shard.known.lock();
        shard.next_turn();
        known.buckets.take(bucket.as_str(), self.clock.now());
    }

    /// Redis may have lost everything, or be another one.
    pub(super) fn forget_all(&self) {
        for shard in &self.shards {
            let mut known = shard.known.lock();
            shard.next_turn();
            *known = Known::default();
        }
    }

    fn see(&self, sent: &Sent, sight: Sight, hit: &Hit, told: &Told) {
        let (subject, now) = (hit.bucket.subject(), sight.received);
        let place = self.place(subject);
        let (Some(shard), Some(&turn)) = (self.shards.get(place), sent.turns.get(place)) else { return };
        let decision = told.decision;
        let mut known = shard.known.lock();
        let is_current = shard.turn.load(Ordering::Acquire) == turn;
        match decision.denied {
            Some(Reason::Blocked) => {
                let known_block = known.keys.take(subject, now).and_then(|key| key.block);
                let block = Block {
                    ends: sight.told.after(decision.retry_after),
                    believed_until: sight.sent.after(decision.retry_after.min(BLOCKS_FOR)),
                    sight,
                };
                let block = if is_current { Some(block) } else { known_block };
                known.keep(subject, Key { turn: shard.next_turn(), block }, now);
            }
            Some(Reason::OverLimit) if hit.strikes.is_none() && hit.charge == Charge::IfAllowed => {
                if !is_current {
                    return;
                }
                let evidence = match told.words {
                    Some(words) => Evidence::State(State::Words(words)),
                    None => Evidence::Denial(hit.want.at_least, decision),
                };
                let bucket = Bucket { limit: hit.limit, algorithm: hit.algorithm, evidence, sight, turn };
                let until = sight.sent.after(decision.retry_after.min(BUCKETS_FOR));
                known.buckets.put(hit.bucket.as_str(), bucket, until, now);
                known.latest = known.latest.max(now);
            }
            denied => {
                let strikes = hit.strikes.as_ref();
                if strikes.is_some_and(|its| its.reported > 0 || its.on_denial && denied.is_some()) {
                    known.keep(subject, Key { turn: shard.next_turn(), block: None }, now);
                }
                // Something was taken, perhaps: what would remain is no longer known.
                known.buckets.take(hit.bucket.as_str(), now);
            }
        }
    }

    fn shard(&self, subject: &str) -> Option<&Shard> {
        self.shards.get(self.place(subject))
    }

    fn place(&self, subject: &str) -> usize {
        let [byte, ..] = self.hasher.hash_one(subject).to_le_bytes();
        usize::from(byte) % SHARDS
    }
}

impl Shard {
    /// The turn that begins, for who holds the lock.
    fn next_turn(&self) -> u64 {
        self.turn.fetch_add(1, Ordering::AcqRel) + 1
    }
}

impl Bucket {
    fn denies(&self, hit: &Hit, now: Timestamp) -> Option<Decision> {
        if self.limit != hit.limit || self.algorithm.tag != hit.algorithm.tag || hit.strikes.is_some() {
            return None;
        }
        let decision = match &self.evidence {
            Evidence::State(state) => {
                let decide = |at| (hit.algorithm.decide)(&hit.limit, state, at, hit.want);
                if decide(self.sight.at_most(now)).allowed() {
                    return None;
                }
                decide(self.sight.at_least(now))
            }
            Evidence::Denial(cost, _) if *cost != hit.want.at_least => return None,
            Evidence::Denial(_, told) => {
                let rest = |span| self.sight.told.after(span).since(self.sight.at_least(now));
                Decision { retry_after: rest(told.retry_after), reset_after: rest(told.reset_after), ..*told }
            }
        };
        (!decision.allowed()).then_some(decision)
    }
}

impl Sight {
    /// The earliest that it can be in Redis.
    fn at_least(self, now: Timestamp) -> Timestamp {
        self.later(now, self.received)
    }

    /// The latest that it can be in Redis.
    fn at_most(self, now: Timestamp) -> Timestamp {
        self.later(now, self.sent)
    }

    fn later(self, now: Timestamp, seen: Timestamp) -> Timestamp {
        let before = Timestamp::from_micros(self.told.as_micros().saturating_sub(micros(seen.since(now))));
        before.after(now.since(seen))
    }
}

impl Known {
    /// Keeps what was seen of a key for as long as a bucket from before can be known, also where the clock has been
    /// set back since that was seen.
    fn keep(&mut self, subject: &str, key: Key, now: Timestamp) {
        self.keys.put(subject, key, self.latest.max(now).after(BUCKETS_FOR), now);
    }
}

impl Default for Known {
    fn default() -> Self {
        let latest = Timestamp::from_micros(0);
        Self { buckets: Expiring::new(BOUND), keys: Expiring::new(BOUND), latest }
    }
}

impl Weigh for Bucket {}

impl Weigh for Key {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::ALL;
    use crate::limit::{Rate, Want};
    use crate::name::LeaseId;
    use crate::request::Settlement;

    const MS: u64 = 1_000;
    const REDIS_IS_AHEAD: u64 = 77_777;

    fn at(micros: u64) -> Timestamp {
        Timestamp::from_micros(1_000_000_000 + micros)
    }

    fn hit() -> Hit {
        Hit {
            bucket: BucketName::new("key", "class"),
            // A token a second, and no more at once.
            limit: Limit::new(Rate::new(1, Duration::from_secs(1)).unwrap(), 1).unwrap(),
            algorithm: &ALL[0],
            want: Want::exactly(Cost::ONE),
            shadow: false,
            sensitive: false,
            quota: false,
            charge: Charge::IfAllowed,
            strikes: None,
            lease: None,
        }
    }

    /// A bucket that was emptied just now, or a block of ten seconds.
    fn denial(blocked: bool) -> Answer {
        let told = if blocked {
            Told { decision: Decision::blocked(Duration::from_secs(10)), words: None }
        } else {
            let decision = Decision {
                denied: Some(Reason::OverLimit),
                retry_after: Duration::from_secs(1),
                reset_after: Duration::from_secs(1),
                ..Decision::blocked(Duration::ZERO)
            };
            Told { decision, words: Some([1_000_000, at(REDIS_IS_AHEAD).as_micros(), 1_000_000, 0, 0]) }
        };
        Answer::Decided(vec![told])
    }

    fn settlement() -> Call {
        let Hit { bucket, limit, algorithm, .. } = hit();
        Call::Settle(Settlement { id: LeaseId::fresh(&bucket), limit, algorithm, unused: Cost::ONE })
    }

    fn call() -> Call {
        Call::Decide(vec![hit()])
    }

    #[test]
    fn it_is_certain_from_when_it_was_sent_and_waited_for_from_when_it_came() {
        let clock = Clock::manual(at(0));
        for (blocked, certain_for, rest) in [(false, 1_000 * MS, 1_000 * MS), (true, 1_000 * MS, 10_000 * MS)]
        {
            clock.set(at(0));
            let denials = Denials::new(clock.clone());
            let sent = denials.sent();
            clock.set(at(5 * MS));
            denials.settle(&sent, at(REDIS_IS_AHEAD), &call(), Some(&denial(blocked)));
            clock.set(at(certain_for - 1));
            let told = denials.certain(&hit()).expect("it is still certain");
            assert_eq!(micros(told.retry_after), rest - (certain_for - 1 - 5 * MS), "{blocked}");
            clock.set(at(certain_for));
            assert_eq!(denials.certain(&hit()), None, "{blocked}");
        }
    }

    /// On the state of a denied call of two, which fits later.
    #[test]
    fn a_lower_cost_is_asked_as_soon_as_it_may_fit() {
        let clock = Clock::manual(at(0));
        let denials = Denials::new(clock.clone());
        let limit = Limit::new(hit().limit.rate(), 2).unwrap();
        let (one, two) = (Hit { limit, ..hit() }, Hit { limit, want: Want::exactly(Cost::new(2)), ..hit() });
        let decision = Decision {
            denied: Some(Reason::OverLimit),
            retry_after: Duration::from_secs(2),
            ..Decision::blocked(Duration::ZERO)
        };
        let words = Some([2_000_000, at(REDIS_IS_AHEAD).as_micros(), 1_000_000, 0, 0]);
        let sent = denials.sent();
        clock.set(at(5 * MS));
        let told = Answer::Decided(vec![Told { decision, words }]);
        denials.settle(&sent, at(REDIS_IS_AHEAD), &Call::Decide(vec![two.clone()]), Some(&told));
        clock.set(at(1_000 * MS - 1));
        assert!(denials.certain(&one).is_some());
        // Counted from when the denial came, it would have to wait for five milliseconds more.
        clock.set(at(1_000 * MS));
        assert_eq!(denials.certain(&one), None);
        let left = denials.certain(&two).expect("two are not there yet");
        assert_eq!((left.remaining, left.retry_after), (0, Duration::from_millis(1_005)));
    }

    #[test]
    fn an_answer_that_was_on_its_way_while_tokens_came_back_is_not_believed() {
        for answer in [Some(&Answer::Settled(Cost::ONE)), None] {
            let denials = Denials::new(Clock::manual(at(0)));
            let sent = denials.sent();
            denials.settle(&denials.sent(), at(0), &settlement(), answer);
            denials.settle(&sent, at(REDIS_IS_AHEAD), &call(), Some(&denial(false)));
            assert_eq!(denials.certain(&hit()), None, "{answer:?}");
            // What is sent from now on is.
            denials.settle(&denials.sent(), at(REDIS_IS_AHEAD), &call(), Some(&denial(false)));
            assert!(denials.certain(&hit()).is_some(), "{answer:?}");
        }
    }

    #[test]
    fn what_was_known_is_forgotten_when_tokens_come_back_or_may_have() {
        let back = Call::Decide(vec![Hit { charge: Charge::GiveBack(Cost::ONE), ..hit() }]);
        let forgetting: [fn(&Denials, &Call); 2] = [
            |denials, call| denials.settle(&denials.sent(), at(0), call, None),
            |denials, _| denials.forget_all(),
        ];
        for call_back in [settlement(), back] {
            for forget in forgetting {
                let denials = Denials::new(Clock::manual(at(0)));
                denials.settle(&denials.sent(), at(REDIS_IS_AHEAD), &call(), Some(&denial(false)));
                assert!(denials.certain(&hit()).is_some());
                forget(&denials, &call_back);
                assert_eq!(denials.certain(&hit()), None, "{call_back:?}");
            }
        }
    }

    #[test]
    fn a_block_outlives_the_buckets_from_before_it_also_where_the_clock_is_set_back() {
        let clock = Clock::manual(at(20_000 * MS));
        let denials = Denials::new(clock.clone());
        denials.settle(&denials.sent(), at(REDIS_IS_AHEAD), &call(), Some(&denial(false)));
        clock.set(at(0));
        let struck = Call::Decide(vec![Hit { bucket: BucketName::new("key", "another class"), ..hit() }]);
        denials.settle(&denials.sent(), at(REDIS_IS_AHEAD), &struck, Some(&denial(true)));
        for after in [0, 20_000 * MS, 21_000 * MS - 1] {
            clock.set(at(after));
            assert_ne!(
                denials.certain(&hit()).and_then(|told| told.denied),
                Some(Reason::OverLimit),
                "{after}"
            );
        }
    }
}
