//! The log: to standard error, as text or JSON, at the level that `TOLLGATE_LOG` says. And the metrics.

pub mod metric;

use std::io::IsTerminal as _;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// What libraries say to themselves: a watcher of files of each line that is written to a log beside them, and HTTP/2 of
/// each peer that misbehaves, as often as it likes.
const SILENCED: [&str; 2] = ["notify=error", "h2=error"];

/// How the log is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts the log. `filter` is a level or `target=level,…`.
///
/// # Errors
/// The filter can not be read.
pub fn start(filter: &str, format: Format) -> Result<(), ParseError> {
    let mut filter = EnvFilter::builder().parse(filter)?;
    for directive in SILENCED {
        filter = filter.add_directive(directive.parse()?);
    }
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        Format::Text => builder.init(),
        Format::Json => builder.json().init(),
    }
    Ok(())
}
