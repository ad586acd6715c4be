//! Ten thousand real requests through the built binary over gRPC, as fast as it goes, on every store.

use crate::support::calls::{Caller, allowed, backings};
use crate::support::say;
use crate::traffic::{class, requests};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tollgate_server::clock::instant;

/// Rate, in tokens per second, and burst.
const LIMITS: [(&str, u64, u64); 3] = [("asset", 5, 30), ("page", 2, 10), ("feed", 1, 3)];

const CONNECTIONS: usize = 4;
const CALLERS: usize = 64;

/// Calls of one client for one class.
#[derive(Default)]
struct Count {
    asked: u64,
    allowed: u64,
}

#[tokio::test]
async fn every_client_gets_its_burst_and_no_more_than_its_rate() {
    let calls: Arc<Vec<_>> = Arc::new(requests().iter().map(|it| (it.client, class(it.path))).collect());
    let classes = LIMITS
        .map(|(class, rate, burst)| format!("  {class}: {{ rate: {rate}/s, burst: {burst} }}\n"))
        .concat();
    for backing in backings().await {
        let (server, _) = backing.serve(&classes).await;
        let mut connections = Vec::new();
        for _ in 0..CONNECTIONS {
            connections.push(server.caller().await);
        }

        let next = Arc::new(AtomicUsize::new(0));
        let mut callers = JoinSet::new();
        let started = instant();
        for caller in connections.iter().cycle().take(CALLERS) {
            callers.spawn(ask_in_turn(caller.clone(), calls.clone(), next.clone()));
        }
        let verdicts = callers.join_all().await.concat();
        let took = started.elapsed();

        assert_eq!(verdicts.len(), calls.len(), "{backing}: every call is answered");
        let mut counts: BTreeMap<_, Count> = BTreeMap::new();
        for (call, allowed) in verdicts {
            let count = counts.entry(calls[call]).or_default();
            count.asked += 1;
            count.allowed += u64::from(allowed);
        }
        for ((client, class), Count { asked, allowed }) in &counts {
            let (_, rate, burst) = *LIMITS.iter().find(|(name, ..)| name == class).unwrap();
            let fewest = burst.min(*asked);
            let most = (burst + refill(rate, took)).min(*asked);
            assert!(
                (fewest..=most).contains(allowed),
                "{backing}: {client} {class}: {allowed} of {asked} in {took:?}, not {fewest} to {most}"
            );
        }
        let allowed: u64 = counts.values().map(|count| count.allowed).sum();
        let total = u64::try_from(calls.len()).unwrap();
        say(&format!(
            "{backing}: {total} requests of {} buckets in {took:?}, {:.0} a second; {} denied",
            counts.len(),
            f64::from(u32::try_from(total).unwrap()) / took.as_secs_f64(),
            total - allowed
        ));
        assert!(allowed < total, "{backing}: nothing was denied, so nothing was seen");
    }
}

/// What flows in meanwhile, rounded up.
fn refill(rate: u64, meanwhile: Duration) -> u64 {
    u64::try_from((u128::from(rate) * meanwhile.as_micros()).div_ceil(1_000_000)).unwrap()
}

/// Takes the next call that nobody has taken, until there is none; returns each with its verdict.
async fn ask_in_turn(
    caller: Caller,
    calls: Arc<Vec<(&'static str, &'static str)>>,
    next: Arc<AtomicUsize>,
) -> Vec<(usize, bool)> {
    let mut verdicts = Vec::new();
    loop {
        let call = next.fetch_add(1, Ordering::Relaxed);
        let Some((client, class)) = calls.get(call) else { return verdicts };
        let response = caller.ask(client, class, None).await;
        verdicts.push((call, allowed(&response)));
    }
}
