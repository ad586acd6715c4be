//! The service: one that runs, or one that is started for as long as the gateway lives.

use std::error::Error;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};

/// How long a service may take to start. The first time it is built.
const START: Duration = Duration::from_secs(600);

pub(crate) struct Tollgate {
    url: String,
    /// It ends when this is dropped.
    _process: Option<Child>,
}

impl Tollgate {
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// The service at a URL, or by a program, or by cargo.
pub(crate) async fn reach(tollgate: Option<String>) -> Result<Tollgate, Box<dyn Error>> {
    let mut command = match tollgate {
        Some(url) if url.starts_with("http") => return Ok(Tollgate { url, _process: None }),
        Some(program) => Command::new(program),
        None => {
            let mut cargo = Command::new(env!("CARGO"));
            cargo.args(["run", "--quiet", "-p", concat!("tollgate", "-server"), "--"]);
            cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
            cargo
        }
    };
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/gateway/rules.yaml");
    command.args(["--config", rules, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
    let mut process = command.kill_on_drop(true).stdout(Stdio::piped()).spawn()?;
    let stdout = process.stdout.take().ok_or("no output")?;
    let url = tokio::time::timeout(START, address(stdout)).await??;
    Ok(Tollgate { url, _process: Some(process) })
}

/// Where it serves, from its banner: `  grpc     127.0.0.1:43211`. Whatever it says later is read and dropped.
async fn address(stdout: impl AsyncRead + Unpin + Send + 'static) -> Result<String, Box<dyn Error>> {
    let mut lines = BufReader::new(stdout).lines();
    while let Some(line) = lines.next_line().await? {
        if let Some(address) = line.trim().strip_prefix("grpc") {
            let url = format!("http://{}", address.trim());
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Ok(url);
        }
    }
    Err("the service ended before it served".into())
}
