//! What envoyproxy/ratelimit answers, vector by vector, on every store: with `compat: envoyproxy`, and by default,
//! where only what is charged differs.

use super::{Served, descriptor, given_back, hits, limited};
use crate::stores::{Kind, kinds_and_topologies};
use crate::support::Engine;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_proto::envoy::service::ratelimit::v3::RateLimitResponse;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use tollgate_server::clock::Clock;
use tollgate_server::limit::Timestamp;

const C: &str = "
domain: c
descriptors:
  - key: key1
    value: value1
    descriptors:
      - { key: subkey1, rate_limit: { unit: second, requests_per_unit: 5 } }
      - { key: subkey1, value: subvalue1, rate_limit: { unit: SECOND, requests_per_unit: 10 } }
  - { key: key2, rate_limit: { unit: minute, requests_per_unit: 20 } }
  - { key: key2, value: value2, rate_limit: { unit: minute, requests_per_unit: 30 } }
  - { key: key2, value: value3 }
  - { key: key3, rate_limit: { unit: Hour, requests_per_unit: 1 } }
  - { key: key4, rate_limit: { unit: day, requests_per_unit: 1, name: key4_rate_limit } }
  - key: key5
    value: value5
    rate_limit: { unit: day, requests_per_unit: 15 }
    descriptors:
      - { key: subkey5, value: subvalue5, rate_limit: { unit: day, requests_per_unit: 25 } }
  - { key: key6, rate_limit: { unlimited: true } }
";

