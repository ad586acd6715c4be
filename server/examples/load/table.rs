//! What is printed: Markdown, to be read as it is or pasted.

#![expect(clippy::float_arithmetic, reason = "figures for people, no decisions")]

use crate::measure::{Measured, number};
use indexmap::IndexMap;
use std::fmt;

/// What a figure is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Budget {
    AtMost(f64),
    AtLeast(f64),
    /// As good as exact: so much below this is still met.
    Within(f64, f64),
    /// It is for reading the others by.
    None,
}

impl Budget {
    fn is_met(self, figure: f64) -> Option<bool> {
        match self {
            Self::AtMost(most) => Some(figure <= most),
            Self::AtLeast(least) => Some(figure >= least),
            Self::Within(least, most) => Some(least <= figure && figure <= most),
            Self::None => None,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "<= {}", Figure(*most)),
            Self::AtLeast(least) => write!(f, ">= {}", Figure(*least)),
            Self::Within(least, most) => write!(f, "{} to {}", Figure(*least), Figure(*most)),
            Self::None => Ok(()),
        }
    }
}

/// Every figure of every round, by its number and what it is.
#[derive(Default)]
pub(crate) struct Table {
    budgets: IndexMap<(&'static str, String), (Budget, Vec<f64>)>,
    runs: IndexMap<String, Vec<Measured>>,
}

impl Table {
    /// One round's figure. Its budget is the same in all.
    pub(crate) fn figure(&mut self, row: &'static str, what: impl Into<String>, budget: Budget, figure: f64) {
        self.budgets.entry((row, what.into())).or_insert((budget, vec![])).1.push(figure);
    }

    /// One round's run.
    pub(crate) fn run(&mut self, what: impl Into<String>, measured: &Measured) {
        self.runs.entry(what.into()).or_default().push(measured.clone());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.budgets.is_empty() {
            writeln!(f, "| # | what | budget | min | median | max | |")?;
            writeln!(f, "|---|---|---|---|---|---|---|")?;
        }
        for ((row, what), (budget, figures)) in &self.budgets {
            let [min, median, max] = spread(figures.iter().copied());
            let met = budget.is_met(median).map_or("", |met| if met { "met" } else { "**missed**" });
            let [min, median, max] = [min, median, max].map(Figure);
            writeln!(f, "| {row} | {what} | {budget} | {min} | {median} | {max} | {met} |")?;
        }
        if !self.budgets.is_empty() {
            writeln!(f)?;
        }
        writeln!(
            f,
            "| run | decisions/s | server us | Redis us | scripts/decision | server busy % | others busy % | denied % | errors | p50 us | p99 us | p99.9 us |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|---|---|")?;
        for (what, runs) in &self.runs {
            let median = |figure: fn(&Measured) -> Option<f64>| {
                let [_, median, _] = spread(runs.iter().filter_map(figure));
                Figure(median)
            };
            write!(f, "| {what} | {}", median(|run| Some(run.per_second)))?;
            write!(f, " | {} | {}", median(|run| run.server_us), median(|run| run.redis_us))?;
            write!(f, " | {}", median(|run| run.scripts))?;
            write!(f, " | {}", median(|run| run.server_busy.map(|part| part * 100.0)))?;
            write!(f, " | {}", median(|run| Some(run.others * 100.0)))?;
            let denied = |run: &Measured| Some(100.0 * number(run.denied) / number(run.decisions.max(1)));
            write!(f, " | {} | {}", median(denied), runs.iter().map(|run| run.errors).sum::<u64>())?;
            let [p50, p99, p999]: [fn(&Measured) -> Option<f64>; 3] =
                [|run| Some(run.latency[0]), |run| Some(run.latency[1]), |run| Some(run.latency[2])];
            let [p50, p99, p999] = [p50, p99, p999].map(median);
            writeln!(f, " | {p50} | {p99} | {p999} |")?;
        }
        let errors: Vec<_> = self.runs.iter().filter_map(|(what, runs)| first_error(what, runs)).collect();
        if !errors.is_empty() {
            writeln!(f, "\n{}", errors.join("\n"))?;
        }
        Ok(())
    }
}

fn first_error(what: &str, runs: &[Measured]) -> Option<String> {
    let error = runs.iter().find_map(|run| run.first_error.as_ref())?;
    Some(format!("- The first error of \"{what}\": {error}"))
}

/// Least, middle and most; of an even number the lower of the two in the middle.
fn spread(figures: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut figures: Vec<_> = figures.collect();
    figures.sort_by(f64::total_cmp);
    let middle = figures.get(figures.len().saturating_sub(1) / 2);
    [figures.first(), middle, figures.last()].map(|figure| figure.copied().unwrap_or(f64::NAN))
}

/// A number with as many digits as it is good for. There may be none.
struct Figure(f64);

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = match self.0.abs() {
            none if none.is_nan() => return f.write_str("-"),
            100.0.. => 0,
            10.0.. => 1,
            1.0.. => 2,
            _ => 4,
        };
        let text = format!("{:.digits$}", self.0);
        let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
        f.write_str(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_judged_by_the_median() {
        let mut table = Table::default();
        for figure in [1.5, 1.0, 1.1] {
            table.figure("P1", "ratio", Budget::AtMost(1.1), figure);
            table.figure("P1", "other", Budget::AtMost(1.05), figure);
            table.figure("P1", "admitted", Budget::Within(0.99, 1.0), figure);
        }
        let text = table.to_string();
        assert!(text.contains("| P1 | ratio | <= 1.1 | 1 | 1.1 | 1.5 | met |"), "{text}");
        assert!(text.contains("| P1 | other | <= 1.05 | 1 | 1.1 | 1.5 | **missed** |"), "{text}");
        assert!(text.contains("| P1 | admitted | 0.99 to 1 | 1 | 1.1 | 1.5 | **missed** |"), "{text}");
    }

    #[test]
    fn the_spread_of_figures() {
        assert_eq!(spread([3.0, 1.0, 2.0].into_iter()).map(|x| Figure(x).to_string()), ["1", "2", "3"]);
        assert_eq!(spread([4.0].into_iter()).map(|x| Figure(x).to_string()), ["4", "4", "4"]);
        assert_eq!(spread(std::iter::empty()).map(|x| Figure(x).to_string()), ["-", "-", "-"]);
    }

    #[test]
    fn figures_have_the_digits_that_they_are_good_for() {
        let said = [84_123.4, 100.0, 11.06, 1.104, 0.0156, 0.0, 20.0].map(|x| Figure(x).to_string());
        assert_eq!(said, ["84123", "100", "11.1", "1.1", "0.0156", "0", "20"]);
    }
}
