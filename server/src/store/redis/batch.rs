//! Many calls as one script call: what they have in common is said once. The layout is told at the top of
//! `decide.lua`.

use super::cluster;
use super::script::DECIDE;
use crate::algorithm::Algorithm;
use crate::limit::{Cost, Decision, Limit, Reason, Timestamp, Words, micros};
use crate::name::BucketName;
use crate::penalty::Penalty;
use crate::request::{Charge, Hit, Settlement};
use crate::store::StoreError;
use deadpool_redis::redis::{Cmd, RedisWrite, ToRedisArgs};
use indexmap::IndexSet;
use std::io::Write as _;
use std::time::Duration;

/// Milliseconds that keys outlive their use when tests move the clock: real time must not end what that
/// clock still needs.
const LINGER: u64 = 3_600_000;

/// How many words a state has.
const WORDS: u64 = 5;
/// A call that failed.
const FAILED: u64 = 3;
/// Codes from here on are of buckets that were another algorithm's.
const REPLACED: u64 = 4;

/// One call of the store.
#[derive(Debug)]
pub enum Call {
    Decide(Vec<Hit>),
    Settle(Settlement),
}

/// The answer to it.
#[derive(Debug)]
pub(super) enum Answer {
    Decided(Vec<Told>),
    Settled(Cost),
}

/// What Redis says of one hit.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub(super) decision: Decision,
    /// The state of a bucket that is over its limit, if its algorithm keeps words.
    pub(super) words: Option<Words>,
}

/// All answers of one script call.
#[derive(Debug)]
pub(super) struct Answers {
    /// Redis's time.
    pub(super) at: Timestamp,
    /// One for each call, in their order.
    pub(super) each: Vec<Result<Answer, StoreError>>,
}

impl Call {
    /// How many keys it is about, at most.
    pub(super) fn keys(&self) -> usize {
        match self {
            Self::Decide(hits) => hits.len() * 4,
            Self::Settle(_) => 2,
        }
    }

    /// The slot of a cluster that its keys are in; of several, that of the first.
    pub(super) fn slot(&self) -> u16 {
        match self {
            Self::Decide(hits) => hits.first().map_or(0, |hit| slot(&hit.bucket)),
            Self::Settle(settlement) => slot(settlement.id.bucket()),
        }
    }
}

/// Can a cluster decide these in one step?
pub(super) fn in_one_slot(hits: &[Hit]) -> bool {
    let mut slots = hits.iter().map(|hit| slot(&hit.bucket));
    let first = slots.next();
    slots.all(|slot| Some(slot) == first)
}

/// The slot of a cluster that a bucket is in, and all else about its key: that of what stands in braces.
fn slot(bucket: &BucketName) -> u16 {
    let key = bucket.subject().trim_start_matches('{').trim_end_matches('}');
    cluster::slot(key)
}

/// The script call for these calls.
pub fn pack(prefix: &str, now: Option<Timestamp>, calls: &[&Call]) -> Result<Cmd, StoreError> {
    let mut batch = Batch::default();
    for call in calls {
        match call {
            Call::Decide(hits) => {
                let rows = hits.iter().map(|hit| batch.hit(hit)).collect();
                batch.calls.push(Row::Decide(rows));
            }
            Call::Settle(settlement) => {
                let row = batch.settlement(settlement);
                batch.calls.push(row);
            }
        }
    }
    batch.command(prefix, now)
}

/// Reads the answers to these calls.
pub(super) fn unpack(calls: &[&Call], reply: &[u8]) -> Result<Answers, StoreError> {
    let unreadable =
        |why: &dyn std::fmt::Display| StoreError::Failed(format!("an answer that can not be read: {why}"));
    let (at, rows, errors): (u64, Vec<u64>, Vec<(usize, String)>) =
        rmp_serde::from_slice(reply).map_err(|error| unreadable(&error))?;
    let mut rows = rows.into_iter();
    let mut each = Vec::with_capacity(calls.len());
    for call in calls {
        let answer = match call {
            Call::Decide(hits) => {
                hits.iter().map(|hit| told(hit, &mut rows)).collect::<Option<_>>().map(Answer::Decided)
            }
            Call::Settle(_) => rows.next().map(|credited| Answer::Settled(Cost::new(credited))),
        };
        each.push(Ok(answer.ok_or_else(|| unreadable(&"it is too short"))?));
    }
    if rows.next().is_some() {
        return Err(unreadable(&"it is too long"));
    }
    for (call, error) in errors {
        if let Some(answer) = call.checked_sub(1).and_then(|place| each.get_mut(place)) {
            *answer = Err(StoreError::Failed(error));
        }
    }
    Ok(Answers { at: Timestamp::from_micros(at), each })
}

