//! The `classes` of a file, compiled to rules.
//!
//! What a rate, a limit, a penalty may be is known to their constructors alone. This turns text into their
//! arguments, and gives each of their errors the place in the file of the setting that is to blame.

#[cfg(test)]
mod tests;

use super::{Limited, Rule, Rules};
use crate::algorithm::{ALL, Algorithm};
use crate::limit::{Cost, Limit, LimitError, Rate};
use crate::name::LONGEST_CLASS;
use crate::penalty::{Penalty, PenaltyError};
use crate::yaml::{Given, Report, Scalar, Section};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// No file has more classes.
const MOST_CLASSES: usize = 10_000;

const HOUR: Duration = Duration::from_secs(3600);
const MINUTE: Duration = Duration::from_secs(60);

/// The classes of a file, by name.
pub(crate) type Classes = BTreeMap<String, Given<Class>>;

/// A class as a file has it.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Class {
    rate: Given<Scalar>,
    burst: Given<Scalar>,
    cost: Given<Scalar>,
    algorithm: Given<Scalar>,
    sensitive: Given<Scalar>,
    penalty: Given<PenaltySettings>,
    shadow: Given<Scalar>,
    wait: Given<Scalar>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct PenaltySettings {
    strikes: Given<Scalar>,
    window: Given<Scalar>,
    base: Given<Scalar>,
    cap: Given<Scalar>,
}

/// The rules that a file's classes are. What is wrong goes to the report, and is then not among the rules.
pub(crate) fn compile(classes: &Given<Classes>, report: &mut Report) -> Rules {
    let mut all = report.section("classes", classes.place());
    let none = BTreeMap::new();
    let classes = classes.value().unwrap_or(&none);
    if classes.is_empty() {
        all.fault("", None, "expected at least one class, such as `default: { rate: 100/s }`");
    }
    if classes.len() > MOST_CLASSES {
        all.fault("", None, format!("expected at most {MOST_CLASSES} classes, got {}", classes.len()));
        return Rules::new([]);
    }
    Rules::new(classes.iter().filter_map(|(name, class)| rule(name, class, &mut all)))
}

/// Nothing if something is wrong.
fn rule(name: &str, given: &Given<Class>, all: &mut Section<'_>) -> Option<Rule> {
    let mut at = all.section(name, given.place());
    if name.is_empty() || name.len() > LONGEST_CLASS {
        let got = name.len();
        at.fault("", None, format!("expected a class name of 1 to {LONGEST_CLASS} bytes, got {got}"));
    }
    let class = given.value()?;
    let before = at.len();
    let rate = at.get("rate", &class.rate, rate);
    let burst = at.get("burst", &class.burst, |burst| {
        burst.whole(&format!("a whole number from 1 to {}", Limit::MOST_BURST))
    });
    let cost = at.get("cost", &class.cost, |cost| cost.whole("a whole number from 0 to the burst"));
    let algorithm = at.get("algorithm", &class.algorithm, algorithm);
    let sensitive = at.get("sensitive", &class.sensitive, Scalar::flag).unwrap_or_default();
    let shadow = at.get("shadow", &class.shadow, Scalar::flag).unwrap_or_default();
    let wait = at.get("wait", &class.wait, Scalar::flag);
    let penalty = penalty(&class.penalty, &mut at);
    // What follows compares settings with each other; a wrong one would be blamed on its neighbours.
    if !at.sound_since(before) {
        return None;
    }

    if cost == Some(0) {
        let exempt =
            "does nothing in a class that costs 0 and so is never limited; expected one or the other";
        if sensitive {
            at.fault("sensitive", class.sensitive.place(), exempt);
        }
        if penalty.is_some() {
            at.fault("penalty", class.penalty.place(), exempt);
        }
        return Some(Rule::new(name, None));
    }
    let Some(rate) = rate else {
        at.fault("", None, format!("expected a `rate` ({RATE}), or `cost: 0` for a class without a limit"));
        return None;
    };
    let named = algorithm.map_or(String::new(), |algorithm| format!("{}: ", algorithm.name));
    let algorithm = algorithm.or_else(|| ALL.first())?;
    let limit = limit(rate, burst.unwrap_or(rate.count()), algorithm)
        .map_err(|error| {
            // A burst that is not there is the rate's.
            let (key, blamed) = match (error, class.burst.place()) {
                (LimitError::NoBurst | LimitError::Burst { .. } | LimitError::Log { .. }, Some(place)) => {
                    ("burst", Some(place))
                }
                _ => ("rate", class.rate.place()),
            };
            at.fault(key, blamed, format!("{named}{error}"));
        })
        .ok()?;
    let cost = cost.unwrap_or(1);
    if cost > limit.burst() {
        let message = format!("a cost of {cost} can never fit a burst of {}", limit.burst());
        at.fault("cost", class.cost.place(), message);
        return None;
    }
    if wait.is_some() && !algorithm.queues {
        let message = format!("does nothing with {}, which does not queue calls", algorithm.name);
        at.fault("wait", class.wait.place(), message);
        return None;
    }
    let wait = wait.unwrap_or(true);
    let limited = Limited { limit, algorithm, cost: Cost::new(cost), sensitive, penalty, shadow, wait };
    Some(Rule::new(name, Some(limited)))
}

