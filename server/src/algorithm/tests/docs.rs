//! The traces in `docs/algorithms.md` are what the algorithms do.
//!
//! Under the heading `## <name>` stands a line "Rule: `rate: 10/s, burst: 3`" and after it a table whose columns
//! are `at`, `cost`, `allowed`, `remaining`, `retry after` and, where calls queue, `wait`. Times are counted from 1970.

use crate::algorithm::{ALL, Algorithm};
use crate::limit::{Cost, Limit, Rate, State, Timestamp, Want};
use humantime::{format_duration, parse_duration};
use std::time::Duration;

const DOCS: &str = include_str!("../../../../docs/algorithms.md");

#[test]
fn every_algorithm_does_what_its_trace_in_the_docs_says() {
    for algorithm in ALL {
        let section = section(algorithm);
        let limit = rule(algorithm, section);
        let mut rows = section.lines().skip_while(|line| !line.starts_with("| at |"));
        let columns = cells(rows.next().unwrap_or_else(|| panic!("{algorithm:?} has no trace")));
        let rows: Vec<_> = rows.skip(1).take_while(|line| line.starts_with('|')).collect();
        assert!(rows.len() >= 4, "{algorithm:?} has a trace of {} rows", rows.len());
        assert_eq!(columns.contains(&"wait"), algorithm.queues, "{algorithm:?}: a column `wait`");

        let mut state = State::default();
        for row in rows {
            let told = cells(row);
            assert_eq!(told.len(), columns.len(), "{algorithm:?}: {row}");
            let of = |column| told[columns.iter().position(|&its| its == column).unwrap()];
            let now = Timestamp::default().after(parse_duration(of("at")).unwrap());
            let want = Want::exactly(Cost::new(of("cost").parse().unwrap()));
            let decision = (algorithm.decide)(&limit, &state, now, want);
            if decision.granted > Cost::ZERO {
                (algorithm.charge)(&limit, &mut state, now, decision.granted);
            }
            let done: Vec<_> = columns
                .iter()
                .map(|&column| match column {
                    "at" | "cost" => of(column).to_owned(),
                    "allowed" => if decision.allowed() { "yes" } else { "no" }.to_owned(),
                    "remaining" => decision.remaining.to_string(),
                    "retry after" => format_duration(decision.retry_after).to_string(),
                    "wait" => format_duration(decision.wait).to_string(),
                    other => panic!("{algorithm:?}: what is a column {other:?}?"),
                })
                .collect();
            assert_eq!(done, told, "{algorithm:?}, done and told: {row}");
        }
    }
}

fn section(algorithm: &Algorithm) -> &'static str {
    let heading = format!("\n## {}\n", algorithm.name);
    let (_, section) =
        DOCS.split_once(&heading).unwrap_or_else(|| panic!("docs/algorithms.md has no section {heading:?}"));
    section.split("\n## ").next().unwrap()
}

fn rule(algorithm: &Algorithm, section: &str) -> Limit {
    let rule = section.lines().find_map(|line| line.strip_prefix("Rule: `")?.strip_suffix('`'));
    let rule = rule.unwrap_or_else(|| panic!("{algorithm:?} has no rule"));
    let (rate, burst) = rule.strip_prefix("rate: ").unwrap().split_once(", burst: ").unwrap();
    let (count, unit) = rate.split_once('/').unwrap();
    let period = parse_duration(&format!("1{unit}")).unwrap();
    assert!(period >= Duration::from_secs(1), "{rule}");
    let limit =
        Limit::new(Rate::new(count.parse().unwrap(), period).unwrap(), burst.parse().unwrap()).unwrap();
    (algorithm.check)(&limit).unwrap();
    limit
}

fn cells(row: &str) -> Vec<&str> {
    row.trim_matches('|').split('|').map(str::trim).collect()
}

/// What the docs say of bounds.
#[test]
fn the_largest_bursts_in_the_docs_are_those_that_fit() {
    let bounds = [
        (86_400, 1, "token_bucket", "52,124 at `1/d`"),
        (30 * 86_400, 1, "token_bucket", "1,737 at one in 30 days"),
        (1, 1, "sliding_log", "**Burst**: at most 10,000."),
        (60, 100, "sliding_window", "a burst of 86,637 for `100/m`"),
        (1, 1, "sliding_window", "of 67,108 for `1/s`"),
        (1, 1_000_000, "sliding_window", "of 67,108,863 for `1000000/s`"),
    ];
    // Wherever lines are broken.
    let docs = DOCS.split_whitespace().collect::<Vec<_>>().join(" ");
    for (seconds, count, name, told) in bounds {
        assert!(docs.contains(told), "{told}");
        let mut words = told.split(' ').map(|word| word.trim_end_matches('.').replace(',', ""));
        let most = words.find_map(|word| word.parse::<u64>().ok()).unwrap();
        let rate = Rate::new(count, Duration::from_secs(seconds)).unwrap();
        let fits = |burst| {
            let limit = Limit::new(rate, burst)?;
            (Algorithm::named(name).unwrap().check)(&limit)
        };
        assert!(fits(most).is_ok(), "{told}");
        assert!(fits(most + 1).is_err(), "{told}");
    }
}

/// What the docs say of a sliding window under a steady overload.
#[test]
fn a_sliding_window_passes_a_call_a_window_less_than_the_rate() {
    let algorithm = Algorithm::named("sliding_window").unwrap();
    for (burst, percent) in [(1, 50), (2, 50), (10, 90), (100, 99)] {
        let limit = Limit::new(Rate::new(burst, Duration::from_secs(1)).unwrap(), burst).unwrap();
        let (mut state, mut passed) = (State::default(), 0);
        let windows = 200;
        for call in 0..windows * burst * 3 {
            let now = Timestamp::from_micros(call * 1_000_000 / (burst * 3));
            let decision = (algorithm.decide)(&limit, &state, now, Want::exactly(Cost::ONE));
            if decision.allowed() {
                (algorithm.charge)(&limit, &mut state, now, decision.granted);
                passed += 1;
            }
        }
        let came = passed * 100 / (windows * burst);
        assert!(came.abs_diff(percent) <= 1, "a burst of {burst}: {came} %");
    }
}
