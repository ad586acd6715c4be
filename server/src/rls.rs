//! Envoy's messages to requests, and answers to Envoy's messages: the same over gRPC and over HTTP.

use crate::engine::Refusal;
use crate::request::{Described, Descriptor, Hits, Joined, Status as Of};
use crate::rules::domain::{Body, DomainRule, HeaderNames, Said};
use crate::rules::unit::Unit;
use prost_types::value::Kind;
use prost_types::{Duration, Struct, Value};
use tokio::time::Instant;
use tollgate_proto::envoy::config::core::v3::HeaderValue;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit, rate_limit,
};
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_proto::envoy::r#type::v3::RateLimitUnit;

/// What is asked.
///
/// # Errors
/// A limit of the request's own that can not be.
pub(crate) fn described(request: RateLimitRequest, deadline: Option<Instant>) -> Result<Described, Refusal> {
    let RateLimitRequest { domain, descriptors, hits_addend } = request;
    let hits = hits_addend.max(1).into();
    let descriptors = descriptors.into_iter().enumerate().map(|(place, it)| descriptor(place, it, hits));
    Ok(Described { domain, descriptors: descriptors.collect::<Result<_, _>>()?, deadline })
}

fn descriptor(place: usize, it: RateLimitDescriptor, hits: u64) -> Result<Descriptor, Refusal> {
    let hits = it.hits_addend.unwrap_or(hits);
    let limit = it.limit.map(said).transpose();
    Ok(Descriptor {
        entries: it.entries.into_iter().map(|entry| (entry.key, entry.value)).collect(),
        hits: if it.is_negative_hits && hits > 0 { Hits::GiveBack(hits) } else { Hits::Take(hits) },
        limit: limit.map_err(|wrong| Refusal::Override { place, wrong })?,
    })
}

fn said(it: RateLimitOverride) -> Result<Said, String> {
    let unit = match RateLimitUnit::try_from(it.unit) {
        Ok(RateLimitUnit::Second) => Unit::Second,
        Ok(RateLimitUnit::Minute) => Unit::Minute,
        Ok(RateLimitUnit::Hour) => Unit::Hour,
        Ok(RateLimitUnit::Day) => Unit::Day,
        Ok(RateLimitUnit::Month) => Unit::Month,
        Ok(RateLimitUnit::Year) => Unit::Year,
        Ok(RateLimitUnit::Unknown) | Err(_) => {
            return Err(format!("a unit of {}; expected SECOND to YEAR, 1 to 6", it.unit));
        }
    };
    match it.unit_multiplier {
        Some(0) => Err("a unit_multiplier of 0; expected at least 1".to_owned()),
        Some(n) if n > unit.most() => {
            let (name, most) = (unit.name(), unit.most());
            Err(format!("a unit_multiplier of {n}; expected at most {most} for the unit {name}"))
        }
        multiplier => Ok(Said { requests: it.requests_per_unit, unit, multiplier }),
    }
}

impl From<Joined> for RateLimitResponse {
    fn from(joined: Joined) -> Self {
        let Joined { domain, denied_by, degraded, statuses, .. } = joined;
        let mut response = Self {
            overall_code: if denied_by.is_some() { Code::OverLimit } else { Code::Ok }.into(),
            statuses: statuses.into_iter().map(DescriptorStatus::from).collect(),
            ..Self::default()
        };
        let Some(domain) = domain else { return response };
        if let Some(names) = &domain.headers {
            response.response_headers_to_add = headers(names, &response.statuses);
        }
        let mut metadata = Metadata::default();
        if degraded {
            metadata.put("degraded", Kind::BoolValue(true));
        }
        if let Some(rule) = denied_by {
            let body = body(domain.body, &response.statuses);
            if !body.is_empty() {
                response.response_headers_to_add.push(header("content-type", &"application/json"));
            }
            response.raw_body = body.into();
            metadata.put("domain", Kind::StringValue(domain.name.clone()));
            metadata.put("rule", Kind::StringValue(rule));
        }
        response.dynamic_metadata = metadata.0;
        response
    }
}

impl From<Of> for DescriptorStatus {
    fn from(status: Of) -> Self {
        match status {
            Of::Free => Self { code: Code::Ok.into(), ..Self::default() },
            Of::Unlimited => Self { code: Code::Ok.into(), limit_remaining: u32::MAX, ..Self::default() },
            Of::Met { over, limit, rule, remaining, reset } => Self {
                code: if over { Code::OverLimit } else { Code::Ok }.into(),
                current_limit: Some(current(&limit, rule.as_deref())),
                limit_remaining: u32::try_from(remaining).unwrap_or(u32::MAX),
                duration_until_reset: Some(Duration { seconds: whole_seconds(reset), nanos: 0 }),
                quota: None,
            },
        }
    }
}

fn current(limit: &Said, rule: Option<&DomainRule>) -> RateLimit {
    let unit = match limit.unit {
        Unit::Second => rate_limit::Unit::Second,
        Unit::Minute => rate_limit::Unit::Minute,
        Unit::Hour => rate_limit::Unit::Hour,
        Unit::Day => rate_limit::Unit::Day,
        Unit::Week => rate_limit::Unit::Week,
        Unit::Month => rate_limit::Unit::Month,
        Unit::Year => rate_limit::Unit::Year,
    };
    RateLimit {
        requests_per_unit: limit.requests,
        unit: unit.into(),
        name: rule.map(|rule| rule.name.clone()).unwrap_or_default(),
        unit_multiplier: limit.multiplier,
    }
}

/// Rounded up: Envoy would cut a part of one off.
fn whole_seconds(span: std::time::Duration) -> i64 {
    let seconds = span.as_secs() + u64::from(span.subsec_nanos() > 0);
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

/// Where a caller stands: the status with the least left.
fn headers(names: &HeaderNames, statuses: &[DescriptorStatus]) -> Vec<HeaderValue> {
    let limited = statuses.iter().filter_map(|status| Some((status, status.current_limit.as_ref()?)));
    let Some((status, limit)) = limited.min_by_key(|(status, _)| status.limit_remaining) else {
        return Vec::new();
    };
    let reset = status.duration_until_reset.as_ref().map_or(0, |reset| reset.seconds);
    vec![
        header(&names.limit, &limit.requests_per_unit),
        header(&names.remaining, &status.limit_remaining),
        header(&names.reset, &reset),
    ]
}

fn header(key: &str, value: &impl ToString) -> HeaderValue {
    HeaderValue { key: key.to_owned(), value: value.to_string(), raw_value: Vec::new() }
}

fn body(body: Body, statuses: &[DescriptorStatus]) -> String {
    let over = statuses.iter().filter(|status| status.code() == Code::OverLimit);
    let resets = over.filter_map(|status| status.duration_until_reset.as_ref());
    let seconds = resets.map(|reset| reset.seconds).max().unwrap_or(1);
    match body {
        Body::Envoys => String::new(),
        Body::Compact => format!(r#"{{"error":"rate_limited","retry_after":{seconds}}}"#),
        Body::Structured => {
            let unit = if seconds == 1 { "second" } else { "seconds" };
            let message = format!("Too many requests. Try again in {seconds} {unit}.");
            format!(r#"{{"error":{{"code":"RATE_LIMITED","message":"{message}"}}}}"#)
        }
    }
}

/// What Envoy's filters and logs may read; nothing unless there is something to say.
#[derive(Default)]
struct Metadata(Option<Struct>);

impl Metadata {
    fn put(&mut self, key: &str, kind: Kind) {
        self.0.get_or_insert_default().fields.insert(key.to_owned(), Value { kind: Some(kind) });
    }
}
