//! The load: callers on a few connections, each of which asks, waits for the answer, and asks again.

use crate::api::{Answer, Api, Client};
use crate::keys::Traffic;
use crate::pace::Pace;
use anyhow::Context as _;
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tollgate_server::clock::instant;
use tonic::Status;
use tonic::transport::Endpoint;

/// The longest that a server may be waited for, beyond the time that was planned.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server, and callers that wait for a word.
pub(crate) struct Callers(Vec<Client>);

impl Callers {
    /// Connects to it: `in_flight` callers on each connection.
    pub(crate) async fn connect(
        url: String,
        api: Api,
        connections: usize,
        in_flight: usize,
    ) -> anyhow::Result<Self> {
        let endpoint = Endpoint::from_shared(url.clone())?.tcp_nodelay(true).connect_timeout(PATIENCE);
        let mut callers = Vec::with_capacity(connections * in_flight);
        for _ in 0..connections {
            let connection = endpoint.connect().await.with_context(|| url.clone())?;
            callers.extend(std::iter::repeat_n(api.client(connection), in_flight));
        }
        Ok(Self(callers))
    }

    /// Asks as fast as answers come, for that long.
    pub(crate) async fn closed(&self, traffic: Traffic, span: Duration) -> anyhow::Result<Outcome> {
        let start = instant();
        self.ask(traffic, Pace::Until(start + span), start, span).await
    }

    /// Asks so many times a second, for that long, however long the answers take.
    pub(crate) async fn open(&self, traffic: Traffic, rate: f64, span: Duration) -> anyhow::Result<Outcome> {
        let start = instant();
        self.ask(traffic, Pace::open(rate, start, start + span)?, start, span).await
    }

    /// Asks so many times.
    pub(crate) async fn times(&self, traffic: Traffic, times: u64) -> anyhow::Result<Outcome> {
        // A server that decides 5,000 a second is patiently waited for.
        let span = Duration::from_micros(times * 200);
        self.ask(traffic, Pace::times(times), instant(), span).await
    }

    async fn ask(
        &self,
        traffic: Traffic,
        pace: Pace,
        start: Instant,
        span: Duration,
    ) -> anyhow::Result<Outcome> {
        let shared = Arc::new(Shared { traffic, pace, tally: Mutex::new(Tally::new()?) });
        let mut callers = JoinSet::new();
        for (seed, client) in (0..).zip(&self.0) {
            callers.spawn(call(client.clone(), shared.clone(), SmallRng::seed_from_u64(seed)));
        }
        let all = async {
            while let Some(ended) = callers.join_next().await {
                ended?;
            }
            anyhow::Ok(())
        };
        timeout_at(start + span + PATIENCE, all).await.context("the server does not answer")??;
        let elapsed = instant() - start;
        let shared = Arc::into_inner(shared).context("a caller is left")?;
        Ok(Outcome { tally: shared.tally.into_inner(), elapsed })
    }
}

struct Shared {
    traffic: Traffic,
    pace: Pace,
    // One thread runs all callers, so nobody ever waits for it.
    tally: Mutex<Tally>,
}

async fn call(mut client: Client, shared: Arc<Shared>, mut rng: SmallRng) {
    while let Some(due) = shared.pace.next().await {
        let answer = client.ask(shared.traffic.draw(&mut rng)).await;
        shared.tally.lock().count(answer, instant().saturating_duration_since(due));
    }
}

/// What was answered.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    pub(crate) degraded: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<Status>,
    /// From when a call was to begin until it was allowed or denied by the store, in microseconds.
    pub(crate) latency: Histogram<u64>,
}

impl Tally {
    pub(crate) fn new() -> anyhow::Result<Self> {
        // To a part in a thousand, up to a minute.
        let latency = Histogram::new_with_bounds(1, 60_000_000, 3)?;
        Ok(Self { allowed: 0, denied: 0, degraded: 0, errors: 0, first_error: None, latency })
    }

