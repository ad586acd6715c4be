//! A client of Tollgate, a rate-limit decision service, for gateways.
//!
//! A gateway with much traffic does not ask for each call. The client borrows tokens in chunks, spends them here,
//! and gives back what it does not need: most calls are decided in tens of nanoseconds, and the limit still holds,
//! because tokens are taken out of the bucket before they are spent.
//!
//! ```no_run
//! use std::time::Duration;
//! use tollgate_client::{Client, Fallback};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tollgate_client::Error> {
//! let client = Client::builder("http://127.0.0.1:8081")
//!     .endpoint("http://127.0.0.1:8082")
//!     .gateway("gw-1")
//!     .fallback(Fallback::Limit { rate_per_s: 10.0, burst: 20 })
//!     .class_fallback("login", Fallback::Deny)
//!     .build()?;
//!
//! let verdict = client.decide("alice", "read", None).await?;
//! if verdict.allowed() {
//!     println!("{} of {} left", verdict.remaining, verdict.limit);
//! } else {
//!     println!("try again in {:?}", verdict.retry_after);
//! }
//!
//! // A worker that can wait for its turn, for up to five seconds.
//! let verdict = client.acquire("alice", "mail", None, Duration::from_secs(5)).await?;
//!
//! // Give back what is held.
//! client.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! | | |
//! |---|---|
//! | [`Client::check`] | decides here, at once, or not at all |
//! | [`Client::decide`] | decides here if it can, else asks, else does without the service |
//! | [`Client::acquire`] | waits for its turn |
//! | [`Client::should_rate_limit`] | always asks |

mod client;
mod clock;
mod error;
pub mod fallback;
pub mod headers;
mod keeper;
mod keys;
pub mod layer;
pub mod leases;
mod service;
mod shared;
mod verdict;

pub use self::client::{Builder, Client, DEFAULT_DEADLINE, DEFAULT_MAX_KEYS};
pub use self::clock::Moment;
pub use self::error::Error;
pub use self::fallback::Fallback;
pub use self::verdict::{Answer, Denial, Verdict};
#[cfg(feature = "tls")]
pub use tonic::transport::{Certificate, ClientTlsConfig, Identity};
