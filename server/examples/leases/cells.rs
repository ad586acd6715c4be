//! What is simulated, and what is said of it.

#![expect(clippy::float_arithmetic, reason = "figures for people, no decisions")]

use crate::traffic::{Calls, Pattern};
use crate::world::{Outcome, START, Setting, World};
use anyhow::{Context as _, ensure};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tollgate_server::algorithm::Algorithm;
use tollgate_server::clock::Clock;
use tollgate_server::limit::{Cost, Limit, Rate};
use tollgate_server::rules::Limited;
use tollgate_server::store::memory::Memory;

const SECOND: u64 = 1_000_000;

/// One run: a class, who calls, and what goes wrong.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) what: &'static str,
    pub(crate) rate: u32,
    pub(crate) burst: u32,
    pub(crate) cost: u32,
    pub(crate) gateways: u32,
    /// Calls a second, as a multiple of what the rate allows.
    pub(crate) load: f64,
    pub(crate) pattern: Pattern,
    pub(crate) zipf: bool,
    pub(crate) seconds: u64,
    pub(crate) lost: u8,
    pub(crate) killed_every: Option<u64>,
    pub(crate) gone: Vec<Range<u64>>,
}

impl Cell {
    pub(crate) fn new(rate: u32, gateways: u32, load: f64) -> Self {
        Self {
            what: "",
            rate,
            burst: rate,
            cost: 1,
            gateways,
            load,
            pattern: Pattern::Poisson,
            zipf: false,
            seconds: 20,
            lost: 0,
            killed_every: None,
            gone: vec![],
        }
    }

    pub(crate) async fn run(&self) -> anyhow::Result<Outcome> {
        let limited = Limited {
            limit: Limit::new(Rate::new(self.rate.into(), Duration::from_secs(1))?, self.burst.into())?,
            algorithm: Algorithm::named("token_bucket").context("there is no token bucket")?,
            cost: Cost::from(self.cost),
            sensitive: false,
            penalty: None,
            shadow: false,
            wait: true,
        };
        let per_second = f64::from(self.rate) / f64::from(self.cost) * self.load;
        let setting = Setting {
            limited,
            calls: of_all(self.gateways, self.pattern, per_second, self.zipf),
            lasts: self.seconds * SECOND,
            latency: 250,
            lost: self.lost,
            killed_every: self.killed_every,
            gone: self.gone.clone(),
            jumps: BTreeMap::new(),
            seed: 1,
        };
        let clock = Clock::manual(START);
        let store = Arc::new(Memory::new(1 << 16, 1 << 24, clock.clone()));
        let outcome = World::run(setting, store, clock, "alice").await?;
        let wrong = outcome.wrong.as_ref().or(outcome.above.as_ref());
        ensure!(wrong.is_none(), "{self:?}: {wrong:?}");
        Ok(outcome)
    }
}

/// Of so many gateways with that many calls a second together: equal shares, or each so much smaller as Zipf says.
fn of_all(gateways: u32, pattern: Pattern, per_second: f64, zipf: bool) -> Vec<Calls> {
    let weight = |place| if zipf { 1.0 / f64::from(place) } else { 1.0 };
    let all: f64 = (1..=gateways).map(weight).sum();
    (1..=gateways).map(|place| Calls::new(pattern, per_second * weight(place) / all)).collect()
}

/// Gateways x load, at rates of which each gateway has a share that is worth a lease, and at one of which it has little.
pub(crate) fn loads() -> Vec<Cell> {
    let rows = [(1_000, 1), (1_000, 2), (1_000, 10), (5_000, 50), (1_000, 50)];
    rows.into_iter()
        .flat_map(|(rate, gateways)| [0.5, 0.95, 3.0].map(|load| Cell::new(rate, gateways, load)))
        .collect()
}

/// Other traffic and other limits, ten gateways each.
pub(crate) fn others() -> Vec<Cell> {
    let cell = |what, load| Cell { what, ..Cell::new(1_000, 10, load) };
    let mut cells = vec![];
    for load in [0.95, 3.0] {
        cells.extend([
            Cell { pattern: Pattern::Even, ..cell("even", load) },
            Cell { pattern: Pattern::OnOff, ..cell("a second on, a second off", load) },
            Cell { zipf: true, ..cell("gateways as Zipf says", load) },
            Cell { cost: 5, ..cell("a call costs 5", load) },
            Cell { burst: 500, ..cell("burst of half a second", load) },
            Cell { burst: 400, ..cell("burst of 0.4 s: not leasable", load) },
            Cell { rate: 190, burst: 380, ..cell("19/s for each: not leasable", load) },
        ]);
    }
    cells
}

