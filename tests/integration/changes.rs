//! Several servers on one Redis: with the same rules they are one, and with others the last word holds.

use crate::support::Tollgate;
use crate::support::calls::{Backing, Caller, allowed, backings, denied, is_just_below, span};
use std::time::Duration;
use tollgate_proto::v1::Reason;

const HOUR: Duration = Duration::from_secs(3600);

async fn server(backing: &Backing, rate: &str, burst: u32) -> (Tollgate, Caller) {
    backing.serve(&format!("  read: {{ rate: {rate}, burst: {burst} }}")).await
}

#[tokio::test]
async fn two_servers_on_one_redis_share_one_limit() {
    for mut backing in backings().await {
        if backing.redis().is_none() {
            continue;
        }
        let one = server(&backing, "1/h", 50).await;
        let other = server(&backing, "1/h", 50).await;
        let calls: Vec<_> = (0..200)
            .map(|n| {
                let caller = if n % 2 == 0 { one.1.clone() } else { other.1.clone() };
                tokio::spawn(async move { caller.ask("alice", "read", None).await })
            })
            .collect();
        let mut left = Vec::new();
        for call in calls {
            let response = call.await.unwrap();
            if allowed(&response) {
                left.push(response.remaining);
            }
        }
        // Each token went to one call, and each call knows which.
        left.sort_unstable();
        assert_eq!(left, (0..50).collect::<Vec<_>>(), "{backing}");
    }
}

#[tokio::test]
async fn a_raised_limit_helps_now() {
    for mut backing in backings().await {
        if backing.redis().is_none() {
            continue;
        }
        let (_old, before) = server(&backing, "1/h", 10).await;
        before.ask("alice", "read", 10).await;
        assert_eq!(denied(&before.ask("alice", "read", None).await), Reason::OverLimit, "{backing}");

        let (_new, after) = server(&backing, "1/h", 30).await;
        let response = after.ask("alice", "read", None).await;
        assert!(allowed(&response), "{backing}: {response:?}");
        assert_eq!((response.limit, response.remaining), (30, 19), "{backing}: what was used stays used");
    }
}

#[tokio::test]
async fn a_lowered_limit_bites_now() {
    for mut backing in backings().await {
        if backing.redis().is_none() {
            continue;
        }
        let (_old, before) = server(&backing, "1/h", 30).await;
        assert_eq!(before.ask("alice", "read", 8).await.remaining, 22, "{backing}");
        assert_eq!(before.ask("bob", "read", 12).await.remaining, 18, "{backing}");

        let (_new, after) = server(&backing, "1/h", 10).await;
        let response = after.ask("alice", "read", None).await;
        assert_eq!((allowed(&response), response.limit, response.remaining), (true, 10, 1), "{backing}");
        // More was used than there is now: a debt of two, which even a peek is denied for.
        let peek = after.ask("bob", "read", 0).await;
        assert_eq!((denied(&peek), peek.remaining), (Reason::OverLimit, 0), "{backing}");
        assert!(is_just_below(span(peek.retry_after), 2 * HOUR), "{backing}: {peek:?}");
        let call = after.ask("bob", "read", None).await;
        assert!(is_just_below(span(call.retry_after), 3 * HOUR), "{backing}: {call:?}");
    }
}

#[tokio::test]
async fn another_rate_is_that_rate_now() {
    for mut backing in backings().await {
        if backing.redis().is_none() {
            continue;
        }
        let (_old, before) = server(&backing, "1/h", 10).await;
        before.ask("alice", "read", 10).await;
        let (_new, after) = server(&backing, "4/h", 10).await;
        let response = after.ask("alice", "read", None).await;
        assert_eq!(denied(&response), Reason::OverLimit, "{backing}");
        assert!(is_just_below(span(response.retry_after), HOUR / 4), "{backing}: {response:?}");
        assert_eq!(span(response.window), HOUR * 10 / 4, "{backing}");
    }
}
