//! What tests stand on: real processes that end when their owner is dropped, and one way to wait.
//!
//! Everything lives in a temporary folder and listens on a socket in it or on a port nobody else has, so that
//! tests run side by side and again and again.

pub(crate) mod authority;
pub(crate) mod calls;
pub(crate) mod http;
pub(crate) mod raw;
pub(crate) mod relay;
pub(crate) mod several;
pub(crate) mod wire;

use deadpool_redis::redis;
use http::exchange;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tempfile::TempDir;

/// How long anything may take that is waited for. Far more than it needs, for a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// Waits until `probe` gives something, asking again and again, and panics with `what` if it never does.
///
/// The one place where tests sleep. What they wait for is a condition, never a length of time.
pub(crate) async fn eventually<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let asking = async {
        loop {
            if let Some(found) = probe().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, asking).await.unwrap_or_else(|_| panic!("not within {DEADLINE:?}: {what}"))
}

/// A child process and what it has said. Dropped, it is killed and gone, also when a test panics.
pub(crate) struct Process {
    name: String,
    child: Child,
    said: Said,
}

impl Process {
    /// Starts it and collects what it writes on stdout and stderr.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|why| panic!("{name} does not start: {why}"));
        let said = Said::default();
        said.collect(child.stdout.take().unwrap());
        said.collect(child.stderr.take().unwrap());
        Self { name, child, said }
    }

    /// Its id. Another process may have it once this one is gone.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The most memory that it ever had, and how many threads it has.
    pub(crate) fn most(&self) -> String {
        format!("at most {}, {} threads", self.status("VmHWM:"), self.status("Threads:"))
    }

    /// The most memory that it ever had, in bytes.
    pub(crate) fn peak(&self) -> u64 {
        self.status("VmHWM:").trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    fn status(&self, name: &str) -> String {
        let status = format!("/proc/{}/status", self.pid().as_raw_nonzero());
        let status = std::fs::read_to_string(status).unwrap_or_default();
        status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("?").trim().to_owned()
    }

    /// Whether it has not ended yet.
    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Sends a signal to it. One that is told to stop has stopped when this returns.
    pub(crate) fn signal(&mut self, signal: Signal) {
        // Once it has been waited for, its id may be another's.
        assert!(self.is_running(), "{} has ended, so no {signal:?} for it:\n{}", self.name, self.said);
        kill_process(self.pid(), signal).unwrap();
        if signal == Signal::STOP {
            waitpid(Some(self.pid()), WaitOptions::UNTRACED).unwrap();
        }
    }

    /// Ends it at once. It is gone when this returns; nothing happens if it was before.
    pub(crate) fn kill(&mut self) {
        // Both fail only for a process that is gone already. Killed, it does not keep us waiting, even stopped.
        self.child.kill().ok();
        self.child.wait().ok();
    }

    /// How it ended, once it has.
    pub(crate) async fn exit(&mut self) -> ExitStatus {
        let what = format!("{} ends", self.name);
        eventually(&what, async || self.child.try_wait().unwrap()).await
    }

    /// The first line it said that `wanted` is true of, once there is one.
    pub(crate) async fn says(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let what = format!("{} says {what}", self.name);
        eventually(&what, async || {
            // Asked first, so that its last words are not missed.
            let may_say_more = self.said.may_say_more();
            let line = self.said.find(&wanted);
            assert!(may_say_more || line.is_some(), "{what}, but it has ended:\n{}", self.said);
            line
        })
        .await
    }

    /// All that it has said, or the end of it if that is much.
    pub(crate) fn output(&self) -> String {
        self.said.to_string()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The lines that a process said, as threads read them: a pipe that nobody reads would stop it.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<VecDeque<String>>>);

impl Said {
    /// How many lines are kept. A test that needs more looks for the wrong thing.
    const MOST: usize = 10_000;

    fn collect(&self, from: impl Read + Send + 'static) {
        let said = self.clone();
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = Vec::new();
            while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                let mut lines = said.0.lock().unwrap();
                if lines.len() == Self::MOST {
                    lines.pop_front();
                }
                lines.push_back(String::from_utf8_lossy(line.trim_ascii_end()).into_owned());
                line.clear();
            }
        });
    }

    fn find(&self, wanted: impl Fn(&str) -> bool) -> Option<String> {
        self.0.lock().unwrap().iter().find(|line| wanted(line)).cloned()
    }

    /// Whether a thread is still reading: each holds a clone.
    fn may_say_more(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.lock().unwrap().iter().try_for_each(|line| writeln!(f, "    {line}"))
    }
}

