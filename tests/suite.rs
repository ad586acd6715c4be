//! The tests of the whole: one binary, so that it links once. Run them with `tests/run`.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test says no by a panic"
)]

mod atomicity;
mod client;
mod denials;
mod differential;
mod envoy;
mod errors;
mod fault;
mod fuzzed;
mod gateway;
mod grpcurl;
mod hostile;
mod integration;
mod keys;
mod leases;
mod metrics;
mod model;
mod naive;
mod process;
mod replay;
mod replay_grpc;
mod rig;
mod script;
mod soak;
mod stores;
mod support;
mod tidy;
mod tls;
mod topologies;
mod traffic;