/// What goes wrong, at 3 times what the rate allows and below it.
pub(crate) fn faults() -> Vec<Cell> {
    let cell = |what, load| Cell { what, ..Cell::new(1_000, 10, load) };
    let flaps = (2..18).step_by(2).map(|second| second * SECOND..(second + 1) * SECOND);
    let mut cells = vec![];
    for load in [0.95, 3.0] {
        cells.extend([
            Cell { lost: 13, ..cell("5 % of messages lost, each way", load) },
            Cell { killed_every: Some(SECOND / 2), ..cell("two gateways die each second", load) },
            Cell {
                gone: std::iter::once(5 * SECOND..15 * SECOND).collect(),
                ..cell("no service for 10 s", load)
            },
            Cell { gone: flaps.clone().collect(), ..cell("no service in every other second", load) },
        ]);
    }
    cells
}

/// A table of all of them, in Markdown.
pub(crate) async fn table(cells: &[Cell]) -> anyhow::Result<String> {
    let named = cells.iter().any(|cell| !cell.what.is_empty());
    let wrong = cells.iter().any(|cell| cell.lost > 0 || !cell.gone.is_empty());
    let mut table = String::from(if named { "| what |" } else { "| rate | gateways |" });
    table += " load | decisions | calls to the store | a decision | fewer | admitted, of ideal | worst excess | most lent | fairness |";
    table += if wrong { " alone |\n|---|" } else { "\n|---|" };
    table += if named { "---|" } else { "---|---|" };
    table += &"---|".repeat(if wrong { 9 } else { 8 });
    for cell in cells {
        let outcome = cell.run().await?;
        if named {
            write!(table, "\n| {} |", cell.what)?;
        } else {
            write!(table, "\n| {}/s | {} |", cell.rate, cell.gateways)?;
        }
        let (asked, burst) = (outcome.asked.len(), f64::from(cell.burst));
        write!(table, " {} | {asked} | {} |", cell.load, outcome.store)?;
        write!(table, " {:.4} |", number(outcome.store) / number(asked))?;
        write!(table, " {:.1}x |", number(asked) / number(outcome.store))?;
        write!(table, " {:.2} % |", 100.0 * number(outcome.admitted.len()) / number(outcome.ideal))?;
        write!(table, " {:.1} % |", 100.0 * number(outcome.excess) / burst)?;
        write!(table, " {:.0} % |", 100.0 * number(outcome.most_outstanding) / burst)?;
        write!(table, " {:.3} |", fairness(&outcome.by_gateway))?;
        if wrong {
            write!(table, " {} |", outcome.alone.len())?;
        }
    }
    Ok(table)
}

/// Jain's index of what each gateway was admitted of what it was asked: 1 is the same part for all, 1/n is all for one.
fn fairness(by_gateway: &[(u64, u64)]) -> f64 {
    let asked = by_gateway.iter().filter(|(asked, _)| *asked > 0);
    let parts: Vec<f64> = asked.map(|(asked, admitted)| number(*admitted) / number(*asked)).collect();
    let (sum, squares) =
        parts.iter().fold((0.0, 0.0), |(sum, squares), part| (sum + part, squares + part * part));
    sum * sum / (number(parts.len()) * squares)
}

/// No figure in here is above 2^32.
fn number(count: impl TryInto<u32>) -> f64 {
    count.try_into().map_or(f64::NAN, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What docs/leases.md claims, cell by cell.
    #[tokio::test]
    async fn where_a_share_is_large_a_tenth_of_the_calls_is_made_and_nothing_is_lost() {
        for cell in loads() {
            let Outcome { store, asked, admitted, ideal, excess, .. } = cell.run().await.unwrap();
            let (asked, admitted) = (number(asked.len()), number(admitted.len()));
            let tenfold = cell.rate / cell.gateways >= 100;
            assert!(!tenfold || number(store) * 10.0 <= asked, "{cell:?}: {store} calls");
            assert!(number(store) * 2.0 <= asked, "{cell:?}: {store} calls");
            assert!(admitted >= 0.99 * number(ideal), "{cell:?}: {admitted} of {ideal}");
            assert_eq!(excess, 0, "{cell:?}");
        }
    }

    #[test]
    fn fairness_is_one_for_equal_parts() {
        let close = |one: f64, other: f64| (one - other).abs() < 1e-9;
        assert!(close(fairness(&[(10, 5), (100, 50), (0, 0)]), 1.0));
        assert!(close(fairness(&[(10, 10), (10, 0), (10, 0), (10, 0)]), 0.25));
    }
}
