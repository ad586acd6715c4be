//! The task behind a client: it borrows, gives back, and looks for a service that is gone.

use crate::fallback::{Fallback, pause};
use crate::keys::Key;
use crate::leases::{Grant, Return, Wish};
use crate::shared::Shared;
use async_channel::Receiver;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// How often it looks for tokens that are not being used.
const ROUND: Duration = Duration::from_millis(25);

/// How long giving everything back may take at the end.
pub(crate) const END: Duration = Duration::from_millis(50);

/// Lives until every clone of the client is gone or one was shut down; then gives everything back and says `done`.
pub(crate) async fn keep(
    shared: Arc<Shared>,
    wanted: Receiver<Arc<Key>>,
    most_in_flight: usize,
    done: watch::Sender<bool>,
) {
    let mut keeper = Keeper {
        shared: &shared,
        flights: JoinSet::new(),
        most_in_flight,
        held: vec![],
        back: VecDeque::new(),
    };
    tokio::select! {
        () = keeper.work(wanted) => {}
        () = look(&shared) => {}
    }
    // What is not back by then is lost to us, not to the bucket: it refills.
    timeout(END, keeper.end()).await.ok();
    done.send_replace(true);
}

struct Keeper<'a> {
    shared: &'a Arc<Shared>,
    /// Calls to the service.
    flights: JoinSet<()>,
    most_in_flight: usize,
    /// Keys with something held.
    held: Vec<Arc<Key>>,
    /// What waits to go back.
    back: VecDeque<Return>,
}

impl Keeper<'_> {
    async fn work(&mut self, wanted: Receiver<Arc<Key>>) {
        let mut round = interval(ROUND);
        round.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                key = wanted.recv(), if self.flights.len() < self.most_in_flight => match key {
                    Ok(key) => self.borrow(key),
                    Err(_) => return,
                },
                Some(_) = self.flights.join_next() => {}
                _ = round.tick(), if !self.held.is_empty() => self.sweep(),
            }
            self.give_back();
        }
    }

    fn borrow(&mut self, key: Arc<Key>) {
        let shared = self.shared;
        let now = shared.clock.now();
        let seq = shared.seq.fetch_add(1, Relaxed);
        let waiting = key.waiting.load(Relaxed);
        let wish = if key.is_dropped() || shared.outage.is_gone() {
            None
        } else {
            key.leases.borrow(now, seq, waiting)
        };
        let Some(wish) = wish else { return key.land() };
        if !key.listed.swap(true, SeqCst) {
            self.held.push(key.clone());
        }
        self.flights.spawn(borrow(shared.clone(), key, wish));
    }

    /// Collects what is not being used.
    fn sweep(&mut self) {
        let now = self.shared.clock.now();
        let back = &mut self.back;
        self.held.retain(|key| {
            back.extend(if key.is_dropped() { key.leases.close(now) } else { key.leases.sweep(now) });
            let holds = !key.leases.is_empty();
            if !holds {
                key.listed.store(false, SeqCst);
            }
            holds
        });
        if self.shared.outage.is_gone() {
            // Nobody takes it.
            back.clear();
        }
    }

    fn give_back(&mut self) {
        while self.flights.len() < self.most_in_flight
            && let Some(back) = self.back.pop_front()
        {
            let shared = self.shared.clone();
            // If it is lost, the lease ends by itself.
            self.flights.spawn(async move { drop(shared.service.give_back(back).await) });
        }
    }

    async fn end(&mut self) {
        loop {
            let now = self.shared.clock.now();
            for key in &self.held {
                self.back.extend(key.leases.close(now));
            }
            self.give_back();
            if self.flights.join_next().await.is_none() {
                return;
            }
        }
    }
}

async fn borrow(shared: Arc<Shared>, key: Arc<Key>, wish: Wish) {
    let reply = shared.service.borrow(&key.name, &key.class, wish).await;
    let now = shared.clock.now();
    match &reply {
        Ok(reply) => {
            shared.answered();
            if let Some(fallback) = Fallback::of(reply) {
                key.rule.learn(fallback);
            }
            key.leases.granted(now, Grant::from_reply(reply));
        }
        Err(error) => {
            shared.unanswered(error, &key.name, &key.class);
            if error.is_refusal() {
                key.leases.refused(now);
            } else {
                key.leases.failed(now);
            }
        }
    }
    key.failed.store(reply.is_err_and(|error| !error.is_refusal()), Relaxed);
    key.land();
}

/// Looks for a service that is gone, by asking again what it did not answer, as a peek.
async fn look(shared: &Shared) {
    loop {
        shared.gone.notified().await;
        let mut looks = 0_u32;
        while shared.outage.is_gone() {
            sleep(pause(looks)).await;
            looks = looks.saturating_add(1);
            let unanswered = shared.unanswered.lock().clone();
            if let Some((key, class)) = unanswered {
                // The answer itself is of no interest: `ask` notes that there is one.
                drop(shared.ask(&key, &class, Some(0)).await);
            }
        }
    }
}
