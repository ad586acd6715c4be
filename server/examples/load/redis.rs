//! A look at a Redis from beside the server: how often it was called, what it holds, how fast it is alone.

use crate::api::Answer;
use crate::load::{Outcome, Tally};
use anyhow::Context as _;
use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::{AsyncConnectionConfig, Client, InfoDict, Script, cmd};
use std::time::Duration;
use tollgate_server::clock::instant;

/// The least that a decision needs: the time, a read, and a write that ends.
const LEAST: &str = "
    local now = redis.call('TIME')
    local before = redis.call('GET', KEYS[1])
    redis.call('SET', KEYS[1], now[2], 'PX', 60000)
    return before";

/// A connection of its own to a Redis.
pub(crate) struct Redis(MultiplexedConnection);

impl Redis {
    pub(crate) async fn connect(url: &str) -> anyhow::Result<Self> {
        let patience = Some(Duration::from_secs(10));
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(patience).set_response_timeout(patience);
        Ok(Self(Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await?))
    }

    /// How many script calls it has answered.
    pub(crate) async fn scripts(&self) -> anyhow::Result<u64> {
        Ok(script_calls(&self.info("commandstats").await?))
    }

    /// The bytes that it takes for what it holds, with its tables.
    pub(crate) async fn memory(&self) -> anyhow::Result<u64> {
        self.info("memory").await?.get("used_memory").context("INFO memory has no used_memory")
    }

    /// How many keys it holds.
    pub(crate) async fn keys(&self) -> anyhow::Result<u64> {
        Ok(cmd("DBSIZE").query_async(&mut self.0.clone()).await?)
    }

    /// The bytes of one key that is there, by its own account.
    pub(crate) async fn memory_of_one(&self) -> anyhow::Result<u64> {
        let connection = &mut self.0.clone();
        let key: Vec<u8> = cmd("RANDOMKEY").query_async(connection).await?;
        Ok(cmd("MEMORY").arg("USAGE").arg(key).query_async(connection).await?)
    }

    /// One script call after another, by one caller, with nothing between it and Redis.
    pub(crate) async fn alone(&self, span: Duration) -> anyhow::Result<Outcome> {
        let connection = &mut self.0.clone();
        let script = Script::new(LEAST);
        let mut tally = Tally::new()?;
        let start = instant();
        while start.elapsed() < span {
            let from = instant();
            let _: Option<u64> = script.key("alone").invoke_async(connection).await?;
            tally.count(Ok(Answer::Allowed), instant() - from);
        }
        Ok(Outcome { tally, elapsed: start.elapsed() })
    }

    async fn info(&self, section: &str) -> anyhow::Result<InfoDict> {
        Ok(cmd("INFO").arg(section).query_async(&mut self.0.clone()).await?)
    }
}

/// A server may call by the text or by its hash.
fn script_calls(stats: &InfoDict) -> u64 {
    let calls = |name: &&str| {
        let stat: String = stats.get(&format!("cmdstat_{name}"))?;
        stat.strip_prefix("calls=")?.split(',').next()?.parse::<u64>().ok()
    };
    ["eval", "evalsha", "fcall"].iter().filter_map(calls).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_calls_are_read_from_what_redis_tells() {
        let stats = "# Commandstats\r\n\
            cmdstat_get:calls=9,usec=1,usec_per_call=0.1,rejected_calls=0,failed_calls=0\r\n\
            cmdstat_evalsha:calls=40,usec=900,usec_per_call=22.5,rejected_calls=0,failed_calls=1\r\n\
            cmdstat_eval:calls=2,usec=90,usec_per_call=45.0,rejected_calls=0,failed_calls=0\r\n";
        assert_eq!(script_calls(&InfoDict::new(stats)), 42);
        assert_eq!(script_calls(&InfoDict::new("")), 0);
    }
}
