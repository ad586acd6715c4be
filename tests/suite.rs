//! The tests of the whole: one binary, so that it links once. Run them with `tests/run`.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test says no by a panic"
)]

mod errors;
mod fault;
mod grpcurl;
mod integration;
mod process;
mod replay_grpc;
mod rig;
mod support;
mod tidy;
mod traffic;
