//! The rules of one of Envoy's domains, compiled.

pub mod file;

use super::Limited;
use super::matcher::Node;
use super::unit::Unit;
use crate::algorithm::{Algorithm, BY_CALENDAR};
use crate::limit::{Cost, Limit, LimitError, Rate};
use crate::telemetry::metric::{self, Outcome, Tally};
use metrics::Label;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Rules have at most so many levels.
pub const MOST_LEVELS: usize = 16;

/// A set of rules for descriptors, and how its answers look.
#[derive(Clone, Debug)]
pub struct Domain {
    /// What requests call it.
    pub name: String,
    /// How limits are counted that come with a request.
    pub algorithm: &'static Algorithm,
    /// Is a call charged on every bucket even if one denies it, as envoyproxy/ratelimit does?
    pub charge_denied: bool,
    /// The names of the response headers, if Envoy is to add some.
    pub headers: Option<HeaderNames>,
    /// The body of a 429.
    pub body: Body,
    /// The rules.
    pub tree: Node<Arc<DomainRule>>,
}

/// The headers that tell a caller where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderNames {
    /// How much a window allows.
    pub limit: String,
    /// How much of it is left.
    pub remaining: String,
    /// When that changes.
    pub reset: String,
}

/// What a denied caller reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Body {
    /// Whatever Envoy says.
    #[default]
    Envoys,
    /// `{"error":"rate_limited","retry_after":n}`
    Compact,
    /// `{"error":{"code":"RATE_LIMITED","message":"…"}}`
    Structured,
}

/// What holds for descriptors that lead to it.
#[derive(Clone, Debug)]
pub struct DomainRule {
    /// For people: `key1=value1,key2`, as the file has it.
    pub path: String,
    /// What answers call the limit; empty for nothing.
    pub name: String,
    /// The names of rules that do not hold for a request that this one is met by.
    pub replaces: Vec<String>,
    /// `None`: unlimited.
    pub meter: Option<Meter>,
    /// On each level, the wildcard whose values share the bucket.
    pub shared: Vec<Option<String>>,
    /// What it decided.
    pub tally: Tally,
}

impl DomainRule {
    /// One more descriptor of that domain became that.
    pub fn count(&self, domain: &str, outcome: Outcome) {
        self.tally.count(outcome, metric::DESCRIPTORS, || {
            vec![Label::new("domain", domain.to_owned()), Label::new("rule", self.path.clone())]
        });
    }
}

/// How much, as it was said and as it is decided.
#[derive(Clone, Debug)]
pub struct Meter {
    /// As the rule or the request has it.
    pub said: Said,
    /// What is decided. Of a rule that allows nothing it is a bucket of one.
    pub limited: Limited,
    /// One of several ways to pay: only all such rules of a request together deny it.
    pub quota: bool,
    /// Is a call charged even if it is denied?
    pub charge_denied: bool,
}

/// A limit in Envoy's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// How much; 0 allows nothing.
    pub requests: u32,
    /// Each so long.
    pub unit: Unit,
    /// So many units, if more than one was spoken of.
    pub multiplier: Option<u32>,
}

impl Said {
    /// The length of the window.
    #[must_use]
    pub fn window(&self) -> Duration {
        self.unit.times(self.multiplier.unwrap_or(1))
    }

    /// What an algorithm decides by.
    ///
    /// # Errors
    /// The algorithm can not keep such a limit.
    pub fn limit(&self, burst: Option<u64>, algorithm: &Algorithm) -> Result<Limit, LimitError> {
        let requests = u64::from(self.requests);
        let flowing = Rate::new(requests, self.window())
            .and_then(|rate| super::file::limit(rate, burst.unwrap_or(requests), algorithm));
        match flowing {
            // Whoever only counts has wider bounds.
            Err(error) if burst.is_none() => {
                let counted = Limit::per_window(requests, self.window());
                let counted = counted.and_then(|limit| (algorithm.check)(&limit).map(|()| limit));
                counted.map_err(|counts| if counts == LimitError::NoFlow { error } else { counts })
            }
            limit => limit,
        }
    }
}

impl Meter {
    /// What such a limit is decided by, and nothing around it.
    ///
    /// # Errors
    /// The algorithm can not keep it.
    pub fn new(said: Said, burst: Option<u64>, algorithm: &'static Algorithm) -> Result<Self, LimitError> {
        let (limit, algorithm) = match said.requests {
            // Two of a bucket of one are never there, and the wait is for the end of the window.
            0 => (Limit::per_window(1, said.window())?, BY_CALENDAR),
            _ => (said.limit(burst, algorithm)?, algorithm),
        };
        let limited = Limited {
            limit,
            algorithm,
            cost: Cost::ONE,
            sensitive: false,
            penalty: None,
            shadow: false,
            wait: false,
        };
        Ok(Self { said, limited, quota: false, charge_denied: false })
    }
}

/// One line for people: `5 each minute, token_bucket, burst 9, sensitive`.
impl fmt::Display for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { said, limited, quota, charge_denied } = self;
        let window = match (said.multiplier, said.unit.name()) {
            (None | Some(1), unit) => unit.to_owned(),
            (Some(units), unit) => format!("{units} {unit}s"),
        };
        write!(f, "{} each {window}, {}", said.requests, limited.algorithm.name)?;
        if said.requests > 0 && limited.limit.burst() != u64::from(said.requests) {
            write!(f, ", burst {}", limited.limit.burst())?;
        }
        let flags = [
            (limited.sensitive, ", sensitive"),
            (limited.penalty.is_some(), ", penalty"),
            (limited.shadow, ", shadow"),
            (*quota, ", quota"),
            (*charge_denied, ", charged when denied"),
        ];
        flags.iter().filter(|(on, _)| *on).try_for_each(|(_, flag)| f.write_str(flag))
    }
}
