//! What the server means, end to end: the same on every store.

mod algorithms;
mod changes;
mod leases;
mod penalties;

use crate::support::calls::{allowed, backings, denied, is_just_below, span};
use std::time::Duration;
use tollgate_proto::v1::Reason;

const HOUR: Duration = Duration::from_secs(3600);

/// Nothing flows in while a test looks.
const CLASSES: &str = "
  default: { rate: 1/h, burst: 7 }
  read:    { rate: 1/h, burst: 20 }
  write:   { rate: 1/h, burst: 3 }
  search:  { rate: 2/h, burst: 20, cost: 8 }
  watched: { rate: 1/h, burst: 2, shadow: true }
  health:  { cost: 0 }
";

#[tokio::test]
async fn an_answer_says_all_there_is_to_know() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;

        let first = caller.ask("alice", "search", None).await;
        assert!(allowed(&first), "{backing}: {first:?}");
        assert_eq!((first.rule.as_str(), first.limit, first.cost), ("search", 20, 8), "{backing}");
        assert_eq!((first.remaining, span(first.window)), (12, 10 * HOUR), "{backing}");
        assert_eq!(span(first.reset_after), 4 * HOUR, "{backing}: a fresh bucket, so nothing has flowed in");
        assert_eq!((first.retry_after, first.reason()), (None, Reason::Unspecified), "{backing}");
        assert_eq!((first.wait, first.degraded), (None, false), "{backing}");

        let second = caller.ask("alice", "search", 11).await;
        assert_eq!((allowed(&second), second.cost, second.remaining), (true, 11, 1), "{backing}");
        assert!(is_just_below(span(second.reset_after), 19 * HOUR / 2), "{backing}: {second:?}");

        let third = caller.ask("alice", "search", None).await;
        assert_eq!(denied(&third), Reason::OverLimit, "{backing}");
        assert_eq!((third.rule.as_str(), third.limit), ("search", 20), "{backing}");
        assert_eq!((third.cost, third.remaining), (0, 1), "{backing}: a denied call is free");
        assert!(is_just_below(span(third.retry_after), 7 * HOUR / 2), "{backing}: {third:?}");
        assert!(is_just_below(span(third.reset_after), 19 * HOUR / 2), "{backing}: {third:?}");
        assert_eq!(span(third.window), 10 * HOUR, "{backing}");
    }
}

#[tokio::test]
async fn tokens_come_back_with_time() {
    for backing in backings().await {
        let (_server, caller) = backing.serve("  fast: { rate: 100/s, burst: 1 }").await;
        assert!(allowed(&caller.ask("alice", "fast", None).await), "{backing}");
        crate::support::eventually("a token", async || {
            let response = caller.ask("alice", "fast", None).await;
            if allowed(&response) {
                return Some(());
            }
            let wait = span(response.retry_after);
            assert!(wait > Duration::ZERO && wait <= Duration::from_millis(10), "{backing}: {wait:?}");
            None
        })
        .await;
    }
}

#[tokio::test]
async fn a_call_costs_what_it_says_or_else_what_its_class_does() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        assert_eq!(caller.ask("alice", "read", None).await.cost, 1, "{backing}: the default of a default");
        assert_eq!(caller.ask("alice", "search", None).await.cost, 8, "{backing}: the class's");
        assert_eq!(caller.ask("alice", "search", 1).await.cost, 1, "{backing}: the call's");
        assert_eq!(caller.remaining("alice", "search").await, 11, "{backing}");
        assert_eq!(caller.ask("bob", "search", 20).await.remaining, 0, "{backing}: all there is");
    }
}

#[tokio::test]
async fn a_peek_is_allowed_and_writes_nothing() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        for _ in 0..3 {
            let peek = caller.ask("alice", "write", 0).await;
            assert_eq!((allowed(&peek), peek.cost, peek.remaining), (true, 0, 3), "{backing}");
            assert_eq!(span(peek.reset_after), Duration::ZERO, "{backing}");
        }
        if let Some(redis) = backing.redis() {
            assert_eq!(redis.keys().await, Vec::<String>::new());
        }
        caller.ask("alice", "write", 3).await;
        let peek = caller.ask("alice", "write", 0).await;
        assert_eq!((allowed(&peek), peek.remaining), (true, 0), "{backing}: also with nothing left");
    }
}