const MORE: &str = "
domain: more
descriptors:
  - { key: wild, value: foo*, rate_limit: { unit: minute, requests_per_unit: 20 } }
  - { key: noWild, value: foo, rate_limit: { unit: minute, requests_per_unit: 20 } }
  - { key: files, value: files/*, share_threshold: true, rate_limit: { unit: hour, requests_per_unit: 10 } }
  - { key: second, rate_limit: { unit: second, requests_per_unit: 10 } }
  - { key: twenty, rate_limit: { unit: second, requests_per_unit: 20 } }
  - { key: minute, rate_limit: { unit: minute, requests_per_unit: 10 } }
  - { key: hour, rate_limit: { unit: hour, requests_per_unit: 10 } }
  - { key: fifteen, rate_limit: { unit: hour, requests_per_unit: 15 } }
  - { key: key2, rate_limit: { unit: minute, requests_per_unit: 20 } }
  - { key: key9, rate_limit: { unit: hour, requests_per_unit: 10 } }
  - { key: none, rate_limit: { unit: minute, requests_per_unit: 0 } }
  - { key: quota, quota_mode: true, rate_limit: { unit: minute, requests_per_unit: 1 } }
  - { key: plain, rate_limit: { unit: minute, requests_per_unit: 1 } }
  - { key: shadow, shadow_mode: true, rate_limit: { unit: minute, requests_per_unit: 1 } }
  - { key: five, rate_limit: { unit: minute, unit_multiplier: 5, requests_per_unit: 3 } }
  - { key: week, rate_limit: { unit: week, requests_per_unit: 4294967295 } }
  - { key: admin, rate_limit: { unlimited: true, replaces: [ { name: everybody } ] } }
  - { key: user, rate_limit: { unit: minute, requests_per_unit: 1, name: everybody } }
";

/// An OK or an OVER, then limit/unit, remaining and reset where there are any: `OK 10/s 5 1`.
fn told(status: &DescriptorStatus) -> String {
    let code = match status.code() {
        Code::Ok => "OK",
        Code::OverLimit => "OVER",
        Code::Unknown => "UNKNOWN",
    };
    match (&status.current_limit, &status.duration_until_reset) {
        (Some(limit), Some(reset)) => {
            assert_eq!(reset.nanos, 0, "whole seconds");
            let unit = match limit.unit() {
                Unit::Unknown => "?",
                Unit::Second => "s",
                Unit::Minute => "min",
                Unit::Hour => "h",
                Unit::Day => "d",
                Unit::Month => "mon",
                Unit::Year => "y",
                Unit::Week => "w",
            };
            let name = if limit.name.is_empty() { String::new() } else { format!(" {}", limit.name) };
            let units = limit.unit_multiplier.map_or_else(String::new, |n| n.to_string());
            let (requests, remaining) = (limit.requests_per_unit, status.limit_remaining);
            format!("{code} {requests}/{units}{unit} {remaining} {}{name}", reset.seconds)
        }
        (None, None) if status.limit_remaining == 0 => code.to_owned(),
        (None, None) => format!("{code} {}", status.limit_remaining),
        _ => panic!("a limit without a reset, or the other way round: {status:?}"),
    }
}

fn all(response: &RateLimitResponse) -> String {
    let statuses: Vec<_> = response.statuses.iter().map(told).collect();
    let overall = if response.overall_code() == Code::OverLimit { "OVER" } else { "OK" };
    format!("{overall}: {}", statuses.join(" | "))
}

/// The server by either charging, and what it was asked.
struct Trace {
    served: Served,
    clock: Clock,
    compat: bool,
    name: String,
}

impl Trace {
    fn at(&self, seconds: u64) {
        self.clock.set(Timestamp::from_micros(seconds * 1_000_000));
    }

    async fn of(&self, domain: &str, descriptors: Vec<RateLimitDescriptor>, hits: u32) -> String {
        all(&self.served.ask(domain, descriptors, hits).await)
    }

    async fn asks(&self, entries: &str, expected: &str) {
        let (domain, entries) = entries.split_once('/').unwrap();
        let got = self.of(domain, vec![descriptor(entries)], 0).await;
        let expected = format!("{}: {expected}", expected.split(' ').next().unwrap());
        assert_eq!(got, expected, "{}: {domain}: {entries}", self.name);
    }

    async fn takes(&self, entries: &str, cost: u32, expected: &str) {
        let (domain, entries) = entries.split_once('/').unwrap();
        let got = self.of(domain, vec![hits(cost.into(), descriptor(entries))], 0).await;
        let expected = format!("{}: {expected}", expected.split(' ').next().unwrap());
        assert_eq!(got, expected, "{}: {cost} of {domain}: {entries}", self.name);
    }

    async fn all_of(&self, entries: &[&str], expected: &str) {
        let descriptors = entries.iter().map(|entries| descriptor(entries)).collect();
        let got = self.of("more", descriptors, 0).await;
        assert_eq!(got, expected, "{}: {entries:?}", self.name);
    }
}

/// Runs it on every store by both ways to charge.
async fn on_each(run: impl AsyncFn(&Trace)) {
    for kind in kinds_and_topologies() {
        for compat in [true, false] {
            // A cluster takes seconds to start: each engine's has one of the two.
            let other = Kind::Cluster(if compat { Engine::Redis7 } else { Engine::Valkey });
            if kind == other || (matches!(kind, Kind::Watched(_)) && !compat) {
                continue;
            }
            let clock = Clock::manual(Timestamp::from_micros(1_234_000_000));
            let compat_line = if compat { "compat: envoyproxy" } else { "" };
            let (c, more) = (format!("{C}{compat_line}\n"), format!("{MORE}{compat_line}\n"));
            let served = Served::start(kind, &clock, &[("c.yaml", &c), ("more.yaml", &more)]).await;
            let name = format!("{kind:?}, compat {compat}");
            run(&Trace { served, clock, compat, name }).await;
        }
    }
}

#[tokio::test]
async fn descriptors_meet_the_rules_that_they_met() {
    on_each(async |trace| {
        for (entries, expected) in [
            // V1
            ("unknown/key1=x", "OK"),
            // V3, V4
            ("c/key1=something", "OK"),
            ("c/key1=value1", "OK"),
            // V5, V6
            ("c/key1=value1,subkey1=x", "OK 5/s 4 1"),
            ("c/key1=value1,subkey1=subvalue1", "OK 10/s 9 1"),
            // V7
            ("c/key2=anything", "OK 20/min 19 26"),
            ("c/key2=value2", "OK 30/min 29 26"),
            // V8
            ("c/key2=value3", "OK"),
            // V9, V10
            ("c/key2=value2,subkey=subvalue", "OK"),
            ("c/key5=value5,subkey5=other", "OK"),
            ("c/key5=value5", "OK 15/d 14 85166"),
            ("c/key5=value5,subkey5=subvalue5", "OK 25/d 24 85166"),
            // V11
            ("c/key4=x", "OK 1/d 0 85166 key4_rate_limit"),
            // V12
            ("c/key6=x", "OK 4294967295"),
            // V15: a bucket each
            ("more/wild=foo1", "OK 20/min 19 26"),
            ("more/wild=foo2", "OK 20/min 19 26"),
            ("more/wild=foo", "OK 20/min 19 26"),
            ("more/wild=foo1", "OK 20/min 18 26"),
            ("more/wild=bar", "OK"),
            // V18
            ("more/noWild=foo1", "OK"),
            ("more/noWild=foo", "OK 20/min 19 26"),
            // Keys and values are compared as such.
            ("c/key2_value2=", "OK"),
            ("more/week=x", "OK 4294967295/w 4294967294 603566"),
        ] {
            trace.asks(entries, expected).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_request_may_bring_a_limit() {
    on_each(async |trace| {
        // V14, and without any rule.
        let own = |requests, unit, multiplier, entries| {
            vec![limited(requests, unit, multiplier, descriptor(entries))]
        };
        let day = 4;
        let got = trace.of("c", own(10, day, None, "key1=value1,subkey1=something"), 0).await;
        assert_eq!(got, "OK: OK 10/d 9 85166", "{}", trace.name);
        let got = trace.of("c", own(7, 3, Some(2), "nobody=knows"), 5).await;
        assert_eq!(got, "OK: OK 7/2h 2 5966", "{}", trace.name);
        let got = trace.of("c", own(0, 2, None, "nobody=knows"), 0).await;
        assert_eq!(got, "OVER: OVER 0/min 0 26", "{}", trace.name);
        // A changed limit keeps what was used; one of another window is another bucket.
        let got = trace.of("c", own(6, 3, Some(2), "nobody=knows"), 1).await;
        assert_eq!(got, "OK: OK 6/2h 0 5966", "{}", trace.name);
        let got = trace.of("c", own(6, 2, None, "nobody=knows"), 1).await;
        assert_eq!(got, "OK: OK 6/min 5 26", "{}", trace.name);
        let got = trace.of("unknown", own(1, day, None, "k=v"), 3).await;
        assert_eq!(got, "OK: OK", "the domain must exist: {}", trace.name);
        for (unit, multiplier) in [(0, None), (7, None), (99, None), (-1, None), (1, Some(0)), (6, Some(11))]
        {
            let why = trace.served.try_ask("c", own(10, unit, multiplier, "k=v"), 0).await.unwrap_err();
            assert_eq!(why.code(), tonic::Code::InvalidArgument, "{unit}: {why:?}");
            assert!(why.message().starts_with("descriptors[0].limit: "), "{why:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn values_of_a_wildcard_share_a_bucket_if_they_are_to() {
    on_each(async |trace| {
        for left in (0..10).rev() {
            trace.asks("more/files=files/a.pdf", &format!("OK 10/h {left} 2366")).await;
        }
        trace.asks("more/files=files/b.csv", "OVER 10/h 0 2366").await;
        trace.asks("more/files=files/*", "OVER 10/h 0 2366").await;
    })
    .await;
}

#[tokio::test]
async fn windows_end_when_the_clock_says() {
    on_each(async |trace| {
        // V22, V23, V24, V26
        for (now, entries, expected) in [
            (1234, "more/second=a", "OK 10/s 9 1"),
            (1234, "more/minute=a", "OK 10/min 9 26"),
            (1_000_000, "more/hour=a", "OK 10/h 9 800"),
            (3_600_000, "more/hour=b", "OK 10/h 9 3600"),
            (3_600_000, "more/minute=b", "OK 10/min 9 60"),
            (3_600_001, "more/five=b", "OK 3/5min 2 299"),
        ] {
            trace.at(now);
            // A check of what was never used tells the same end.
            let (start, reset) = expected.rsplit_once(' ').unwrap();
            let limit = start.rsplit_once(' ').unwrap().0;
            let all = limit.trim_start_matches("OK ").split('/').next().unwrap();
            trace.takes(entries, 0, &format!("{limit} {all} {reset}")).await;
            trace.asks(entries, expected).await;
        }
        trace.clock.set(Timestamp::from_micros(3_600_000_250_000));
        trace.asks("more/minute=c", "OK 10/min 9 60").await;
    })
    .await;
}

#[tokio::test]
async fn hits_are_counted_as_they_were() {
    on_each(async |trace| {
        // V27
        for left in (5..10).rev() {
            trace.asks("more/second=a", &format!("OK 10/s {left} 1")).await;
        }
        // V30
        for left in (0..15).rev() {
            trace.asks("more/fifteen=a", &format!("OK 15/h {left} 2366")).await;
        }
        trace.asks("more/fifteen=a", "OVER 15/h 0 2366").await;
        // V31, V34: charged past the limit, or not at all.
        trace.takes("more/twenty=a", 2, "OK 20/s 18 1").await;
        trace.takes("more/twenty=a", 3, "OK 20/s 15 1").await;
        trace.takes("more/twenty=b", 19, "OK 20/s 1 1").await;
        trace.takes("more/twenty=b", 3, "OVER 20/s 0 1").await;
        let then = if trace.compat { "OVER 20/s 0 1" } else { "OK 20/s 0 1" };
        trace.takes("more/twenty=b", 1, then).await;
        // V37: a check is over only above the limit.
        trace.takes("more/hour=a", 10, "OK 10/h 0 2366").await;
        trace.takes("more/hour=a", 0, "OK 10/h 0 2366").await;
        trace.takes("more/hour=a", 1, "OVER 10/h 0 2366").await;
        let then = if trace.compat { "OVER 10/h 0 2366" } else { "OK 10/h 0 2366" };
        trace.takes("more/hour=a", 0, then).await;
        // V38: the count is 1000, or nothing.
        trace.takes("more/second=b", 1000, "OVER 10/s 0 1").await;
        let back = trace.of("more", vec![given_back(985, descriptor("second=b"))], 0).await;
        let expected = if trace.compat { "OK: OK 10/s 0 1" } else { "OK: OK 10/s 10 1" };
        assert_eq!(back, expected, "{}", trace.name);
        // V39
        for call in 1..=25 {
            let left = 20_u32.saturating_sub(call);
            let code = if call <= 20 { "OK" } else { "OVER" };
            trace.asks("c/key2=r", &format!("{code} 20/min {left} 26")).await;
        }
        // V41
        trace.asks("more/none=a", "OVER 0/min 0 26").await;
        trace.takes("more/none=a", 0, "OVER 0/min 0 26").await;
    })
    .await;
}

#[tokio::test]
async fn all_descriptors_are_charged_or_none() {
    on_each(async |trace| {
        // V40
        let both = ["key2=r", "key9=r"];
        for call in 1..=10 {
            let (left, other) = (20 - call, 10 - call);
            trace.all_of(&both, &format!("OK: OK 20/min {left} 26 | OK 10/h {other} 2366")).await;
        }
        for call in 11..=15 {
            let left = if trace.compat { 20 - call } else { 10 };
            trace.all_of(&both, &format!("OVER: OK 20/min {left} 26 | OVER 10/h 0 2366")).await;
        }
        // The same bucket twice is charged twice.
        trace.all_of(&["minute=x", "minute=x"], "OK: OK 10/min 8 26 | OK 10/min 8 26").await;
        let plus_minus = vec![hits(5, descriptor("minute=y")), given_back(3, descriptor("minute=y"))];
        let got = trace.of("more", plus_minus, 0).await;
        assert_eq!(got, "OK: OK 10/min 8 26 | OK 10/min 8 26", "{}", trace.name);
        let eleven = vec![hits(6, descriptor("minute=z")), hits(5, descriptor("minute=z"))];
        let got = trace.of("more", eleven, 0).await;
        assert_eq!(got, "OVER: OVER 10/min 0 26 | OVER 10/min 0 26", "{}", trace.name);
    })
    .await;
}

#[tokio::test]
async fn quotas_deny_together_and_shadows_never() {
    on_each(async |trace| {
        // V51: a lone quota.
        trace.asks("more/quota=a", "OK 1/min 0 26").await;
        trace.asks("more/quota=a", "OVER 1/min 0 26").await;
        // V48, V49
        let over = "OVER 1/min 0 26";
        let ok = "OK 1/min 0 26";
        trace.all_of(&["quota=a", "quota=b"], &format!("OK: {over} | {ok}")).await;
        trace.all_of(&["quota=a", "quota=b"], &format!("OVER: {over} | {over}")).await;
        // V50
        trace.asks("more/plain=a", "OK 1/min 0 26").await;
        let quota = if trace.compat { "OK 1/min 0 26" } else { "OK 1/min 1 26" };
        trace.all_of(&["plain=a", "quota=c"], &format!("OVER: {over} | {quota}")).await;
        // V54
        trace.asks("more/shadow=a", "OK 1/min 0 26").await;
        trace.all_of(&["shadow=a", "plain=a"], &format!("OVER: {ok} | {over}")).await;
        trace.asks("more/shadow=a", "OK 1/min 0 26").await;
        // A rule that another replaces does not hold.
        trace.asks("more/user=a", "OK 1/min 0 26 everybody").await;
        trace.asks("more/user=a", "OVER 1/min 0 26 everybody").await;
        trace.all_of(&["user=a", "admin=x"], "OK: OK | OK 4294967295").await;
    })
    .await;
}

#[tokio::test]
async fn hits_are_given_back_and_never_more_than_were_taken() {
    on_each(async |trace| {
        trace.takes("more/minute=a", 7, "OK 10/min 3 26").await;
        let back = async |hits, expected: &str| {
            let got = trace.of("more", vec![given_back(hits, descriptor("minute=a"))], 0).await;
            assert_eq!(got, expected, "{}: {hits} back", trace.name);
        };
        back(2, "OK: OK 10/min 5 26").await;
        back(u64::MAX, "OK: OK 10/min 10 26").await;
        back(5, "OK: OK 10/min 10 26").await;
        trace.takes("more/minute=a", 10, "OK 10/min 0 26").await;
        trace.takes("more/minute=a", 1, "OVER 10/min 0 26").await;
    })
    .await;
}
