//! The bounds I1 to I7 of `docs/leases.md`, over random worlds: the server's engine and the client's leases together,
//! with messages that are late and lost, gateways that die, and a service that comes and goes.

#[path = "../../server/examples/leases/bounds.rs"]
mod bounds;
#[path = "../../server/examples/leases/gateway.rs"]
mod gateway;
#[path = "../../server/examples/leases/traffic.rs"]
mod traffic;
#[path = "../../server/examples/leases/watched.rs"]
mod watched;
#[path = "../../server/examples/leases/world.rs"]
#[expect(dead_code, reason = "some figures are for tables")]
mod world;

use crate::naive::micros;
use crate::stores::{each, memory, named};
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseResult, TestRunner};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tollgate_server::algorithm::Algorithm;
use tollgate_server::clock::Clock;
use tollgate_server::limit::{Cost, Limit, Rate};
use tollgate_server::rules::Limited;
use tollgate_server::store::Store;
use traffic::{Calls, Pattern};
use world::{Outcome, START, Setting, World};

const SECOND: u64 = 1_000_000;

fn limited(algorithm: &'static Algorithm, rate: u64, burst: u64, cost: u64) -> Limited {
    Limited {
        limit: Limit::new(Rate::new(rate, Duration::from_secs(1)).unwrap(), burst).unwrap(),
        algorithm,
        cost: Cost::new(cost.min(burst)),
        sensitive: false,
        penalty: None,
        shadow: false,
        wait: false,
    }
}

/// Two seconds of up to 12 gateways, most of them far above the limit.
fn worlds(algorithms: &'static [&'static str]) -> impl Strategy<Value = Setting> {
    let limited = (prop::sample::select(algorithms), 5..400_u64, 1..400_u64, 1..6_u64)
        .prop_map(|(algorithm, rate, burst, cost)| limited(named(algorithm), rate, burst, cost));
    let pattern = prop::sample::select(vec![Pattern::Even, Pattern::Poisson, Pattern::OnOff]);
    let calls = (pattern, 1.0..400.0_f64).prop_map(|(pattern, per_second)| Calls::new(pattern, per_second));
    let gone = (0..2 * SECOND, 0..SECOND).prop_map(|(from, span)| from..from + span);
    (
        limited,
        prop::collection::vec(calls, 1..12),
        10..40_000_u64,
        prop_oneof![2 => Just(0_u8), 1 => 1..120_u8],
        prop::option::of(50_000..SECOND),
        prop::collection::vec(gone, 0..3),
        any::<u64>(),
    )
        .prop_map(|(limited, calls, latency, lost, killed_every, gone, seed)| Setting {
            limited,
            calls,
            lasts: 2 * SECOND,
            latency,
            lost,
            killed_every,
            gone,
            jumps: BTreeMap::new(),
            seed,
        })
}

/// Runs each of many worlds on each of these stores, under a key of its own.
fn in_each(
    cases: u32,
    stores: &[Arc<dyn Store>],
    clock: &Clock,
    worlds: impl Strategy<Value = Setting>,
    check: impl Fn(&Setting, &Outcome) -> TestCaseResult,
) {
    static CASES: AtomicU64 = AtomicU64::new(0);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = Config {
        // As many more as there are more of others.
        cases: cases * Config::default().cases / 256,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/regressions/worlds.txt"
        )))),
        max_shrink_iters: 500,
        ..Config::default()
    };
    let run = |setting: Setting| -> TestCaseResult {
        for store in stores {
            let key = format!("world {}", CASES.fetch_add(1, Ordering::Relaxed));
            let world = World::run(setting.clone(), store.clone(), clock.clone(), &key);
            let outcome = runtime.block_on(world).map_err(|why| TestCaseError::fail(why.to_string()))?;
            prop_assert_eq!(&outcome.wrong, &None);
            check(&setting, &outcome)?;
        }
        Ok(())
    };
    TestRunner::new(config).run(&worlds, run).unwrap_or_else(|why| panic!("{why}"));
}

/// I1 and I2, which a world watches by itself in every window.
fn within_bounds(_: &Setting, outcome: &Outcome) -> TestCaseResult {
    prop_assert_eq!(&outcome.above, &None);
    Ok(())
}

/// With them I5 and I7, which a world watches of every lease.
#[test]
fn whatever_happens_no_more_is_admitted_than_the_bucket_gave() {
    let clock = Clock::manual(START);
    in_each(200, &[memory(&clock)], &clock, worlds(&["token_bucket", "gcra"]), |setting, outcome| {
        within_bounds(setting, outcome)?;
        prop_assert!(outcome.by_gateway.iter().all(|(asked, admitted)| admitted <= asked));
        // Who is never without the service decides nothing without it.
        if setting.lost == 0 && setting.gone.is_empty() && setting.latency < 1_000 {
            prop_assert!(outcome.alone.is_empty(), "{} alone", outcome.alone.len());
        }
        Ok(())
    });
}

