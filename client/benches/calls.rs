//! How many calls to the service a decision takes, on one hot key: below its limit, at it, and far above.
//!
//! `cargo bench -p tollgate-client --bench calls` measures against a service in the same process that grants at once
//! what is plenty and spreads what is scarce; `… --bench calls -- http://127.0.0.1:8081 CLASS` against any other,
//! where the class has a rate of 1000/s and a burst of 1000.
#![allow(missing_docs, clippy::unwrap_used, clippy::disallowed_methods, reason = "a bench")]

#[path = "../tests/stub/mod.rs"]
mod stub;

use std::time::{Duration, Instant};
use stub::Stub;
use tollgate_client::Client;

const RATE: u32 = 1_000;
const LASTS: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let url = match arguments.next() {
        Some(url) => url,
        None => Stub::serve(RATE.into(), RATE.into()).await,
    };
    let class = arguments.next().unwrap_or_else(|| "read".into());
    println!("load x limit  gateways  decisions  allowed  calls  calls a decision");
    for gateways in [1_u32, 2, 10] {
        for (name, load) in [("0.5", RATE / 2), ("0.95", RATE * 19 / 20), ("3", RATE * 3)] {
            let (decisions, allowed, calls) = run(&url, &class, gateways, load).await;
            let a_decision = format!("{}.{:04}", calls / decisions, calls * 10_000 / decisions % 10_000);
            println!("{name:>12} {gateways:>9} {decisions:>10} {allowed:>8} {calls:>6}  {a_decision:>16}");
        }
    }
}

/// So many gateways that together decide `load` calls a second of one key.
async fn run(url: &str, class: &str, gateways: u32, load: u32) -> (u64, u64, u64) {
    let key = format!("{gateways} gateways, {load} a second, {:?}", Instant::now());
    let running = (0..gateways).map(|_| {
        let (client, key, class) = (Client::new(url).unwrap(), key.clone(), class.to_owned());
        tokio::spawn(async move {
            let (mut decisions, mut allowed) = (0_u64, 0_u64);
            let every = Duration::from_secs(1) * gateways / load;
            let start = Instant::now();
            while start.elapsed() < LASTS {
                let due = u64::try_from(start.elapsed().as_nanos() / every.as_nanos()).unwrap();
                while decisions < due {
                    decisions += 1;
                    allowed += u64::from(client.decide(&key, &class, None).await.unwrap().allowed());
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            client.shutdown().await;
            (decisions, allowed, client.calls())
        })
    });
    let (mut decisions, mut allowed, mut calls) = (0, 0, 0);
    for gateway in running.collect::<Vec<_>>() {
        let its = gateway.await.unwrap();
        decisions += its.0;
        allowed += its.1;
        calls += its.2;
    }
    (decisions, allowed, calls)
}
