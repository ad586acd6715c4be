//! When calls come.

#![expect(
    clippy::float_arithmetic,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "traffic is drawn by chance"
)]

use fastrand::Rng;

const SECOND: f64 = 1e6;

/// How the calls of a gateway come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// One after the other, in equal steps.
    Even,
    /// By chance, independent of each other.
    Poisson,
    /// By chance, twice as many in every other second, and none in between; all gateways at the same time.
    OnOff,
}

/// The calls of one gateway.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Calls {
    pattern: Pattern,
    per_second: f64,
}

impl Calls {
    pub(crate) fn new(pattern: Pattern, per_second: f64) -> Self {
        Self { pattern, per_second: per_second.max(1e-3) }
    }

    /// When the next one comes, in microseconds, after one at that time.
    pub(crate) fn next(&self, now: u64, rng: &mut Rng) -> u64 {
        match self.pattern {
            Pattern::Even => now + step(SECOND / self.per_second),
            Pattern::Poisson => now + step(SECOND / self.per_second * exponential(rng)),
            Pattern::OnOff => {
                let at = now + step(SECOND / self.per_second / 2.0 * exponential(rng));
                // What falls into a second without calls comes in the next one.
                if (at / 1_000_000).is_multiple_of(2) { at } else { at + 1_000_000 }
            }
        }
    }
}

/// How long something takes: so long, and by chance as much again, more or less.
pub(crate) fn takes(least: u64, rng: &mut Rng) -> u64 {
    let least_f = u32::try_from(least).map_or(SECOND, f64::from);
    least + (least_f * exponential(rng)) as u64
}

/// By von Neumann's comparisons of uniform numbers: exact, and the same on every machine, as a logarithm is not.
fn exponential(rng: &mut Rng) -> f64 {
    let mut whole = 0.0;
    loop {
        let first = rng.f64();
        let (mut last, mut run) = (first, 1);
        loop {
            let next = rng.f64();
            if next > last {
                break;
            }
            (last, run) = (next, run + 1);
        }
        if run % 2 == 1 {
            return whole + first;
        }
        whole += 1.0;
    }
}

fn step(micros: f64) -> u64 {
    (micros as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes in so many seconds, in each.
    fn counted(pattern: Pattern, per_second: f64, seconds: u64) -> Vec<u64> {
        let (mut rng, mut at, mut counts) = (Rng::with_seed(7), 0, vec![]);
        for second in 1..=seconds {
            let mut count = 0;
            while at < second * 1_000_000 {
                count += 1;
                at = Calls::new(pattern, per_second).next(at, &mut rng);
            }
            counts.push(count);
        }
        counts
    }

    #[test]
    fn calls_come_as_often_as_they_are_to() {
        for pattern in [Pattern::Even, Pattern::Poisson, Pattern::OnOff] {
            let all: u64 = counted(pattern, 1000.0, 100).iter().sum();
            assert!((99_000..101_000).contains(&all), "{pattern:?}: {all} of 100000");
        }
        assert!(counted(Pattern::OnOff, 1000.0, 100).iter().skip(1).step_by(2).all(|count| *count < 3));
        // Of independent calls the variance of a count is its mean.
        let counts = counted(Pattern::Poisson, 100.0, 1000);
        let squares: u64 = counts.iter().map(|count| count.abs_diff(100).pow(2)).sum();
        assert!((90_000..110_000).contains(&squares), "{squares} of 100000");
    }
}
