//! What tests of algorithms share: step tables, random traces, naive models, and what holds for all of them.

mod docs;
#[path = "../../../tests/model.rs"]
pub(super) mod model;
mod properties;
mod shares;
pub(super) mod table;
pub(super) mod trace;
mod windows;
