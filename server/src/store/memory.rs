//! The store in this process: exact, fast, and forgotten with it.
//!
//! Everything about a key lives in one shard behind one lock. A call that hits several keys locks their
//! shards in ascending order. What has expired is as good as new, so it is dropped; a shard that is full
//! drops what is closest to being as good as new.

use super::expiring::{Bound, Expiring, Weigh};
use super::{Store, StoreError, held_up};
use crate::algorithm::Algorithm;
use crate::clock::Clock;
use crate::limit::{Cost, Decision, Limit, Log, Reason, State, Timestamp, Want, Words};
use crate::penalty::Record;
use crate::request::{Charge, Gateway, Hit, Settlement};
use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;
use tokio::time::Instant;

/// More shards than any machine here has cores to contend for them.
const SHARDS: usize = 64;

/// Keeps everything in this process.
pub struct Memory {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    clock: Clock,
}

struct Shard {
    buckets: Expiring<Bucket>,
    records: Expiring<Record>,
    leases: Expiring<Cost>,
    gateways: Expiring<Gateways>,
}

/// Who takes ahead from a bucket, and when each was last heard of.
#[derive(Default)]
struct Gateways(Vec<(u64, Timestamp)>);

impl Gateways {
    /// One more, or one that is known; returns how many there are.
    fn hear(&mut self, hash: u64, now: Timestamp) -> usize {
        self.0.retain(|(other, at)| *other != hash && now.since(*at) < Gateway::COUNTED_FOR);
        if self.0.len() == Gateway::MOST {
            self.0.remove(0);
        }
        self.0.push((hash, now));
        self.0.len()
    }
}

impl Weigh for Gateways {
    fn heap_bytes(&self) -> usize {
        self.0.capacity() * size_of::<(u64, Timestamp)>()
    }
}

/// A state, by the algorithm with that tag. In one enum they take eight bytes less than side by side.
enum Bucket {
    Words(u8, Words),
    Log(u8, Box<Log>),
}

impl Bucket {
    fn new(algorithm: &Algorithm, state: State) -> Self {
        match state {
            State::Words(words) => Self::Words(algorithm.tag, words),
            State::Log(log) => Self::Log(algorithm.tag, log),
        }
    }

    /// What `ask` tells of the state, and may change of it; nothing if it is another algorithm's.
    fn with<T>(&mut self, algorithm: &Algorithm, ask: impl FnOnce(&mut State) -> T) -> Option<T> {
        let (Self::Words(tag, _) | Self::Log(tag, _)) = self;
        if *tag != algorithm.tag {
            return None;
        }
        let mut state = match std::mem::replace(self, Self::Words(algorithm.tag, Words::default())) {
            Self::Words(_, words) => State::Words(words),
            Self::Log(_, log) => State::Log(log),
        };
        let told = ask(&mut state);
        *self = Self::new(algorithm, state);
        Some(told)
    }
}

impl Weigh for Bucket {
    fn heap_bytes(&self) -> usize {
        match self {
            Self::Words(..) => 0,
            Self::Log(_, log) => log.heap_bytes(),
        }
    }
}

impl Weigh for Record {}

impl Weigh for Cost {}

/// What a store in memory holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Buckets that are not as good as new, and some that are and were not swept out yet.
    pub buckets: usize,
    /// Keys with strikes or a block, likewise.
    pub records: usize,
    /// Leases, likewise.
    pub leases: usize,
    /// About how many bytes all of them take.
    pub bytes: usize,
    /// What was dropped before its time since the start, because the store was full.
    pub dropped: u64,
}

impl Memory {
    /// An empty store for about `max_keys` buckets, and as many records and leases, each kind in at most
    /// `max_bytes`.
    #[must_use]
    pub fn new(max_keys: usize, max_bytes: usize, clock: Clock) -> Self {
        let bound = Bound { entries: max_keys.div_ceil(SHARDS), bytes: max_bytes.div_ceil(SHARDS) };
        let shard = || Shard {
            buckets: Expiring::new(bound),
            records: Expiring::new(bound),
            leases: Expiring::new(bound),
            gateways: Expiring::new(bound),
        };
        let shards = std::iter::repeat_with(|| Mutex::new(shard())).take(SHARDS).collect();
        Self { shards, hasher: RandomState::new(), clock }
    }

