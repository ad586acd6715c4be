//! What all clones of a client share, and the decision on one call.

use crate::clock::{Clock, Moment};
use crate::error::Error;
use crate::fallback::{Alone, Fallback, Outage, Rule};
use crate::keys::{Key, Keys, LONGEST, Waiting};
use crate::leases::Spend;
use crate::service::Service;
use crate::verdict::{Answer, Denial, Verdict};
use async_channel::Sender;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::timeout;

/// Fallbacks that are learned: classes are few, and names that somebody invents are not to fill memory.
const MOST_CLASSES: usize = 10_000;

/// Borrows that a call waits for before it asks for itself: the first ones may be too small for all that wait.
const ROUNDS: u32 = 3;

/// When to try a class again that is denied because nobody can be asked.
const RETRY_UNAVAILABLE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) clock: Clock,
    pub(crate) keys: Keys,
    pub(crate) service: Service,
    pub(crate) outage: Outage,
    /// To the keeper: keys that want a Borrow.
    pub(crate) wanted: Sender<Arc<Key>>,
    /// Numbers the wishes.
    pub(crate) seq: AtomicU64,
    /// What to ask for to see whether the service is back: a call that it did not answer.
    pub(crate) unanswered: Mutex<Option<(String, String)>>,
    /// Told when the service is gone.
    pub(crate) gone: Notify,
    pub(crate) classes: Mutex<HashMap<String, Arc<Rule>>>,
    pub(crate) fallback: Fallback,
}

/// What waiting for a Borrow has come to.
enum Borrowed {
    Decided(Verdict),
    /// It brought nothing to decide the call from, or none is to be had.
    Nothing,
    /// It was not answered in time.
    Unanswered,
}

impl Shared {
    /// Decides a call here, if there is something to decide it from.
    pub(crate) fn check(&self, key: &str, class: &str, cost: Option<u32>) -> Option<Verdict> {
        let now = self.clock.now();
        self.keys.with(key, class, |key| self.check_key(now, key, cost)).flatten()
    }

    #[inline]
    fn check_key(&self, now: Moment, key: &Arc<Key>, cost: Option<u32>) -> Option<Verdict> {
        match key.leases.spend(now, cost) {
            Spend::Decided { verdict, low } => {
                if low {
                    self.want(key);
                }
                Some(verdict)
            }
            Spend::Nothing => self.is_alone(now, key).then(|| self.alone(now, key, cost)),
        }
    }

    /// Decides a call: here if it can be, else by asking, else without the service.
    pub(crate) async fn decide(&self, key: &str, class: &str, cost: Option<u32>) -> Result<Verdict, Error> {
        if let Some(verdict) = self.check(key, class, cost) {
            return Ok(verdict);
        }
        let key = self.keys.get(key, class, || self.rule(class));
        let now = self.clock.now();
        if self.is_alone(now, &key) {
            key.leases.touch(now);
            return Ok(self.alone(now, &key, cost));
        }
        // The first call of a key is asked for. So is every call of a key that is not asked for often.
        if key.leases.touch(now) {
            match self.borrowed(&key, cost).await {
                Borrowed::Decided(verdict) => return Ok(verdict),
                Borrowed::Unanswered => return Ok(self.alone(self.clock.now(), &key, cost)),
                Borrowed::Nothing => {}
            }
        }
        match self.ask(&key.name, &key.class, cost).await {
            Ok(Answer { mut verdict, .. }) => {
                key.leases.learn(&verdict);
                // What is held here is left to callers of this gateway.
                verdict.remaining =
                    verdict.remaining.saturating_add(key.leases.outstanding()).min(verdict.limit);
                if !key.rule.is_learned() {
                    // What to do without the service is only said with a Borrow.
                    self.want(&key);
                }
                Ok(verdict)
            }
            Err(error) if error.is_refusal() => Err(error),
            Err(_) => Ok(self.alone(self.clock.now(), &key, cost)),
        }
    }

