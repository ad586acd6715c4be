//! The same for real: a server, a Redis, and gateways with the whole client, in the time of this machine.

#![expect(clippy::float_arithmetic, reason = "figures for people, no decisions")]

use anyhow::{Context as _, bail};
use deadpool_redis::redis::{Client as RedisClient, InfoDict, cmd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::time::sleep;
use tollgate_client::{Client, Denial};
use tollgate_server::app;
use tollgate_server::clock::{Clock, instant};
use tollgate_server::config::Config;

/// How long anything may take to be ready.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The Redis or Valkey to start
    #[arg(long, default_value = "redis-server")]
    redis: PathBuf,
    /// Gateways; each is a client of its own
    #[arg(long, value_delimiter = ',', default_value = "1,10")]
    gateways: Vec<u32>,
    /// Calls a second, as a multiple of what the rate allows
    #[arg(long, value_delimiter = ',', default_value = "0.5,0.95,3")]
    load: Vec<f64>,
    /// Of the class; its burst is the same
    #[arg(long, default_value_t = 1_000)]
    rate: u32,
    #[arg(long, default_value = "10s")]
    span: humantime::Duration,
}

/// What a run came to.
#[derive(Default)]
struct Run {
    decisions: u64,
    admitted: u64,
    alone: u64,
    calls: u64,
    scripts: u64,
    elapsed: Duration,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let redis = Redis::start(&options.redis).await?;
    let folder = tempfile::tempdir()?;
    let rules = folder.path().join("rules.yaml");
    let class = format!("{{ rate: {0}/s, burst: {0} }}", options.rate);
    std::fs::write(&rules, format!("store: {}\nclasses:\n  default: {class}\n", redis.url))?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let end = Arc::new(Notify::new());
    let ended = end.clone();
    let app = app::build(Config::check(&rules)?, Clock::system())?;
    let serving = tokio::spawn(app.serve(listener, async move { ended.notified().await }));

    println!(
        "| gateways | load | decisions | admitted | of what the bucket had | alone | calls to the service | scripts | a decision | fewer |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for gateways in &options.gateways {
        for load in &options.load {
            let before = redis.scripts().await?;
            let mut run =
                gateways_run(&url, *gateways, f64::from(options.rate) * load, *options.span).await?;
            run.scripts = redis.scripts().await? - before;
            print(*gateways, *load, options.rate, &run);
        }
    }
    end.notify_one();
    serving.await?.map_err(anyhow::Error::from_boxed)
}

fn print(gateways: u32, load: f64, rate: u32, run: &Run) {
    let had = f64::from(rate) * (1.0 + run.elapsed.as_secs_f64());
    let could = had.min(number(run.decisions));
    let Run { decisions, admitted, alone, calls, scripts, .. } = run;
    println!(
        "| {gateways} | {load} | {decisions} | {admitted} | {:.1} % | {alone} | {calls} | {scripts} | {:.4} | {:.1}x |",
        100.0 * number(*admitted) / could,
        number(*scripts) / number(*decisions),
        number(*decisions) / number(*scripts),
    );
}

fn number(count: u64) -> f64 {
    u32::try_from(count).map_or(f64::NAN, f64::from)
}

/// So many gateways that together decide that many calls a second of one key.
async fn gateways_run(url: &str, gateways: u32, per_second: f64, span: Duration) -> anyhow::Result<Run> {
    let key = format!("{gateways} gateways, {per_second} a second");
    let start = instant();
    let running: Vec<_> = (0..gateways)
        .map(|_| {
            let (url, key) = (url.to_owned(), key.clone());
            let every = Duration::from_secs_f64(f64::from(gateways) / per_second);
            tokio::spawn(async move { gateway(&url, &key, every, span).await })
        })
        .collect();
    let mut all = Run::default();
    for gateway in running {
        let its = gateway.await??;
        all.decisions += its.decisions;
        all.admitted += its.admitted;
        all.alone += its.alone;
        all.calls += its.calls;
    }
    all.elapsed = start.elapsed();
    Ok(all)
}

async fn gateway(url: &str, key: &str, every: Duration, span: Duration) -> anyhow::Result<Run> {
    // A busy machine is not a sick service.
    let client = Client::builder(url).deadline(Duration::from_secs(1)).build()?;
    let mut run = Run::default();
    let start = instant();
    while start.elapsed() < span {
        let due = u64::try_from(start.elapsed().as_nanos() / every.as_nanos().max(1))?;
        while run.decisions < due {
            run.decisions += 1;
            let verdict = client.decide(key, "read", None).await?;
            if verdict.degraded || verdict.denied == Some(Denial::Unavailable) {
                run.alone += 1;
            } else {
                run.admitted += u64::from(verdict.allowed());
            }
        }
        sleep(Duration::from_millis(1)).await;
    }
    client.shutdown().await;
    run.calls = client.calls();
    Ok(run)
}

/// A real one that is empty, keeps nothing on disk and listens on a socket in its folder. It ends when it is dropped.
struct Redis {
    url: String,
    child: Child,
    _folder: TempDir,
}

impl Redis {
    async fn start(program: &Path) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let url = format!("redis+unix://{}", folder.path().join("redis.sock").display());
        let child = Command::new(program)
            .args(["--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly", "no"])
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| program.display().to_string())?;
        let redis = Self { url, child, _folder: folder };
        let start = instant();
        while redis.scripts().await.is_err() {
            if start.elapsed() > PATIENCE {
                bail!("{} does not answer", program.display());
            }
            sleep(Duration::from_millis(10)).await;
        }
        Ok(redis)
    }

    /// How many script calls it has answered.
    async fn scripts(&self) -> anyhow::Result<u64> {
        let mut connection = RedisClient::open(self.url.as_str())?.get_multiplexed_async_connection().await?;
        let stats: InfoDict = cmd("INFO").arg("commandstats").query_async(&mut connection).await?;
        let calls = |name: &str| {
            let stat: String = stats.get(&format!("cmdstat_{name}"))?;
            stat.strip_prefix("calls=")?.split(',').next()?.parse::<u64>().ok()
        };
        Ok(["eval", "evalsha"].into_iter().filter_map(calls).sum())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // Both fail only for a process that is gone.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
