//! A store that is looked at: how often it is asked, and whether what it lends and takes back adds up.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_server::clock::Clock;
use tollgate_server::limit::{Cost, Decision, Timestamp};
use tollgate_server::request::{Hit, Settlement};
use tollgate_server::store::{Store, StoreError};
use tonic::async_trait;

/// Asks another store, and notes what it says.
pub(crate) struct Watched {
    store: Arc<dyn Store>,
    clock: Clock,
    seen: Mutex<Seen>,
}

/// What was seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Decisions and settlements: each is a script call of its own, where the store is a Redis.
    pub(crate) calls: u64,
    /// Tokens that were lent, each lease once.
    pub(crate) lent: u64,
    /// Tokens that came back.
    pub(crate) credited: u64,
    /// What must not be.
    pub(crate) wrong: Option<String>,
    leases: HashMap<String, Lent>,
    /// What has ended by this time may be forgotten, also when the clock is set back.
    latest: Timestamp,
}

#[derive(Debug)]
struct Lent {
    granted: u64,
    ends: Timestamp,
    settled: bool,
}

impl Watched {
    pub(crate) fn new(store: Arc<dyn Store>, clock: Clock) -> Self {
        Self { store, clock, seen: Mutex::default() }
    }

    pub(crate) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    fn lend(&mut self, hit: &Hit, decision: &Decision, now: Timestamp) {
        let Some(lease) = hit.lease.as_ref().filter(|_| decision.granted > Cost::ZERO) else { return };
        self.latest = self.latest.max(now);
        let (id, granted) = (lease.id.as_str(), decision.granted.get());
        if let Some(lent) = self.leases.get(id).filter(|lent| self.latest < lent.ends && !lent.settled) {
            if lent.granted != granted {
                self.wrong = Some(format!("{id}: {granted} granted again, {} at first", lent.granted));
            }
            return;
        }
        self.lent += granted;
        let ends = now.after(hit.algorithm.lend(lease.valid_for, decision.reset_after));
        self.leases.insert(id.to_owned(), Lent { granted, ends, settled: false });
    }

    fn settle(&mut self, settlement: &Settlement, credited: u64) {
        self.credited += credited;
        let Some(lent) = self.leases.get_mut(settlement.id.as_str()) else {
            if credited > 0 {
                self.wrong = Some(format!("{}: {credited} credited, never lent", settlement.id));
            }
            return;
        };
        if credited > lent.granted.min(settlement.unused.get()) || (lent.settled && credited > 0) {
            self.wrong = Some(format!("{settlement:?}: {credited} credited to {lent:?}"));
        }
        lent.settled = true;
    }
}

#[async_trait]
impl Store for Watched {
    async fn decide(
        &self,
        hits: Vec<Hit>,
        deadline: Option<tokio::time::Instant>,
    ) -> Result<Vec<Decision>, StoreError> {
        let decisions = self.store.decide(hits.clone(), deadline).await?;
        let now = self.clock.now();
        let mut seen = self.seen();
        seen.calls += 1;
        for (hit, decision) in hits.iter().zip(&decisions) {
            seen.lend(hit, decision, now);
        }
        Ok(decisions)
    }

    async fn settle(
        &self,
        settlement: Settlement,
        deadline: Option<tokio::time::Instant>,
    ) -> Result<Cost, StoreError> {
        let credited = self.store.settle(settlement.clone(), deadline).await?;
        let mut seen = self.seen();
        seen.calls += 1;
        seen.settle(&settlement, credited.get());
        Ok(credited)
    }

    async fn heartbeat(&self) -> Result<u32, StoreError> {
        self.store.heartbeat().await
    }
}
