//! Every algorithm, end to end, and what only some of them answer.

use crate::support::calls::{allowed, backings, denied, span};
use std::time::Duration;
use tollgate_proto::v1::{BorrowRequest, Reason};
use tollgate_server::algorithm::ALL;

#[tokio::test]
async fn each_admits_its_burst_and_then_says_when() {
    for backing in backings().await {
        for algorithm in ALL {
            // So long a window has its border in no test, but for one on a day in many years.
            let class = format!("  a: {{ rate: 7/30d, algorithm: {} }}", algorithm.name);
            let (_server, caller) = backing.serve(&class).await;
            for left in (0..7).rev() {
                let response = caller.ask(algorithm.name, "a", None).await;
                assert!(allowed(&response), "{algorithm:?} on {backing}: {response:?}");
                assert_eq!(
                    (response.remaining, response.limit, response.cost),
                    (left, 7, 1),
                    "{algorithm:?}"
                );
            }
            let response = caller.ask(algorithm.name, "a", None).await;
            assert_eq!(denied(&response), Reason::OverLimit, "{algorithm:?} on {backing}");
            assert!(span(response.retry_after) > Duration::ZERO, "{algorithm:?} on {backing}: {response:?}");
            assert!(span(response.reset_after) >= span(response.retry_after), "{algorithm:?}: {response:?}");
            assert_eq!(span(response.window), Duration::from_secs(30 * 86_400), "{algorithm:?}");
            // A peek is no call, and there is no debt.
            assert!(allowed(&caller.ask(algorithm.name, "a", 0).await), "{algorithm:?} on {backing}");
        }
    }
}

#[tokio::test]
async fn a_queue_tells_how_long_to_wait_unless_it_is_a_meter() {
    const CLASSES: &str = "
  queue: { rate: 1/h, burst: 3, algorithm: leaky_bucket }
  meter: { rate: 1/h, burst: 3, algorithm: leaky_bucket, wait: false }
";
    let hour = Duration::from_secs(3600);
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        for place in 0..3 {
            let response = caller.ask("alice", "queue", None).await;
            assert!(allowed(&response), "{backing}: {response:?}");
            // The first is told nothing: its turn is now.
            let wait = response.wait.map_or(Duration::ZERO, |wait| span(Some(wait)));
            assert!(
                wait <= place * hour && wait + hour / 2 > place * hour,
                "{backing}: place {place}, {wait:?}"
            );
            let metered = caller.ask("alice", "meter", None).await;
            assert!(allowed(&metered) && metered.wait.is_none(), "{backing}: {metered:?}");
        }
        for class in ["queue", "meter"] {
            let response = caller.ask("alice", class, None).await;
            assert_eq!((denied(&response), response.wait), (Reason::OverLimit, None), "{backing} {class}");
        }
    }
}

#[tokio::test]
async fn what_can_not_be_lent_is_not_and_a_window_lends_until_it_ends() {
    const CLASSES: &str = "
  queue:  { rate: 1/h, burst: 5, algorithm: leaky_bucket }
  window: { rate: 50/100ms, algorithm: fixed_window }
  log:    { rate: 50/h, algorithm: sliding_log }
";
    let wish =
        |class: &str| BorrowRequest { key: "k".into(), class: class.into(), n: 5, ..Default::default() };
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let queue = caller.borrow(wish("queue")).await;
        assert_eq!((queue.leasable, queue.granted, queue.remaining), (false, 0, 5), "{backing}: {queue:?}");
        let window = caller.borrow(wish("window")).await;
        assert_eq!((window.leasable, window.granted), (true, 5), "{backing}: {window:?}");
        assert!(span(window.valid_for) <= Duration::from_millis(100), "{backing}: {window:?}");
        let log = caller.borrow(wish("log")).await;
        assert_eq!((log.granted, span(log.valid_for)), (5, Duration::from_secs(1)), "{backing}: {log:?}");
    }
}

/// Two servers with two algorithms for a class can not read each other's buckets, and say so.
#[tokio::test]
async fn another_algorithm_starts_anew_and_the_log_says_so_once() {
    for mut backing in backings().await {
        if backing.redis().is_none() {
            continue;
        }
        for (from, to) in
            [("token_bucket", "sliding_log"), ("sliding_log", "fixed_window"), ("gcra", "token_bucket")]
        {
            let class = |name| format!("  a: {{ rate: 5/30d, algorithm: {name} }}");
            let (_old, before) = backing.serve(&class(from)).await;
            let (mut new, after) = backing.serve(&class(to)).await;
            for key in ["alice", "bob"] {
                let key = format!("{key} {from}");
                assert_eq!(before.ask(&key, "a", 4).await.remaining, 1, "{backing}");
                assert_eq!(after.ask(&key, "a", 2).await.remaining, 3, "{backing}: from {from} to {to}");
                assert_eq!(after.ask(&key, "a", 1).await.remaining, 2, "{backing}: from {from} to {to}");
            }
            new.says(&format!("is decided by {to} now: its buckets start anew")).await;
            new.terminate().await;
            let said = new.process().output().matches("start anew").count();
            assert_eq!(said, 1, "{backing}: once for a class, not for a key");
        }
    }
}