    pub(crate) fn count(&mut self, answer: Result<Answer, Status>, latency: Duration) {
        match answer {
            Ok(Answer::Allowed) => self.allowed += 1,
            Ok(Answer::Denied) => self.denied += 1,
            Ok(Answer::Degraded) => {
                self.degraded += 1;
                return;
            }
            Err(status) => {
                self.errors += 1;
                self.first_error.get_or_insert(status);
                return;
            }
        }
        self.latency.saturating_record(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX));
    }

    /// All answers.
    pub(crate) fn calls(&self) -> u64 {
        self.allowed + self.denied + self.degraded + self.errors
    }
}

/// What was answered, and in what time.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) tally: Tally,
    /// From the start to the last answer.
    pub(crate) elapsed: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::echo;
    use crate::keys::{Classes, Keys};
    use tokio::net::TcpListener;

    #[test]
    fn every_answer_is_counted_once_with_its_latency() {
        let mut tally = Tally::new().unwrap();
        for micros in 1..=1000 {
            let answer = if micros % 2 == 0 { Answer::Allowed } else { Answer::Denied };
            tally.count(Ok(answer), Duration::from_micros(micros));
        }
        tally.count(Ok(Answer::Allowed), Duration::from_secs(3600));
        // Of those that the store has not decided there is no latency.
        tally.count(Err(Status::unavailable("first")), Duration::ZERO);
        tally.count(Err(Status::unavailable("second")), Duration::ZERO);
        tally.count(Ok(Answer::Degraded), Duration::ZERO);
        assert_eq!((tally.allowed, tally.denied, tally.degraded, tally.errors), (501, 500, 1, 2));
        assert_eq!((tally.calls(), tally.latency.len()), (1004, 1001));
        assert_eq!(tally.first_error.unwrap().message(), "first");
        assert!((495..=505).contains(&tally.latency.value_at_quantile(0.5)));
        // Longer than it can say, but not lost.
        assert!(tally.latency.max() >= 60_000_000);
    }

    #[tokio::test]
    async fn each_loop_asks_what_it_was_told_to() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(echo::serve(listener));
        let traffic =
            || Traffic { keys: Keys::Uniform(10), classes: Classes::only("read").unwrap(), cost: None };
        let envoys = Callers::connect(url.clone(), Api::Envoy, 2, 3).await.unwrap();
        assert_eq!(envoys.times(traffic(), 100).await.unwrap().tally.allowed, 100);
        let callers = Callers::connect(url, Api::Native, 2, 3).await.unwrap();
        let times = callers.times(traffic(), 100).await.unwrap().tally;
        assert_eq!((times.allowed, times.denied, times.errors), (100, 0, 0));
        assert_eq!(times.latency.len(), 100);
        let span = Duration::from_millis(20);
        let closed = callers.closed(traffic(), span).await.unwrap();
        assert!(closed.tally.allowed > 0 && closed.elapsed >= span);
        // However slow this machine, all that was due is asked.
        let open = callers.open(traffic(), 10_000.0, span).await.unwrap().tally;
        assert!((100..=300).contains(&open.allowed), "{open:?}");
    }

    /// Or else a server that stalls would be asked less just then, and the stall would not be seen.
    #[tokio::test]
    async fn a_call_that_was_due_has_waited_since_then() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(echo::serve(listener));
        let callers = Callers::connect(url, Api::Native, 1, 1).await.unwrap();
        let (due, next) = async_channel::unbounded();
        let (now, late) = (instant(), Duration::from_secs(10));
        for _ in 0..5 {
            due.try_send(now.checked_sub(late).unwrap()).unwrap();
        }
        due.close();
        let traffic = Traffic { keys: Keys::Hot, classes: Classes::only("read").unwrap(), cost: None };
        let tally = callers.ask(traffic, Pace::At(next), now, late).await.unwrap().tally;
        assert_eq!(tally.latency.len(), 5);
        assert!(tally.latency.min() > 9_900_000, "{}", tally.latency.min());
    }
}
