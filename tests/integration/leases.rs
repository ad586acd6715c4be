//! Tokens ahead: what is granted, what comes back, and what does not.

use super::{CLASSES, HOUR};
use crate::support::calls::{Backing, Caller, allowed, backings, denied, is_just_below, span};
use crate::support::eventually;
use std::time::Duration;
use tollgate_proto::v1::{BorrowRequest, BorrowResponse, Reason, ReturnRequest};
use tollgate_server::clock::instant;

fn wish(key: &str, class: &str, n: u32) -> BorrowRequest {
    BorrowRequest { key: key.into(), class: class.into(), n, ..BorrowRequest::default() }
}

/// Does something with a lease of `n` reads that did not end meanwhile, on a fresh bucket each time: on a busy
/// machine a lease may be over before it is used, and that would be another test.
async fn while_it_lasts<T>(
    caller: &Caller,
    n: u32,
    mut done: impl AsyncFnMut(String, BorrowResponse) -> T,
) -> T {
    let mut tried = 0;
    eventually("a lease that lasts", async || {
        tried += 1;
        let key = format!("{n} tried {tried}");
        let started = instant();
        let lease = caller.borrow(wish(&key, "read", n)).await;
        let valid_for = span(lease.valid_for);
        let done = done(key, lease).await;
        (started.elapsed() < valid_for).then_some(done)
    })
    .await
}

#[tokio::test]
async fn as_much_is_granted_as_there_is() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;

        let all = caller.borrow(wish("alice", "read", 15)).await;
        assert_eq!((all.granted, all.remaining, all.limit, all.cost), (15, 5, 20, 1), "{backing}: {all:?}");
        assert!(all.leasable && !all.lease_id.is_empty() && !span(all.valid_for).is_zero(), "{all:?}");
        assert_eq!((all.retry_after, all.reason(), all.degraded), (None, Reason::Unspecified, false));
        let alone = all.fallback.unwrap();
        assert_eq!((alone.burst, alone.deny), (20, false), "{backing}");
        assert!((alone.rate_per_s * 3600.0 - 1.0).abs() < 1e-9, "{backing}: {alone:?}");

        let some = caller.borrow(wish("alice", "read", 15)).await;
        assert_eq!((some.granted, some.remaining), (5, 0), "{backing}: {some:?}");
        assert_ne!(some.lease_id, all.lease_id);

        let none = caller.borrow(wish("alice", "read", 15)).await;
        assert_eq!((none.granted, none.lease_id.as_str(), none.valid_for), (0, "", None), "{backing}");
        assert_eq!(none.reason(), Reason::OverLimit, "{backing}");
        assert!(is_just_below(span(none.retry_after), HOUR), "{backing}: {none:?}");
        assert!(none.leasable, "{backing}: later");

        // What is lent is spent for everybody else.
        assert_eq!(denied(&caller.ask("alice", "read", None).await), Reason::OverLimit, "{backing}");
    }
}

#[tokio::test]
async fn classes_that_are_watched_or_free_are_told_apart() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let watched = caller.borrow(wish("alice", "watched", 1)).await;
        assert_eq!((watched.leasable, watched.granted), (false, 0), "{backing}: {watched:?}");
        let free = caller.borrow(wish("alice", "health", 1000)).await;
        assert_eq!((free.leasable, free.granted, free.cost), (true, 1000, 0), "{backing}: {free:?}");
        assert_eq!((free.lease_id.as_str(), free.limit), ("", 0), "{backing}");
        if let Some(redis) = backing.redis() {
            assert_eq!(redis.keys().await, Vec::<String>::new());
        }
    }
}

#[tokio::test]
async fn what_is_returned_is_credited_once() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let (credited, remaining, again) = while_it_lasts(&caller, 15, async |key, lease| {
            let credited = caller.give_back(&lease.lease_id, 10).await;
            let remaining = caller.remaining(&key, "read").await;
            (credited, remaining, caller.give_back(&lease.lease_id, 5).await)
        })
        .await;
        assert_eq!((credited, remaining, again), (10, 15, 0), "{backing}");

        let more_than_lent = while_it_lasts(&caller, 14, async |key, lease| {
            caller.ask(&key, "read", 2).await;
            (caller.give_back(&lease.lease_id, u32::MAX).await, caller.remaining(&key, "read").await)
        })
        .await;
        assert_eq!(more_than_lent, (14, 18), "{backing}");
    }
}

#[tokio::test]
async fn nothing_is_credited_for_a_lease_that_never_was() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        caller.ask("alice", "read", 10).await;
        let nonce = "0123456789abcdef0123456789abcdef";
        for unknown in ["", "x", &format!("{{alice}}:read:{nonce}"), &format!("{{alice}}:nonsense:{nonce}")] {
            assert_eq!(caller.give_back(unknown, 5).await, 0, "{backing}: {unknown:?}");
        }
        assert_eq!(caller.remaining("alice", "read").await, 10, "{backing}");
    }
}

#[tokio::test]
async fn a_late_return_is_worth_nothing() {
    for mut backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let lease = caller.borrow(wish("alice", "read", 15)).await;
        let granted = instant();
        let valid_for = span(lease.valid_for);
        eventually("the lease is over", async || (granted.elapsed() > valid_for).then_some(())).await;
        assert_eq!(caller.give_back(&lease.lease_id, 15).await, 0, "{backing}");
        assert_eq!(caller.remaining("alice", "read").await, 5, "{backing}");
        if let Some(redis) = backing.redis() {
            assert_eq!(redis.keys().await, ["rl:{alice}:read"]);
        }
    }
}

