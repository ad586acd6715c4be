//! What tests of algorithms share: random traces, a naive model, and what holds for all of them.

mod docs;
#[path = "../../../tests/model.rs"]
pub(super) mod model;
mod properties;
pub(super) mod trace;
