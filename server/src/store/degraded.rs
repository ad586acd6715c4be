//! What decides when the authority can not: memory, at this instance's share of each limit.
//!
//! A call asks the authority and waits for it no longer than its deadline, and so that there is time left to answer.
//! What the authority does not answer is decided here and says so. After a few failures in a row a
//! heartbeat follows at once, and if it fails as well the [`breaker`] opens: calls no longer ask, so they wait for
//! nothing. Heartbeats go on, soon after each other; the first that is answered closes it.
//!
//! **The share.** With `n` instances, by the last heartbeat that told, each gives a part of `n` of the rate and of the
//! burst, but at least one call at once. So however long the authority is away, all of them together admit at most
//! one more burst and the rate. A sensitive rule is not decided here: it denies.
//!
//! What was decided here is not told to the authority afterwards, and strikes and leases of here are not known there.
//! A call that the authority did not answer in time may have been charged there as well.

mod breaker;
#[cfg(test)]
mod tests;

use super::memory::Memory;
use super::{Store, StoreError};
use crate::clock::{Clock, instant};
use crate::config::StoreConfig;
use crate::limit::{Cost, Decision, Want};
use crate::request::{Charge, Hit, Settlement};
use crate::telemetry::metric;
use async_trait::async_trait;
use breaker::Breaker;
use metrics::counter;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// When to ask again where nobody may guess.
pub const RETRY_UNAVAILABLE: Duration = Duration::from_secs(1);

/// How it is with the authority.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Was it asked yet? Until then nothing else is known.
    pub asked: bool,
    /// Why it is not asked, if it is not.
    pub degraded: Option<String>,
    /// How many instances there are, as far as was told.
    pub instances: u32,
}

/// A store that always answers.
pub(super) struct Degraded {
    authority: Arc<dyn Store>,
    local: Arc<Memory>,
    breaker: Arc<Breaker>,
    /// Of the authority. What it takes longer for is its failure, not the caller's.
    deadline: Duration,
    heartbeats: AbortHandle,
}

impl Degraded {
    /// Around that authority. Starts its heartbeats, so it needs a tokio runtime.
    pub(super) fn around(
        authority: Arc<dyn Store>,
        config: &StoreConfig,
        clock: Clock,
    ) -> (Self, watch::Receiver<Health>) {
        let local = Arc::new(Memory::new(config.max_keys, config.max_bytes, clock));
        let (breaker, health) = Breaker::new(config.instances);
        let breaker = Arc::new(breaker);
        let beats = breaker::heartbeats(breaker.clone(), authority.clone(), local.clone());
        let heartbeats = tokio::spawn(beats).abort_handle();
        (Self { authority, local, breaker, deadline: config.deadline, heartbeats }, health)
    }

    /// What the authority answers, if it is asked and does.
    async fn ask<T, F>(&self, deadline: Option<Instant>, call: impl FnOnce(Option<Instant>) -> F) -> Option<T>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        if self.breaker.is_open() {
            return None;
        }
        let asked = instant();
        // A caller that is in a hurry wants the other answer in time as well.
        let until = deadline.map(|deadline| asked + deadline.saturating_duration_since(asked) * 3 / 4);
        match call(until).await {
            Ok(answer) => {
                self.breaker.succeeded();
                Some(answer)
            }
            Err(error) => {
                counter!(metric::STORE_ERRORS, "why" => error.name()).increment(1);
                let at_fault = match error {
                    // It answered, and would answer others.
                    StoreError::Failed(_) => false,
                    StoreError::DeadlinePassed => instant() - asked >= self.deadline / 2,
                    StoreError::Timeout(_) | StoreError::Unreachable(_) | StoreError::Overloaded(_) => true,
                };
                if at_fault {
                    self.breaker.failed();
                }
                None
            }
        }
    }

    fn alone(&self, hits: &[Hit]) -> Vec<Decision> {
        counter!(metric::ALONE).increment(1);
        let shares = self.breaker.instances();
        let held_up = hits.iter().any(|hit| hit.sensitive);
        let known: Vec<Hit> =
            hits.iter().filter(|hit| !hit.sensitive).map(|hit| share(hit, shares, held_up)).collect();
        let mut decided = self.local.decide_now(&known).into_iter();
        let decide = |hit: &Hit| {
            let decision = if hit.sensitive { None } else { decided.next() };
            decision.map_or(Decision::unavailable(RETRY_UNAVAILABLE), |it| Decision { degraded: true, ..it })
        };
        hits.iter().map(decide).collect()
    }
}

/// The same hit on one of so many shares. A call that a sensitive rule denies takes nothing elsewhere.
fn share(hit: &Hit, shares: u32, held_up: bool) -> Hit {
    let part = Hit { limit: hit.algorithm.share(&hit.limit, shares, hit.want.at_least), ..hit.clone() };
    if held_up && hit.charge == Charge::IfAllowed {
        return Hit { want: Want::exactly(Cost::ZERO), strikes: None, lease: None, ..part };
    }
    part
}

#[async_trait]
impl Store for Degraded {
    async fn decide(&self, hits: Vec<Hit>, deadline: Option<Instant>) -> Result<Vec<Decision>, StoreError> {
        let asked = self.ask(deadline, |until| self.authority.decide(hits.clone(), until)).await;
        Ok(asked.unwrap_or_else(|| self.alone(&hits)))
    }

    async fn settle(&self, settlement: Settlement, deadline: Option<Instant>) -> Result<Cost, StoreError> {
        let asked = self.ask(deadline, |until| self.authority.settle(settlement.clone(), until)).await;
        Ok(asked.unwrap_or_else(|| {
            let Settlement { limit, algorithm, .. } = &settlement;
            let limit = algorithm.share(limit, self.breaker.instances(), Cost::ZERO);
            self.local.settle_now(&Settlement { limit, ..settlement })
        }))
    }

    async fn heartbeat(&self) -> Result<u32, StoreError> {
        self.authority.heartbeat().await
    }
}

impl Drop for Degraded {
    fn drop(&mut self) {
        self.heartbeats.abort();
    }
}
