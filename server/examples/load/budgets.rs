//! The budgets of `docs/performance.md`, one row after the other, each measured beside the do-nothing server.

#![expect(clippy::float_arithmetic, reason = "figures for people, no decisions")]

mod rows;

use crate::api::Api;
use crate::cpu::{self, Cores};
use crate::keys::{Classes, Keys, Traffic};
use crate::load::Callers;
use crate::measure::{Measured, Watched};
use crate::peer::{self, RedisServer, Server};
use crate::table::Table;
use anyhow::{Context as _, anyhow, ensure};
use clap::ValueEnum;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only these
    #[arg(long, value_enum, value_delimiter = ',')]
    rows: Vec<Row>,
    /// How often each is measured; min, median and max are printed
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// How long each measurement takes
    #[arg(long, default_value = "5s")]
    span: humantime::Duration,
    /// Keys of a store that has grown
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(10_000..=4_000_000))]
    many_keys: u64,
    /// One round of one second each with 100,000 keys: to see that it works
    #[arg(long, conflicts_with_all = ["rounds", "span", "many_keys"])]
    quick: bool,
    /// The server to measure [default: the one of these sources, built now]
    #[arg(long, value_name = "PROGRAM")]
    tollgate: Option<PathBuf>,
    /// The Redis to measure with [default: valkey-server or redis-server on the PATH, else what tests/run fetched]
    #[arg(long, value_name = "PROGRAM", env = "TOLLGATE_TEST_VALKEY")]
    redis_server: Option<PathBuf>,
}

/// The budgets that this program can measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Row {
    /// Memory store
    P1,
    /// Redis store, distinct keys
    P2,
    /// Redis store, one hot key
    P3,
    /// Redis store, denied traffic
    P4,
    /// Bytes of a bucket
    P7,
    /// Many keys, many rules
    P8,
    /// Start and size
    P9,
    /// Three times more calls than the store can decide
    Overload,
}

/// What all rows stand on.
struct Bench {
    tollgate: PathBuf,
    redis_server: PathBuf,
    cores: Cores,
    span: Duration,
    many_keys: u64,
}

/// Measures and prints.
pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let (rounds, span, many_keys) = if options.quick {
        (1, Duration::from_secs(1), 100_000)
    } else {
        (options.rounds, options.span.into(), options.many_keys)
    };
    let rows = if options.rows.is_empty() { Row::value_variants() } else { &options.rows };
    let redis_server = options.redis_server.clone().or_else(peer::redis_server);
    let redis_server = redis_server.context("no valkey-server and no redis-server; tests/run fetches one")?;
    let bench = Bench {
        tollgate: options.tollgate.clone().map_or_else(build, Ok)?.canonicalize()?,
        // Not where a link leads: some programs go by the name that they are called by.
        redis_server: std::path::absolute(redis_server)?,
        cores: Cores::here()?,
        span,
        many_keys,
    };
    if let Some(core) = bench.cores.load {
        cpu::pin(core)?;
    }
    let mut table = Table::default();
    let mut terminate = signal(SignalKind::terminate())?;
    let measured = tokio::select! {
        measured = bench.rounds(rounds, rows, &mut table) => measured,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow!("terminated")),
    };
    // Also if the last row of the last round failed; and what was started ends with `bench.rounds`.
    println!("{}\n", bench.about(rounds)?);
    print!("{table}");
    measured
}

/// Builds the server of these sources, and says where it is: beside the folder of this program.
fn build() -> anyhow::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let mut command = Command::new(cargo);
    command.args(["build", "--release", "--bin", "tollgate", "--manifest-path"]).arg(manifest);
    ensure!(
        command.status().context("cargo")?.success(),
        "tollgate can not be built; --tollgate names another"
    );
    let this = std::env::current_exe()?;
    let built = this.ancestors().nth(2).context("this program is not in target/release/examples")?;
    Ok(built.join("tollgate"))
}

impl Bench {
    async fn rounds(&self, rounds: u32, rows: &[Row], table: &mut Table) -> anyhow::Result<()> {
        for round in 1..=rounds {
            for &row in rows {
                eprintln!("round {round} of {rounds}: {row:?}");
                self.row(row, table).await?;
            }
        }
        Ok(())
    }

    async fn row(&self, row: Row, table: &mut Table) -> anyhow::Result<()> {
        match row {
            Row::P1 => rows::memory(self, table).await,
            Row::P2 => rows::redis(self, table).await,
            Row::P3 => rows::hot_key(self, table).await,
            Row::P4 => rows::denied(self, table).await,
            Row::P7 => rows::bytes(self, table).await,
            Row::P8 => rows::growth(self, table).await,
            Row::P9 => rows::start(self, table).await,
            Row::Overload => rows::overload(self, table).await,
        }
    }

