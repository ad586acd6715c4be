//! The algorithms: each is a row in [`ALL`], told once in Rust for the memory store and once in Lua for Redis.
//!
//! An algorithm is three pure functions of a limit, a state and a time. It knows no clock, no key and no
//! store; whoever holds the state asks [`decide`](Algorithm::decide), and only if every bucket of a call
//! allows it [`charge`](Algorithm::charge)s them.
//!
//! What holds for all of them is tested in one place, `algorithm/tests/properties.rs`:
//! a denied call is free; `retry_after` is exact; what `remaining` says still fits and one more does not;
//! a bucket whose `reset_after` has passed is as good as new; in any interval at most
//! `burst + rate x time` is granted; time never runs backwards in a bucket.

#[cfg(test)]
mod tests;
mod token_bucket;

use crate::limit::{Cost, Decision, Limit, State, Timestamp, Want};

/// One way to decide, as data.
pub struct Algorithm {
    /// What rules call it.
    pub name: &'static str,
    /// What a stored state is marked with, so that a state of another algorithm is never misread.
    /// Never given twice, never changed.
    pub tag: u8,
    /// What would become of a call now. Changes nothing.
    pub decide: fn(&Limit, &State, Timestamp, Want) -> Decision,
    /// Takes what `decide` granted at the same time.
    pub charge: fn(&Limit, &mut State, Timestamp, Cost),
    /// Gives tokens back; returns how many there was room for.
    pub refund: fn(&Limit, &mut State, Timestamp, Cost) -> Cost,
    /// The same in Lua: a chunk that returns a table of these three functions.
    pub lua: &'static str,
}

/// Every algorithm there is, the default first.
pub const ALL: &[Algorithm] = &[token_bucket::TOKEN_BUCKET];

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
}

impl std::fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}
