//! One connection and what it is used for: take what waits, send it as one script call, hand out the
//! answers.

use super::batch::{self, Answer, Answers, Call};
use super::denials::Denials;
use super::{Link, is_demoted, lost, script, unreachable};
use crate::clock::Clock;
use crate::limit::Timestamp;
use crate::store::StoreError;
use deadpool_redis::{Connection, Pool, PoolError};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
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
    pub(super) pool: Pool,
    pub(super) link: Arc<Link>,
    pub(super) denials: Arc<Denials>,
    pub(super) prefix: String,
    pub(super) clock: Clock,
    pub(super) deadline: Duration,
    pub(super) held: Option<Held>,
}

pub(super) struct Held {
    connection: Connection,
    generation: u64,
}

impl Lane {
    /// Runs until the store is dropped.
    pub(super) async fn run(mut self) {
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
        let calls: Vec<&Call> = jobs.iter().map(|job| &job.call).collect();
        let sent = self.denials.sent();
        match self.send(&calls).await {
            Ok(Answers { at, each }) => {
                for (job, answer) in jobs.into_iter().zip(each) {
                    self.denials.settle(&sent, at, &job.call, answer.as_ref().ok());
                    job.answer(answer);
                }
            }
            Err(error) => {
                for job in jobs {
                    self.denials.settle(&sent, Timestamp::default(), &job.call, None);
                    job.answer(Err(error.clone()));
                }
            }
        }
    }

    async fn send(&mut self, calls: &[&Call]) -> Result<Answers, StoreError> {
        let command = batch::pack(&self.prefix, self.clock.manual_now(), calls)?;
        let mut held = self.connection().await?;
        match timeout(self.deadline, script::call::<Vec<u8>>(&command, &mut held.connection)).await {
            Ok(Ok(reply)) => {
                let answers = batch::unpack(calls, &reply)?;
                self.keep(held, answers.each.iter().any(|answer| answer.as_ref().is_err_and(is_demoted)));
                Ok(answers)
            }
            // An answer that is an error leaves the connection sound.
            Ok(Err(error)) if error.code().is_some() => {
                let error = StoreError::Failed(error.to_string());
                self.keep(held, is_demoted(&error));
                Err(error)
            }
            // Whatever may still come on this connection must not meet another call: it is closed.
            Ok(Err(error)) => {
                self.discard(held);
                Err(lost(&error))
            }
            Err(_) => {
                self.discard(held);
                Err(StoreError::Timeout(self.deadline))
            }
        }
    }

    async fn connection(&mut self) -> Result<Held, StoreError> {
        let generation = self.link.generation();
        match self.held.take() {
            Some(held) if held.generation == generation => return Ok(held),
            Some(old) => drop(Connection::take(old.connection)),
            None => {}
        }
        match self.pool.get().await {
            Ok(connection) => Ok(Held { connection, generation }),
            Err(PoolError::Timeout(_)) => Err(StoreError::Timeout(self.deadline)),
            Err(error) => Err(unreachable(error)),
        }
    }

    /// A primary that has become a replica may keep its connections; the primary is at the end of another one.
    fn keep(&mut self, held: Held, demoted: bool) {
        if demoted { self.discard(held) } else { self.held = Some(held) }
    }

    fn discard(&self, held: Held) {
        self.link.lose(held.generation);
        self.denials.forget_all();
        drop(Connection::take(held.connection));
    }
}

impl Job {
    fn answer(self, answer: Result<Answer, StoreError>) {
        // The caller may have gone; then nobody is to be told.
        drop(self.reply.send(answer));
    }
}
