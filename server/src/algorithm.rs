//! The algorithms: each is a row in [`ALL`], told once in Rust for the memory store and once in Lua for Redis.
//!
//! An algorithm is three pure functions of a limit, a state and a time. It knows no clock, no key and no
//! store; whoever holds the state asks [`decide`](Algorithm::decide), and only if every bucket of a call
//! allows it [`charge`](Algorithm::charge)s them.
//!
//! An algorithm with windows takes `limit.burst()` tokens each `limit.window()`: at `100/m` 100 a minute, and
//! with a burst of 200 beside it 200 each two minutes.
//!
//! What holds for all of them is tested in one place, `algorithm/tests/properties.rs`:
//! a denied call is free; `retry_after` is exact; what `remaining` says still fits and one more does not;
//! a bucket whose `reset_after` has passed is as good as new; in any interval at most
//! `burst + rate x time` is granted (a fixed window: twice the burst); time never runs backwards in a bucket.

mod fixed_window;
mod gcra;
mod leaky_bucket;
mod level;
mod sliding_log;
mod sliding_window;
#[cfg(test)]
mod tests;
mod token_bucket;
mod window;

use crate::limit::{Cost, Decision, Limit, LimitError, State, Timestamp, Want};
use std::time::Duration;

/// One way to decide, as data.
pub struct Algorithm {
    /// What rules call it.
    pub name: &'static str,
    /// What a stored state is marked with, so that a state of another algorithm is never misread.
    /// Never given twice, never changed.
    pub tag: u8,
    /// Limits that only others can keep, or that would not fit the exact range.
    pub check: fn(&Limit) -> Result<(), LimitError>,
    /// May its tokens be lent?
    pub lending: Lending,
    /// Does an allowed call have to wait for its turn?
    pub queues: bool,
    /// What would become of a call now. Changes nothing.
    pub decide: fn(&Limit, &State, Timestamp, Want) -> Decision,
    /// Takes what `decide` granted at the same time. More than there is puts the bucket in debt, which
    /// then denies even a peek; what it may owe is bounded by each algorithm in its own way.
    pub charge: fn(&Limit, &mut State, Timestamp, Cost),
    /// Gives tokens back; returns how many there was room for.
    pub refund: fn(&Limit, &mut State, Timestamp, Cost) -> Cost,
    /// The same in Lua: a chunk that returns a table of these three functions. One that keeps more than words
    /// adds `load`, and one that lends [`UntilReset`](Lending::UntilReset) adds `until_reset = true`. It may use
    /// `div_ceil`, `whole`, `level`, `window` and the tables of algorithms before it in [`ALL`].
    pub lua: &'static str,
}

/// May tokens be taken now and spent later?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lending {
    /// For as long as a lease lasts.
    Freely,
    /// Until the bucket is as good as new: what is left of a window is not for the next one.
    UntilReset,
    /// Each call has its own turn. Whoever asks for a lease all the same is refused before the store is asked.
    Never,
}

/// Every algorithm there is, the default first.
pub const ALL: &[Algorithm] = &[
    token_bucket::TOKEN_BUCKET,
    leaky_bucket::LEAKY_BUCKET,
    fixed_window::FIXED_WINDOW,
    sliding_log::SLIDING_LOG,
    sliding_window::SLIDING_WINDOW,
    gcra::GCRA,
];

/// The one that counts by the calendar, as the rules of Envoy's own service do: what those are decided by unless
/// they say otherwise.
pub const BY_CALENDAR: &Algorithm = &fixed_window::FIXED_WINDOW;

/// What algorithms share in Lua, before all of them.
pub(crate) const SHARED_LUA: &[(&str, &str)] =
    &[("level", include_str!("algorithm/level.lua")), ("window", include_str!("algorithm/window.lua"))];

impl Algorithm {
    /// The algorithm of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|algorithm| algorithm.name == name)
    }

    /// The names of all, for messages.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ALL.iter().map(|algorithm| algorithm.name)
    }

    /// What one of `shares` may give, if together they are to give no more than the limit; with room for one call of
    /// that cost at once, if there can be. A cost that never fits does not fit a share either.
    #[must_use]
    pub fn share(&self, limit: &Limit, shares: u32, cost: Cost) -> Limit {
        let cost = if cost.get() > limit.burst() { Cost::ZERO } else { cost };
        let share = |cost| limit.share(shares, cost).ok().filter(|share| (self.check)(share).is_ok());
        share(cost).or_else(|| share(Cost::ZERO)).unwrap_or(*limit)
    }

    /// How long tokens may be lent, of a bucket that is as good as new after `reset_after`.
    #[must_use]
    pub fn lend(&self, valid_for: Duration, reset_after: Duration) -> Duration {
        match self.lending {
            Lending::UntilReset => valid_for.min(reset_after),
            Lending::Freely | Lending::Never => valid_for,
        }
    }
}

impl std::fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Takes every limit there is.
#[expect(clippy::unnecessary_wraps, reason = "the signature of a check")]
fn any_limit(_: &Limit) -> Result<(), LimitError> {
    Ok(())
}

/// Takes every limit whose units flow.
fn any_flow(limit: &Limit) -> Result<(), LimitError> {
    if limit.flows() { Ok(()) } else { Err(LimitError::NoFlow) }
}
