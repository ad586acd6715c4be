//! `tollgate ask`: one decision, for people.

use anyhow::Context as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tollgate_client::{Answer, Client, Denial, Verdict};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

#[derive(clap::Args)]
pub(crate) struct Ask {
    /// Who calls
    key: String,
    /// The kind of call
    #[arg(long, default_value = "default")]
    class: String,
    /// Tokens to take; 0 only looks [default: the class's cost]
    #[arg(long)]
    cost: Option<u32>,
    /// The server to ask
    #[arg(long, env = "TOLLGATE_SERVER", value_name = "URL", default_value = "http://127.0.0.1:8081")]
    server: String,
    /// How long to wait for the answer
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = humantime::parse_duration)]
    deadline: Duration,
    /// The authority that has signed the server's certificate, in PEM, for an https URL [default: those of the web]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_ASK_CA")]
    ca: Option<PathBuf>,
    /// A certificate to show to the server, in PEM [default: none]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_ASK_CERT", requires = "key_file")]
    cert: Option<PathBuf>,
    /// Its key, in PEM [default: none]
    #[arg(long = "key", value_name = "FILE", env = "TOLLGATE_ASK_KEY", requires = "cert")]
    key_file: Option<PathBuf>,
    /// A file with a bearer token to show to the server [default: none]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_ASK_TOKEN_FILE")]
    token_file: Option<PathBuf>,
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn ask(arguments: &Ask) -> anyhow::Result<()> {
    let client = client(arguments)?;
    let answer = client
        .should_rate_limit(&arguments.key, &arguments.class, arguments.cost)
        .await
        .with_context(|| format!("asked {}", arguments.server))?;
    println!("{}", told(&answer));
    Ok(())
}

fn client(arguments: &Ask) -> anyhow::Result<Client> {
    let mut client = Client::builder(&arguments.server).deadline(arguments.deadline);
    let mut tls = ClientTlsConfig::new();
    tls = match &arguments.ca {
        Some(ca) => tls.ca_certificate(Certificate::from_pem(read(ca)?)),
        None => tls.with_enabled_roots(),
    };
    if let Some((cert, key)) = arguments.cert.as_ref().zip(arguments.key_file.as_ref()) {
        tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
    }
    if let Some(file) = &arguments.token_file {
        client = client.token(read(file)?.trim_end());
    }
    Ok(client.tls(tls).build()?)
}

fn read(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}

fn told(answer: &Answer) -> String {
    let Answer { verdict: Verdict { limit, remaining, cost, .. }, rule } = answer;
    let span = |span: Duration| humantime::format_duration(span).to_string();
    let verdict = match answer.denied {
        None if *limit == 0 => return format!("allowed: class {rule} is never limited"),
        None if answer.wait.is_zero() => format!("allowed: {cost} taken"),
        None => format!("allowed after {}: {cost} taken", span(answer.wait)),
        Some(why) => {
            let why = match why {
                Denial::OverLimit => "over the limit",
                Denial::Blocked => "blocked",
                Denial::Unavailable => "the store can not be asked, and the class is sensitive",
                _ => "for a reason that this program does not know",
            };
            format!("denied: {why}; would fit in {}", span(answer.retry_after))
        }
    };
    let degraded = if answer.degraded { ", degraded" } else { "" };
    let reset = span(answer.reset_after);
    format!("{verdict}, {remaining} of {limit} left, as good as new in {reset} (class {rule}{degraded})")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(denied: Option<Denial>) -> Answer {
        let verdict = Verdict {
            denied,
            limit: 200,
            remaining: 3,
            cost: 10,
            retry_after: Duration::from_millis(70),
            reset_after: Duration::from_millis(1970),
            wait: Duration::ZERO,
            window: Duration::from_secs(2),
            degraded: false,
        };
        Answer { verdict, rule: "search".into() }
    }

    #[test]
    fn an_answer_is_one_line() {
        assert_eq!(
            told(&answer(None)),
            "allowed: 10 taken, 3 of 200 left, as good as new in 1s 970ms (class search)"
        );
        assert_eq!(
            told(&Answer {
                verdict: Verdict { wait: Duration::from_millis(300), ..*answer(None) },
                ..answer(None)
            }),
            "allowed after 300ms: 10 taken, 3 of 200 left, as good as new in 1s 970ms (class search)"
        );
        assert_eq!(
            told(&answer(Some(Denial::OverLimit))),
            "denied: over the limit; would fit in 70ms, 3 of 200 left, as good as new in 1s 970ms (class search)"
        );
    }
}
