//! Ten thousand real requests, decided by every store as a naive model decides them.

use crate::naive::Naive;
use crate::stores::{Ask, Kind, kinds, limit};
use crate::traffic::{class, requests};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tollgate_server::algorithm::{ALL, Algorithm};
use tollgate_server::clock::Clock;
use tollgate_server::limit::{Decision, Limit, Reason, Timestamp};
use tollgate_server::penalty::Penalty;
use tollgate_server::request::Strikes;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn real_traffic_is_decided_alike_everywhere() {
    let mut replays = JoinSet::new();
    for algorithm in ALL {
        let expected: Arc<[_]> = decided(algorithm).into();
        if algorithm.name == "token_bucket" {
            // So that neither the log nor the model makes this test an empty one.
            let count = |denied| expected.iter().filter(|(_, _, decision)| decision.denied == denied).count();
            let counts = (count(None), count(Some(Reason::OverLimit)), count(Some(Reason::Blocked)));
            assert_eq!(counts, (9410, 395, 195), "allowed, denied, blocked");
        }
        for kind in kinds() {
            let (expected, runtime) = (expected.clone(), Handle::current());
            replays.spawn_blocking(move || runtime.block_on(replay(kind, algorithm, expected)));
        }
    }
    while let Some(replayed) = replays.join_next().await {
        if let Err(why) = replayed {
            std::panic::resume_unwind(why.into_panic());
        }
    }
}

async fn replay(kind: Kind, algorithm: &'static Algorithm, expected: Arc<[(Timestamp, Ask, Decision)]>) {
    let clock = Clock::manual(Timestamp::default());
    let tested = kind.start(&clock).await;
    for (n, (at, ask, expected)) in expected.iter().enumerate() {
        clock.set(*at);
        let decision = ask.of(&*tested.store).await;
        assert_eq!(decision, *expected, "{algorithm:?} on {}, request {n} at {at:?}: {ask:#?}", tested.name);
    }
}

/// What the model makes of the log.
fn decided(algorithm: &'static Algorithm) -> Vec<(Timestamp, Ask, Decision)> {
    let mut naive = Naive::default();
    let mut now = 0;
    let decide = |request: crate::traffic::Request| {
        // Its month is May 2015.
        let at = (1_430_438_400 + request.at) * 1_000_000;
        if at > now {
            naive.forget(at);
            now = at;
        }
        let class = class(request.path);
        let (limit, strikes) = rule(class);
        let ask = Ask { strikes, ..Ask::new(request.client, class, limit, 1).by(algorithm) };
        let [decision] = naive.decide(std::slice::from_ref(&ask), now)[..] else { panic!("one for one") };
        (Timestamp::from_micros(now), ask, decision)
    };
    requests().into_iter().map(decide).collect()
}

/// Narrow enough for a site with a request every half a minute.
fn rule(class: &str) -> (Limit, Option<Strikes>) {
    let penalty = |strikes| {
        let span = Duration::from_secs;
        let penalty = Penalty::new(strikes, span(3600), span(60), span(3600)).unwrap();
        Some(Strikes { penalty, reported: 0, on_denial: true })
    };
    match class {
        "asset" => (limit(1, 2, 10), None),
        "page" => (limit(6, 60, 6), penalty(3)),
        "feed" => (limit(7, 3600, 3), penalty(10)),
        other => panic!("no rule for {other}"),
    }
}
