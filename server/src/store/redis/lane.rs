//! One connection and what it is used for: take what waits, send it as one script call, hand out the
//! answers.
//!
//! Redis takes the keys of one slot in a script call, if it is a cluster. So there what waits is sent as one script call
//! for each slot, and waits only for those to the same node: one that stands still holds up its own calls.

use super::batch::{self, Answer, Answers, Call};
use super::connections::{Connection, Connections, Held as Connected};
use super::denials::Denials;
use super::pace::Pace;
use super::script::{self, DECIDE};
use super::{Link, is_demoted, lost, refused, unreachable};
use crate::clock::{Clock, instant};
use crate::limit::Timestamp;
use crate::store::StoreError;
use crate::telemetry::metric;
use deadpool::managed::{Object, PoolError};
use indexmap::IndexMap;
use metrics::histogram;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};

/// Calls that one script call decides at most: enough to make its own cost small, few enough that Redis
/// turns to others every few hundred microseconds.
const MOST_CALLS: usize = 64;
/// How often others go first, while that brings more calls.
const MOST_TURNS: usize = 4;
/// And no more calls once they are about so many keys. Lua can name 8,000 at once.
const ENOUGH_KEYS: usize = 1024;

/// Why a call fails that only replicas were asked.
const DEMOTED: &str = "READONLY: it is a replica";

pub(super) struct Job {
    pub(super) call: Call,
    /// So long it is waited for.
    pub(super) until: Instant,
    pub(super) reply: oneshot::Sender<Result<Answer, StoreError>>,
}

