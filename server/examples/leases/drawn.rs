//! The pictures: what passes over time.

use crate::cells::{Cell, faults};
use crate::panels::{Panel, Picture, Y};
use crate::world::Outcome;

const SECOND: u64 = 1_000_000;
const BIN: u64 = SECOND / 10;

/// The name of each file and what is in it.
pub(crate) async fn pictures() -> anyhow::Result<[(&'static str, String); 2]> {
    Ok([("overload.svg", overload().await?.drawn()), ("faults.svg", wrong().await?.drawn())])
}

/// Three times the rate, by ever more gateways.
async fn overload() -> anyhow::Result<Picture> {
    let mut panels = vec![];
    for (name, gateways) in [("1 gateway", 1), ("2 gateways", 2), ("10 gateways", 10), ("50 gateways", 50)] {
        let outcome = Cell { seconds: 10, ..Cell::new(1_000, gateways, 3.0) }.run().await?;
        panels.push(panel(name, &outcome, 10));
    }
    Ok(picture("Three times the limit of 1000/s, burst 1000", 10, panels))
}

/// Three times the rate, by ten gateways, and something goes wrong.
async fn wrong() -> anyhow::Result<Picture> {
    let mut panels = vec![];
    for cell in faults().iter().filter(|cell| cell.load > 1.0) {
        panels.push(panel(cell.what, &cell.run().await?, cell.seconds));
    }
    Ok(picture(
        "Three times the limit of 1000/s, burst 1000, by 10 gateways, and what goes wrong",
        20,
        panels,
    ))
}

fn picture(title: &'static str, seconds: i32, panels: Vec<Panel>) -> Picture {
    Picture {
        title,
        about: "Calls a second, in tenths of a second: grey was asked for, blue passes.",
        x: ("seconds", 0, seconds, seconds / 5),
        y: Y { title: "calls a second", most: 4_000, step: 1_000, line: (1_000, "rate"), excess: None },
        bin: 0.1,
        stepped: true,
        panels,
    }
}

fn panel(name: &'static str, outcome: &Outcome, seconds: u64) -> Panel {
    let passed = [outcome.admitted.as_slice(), &outcome.alone].concat();
    let alone = match outcome.alone.len() {
        0 => String::new(),
        alone => format!(", {alone} without the service"),
    };
    Panel {
        name,
        note: format!("{} of {} pass{alone}; {} calls", passed.len(), outcome.asked.len(), outcome.store),
        behind: counted(&outcome.asked, seconds),
        front: counted(&passed, seconds),
    }
}

/// Calls a second in each bin.
fn counted(times: &[u64], seconds: u64) -> Vec<u64> {
    let mut counts = vec![0; usize::try_from(seconds * SECOND / BIN).unwrap_or(0)];
    for at in times {
        if let Some(count) = usize::try_from(at / BIN).ok().and_then(|bin| counts.get_mut(bin)) {
            *count += SECOND / BIN;
        }
    }
    counts
}