#[tokio::test]
async fn leases_come_back_with_the_next_borrow() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let next = while_it_lasts(&caller, 20, async |key, lease| {
            let back = ReturnRequest { lease_id: lease.lease_id, unused: 12 };
            // The second time in the same call is worth nothing.
            let request = BorrowRequest { returns: vec![back.clone(), back], ..wish(&key, "read", 7) };
            caller.borrow(request).await
        })
        .await;
        assert_eq!((next.granted, next.remaining), (7, 5), "{backing}: {next:?}");
    }
}

#[tokio::test]
async fn a_refused_borrow_takes_no_lease_back() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let credited = while_it_lasts(&caller, 20, async |key, lease| {
            let back = ReturnRequest { lease_id: lease.lease_id.clone(), unused: 12 };
            let request = BorrowRequest { returns: vec![back], ..wish(&key, "read", 0) };
            caller.stub().borrow(request).await.expect_err("nothing is wished for");
            caller.give_back(&lease.lease_id, 12).await
        })
        .await;
        assert_eq!(credited, 12, "{backing}");
    }
}

#[tokio::test]
async fn less_than_one_call_costs_is_not_lent() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        assert!(allowed(&caller.ask("alice", "search", 15).await), "{backing}");
        // Five are left, and one search costs eight.
        let none = caller.borrow(wish("alice", "search", 20)).await;
        assert_eq!(
            (none.granted, none.cost, none.reason()),
            (0, 8, Reason::OverLimit),
            "{backing}: {none:?}"
        );
        assert!(is_just_below(span(none.retry_after), 3 * HOUR / 2), "{backing}: {none:?}");
        assert_eq!(caller.borrow(wish("alice", "search", 4)).await.granted, 4, "{backing}: as wished");
    }
}

/// The first answer may have been lost, and the service may be asked by way of another instance.
#[tokio::test]
async fn a_borrow_that_is_sent_again_is_the_same_lease() {
    for backing in backings().await {
        let (_server, caller) = backing.serve(CLASSES).await;
        let other = match &backing {
            Backing::Memory => None,
            Backing::Redis(..) => Some(backing.serve(CLASSES).await),
        };
        let again = other.as_ref().map_or(&caller, |(_, other)| other);
        let named = |key: &str, gateway: &str, seq| BorrowRequest {
            gateway: gateway.into(),
            seq,
            ..wish(key, "read", 5)
        };
        let mut tried = 0;
        let (key, first, second) = eventually("a lease that lasts", async || {
            tried += 1;
            let key = format!("alice {tried}");
            let started = instant();
            let first = caller.borrow(named(&key, "gw", 7)).await;
            let second = again.borrow(named(&key, "gw", 7)).await;
            (started.elapsed() < span(first.valid_for)).then_some((key, first, second))
        })
        .await;
        assert_eq!((first.granted, first.remaining), (5, 15), "{backing}: {first:?}");
        assert_eq!((&second.lease_id, second.granted), (&first.lease_id, 5), "{backing}: {second:?}");
        assert_eq!(second.remaining, 15, "{backing}: paid once");
        // Another number, another gateway, none of either: each is a wish of its own.
        let mut left = 15;
        for (gateway, seq) in [("gw", 8), ("other", 7), ("gw", 0), ("", 7)] {
            let lease = caller.borrow(named(&key, gateway, seq)).await;
            left = u64::saturating_sub(left, 5);
            let granted = if (gateway, seq) == ("", 7) { 0 } else { 5 };
            assert_eq!((lease.granted, lease.remaining), (granted, left), "{backing}: {gateway} {seq}");
            assert_ne!(lease.lease_id, first.lease_id, "{backing}");
        }
        // It comes back once.
        caller.give_back(&first.lease_id, 5).await;
        assert_eq!(again.give_back(&first.lease_id, 5).await, 0, "{backing}");
    }
}

#[tokio::test]
async fn gateways_are_counted_and_told_their_share() {
    for backing in backings().await {
        let (_server, caller) = backing.serve("  read: { rate: 1000/s, burst: 1000 }\n").await;
        let from = async |gateway: &str, n, demand_per_s| {
            let wish = BorrowRequest { gateway: gateway.into(), demand_per_s, ..wish("alice", "read", n) };
            caller.borrow(wish).await
        };
        let counted = eventually("four at once", async || {
            let mut last = None;
            for gateway in ["a", "b", "c", "d", "a"] {
                last = Some(from(gateway, 1, 4).await);
            }
            last.filter(|lease| lease.gateways == 4)
        })
        .await;
        let share = counted.fallback.unwrap();
        assert!(
            counted.leasable && share.burst == 250 && (share.rate_per_s - 250.0).abs() < 1e-9,
            "{share:?}"
        );
        // Half of what there is is left, and the rest is for all alike.
        let much = from("a", 1000, 2_000).await;
        assert!(much.granted > 0 && much.granted <= 125, "{backing}: {much:?}");
        assert_eq!(much.spread_over, None, "{backing}: {much:?}");
        // Where that would not last until 6 % of the burst have flowed in, all of it is, and is to last so long.
        let more = from("a", 1000, 1_000_000).await;
        assert!(more.granted > 125 && more.granted <= 250, "{backing}: {more:?}");
        assert_eq!(span(more.spread_over), Duration::from_millis(60), "{backing}: {more:?}");
        // What it spends in a quarter of a second.
        let little = from("b", 1000, 40).await;
        assert_eq!((little.granted, little.spread_over), (10, None), "{backing}");
        // Who does not tell its name is not counted, and gets what it wishes.
        let by_hand = caller.borrow(wish("alice", "read", 200)).await;
        assert_eq!((by_hand.granted, by_hand.gateways), (200, 0), "{backing}");
        assert_eq!(by_hand.spread_over, None, "{backing}");
    }
}
