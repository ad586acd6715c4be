use super::*;
use crate::config::BUILT_IN;
use crate::yaml::{self, Fault, Faults};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    classes: Given<Classes>,
}

fn rules(text: &str) -> Result<Rules, Faults> {
    let file: File = yaml::read("a.yaml", text.as_bytes())?;
    let mut report = Report::new("a.yaml");
    let rules = compile(&file.classes, &mut report);
    report.end(rules)
}

fn class(text: &str) -> Option<Limited> {
    let rules =
        rules(&format!("classes: {{ a: {text} }}")).unwrap_or_else(|faults| panic!("{text}: {faults}"));
    rules.class("a").unwrap().limited.clone()
}

fn faults(text: &str) -> Vec<Fault> {
    match rules(text) {
        Ok(rules) => panic!("accepted: {text}: {rules:?}"),
        Err(faults) => faults.iter().cloned().collect(),
    }
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn rates() {
    for (text, count, period) in [
        ("5/s", 5, seconds(1)),
        ("5/m", 5, seconds(60)),
        ("5/h", 5, seconds(3600)),
        ("5/d", 5, seconds(86_400)),
        ("100/30s", 100, seconds(30)),
        ("5/1h30m", 5, seconds(5400)),
        ("1/250ms", 1, Duration::from_millis(250)),
        ("\"1/30d\"", 1, seconds(30 * 86_400)),
    ] {
        let limit = class(&format!("{{ rate: {text} }}")).unwrap().limit;
        assert_eq!(
            (limit.rate().count(), limit.rate().period(), limit.burst()),
            (count, period, count),
            "{text}"
        );
    }
}

#[test]
fn what_is_not_said_has_a_default() {
    let plain = class("{ rate: 10/s }").unwrap();
    assert_eq!((plain.limit.burst(), plain.cost, plain.algorithm.name), (10, Cost::ONE, ALL[0].name));
    assert!(!plain.sensitive && !plain.shadow && plain.penalty.is_none());

    let penalty = class("{ rate: 10/s, penalty: { strikes: 3 } }").unwrap().penalty.unwrap();
    assert_eq!(penalty, Penalty::new(3, seconds(3600), seconds(60), seconds(3600)).unwrap());
}

#[test]
fn what_is_said_holds() {
    let full = class(
        "{ rate: 5/m, burst: 7, cost: 7, algorithm: token_bucket, sensitive: true, shadow: true, \
           penalty: { strikes: 0, window: 2h, base: 1s, cap: 1s } }",
    )
    .unwrap();
    assert_eq!((full.limit.burst(), full.cost), (7, Cost::new(7)));
    assert!(full.sensitive && full.shadow);
    assert_eq!(full.penalty, Some(Penalty::new(0, seconds(7200), seconds(1), seconds(1)).unwrap()));
}

#[test]
fn every_algorithm_is_known_by_its_name() {
    for algorithm in ALL {
        let limited = class(&format!("{{ rate: 5/m, algorithm: {} }}", algorithm.name)).unwrap();
        assert_eq!(limited.algorithm.name, algorithm.name);
        assert!(limited.wait, "{algorithm:?}: calls are told to wait unless the rule says otherwise");
    }
    assert!(!class("{ rate: 5/m, algorithm: leaky_bucket, wait: false }").unwrap().wait);
}

/// Each bound is accepted, and one more is refused with the bound.
#[test]
fn a_limit_that_an_algorithm_can_not_keep_is_refused_with_the_bound() {
    for (algorithm, rate, most) in [
        ("sliding_log", "1000000/s", 10_000),
        ("sliding_log", "1/m", 10_000),
        ("sliding_window", "1000000/s", 67_108_863),
        ("sliding_window", "100/m", 86_637),
        ("gcra", "1/30d", 868),
        ("token_bucket", "1/30d", 1_737),
        ("fixed_window", "1/30d", 1_737),
        ("leaky_bucket", "1/30d", 1_737),
    ] {
        let with = |burst: u64| format!("{{ rate: {rate}, algorithm: {algorithm}, burst: {burst} }}");
        assert_eq!(class(&with(most)).unwrap().limit.burst(), most, "{algorithm} {rate}");
        let text = format!("classes: {{ a: {} }}", with(most + 1));
        let [fault] = faults(&text).try_into().unwrap();
        let place = (fault.line, fault.column);
        let column = text.find(&(most + 1).to_string()).unwrap() + 1;
        assert_eq!(
            (place, fault.path.as_str()),
            ((1, column.try_into().unwrap()), "classes.a.burst"),
            "{fault}"
        );
        assert!(fault.message.contains(&most.to_string()), "{fault}");
        // Far above, the bound is the same, though the limit itself has a higher one.
        let [far] = faults(&format!("classes: {{ a: {} }}", with(999_999_999))).try_into().unwrap();
        assert!(far.message.contains(&most.to_string()), "{far}");
        let points_on = fault.message.contains("use sliding_window");
        assert_eq!(points_on, algorithm == "sliding_log", "{fault}");
    }
}

#[test]
fn a_burst_that_is_the_rates_is_blamed_on_the_rate() {
    let [fault] = faults("classes: { a: { rate: 10001/s, algorithm: sliding_log } }").try_into().unwrap();
    assert_eq!(fault.path, "classes.a.rate");
    assert!(fault.message.contains("sliding_log: a burst of 10001"), "{fault}");
}

#[test]
fn only_a_queue_can_be_told_not_to_wait() {
    for algorithm in ALL.iter().filter(|algorithm| !algorithm.queues) {
        for wait in [true, false] {
            let class = format!("{{ rate: 5/s, algorithm: {}, wait: {wait} }}", algorithm.name);
            let column = class.find(", wait: ").unwrap() + 12;
            let message = format!("does nothing with {}, which does not queue calls", algorithm.name);
            each_is_named_with_its_place(&[(&class, column.try_into().unwrap(), "a.wait", &message)]);
        }
    }
}

#[test]
fn a_class_that_costs_nothing_is_never_limited() {
    for text in ["{ cost: 0 }", "{ cost: 0, rate: 5/s }", "{ cost: 0, sensitive: false, shadow: true }"] {
        assert!(class(text).is_none(), "{text}");
    }
}

#[test]
fn the_built_in_classes() {
    let rules = rules(BUILT_IN).unwrap();
    let short: Vec<_> = rules
        .iter()
        .map(|rule| {
            let limited = rule.limited.as_ref();
            (
                rule.class.as_str(),
                limited.map(|it| (it.limit.rate().count(), it.limit.burst(), it.cost.get())),
            )
        })
        .collect();
    assert_eq!(
        short,
        [
            ("default", Some((100, 200, 1))),
            ("export", Some((50, 100, 25))),
            ("health", None),
            ("login", Some((5, 5, 1))),
            ("read", Some((100, 200, 1))),
            ("search", Some((100, 200, 10))),
        ]
    );
    let login = rules.class("login").unwrap().limited.clone().unwrap();
    assert!(login.sensitive && login.penalty.is_some());
    assert_eq!(login.limit.rate().period(), seconds(60));
}

#[test]
fn anchors_and_merges_are_understood() {
    let rules = rules("classes:\n  a: &a { rate: 5/s }\n  b: *a\n  c: { <<: *a, burst: 9 }\n").unwrap();
    let burst = |class| rules.class(class).unwrap().limited.as_ref().unwrap().limit.burst();
    assert_eq!(["a", "b", "c"].map(burst), [5, 5, 9]);
}

/// Of each: one wrong setting of a class `a`, its column in the line without indentation, its path below
/// `classes`, and a piece of what is said of it.
fn each_is_named_with_its_place(rows: &[(&str, u64, &str, &str)]) {
    let mut wrong = Vec::new();
    for (text, column, path, message) in rows {
        let found = faults(&format!("classes:\n\n  a: {text}\n"));
        let [fault] = found.as_slice() else { panic!("{text}: {found:?}") };
        let place = (fault.file.as_str(), fault.line, fault.column);
        if place != ("a.yaml", 3, column + 2)
            || fault.path != format!("classes.{path}")
            || !fault.message.contains(message)
        {
            wrong.push(format!("{text} -> {fault}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_wrong_shape_or_rate_is_named_with_its_place() {
    let rate = "expected N/s, N/m, N/h, N/d or N/<duration>, got ";
    each_is_named_with_its_place(&[
        // No mapping, no such key, twice the same.
        ("5", 4, "a", "expected a mapping"),
        ("", 2, "a", "expected a mapping"),
        ("[]", 4, "a", "expected a mapping"),
        ("{ rats: 5/s }", 6, "a.rats", "unknown key `rats`; expected one of rate, burst, cost, algorithm, "),
        ("{ rate: 5/s, rate: 5/s }", 17, "a", "the key `rate` is here twice"),
        ("{ rate: 5/s, penalty: 5 }", 26, "a.penalty", "expected a mapping"),
        (
            "{ penalty: { strike: 5 } }",
            17,
            "a.penalty.strike",
            "unknown key `strike`; expected one of strikes, ",
        ),
        ("{ penalty: { strikes: 5, strikes: 5 } }", 29, "a.penalty", "the key `strikes` is here twice"),
        // Rates.
        ("{}", 4, "a", "expected a `rate` (N/s, N/m, N/h, N/d or N/<duration>), or `cost: 0`"),
        ("{ burst: 5 }", 4, "a", "expected a `rate`"),
        ("{ rate: }", 10, "a.rate", &format!("{rate}nothing")),
        ("{ rate: 5 }", 12, "a.rate", &format!("{rate}5")),
        ("{ rate: [5] }", 12, "a.rate", &format!("{rate}a list")),
        ("{ rate: { n: 5 } }", 12, "a.rate", &format!("{rate}a mapping")),
        ("{ rate: true }", 12, "a.rate", &format!("{rate}true")),
        ("{ rate: foo }", 12, "a.rate", &format!("{rate}\"foo\"")),
        ("{ rate: \"\" }", 12, "a.rate", rate),
        ("{ rate: /s }", 12, "a.rate", rate),
        ("{ rate: 5/ }", 12, "a.rate", rate),
        ("{ rate: 5/x }", 12, "a.rate", rate),
        ("{ rate: 5/s/s }", 12, "a.rate", rate),
        ("{ rate: 5 / s }", 12, "a.rate", rate),
        ("{ rate: -5/s }", 12, "a.rate", rate),
        ("{ rate: +5/s }", 12, "a.rate", rate),
        ("{ rate: 1.5/s }", 12, "a.rate", rate),
        ("{ rate: 5/-1s }", 12, "a.rate", rate),
        ("{ rate: 99999999999999999999/s }", 12, "a.rate", rate),
        ("{ rate: 5/99999999999999999999d }", 12, "a.rate", rate),
        ("{ rate: 0/s }", 12, "a.rate", "a rate of 0 never lets anything pass"),
        ("{ rate: 5/0s }", 12, "a.rate", "a period of 0s; expected more than 0"),
        ("{ rate: 1/31d }", 12, "a.rate", "expected more than 0 and at most"),
        ("{ rate: 1000001/s }", 12, "a.rate", "a rate of 1000001 a second; expected at most 1000000"),
        ("{ rate: 2000000000/1h }", 12, "a.rate", "a burst of 2000000000; expected at most"),
    ]);
}

#[test]
fn a_wrong_setting_is_named_with_its_place() {
    let rate = "expected N/s, N/m, N/h, N/d or N/<duration>, got ";
    let whole = "expected a whole number from 1 to 1000000000, got ";
    each_is_named_with_its_place(&[
        ("{ rate: 5/s, burst: many }", 24, "a.burst", &format!("{whole}\"many\"")),
        ("{ rate: 5/s, burst: \"5\" }", 24, "a.burst", &format!("{whole}\"5\"")),
        ("{ rate: 5/s, burst: 1.5 }", 24, "a.burst", &format!("{whole}1.5")),
        ("{ rate: 5/s, burst: -5 }", 24, "a.burst", &format!("{whole}-5")),
        ("{ rate: 5/s, burst: 010 }", 24, "a.burst", &format!("{whole}\"010\"")),
        ("{ rate: 5/s, burst: 1_0 }", 24, "a.burst", &format!("{whole}\"1_0\"")),
        ("{ rate: 5/s, burst: ~ }", 24, "a.burst", &format!("{whole}nothing")),
        ("{ rate: 5/s, burst: .nan }", 24, "a.burst", "not a finite number"),
        ("{ rate: 5/s, burst: 0 }", 24, "a.burst", "a burst of 0 never lets anything pass"),
        (
            "{ rate: 5/s, burst: 1000000001 }",
            24,
            "a.burst",
            "a burst of 1000000001; expected at most 1000000000",
        ),
        (
            "{ rate: 5/s, cost: all }",
            23,
            "a.cost",
            "expected a whole number from 0 to the burst, got \"all\"",
        ),
        ("{ rate: 5/s, cost: -1 }", 23, "a.cost", "expected a whole number from 0 to the burst, got -1"),
        ("{ rate: 5/s, cost: 6 }", 23, "a.cost", "a cost of 6 can never fit a burst of 5"),
        ("{ cost: 0, sensitive: true }", 26, "a.sensitive", "costs 0 and so is never limited"),
        ("{ cost: 0, penalty: { strikes: 3 } }", 24, "a.penalty", "costs 0 and so is never limited"),
        ("{ cost: 0, rate: foo }", 21, "a.rate", rate),
        // The rest.
        ("{ rate: 5/s, algorithm: abacus }", 28, "a.algorithm", "expected one of token_bucket"),
        ("{ rate: 5/s, algorithm: abacus }", 28, "a.algorithm", ", got \"abacus\""),
        ("{ rate: 5/s, algorithm: 5 }", 28, "a.algorithm", ", got 5"),
        ("{ rate: 5/s, sensitive: yes }", 28, "a.sensitive", "expected true or false, got \"yes\""),
        ("{ rate: 5/s, sensitive: \"true\" }", 28, "a.sensitive", "expected true or false, got \"true\""),
        ("{ rate: 5/s, shadow: 1 }", 25, "a.shadow", "expected true or false, got 1"),
        ("{ rate: 5/s, shadow: !mine true }", 31, "a", "unsupported tag"),
    ]);
}

#[test]
fn a_wrong_penalty_is_named_with_its_place() {
    let span = "expected a duration such as 30s, 5m or 1h30m, got ";
    each_is_named_with_its_place(&[
        ("{ rate: 5/s, penalty: {} }", 26, "a.penalty", "expected `strikes`"),
        ("{ rate: 5/s, penalty: { strikes: -1 } }", 37, "a.penalty.strikes", "from 0 to 4294967295, got -1"),
        ("{ rate: 5/s, penalty: { strikes: 4294967296 } }", 37, "a.penalty.strikes", "got 4294967296"),
        ("{ rate: 5/s, penalty: { strikes: 3, window: 60 } }", 48, "a.penalty.window", &format!("{span}60")),
        ("{ rate: 5/s, penalty: { strikes: 3, base: 1x } }", 46, "a.penalty.base", &format!("{span}\"1x\"")),
        ("{ rate: 5/s, penalty: { strikes: 3, cap: [] } }", 45, "a.penalty.cap", &format!("{span}a list")),
        (
            "{ rate: 5/s, penalty: { strikes: 3, window: 0s } }",
            48,
            "a.penalty.window",
            "a window of 0s; expected",
        ),
        (
            "{ rate: 5/s, penalty: { strikes: 3, cap: 31d } }",
            45,
            "a.penalty.cap",
            "expected at least 1ms and at most",
        ),
        (
            "{ rate: 5/s, penalty: { strikes: 3, base: 2h } }",
            46,
            "a.penalty.base",
            "a base of 2h above the cap of 1h",
        ),
        (
            "{ rate: 5/s, penalty: { strikes: 3, cap: 5s } }",
            45,
            "a.penalty.cap",
            "a base of 1m above the cap of 5s",
        ),
    ]);
}

#[test]
fn everything_wrong_with_the_values_is_told_at_once() {
    let found = faults(
        "classes:\n  b: { rate: foo, burst: many }\n  a: { cost: x }\n  value: { rate: 1/s, cost: 2 }\n",
    );
    let paths: Vec<_> = found.iter().map(|fault| (fault.line, fault.path.as_str())).collect();
    let expected =
        [(2, "classes.b.rate"), (2, "classes.b.burst"), (3, "classes.a.cost"), (4, "classes.value.cost")];
    assert_eq!(paths, expected);
}

#[test]
fn a_class_has_a_name() {
    for (name, path) in
        [(String::new(), "classes".to_owned()), ("ü".repeat(65), format!("classes.{}…", "ü".repeat(64)))]
    {
        let found = faults(&format!("classes:\n  \"{name}\": {{ rate: 1/s }}\n"));
        assert_eq!((found.len(), found[0].line, &found[0].path), (1, 2, &path));
        assert!(found[0].message.contains("a class name of 1 to 128 bytes, got "), "{}", found[0]);
    }
    assert!(rules(&format!("classes:\n  \"{}\": {{ rate: 1/s }}\n", "ü".repeat(64))).is_ok());
}

#[test]
fn classes_are_counted() {
    let full = "{ rate: 1/s, burst: 5, cost: 1, algorithm: token_bucket, sensitive: true, shadow: false, \
                  penalty: { strikes: 3, window: 1h, base: 60s, cap: 1h } }";
    let many = |n: usize, class: &str| {
        (0..n).fold("classes:\n".to_owned(), |text, i| text + &format!("  c{i}: {class}\n"))
    };
    assert_eq!(rules(&many(MOST_CLASSES, full)).unwrap().iter().count(), MOST_CLASSES);
    let found = faults(&many(MOST_CLASSES + 1, "{ cost: 0 }"));
    assert_eq!((found.len(), found[0].path.as_str()), (1, "classes"));
    assert_eq!(found[0].message, "expected at most 10000 classes, got 10001");
}