    /// What one has to know to compare the figures with others.
    fn about(&self, rounds: u32) -> anyhow::Result<String> {
        let says = |program: &Path| -> anyhow::Result<String> {
            let output = Command::new(program).arg("--version").output()?.stdout;
            Ok(String::from_utf8_lossy(&output).trim().to_owned())
        };
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let model = model.map_or("a processor", |(_, model)| model);
        let pinned = match self.cores {
            Cores { server: Some(server), load: Some(load), redis: Some(redis) } => {
                format!("server on core {server}, load on core {load}, Redis on core {redis}")
            }
            _ => "one core: nothing is pinned, and all share it".to_owned(),
        };
        Ok(format!(
            "{}; {}; {model}; {pinned}; {rounds} rounds of {}; {} keys are many.",
            says(&self.tollgate)?,
            says(&self.redis_server)?,
            humantime::format_duration(self.span),
            self.many_keys,
        ))
    }

    async fn do_nothing(&self) -> anyhow::Result<Server> {
        Server::do_nothing(self.cores.server).await
    }

    /// Tollgate on a store in its memory.
    async fn on_memory(&self, rules: &str) -> anyhow::Result<Server> {
        Server::tollgate(&self.tollgate, rules, "memory", self.cores.server, &[]).await
    }

    async fn empty_redis(&self) -> anyhow::Result<RedisServer> {
        RedisServer::start(&self.redis_server, self.cores.redis).await
    }

    async fn on_redis(&self, rules: &str, redis: &RedisServer) -> anyhow::Result<Server> {
        // What waits long is to be seen in the latency; turned away, it would have cost nothing.
        self.on_redis_with(rules, redis, &["--store-deadline", "1s"]).await
    }

    async fn on_redis_with(&self, rules: &str, redis: &RedisServer, more: &[&str]) -> anyhow::Result<Server> {
        Server::tollgate(&self.tollgate, rules, &redis.url, self.cores.server, more).await
    }

    /// Full load: as many calls in flight as keep a server busy, after a moment that is not counted.
    async fn full(
        &self,
        server: &Server,
        redis: Option<&RedisServer>,
        api: Api,
        traffic: impl Fn() -> anyhow::Result<Traffic>,
    ) -> anyhow::Result<Measured> {
        let callers = crowd(server, api).await?;
        callers.closed(traffic()?, self.span / 10).await?;
        watched(server, redis).during(callers.closed(traffic()?, self.span)).await
    }

    /// So many calls a second, at random times.
    async fn open(
        &self,
        server: &Server,
        redis: Option<&RedisServer>,
        api: Api,
        traffic: impl Fn() -> anyhow::Result<Traffic>,
        rate: f64,
    ) -> anyhow::Result<Measured> {
        let callers = crowd(server, api).await?;
        callers.open(traffic()?, rate, self.span / 10).await?;
        watched(server, redis).during(callers.open(traffic()?, rate, self.span)).await
    }

    /// One caller alone.
    async fn alone(
        &self,
        server: &Server,
        redis: Option<&RedisServer>,
        traffic: impl Fn() -> anyhow::Result<Traffic>,
    ) -> anyhow::Result<Measured> {
        let caller = server.callers(Api::Native, 1, 1).await?;
        caller.closed(traffic()?, self.span / 10).await?;
        watched(server, redis).during(caller.closed(traffic()?, self.span)).await
    }
}

/// 256 callers on four connections.
async fn crowd(server: &Server, api: Api) -> anyhow::Result<Callers> {
    server.callers(api, 4, 64).await
}

fn watched<'a>(server: &Server, redis: Option<&'a RedisServer>) -> Watched<'a> {
    Watched {
        server: Some(server.pid()),
        redis_process: redis.map(RedisServer::pid),
        redis: redis.map(|redis| &redis.redis),
    }
}

/// Asks so many times for each key.
async fn ask_each(server: &Server, keys: u64, class: &str, times: u64) -> anyhow::Result<()> {
    let traffic = Traffic { keys: Keys::in_turn(keys), classes: Classes::only(class)?, cost: None };
    let tally = crowd(server, Api::Native).await?.times(traffic, keys * times).await?.tally;
    let why = tally.first_error.as_ref().map(ToString::to_string).unwrap_or_default();
    ensure!(tally.errors == 0, "{} of {} calls failed: {why}", tally.errors, tally.calls());
    Ok(())
}

/// One figure by another, if both were taken.
fn ratio(ours: Option<f64>, theirs: Option<f64>) -> f64 {
    ours.zip(theirs).map_or(f64::NAN, |(ours, theirs)| ours / theirs)
}