fn told(hit: &Hit, rows: &mut impl Iterator<Item = u64>) -> Option<Told> {
    let code = rows.next()?;
    let mut told = decided(code, rows)?;
    if code % REPLACED != FAILED && hit.lease.as_ref().is_some_and(|lease| lease.gateway.is_some()) {
        told.decision.gateways = u32::try_from(rows.next()?).unwrap_or(u32::MAX);
    }
    Some(told)
}

fn decided(code: u64, rows: &mut impl Iterator<Item = u64>) -> Option<Told> {
    let mut next = || rows.next();
    let blank = Decision { replaced: code >= REPLACED, ..Decision::blocked(Duration::ZERO) };
    let mut told = Told { decision: blank, words: None };
    let decision = &mut told.decision;
    match code % REPLACED {
        0 => {
            decision.denied = None;
            (decision.granted, decision.remaining) = (Cost::new(next()?), next()?);
            (decision.reset_after, decision.wait) = (span(next()?), span(next()?));
        }
        1 => {
            decision.denied = Some(Reason::OverLimit);
            decision.remaining = next()?;
            (decision.retry_after, decision.reset_after) = (span(next()?), span(next()?));
            told.words = match next()? {
                0 => None,
                WORDS => Some([next()?, next()?, next()?, next()?, next()?]),
                _ => return None,
            };
        }
        2 => *decision = Decision::blocked(span(next()?)),
        // An error is told of this call, and nothing of its hits.
        _ => {}
    }
    (code < 2 * REPLACED).then_some(told)
}

fn span(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

/// Calls, and what they have in common.
#[derive(Default)]
struct Batch<'c> {
    buckets: IndexSet<Key<'c>>,
    read: IndexSet<Key<'c>>,
    named: IndexSet<Key<'c>>,
    asks: Vec<Ask>,
    calls: Vec<Row>,
}

/// `<prefix>:<kind><name>`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key<'c> {
    kind: &'static str,
    name: &'c str,
}

/// All of a hit but its keys.
type Ask = [u64; 19];

/// One call, in places of what it is about.
enum Row {
    Decide(Vec<HitRow>),
    Settle { ask: usize, unused: u64, lease: usize, bucket: usize },
}

struct HitRow {
    ask: usize,
    bucket: usize,
    block: usize,
    strikes: Option<usize>,
    lease: Option<LeaseRow>,
    /// Who is counted, and where.
    gateway: Option<(u64, usize)>,
}

#[derive(Clone, Copy)]
enum LeaseRow {
    /// One that may have been granted before.
    Read(usize),
    New(usize),
}

impl<'c> Batch<'c> {
    fn hit(&mut self, hit: &'c Hit) -> HitRow {
        let strikes = hit.strikes.as_ref();
        let gateway = hit.lease.as_ref().and_then(|lease| lease.gateway);
        let (always, back) = match hit.charge {
            Charge::IfAllowed => (Cost::ZERO, Cost::ZERO),
            Charge::Always(cost) => (cost, Cost::ZERO),
            Charge::GiveBack(cost) => (Cost::ZERO, cost),
        };
        let ask = ask(
            &hit.limit,
            hit.algorithm,
            [
                hit.want.at_least.get(),
                hit.want.at_most.get(),
                strikes.map_or(0, |strikes| strikes.reported.into()),
                strikes.is_some_and(|strikes| strikes.on_denial).into(),
                gateway.map_or(0, |gateway| gateway.spends.map_or(1, |spends| 2 + spends.get())),
                hit.lease.as_ref().map_or(0, |lease| micros(lease.valid_for).max(1)),
                hit.shadow.into(),
                hit.quota.into(),
                always.get(),
                back.get(),
            ],
            strikes.map(|strikes| strikes.penalty),
        );
        let subject = hit.bucket.subject();
        HitRow {
            ask: place(&mut self.asks, ask),
            bucket: self.bucket(hit.bucket.as_str()),
            block: self.read.insert_full(Key { kind: "block:", name: subject }).0,
            strikes: strikes.map(|_| self.named.insert_full(Key { kind: "strikes:", name: subject }).0),
            gateway: gateway.map(|gateway| {
                let key = Key { kind: "gateways:", name: hit.bucket.as_str() };
                (gateway.hash, self.named.insert_full(key).0)
            }),
            lease: hit.lease.as_ref().map(|lease| {
                let key = Key { kind: "lease:", name: lease.id.as_str() };
                if lease.again {
                    LeaseRow::Read(self.read.insert_full(key).0)
                } else {
                    LeaseRow::New(self.named.insert_full(key).0)
                }
            }),
        }
    }

