//! The `tollgate` command: arguments, configuration, log, and then the server.

mod ask;
mod banner;
mod check;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tollgate_server::clock::Clock;
use tollgate_server::config::{Config, Overrides};
use tollgate_server::{app, telemetry};

/// Calls are short and their allocations small: a seventh of what a call costs was spent in the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long the end waits for files that are being read.
const READING: Duration = Duration::from_secs(1);

/// A rate-limit decision service. Without a command it serves.
#[derive(Parser)]
#[command(name = "tollgate", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: Serve,
}

#[derive(Subcommand)]
enum Command {
    /// Serve until SIGTERM or SIGINT
    Serve(Box<Serve>),
    /// Say whether rules are valid, or everything that is wrong and where
    Check(check::Check),
    /// Ask a server for one decision
    Ask(ask::Ask),
}

#[derive(clap::Args)]
struct Serve {
    #[command(flatten)]
    overrides: Overrides,
    /// What to log: error, warn, info, debug, trace, or target=level,…
    #[arg(long, env = "TOLLGATE_LOG", value_name = "LEVEL", default_value = "info")]
    log: String,
    /// How to log
    #[arg(long, env = "TOLLGATE_LOG_FORMAT", value_enum, default_value_t)]
    log_format: telemetry::Format,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.command.unwrap_or(Command::Serve(Box::new(arguments.serve))) {
        Command::Serve(arguments) => serve(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Check(arguments) => Ok(check::check(&arguments)),
        Command::Ask(arguments) => ask::ask(&arguments).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("tollgate: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: &Serve) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(serve_until_told(arguments));
    // A file that is being read may be on a disk that does not answer.
    runtime.shutdown_timeout(READING);
    served
}

async fn serve_until_told(arguments: &Serve) -> anyhow::Result<()> {
    let config = Config::load(&arguments.overrides)?;
    telemetry::start(&arguments.log, arguments.log_format).context("log")?;
    let counted = telemetry::metric::start().context("metrics")?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;

    let address = config.server.grpc;
    let listener =
        TcpListener::bind(address).await.with_context(|| format!("grpc: can not listen on {address}"))?;
    let address = config.server.http;
    let http =
        TcpListener::bind(address).await.with_context(|| format!("http: can not listen on {address}"))?;
    banner::print(&config, listener.local_addr()?, http.local_addr()?);

    let app = app::build(config, Clock::system())?.with_http(http).with_metrics(counted);
    let reload = app.reload().asked();
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            tracing::info!("SIGHUP: reading the rules");
            reload.notify_one();
        }
    });
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    app.serve(listener, stop).await.map_err(anyhow::Error::from_boxed)
}