/// The servers that speak Redis and that Tollgate must work with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Fetched by `tests/run`, so that it is always there.
    Valkey,
    /// The machine's own `redis-server`, 7 or later.
    Redis7,
}

/// The engines on this machine. In CI all of them must be.
pub(crate) fn engines() -> Vec<Engine> {
    let mut engines = vec![Engine::Valkey];
    match redis_server() {
        Some(_) => engines.push(Engine::Redis7),
        None if std::env::var("CI").is_ok_and(|ci| ci == "true") => {
            panic!("no redis-server 7 or later on the PATH, and in CI nothing is skipped")
        }
        // tests/run has said so.
        None => {}
    }
    engines
}

impl Engine {
    pub(crate) fn program(self) -> PathBuf {
        match self {
            Self::Valkey => peer("valkey-server", "TOLLGATE_TEST_VALKEY"),
            Self::Redis7 => redis_server().expect("a redis-server 7 or later on the PATH"),
        }
    }
}

/// `redis-server`, if it is new enough; on some systems that name is an older one, or something else.
fn redis_server() -> Option<PathBuf> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let program = on_path("redis-server")?;
            let version = Command::new(&program).arg("--version").output().ok()?.stdout;
            let version = String::from_utf8(version).ok()?;
            let (_, number) = version.strip_prefix("Redis")?.split_once("v=")?;
            let major: u32 = number.split('.').next()?.parse().ok()?;
            (major >= 7).then_some(program)
        })
        .clone()
}

/// A Redis of its own for a test: empty, keeping nothing on disk.
pub(crate) struct Redis {
    engine: Engine,
    listens: Listens,
    /// Its arguments beside where it listens and where it keeps files.
    more: Vec<String>,
    // Before the folder, so that it is gone when the folder goes.
    process: Process,
    folder: TempDir,
}

#[derive(Clone, Copy)]
enum Listens {
    OnSocket,
    OnPort(u16),
}

