//! One measurement: a load, and what it cost the processes that bore it.

#![expect(clippy::float_arithmetic, reason = "figures for people, no decisions")]

use crate::cpu;
use crate::load::Outcome;
use crate::redis::Redis;
use std::time::Duration;

/// The processes whose cost is told.
#[derive(Clone, Copy, Default)]
pub(crate) struct Watched<'a> {
    pub(crate) server: Option<u32>,
    pub(crate) redis_process: Option<u32>,
    pub(crate) redis: Option<&'a Redis>,
}

/// What they have spent since their start.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    server: Option<Duration>,
    redis: Option<Duration>,
    scripts: Option<u64>,
    /// By the load.
    here: Duration,
    /// By all that runs on this machine.
    all: Duration,
}

impl Watched<'_> {
    /// Waits for a load, and says what it cost.
    pub(crate) async fn during(
        &self,
        load: impl Future<Output = anyhow::Result<Outcome>>,
    ) -> anyhow::Result<Measured> {
        let before = self.spent().await?;
        let outcome = load.await?;
        let after = self.spent().await?;
        Ok(Measured::new(&outcome, before, after))
    }

    async fn spent(&self) -> anyhow::Result<Spent> {
        let scripts = match self.redis {
            Some(redis) => Some(redis.scripts().await?),
            None => None,
        };
        Ok(Spent {
            server: self.server.map(cpu::time).transpose()?,
            redis: self.redis_process.map(cpu::time).transpose()?,
            scripts,
            here: cpu::time(std::process::id())?,
            all: cpu::busy()?,
        })
    }
}

/// What came out, each per decision or per second. A call that failed counts as one that was decided.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) decisions: u64,
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    pub(crate) degraded: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    pub(crate) elapsed: Duration,
    pub(crate) per_second: f64,
    /// CPU microseconds of the server a decision.
    pub(crate) server_us: Option<f64>,
    /// The part of the time that the server was on a core.
    pub(crate) server_busy: Option<f64>,
    pub(crate) redis_us: Option<f64>,
    pub(crate) scripts: Option<f64>,
    /// The cores that were busy with other things: the more, the less the rest is worth.
    pub(crate) others: f64,
    /// Of these parts of all calls: a half, 99 and 99.9 in a hundred. Microseconds.
    pub(crate) latency: [f64; 3],
}

impl Measured {
    fn new(outcome: &Outcome, before: Spent, after: Spent) -> Self {
        let Outcome { tally, elapsed } = outcome;
        let decisions = tally.calls();
        let between = |before: Option<Duration>, after: Option<Duration>| {
            before.zip(after).map(|(before, after)| after.saturating_sub(before))
        };
        let server = between(before.server, after.server);
        let redis = between(before.redis, after.redis);
        let here = after.here.saturating_sub(before.here);
        let known = here + server.unwrap_or_default() + redis.unwrap_or_default();
        let others = after.all.saturating_sub(before.all).saturating_sub(known);
        let us = |spent: Duration| spent.as_secs_f64() * 1e6 / number(decisions);
        let scripts = before.scripts.zip(after.scripts).map(|(before, after)| after.saturating_sub(before));
        Self {
            decisions,
            allowed: tally.allowed,
            denied: tally.denied,
            degraded: tally.degraded,
            errors: tally.errors,
            first_error: tally.first_error.as_ref().map(ToString::to_string),
            elapsed: *elapsed,
            per_second: number(decisions) / elapsed.as_secs_f64(),
            server_us: server.map(us),
            server_busy: server.map(|spent| spent.as_secs_f64() / elapsed.as_secs_f64()),
            redis_us: redis.map(us),
            scripts: scripts.map(|calls| number(calls) / number(decisions)),
            others: others.as_secs_f64() / elapsed.as_secs_f64(),
            latency: [0.5, 0.99, 0.999].map(|part| number(tally.latency.value_at_quantile(part))),
        }
    }

    /// 99 of 100 calls were answered within so many microseconds.
    pub(crate) fn p99(&self) -> f64 {
        let [_, p99, _] = self.latency;
        p99
    }

    /// Half of the calls were.
    pub(crate) fn p50(&self) -> f64 {
        let [p50, ..] = self.latency;
        p50
    }
}

/// A count, to calculate with.
#[expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "exact to 2^53, and no count is above"
)]
pub(crate) fn number(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Answer;
    use crate::load::Tally;

    #[test]
    fn costs_are_told_by_decision() {
        let mut tally = Tally::new().unwrap();
        for allowed in [true, true, true, false] {
            tally.count(
                Ok(if allowed { Answer::Allowed } else { Answer::Denied }),
                Duration::from_micros(100),
            );
        }
        let outcome = Outcome { tally, elapsed: Duration::from_secs(2) };
        let at = |server, scripts, here, all| Spent {
            server: Some(Duration::from_millis(server)),
            redis: None,
            scripts: Some(scripts),
            here: Duration::from_millis(here),
            all: Duration::from_millis(all),
        };
        let (before, after) = (at(1000, 10, 0, 2000), at(1001, 11, 9, 3010));
        let measured = Measured::new(&outcome, before, after);
        assert_eq!((measured.allowed, measured.denied, measured.decisions), (3, 1, 4));
        let near = |figure: Option<f64>, wanted: f64| (figure.unwrap() - wanted).abs() < 1e-9;
        assert!(near(measured.server_us, 250.0) && near(measured.scripts, 0.25));
        assert!(near(measured.server_busy, 0.0005) && near(Some(measured.per_second), 2.0));
        assert!(near(Some(measured.others), 0.5));
        assert!(measured.redis_us.is_none() && near(Some(measured.p99()), 100.0));
    }
}
