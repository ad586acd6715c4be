//! Draws the pictures of `docs/algorithms.md` from the real algorithms.
//!
//! `cargo run -p tollgate-server --example pictures` writes them. A test says whether those in `docs/algorithms/`
//! are what is drawn here; nothing in them depends on the machine or the day.

mod panels;
mod scene;

use anyhow::Context as _;
use panels::{Panel, Picture, Y};
use scene::Call;
use std::path::PathBuf;
use std::time::Duration;
use tollgate_server::algorithm::ALL;
use tollgate_server::limit::{Limit, Rate, Timestamp, micros};

const SECOND: u64 = 1_000_000;

fn main() -> anyhow::Result<()> {
    for (name, drawn) in pictures()? {
        let file = folder().join(name);
        std::fs::write(&file, drawn).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/algorithms")
}

/// The name of each file and what is in it.
fn pictures() -> anyhow::Result<[(&'static str, String); 3]> {
    Ok([("hour.svg", hour()?.drawn()), ("overload.svg", overload()?.drawn()), ("edge.svg", edge()?.drawn())])
}

fn limit(count: u64, period: u64, burst: u64) -> anyhow::Result<Limit> {
    Ok(Limit::new(Rate::new(count, Duration::from_secs(period))?, burst)?)
}

/// The busiest hour of a real log, all of whose requests are in one minute: the log is a sample.
fn hour() -> anyhow::Result<Picture> {
    let limit = limit(1, 1, 10)?;
    let (start, calls) = scene::busiest_hour().context("the log has no busiest hour")?;
    let seconds = 75;
    let bins = |times: &[u64]| scene::counted(times, start, SECOND, seconds);
    let panels = ALL.iter().map(|algorithm| {
        let passed = scene::passed(algorithm, &limit, &calls);
        Panel {
            name: algorithm.name,
            note: note(&passed, &calls),
            behind: bins(&scene::asked(&calls)),
            front: bins(&passed),
        }
    });
    Ok(Picture {
        title: "A real minute of traffic, limited to 1/s with a burst of 10",
        about: "Calls a second: grey was asked for, blue passes.",
        x: ("seconds after 19:05 on 19 May 2015", 0, 75, 15),
        y: Y { title: "calls a second", most: 8, step: 2, line: (1, "rate"), excess: None },
        bin: 1.0,
        stepped: false,
        panels: panels.collect(),
    })
}

/// Three times the rate, evenly, to a bucket that was idle.
fn overload() -> anyhow::Result<Picture> {
    let limit = limit(10, 1, 20)?;
    let start = 1_000 * SECOND;
    let call = |i: u64| Call { at: Timestamp::from_micros(start + i * SECOND / 30), cost: 1 };
    let calls: Vec<_> = (0..300).map(call).collect();
    // Six calls are asked for in each bin, thirty a second.
    let bins = |times: &[u64]| {
        let counted = scene::counted(times, start, SECOND / 5, 60);
        counted.into_iter().map(|count| count * 5).collect()
    };
    let panels = ALL.iter().map(|algorithm| {
        let passed = scene::passed(algorithm, &limit, &calls);
        Panel {
            name: algorithm.name,
            note: note(&passed, &calls),
            behind: bins(&scene::asked(&calls)),
            front: bins(&passed),
        }
    });
    Ok(Picture {
        title: "Ten seconds of 30 calls a second, limited to 10/s with a burst of 20",
        about: "Calls a second, in fifths of a second: grey was asked for, blue passes.",
        x: ("seconds", 0, 14, 2),
        y: Y { title: "calls a second", most: 30, step: 10, line: (10, "rate"), excess: None },
        bin: 0.2,
        stepped: false,
        panels: panels.collect(),
    })
}

fn note(passed: &[u64], calls: &[Call]) -> String {
    let at_once = scene::asked(calls);
    let waited = passed.iter().any(|at| at_once.binary_search(at).is_err());
    let how = if waited { ", each in its turn" } else { "" };
    format!("{} of {} pass{how}", passed.len(), calls.len())
}

/// A burst in the five seconds before a border, and another in the five seconds after it.
fn edge() -> anyhow::Result<Picture> {
    let limit = limit(100, 60, 100)?;
    let window = micros(limit.window());
    let border = 1_000 * window;
    let call = |i: u64| Call { at: Timestamp::from_micros(border - 5 * SECOND + i * SECOND / 20), cost: 1 };
    let calls: Vec<_> = (0..200).map(call).collect();
    let start = border - 20 * SECOND;
    // In the window that ends with the bin.
    let lately = |times: &[u64]| -> Vec<u64> {
        let ends = (1..=200).map(|bin| start + bin * SECOND / 2);
        ends.map(|end| scene::within(times, end - window, end)).collect()
    };
    let panels = ALL.iter().map(|algorithm| {
        let passed = scene::passed(algorithm, &limit, &calls);
        let front = lately(&passed);
        Panel {
            name: algorithm.name,
            note: format!("at most {} in a minute", front.iter().max().unwrap_or(&0)),
            behind: lately(&scene::asked(&calls)),
            front,
        }
    });
    Ok(Picture {
        title: "100 calls just before the border of two minutes and 100 just after, limited to 100/m",
        about: "Calls in the last 60 seconds: grey was asked for, blue passed, orange is above the burst.",
        x: ("seconds after the border", -20, 80, 20),
        y: Y { title: "calls in 60 s", most: 200, step: 100, line: (100, "burst"), excess: Some(100) },
        bin: 0.5,
        stepped: true,
        panels: panels.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pictures_in_docs_are_those_that_are_drawn() {
        for (name, drawn) in pictures().unwrap() {
            let committed = std::fs::read_to_string(folder().join(name)).unwrap_or_default();
            let told = "is not what is drawn: cargo run -p tollgate-server --example pictures";
            assert!(committed == drawn, "docs/algorithms/{name} {told}");
        }
    }
}
