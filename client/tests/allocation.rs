//! A decision from what is at hand does not allocate.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says no by a panic")]

mod stub;

use std::time::Duration;
use stub::Stub;
use tollgate_client::Client;

/// Decides until the next call can be decided at hand.
async fn at_hand(client: &Client, key: &str) {
    loop {
        client.decide(key, "read", None).await.unwrap();
        if client.check(key, "read").is_some() {
            return;
        }
    }
}

#[tokio::test]
async fn a_decision_at_hand_does_not_allocate() {
    // A runtime of one thread: while this counts, nothing else of the client's runs on it.
    let url = Stub::serve(1_000_000, 1_000_000).await;
    let client = Client::builder(url).deadline(Duration::from_secs(10)).build().unwrap();
    let mut allowed = 0;
    while allowed < 1_000 {
        at_hand(&client, "hot").await;
        // Also the one that finds that little is left, and has more borrowed.
        let counted = allocation_counter::measure(|| {
            while client.check("hot", "read").is_some_and(|verdict| verdict.allowed()) {
                allowed += 1;
            }
        });
        assert_eq!(counted.count_total, 0, "after {allowed} calls: {counted:?}");
    }
}

#[tokio::test]
async fn a_denial_at_hand_does_not_allocate() {
    let url = Stub::serve(1, 1).await;
    let client = Client::builder(url).deadline(Duration::from_secs(10)).build().unwrap();
    let mut denied = 0;
    while denied < 1_000 {
        at_hand(&client, "hot").await;
        let counted = allocation_counter::measure(|| {
            for _ in 0..1_000 {
                denied += u32::from(client.check("hot", "read").is_some_and(|verdict| !verdict.allowed()));
            }
        });
        assert_eq!(counted.count_total, 0, "{counted:?}");
    }
}

#[tokio::test]
async fn a_decision_without_the_service_does_not_allocate() {
    let fallback = tollgate_client::Fallback::Limit { rate_per_s: 1.0, burst: 10 };
    let client = Client::builder("http://127.0.0.1:1").fallback(fallback).build().unwrap();
    while !client.is_degraded() {
        client.decide("k", "read", None).await.unwrap();
    }
    let counted = allocation_counter::measure(|| {
        for _ in 0..100 {
            assert!(client.check("k", "read").unwrap().degraded);
        }
    });
    assert_eq!(counted.count_total, 0, "{counted:?}");
}