    fn settlement(&mut self, settlement: &'c Settlement) -> Row {
        let Settlement { id, limit, algorithm, unused } = settlement;
        Row::Settle {
            ask: place(&mut self.asks, ask(limit, algorithm, [0; 10], None)),
            unused: unused.get(),
            lease: self.read.insert_full(Key { kind: "lease:", name: id.as_str() }).0,
            bucket: self.bucket(id.bucket().as_str()),
        }
    }

    fn bucket(&mut self, name: &'c str) -> usize {
        self.buckets.insert_full(Key { kind: "", name }).0
    }

    fn command(&self, prefix: &str, now: Option<Timestamp>) -> Result<Cmd, StoreError> {
        let keys = || self.buckets.iter().chain(&self.read).chain(&self.named);
        let reads = number(self.buckets.len() + self.read.len());
        let linger = if now.is_some() { LINGER } else { 0 };
        let now = now.map_or(0, Timestamp::as_micros);
        let said = (now, linger, number(self.buckets.len()), reads, &self.asks, self.flat());
        let payload = rmp_serde::to_vec(&said)
            .map_err(|error| StoreError::Failed(format!("the calls can not be packed: {error}")))?;

        let mut command = DECIDE.by_hash(2 + keys().count(), payload.len() + 64 * keys().count());
        command.arg(keys().count());
        for key in keys() {
            command.arg(Named { prefix, key });
        }
        command.arg(payload);
        Ok(command)
    }

    /// All calls in one list of numbers.
    fn flat(&self) -> Vec<u64> {
        // Lua counts from 1, and buckets, what is read and what is not lie one after the other.
        let bucket = |place: usize| number(1 + place);
        let read = |place: usize| number(1 + self.buckets.len() + place);
        let named = |place: Option<usize>| {
            place.map_or(0, |place| number(1 + self.buckets.len() + self.read.len() + place))
        };
        let mut flat = Vec::with_capacity(6 * self.calls.len());
        for call in &self.calls {
            match call {
                Row::Decide(hits) => {
                    flat.push(number(hits.len()));
                    for hit in hits {
                        let lease = match hit.lease {
                            Some(LeaseRow::Read(place)) => read(place),
                            Some(LeaseRow::New(place)) => named(Some(place)),
                            None => 0,
                        };
                        let keys = [bucket(hit.bucket), read(hit.block), named(hit.strikes), lease];
                        flat.push(number(1 + hit.ask));
                        flat.extend(keys);
                        if let Some((hash, place)) = hit.gateway {
                            flat.extend([named(Some(place)), hash]);
                        }
                    }
                }
                &Row::Settle { ask, unused, lease, bucket: its } => {
                    flat.extend([0, number(1 + ask), unused, read(lease), bucket(its)]);
                }
            }
        }
        flat
    }
}

fn ask(limit: &Limit, algorithm: &Algorithm, hit: [u64; 10], penalty: Option<Penalty>) -> Ask {
    let [at_least, at_most, reported, on_denial, counted, valid_for, shadow, quota, always, back] = hit;
    let [strikes, forgotten, base, cap] = penalty.map_or([0; 4], |penalty| {
        [penalty.strikes().into(), micros(penalty.window()), micros(penalty.base()), micros(penalty.cap())]
    });
    [
        at_least,
        at_most,
        reported,
        on_denial,
        counted,
        valid_for,
        shadow,
        quota,
        always,
        back,
        algorithm.tag.into(),
        limit.burst(),
        limit.refill().get(),
        limit.scale().get(),
        micros(limit.window()),
        strikes,
        forgotten,
        base,
        cap,
    ]
}

