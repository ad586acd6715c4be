//! Leases, simulated and measured: the tables and pictures of `docs/leases.md`.
//!
//! `cargo run -p tollgate-server --example leases` simulates: the real engine and the real leases of the client, in a
//! time of their own. It writes the tables into the page and the pictures beside it; a test says whether they are what
//! is simulated here. `… --example leases -- live` runs a few of the same against a real Redis, and prints a table.

mod bounds;
mod cells;
mod drawn;
mod gateway;
mod live;
#[path = "../pictures/panels.rs"]
mod panels;
mod traffic;
mod watched;
mod world;

use anyhow::Context as _;
use clap::Parser;
use std::path::PathBuf;

/// Simulates leases for docs/leases.md, or measures them live.
#[derive(Parser)]
#[command(name = "leases")]
enum Arguments {
    /// Simulate, and write tables and pictures into docs (this is what is done without a word)
    Simulate,
    /// Run a server, a Redis and gateways, and count
    Live(live::Options),
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let words: Vec<_> = std::env::args_os().collect();
    match if words.len() < 2 { Arguments::Simulate } else { Arguments::parse_from(words) } {
        Arguments::Simulate => simulate().await,
        Arguments::Live(options) => live::run(&options).await,
    }
}

async fn simulate() -> anyhow::Result<()> {
    let page = docs().join("leases.md");
    let text = std::fs::read_to_string(&page).with_context(|| page.display().to_string())?;
    std::fs::write(&page, with_tables(&text, &tables().await?)?)?;
    for (name, drawn) in drawn::pictures().await? {
        let file = docs().join("leases").join(name);
        std::fs::write(&file, drawn).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// The name of each table and the table.
async fn tables() -> anyhow::Result<[(&'static str, String); 3]> {
    Ok([
        ("loads", cells::table(&cells::loads()).await?),
        ("others", cells::table(&cells::others()).await?),
        ("faults", cells::table(&cells::faults()).await?),
    ])
}

/// The page with each table where its name stands in a comment.
fn with_tables(page: &str, tables: &[(&str, String)]) -> anyhow::Result<String> {
    let mut page = page.to_owned();
    for (name, table) in tables {
        let (start, end) = (format!("<!-- {name} -->\n"), "\n<!-- -->");
        let from = page.find(&start).with_context(|| format!("no {start}"))? + start.len();
        let to =
            page.get(from..).and_then(|rest| rest.find(end)).with_context(|| format!("no end of {start}"))?;
        page.replace_range(from..from + to, table);
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_tables_and_pictures_in_docs_are_what_is_simulated() {
        let told = "is not what is simulated: cargo run -p tollgate-server --example leases";
        let page = std::fs::read_to_string(docs().join("leases.md")).unwrap();
        assert!(with_tables(&page, &tables().await.unwrap()).unwrap() == page, "docs/leases.md {told}");
        for (name, drawn) in drawn::pictures().await.unwrap() {
            let committed = std::fs::read_to_string(docs().join("leases").join(name)).unwrap_or_default();
            assert!(committed == drawn, "docs/leases/{name} {told}");
        }
    }
}