pub(super) struct Lane {
    pub(super) jobs: async_channel::Receiver<Job>,
    pub(super) connections: Connections,
    pub(super) held: Option<Held>,
    pub(super) pace: Pace,
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
            self.let_others_ask().await;
            let soon = self.pace.soon(self.road.deadline);
            let (mut keys, mut jobs, mut next) = (0, Vec::new(), Some(first));
            while let Some(job) = next {
                if let Some(job) = self.road.if_in_time(job, soon) {
                    keys += job.call.keys();
                    jobs.push(job);
                }
                let is_enough = jobs.len() == MOST_CALLS || keys >= ENOUGH_KEYS;
                next = if is_enough { None } else { self.jobs.try_recv().ok() };
            }
            if jobs.is_empty() {
                self.pace.relax();
                continue;
            }
            let asked = instant();
            self.serve(jobs).await;
            self.pace.took(asked.elapsed());
        }
    }

    /// Whoever is about to ask may do so first, so that all that has come by now goes out together. Nobody is waited for.
    async fn let_others_ask(&self) {
        let mut waiting = 0;
        for _ in 0..MOST_TURNS {
            yield_now().await;
            if self.jobs.len() == waiting {
                return;
            }
            waiting = self.jobs.len();
        }
    }

    async fn serve(&mut self, jobs: Vec<Job>) {
        // What was refused was not executed, and the primary is at the end of another connection.
        let refused = self.try_serve(jobs).await;
        let refused = if refused.is_empty() { refused } else { self.try_serve(refused).await };
        fail(refused, &StoreError::Failed(DEMOTED.into()));
    }

    /// What is left was refused by what is no primary.
    async fn try_serve(&mut self, mut jobs: Vec<Job>) -> Vec<Job> {
        let mut held = match self.connection().await {
            Ok(held) => held,
            Err(error) => {
                fail(jobs, &error);
                return Vec::new();
            }
        };
        // Nobody waits for these any more: making the connection may have taken longer than they did.
        jobs.retain(|job| !job.reply.is_closed());
        if jobs.is_empty() {
            self.held = Some(held);
            return Vec::new();
        }
        if held.connection.is_cluster() {
            self.spread(&held, jobs).await;
            self.held = Some(held);
            return Vec::new();
        }
        let served = self.road.serve(&mut held.connection, 0, jobs).await;
        if served.is_sound {
            self.held = Some(held);
        } else {
            // Whatever may still come on this connection must not meet another call.
            self.road.lose(held.generation);
            drop(Object::take(held.connection));
        }
        served.refused
    }

    /// Late answers of a cluster's nodes meet nobody, so its connections go on being used.
    async fn spread(&self, held: &Held, jobs: Vec<Job>) {
        for (slot, jobs) in by_slot(jobs) {
            let Ok(place) = self.road.in_flight.clone().acquire_owned().await else { return };
            let road = self.road.clone();
            let mut connection = Connection::clone(&held.connection);
            tokio::spawn(async move {
                let turns = connection.turns(slot);
                // They are never closed.
                let turn = turns.places.acquire().await;
                let soon = turns.pace.soon(road.deadline);
                let jobs: Vec<Job> = jobs.into_iter().filter_map(|job| road.if_in_time(job, soon)).collect();
                if jobs.is_empty() {
                    return turns.pace.relax();
                }
                let asked = instant();
                let served = road.serve(&mut connection, slot, jobs).await;
                turns.pace.took(asked.elapsed());
                drop(turn);
                if !served.is_sound {
                    connection.doubt(slot, asked);
                    // A replica may take over, and may not know all.
                    road.denials.forget_all();
                }
                fail(served.refused, &StoreError::Failed(DEMOTED.into()));
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

/// What became of a script call.
struct Served {
    /// Can the connection be used again?
    is_sound: bool,
    /// Not executed, and not answered yet.
    refused: Vec<Job>,
}

impl Road {
    /// The same job, if somebody waits for it and can be answered: it is sent now, and there will be an answer soon.
    fn if_in_time(&self, job: Job, soon: Instant) -> Option<Job> {
        if job.until <= soon {
            job.answer(Err(StoreError::Timeout(self.deadline)));
            return None;
        }
        Some(job).filter(|job| !job.reply.is_closed())
    }

    /// Sends these as one script call, and hands out the answers.
    async fn serve(&self, connection: &mut Connection, slot: u16, jobs: Vec<Job>) -> Served {
        let calls: Vec<&Call> = jobs.iter().map(|job| &job.call).collect();
        let sent = self.denials.sent();
        let (answers, is_sound) = self.send(connection, slot, &calls).await;
        let (at, each) = match answers {
            Ok(Answers { at, each }) => (at, each),
            Err(error) => (Timestamp::default(), jobs.iter().map(|_| Err(error.clone())).collect()),
        };
        let mut served = Served { is_sound, refused: Vec::new() };
        for (job, answer) in jobs.into_iter().zip(each) {
            self.denials.settle(&sent, at, &job.call, answer.as_ref().ok());
            match &answer {
                Err(error) if is_demoted(error) => {
                    // A primary that has become a replica may keep its connections.
                    served.is_sound = false;
                    served.refused.push(job);
                }
                _ => job.answer(answer),
            }
        }
        served
    }

    /// The answers, and whether the connection is sound: an answer that is an error leaves it so.
    async fn send(
        &self,
        connection: &mut Connection,
        slot: u16,
        calls: &[&Call],
    ) -> (Result<Answers, StoreError>, bool) {
        let command = match batch::pack(&self.prefix, self.clock.manual_now(), calls) {
            Ok(command) => command,
            Err(error) => return (Err(error), true),
        };
        let asked = instant();
        let called =
            timeout(self.deadline, script::call::<Vec<u8>>(&DECIDE, slot, &command, connection)).await;
        histogram!(metric::STORE_SECONDS).record(asked.elapsed());
        match called {
            Ok(Ok(reply)) => {
                let answers = batch::unpack(calls, &reply);
                let is_readable = answers.is_ok();
                (answers, is_readable)
            }
            Ok(Err(error)) => match refused(&error) {
                Some(refused) => (Err(refused), true),
                None => (Err(lost(&error)), false),
            },
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
fn by_slot(jobs: Vec<Job>) -> IndexMap<u16, Vec<Job>> {
    let mut groups: IndexMap<u16, Vec<Job>> = IndexMap::new();
    for job in jobs {
        groups.entry(job.call.slot()).or_default().push(job);
    }
    groups
}

impl Job {
    fn answer(self, answer: Result<Answer, StoreError>) {
        // The caller may have gone; then nobody is to be told.
        drop(self.reply.send(answer));
    }
}