/// A key as Redis sees it.
struct Named<'k> {
    prefix: &'k str,
    key: &'k Key<'k>,
}

impl ToRedisArgs for Named<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        let Self { prefix, key: Key { kind, name } } = self;
        // Writing to memory can not fail.
        write!(out.writer_for_next_arg(), "{prefix}:{kind}{name}").unwrap_or_default();
    }
}

/// Where it is in the list; at the end if it was not there.
fn place<T: PartialEq>(list: &mut Vec<T>, it: T) -> usize {
    list.iter().position(|known| *known == it).unwrap_or_else(|| {
        list.push(it);
        list.len() - 1
    })
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::ALL;
    use crate::limit::{Rate, Want};
    use crate::name::BucketName;
    use deadpool_redis::redis::Arg;
    use proptest::prelude::*;

    type Said = (u64, u64, u64, u64, Vec<Ask>, Vec<u64>);

    fn hit(key: &str, cost: u64) -> Hit {
        Hit {
            bucket: BucketName::new(key, "c"),
            limit: Limit::new(Rate::new(1, Duration::from_secs(1)).unwrap(), 9).unwrap(),
            algorithm: &ALL[0],
            want: Want::exactly(Cost::new(cost)),
            shadow: false,
            sensitive: false,
            quota: false,
            charge: Charge::IfAllowed,
            strikes: None,
            lease: None,
        }
    }

    #[test]
    fn what_calls_have_in_common_is_said_once() {
        let calls =
            [Call::Decide(vec![hit("a", 1), hit("b", 1)]), Call::Decide(vec![hit("b", 1), hit("a", 2)])];
        let command = pack("rl", Some(Timestamp::from_micros(5)), &calls.each_ref()).unwrap();
        let words: Vec<_> = command
            .args_iter()
            .map(|arg| match arg {
                Arg::Simple(word) => word.to_vec(),
                _ => panic!("no cursor in here"),
            })
            .collect();
        let keys: Vec<_> = words[3..7].iter().map(|key| String::from_utf8_lossy(key)).collect();
        assert_eq!(words[2], b"4");
        assert_eq!(keys, ["rl:{a}:c", "rl:{b}:c", "rl:block:{a}", "rl:block:{b}"]);
        let (now, _, buckets, reads, asks, calls): Said = rmp_serde::from_slice(&words[7]).unwrap();
        assert_eq!((now, buckets, reads), (5, 2, 4));
        let limit = [1, 9, 1, 1_000_000, 9_000_000, 0, 0, 0, 0];
        for (ask, cost) in asks.iter().zip([1, 2]) {
            assert_eq!(ask[..10], [cost, cost, 0, 0, 0, 0, 0, 0, 0, 0]);
            assert_eq!(ask[10..], limit);
        }
        assert_eq!(asks.len(), 2);
        assert_eq!(calls, [2, 1, 1, 3, 0, 0, 1, 2, 4, 0, 0, 2, 1, 2, 4, 0, 0, 2, 1, 3, 0, 0]);
    }

    #[test]
    fn answers_of_another_shape_are_refused() {
        let calls = [Call::Decide(vec![hit("a", 1)])];
        let answer = |rows: &[u64]| {
            let reply = rmp_serde::to_vec(&(7, rows, Vec::<(usize, String)>::new())).unwrap();
            unpack(&calls.each_ref(), &reply).map(|answers| answers.each.len())
        };
        for rows in [&[0, 1, 2, 3, 4][..], &[5, 2, 3, 4, 0], &[1, 2, 3, 4, 5, 1, 2, 3, 4, 5], &[2, 3], &[3]] {
            assert_eq!(answer(rows), Ok(1), "{rows:?}");
        }
        for rows in [
            &[][..],
            &[0, 1, 2, 3],
            &[0, 1, 2, 3, 4, 5],
            &[8, 1, 2, 3, 4],
            &[1, 2, 3, 4],
            &[1, 2, 3, 4, 4, 1, 2, 3, 4],
        ] {
            assert!(matches!(answer(rows), Err(StoreError::Failed(_))), "{rows:?}");
        }
    }

    proptest! {
        #[test]
        fn no_answer_panics(reply in prop::collection::vec(any::<u8>(), 0..200)) {
            let calls = [Call::Decide(vec![hit("a", 1)])];
            drop(unpack(&calls.each_ref(), &reply));
        }
    }
}
