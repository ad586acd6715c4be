//! One connection and what it is used for: take what waits, send it as one script call, hand out the
//! answers.

use super::script::{Batch, Call, Row, SCRIPT};
use super::{Link, unreachable};
use crate::clock::Clock;
use crate::store::StoreError;
use deadpool_redis::redis::RedisError;
use deadpool_redis::{Connection, Pool, PoolError};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Calls that one script call decides at most: enough to make its own cost small, few enough that Redis
/// turns to others every few hundred microseconds.
const MOST_CALLS: usize = 64;

pub(super) struct Job {
    pub(super) call: Call,
    pub(super) reply: oneshot::Sender<Result<Vec<Row>, StoreError>>,
}

pub(super) struct Lane {
    jobs: async_channel::Receiver<Job>,
    pool: Pool,
    link: Arc<Link>,
    clock: Clock,
    deadline: Duration,
    held: Option<Held>,
}

struct Held {
    connection: Connection,
    generation: u64,
}

impl Lane {
    pub(super) fn new(
        jobs: async_channel::Receiver<Job>,
        pool: Pool,
        link: Arc<Link>,
        clock: Clock,
        deadline: Duration,
    ) -> Self {
        Self { jobs, pool, link, clock, deadline, held: None }
    }

    /// Runs until the store is dropped.
    pub(super) async fn run(mut self) {
        while let Ok(first) = self.jobs.recv().await {
            let mut jobs = vec![first];
            while jobs.len() < MOST_CALLS
                && let Ok(job) = self.jobs.try_recv()
            {
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
        let batch = Batch::new(self.clock.manual_now(), jobs.iter().map(|job| &job.call));
        let answers = match batch {
            Ok(batch) => self.send(&batch).await,
            Err(error) => Err(error),
        };
        match answers {
            Ok(answers) if answers.len() == jobs.len() => {
                for (job, answer) in jobs.into_iter().zip(answers) {
                    job.answer(answer);
                }
            }
            Ok(answers) => {
                let error = format!("{} answers to {} calls", answers.len(), jobs.len());
                fail(jobs, &StoreError::Failed(error));
            }
            Err(error) => fail(jobs, &error),
        }
    }

    async fn send(&mut self, batch: &Batch<'_>) -> Result<Vec<Result<Vec<Row>, StoreError>>, StoreError> {
        let mut held = self.connection().await?;
        let mut invocation = SCRIPT.prepare_invoke();
        for key in batch.keys() {
            invocation.key(key);
        }
        invocation.arg(batch.payload());
        match timeout(self.deadline, invocation.invoke_async::<Vec<u8>>(&mut *held.connection)).await {
            Ok(Ok(reply)) => {
                self.held = Some(held);
                Batch::answers(&reply)
            }
            // An answer that is an error leaves the connection sound.
            Ok(Err(error)) if error.code().is_some() => {
                self.held = Some(held);
                Err(StoreError::Failed(error.to_string()))
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

    fn discard(&self, held: Held) {
        self.link.lose(held.generation);
        drop(Connection::take(held.connection));
    }
}

impl Job {
    fn answer(self, answer: Result<Vec<Row>, StoreError>) {
        // The caller may have gone; then nobody is to be told.
        drop(self.reply.send(answer));
    }
}

fn fail(jobs: Vec<Job>, error: &StoreError) {
    for job in jobs {
        job.answer(Err(error.clone()));
    }
}

fn lost(error: &RedisError) -> StoreError {
    StoreError::Unreachable(error.to_string())
}
