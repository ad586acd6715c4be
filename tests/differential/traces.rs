//! Random traces. Most numbers are small or at a boundary that the run knows, because that is where stores
//! part ways; some are anything that can be.

use proptest::prelude::*;
use proptest::sample::Index;
use std::ops::RangeInclusive;
use std::time::Duration;
use tollgate_server::algorithm::ALL;
use tollgate_server::limit::{Limit, LimitError, Rate};
use tollgate_server::penalty::Penalty;

/// What happens on three keys and three classes.
#[derive(Clone, Debug)]
pub(super) struct Trace {
    /// Of each class, at the start.
    pub(super) rules: Vec<RuleSpec>,
    pub(super) steps: Vec<(Step, Shift)>,
}

#[derive(Clone, Debug)]
pub(super) struct RuleSpec {
    pub(super) limit: Limit,
    /// Which of all.
    pub(super) algorithm: usize,
    pub(super) penalty: Option<Penalty>,
    pub(super) shadow: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Call(Vec<Wish>),
    Settle {
        which: Index,
        unused: Unused,
    },
    SettleUnknown {
        unused: Unused,
    },
    /// A lease that was asked for is asked for again.
    Again {
        which: Index,
    },
    Change {
        class: usize,
        rule: RuleSpec,
    },
}

/// Of one bucket.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) key: usize,
    pub(super) class: usize,
    pub(super) at_least: Amount,
    /// `None`: all or nothing.
    pub(super) at_most: Option<Amount>,
    /// Where the class has a penalty: denials made elsewhere, and whether one here counts.
    pub(super) reported: u32,
    pub(super) counts: bool,
    /// For how long.
    pub(super) lease: Option<Duration>,
    pub(super) quota: bool,
    pub(super) charge: Charging,
}

/// What a wish does to its bucket.
#[derive(Clone, Copy, Debug)]
pub(super) enum Charging {
    IfAllowed,
    /// As much as was wished at least, allowed or not. No lease.
    Always,
    /// That, and wishes nothing.
    GiveBack,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Amount {
    None,
    One,
    Burst,
    /// What was last said to be left.
    Left,
    OneMoreThanLeft,
    /// Up to the burst.
    Some(u64),
    Any,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Unused {
    /// Up to one more than was wished.
    Some(u64),
    Nothing,
    Everything,
    More,
}

/// What the clock does before the next step. Microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shift {
    None,
    Forward(u64),
    /// Thousandths of the time in which an empty bucket of that class refills.
    Window {
        class: usize,
        share: u16,
    },
    /// When one of the last decisions said that it would fit, or a little early.
    Retry {
        which: Index,
        early: u64,
    },
    /// When one of the last decisions said that its bucket would be as good as new.
    Reset {
        which: Index,
        early: u64,
    },
    Back(u64),
}

/// Traces by that many algorithms.
pub(super) fn traces(algorithms: usize) -> impl Strategy<Value = Trace> {
    let rules = (prop::collection::vec(rules(algorithms), 3), prop::bool::weighted(0.3));
    // Rules that differ in all but the limit are told apart too.
    let rules = rules.prop_map(|(mut rules, alike)| {
        let limit = rules[0].limit;
        rules.iter_mut().filter(|_| alike).for_each(|rule| rule.limit = limit);
        rules
    });
    let steps = prop::collection::vec((steps(algorithms), shifts()), 1..40);
    (rules, steps).prop_map(|(rules, steps)| Trace { rules, steps })
}

fn rules(algorithms: usize) -> impl Strategy<Value = RuleSpec> {
    let penalty = prop::option::of(penalties());
    (limits(), 0..algorithms, penalty, prop::bool::weighted(0.15)).prop_map(
        |(limit, algorithm, penalty, shadow)| {
            let limit = match (ALL[algorithm].check)(&limit) {
                Ok(()) => limit,
                Err(LimitError::Burst { most, .. } | LimitError::Log { most, .. }) => {
                    Limit::new(limit.rate(), most).unwrap()
                }
                Err(error) => panic!("{error}"),
            };
            RuleSpec { limit, algorithm, penalty, shadow }
        },
    )
}

fn limits() -> impl Strategy<Value = Limit> {
    let rate = |count: u64, period: u64| Rate::new(count, Duration::from_micros(period)).unwrap();
    let plain = (1..=20u64, 1..=10u64).prop_map(move |(count, seconds)| rate(count, seconds * 1_000_000));
    let odd = (1..=1_000_000u64, 1..=10_000_000_000u64)
        .prop_map(move |(count, period)| rate(count.min(period), period));
    let longest = Rate::LONGEST_PERIOD;
    let extreme = prop_oneof![
        Just(Rate::new(1_000_000, Duration::from_secs(1)).unwrap()),
        Just(Rate::new(1, Duration::from_micros(1)).unwrap()),
        Just(Rate::new(1, longest).unwrap()),
        Just(Rate::new(7, longest).unwrap()),
    ];
    let rates = prop_oneof![4 => plain, 2 => odd, 1 => extreme];
    let bursts =
        prop_oneof![6 => 1..=12u64, 2 => 1..=100_000u64, 1 => 1..=Limit::MOST_BURST, 1 => Just(u64::MAX)];
    (rates, bursts).prop_map(|(rate, burst)| match Limit::new(rate, burst) {
        Err(LimitError::Burst { most, .. }) => Limit::new(rate, most).unwrap(),
        limit => limit.unwrap(),
    })
}

fn penalties() -> impl Strategy<Value = Penalty> {
    let span = |range: RangeInclusive<u64>| range.prop_map(Duration::from_millis);
    let spans = || prop_oneof![3 => span(1..=20_000), 1 => span(1..=3_600_000), 1 => Just(Penalty::LONGEST)];
    (0..=4u32, spans(), spans(), spans()).prop_map(|(strikes, window, base, cap)| {
        Penalty::new(strikes, window, base.min(cap), base.max(cap)).unwrap()
    })
}

fn steps(algorithms: usize) -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => prop::collection::vec(wishes(), 1..=4).prop_map(Step::Call),
        4 => (any::<Index>(), unused()).prop_map(|(which, unused)| Step::Settle { which, unused }),
        1 => unused().prop_map(|unused| Step::SettleUnknown { unused }),
        2 => any::<Index>().prop_map(|which| Step::Again { which }),
        2 => (0..3usize, rules(algorithms)).prop_map(|(class, rule)| Step::Change { class, rule }),
    ]
}