    /// What the store holds now.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let mut all = Figures::default();
        for shard in &self.shards {
            let Shard { buckets, records, leases, gateways } = &*shard.lock();
            all.buckets += buckets.len();
            all.records += records.len();
            all.leases += leases.len();
            all.bytes += buckets.bytes() + records.bytes() + leases.bytes() + gateways.bytes();
            all.dropped += buckets.dropped() + records.dropped() + leases.dropped() + gateways.dropped();
        }
        all
    }

    /// Drops all that has ended from one shard, another at each turn: for a store that nothing is put in any more.
    pub(super) fn sweep(&self, turn: usize) {
        if let Some(shard) = self.shards.get(turn % SHARDS) {
            let Shard { buckets, records, leases, gateways } = &mut *shard.lock();
            let now = self.clock.now();
            buckets.drop_ended(now);
            records.drop_ended(now);
            leases.drop_ended(now);
            gateways.drop_ended(now);
        }
    }

    /// Which shard holds everything about a subject.
    fn place(&self, subject: &str) -> usize {
        let [byte, ..] = self.hasher.hash_one(subject).to_le_bytes();
        usize::from(byte) % SHARDS
    }
}

impl Memory {
    pub(super) fn decide_now(&self, hits: &[Hit]) -> Vec<Decision> {
        let places: Vec<usize> = hits.iter().map(|hit| self.place(hit.bucket.subject())).collect();
        let mut shards = Locked::new(self, &places);
        // Read under the locks: a later holder of a lock sees a later time.
        let now = self.clock.now();

        let mut decisions = Vec::with_capacity(hits.len());
        for (hit, &place) in hits.iter().zip(&places) {
            let Some(shard) = shards.get(place) else { continue };
            let gateways = shard.hear(hit, now);
            decisions.push(Decision { gateways, ..shard.decide(hit, gateways, now) });
        }
        let held_up = held_up(hits, &decisions);
        for ((hit, &place), decision) in hits.iter().zip(&places).zip(&mut decisions) {
            let Some(shard) = shards.get(place) else { continue };
            match decision.denied {
                Some(Reason::OverLimit) => {
                    shard.overdraw(hit, decision, now);
                    shard.strike(hit, decision, now);
                }
                Some(Reason::Blocked | Reason::Unavailable) => {}
                // It was paid for then.
                None if shard.lent(hit, now).is_some() => {}
                None if held_up && hit.charge == Charge::IfAllowed => {
                    *decision = Decision { gateways: decision.gateways, ..shard.peek(hit, now) };
                }
                None => shard.charge(hit, decision.granted, decision.reset_after, now),
            }
        }
        decisions
    }

    pub(super) fn settle_now(&self, settlement: &Settlement) -> Cost {
        let bucket = settlement.id.bucket();
        let places = [self.place(bucket.subject())];
        let mut shards = Locked::new(self, &places);
        let now = self.clock.now();
        places.first().and_then(|&place| shards.get(place)).map_or(Cost::ZERO, |s| s.settle(settlement, now))
    }
}

