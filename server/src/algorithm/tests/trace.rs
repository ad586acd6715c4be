//! Random limits and random traces, and a bucket that lives through them.

use super::model::Answer;
use crate::algorithm::{ALL, Algorithm};
use crate::limit::{Cost, Decision, Limit, LimitError, Rate, State, Timestamp, Want, micros};
use proptest::prelude::*;
use std::time::Duration;

/// Times of traces end here: the year 2112, and within what a double holds exactly.
const END: u64 = 1 << 52;

/// Any limit that can be, the slowest and fastest, smallest and largest included.
pub(in crate::algorithm) fn limits() -> impl Strategy<Value = Limit> {
    let burst = prop_oneof![3 => (any::<u64>(), 0..=30u32).prop_map(|(seed, bits)| below(seed, bits)), 1 => Just(u64::MAX)];
    (rates(), burst).prop_map(|(rate, burst)| limit(rate, burst))
}

/// The limit closest to that.
pub(in crate::algorithm) fn limit(rate: Rate, burst: u64) -> Limit {
    match Limit::new(rate, burst.max(1)) {
        Err(LimitError::Burst { most, .. }) => Limit::new(rate, most).unwrap(),
        limit => limit.unwrap(),
    }
}

fn rates() -> impl Strategy<Value = Rate> {
    let longest = micros(Rate::LONGEST_PERIOD);
    let period = prop_oneof![
        Just(1),
        Just(1_000_000),
        Just(60_000_000),
        Just(longest),
        (any::<u64>(), 1..=42u32).prop_map(move |(seed, bits)| below(seed, bits).clamp(1, longest)),
        (0..=41u32).prop_map(|bits| 1 << bits),
    ];
    (period, any::<u64>(), 0..=42u32).prop_map(|(period, count, bits)| {
        // One token a microsecond is the fastest rate.
        let count = below(count, bits).clamp(1, period);
        Rate::new(count, Duration::from_micros(period)).unwrap()
    })
}

/// A number of at most that many bits, so that small ones are as likely as large ones.
fn below(seed: u64, bits: u32) -> u64 {
    seed.checked_shr(64 - bits).unwrap_or(0)
}

/// Tokens: nothing, a few, many, all. Whoever uses them cuts them to the burst.
pub(in crate::algorithm) fn amounts() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 0..4u64,
        2 => (any::<u64>(), 0..=30u32).prop_map(|(seed, bits)| below(seed, bits)),
        1 => Just(u64::MAX),
    ]
}

/// All or nothing, or a part.
pub(in crate::algorithm) fn wants() -> impl Strategy<Value = Want> {
    let exactly = amounts().prop_map(|cost| Want::exactly(Cost::new(cost)));
    let partly = (amounts(), amounts())
        .prop_map(|(a, b)| Want { at_least: Cost::new(a.min(b)), at_most: Cost::new(a.max(b)) });
    prop_oneof![2 => exactly, 1 => partly]
}

/// When a trace begins.
pub(in crate::algorithm) fn starts() -> impl Strategy<Value = Timestamp> {
    prop_oneof![Just(0), Just(1_700_000_000_000_000), 0..=END].prop_map(Timestamp::from_micros)
}

/// How the clock moves between two calls; backwards if negative.
#[derive(Clone, Copy, Debug)]
pub(in crate::algorithm) enum Tick {
    Micros(i64),
    /// In 32nds of the time in which an empty bucket refills.
    Window(i64),
}

fn ticks() -> impl Strategy<Value = Tick> {
    prop_oneof![
        3 => Just(Tick::Micros(0)),
        2 => (1..4i64).prop_map(Tick::Micros),
        3 => (1..40i64).prop_map(Tick::Window),
        1 => (-4..0i64).prop_map(Tick::Micros),
        1 => (-40..0i64).prop_map(Tick::Window),
    ]
}

#[derive(Clone, Copy, Debug)]
pub(in crate::algorithm) enum Act {
    Take(Want),
    Refund(u64),
    /// From now on another limit holds.
    Change(Limit),
    /// From now on another burst holds.
    Burst(u64),
}

#[derive(Clone, Copy, Debug)]
pub(in crate::algorithm) struct Step {
    pub(in crate::algorithm) tick: Tick,
    pub(in crate::algorithm) act: Act,
}

/// Calls and refunds under one rule.
pub(in crate::algorithm) fn steady() -> impl Strategy<Value = Vec<Step>> {
    let act = prop_oneof![4 => wants().prop_map(Act::Take), 1 => amounts().prop_map(Act::Refund)];
    steps(act)
}

/// Calls and refunds while the rules change.
pub(in crate::algorithm) fn unsteady() -> impl Strategy<Value = Vec<Step>> {
    let act = prop_oneof![
        8 => wants().prop_map(Act::Take),
        2 => amounts().prop_map(Act::Refund),
        1 => limits().prop_map(Act::Change),
        1 => amounts().prop_map(Act::Burst),
    ];
    steps(act)
}

