//! Whether the authority is asked: closed while it answers, open after a few failures in a row of which a heartbeat is
//! one.

use super::Health;
use crate::store::memory::Memory;
use crate::store::{Store, StoreError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// So many failures in a row, a heartbeat among them, open it.
const FEW: u32 = 5;

/// So many heartbeats in a row have to tell that there are fewer instances.
const BELIEVED: u32 = 10;

/// Between two heartbeats, while all is well.
const BEAT: Duration = Duration::from_secs(1);
/// Between two that are not answered: at first, and at last.
const AGAIN: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(100));

pub(super) struct Breaker {
    open: AtomicBool,
    /// In a row.
    failures: AtomicU32,
    instances: AtomicU32,
    /// Heartbeats in a row that told of fewer instances.
    fewer: AtomicU32,
    doubt: Notify,
    health: watch::Sender<Health>,
}

impl Breaker {
    /// A closed one. Until a heartbeat is answered, that many instances are thought to be there.
    pub(super) fn new(instances: u32) -> (Self, watch::Receiver<Health>) {
        let degraded = Some("the store was not reached yet".to_owned());
        let unknown = Health { asked: false, degraded, instances };
        let (health, receiver) = watch::channel(unknown);
        let breaker = Self {
            open: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            instances: AtomicU32::new(instances),
            fewer: AtomicU32::new(0),
            doubt: Notify::new(),
            health,
        };
        (breaker, receiver)
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// The last number that was told.
    pub(super) fn instances(&self) -> u32 {
        self.instances.load(Ordering::Relaxed)
    }

    pub(super) fn succeeded(&self) {
        // Every call passes here: it only writes if there is something to write.
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// A few of these in a row are looked into at once. Whether it was a connection or one node of a cluster that was
    /// lost, or all of the authority, the heartbeat tells.
    pub(super) fn failed(&self) {
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 == FEW {
            self.doubt.notify_one();
        }
    }

    fn beat(&self, instances: u32) {
        self.count(instances);
        self.failures.store(0, Ordering::Relaxed);
        self.open.store(false, Ordering::Release);
        self.tell(None);
    }

    fn tell(&self, degraded: Option<String>) {
        let news = Health { asked: true, degraded, instances: self.instances() };
        self.health.send_if_modified(|known| std::mem::replace(known, news.clone()) != news);
    }

    /// More are believed at once, fewer after a while: those that have lost the authority as well may not be back yet.
    fn count(&self, instances: u32) {
        let known = self.instances();
        let fewer = if instances < known { self.fewer.fetch_add(1, Ordering::Relaxed) + 1 } else { 0 };
        if instances > 0 && (instances >= known || fewer >= BELIEVED) {
            self.instances.store(instances, Ordering::Relaxed);
            self.fewer.store(0, Ordering::Relaxed);
        }
    }

    fn missed(&self, error: &StoreError) {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        // One that is refused is no accident: it is there and says itself that it can not decide.
        let is_gone = failures >= FEW || matches!(error, StoreError::Failed(_));
        let opens = is_gone && !self.open.swap(true, Ordering::AcqRel);
        let first = !self.health.borrow().asked;
        if first || opens {
            self.tell(Some(error.to_string()));
        }
    }
}

/// Shows the authority that this instance is there, and sees whether the authority is.
pub(super) async fn heartbeats(breaker: Arc<Breaker>, authority: Arc<dyn Store>, local: Arc<Memory>) {
    let mut again = AGAIN.0;
    for turn in 0_usize.. {
        let pause = match authority.heartbeat().await {
            Ok(instances) => {
                breaker.beat(instances);
                local.sweep(turn);
                again = AGAIN.0;
                BEAT
            }
            Err(error) => {
                breaker.missed(&error);
                let pause = again;
                again = (again * 2).min(AGAIN.1);
                pause
            }
        };
        // However often calls fail that the heartbeat knows nothing of.
        tokio::time::sleep(AGAIN.0).await;
        tokio::select! {
            () = tokio::time::sleep(pause.saturating_sub(AGAIN.0)) => {}
            () = breaker.doubt.notified() => {}
        }
    }
}
