//! Tollgate's server, as a library so that tests can drive any room of it. `ARCHITECTURE.md` is the map.

pub mod algorithm;
pub mod app;
pub mod clock;
pub mod config;
pub mod engine;
mod grpc;
mod http;
mod lease;
pub mod limit;
mod listen;
pub mod name;
pub mod penalty;
pub mod reload;
pub mod request;
mod rls;
pub mod rules;
pub mod shed;
pub mod store;
pub mod telemetry;
pub mod tls;
pub mod tokens;
mod yaml;
