//! Where buckets, strikes, blocks and leases are kept, and decided where they are kept.

mod degraded;
mod expiring;
pub mod memory;
pub mod redis;

use crate::clock::Clock;
use crate::config::{StoreConfig, StoreUrl};
use crate::limit::{Cost, Decision};
use crate::request::{Hit, Settlement};
use async_trait::async_trait;
use degraded::Degraded;
pub use degraded::{Health, RETRY_UNAVAILABLE};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Keeps the state of all buckets.
#[async_trait]
pub trait Store: Send + Sync {
    /// Decides all hits of one call in one atomic step: every bucket is charged, or none.
    ///
    /// The answers are in the order of the hits. A hit that would have been allowed on its own, but was held
    /// up by another, is answered as a peek: allowed, nothing granted. A shadow hit holds nothing up.
    ///
    /// # Errors
    /// The store could not be asked. Whether it charged is then not known.
    async fn decide(&self, hits: Vec<Hit>, deadline: Option<Instant>) -> Result<Vec<Decision>, StoreError>;

    /// Ends a lease and gives its unspent tokens back; returns how many went in. Zero for a lease that has
    /// ended or never was.
    ///
    /// # Errors
    /// The store could not be asked.
    async fn settle(&self, settlement: Settlement, deadline: Option<Instant>) -> Result<Cost, StoreError>;

    /// Shows whether the store can decide; returns how many instances share it, or zero if that is not known.
    ///
    /// # Errors
    /// It can not, and why.
    async fn heartbeat(&self) -> Result<u32, StoreError>;
}

/// The store of that configuration, and how it is with it. It always answers: what can not be asked is decided in
/// memory at this instance's share, and says so. Needs a tokio runtime; does not wait for the store to be reached.
///
/// # Errors
/// The address can not be used at all.
pub fn open(
    config: &StoreConfig,
    clock: &Clock,
) -> Result<(Arc<dyn Store>, watch::Receiver<Health>), StoreError> {
    let authority = connect(config, clock.clone())?;
    if config.url == StoreUrl::Memory {
        // It is its own authority, always there and alone.
        return Ok((authority, watch::channel(Health { asked: true, degraded: None, instances: 1 }).1));
    }
    let (store, health) = Degraded::around(authority, config, clock.clone());
    Ok((Arc::new(store), health))
}

/// The authority of that configuration alone.
///
/// # Errors
/// The address can not be used at all.
pub fn connect(config: &StoreConfig, clock: Clock) -> Result<Arc<dyn Store>, StoreError> {
    Ok(match &config.url {
        StoreUrl::Memory => Arc::new(memory::Memory::new(config.max_keys, config.max_bytes, clock)),
        StoreUrl::Redis(url) => Arc::new(redis::Redis::connect(url, config, &clock)?),
    })
}

/// Does a denial hold the call up? One of a shadow hit does not, and those of quotas only together.
fn held_up(hits: &[Hit], decisions: &[Decision]) -> bool {
    let (mut quotas, mut denied) = (0, 0);
    for (hit, decision) in hits.iter().zip(decisions).filter(|(hit, _)| !hit.shadow) {
        match (hit.quota, decision.allowed()) {
            (false, false) => return true,
            (false, true) => {}
            (true, allowed) => {
                quotas += 1;
                denied += usize::from(!allowed);
            }
        }
    }
    quotas > 0 && quotas == denied
}

/// Why a store could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No answer in time.
    #[error("the store did not answer within {}", humantime::format_duration(*.0))]
    Timeout(Duration),
    /// The caller's own deadline passed first.
    #[error("the deadline passed while the store was asked")]
    DeadlinePassed,
    /// There is no connection.
    #[error("the store can not be reached: {0}")]
    Unreachable(String),
    /// The store answered with an error.
    #[error("the store failed: {0}")]
    Failed(String),
    /// Too many calls wait for the store.
    #[error("{0} calls wait for the store, as many as may")]
    Overloaded(usize),
}

impl StoreError {
    /// What the metrics call it.
    const fn name(&self) -> &'static str {
        match self {
            Self::Timeout(_) => "timeout",
            Self::DeadlinePassed => "deadline",
            Self::Unreachable(_) => "unreachable",
            Self::Failed(_) => "failed",
            Self::Overloaded(_) => "overloaded",
        }
    }
}