    /// Waits for the key's Borrow and decides from what it brings.
    async fn borrowed(&self, key: &Arc<Key>, cost: Option<u32>) -> Borrowed {
        let _waiting = Waiting::at(key);
        let until = self.clock.now().after(self.service.deadline());
        for _ in 0..ROUNDS {
            let mut landed = pin!(key.landed.notified());
            landed.as_mut().enable();
            // One may have landed meanwhile.
            let now = self.clock.now();
            if let Some(verdict) = self.check_key(now, key, cost) {
                return Borrowed::Decided(verdict);
            }
            if key.leases.is_quiet(now) || !self.want(key) {
                return Borrowed::Nothing;
            }
            if timeout(until.since(now), landed).await.is_err() || key.failed.load(Relaxed) {
                return Borrowed::Unanswered;
            }
        }
        self.check_key(self.clock.now(), key, cost).map_or(Borrowed::Nothing, Borrowed::Decided)
    }

    /// Asks the service, and notes whether it answered.
    pub(crate) async fn ask(&self, key: &str, class: &str, cost: Option<u32>) -> Result<Answer, Error> {
        let answer = self.service.ask(key, class, cost).await.map(Answer::from);
        match &answer {
            // It is there, but not what it decides by.
            Ok(answer) if answer.denied == Some(Denial::Unavailable) => {}
            Ok(_) => self.answered(),
            Err(error) => self.unanswered(error, key, class),
        }
        answer
    }

    pub(crate) fn answered(&self) {
        self.outage.answered(self.clock.now());
    }

    pub(crate) fn unanswered(&self, error: &Error, key: &str, class: &str) {
        if error.is_refusal() {
            self.answered();
        } else if self.outage.failed(self.clock.now()) {
            *self.unanswered.lock() = Some((key.into(), class.into()));
            self.gone.notify_one();
        }
    }

    /// Tells the keeper that a key wants a Borrow; false if it has too much to do, or has ended.
    pub(crate) fn want(&self, key: &Arc<Key>) -> bool {
        if !key.want() {
            return true;
        }
        let taken = self.wanted.try_send(key.clone()).is_ok();
        if !taken {
            key.land();
        }
        taken
    }

    fn is_alone(&self, now: Moment, key: &Key) -> bool {
        // A sensitive class is let through as soon as it can be.
        self.outage.covers(now, if key.rule.denies() { 0 } else { key.part })
    }

    /// Decides a call without the service.
    fn alone(&self, now: Moment, key: &Key, cost: Option<u32>) -> Verdict {
        let cost = cost.or_else(|| key.leases.cost()).unwrap_or(1);
        let verdict = Verdict {
            denied: None,
            limit: 0,
            remaining: 0,
            cost: 0,
            retry_after: Duration::ZERO,
            reset_after: Duration::ZERO,
            wait: Duration::ZERO,
            window: Duration::ZERO,
            degraded: true,
        };
        match key.alone.take(&key.rule, self.outage.without(now), cost) {
            Alone::Allowed => verdict,
            Alone::Denied => {
                let denied = Some(Denial::Unavailable);
                Verdict { denied, retry_after: RETRY_UNAVAILABLE, reset_after: RETRY_UNAVAILABLE, ..verdict }
            }
            Alone::Passed { limit, remaining, reset_after } => {
                Verdict { limit, remaining, cost, reset_after, ..verdict }
            }
            Alone::Over { limit, retry_after, reset_after } => {
                Verdict { denied: Some(Denial::OverLimit), limit, retry_after, reset_after, ..verdict }
            }
        }
    }

    /// The fallback of a class.
    fn rule(&self, class: &str) -> Arc<Rule> {
        let mut classes = self.classes.lock();
        if let Some(rule) = classes.get(class) {
            return rule.clone();
        }
        let rule = Arc::new(Rule::new(self.fallback));
        if classes.len() < MOST_CLASSES && class.len() <= LONGEST {
            classes.insert(class.into(), rule.clone());
        }
        rule
    }
}