fn wishes() -> impl Strategy<Value = Wish> {
    let mostly_one = || prop_oneof![3 => Just(0usize), 1 => Just(1), 1 => Just(2)];
    let reported = prop_oneof![8 => Just(0), 2 => 1..=4u32, 1 => Just(u32::MAX)];
    let lease = prop::option::weighted(0.3, (1..=10_000_000u64).prop_map(Duration::from_micros));
    let at_most = prop::option::weighted(0.3, amounts());
    let charge = prop_oneof![
        8 => Just(Charging::IfAllowed),
        2 => Just(Charging::Always),
        1 => Just(Charging::GiveBack),
    ];
    let how = (prop::bool::weighted(0.8), lease, prop::bool::weighted(0.2), charge);
    (mostly_one(), mostly_one(), amounts(), at_most, reported, how).prop_map(
        |(key, class, at_least, at_most, reported, (counts, lease, quota, charge))| Wish {
            key,
            class,
            at_least,
            at_most,
            reported,
            counts,
            lease,
            quota,
            charge,
        },
    )
}

fn amounts() -> impl Strategy<Value = Amount> {
    prop_oneof![
        1 => Just(Amount::None),
        4 => Just(Amount::One),
        1 => Just(Amount::Burst),
        3 => Just(Amount::Left),
        2 => Just(Amount::OneMoreThanLeft),
        3 => any::<u64>().prop_map(Amount::Some),
        1 => Just(Amount::Any),
    ]
}

fn unused() -> impl Strategy<Value = Unused> {
    prop_oneof![
        3 => any::<u64>().prop_map(Unused::Some),
        1 => Just(Unused::Nothing),
        1 => Just(Unused::Everything),
        1 => Just(Unused::More),
    ]
}

fn shifts() -> impl Strategy<Value = Shift> {
    let early = || 0..=1u64;
    prop_oneof![
        6 => Just(Shift::None),
        2 => (1..=100u64).prop_map(Shift::Forward),
        2 => (1..=5_000_000u64).prop_map(Shift::Forward),
        1 => (1..=100_000_000_000u64).prop_map(Shift::Forward),
        3 => (0..3usize, 0..=1_500u16).prop_map(|(class, share)| Shift::Window { class, share }),
        4 => (any::<Index>(), early()).prop_map(|(which, early)| Shift::Retry { which, early }),
        2 => (any::<Index>(), early()).prop_map(|(which, early)| Shift::Reset { which, early }),
        2 => (1..=5_000_000u64).prop_map(Shift::Back),
        1 => (1..=100_000_000_000u64).prop_map(Shift::Back),
    ]
}
