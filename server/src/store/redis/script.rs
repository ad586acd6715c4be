//! The script, and how calls are said to it. The layout is told at the top of `decide.lua`.

use crate::algorithm::{self, Algorithm};
use crate::limit::{Cost, Decision, Limit, Reason, Timestamp, micros};
use crate::penalty::{self, Penalty};
use crate::request::{Hit, Settlement};
use crate::store::StoreError;
use deadpool_redis::redis::Script;
use serde::Serialize;
use std::fmt::Write as _;
use std::sync::LazyLock;
use std::time::Duration;

/// Milliseconds that keys outlive their use when tests move the clock: real time must not end what that
/// clock still needs.
const LINGER: u64 = 3_600_000;

/// The script: what the algorithms and penalties say in Lua, put before `decide.lua`.
pub(super) static SCRIPT: LazyLock<Script> = LazyLock::new(|| {
    let mut text = String::from(
        "local function div_ceil(a, b) return math.ceil(a / b) end\n\
         local function whole(number) return string.format('%.0f', number) end\n\
         local algorithms = {}\n",
    );
    let mut chunk = |name: &str, lua: &str| {
        // Writing to a string can not fail.
        writeln!(text, "{name} = (function()\n{lua}\nend)()").unwrap_or_default();
    };
    for (name, lua) in algorithm::SHARED_LUA {
        chunk(&format!("local {name}"), lua);
    }
    for Algorithm { tag, lua, .. } in algorithm::ALL {
        chunk(&format!("algorithms[{tag}]"), lua);
    }
    chunk("local strike", penalty::LUA);
    Script::new(&(text + include_str!("../decide.lua")))
});

/// Numbers of one hit, as the script takes and answers them.
pub(super) type Row = Vec<u64>;

/// What a hit shares with others of the same rule, told once a batch.
#[derive(Clone, Debug, PartialEq)]
struct RuleRow {
    algorithm: u8,
    limit: Limit,
    shadow: bool,
    penalty: Option<Penalty>,
}

impl RuleRow {
    fn wire(&self) -> impl Serialize + use<> {
        let penalty = self.penalty.map_or([0; 4], |p| {
            [u64::from(p.strikes()), micros(p.window()), micros(p.base()), micros(p.cap())]
        });
        (
            self.algorithm,
            self.limit.burst(),
            self.limit.refill(),
            self.limit.scale(),
            micros(self.limit.window()),
            u8::from(self.shadow),
            penalty,
        )
    }
}

/// What a call is for.
type Kind = u8;
const DECIDE: Kind = 0;
const SETTLE: Kind = 1;

/// One call of the store, ready to be sent.
#[derive(Debug)]
pub(super) struct Call {
    kind: Kind,
    keys: Vec<String>,
    hits: Vec<(RuleRow, Row)>,
}

impl Call {
    pub(super) fn decide(prefix: &str, hits: &[Hit]) -> Self {
        let mut keys = Vec::with_capacity(3 * hits.len());
        let mut rows = Vec::with_capacity(hits.len());
        for hit in hits {
            let subject = hit.bucket.subject();
            keys.push(format!("{prefix}:block:{subject}"));
            keys.push(format!("{prefix}:strikes:{subject}"));
            keys.push(format!("{prefix}:{}", hit.bucket.as_str()));
            let mut valid_for = 0;
            if let Some(lease) = &hit.lease {
                keys.push(format!("{prefix}:lease:{}", lease.id));
                valid_for = micros(lease.valid_for).max(1);
            }
            let strikes = hit.strikes.as_ref();
            let rule = RuleRow {
                algorithm: hit.algorithm.tag,
                limit: hit.limit,
                shadow: hit.shadow,
                penalty: strikes.map(|strikes| strikes.penalty),
            };
            rows.push((
                rule,
                vec![
                    hit.want.at_least.get(),
                    hit.want.at_most.get(),
                    strikes.map_or(0, |strikes| strikes.reported.into()),
                    strikes.is_some_and(|strikes| strikes.on_denial).into(),
                    valid_for,
                ],
            ));
        }
        Self { kind: DECIDE, keys, hits: rows }
    }

    pub(super) fn settle(prefix: &str, settlement: &Settlement) -> Self {
        let Settlement { id, limit, algorithm, unused } = settlement;
        let rule = RuleRow { algorithm: algorithm.tag, limit: *limit, shadow: false, penalty: None };
        Self {
            kind: SETTLE,
            keys: vec![format!("{prefix}:lease:{id}"), format!("{prefix}:{}", id.bucket().as_str())],
            hits: vec![(rule, vec![unused.get()])],
        }
    }
}

/// Calls that go out together.
pub(super) struct Batch<'c> {
    keys: Vec<&'c str>,
    payload: Vec<u8>,
}

impl<'c> Batch<'c> {
    pub(super) fn new(
        now: Option<Timestamp>,
        calls: impl Iterator<Item = &'c Call>,
    ) -> Result<Self, StoreError> {
        let mut keys = Vec::new();
        let mut rules: Vec<&RuleRow> = Vec::new();
        let mut wire = Vec::new();
        for call in calls {
            keys.extend(call.keys.iter().map(String::as_str));
            let mut rows = Vec::with_capacity(call.hits.len());
            for (rule, row) in &call.hits {
                let place = rules.iter().position(|known| *known == rule).unwrap_or_else(|| {
                    rules.push(rule);
                    rules.len() - 1
                });
                let mut numbers = vec![u64::try_from(place + 1).unwrap_or(u64::MAX)];
                numbers.extend(row);
                rows.push(numbers);
            }
            wire.push((call.kind, rows, call.keys.len()));
        }
        let rules: Vec<_> = rules.into_iter().map(RuleRow::wire).collect();
        let linger = if now.is_some() { LINGER } else { 0 };
        let now = now.map_or(0, Timestamp::as_micros);
        let payload = rmp_serde::to_vec(&(now, linger, rules, wire))
            .map_err(|error| StoreError::Failed(format!("the calls can not be packed: {error}")))?;
        Ok(Self { keys, payload })
    }

    pub(super) fn keys(&self) -> &[&'c str] {
        &self.keys
    }

    pub(super) fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// The answers to the calls, in their order.
    pub(super) fn answers(reply: &[u8]) -> Result<Vec<Result<Vec<Row>, StoreError>>, StoreError> {
        let answers: Vec<(String, Vec<Row>)> = rmp_serde::from_slice(reply)
            .map_err(|error| StoreError::Failed(format!("an answer that can not be read: {error}")))?;
        let each = |(error, rows): (String, Vec<Row>)| {
            if error.is_empty() { Ok(rows) } else { Err(StoreError::Failed(error)) }
        };
        Ok(answers.into_iter().map(each).collect())
    }
}

/// Reads the row of one decided hit.
pub(super) fn decision(row: &Row) -> Result<Decision, StoreError> {
    let &[code, granted, remaining, retry_after, reset_after, wait, replaced] = row.as_slice() else {
        return Err(StoreError::Failed(format!("a decision of {} numbers", row.len())));
    };
    let denied = match code {
        0 => None,
        1 => Some(Reason::OverLimit),
        2 => Some(Reason::Blocked),
        _ => return Err(StoreError::Failed(format!("a decision with code {code}"))),
    };
    Ok(Decision {
        denied,
        granted: Cost::new(granted),
        remaining,
        retry_after: Duration::from_micros(retry_after),
        reset_after: Duration::from_micros(reset_after),
        wait: Duration::from_micros(wait),
        replaced: replaced == 1,
    })
}