impl Redis {
    /// One that listens on a socket in its folder and on no port.
    pub(crate) async fn start(engine: Engine) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let process = Self::spawn(engine, Listens::OnSocket, folder.path(), &[]);
        let mut redis = Self { engine, listens: Listens::OnSocket, more: Vec::new(), process, folder };
        redis.until_it_answers().await;
        redis
    }

    /// One that listens on a free port of the loopback.
    pub(crate) async fn start_on_port(engine: Engine) -> Self {
        loop {
            let folder = tempfile::tempdir().unwrap();
            let listens = Listens::OnPort(free_port());
            let process = Self::spawn(engine, listens, folder.path(), &[]);
            let mut redis = Self { engine, listens, more: Vec::new(), process, folder };
            if redis.answers_or_ends().await {
                return redis;
            }
            // Between finding the port and listening on it, somebody else took it; or it ended for a reason
            // that would end the next one too.
            let said = redis.process.output();
            assert!(said.contains("Address already in use"), "{engine:?} ended:\n{said}");
        }
    }

    /// One on that port, with more arguments, or nothing if somebody else has the port by now.
    pub(crate) async fn start_with(
        engine: Engine,
        port: u16,
        folder: TempDir,
        more: &[&str],
    ) -> Option<Self> {
        let listens = Listens::OnPort(port);
        let more: Vec<String> = more.iter().map(ToString::to_string).collect();
        let process = Self::spawn(engine, listens, folder.path(), &more);
        let mut redis = Self { engine, listens, more, process, folder };
        redis.answers_or_ends().await.then_some(redis)
    }

    fn spawn(engine: Engine, listens: Listens, folder: &Path, more: &[String]) -> Process {
        let mut command = Command::new(engine.program());
        command.arg("--dir").arg(folder).args(["--save", "", "--appendonly", "no"]).args(more);
        match listens {
            Listens::OnSocket => command.args(["--port", "0", "--unixsocket"]).arg(socket(folder)),
            Listens::OnPort(port) => command.args(["--bind", "127.0.0.1", "--port", &port.to_string()]),
        };
        Process::spawn(&mut command)
    }

    /// Where it listens, as the redis crate and Tollgate's `store` take it.
    pub(crate) fn url(&self) -> String {
        match self.listens {
            Listens::OnSocket => format!("redis+unix://{}", socket(self.folder.path()).display()),
            Listens::OnPort(port) => format!("redis://127.0.0.1:{port}"),
        }
    }

    /// The port that it listens on.
    pub(crate) fn port(&self) -> u16 {
        match self.listens {
            Listens::OnPort(port) => port,
            Listens::OnSocket => panic!("it listens on a socket"),
        }
    }

    /// Stops it where it is: connections stay open, nothing is answered.
    pub(crate) fn stop(&mut self) {
        self.process.signal(Signal::STOP);
    }

    /// Lets it go on.
    pub(crate) fn cont(&mut self) {
        self.process.signal(Signal::CONT);
    }

    /// Ends it at once, as a crash would.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// Ends it, if it has not ended, and starts it again at the same place. It is empty then.
    pub(crate) async fn restart(&mut self) {
        self.kill();
        self.process = Self::spawn(self.engine, self.listens, self.folder.path(), &self.more);
        self.until_it_answers().await;
    }

    /// What it answers to a command: a look at the keys from outside.
    pub(crate) async fn command(&self, words: &[&str]) -> redis::Value {
        self.say(words, DEADLINE).await.unwrap_or_else(|why| panic!("{words:?}: {why}"))
    }

    /// The same, for when it may not answer.
    ///
    /// # Errors
    ///
    /// When it refuses the connection or the command, or does not answer within half a second.
    pub(crate) async fn try_command(&self, words: &[&str]) -> redis::RedisResult<redis::Value> {
        self.say(words, Duration::from_millis(500)).await
    }

    async fn say(&self, words: &[&str], patience: Duration) -> redis::RedisResult<redis::Value> {
        // A connection each time: one that has seen a crash is of no use after it.
        let mut connection = self.connection(patience).await?;
        let mut command = redis::Cmd::new();
        command.arg(words);
        command.query_async(&mut connection).await
    }

    /// A connection of one's own, on which nothing is waited for longer.
    ///
    /// # Errors
    ///
    /// When it refuses, or does not answer in time.
    pub(crate) async fn connection(
        &self,
        patience: Duration,
    ) -> redis::RedisResult<redis::aio::MultiplexedConnection> {
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(patience))
            .set_response_timeout(Some(patience));
        redis::Client::open(self.url())?.get_multiplexed_async_connection_with_config(&config).await
    }

    /// Its process, to look at.
    pub(crate) fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    async fn until_it_answers(&mut self) {
        assert!(self.answers_or_ends().await, "{:?} ended:\n{}", self.engine, self.process.output());
    }

    async fn answers_or_ends(&mut self) -> bool {
        let what = format!("{:?} answers at {}", self.engine, self.url());
        eventually(&what, async || {
            if !self.process.is_running() {
                return Some(false);
            }
            // More than a PING: on a port, somebody else might be answering.
            let about = self.try_command(&["INFO", "server"]).await.ok()?;
            let about: String = redis::from_redis_value(about).ok()?;
            let its_pid = format!("process_id:{}", self.process.child.id());
            about.lines().any(|line| line == its_pid).then_some(true)
        })
        .await
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("redis.sock")
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// The real server: the built binary, on free ports, with rules of the test's own.
pub(crate) struct Tollgate {
    grpc: SocketAddr,
    process: Process,
    folder: TempDir,
}

impl Tollgate {
    /// Serves with this text as its configuration file.
    pub(crate) async fn start(config: &str) -> Self {
        Self::run(&mut Self::command(), config).await
    }

    /// The built binary, to give more arguments or variables to before it [`run`](Self::run)s.
    pub(crate) fn command() -> Command {
        let program = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("tollgate");
        assert!(program.is_file(), "{} is not built: run tests/run", program.display());
        let mut command = Command::new(program);
        // What the one who runs the tests has set for a server of theirs is not meant for this one.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TOLLGATE_") {
                command.env_remove(name);
            }
        }
        command
    }

    /// Serves by that command with this text as its configuration file.
    pub(crate) async fn run(command: &mut Command, config: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = config_in(folder.path());
        std::fs::write(&file, config).unwrap();
        command.arg("--config").arg(file).args(["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
        let process = Process::spawn(command.current_dir(folder.path()));
        let grpc = address(&process, "grpc").await;
        Self { grpc, process, folder }
    }

    /// Where it serves gRPC.
    pub(crate) fn grpc(&self) -> SocketAddr {
        self.grpc
    }

    /// Where it serves HTTP.
    pub(crate) async fn http(&self) -> SocketAddr {
        address(&self.process, "http").await
    }

    /// What `/metrics` says of that series, name and labels as they are written there; zero if nothing.
    pub(crate) async fn metric(&self, series: &str) -> u64 {
        let request = "GET /metrics HTTP/1.1\r\nhost: edge\r\nconnection: close\r\n\r\n";
        let http = self.http().await;
        // As many may be connected as may be, for a moment.
        let reply = eventually("metrics", async || exchange(http, request).await).await;
        let line = reply.body.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }

    /// Its configuration file, for a test that changes it.
    pub(crate) fn config(&self) -> PathBuf {
        config_in(self.folder.path())
    }

    /// The first line of its log or its stdout that contains `text`, once there is one.
    pub(crate) async fn says(&self, text: &str) -> String {
        self.process.says(&format!("{text:?}"), |line| line.contains(text)).await
    }

    /// Asks it to end, and waits until it has.
    pub(crate) async fn terminate(&mut self) -> ExitStatus {
        self.process.signal(Signal::TERM);
        self.process.exit().await
    }

    /// Its process, to look at.
    pub(crate) fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}

fn config_in(folder: &Path) -> PathBuf {
    folder.join("tollgate.yaml")
}

/// What stands after that word at the start of a line: `  grpc     127.0.0.1:43211`.
async fn address(process: &Process, of: &str) -> SocketAddr {
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        words.next().filter(|first| *first == of)?;
        words.find_map(|word| word.parse().ok())
    };
    let line = process.says(&format!("its {of} address"), |line| parse(line).is_some()).await;
    parse(&line).unwrap()
}

