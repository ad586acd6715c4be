//! Who calls, and for what: the traffic that a server meets.

use crate::api::Call;
use anyhow::Context as _;
use rand::RngExt as _;
use rand::rngs::SmallRng;
use rand_distr::Distribution as _;
use rand_distr::Zipf;
use rand_distr::weighted::WeightedIndex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Calls, each drawn on its own.
#[derive(Debug)]
pub(crate) struct Traffic {
    pub(crate) keys: Keys,
    pub(crate) classes: Classes,
    /// `None`: what the class costs.
    pub(crate) cost: Option<u32>,
}

/// Which keys call how often.
#[derive(Debug)]
pub(crate) enum Keys {
    /// So many, all as often.
    Uniform(u64),
    /// The second half as often as the first, the third a third: with an exponent of 1.
    Zipf(Zipf<f64>),
    /// One does all the calls.
    Hot,
    /// So many, one after the other.
    InTurn(u64, AtomicU64),
}

/// Which classes are asked for how often.
#[derive(Debug)]
pub(crate) enum Classes {
    /// By weight.
    Mixed(Vec<String>, WeightedIndex<u32>),
    /// So many; each key has its own.
    OfKey(u64),
}

impl Keys {
    pub(crate) fn zipf(keys: u32, exponent: f64) -> anyhow::Result<Self> {
        Ok(Self::Zipf(Zipf::new(f64::from(keys), exponent).context("no such zipf distribution")?))
    }

    pub(crate) fn in_turn(keys: u64) -> Self {
        Self::InTurn(keys, AtomicU64::new(0))
    }

    fn draw(&self, rng: &mut SmallRng) -> u64 {
        match self {
            Self::Uniform(keys) => rng.random_range(0..(*keys).max(1)),
            Self::Zipf(zipf) => rank(zipf.sample(rng)),
            Self::Hot => 0,
            Self::InTurn(keys, next) => next.fetch_add(1, Ordering::Relaxed) % (*keys).max(1),
        }
    }
}

/// A whole number from 1, as a number from 0.
#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "there are at most 2^32 keys"
)]
fn rank(drawn: f64) -> u64 {
    (drawn as u64).saturating_sub(1)
}

impl Classes {
    pub(crate) fn only(class: &str) -> anyhow::Result<Self> {
        Self::mixed(&[(class, 1)])
    }

    /// Each with its weight.
    pub(crate) fn mixed(classes: &[(&str, u32)]) -> anyhow::Result<Self> {
        let weights =
            WeightedIndex::new(classes.iter().map(|(_, weight)| weight)).context("class weights")?;
        Ok(Self::Mixed(classes.iter().map(|(class, _)| (*class).to_owned()).collect(), weights))
    }

    /// The name of one of many classes.
    pub(crate) fn numbered(n: u64) -> String {
        format!("class-{n:05}")
    }

    fn draw(&self, key: u64, rng: &mut SmallRng) -> String {
        match self {
            Self::Mixed(classes, weights) => classes.get(weights.sample(rng)).cloned().unwrap_or_default(),
            Self::OfKey(classes) => Self::numbered(key % (*classes).max(1)),
        }
    }
}

impl Traffic {
    pub(crate) fn draw(&self, rng: &mut SmallRng) -> Call {
        let key = self.keys.draw(rng);
        Call { key: name(key), class: self.classes.draw(key, rng), cost: self.cost }
    }
}

/// All keys are equally long, so that memory can be told by key.
pub(crate) fn name(key: u64) -> String {
    format!("user-{key:08}")
}

/// The bytes of a key.
pub(crate) const NAME_BYTES: u32 = 13;

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng as _;
    use std::collections::{HashMap, HashSet};

    const DRAWS: usize = 20_000;

    fn drawn(keys: &Keys) -> HashMap<u64, usize> {
        let mut rng = SmallRng::seed_from_u64(7);
        let mut times = HashMap::new();
        for _ in 0..DRAWS {
            *times.entry(keys.draw(&mut rng)).or_default() += 1;
        }
        times
    }

    #[test]
    fn uniform_keys_are_all_there_and_alike() {
        let times = drawn(&Keys::Uniform(100));
        assert_eq!(times.len(), 100);
        assert!(times.keys().all(|key| *key < 100));
        assert!(times.values().all(|times| (100..350).contains(times)), "{times:?}");
    }

    #[test]
    fn zipf_keys_are_called_in_inverse_order() {
        let times = drawn(&Keys::zipf(1000, 1.0).unwrap());
        assert!(times.keys().all(|key| *key < 1000));
        // The first has 1 of 7.49, the second half of that.
        assert!((2400..2950).contains(&times[&0]), "{times:?}");
        assert!((1150..1550).contains(&times[&1]), "{times:?}");
        assert!(Keys::zipf(10, -1.0).is_err());
    }

    #[test]
    fn one_hot_key_and_keys_in_turn() {
        assert_eq!(drawn(&Keys::Hot).len(), 1);
        let times = drawn(&Keys::in_turn(50));
        assert!(times.len() == 50 && times.values().all(|times| *times == DRAWS / 50));
    }

    #[test]
    fn classes_come_by_weight_or_by_key() {
        let mut rng = SmallRng::seed_from_u64(7);
        let mixed = Classes::mixed(&[("read", 3), ("write", 1)]).unwrap();
        let reads = (0..DRAWS).filter(|_| mixed.draw(0, &mut rng) == "read").count();
        assert!((DRAWS * 7 / 10..DRAWS * 8 / 10).contains(&reads), "{reads}");
        let own: HashSet<_> = (0..100).map(|key| Classes::OfKey(10).draw(key, &mut rng)).collect();
        assert!(own.len() == 10 && own.contains("class-00009"));
        assert!(Classes::mixed(&[("read", 0)]).is_err());
    }

    #[test]
    fn keys_are_equally_long() {
        assert!([0, 99_999_999].iter().all(|key| name(*key).len() == usize::try_from(NAME_BYTES).unwrap()));
    }
}