/// The service's clock runs ahead or is set back, by up to an hour, and the gateways' do not.
#[test]
fn nor_when_the_clock_jumps() {
    let clock = Clock::manual(START);
    let hour = 3_600_000_000_i64;
    let ahead = prop_oneof![-hour..hour, -3_000_000..3_000_000_i64];
    let jumping =
        (worlds(&["token_bucket", "gcra"]), prop::collection::btree_map(0..2 * SECOND, ahead, 1..4))
            .prop_map(|(setting, jumps)| Setting { jumps, ..setting });
    in_each(100, &[memory(&clock)], &clock, jumping, within_bounds);
}

#[test]
fn nor_by_a_redis() {
    let clock = Clock::manual(START);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let tested = runtime.block_on(each(&clock));
    let stores: Vec<_> = tested.iter().map(|tested| tested.store.clone()).collect();
    // A trip to a Redis takes longer than a world.
    let small =
        worlds(&["token_bucket", "gcra"]).prop_map(|setting| Setting { lasts: SECOND / 2, ..setting });
    in_each(10, &stores, &clock, small, within_bounds);
}

/// I3: the bounds of a bucket do not hold for windows, so they are counted here.
#[test]
fn no_window_admits_more_than_its_limit() {
    let clock = Clock::manual(START);
    in_each(100, &[memory(&clock)], &clock, worlds(&["fixed_window"]), |setting, outcome| {
        let length = micros(setting.limited.limit.window());
        let mut windows = BTreeMap::<_, u64>::new();
        for at in &outcome.admitted {
            *windows.entry((START.as_micros() + at) / length).or_default() += setting.limited.cost.get();
        }
        let most = setting.limited.limit.burst();
        prop_assert!(windows.values().all(|admitted| *admitted <= most), "{:?} of {}", windows, most);
        Ok(())
    });
}

/// I4, and the sensitive of I7: of these nothing is ever lent.
#[test]
fn what_is_not_leasable_is_not_lent() {
    let clock = Clock::manual(START);
    let never = |setting: &Setting, outcome: &Outcome| {
        prop_assert_eq!(outcome.most_outstanding, 0, "{:?}", setting.limited);
        Ok(())
    };
    in_each(50, &[memory(&clock)], &clock, worlds(&["leaky_bucket"]), never);
    let sensitive = worlds(&["token_bucket"])
        .prop_map(|setting| Setting { limited: Limited { sensitive: true, ..setting.limited }, ..setting });
    in_each(50, &[memory(&clock)], &clock, sensitive, |setting, outcome| {
        never(setting, outcome)?;
        prop_assert!(outcome.alone.is_empty(), "sensitive, and {} passed alone", outcome.alone.len());
        Ok(())
    });
}

/// Two seconds after it is back nobody is without it, and it is not asked more than on any day but for a look each.
#[test]
fn after_an_hour_without_the_service_all_is_as_before_and_there_was_no_herd() {
    const HOUR: u64 = 3_600 * SECOND;
    let clock = Clock::manual(START);
    let (gateways, rate, back) = (20, 200, 10 * SECOND + HOUR);
    let setting = Setting {
        limited: limited(named("token_bucket"), rate, rate, 1),
        calls: vec![Calls::new(Pattern::Poisson, 2.0); gateways],
        lasts: back + 10 * SECOND,
        latency: 250,
        lost: 0,
        killed_every: None,
        gone: std::iter::once(10 * SECOND..back).collect(),
        jumps: BTreeMap::new(),
        seed: 1,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let outcome = runtime.block_on(World::run(setting, memory(&clock), clock, "alice")).unwrap();
    assert_eq!((&outcome.wrong, &outcome.above), (&None, &None));
    // Far below the limit, so the shares let all pass; some calls are between the outage and its being noticed.
    let all = outcome.admitted.len() + outcome.alone.len();
    assert_eq!(outcome.asked.len(), all, "{} denied", outcome.denied);
    let last = outcome.alone.last().unwrap();
    assert!(*last < back + 2 * SECOND, "alone at {last}, {back}");
    let in_a_second =
        |from: u64| outcome.served.iter().filter(|at| (from..from + SECOND).contains(at)).count();
    let usual = (2..9).map(|second| in_a_second(second * SECOND)).max().unwrap();
    let most = (0..9).map(|second| in_a_second(back + second * SECOND)).max().unwrap();
    // One look for each, on top.
    assert!(most <= usual + gateways, "{most} messages in a second, {usual} as a rule");
}
