//! The log: to standard error, as text or JSON, at the level that `TOLLGATE_LOG` says. And the metrics.

pub mod metric;

use std::io::IsTerminal as _;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

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
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::builder().parse(filter)?)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        Format::Text => builder.init(),
        Format::Json => builder.json().init(),
    }
    Ok(())
}
