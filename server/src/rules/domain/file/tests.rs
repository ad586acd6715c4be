use super::*;
use crate::penalty::Penalty;
use std::time::Duration;

fn domain(text: &str) -> Domain {
    parse("a.yaml", text.as_bytes()).unwrap_or_else(|faults| panic!("{text}: {faults}"))
}

/// A file with this one descriptor.
fn one(descriptor: &str) -> String {
    format!("domain: edge\ndescriptors:\n- {descriptor}\n")
}

/// The only rule, which `key=value` leads to.
fn rule(descriptor: &str) -> Arc<DomainRule> {
    domain(&one(descriptor)).tree.find([("key", "value")]).expect("a rule").clone()
}

fn meter(rate_limit: &str) -> Meter {
    rule(&format!("{{ key: key, rate_limit: {rate_limit} }}")).meter.clone().expect("a limit")
}

fn faults(text: &str) -> Vec<String> {
    match parse("a.yaml", text.as_bytes()) {
        Ok(domain) => panic!("accepted: {text}: {domain:?}"),
        Err(faults) => faults.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn a_file_of_the_reference_is_read_as_it_is() {
    let domain = domain(
        "
domain: mongo_cps
descriptors:
  # Comments, lists and mappings of either style.
  - key: database
    value: users
    rate_limit:
      unit: second
      requests_per_unit: 500
    metadata: { anything: [ 1, two ] }
  - key: database
    value: default
    detailed_metric: true
    value_to_metric: true
    rate_limit: { unit: SECOND, requests_per_unit: 500, name: all, replaces: [ { name: other } ] }
  - key: port
    value: 8080
    descriptors:
    - key: version
      value: 1.10
      rate_limit: { unlimited: true }
    - key: debug
      value: true
      shadow_mode: true
      rate_limit: { unit: year, requests_per_unit: 99991 }
",
    );
    assert_eq!((domain.name.as_str(), domain.charge_denied, domain.headers), ("mongo_cps", false, None));
    let tree = &domain.tree;
    assert_eq!(tree.find([("database", "users")]).unwrap().path, "database=users");
    let all = tree.find([("database", "default")]).unwrap();
    assert_eq!((all.name.as_str(), &all.replaces), ("all", &vec!["other".to_owned()]));
    assert!(tree.find([("port", "8080"), ("version", "1.10")]).unwrap().meter.is_none());
    let debug = tree.find([("port", "8080"), ("debug", "true")]).unwrap();
    assert_eq!(debug.path, "port=8080,debug=true");
    let meter = debug.meter.as_ref().unwrap();
    assert!(meter.limited.shadow);
    assert_eq!(meter.limited.limit.window(), Duration::from_secs(365 * 86_400));
    assert_eq!(tree.find([("port", "8080")]), None::<&Arc<DomainRule>>);
}

impl PartialEq for DomainRule {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path
    }
}

#[test]
fn nothing_at_all_is_a_domain_without_rules() {
    for text in ["domain: edge", "domain: edge\ndescriptors: []"] {
        assert!(domain(text).tree.rules().is_empty());
    }
}

#[test]
fn limits_are_windows_of_the_clock_unless_they_say_otherwise() {
    let plain = meter("{ unit: minute, requests_per_unit: 5 }");
    assert_eq!(plain.limited.algorithm.tag, BY_CALENDAR.tag);
    assert_eq!((plain.limited.limit.burst(), plain.limited.limit.window()), (5, Duration::from_secs(60)));
    assert!(!plain.quota && !plain.charge_denied && !plain.limited.sensitive && !plain.limited.shadow);

    let five = meter("{ unit: minute, unit_multiplier: 5, requests_per_unit: 4294967295 }");
    assert_eq!(five.limited.limit.window(), Duration::from_secs(300));
    assert_eq!(five.said.multiplier, Some(5));

    let ours = meter(
        "{ unit: second, requests_per_unit: 10, algorithm: token_bucket, burst: 30, sensitive: true, \
           charge_denied: true, penalty: { strikes: 3 } }",
    );
    assert_eq!((ours.limited.algorithm.name, ours.limited.limit.burst()), ("token_bucket", 30));
    assert!(ours.limited.sensitive && ours.charge_denied);
    let hour = Duration::from_secs(3600);
    assert_eq!(ours.limited.penalty, Some(Penalty::new(3, hour, Duration::from_secs(60), hour).unwrap()));
}

#[test]
fn a_domain_has_defaults_of_its_own() {
    let text = one("{ key: key, rate_limit: { unit: hour, requests_per_unit: 5 } }");
    let domain = domain(&format!(
        "algorithm: gcra\ncompat: envoyproxy\nresponse_headers: {{ reset: X-Reset }}\nover_limit_body: compact\n{text}"
    ));
    let rule = domain.tree.find([("key", "value")]).unwrap();
    let meter = rule.meter.as_ref().unwrap();
    assert_eq!((meter.limited.algorithm.name, meter.charge_denied), ("gcra", true));
    let headers = domain.headers.unwrap();
    assert_eq!((headers.limit.as_str(), headers.reset.as_str()), ("RateLimit-Limit", "X-Reset"));
    assert_eq!(domain.body, Body::Compact);
}

#[test]
fn a_shadow_is_no_quota_and_shared_values_are_known_by_their_wildcard() {
    let limit = "rate_limit: { unit: hour, requests_per_unit: 5 }";
    let quota = rule(&format!("{{ key: key, quota_mode: true, {limit} }}"));
    assert!(quota.meter.as_ref().unwrap().quota);
    let both = rule(&format!("{{ key: key, quota_mode: true, shadow_mode: true, {limit} }}"));
    assert!(!both.meter.as_ref().unwrap().quota && both.meter.as_ref().unwrap().limited.shadow);
    let shared = rule(&format!("{{ key: key, value: 'v*', share_threshold: true, {limit} }}"));
    assert_eq!(shared.shared, [Some("v*".to_owned())]);
    let apart = rule(&format!("{{ key: key, value: 'v*', {limit} }}"));
    assert_eq!(apart.shared, [None]);
}

#[test]
fn whatever_is_wrong_is_told_with_its_place() {
    let limit = "rate_limit: { unit: hour, requests_per_unit: 5 }";
    for (text, expected) in [
        ("descriptors: []", "1:1: expected `domain`"),
        ("domain: ''", "1:9: domain: expected a text of 1 to 4096 bytes, got 0"),
        ("domain: a\nrules: []", "2:1: rules: unknown key `rules`; expected one of domain, descriptors"),
        (&one("{ value: x }"), "3:3: descriptors.0: expected `key`"),
        (&one("{ key: '' }"), "3:10: descriptors.0.key: expected a text of 1 to"),
        (&one("{ key: k, rate_limt: 1 }"), "unknown key `rate_limt`"),
        (&one("{ key: k, rate_limit: { unit: hour, per_unit: 1 } }"), "unknown key `per_unit`"),
        (
            &one("{ key: k, shadow_mode: 1 }"),
            "3:26: descriptors.0.shadow_mode: expected true or false, got 1",
        ),
        (
            &one("{ key: k, value: v, share_threshold: true }"),
            "3:40: descriptors.0.share_threshold: does nothing",
        ),
        (
            &one("{ key: k, rate_limit: { unit: fortnight, requests_per_unit: 1 } }"),
            "3:33: descriptors.0.rate_limit.unit: expected one of second, minute, hour, day, week, month, year",
        ),
        (
            &one("{ key: k, rate_limit: { unit: hour, requests_per_unit: -1 } }"),
            "requests_per_unit: expected a whole number from 0 to 4294967295, got -1",
        ),
        (
            &one("{ key: k, rate_limit: { unit: hour } }"),
            "descriptors.0.rate_limit: expected `requests_per_unit`",
        ),
        (
            &one("{ key: k, rate_limit: { requests_per_unit: 1 } }"),
            "descriptors.0.rate_limit: expected `unit`",
        ),
        (
            &one("{ key: k, rate_limit: { unlimited: true, unit: hour } }"),
            "3:50: descriptors.0.rate_limit.unit: does nothing beside `unlimited: true`",
        ),
        (
            &one("{ key: k, rate_limit: { unit: year, unit_multiplier: 11, requests_per_unit: 1 } }"),
            "unit_multiplier: expected a whole number from 1 to 10, got 11",
        ),
        (
            &one("{ key: k, rate_limit: { unlimited: true, name: me, replaces: [ { name: me } ] } }"),
            "3:74: descriptors.0.rate_limit.replaces.0.name: the rule \"me\" would replace itself",
        ),
        (
            &one("{ key: k, rate_limit: { unlimited: true, replaces: [ {} ] } }"),
            "replaces.0: expected `name`",
        ),
        (
            &one("{ key: k, rate_limit: { unit: hour, requests_per_unit: 20000, algorithm: sliding_log } }"),
            "requests_per_unit: sliding_log: a burst of 20000",
        ),
        (
            &one("{ key: k, rate_limit: { unit: hour, requests_per_unit: 1, algorithm: nope } }"),
            "algorithm: expected one of token_bucket",
        ),
        ("domain: a\ncompat: lyft", "2:9: compat: expected one of envoyproxy, none"),
        (
            "domain: a\nresponse_headers: { limit: 'a b' }",
            "response_headers.limit: expected the name of a header",
        ),
        ("domain: a\nover_limit_body: html", "over_limit_body: expected one of none, compact, structured"),
        ("domain: a\ndescriptors: { key: k }", "2:14: descriptors: expected a list"),
        ("domain: a\ndomain: b", "here twice"),
        (
            &one(&format!("{{ key: k, {limit} }}\n- {{ key: k }}")),
            "4:10: descriptors.1.key: `k` is here twice",
        ),
        (
            &one("{ key: k, value: v }\n- { key: k, value: v }"),
            "4:20: descriptors.1.value: `k=v` is here twice",
        ),
    ] {
        let faults = faults(text);
        assert!(faults.iter().any(|fault| fault.contains(expected)), "{text}\n{expected}\n{faults:#?}");
        assert!(faults.iter().all(|fault| fault.starts_with("a.yaml:")), "{faults:#?}");
    }
}

#[test]
fn algorithms_tell_which_months_and_years_they_can_not_count() {
    let text = |unit: &str, requests: u32, rest: &str| {
        one(&format!("{{ key: k, rate_limit: {{ unit: {unit}, requests_per_unit: {requests}, {rest} }} }}"))
    };
    for algorithm in ["token_bucket", "leaky_bucket", "gcra", "sliding_log", "sliding_window"] {
        domain(&text("month", 5, &format!("algorithm: {algorithm}")));
    }
    domain(&text("year", 5, "algorithm: sliding_log"));
    domain(&text("year", 142, "algorithm: sliding_window"));
    domain(&text("year", u32::MAX, "unit_multiplier: 10"));
    for (unit, requests, rest, expected) in [
        (
            "year",
            5,
            "algorithm: token_bucket",
            "unit: token_bucket: a period of 365 days; expected more than 0 and at most 30 days",
        ),
        ("month", 5, "unit_multiplier: 2, algorithm: gcra", "unit: gcra: a period of 60 days; expected"),
        ("month", 99_991, "algorithm: leaky_bucket", "leaky_bucket: a burst of 99991; expected at most 1737"),
        ("year", 20_000, "algorithm: sliding_log", "sliding_log: a burst of 20000; a log remembers"),
        ("year", 143, "algorithm: sliding_window", "sliding_window: a burst of 143; expected at most 142"),
        (
            "year",
            5,
            "burst: 9",
            "burst: fixed_window: a period of 365 days; expected more than 0 and at most 30",
        ),
    ] {
        let faults = faults(&text(unit, requests, rest));
        assert!(faults.len() == 1 && faults[0].contains(expected), "{unit} {rest}: {faults:#?}");
    }
}

#[test]
fn what_only_looks_alike_when_joined_is_no_duplicate() {
    let text = one("{ key: a_b }\n- { key: a, value: b }\n- { key: a }\n- { key: a, value: 'b*' }");
    domain(&text);
}

#[test]
fn every_fault_of_a_file_is_told() {
    let text = one("{ key: k, rate_limit: { unit: x } }\n- { value: v, shadow_mode: 2 }");
    assert_eq!(faults(&text).len(), 4, "{:#?}", faults(&text));

    let text = "\
domain: a
nope: 1
response_headers: { limits: x, reset: y }
descriptors:
- key: é
  # A unit is no unit there.
  unitt:
    nested: [ 1 ]
  rate_limt: # A comment.
    unit: hour
  rate_limit: { unit: hour, requests_per_unit: 1, \"per\": 2, replaces: [ { nam: x }, 7 ] }
- 7
- { key: b, rate_limit: [ 1 ] }
- { key: c, rate_limit: , descriptors: 5, 1: 2 }
- { key: d, descriptors: [ { key: e, rate_limit: { unit: hour, requests_per_unit: 1, replaces: no } } ] }
";
    let expected = [
        "2:1: nope: unknown key `nope`; expected one of domain, descriptors, algorithm, compat, response_headers",
        "3:21: response_headers.limits: unknown key `limits`; expected one of limit, remaining, reset",
        "7:3: descriptors.0.unitt: unknown key `unitt`; expected one of key, value, rate_limit, descriptors, ",
        "9:3: descriptors.0.rate_limt: unknown key `rate_limt`",
        "11:52: descriptors.0.rate_limit.per: unknown key `per`; expected one of unit, requests_per_unit, ",
        "11:73: descriptors.0.rate_limit.replaces.0: expected `name`",
        "11:75: descriptors.0.rate_limit.replaces.0.nam: unknown key `nam`; expected one of name",
        "11:85: descriptors.0.rate_limit.replaces.1: expected a mapping, got 7",
        "12:3: descriptors.1: expected a mapping, got 7",
        "13:25: descriptors.2.rate_limit: expected a mapping, got a list",
        "14:23: descriptors.3.rate_limit: expected a mapping, got nothing",
        "14:40: descriptors.3.descriptors: expected a list, got 5",
        "14:43: descriptors.3.1: unknown key `1`",
        "15:96: descriptors.4.descriptors.0.rate_limit.replaces: expected a list, got \"no\"",
    ];
    let faults = faults(text);
    for (fault, expected) in faults.iter().zip(expected) {
        assert!(fault.starts_with(&format!("a.yaml:{expected}")), "{expected}\n{faults:#?}");
    }
    assert_eq!(faults.len(), expected.len(), "{faults:#?}");
}

#[test]
fn no_file_has_so_many_unknown_keys_that_telling_them_takes_long() {
    let keys: Vec<_> = (0..100_000).map(|n| format!("k{n}: 1")).collect();
    let faults = faults(&keys.join("\n"));
    assert_eq!(faults.len(), 100_001);
    assert!(faults[100_000].starts_with("a.yaml:100000:1: k99999: unknown key"), "{}", faults[100_000]);
}

#[test]
fn levels_are_bounded() {
    let nested = |levels: usize| {
        let mut text = "{ key: k }".to_owned();
        for _ in 1..levels {
            text = format!("{{ key: k, descriptors: [ {text} ] }}");
        }
        one(&text)
    };
    domain(&nested(MOST_LEVELS));
    assert!(faults(&nested(MOST_LEVELS + 1))[0].contains("at most 16 levels"));
    // And no stack is used up.
    faults(&nested(10_000));
}