#[tokio::test]
async fn a_class_that_is_never_limited_touches_nothing() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let is_free = async || {
            for cost in [None, Some(0), Some(u32::MAX)] {
                let response = caller.ask("prober", "health", cost).await;
                assert_eq!((allowed(&response), response.cost), (true, 0));
                assert_eq!((response.rule.as_str(), response.limit), ("health", 0));
            }
        };
        is_free().await;
        if let Some(redis) = backing.redis() {
            assert_eq!(redis.keys().await, Vec::<String>::new());
            redis.kill();
            is_free().await;
        }
    }
}

#[tokio::test]
async fn a_storm_of_reads_does_not_starve_writes() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let storm: Vec<_> = (0..60)
            .map(|_| {
                let caller = caller.clone();
                tokio::spawn(async move { allowed(&caller.ask("alice", "read", None).await) })
            })
            .collect();
        let mut passed = 0;
        for call in storm {
            passed += usize::from(call.await.unwrap());
        }
        assert_eq!(passed, 20, "{backing}");
        assert_eq!(caller.ask("alice", "write", None).await.remaining, 2, "{backing}");
        assert_eq!(caller.remaining("bob", "read").await, 20, "{backing}: nor others' reads");
        if let Some(redis) = backing.redis() {
            assert_eq!(redis.keys().await, ["rl:{alice}:read", "rl:{alice}:write"]);
        }
    }
}

#[tokio::test]
async fn an_unknown_class_shares_the_bucket_of_default() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let unknown = caller.ask("alice", "no such class", 3).await;
        assert_eq!((unknown.rule.as_str(), unknown.limit, unknown.remaining), ("default", 7, 4), "{backing}");
        assert_eq!(caller.ask("alice", "default", 3).await.remaining, 1, "{backing}");
        assert_eq!(caller.ask("alice", "", 1).await.remaining, 0, "{backing}");
        if let Some(redis) = backing.redis() {
            assert_eq!(redis.keys().await, ["rl:{alice}:default"]);
        }
    }
}

#[tokio::test]
async fn keys_that_look_alike_have_buckets_of_their_own() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let keys = ["a", "a ", "a:b", "a}:read", "{a}", "a%3Ab", "A", "ä", "a\0b", "a\nb"];
        for (cost, key) in (1..).zip(keys) {
            caller.ask(key, "read", cost).await;
        }
        for (cost, key) in (1..).zip(keys) {
            assert_eq!(caller.remaining(key, "read").await, 20 - cost, "{backing}: {key:?}");
        }
        if let Some(redis) = backing.redis() {
            let written = redis.keys().await;
            assert_eq!(written.len(), keys.len(), "{written:?}");
            assert!(written.iter().all(|key| key.is_ascii() && !key.contains(' ')), "{written:?}");
        }
    }
}

#[tokio::test]
async fn a_shadow_rule_decides_and_stops_nobody() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        for remaining in [1, 0, 0, 0] {
            let response = caller.ask("alice", "watched", None).await;
            assert!(allowed(&response), "{backing}: {response:?}");
            assert_eq!((response.remaining, response.retry_after), (remaining, None), "{backing}");
            assert_eq!((response.rule.as_str(), response.limit), ("watched", 2), "{backing}");
        }
    }
}

#[tokio::test]
async fn every_key_expires() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        caller.ask("alice", "read", None).await;
        caller.ask("alice", "write", 3).await;
        if let Some(redis) = backing.redis() {
            for (key, hours) in [("rl:{alice}:read", 1), ("rl:{alice}:write", 3)] {
                let left = redis.command(&["PTTL", key]).await;
                let left: u64 = deadpool_redis::redis::from_redis_value(left).expect("an expiry");
                // A bucket may be kept a second longer.
                let span = hours * HOUR + Duration::from_secs(1);
                assert!(is_just_below(Duration::from_millis(left), span), "{key}: {left} ms");
            }
        }
    }
}
