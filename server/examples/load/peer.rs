//! The processes that are measured. Each has a folder of its own, and ends when it is dropped.

use crate::api::{Api, DOMAIN};
use crate::cpu;
use crate::load::Callers;
use crate::redis::Redis;
use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{Instant, interval, sleep};
use tollgate_server::clock::instant;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// How long a process may take to be ready.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at whether it is.
const LOOK: Duration = Duration::from_millis(1);

/// A process, what it says, and the folder that it says it in.
struct Process {
    name: String,
    child: Child,
    folder: TempDir,
    started: Instant,
}

impl Process {
    /// Starts a program on that core, with nothing of this one's environment: a variable could be a setting.
    fn start(
        program: &Path,
        folder: TempDir,
        core: Option<usize>,
        arguments: &[&str],
    ) -> anyhow::Result<Self> {
        let name = program.display().to_string();
        let said = std::fs::File::create(folder.path().join("said"))?;
        let mut command = Command::new(program);
        command.args(arguments).env_clear().current_dir(&folder).stdin(Stdio::null());
        command.stdout(said.try_clone()?).stderr(said);
        let started = instant();
        let child = cpu::on(core, || command.spawn()).with_context(|| name.clone())?;
        Ok(Self { name, child, folder, started })
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("said")).unwrap_or_default()
    }

    /// What `look` finds, as soon as it finds something.
    async fn until<T>(
        &mut self,
        what: &str,
        mut look: impl AsyncFnMut(&Self) -> Option<T>,
    ) -> anyhow::Result<T> {
        while self.started.elapsed() < PATIENCE {
            if let Some(found) = look(self).await {
                return Ok(found);
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status}:\n{}", self.name, self.said());
            }
            sleep(LOOK).await;
        }
        bail!("{}: {what}: not within {PATIENCE:?}:\n{}", self.name, self.said())
    }

    /// Where it says that it listens.
    async fn address(&mut self) -> anyhow::Result<SocketAddr> {
        let says = |said: &str| said.lines().find_map(|line| line.strip_prefix("  grpc     ")?.parse().ok());
        self.until("it says where it listens", async |it: &Self| says(&it.said())).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a process that is gone.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A server that decides, or does as if.
pub(crate) struct Server {
    process: Process,
    address: SocketAddr,
    /// From its start until its health was SERVING.
    pub(crate) start: Duration,
}

impl Server {
    /// Tollgate, by these rules and with these arguments, ready to serve.
    pub(crate) async fn tollgate(
        program: &Path,
        rules: &str,
        store: &str,
        core: Option<usize>,
        more: &[&str],
    ) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("rules.yaml"), rules)?;
        std::fs::write(folder.path().join("load.yaml"), DOMAIN)?;
        let files = ["serve", "--config", "rules.yaml", "--domains", "load.yaml"];
        let arguments = [files.as_slice(), &["--store", store, "--log", "warn"]].concat();
        // Room for all keys: what is dropped is not measured.
        let room = ["--max-keys", "4000000", "--max-bytes", "4000000000"];
        let listens = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"];
        let arguments = [arguments.as_slice(), &room, more, &listens].concat();
        let mut process = Process::start(program, folder, core, &arguments)?;
        let address = process.address().await?;
        process.until("it is SERVING", async |_: &Process| is_serving(address).await.then_some(())).await?;
        let start = process.started.elapsed();
        Ok(Self { process, address, start })
    }

    /// The do-nothing server, which is this program.
    pub(crate) async fn do_nothing(core: Option<usize>) -> anyhow::Result<Self> {
        let arguments = ["echo", "--grpc", "127.0.0.1:0"];
        let mut process = Process::start(&std::env::current_exe()?, tempfile::tempdir()?, core, &arguments)?;
        let address = process.address().await?;
        let start = process.started.elapsed();
        Ok(Self { process, address, start })
    }

    pub(crate) async fn callers(
        &self,
        api: Api,
        connections: usize,
        in_flight: usize,
    ) -> anyhow::Result<Callers> {
        Callers::connect(format!("http://{}", self.address), api, connections, in_flight).await
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }
}

async fn is_serving(address: SocketAddr) -> bool {
    let Ok(endpoint) = Endpoint::from_shared(format!("http://{address}")) else { return false };
    let Ok(connection) = endpoint.connect().await else { return false };
    let answer = HealthClient::new(connection).check(HealthCheckRequest::default()).await;
    answer.is_ok_and(|answer| answer.into_inner().status() == ServingStatus::Serving)
}

/// A real Redis or Valkey that is empty, keeps nothing on disk and listens on a socket in its folder.
pub(crate) struct RedisServer {
    process: Process,
    pub(crate) url: String,
    pub(crate) redis: Redis,
}

impl RedisServer {
    pub(crate) async fn start(program: &Path, core: Option<usize>) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let url = format!("redis+unix://{}", folder.path().join("redis.sock").display());
        let arguments = ["--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly", "no"];
        let mut process = Process::start(program, folder, core, &arguments)?;
        let redis = process.until("it answers", async |_: &Process| Redis::connect(&url).await.ok()).await?;
        Ok(Self { process, url, redis })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Has it stand still for 19 of each 20 ms, until this is dropped.
    pub(crate) async fn slow_down<T>(&self) -> anyhow::Result<T> {
        let pid = Pid::from_raw(self.pid().try_into()?).context("a process")?;
        let mut turns = interval(Duration::from_millis(20));
        loop {
            turns.tick().await;
            kill_process(pid, Signal::STOP)?;
            sleep(Duration::from_millis(19)).await;
            kill_process(pid, Signal::CONT)?;
        }
    }
}

/// A Valkey or a Redis: on the PATH, or the one that `tests/run` has fetched.
pub(crate) fn redis_server() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path =
        |name: &str| std::env::split_paths(&path).map(|folder| folder.join(name)).find(|it| it.is_file());
    let fetched = || {
        let this = std::env::current_exe().ok()?;
        Some(this.ancestors().nth(3)?.join("peers/valkey-server")).filter(|it| it.is_file())
    };
    on_path("valkey-server").or_else(|| on_path("redis-server")).or_else(fetched)
}
