//! Puts load on a server and says what a decision costs. Runs on Linux.
//!
//! `cargo run --release -p tollgate-server --example load -- budgets` measures every budget of
//! `docs/performance.md` on this machine, and `… load -- drive --help` tells how to load a server that runs
//! already. That page says how to read what they print.

mod api;
mod budgets;
mod cpu;
mod echo;
mod keys;
mod load;
mod measure;
mod pace;
mod peer;
mod redis;
mod table;

use anyhow::{Context as _, ensure};
use api::Api;
use clap::{Parser, ValueEnum};
use keys::{Classes, Keys, Traffic};
use load::Callers;
use measure::Watched;
use redis::Redis;
use std::net::SocketAddr;
use std::time::Duration;
use table::Table;
use tokio::net::TcpListener;

/// Puts load on a rate-limit server and says what a decision costs.
#[derive(Parser)]
#[command(name = "load")]
enum Arguments {
    /// Load a server that runs already
    Drive(Box<Drive>),
    /// Start servers and measure each budget, beside a do-nothing server
    Budgets(budgets::Options),
    /// Be the do-nothing server: same messages, always ALLOW
    Echo {
        /// Where to listen
        #[arg(long, default_value = "127.0.0.1:8081")]
        grpc: SocketAddr,
    },
}

#[derive(clap::Args)]
struct Drive {
    /// The server
    #[arg(long, default_value = "http://127.0.0.1:8081")]
    server: String,
    /// The protocol
    #[arg(long, value_enum, default_value = "native")]
    api: Api,
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    connections: u16,
    /// Calls in flight on each connection
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    in_flight: u16,
    /// Calls a second, whatever the answers take; without it, as fast as answers come
    #[arg(long)]
    rate: Option<f64>,
    #[arg(long, default_value = "5s")]
    span: humantime::Duration,
    /// Load before that, which is not counted
    #[arg(long, default_value = "500ms")]
    warm_up: humantime::Duration,
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// How often which key calls
    #[arg(long, value_enum, default_value = "uniform")]
    spread: Spread,
    /// For zipf: how uneven
    #[arg(long, default_value_t = 1.0)]
    exponent: f64,
    /// A class, or several with weights: read=9,search=1. A share of denials is a class whose rate is exceeded.
    #[arg(long = "class", value_delimiter = ',', value_parser = weighted, default_value = "default")]
    classes: Vec<(String, u32)>,
    /// Tokens of a call [default: what the class costs]
    #[arg(long)]
    cost: Option<u32>,
    /// The server's process, whose CPU time is told
    #[arg(long)]
    server_pid: Option<u32>,
    /// The process of Redis, likewise
    #[arg(long)]
    redis_pid: Option<u32>,
    /// Redis itself, whose script calls are counted: redis://… or redis+unix://…
    #[arg(long)]
    redis: Option<String>,
    /// Run on this core only
    #[arg(long)]
    core: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Spread {
    /// All alike
    Uniform,
    /// The n-th key 1/n^exponent as often as the first
    Zipf,
    /// One key does all calls
    Hot,
}

fn weighted(text: &str) -> Result<(String, u32), String> {
    let (class, weight) = text.split_once('=').unwrap_or((text, "1"));
    let weight = weight.parse().map_err(|_| format!("{weight:?} is no weight; expected class=9"))?;
    Ok((class.to_owned(), weight))
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if let Arguments::Echo { grpc } = arguments {
        // The runtime of Tollgate's own main, so that they differ in what they do alone.
        return tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?
            .block_on(async { echo::serve(TcpListener::bind(grpc).await?).await });
    }
    // One thread makes all the load: it has one core.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments {
        Arguments::Drive(drive) => {
            if let Some(core) = drive.core {
                cpu::pin(core).with_context(|| format!("core {core}"))?;
            }
            print!("{}", runtime.block_on(drive.run())?);
            Ok(())
        }
        Arguments::Budgets(options) => {
            ensure!(!cfg!(debug_assertions), "figures of a debug build say nothing: add --release");
            runtime.block_on(budgets::run(&options))
        }
        Arguments::Echo { .. } => Ok(()),
    }
}

impl Drive {
    async fn run(&self) -> anyhow::Result<Table> {
        let redis = match &self.redis {
            Some(url) => Some(Redis::connect(url).await.with_context(|| url.clone())?),
            None => None,
        };
        let watched =
            Watched { server: self.server_pid, redis_process: self.redis_pid, redis: redis.as_ref() };
        let (connections, in_flight) = (self.connections.into(), self.in_flight.into());
        let callers = Callers::connect(self.server.clone(), self.api, connections, in_flight).await?;
        self.ask(&callers, self.warm_up.into()).await?;
        let measured = watched.during(self.ask(&callers, self.span.into())).await?;
        let mut table = Table::default();
        table.run(&self.server, &measured);
        Ok(table)
    }

    async fn ask(&self, callers: &Callers, span: Duration) -> anyhow::Result<load::Outcome> {
        let traffic = self.traffic()?;
        match self.rate {
            Some(rate) => callers.open(traffic, rate, span).await,
            None => callers.closed(traffic, span).await,
        }
    }

    fn traffic(&self) -> anyhow::Result<Traffic> {
        let keys = match self.spread {
            Spread::Uniform => Keys::Uniform(self.keys.into()),
            Spread::Zipf => Keys::zipf(self.keys, self.exponent)?,
            Spread::Hot => Keys::Hot,
        };
        let classes: Vec<_> = self.classes.iter().map(|(class, weight)| (class.as_str(), *weight)).collect();
        Ok(Traffic { keys, classes: Classes::mixed(&classes)?, cost: self.cost })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn arguments_are_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn classes_come_with_weights() {
        let Arguments::Drive(drive) =
            Arguments::parse_from(["load", "drive", "--class", "read=9,search", "--span", "2s"])
        else {
            panic!("it is drive")
        };
        assert_eq!(drive.classes, [("read".to_owned(), 9), ("search".to_owned(), 1)]);
        assert!(drive.traffic().is_ok());
        assert!(Arguments::try_parse_from(["load", "drive", "--class", "read=many"]).is_err());
        assert!(Arguments::try_parse_from(["load", "drive", "--keys", "0"]).is_err());
    }

    #[test]
    fn budgets_can_be_chosen() {
        let parse = |rows: &str| Arguments::try_parse_from(["load", "budgets", "--quick", "--rows", rows]);
        assert!(parse("p1,p9").is_ok());
        assert!(parse("p5").is_err());
    }
}
