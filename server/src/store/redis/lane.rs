//! One connection and what it is used for: take what waits, send it as one script call, hand out the
//! answers.
//!
//! Redis takes the keys of one slot in a script call, if it is a cluster. So there what waits is sent as one script call
//! for each slot, all at once, and none of them waits for another: a node that stands still holds up its own calls.

use super::batch::{self, Answer, Answers, Call};
use super::connections::{Connection, Connections, Held as Connected};
use super::denials::Denials;
use super::script::{self, DECIDE};
use super::{Link, is_demoted, lost, unreachable};
use crate::clock::Clock;
use crate::limit::Timestamp;
use crate::store::StoreError;
use deadpool::managed::{Object, PoolError};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::yield_now;
use tokio::time::timeout;

/// Calls that one script call decides at most: enough to make its own cost small, few enough that Redis
/// turns to others every few hundred microseconds.
const MOST_CALLS: usize = 64;
/// And no more calls once they are about so many keys. Lua can name 8,000 at once.
const ENOUGH_KEYS: usize = 1024;

pub(super) struct Job {
    pub(super) call: Call,
    pub(super) reply: oneshot::Sender<Result<Answer, StoreError>>,
}

pub(super) struct Lane {
    pub(super) jobs: async_channel::Receiver<Job>,
    pub(super) connections: Connections,
    pub(super) held: Option<Held>,
    pub(super) road: Arc<Road>,
}

/// What all lanes have in common.
pub(super) struct Road {
    pub(super) link: Link,
    pub(super) denials: Denials,
    pub(super) prefix: String,
    pub(super) clock: Clock,
    pub(super) deadline: Duration,
    /// For script calls that nobody waits for in turn.
    pub(super) in_flight: Arc<Semaphore>,
}

pub(super) struct Held {
    connection: Connected,
    generation: u64,
}

impl Lane {
    /// Runs until the store is dropped.
    pub(super) async fn run(mut self) {
        // Before the first call, which then does not wait for it.
        self.held = self.connection().await.ok();
        while let Ok(first) = self.jobs.recv().await {
            // Whoever is about to ask may do so first: all that has come by now goes out together.
            yield_now().await;
            let (mut keys, mut jobs) = (first.call.keys(), vec![first]);
            while jobs.len() < MOST_CALLS
                && keys < ENOUGH_KEYS
                && let Ok(job) = self.jobs.try_recv()
            {
                keys += job.call.keys();
                jobs.push(job);
            }
            // Nobody waits for these any more.
            jobs.retain(|job| !job.reply.is_closed());
            if !jobs.is_empty() {
                self.serve(jobs).await;
            }
        }
    }

    async fn serve(&mut self, jobs: Vec<Job>) {
        let mut held = match self.connection().await {
            Ok(held) => held,
            Err(error) => return fail(jobs, &error),
        };
        if held.connection.is_cluster() {
            self.spread(&held, jobs).await;
            self.held = Some(held);
            return;
        }
        if self.road.serve(&mut held.connection, jobs).await {
            self.held = Some(held);
        } else {
            // Whatever may still come on this connection must not meet another call.
            self.road.lose(held.generation);
            drop(Object::take(held.connection));
        }
    }

    /// A cluster's connection heals by itself, and matches late answers to nobody.
    async fn spread(&self, held: &Held, jobs: Vec<Job>) {
        for jobs in by_slot(jobs) {
            let Ok(place) = self.road.in_flight.clone().acquire_owned().await else { return };
            let road = self.road.clone();
            let mut connection = Connection::clone(&held.connection);
            tokio::spawn(async move {
                if !road.serve(&mut connection, jobs).await {
                    // A replica may take over, and may not know all.
                    road.denials.forget_all();
                }
                drop(place);
            });
        }
    }

    async fn connection(&mut self) -> Result<Held, StoreError> {
        let generation = self.road.link.generation();
        match self.held.take() {
            Some(held) if held.generation == generation => return Ok(held),
            Some(old) => drop(Object::take(old.connection)),
            None => {}
        }
        match self.connections.get().await {
            Ok(connection) => Ok(Held { connection, generation }),
            Err(PoolError::Timeout(_)) => Err(StoreError::Timeout(self.road.deadline)),
            Err(error) => Err(unreachable(error)),
        }
    }
}

impl Road {
    /// Sends these as one script call, and hands out the answers. Is the connection sound?
    async fn serve(&self, connection: &mut Connection, jobs: Vec<Job>) -> bool {
        let calls: Vec<&Call> = jobs.iter().map(|job| &job.call).collect();
        let sent = self.denials.sent();
        let (answers, sound) = self.send(connection, &calls).await;
        match answers {
            Ok(Answers { at, each }) => {
                for (job, answer) in jobs.into_iter().zip(each) {
                    self.denials.settle(&sent, at, &job.call, answer.as_ref().ok());
                    job.answer(answer);
                }
            }
            Err(error) => {
                for job in &jobs {
                    self.denials.settle(&sent, Timestamp::default(), &job.call, None);
                }
                fail(jobs, &error);
            }
        }
        sound
    }

    async fn send(
        &self,
        connection: &mut Connection,
        calls: &[&Call],
    ) -> (Result<Answers, StoreError>, bool) {
        let command = match batch::pack(&self.prefix, self.clock.manual_now(), calls) {
            Ok(command) => command,
            Err(error) => return (Err(error), true),
        };
        match timeout(self.deadline, script::call::<Vec<u8>>(&DECIDE, &command, connection)).await {
            Ok(Ok(reply)) => {
                let answers = batch::unpack(calls, &reply);
                let demoted =
                    |answers: &Answers| answers.each.iter().any(|it| it.as_ref().is_err_and(is_demoted));
                // A primary that has become a replica may keep its connections; the primary is at the end of another.
                let sound = answers.as_ref().is_ok_and(|answers| !demoted(answers));
                (answers, sound)
            }
            // An answer that is an error leaves the connection sound.
            Ok(Err(error)) if error.code().is_some() => {
                let error = StoreError::Failed(error.to_string());
                let sound = !is_demoted(&error);
                (Err(error), sound)
            }
            Ok(Err(error)) => (Err(lost(&error)), false),
            Err(_) => (Err(StoreError::Timeout(self.deadline)), false),
        }
    }

    pub(super) fn lose(&self, generation: u64) {
        self.link.lose(generation);
        self.denials.forget_all();
    }
}

fn fail(jobs: Vec<Job>, error: &StoreError) {
    for job in jobs {
        job.answer(Err(error.clone()));
    }
}

/// Apart by the slot of a cluster that their keys are in, in order of arrival. A call is about one slot there.
fn by_slot(jobs: Vec<Job>) -> Vec<Vec<Job>> {
    let mut places: HashMap<u16, usize> = HashMap::new();
    let mut groups: Vec<Vec<Job>> = Vec::new();
    for job in jobs {
        let place = *places.entry(job.call.slot()).or_insert(groups.len());
        match groups.get_mut(place) {
            Some(group) => group.push(job),
            None => groups.push(vec![job]),
        }
    }
    groups
}

impl Job {
    fn answer(self, answer: Result<Answer, StoreError>) {
        // The caller may have gone; then nobody is to be told.
        drop(self.reply.send(answer));
    }
}
