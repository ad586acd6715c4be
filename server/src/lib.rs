//! Tollgate's server, as a library so that tests can drive any room of it. `ARCHITECTURE.md` is the map.

pub mod algorithm;
pub mod limit;
pub mod penalty;
pub mod rules;
