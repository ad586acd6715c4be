//! The metrics: their names, what they count, and the counters of a rule. No key of a caller is ever in one.

use metrics::{Counter, Label, counter, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use std::sync::OnceLock;

/// Calls decided, by class and verdict.
pub const DECISIONS: &str = "tollgate_decisions_total";
/// Descriptors decided, by domain, rule and verdict.
pub const DESCRIPTORS: &str = "tollgate_descriptors_total";
/// Requests that could not be decided, by why.
pub const REFUSED: &str = "tollgate_refused_total";
/// Tokens that went out in leases.
pub const LENT: &str = "tollgate_lent_tokens_total";
/// Tokens of leases that came back.
pub const RETURNED: &str = "tollgate_returned_tokens_total";
/// Requests shed, by what was full.
pub const SHED: &str = "tollgate_shed_total";
/// Calls in flight.
pub const IN_FLIGHT: &str = "tollgate_in_flight";
/// Bytes of messages that are not yet whole.
pub const MESSAGE_BYTES: &str = "tollgate_message_bytes";
/// Connections that are open.
pub const CONNECTIONS: &str = "tollgate_connections";
/// Connections that were refused.
pub const CONNECTIONS_REFUSED: &str = "tollgate_connections_refused_total";
/// Is it deciding without its store?
pub const DEGRADED: &str = "tollgate_degraded";
/// Calls decided without the store.
pub const ALONE: &str = "tollgate_degraded_calls_total";
/// Calls that the store did not answer, by why.
pub const STORE_ERRORS: &str = "tollgate_store_errors_total";
/// How long script calls take.
pub const STORE_SECONDS: &str = "tollgate_store_seconds";
/// How many instances share the store.
pub const INSTANCES: &str = "tollgate_instances";
/// Entries that memory had no room for.
pub const DROPPED: &str = "tollgate_memory_dropped_total";
/// What is wrong with files that were read.
pub const RULES_WRONG: &str = "tollgate_rules_wrong";

/// Upper ends of [`STORE_SECONDS`]. The default deadline is one of them.
const SECONDS: [f64; 11] = [0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

/// Starts to count, for the whole process.
///
/// # Errors
/// It counts already.
pub fn start() -> Result<PrometheusHandle, BuildError> {
    let builder = PrometheusBuilder::new();
    let handle =
        builder.set_buckets_for_metric(Matcher::Full(STORE_SECONDS.into()), &SECONDS)?.install_recorder()?;
    describe_counter!(DECISIONS, "Calls decided, by class and verdict");
    describe_counter!(DESCRIPTORS, "Descriptors decided, by domain, rule and verdict");
    describe_counter!(REFUSED, "Requests that could not be decided, by why");
    describe_counter!(LENT, "Tokens that went out in leases");
    describe_counter!(RETURNED, "Tokens of leases that came back");
    describe_counter!(SHED, "Requests shed, by what was full");
    describe_gauge!(IN_FLIGHT, "Calls in flight");
    describe_gauge!(
        MESSAGE_BYTES,
        "Bytes of messages that are not yet whole, beyond the first 4 KiB of each"
    );
    describe_gauge!(CONNECTIONS, "Connections that are open");
    describe_counter!(CONNECTIONS_REFUSED, "Connections that were refused");
    describe_gauge!(DEGRADED, "1 while calls are decided without the store");
    describe_counter!(ALONE, "Calls decided without the store");
    describe_counter!(STORE_ERRORS, "Calls that the store did not answer, by why");
    describe_histogram!(STORE_SECONDS, "How long script calls to Redis take");
    describe_gauge!(INSTANCES, "Instances that share the store, as far as is known");
    describe_counter!(DROPPED, "Entries that memory had no room for, before their end");
    describe_gauge!(RULES_WRONG, "What is wrong with files that were read, and does not hold");
    // What never happened is told too, so that the first time can be seen.
    for name in [LENT, RETURNED, CONNECTIONS_REFUSED, ALONE, DROPPED] {
        counter!(name).increment(0);
    }
    Ok(handle)
}

/// As many as a gauge shows.
#[must_use]
pub fn many(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It may pass.
    Allowed,
    /// It may pass, as the rule is only watched; else it would not.
    Watched,
    /// Its bucket does not hold the cost.
    OverLimit,
    /// Its key is blocked.
    Blocked,
    /// No authority could be asked, and the rule is a sensitive one.
    Unavailable,
}

impl Outcome {
    const ALL: usize = 5;

    const fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allow",
            Self::Watched => "shadow_deny",
            Self::OverLimit => "over_limit",
            Self::Blocked => "blocked",
            Self::Unavailable => "unavailable",
        }
    }
}

/// Counts what becomes of the calls that a rule decides. A rule that decides none has no counters.
#[derive(Clone, Debug, Default)]
pub struct Tally([OnceLock<Counter>; Outcome::ALL]);

impl Tally {
    /// One more. The first time, `labels` are what the metric `name` calls the rule.
    #[expect(clippy::as_conversions, reason = "the place of an outcome")]
    pub fn count(&self, outcome: Outcome, name: &'static str, labels: impl FnOnce() -> Vec<Label>) {
        let Some(counter) = self.0.get(outcome as usize) else { return };
        let counter = counter.get_or_init(|| {
            let mut labels = labels();
            labels.push(Label::from_static_parts("verdict", outcome.name()));
            counter!(name, labels)
        });
        counter.increment(1);
    }
}
