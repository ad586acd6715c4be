//! The rules, compiled and immutable: which buckets a request hits, and what each costs.

pub mod domain;
pub mod file;
pub mod files;
pub mod matcher;
pub mod unit;

use crate::algorithm::Algorithm;
use crate::limit::{Cost, Limit};
use crate::penalty::Penalty;
use crate::telemetry::metric::{self, Outcome, Tally};
use arc_swap::ArcSwap;
use domain::Domain;
use metrics::Label;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The class that decides for classes that have no rule of their own.
pub const DEFAULT_CLASS: &str = "default";

/// What a class of calls may do.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The class that it is for.
    pub class: String,
    /// `None`: never limited.
    pub limited: Option<Limited>,
    /// What it decided.
    pub tally: Tally,
}

impl Rule {
    /// A rule that has decided nothing yet.
    #[must_use]
    pub fn new(class: impl Into<String>, limited: Option<Limited>) -> Self {
        Self { class: class.into(), limited, tally: Tally::default() }
    }

    /// One more call became that.
    pub fn count(&self, outcome: Outcome) {
        self.tally.count(outcome, metric::DECISIONS, || vec![Label::new("class", self.class.clone())]);
    }
}

/// A limit and what surrounds it.
#[derive(Clone, Debug)]
pub struct Limited {
    /// How much.
    pub limit: Limit,
    /// How it is counted.
    pub algorithm: &'static Algorithm,
    /// What one call costs unless it says otherwise; at least one token, at most the burst.
    pub cost: Cost,
    /// Denied when no authority can be asked, and never leased.
    pub sensitive: bool,
    /// What denials lead to.
    pub penalty: Option<Penalty>,
    /// Decided and counted, but not enforced.
    pub shadow: bool,
    /// Where calls queue: are they told how long to wait for their turn? If not, the queue is a meter.
    pub wait: bool,
}

impl Limited {
    /// Must a call be denied when no authority can be asked? What is only watched is not.
    #[must_use]
    pub const fn is_sensitive(&self) -> bool {
        self.sensitive && !self.shadow
    }
}

/// All rules.
#[derive(Clone, Debug)]
pub struct Rules {
    classes: BTreeMap<String, Arc<Rule>>,
    domains: BTreeMap<String, Arc<Domain>>,
}

/// The rules that hold now. Whoever has this sees them change.
pub type Live = Arc<ArcSwap<Rules>>;

impl Rules {
    /// As rules that may change.
    #[must_use]
    pub fn live(self) -> Live {
        Arc::new(ArcSwap::from_pointee(self))
    }

    /// These rules; the later of two for one class holds.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Self {
        let classes = rules.into_iter().map(|rule| (rule.class.clone(), Arc::new(rule))).collect();
        Self { classes, domains: BTreeMap::new() }
    }

    /// The same classes, and these domains.
    #[must_use]
    pub fn with(&self, domains: impl IntoIterator<Item = Arc<Domain>>) -> Self {
        let domains = domains.into_iter().map(|domain| (domain.name.clone(), domain)).collect();
        Self { classes: self.classes.clone(), domains }
    }

    /// The rules for descriptors of a domain.
    #[must_use]
    pub fn domain(&self, name: &str) -> Option<&Arc<Domain>> {
        self.domains.get(name)
    }

    /// Every domain, by name.
    pub fn domains(&self) -> impl Iterator<Item = &Domain> {
        self.domains.values().map(AsRef::as_ref)
    }

    /// The rule for a class: its own, or that of the class `default`.
    #[must_use]
    pub fn class(&self, class: &str) -> Option<&Arc<Rule>> {
        self.classes.get(class).or_else(|| self.classes.get(DEFAULT_CLASS))
    }

    /// Every rule, by class.
    pub fn iter(&self) -> impl Iterator<Item = &Rule> {
        self.classes.values().map(AsRef::as_ref)
    }
}

/// One line for people: `login: 5 each 1m, burst 5, cost 1, token_bucket, sensitive`.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { class, limited, .. } = self;
        let Some(limited) = limited else { return write!(f, "{class}: never limited") };
        let rate = limited.limit.rate();
        let period = humantime::format_duration(rate.period());
        write!(f, "{class}: {} each {period}, burst {}", rate.count(), limited.limit.burst())?;
        write!(f, ", cost {}, {}", limited.cost.get(), limited.algorithm.name)?;
        let flags = [
            (limited.sensitive, ", sensitive"),
            (limited.penalty.is_some(), ", penalty"),
            (limited.shadow, ", shadow"),
        ];
        flags.iter().filter(|(on, _)| *on).try_for_each(|(_, flag)| f.write_str(flag))
    }
}