/// Runs grpcurl, a client that shares no code with us, and returns what it printed. It gives up in time.
pub(crate) async fn grpcurl(arguments: &[&str]) -> Output {
    let mut command = Command::new(peer("grpcurl", "TOLLGATE_TEST_GRPCURL"));
    command.args(["-max-time", &DEADLINE.as_secs().to_string()]).args(arguments);
    // Not on this thread: the server it calls may be a task of the test itself.
    tokio::task::spawn_blocking(move || command.output()).await.unwrap().expect("grpcurl runs")
}

/// A program that `tests/run` has fetched, unless a variable names another.
fn peer(name: &str, variable: &str) -> PathBuf {
    peer_if_there(name, variable).unwrap_or_else(|| panic!("no {name}: run tests/run, or set {variable}"))
}

/// The same, where not every platform has it. In CI it must be there.
pub(crate) fn peer_unless_skipped(name: &str, variable: &str) -> Option<PathBuf> {
    let found = peer_if_there(name, variable);
    let in_ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    assert!(found.is_some() || !in_ci, "no {name}, and in CI nothing is skipped");
    if found.is_none() {
        say(&format!("skipped: no {name} here; run tests/run, or set {variable}"));
    }
    found
}

fn peer_if_there(name: &str, variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable)
        .map(PathBuf::from)
        .or_else(|| {
            // In `peers` of cargo's target folder, which this test runs from somewhere inside of.
            let test = std::env::current_exe().unwrap();
            test.ancestors().map(|folder| folder.join("peers").join(name)).find(|program| program.is_file())
        })
        .or_else(|| on_path(name))
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// Says something that is worth reading even if the test passes: the test runner keeps what `println!` says.
#[expect(clippy::explicit_write, reason = "what eprintln! says is kept too")]
pub(crate) fn say(text: &str) {
    use std::io::Write as _;
    writeln!(std::io::stderr(), "{text}").unwrap();
}
