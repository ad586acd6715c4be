//! Strikes, blocks, and sensitive classes.

use super::HOUR;
use crate::support::calls::{Caller, allowed, backings, denied, is_just_below, span};
use crate::support::eventually;
use std::time::Duration;
use tollgate_proto::v1::{BorrowRequest, Reason};

/// The bucket of a login holds five, and its next token is nearer than the shortest block is long.
const CLASSES: &str = "
  read:   { rate: 1/h, burst: 20 }
  health: { cost: 0 }
  login:
    rate: 1/m
    burst: 5
    sensitive: true
    penalty: { strikes: 3, window: 1h, base: 60s, cap: 1h }
  signup:
    rate: 1/m
    burst: 5
    penalty: { strikes: 3, window: 1h, base: 60s, cap: 1h }
";

const SERIES: [u64; 7] = [120, 240, 480, 960, 1920, 3600, 3600];

/// Takes all that the bucket holds, and then what is denied without a block.
async fn use_up(caller: &Caller, key: &str) {
    assert!(allowed(&caller.ask(key, "login", 5).await));
    for _ in 0..3 {
        let response = caller.ask(key, "login", None).await;
        assert_eq!(denied(&response), Reason::OverLimit);
        assert!(is_just_below(span(response.retry_after), Duration::from_secs(60)), "{response:?}");
    }
}

#[tokio::test]
async fn each_denial_past_the_strikes_blocks_for_twice_as_long() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        // Only in Redis can a block be lifted by hand; the strikes stay.
        let Some(redis) = backing.redis() else { continue };
        use_up(&caller, "mallory").await;
        for seconds in SERIES {
            let block = Duration::from_secs(seconds);
            // A block is believed for a second.
            let denial = eventually("the block is seen to be lifted", async || {
                let denial = caller.ask("mallory", "login", None).await;
                (denied(&denial) == Reason::OverLimit).then_some(denial)
            })
            .await;
            assert_eq!(span(denial.retry_after), block);
            let after = caller.ask("mallory", "login", None).await;
            assert_eq!(denied(&after), Reason::Blocked);
            assert!(is_just_below(span(after.retry_after), block), "{after:?}");
            let lifted = redis.command(&["DEL", "rl:block:{mallory}"]).await;
            assert_eq!(lifted, deadpool_redis::redis::Value::Int(1));
        }
        assert_eq!(redis.keys().await, ["rl:strikes:{mallory}", "rl:{mallory}:login"]);
    }
}

/// The same series on every store, each of its blocks for a key that has been denied so often elsewhere.
#[tokio::test]
async fn what_a_gateway_denied_by_itself_is_a_strike() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        for class in ["login", "signup"] {
            for (denied_before, seconds) in (4..).zip(SERIES) {
                let key = format!("{class} {denied_before}");
                let borrowed = caller
                    .borrow(BorrowRequest {
                        key: key.clone(),
                        class: class.into(),
                        n: 1,
                        denied: denied_before,
                        ..BorrowRequest::default()
                    })
                    .await;
                let block = Duration::from_secs(seconds);
                assert_eq!((borrowed.granted, borrowed.reason()), (0, Reason::Blocked), "{backing}: {key}");
                assert_eq!(span(borrowed.retry_after), block, "{backing}: {key}");
                let after = caller.ask(&key, class, None).await;
                assert_eq!(denied(&after), Reason::Blocked, "{backing}: {key}");
                assert!(is_just_below(span(after.retry_after), block), "{backing}: {after:?}");
            }
            // Three are forgiven, also when they come at once.
            let request = BorrowRequest {
                key: format!("{class} 3"),
                class: class.into(),
                n: 1,
                denied: 3,
                ..BorrowRequest::default()
            };
            assert_eq!(caller.borrow(request).await.reason(), Reason::Unspecified, "{backing}");
        }
    }
}