impl Shard {
    /// Counts the gateway of that hit, if it tells one; returns how many there are.
    fn hear(&mut self, hit: &Hit, now: Timestamp) -> u32 {
        let Some(gateway) = hit.lease.as_ref().and_then(|lease| lease.gateway) else { return 0 };
        let name = hit.bucket.as_str();
        let ends = now.after(Gateway::COUNTED_FOR);
        let hear = |known: &mut Gateways| (known.hear(gateway.hash, now), Some(ends));
        let count = self.gateways.update(name, now, hear).unwrap_or_else(|| {
            let mut known = Gateways::default();
            let (count, _) = hear(&mut known);
            self.gateways.put(name, known, ends, now);
            count
        });
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    fn decide(&mut self, hit: &Hit, gateways: u32, now: Timestamp) -> Decision {
        if let Charge::GiveBack(cost) = hit.charge {
            self.refund(hit.bucket.as_str(), &hit.limit, hit.algorithm, cost, now);
            let left = self.peek(hit, now);
            return Decision { denied: None, retry_after: Duration::ZERO, replaced: false, ..left };
        }
        if let Some(granted) = self.lent(hit, now) {
            let left = self.peek(hit, now);
            return Decision { denied: None, granted, retry_after: Duration::ZERO, replaced: false, ..left };
        }
        let subject = hit.bucket.subject();
        let mut record = self.records.get(subject, now).copied().unwrap_or_default();
        let lease = hit.lease.as_ref().filter(|lease| lease.again);
        if let Some(strikes) = &hit.strikes
            && strikes.reported > 0
            && record.blocked_until <= now
            && lease.is_none_or(|lease| self.leases.get(lease.id.as_str(), now).is_none())
        {
            record = strikes.penalty.strike(record, now, strikes.reported);
            self.file(subject, record, now);
            // If nothing is granted, it is still known that these were counted.
            if let Some(lease) = lease {
                self.leases.put(lease.id.as_str(), Cost::ZERO, now.after(lease.valid_for), now);
            }
        }
        if record.blocked_until > now {
            return Decision::blocked(record.blocked_until.since(now));
        }
        let want = match hit.lease.as_ref().and_then(|lease| lease.gateway) {
            Some(gateway) if gateway.spends.is_some() => {
                gateway.share(hit.want, self.peek(hit, now).remaining, gateways)
            }
            _ => hit.want,
        };
        self.look(hit, now, want)
    }

    /// What was granted when this lease was asked for before.
    fn lent(&self, hit: &Hit, now: Timestamp) -> Option<Cost> {
        let lease = hit.lease.as_ref().filter(|lease| lease.again)?;
        self.leases.get(lease.id.as_str(), now).copied().filter(|granted| *granted > Cost::ZERO)
    }

    fn peek(&mut self, hit: &Hit, now: Timestamp) -> Decision {
        self.look(hit, now, Want::exactly(Cost::ZERO))
    }

    fn look(&mut self, hit: &Hit, now: Timestamp, want: Want) -> Decision {
        let decide = |state: &mut State| (hit.algorithm.decide)(&hit.limit, state, now, want);
        let told = self.buckets.update(hit.bucket.as_str(), now, |it| (it.with(hit.algorithm, decide), None));
        let anew = || Decision { replaced: told.is_some(), ..decide(&mut State::default()) };
        told.flatten().unwrap_or_else(anew)
    }

    /// Takes what was denied all the same, if the hit says so, and decides anew: for the waits.
    fn overdraw(&mut self, hit: &Hit, decision: &mut Decision, now: Timestamp) {
        let Charge::Always(cost) = hit.charge else { return };
        let copy = |it: &mut Bucket| (it.with(hit.algorithm, |state| state.clone()), None);
        let known = self.buckets.update(hit.bucket.as_str(), now, copy);
        let mut state = known.flatten().unwrap_or_default();
        (hit.algorithm.charge)(&hit.limit, &mut state, now, cost);
        let after = (hit.algorithm.decide)(&hit.limit, &state, now, hit.want);
        *decision = Decision { replaced: decision.replaced, ..after };
        self.charge(hit, cost, decision.reset_after, now);
    }

    fn charge(&mut self, hit: &Hit, cost: Cost, reset_after: Duration, now: Timestamp) {
        if cost == Cost::ZERO {
            return;
        }
        let (name, algorithm) = (hit.bucket.as_str(), hit.algorithm);
        let ends = now.after(reset_after);
        let pay = |state: &mut State| (algorithm.charge)(&hit.limit, state, now, cost);
        let new = || {
            let mut state = State::default();
            pay(&mut state);
            Bucket::new(algorithm, state)
        };
        let charge = |bucket: &mut Bucket| {
            if bucket.with(algorithm, pay).is_none() {
                *bucket = new();
            }
            ((), Some(ends))
        };
        if self.buckets.update(name, now, charge).is_none() {
            self.buckets.put(name, new(), ends, now);
        }
        if let Some(lease) = &hit.lease {
            let valid_for = algorithm.lend(lease.valid_for, reset_after);
            self.leases.put(lease.id.as_str(), cost, now.after(valid_for), now);
        }
    }

    fn strike(&mut self, hit: &Hit, decision: &mut Decision, now: Timestamp) {
        if let Some(strikes) = hit.strikes.filter(|strikes| strikes.on_denial) {
            let subject = hit.bucket.subject();
            let record = self.records.get(subject, now).copied().unwrap_or_default();
            let record = strikes.penalty.strike(record, now, 1);
            decision.retry_after = decision.retry_after.max(record.blocked_until.since(now));
            self.file(subject, record, now);
        }
    }

    fn settle(&mut self, settlement: &Settlement, now: Timestamp) -> Cost {
        let Some(outstanding) = self.leases.take(settlement.id.as_str(), now) else { return Cost::ZERO };
        let Settlement { id, limit, algorithm, unused } = settlement;
        self.refund(id.bucket().as_str(), limit, algorithm, (*unused).min(outstanding), now)
    }

    fn refund(
        &mut self,
        name: &str,
        limit: &Limit,
        algorithm: &Algorithm,
        unused: Cost,
        now: Timestamp,
    ) -> Cost {
        let refund = |state: &mut State| {
            let credited = (algorithm.refund)(limit, state, now, unused);
            // If nothing came back nothing changes; under a rule that has changed, even the end would.
            let ends = (credited > Cost::ZERO).then(|| {
                let left = (algorithm.decide)(limit, state, now, Want::exactly(Cost::ZERO));
                now.after(left.reset_after)
            });
            (credited, ends)
        };
        let refund = |bucket: &mut Bucket| bucket.with(algorithm, refund).unwrap_or((Cost::ZERO, None));
        // A bucket that is not there is as good as new: it has no room.
        self.buckets.update(name, now, refund).unwrap_or(Cost::ZERO)
    }

    fn file(&mut self, subject: &str, record: Record, now: Timestamp) {
        self.records.put(subject, record, record.forgotten.max(record.blocked_until), now);
    }
}

/// The shards of one call, locked in ascending order so that two calls can not wait for each other.
struct Locked<'m>(Vec<(usize, MutexGuard<'m, Shard>)>);