/// The limit, if it can be and the algorithm can keep it. Of two bounds the error says the lower.
pub(super) fn limit(rate: Rate, burst: u64, algorithm: &Algorithm) -> Result<Limit, LimitError> {
    match Limit::new(rate, burst) {
        Ok(limit) => (algorithm.check)(&limit).map(|()| limit),
        Err(error @ LimitError::Burst { most, .. }) => {
            match Limit::new(rate, most).and_then(|limit| (algorithm.check)(&limit)) {
                Err(LimitError::Burst { most, .. }) => Err(LimitError::Burst { burst, most }),
                Err(LimitError::Log { most, .. }) => Err(LimitError::Log { burst, most }),
                _ => Err(error),
            }
        }
        Err(error) => Err(error),
    }
}

const RATE: &str = "N/s, N/m, N/h, N/d or N/<duration>";

fn rate(given: &Scalar) -> Result<Rate, String> {
    let text = given.text(RATE)?;
    let (count, period) = text
        .split_once('/')
        .and_then(|(count, period)| {
            // `parse` alone would take a sign.
            let digits = count.bytes().all(|byte| byte.is_ascii_digit());
            Some((count.parse().ok().filter(|_| digits)?, span(period)?))
        })
        .ok_or_else(|| given.instead_of(RATE))?;
    Rate::new(count, period).map_err(|error| error.to_string())
}

fn span(text: &str) -> Option<Duration> {
    match text {
        "s" => Some(Duration::from_secs(1)),
        "m" => Some(MINUTE),
        "h" => Some(HOUR),
        "d" => Some(24 * HOUR),
        text => humantime::parse_duration(text).ok(),
    }
}

pub(super) fn algorithm(given: &Scalar) -> Result<&'static Algorithm, String> {
    let names: Vec<_> = Algorithm::names().collect();
    let expected = format!("one of {}", names.join(", "));
    Algorithm::named(given.text(&expected)?).ok_or_else(|| given.instead_of(&expected))
}

pub(super) fn penalty(given: &Given<PenaltySettings>, class: &mut Section<'_>) -> Option<Penalty> {
    let penalty = given.value()?;
    let mut at = class.section("penalty", given.place());
    let before = at.len();
    let strikes = at.get("strikes", &penalty.strikes, |count| count.within(0..=u32::MAX));
    if penalty.strikes.value().is_none() {
        at.fault("", None, "expected `strikes`: how many denials are forgiven");
    }
    let window = at.get("window", &penalty.window, Scalar::span).unwrap_or(HOUR);
    let base = at.get("base", &penalty.base, Scalar::span).unwrap_or(MINUTE);
    let cap = at.get("cap", &penalty.cap, Scalar::span).unwrap_or(HOUR);
    if !at.sound_since(before) {
        return None;
    }
    Penalty::new(strikes?, window, base, cap)
        .map_err(|error| {
            let (key, blamed) = match error {
                PenaltyError::Span { name: "window", .. } => ("window", &penalty.window),
                PenaltyError::Span { name: "cap", .. } => ("cap", &penalty.cap),
                // A cap below a base that the file does not even have.
                PenaltyError::BaseAboveCap { .. } if penalty.base.value().is_none() => ("cap", &penalty.cap),
                PenaltyError::Span { .. } | PenaltyError::BaseAboveCap { .. } => ("base", &penalty.base),
            };
            at.fault(key, blamed.place(), error.to_string());
        })
        .ok()
}