#[tokio::test]
async fn a_blocked_key_is_blocked_in_every_class_but_those_never_limited() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        use_up(&caller, "mallory").await;
        let blocking = caller.ask("mallory", "login", None).await;
        assert_eq!(span(blocking.retry_after), Duration::from_secs(120), "{backing}");

        for class in ["login", "signup", "read"] {
            for cost in [None, Some(0)] {
                let response = caller.ask("mallory", class, cost).await;
                assert_eq!(denied(&response), Reason::Blocked, "{backing}: {class}");
                assert!(is_just_below(span(response.retry_after), Duration::from_secs(120)), "{response:?}");
                assert_eq!((response.cost, response.rule.as_str()), (0, class), "{backing}");
            }
        }
        assert!(allowed(&caller.ask("mallory", "health", None).await), "{backing}");
        // Nothing of this made the block longer, and nobody else is blocked.
        let response = caller.ask("mallory", "login", None).await;
        assert!(span(response.retry_after) <= Duration::from_secs(120), "{backing}: {response:?}");
        assert!(allowed(&caller.ask("alice", "login", None).await), "{backing}");
    }
}

#[tokio::test]
async fn strikes_count_over_all_classes_with_a_penalty() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        caller.ask("mallory", "login", 5).await;
        caller.ask("mallory", "signup", 5).await;
        caller.ask("mallory", "read", 20).await;
        for class in ["login", "signup", "login", "read", "read", "read"] {
            assert_eq!(denied(&caller.ask("mallory", class, None).await), Reason::OverLimit, "{backing}");
        }
        // Reads have no penalty, so this is the fourth strike.
        let fourth = caller.ask("mallory", "signup", None).await;
        assert_eq!(span(fourth.retry_after), Duration::from_secs(120), "{backing}");
        assert_eq!(denied(&caller.ask("mallory", "read", None).await), Reason::Blocked, "{backing}");
    }
}

#[tokio::test]
async fn a_sensitive_class_is_not_leased() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let request =
            BorrowRequest { key: "alice".into(), class: "login".into(), n: 3, ..BorrowRequest::default() };
        let response = caller.borrow(request).await;
        assert!(!response.leasable, "{backing}: {response:?}");
        assert_eq!((response.granted, response.lease_id.as_str()), (0, ""), "{backing}");
        assert!(response.fallback.is_some_and(|fallback| fallback.deny), "{backing}");
        assert_eq!(caller.remaining("alice", "login").await, 5, "{backing}: nothing was taken");
    }
}

#[tokio::test]
async fn a_sensitive_class_is_denied_when_redis_is_away() {
    for mut backing in backings().await {
        let (mut server, caller) = backing.serve(CLASSES).await;
        let Some(redis) = backing.redis() else { continue };
        redis.kill();

        let response = caller.ask("alice", "login", None).await;
        assert_eq!((denied(&response), response.cost), (Reason::Unavailable, 0));
        assert!(span(response.retry_after) > Duration::ZERO, "{response:?}");
        assert_eq!((response.limit, response.rule.as_str()), (5, "login"));

        let other = caller.ask("alice", "read", None).await;
        assert!(response.degraded && other.degraded && allowed(&other), "{other:?}");
        assert!(server.process().is_running());
    }
}

#[tokio::test]
async fn strikes_and_blocks_expire() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let Some(redis) = backing.redis() else { continue };
        use_up(&caller, "mallory").await;
        caller.ask("mallory", "login", None).await;
        for (key, span) in [
            ("rl:strikes:{mallory}", HOUR),
            ("rl:block:{mallory}", Duration::from_secs(120)),
            // All of it was used.
            ("rl:{mallory}:login", Duration::from_secs(300)),
        ] {
            let left = redis.command(&["PTTL", key]).await;
            let left: u64 = deadpool_redis::redis::from_redis_value(left).expect("an expiry");
            assert!(is_just_below(Duration::from_millis(left), span), "{key}: {left} ms");
        }
    }
}