impl<'m> Locked<'m> {
    fn new(memory: &'m Memory, places: &[usize]) -> Self {
        let mut places = places.to_vec();
        places.sort_unstable();
        places.dedup();
        let lock = |place: usize| memory.shards.get(place).map(|shard| (place, shard.lock()));
        Self(places.into_iter().filter_map(lock).collect())
    }

    fn get(&mut self, place: usize) -> Option<&mut Shard> {
        self.0.iter_mut().find(|(at, _)| *at == place).map(|(_, shard)| &mut **shard)
    }
}

#[async_trait]
impl Store for Memory {
    async fn decide(&self, hits: Vec<Hit>, _: Option<Instant>) -> Result<Vec<Decision>, StoreError> {
        Ok(self.decide_now(&hits))
    }

    async fn settle(&self, settlement: Settlement, _: Option<Instant>) -> Result<Cost, StoreError> {
        Ok(self.settle_now(&settlement))
    }

    async fn heartbeat(&self) -> Result<u32, StoreError> {
        Ok(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::ALL;
    use crate::limit::Rate;
    use crate::name::{BucketName, LeaseId};
    use crate::request::NewLease;
    #[test]
    fn a_lease_that_gives_nothing_back_leaves_the_bucket_its_end() {
        let limit = |seconds| Limit::new(Rate::new(1, Duration::from_secs(seconds)).unwrap(), 1).unwrap();
        let clock = Clock::manual(Timestamp::from_micros(1_000_000));
        let memory = Memory::new(10, 1 << 20, clock.clone());
        let algorithm = &ALL[0];
        let bucket = BucketName::new("key", "class");
        let id = LeaseId::fresh(&bucket);
        let hit = |cost, limit, lease| Hit {
            bucket: bucket.clone(),
            limit,
            algorithm,
            want: Want::exactly(Cost::new(cost)),
            shadow: false,
            sensitive: false,
            quota: false,
            charge: Charge::IfAllowed,
            strikes: None,
            lease,
        };
        let lease =
            NewLease { id: id.clone(), valid_for: Duration::from_secs(9), again: false, gateway: None };
        let taken = memory.decide_now(&[hit(1, limit(1), Some(lease))]);
        assert_eq!(taken.first().unwrap().reset_after, Duration::from_secs(1));

        // The rule has changed to a slower one since.
        let settlement = Settlement { id, limit: limit(100), algorithm, unused: Cost::ZERO };
        assert_eq!(memory.settle_now(&settlement), Cost::ZERO);
        clock.set(Timestamp::from_micros(2_000_000));
        let then = memory.decide_now(&[hit(0, limit(100), None)]);
        assert_eq!(then.first().unwrap().remaining, 1, "it was as good as new after a second");
    }

    /// Logs are what grows: some slowly while other keys come, and some are there for a call.
    #[test]
    fn a_flood_of_keys_stays_within_bytes_and_entries() {
        const KEYS: usize = 64 * 5;
        const BYTES: usize = 64 * 6_000;
        let limit = Limit::new(Rate::new(200, Duration::from_secs(3600)).unwrap(), 200).unwrap();
        for algorithm in ALL {
            let memory = Memory::new(KEYS, BYTES, Clock::manual(Timestamp::from_micros(1_000_000)));
            let call = |key: usize| {
                let hit = Hit {
                    bucket: BucketName::new(&format!("key {key}"), "class"),
                    limit,
                    algorithm,
                    want: Want::exactly(Cost::new(1)),
                    shadow: false,
                    sensitive: false,
                    quota: false,
                    charge: Charge::IfAllowed,
                    strikes: None,
                    lease: None,
                };
                memory.decide_now(&[hit]);
            };
            let mut most = Figures::default();
            for key in 0..400 {
                for _ in 0..if key % 2 == 0 { 1 } else { 40 } {
                    call(key);
                    call(key / 2);
                }
                let Figures { buckets, bytes, dropped, .. } = memory.figures();
                assert!(buckets <= KEYS && bytes <= BYTES, "{algorithm:?}: {buckets} buckets, {bytes} bytes");
                most.buckets = most.buckets.max(buckets);
                most.bytes = most.bytes.max(bytes);
                most.dropped = dropped;
            }
            assert!(most.dropped > 0, "{algorithm:?}: it was no flood");
            // One of the bounds was reached, or nearly so.
            assert!(most.buckets > KEYS / 2 || most.bytes > BYTES / 2, "{algorithm:?}: {most:?}");
        }
    }
}
