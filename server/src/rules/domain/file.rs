//! The file of a domain: the YAML of envoyproxy/ratelimit and a few keys more, compiled to rules.

#[cfg(test)]
mod tests;

use super::{Body, Domain, DomainRule, HeaderNames, MOST_LEVELS, Meter, Said};
use crate::algorithm::{Algorithm, BY_CALENDAR};
use crate::limit::{Limit, LimitError};
use crate::rules::Limited;
use crate::rules::file::{PenaltySettings, algorithm, penalty};
use crate::rules::matcher::{Node, Pattern};
use crate::rules::unit::Unit;
use crate::telemetry::metric::Tally;
use crate::yaml::{self, Faults, Given, List, Mapping, Report, Scalar, Section, Text};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;

/// No key, value or name is longer, in bytes.
const LONGEST: usize = 4096;

type Descriptors = Given<List<Given<Mapping<Descriptor>>>>;

#[derive(Default, Deserialize)]
#[serde(default)]
struct File {
    domain: Given<Text>,
    descriptors: Descriptors,
    algorithm: Given<Scalar>,
    compat: Given<Scalar>,
    response_headers: Given<Mapping<Headers>>,
    over_limit_body: Given<Scalar>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Headers {
    limit: Given<Scalar>,
    remaining: Given<Scalar>,
    reset: Given<Scalar>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Descriptor {
    key: Given<Text>,
    value: Given<Text>,
    rate_limit: Given<Mapping<RateLimit>>,
    descriptors: Descriptors,
    shadow_mode: Given<Scalar>,
    quota_mode: Given<Scalar>,
    detailed_metric: Given<Scalar>,
    value_to_metric: Given<Scalar>,
    share_threshold: Given<Scalar>,
    /// Whatever others keep there.
    #[serde(rename = "metadata")]
    _metadata: Given<IgnoredAny>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RateLimit {
    unit: Given<Scalar>,
    requests_per_unit: Given<Scalar>,
    unit_multiplier: Given<Scalar>,
    unlimited: Given<Scalar>,
    name: Given<Text>,
    replaces: Given<Replaces>,
    algorithm: Given<Scalar>,
    burst: Given<Scalar>,
    penalty: Given<PenaltySettings>,
    sensitive: Given<Scalar>,
    charge_denied: Given<Scalar>,
}

type Replaces = List<Given<Mapping<Replaced>>>;

#[derive(Default, Deserialize)]
#[serde(default)]
struct Replaced {
    name: Given<Text>,
}

/// What holds in the whole file.
#[derive(Clone, Copy)]
struct Defaults {
    algorithm: &'static Algorithm,
    charge_denied: bool,
}

/// The way from the root to a rule.
#[derive(Clone, Default)]
struct Trail {
    path: String,
    shared: Vec<Option<String>>,
}

/// The rules that a file has.
pub(crate) fn parse(name: &str, text: &[u8]) -> Result<Domain, Faults> {
    let file: Mapping<File> = yaml::read(name, text)?;
    let mut report = Report::of(name, text);
    let mut at = report.section("", None);
    let nothing = File::default();
    let file = at.fields(&file).unwrap_or(&nothing);
    let domain = at.get("domain", &file.domain, |domain| domain.bounded(1..=LONGEST));
    if file.domain.value().is_none() {
        at.fault("", None, "expected `domain`: what requests call these rules");
    }
    let compat =
        at.get("compat", &file.compat, |compat| compat.one_of(&[("envoyproxy", true), ("none", false)]));
    let bodies = [("none", Body::Envoys), ("compact", Body::Compact), ("structured", Body::Structured)];
    let body = at.get("over_limit_body", &file.over_limit_body, |body| body.one_of(&bodies));
    let headers = file.response_headers.value().and_then(|headers| {
        let mut at = at.section("response_headers", file.response_headers.place());
        let headers = at.fields(headers)?;
        Some(HeaderNames {
            limit: header(&mut at, "limit", &headers.limit, "RateLimit-Limit"),
            remaining: header(&mut at, "remaining", &headers.remaining, "RateLimit-Remaining"),
            reset: header(&mut at, "reset", &headers.reset, "RateLimit-Reset"),
        })
    });
    let algorithm = at.get("algorithm", &file.algorithm, algorithm).unwrap_or(BY_CALENDAR);
    let charge_denied = compat.unwrap_or_default();
    let mut tree = Node::default();
    let defaults = Defaults { algorithm, charge_denied };
    children(&mut tree, &file.descriptors, &Trail::default(), defaults, &mut at);
    let name = domain.unwrap_or_default();
    report.end(Domain { name, algorithm, charge_denied, headers, body: body.unwrap_or_default(), tree })
}

fn header(at: &mut Section<'_>, key: &str, given: &Given<Scalar>, default: &str) -> String {
    let read = |given: &Scalar| {
        let expected = "the name of a header: 1 to 128 letters, digits and hyphens";
        let name = given.text(expected)?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        let is_one = (1..=128).contains(&name.len()) && name.bytes().all(plain);
        if is_one { Ok(name.to_owned()) } else { Err(given.instead_of(expected)) }
    };
    at.get(key, given, read).unwrap_or_else(|| default.to_owned())
}

fn children(
    parent: &mut Node<Arc<DomainRule>>,
    given: &Descriptors,
    trail: &Trail,
    defaults: Defaults,
    above: &mut Section<'_>,
) {
    let Some(list) = given.value() else { return };
    let mut at = above.section("descriptors", given.place());
    let list = at.items(list);
    if trail.shared.len() == MOST_LEVELS && !list.is_empty() {
        at.fault("", None, format!("expected at most {MOST_LEVELS} levels of descriptors"));
        return;
    }
    for (place, child) in list.iter().enumerate() {
        let mut at = at.section(&place.to_string(), child.place());
        if let Some(settings) = child.value().and_then(|child| at.fields(child)) {
            descriptor(parent, settings, trail, defaults, &mut at);
        }
    }
}

fn descriptor(
    parent: &mut Node<Arc<DomainRule>>,
    given: &Descriptor,
    trail: &Trail,
    defaults: Defaults,
    at: &mut Section<'_>,
) {
    let key = at.get("key", &given.key, |key| key.bounded(1..=LONGEST));
    if given.key.value().is_none() {
        at.fault("", None, "expected `key`: that of the entry which leads here");
    }
    let value = at.get("value", &given.value, |value| value.bounded(0..=LONGEST));
    let value = value.filter(|value| !value.is_empty());
    let share = flag("share_threshold", &given.share_threshold, at);
    let shadow = flag("shadow_mode", &given.shadow_mode, at);
    let quota = flag("quota_mode", &given.quota_mode, at);
    flag("detailed_metric", &given.detailed_metric, at);
    flag("value_to_metric", &given.value_to_metric, at);
    if share && value.as_deref().and_then(Pattern::new).is_none() {
        let message = "does nothing without a wildcard; expected a `*` in `value`";
        at.fault("share_threshold", given.share_threshold.place(), message);
    }

    let trail = trail.then(key.as_deref().unwrap_or_default(), value.as_deref(), share);
    let mut node = Node::default();
    node.rule = rule(&given.rate_limit, (shadow, quota), &trail, defaults, at).map(Arc::new);
    children(&mut node, &given.descriptors, &trail, defaults, at);
    if let Some(key) = key
        && parent.insert(&key, value.as_deref(), node).is_err()
    {
        let (named, place) = match given.value.place() {
            Some(place) if value.is_some() => ("value", Some(place)),
            _ => ("key", given.key.place()),
        };
        at.fault(named, place, format!("`{}` is here twice; expected it once", yaml::printable(&trail.path)));
    }
}

impl Trail {
    fn then(&self, key: &str, value: Option<&str>, share: bool) -> Self {
        let Self { mut path, mut shared } = self.clone();
        if !path.is_empty() {
            path.push(',');
        }
        path.push_str(key);
        if let Some(value) = value {
            path.push('=');
            path.push_str(value);
        }
        shared.push(value.filter(|_| share).map(str::to_owned));
        Self { path, shared }
    }
}

fn flag(key: &str, given: &Given<Scalar>, at: &mut Section<'_>) -> bool {
    at.get(key, given, Scalar::flag).unwrap_or_default()
}

/// Nothing if there is none, or something is wrong with it.
fn rule(
    given: &Given<Mapping<RateLimit>>,
    (shadow, quota): (bool, bool),
    trail: &Trail,
    defaults: Defaults,
    above: &mut Section<'_>,
) -> Option<DomainRule> {
    let settings = given.value()?;
    let mut at = above.section("rate_limit", given.place());
    let before = at.len();
    let settings = at.fields(settings)?;
    let name = at.get("name", &settings.name, |name| name.bounded(0..=LONGEST)).unwrap_or_default();
    let replaces = replaces(&settings.replaces, &name, &mut at);
    let meter = if flag("unlimited", &settings.unlimited, &mut at) {
        unlimited(settings, &mut at);
        None
    } else {
        let mut meter = meter(settings, defaults, &mut at)?;
        meter.quota = quota && !shadow;
        meter.limited.shadow = shadow;
        Some(meter)
    };
    let Trail { path, shared } = trail.clone();
    at.sound_since(before).then_some(DomainRule {
        path,
        name,
        replaces,
        meter,
        shared,
        tally: Tally::default(),
    })
}

fn replaces(given: &Given<Replaces>, own: &str, at: &mut Section<'_>) -> Vec<String> {
    let mut names = Vec::new();
    let mut at = at.section("replaces", given.place());
    let list = given.value().map_or(&[][..], |list| at.items(list));
    for (place, replaced) in list.iter().enumerate() {
        let mut at = at.section(&place.to_string(), replaced.place());
        let Some(Replaced { name }) = replaced.value().and_then(|it| at.fields(it)) else { continue };
        if name.value().is_none() {
            at.fault("", None, "expected `name`: that of a rule");
        }
        match at.get("name", name, |name| name.bounded(1..=LONGEST)) {
            Some(other) if other == own => {
                let message = format!("the rule {own:?} would replace itself; expected the name of another");
                at.fault("name", name.place(), message);
            }
            other => names.extend(other),
        }
    }
    names
}

/// Nothing that limits stands beside `unlimited`.
fn unlimited(given: &RateLimit, at: &mut Section<'_>) {
    let limits = [
        ("unit", given.unit.place()),
        ("unit_multiplier", given.unit_multiplier.place()),
        ("algorithm", given.algorithm.place()),
        ("burst", given.burst.place()),
        ("penalty", given.penalty.place()),
    ];
    for (key, place) in limits.into_iter().filter(|(_, place)| place.is_some()) {
        at.fault(key, place, "does nothing beside `unlimited: true`; expected one or the other");
    }
}

/// Nothing if something is wrong.
fn meter(given: &RateLimit, defaults: Defaults, at: &mut Section<'_>) -> Option<Meter> {
    let before = at.len();
    let unit = at.get("unit", &given.unit, |unit| {
        let expected = format!("one of {}", Unit::NAMES);
        Unit::named(unit.text(&expected)?).ok_or_else(|| unit.instead_of(&expected))
    });
    let requests = at.get("requests_per_unit", &given.requests_per_unit, |n| n.within(0..=u32::MAX));
    let most = unit.map_or(u32::MAX, Unit::most);
    let multiplier = at.get("unit_multiplier", &given.unit_multiplier, |n| n.within(1..=most));
    let algorithm = at.get("algorithm", &given.algorithm, algorithm).unwrap_or(defaults.algorithm);
    let burst = at.get("burst", &given.burst, |burst| burst.within(1..=Limit::MOST_BURST));
    let penalty = penalty(&given.penalty, at);
    let sensitive = flag("sensitive", &given.sensitive, at);
    let charge_denied = at.get("charge_denied", &given.charge_denied, Scalar::flag);
    if given.unit.value().is_none() {
        at.fault("", None, format!("expected `unit`, one of {}, or `unlimited: true`", Unit::NAMES));
    }
    if given.requests_per_unit.value().is_none() {
        at.fault("", None, "expected `requests_per_unit`; 0 allows nothing");
    }
    if !at.sound_since(before) {
        return None;
    }
    let said = Said { requests: requests?, unit: unit?, multiplier };
    let mut meter = Meter::new(said, burst, algorithm)
        .map_err(|error| {
            let (key, blamed) = match error {
                _ if given.burst.place().is_some() => ("burst", given.burst.place()),
                LimitError::Period { .. } => ("unit", given.unit.place()),
                _ => ("requests_per_unit", given.requests_per_unit.place()),
            };
            at.fault(key, blamed, format!("{}: {error}", algorithm.name));
        })
        .ok()?;
    meter.charge_denied = charge_denied.unwrap_or(defaults.charge_denied);
    meter.limited = Limited { sensitive, penalty, ..meter.limited };
    Some(meter)
}
