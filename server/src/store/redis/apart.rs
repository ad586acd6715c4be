//! A call on buckets that a cluster can not decide in one step, because they are in several slots.
//!
//! Each is charged by itself, and if the call is held up, what was charged is given back. So never more is admitted than
//! may be. In between, less is left for others; what can not be given back is missing until it has flowed in again.

use super::Redis;
use crate::limit::{Cost, Decision, Want};
use crate::request::{Charge, Hit};
use crate::store::{StoreError, held_up};
use futures_util::future::join_all;
use tokio::time::Instant;

impl Redis {
    pub(super) async fn decide_apart(
        &self,
        hits: Vec<Hit>,
        deadline: Option<Instant>,
    ) -> Result<Vec<Decision>, StoreError> {
        let each = hits.iter().map(async |hit| {
            let decided = self.decide_together(vec![hit.clone()], deadline).await?;
            decided.into_iter().next().ok_or_else(|| StoreError::Failed("no decision".into()))
        });
        let answers = join_all(each).await;
        let failed = answers.iter().find_map(|answer| answer.as_ref().err().cloned());
        let mut decisions: Vec<Option<Decision>> = answers.into_iter().map(Result::ok).collect();
        let known: Option<Vec<Decision>> = decisions.iter().copied().collect();
        if known.is_some_and(|known| !held_up(&hits, &known)) {
            return Ok(decisions.into_iter().flatten().collect());
        }
        join_all(hits.iter().zip(&mut decisions).map(|(hit, decision)| self.undo(hit, decision, deadline)))
            .await;
        failed.map_or_else(|| Ok(decisions.into_iter().flatten().collect()), Err)
    }

    /// Gives back what that decision took, and makes it a look at what is left.
    async fn undo(&self, hit: &Hit, decision: &mut Option<Decision>, deadline: Option<Instant>) {
        let Some(decision) = decision.as_mut().filter(|decision| decision.allowed()) else { return };
        if hit.charge != Charge::IfAllowed || decision.granted == Cost::ZERO {
            return;
        }
        let back = Hit {
            charge: Charge::GiveBack(decision.granted),
            want: Want::exactly(Cost::ZERO),
            strikes: None,
            lease: None,
            ..hit.clone()
        };
        decision.granted = Cost::ZERO;
        match self.decide_together(vec![back], deadline).await {
            Ok(told) => {
                if let Some(told) = told.first() {
                    *decision = Decision { replaced: decision.replaced, ..*told };
                }
            }
            Err(error) => {
                tracing::debug!("tokens of a call that was held up could not be given back: {error}");
            }
        }
    }
}