fn steps(act: impl Strategy<Value = Act>) -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec((ticks(), act).prop_map(|(tick, act)| Step { tick, act }), 0..30)
}

/// A bucket with its own clock, asked and charged as the stores do.
#[derive(Clone, Debug)]
pub(in crate::algorithm) struct Bucket {
    pub(in crate::algorithm) algorithm: &'static Algorithm,
    pub(in crate::algorithm) limit: Limit,
    pub(in crate::algorithm) state: State,
    pub(in crate::algorithm) now: Timestamp,
}

/// A bucket of every algorithm that has lived through a trace.
pub(in crate::algorithm) fn lived(
    start: Timestamp,
    limit: Limit,
    trace: &[Step],
) -> impl Iterator<Item = Bucket> {
    new(start, limit).map(move |mut bucket| {
        for step in trace {
            bucket.live(step);
        }
        bucket
    })
}

/// A new bucket of every algorithm.
pub(in crate::algorithm) fn new(start: Timestamp, limit: Limit) -> impl Iterator<Item = Bucket> {
    ALL.iter().map(move |algorithm| {
        let limit = fitted(algorithm, limit);
        Bucket { algorithm, limit, state: State::default(), now: start }
    })
}

/// That limit, or the largest that the algorithm takes at its rate.
pub(in crate::algorithm) fn fitted(algorithm: &Algorithm, it: Limit) -> Limit {
    match (algorithm.check)(&it) {
        Ok(()) => it,
        Err(LimitError::Burst { most, .. } | LimitError::Log { most, .. }) => limit(it.rate(), most),
        Err(error) => panic!("{error}"),
    }
}

impl Bucket {
    /// The same, as it will be.
    pub(in crate::algorithm) fn after(&self, span: Duration) -> Self {
        Self { now: self.now.after(span), ..self.clone() }
    }

    /// The same, as it was.
    pub(in crate::algorithm) fn before(&self, span: Duration) -> Self {
        let now = Timestamp::from_micros(self.now.as_micros() - micros(span));
        Self { now, ..self.clone() }
    }

    pub(in crate::algorithm) fn tick(&mut self, tick: Tick) {
        let by = match tick {
            Tick::Micros(by) => by,
            Tick::Window(parts) => i64::try_from(micros(self.limit.window())).unwrap() / 32 * parts,
        };
        let now = self.now.as_micros().saturating_add_signed(by).min(END.max(self.now.as_micros()));
        self.now = Timestamp::from_micros(now);
    }

    /// A want that this limit could ever satisfy.
    pub(in crate::algorithm) fn fitting(&self, want: Want) -> Want {
        let burst = Cost::new(self.limit.burst());
        Want { at_least: want.at_least.min(burst), at_most: want.at_most.min(burst) }
    }

    pub(in crate::algorithm) fn decide(&self, want: Want) -> Decision {
        (self.algorithm.decide)(&self.limit, &self.state, self.now, self.fitting(want))
    }

    pub(in crate::algorithm) fn exactly(&self, cost: u64) -> Decision {
        (self.algorithm.decide)(&self.limit, &self.state, self.now, Want::exactly(Cost::new(cost)))
    }

    pub(in crate::algorithm) fn peek(&self) -> Decision {
        self.exactly(0)
    }

    pub(in crate::algorithm) fn charge(&mut self, cost: Cost) {
        (self.algorithm.charge)(&self.limit, &mut self.state, self.now, cost);
    }

    pub(in crate::algorithm) fn take(&mut self, want: Want) -> Decision {
        let decision = self.decide(want);
        if decision.granted > Cost::ZERO {
            self.charge(decision.granted);
        }
        decision
    }

    pub(in crate::algorithm) fn refund(&mut self, cost: u64) -> u64 {
        (self.algorithm.refund)(&self.limit, &mut self.state, self.now, Cost::new(cost)).get()
    }

    /// Lives through one step; the decision, if it was a call.
    pub(in crate::algorithm) fn live(&mut self, step: &Step) -> Option<Decision> {
        self.tick(step.tick);
        match step.act {
            Act::Take(want) => return Some(self.take(want)),
            Act::Refund(cost) => {
                self.refund(cost);
            }
            Act::Change(limit) => self.limit = fitted(self.algorithm, limit),
            Act::Burst(burst) => self.limit = fitted(self.algorithm, limit(self.limit.rate(), burst)),
        }
        None
    }
}

/// As a model tells it.
pub(in crate::algorithm) fn answer(decision: &Decision) -> Answer {
    Answer {
        allowed: decision.allowed(),
        granted: decision.granted.get(),
        remaining: decision.remaining,
        retry_after: micros(decision.retry_after),
        reset_after: micros(decision.reset_after),
    }
}
