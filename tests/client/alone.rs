//! Life without the service: gone in the middle, at the start, coming and going, and answers that are lost.

use super::{CLASSES, decide, decide_many, patient, serve, warm};
use crate::support::calls::{answer, backings};
use crate::support::relay::{Mode, Relay};
use crate::support::{DEADLINE, Redis, Tollgate, engines, eventually};
use std::time::Duration;
use tollgate_client::{Client, Denial, Fallback};

/// Short enough that a test does not take long, long enough for a busy machine to answer in.
const PATIENCE: Duration = Duration::from_millis(500);

async fn until_it_is_gone(client: &Client) {
    eventually("the client takes the service to be gone", async || {
        decide(client, "whoever", "read").await;
        client.is_degraded().then_some(())
    })
    .await;
}

async fn until_it_is_back(client: &Client, key: &str, class: &str) {
    eventually("decisions are the service's again", async || {
        let verdict = decide(client, key, class).await;
        (!verdict.degraded).then_some(())
    })
    .await;
}

#[tokio::test]
async fn without_the_service_what_is_leased_is_spent_and_then_each_class_does_as_it_was_told() {
    let (mut server, caller) = serve().await;
    let mut relay = Relay::to(caller).await;
    let client = warm(&relay, PATIENCE).await;
    // A rate of one a day, and a burst of 2000.
    decide_many(&client, "held", "read", 5).await;
    relay.stop().await;
    server.process().kill();

    let first = decide(&client, "held", "read").await;
    assert!(first.allowed());
    until_it_is_gone(&client).await;
    // From now on nobody waits.
    let verdict = client.check("held", "read").expect("decided at once");
    assert!(verdict.allowed(), "{verdict:?}");
    eventually("what was leased is spent or over", async || {
        client.check("held", "read").filter(|verdict| verdict.degraded)
    })
    .await;
    let login = decide(&client, "warm", "login").await;
    assert_eq!((login.denied, login.degraded), (Some(Denial::Unavailable), true));
    assert!(!login.retry_after.is_zero());
    assert!(decide(&client, "warm", "health").await.allowed());
    // A key that was never seen is of a class that was.
    let other = decide(&client, "never seen", "read").await;
    assert!(other.allowed() && other.degraded && other.limit == 2000, "{other:?}");
    // One that was never heard of is denied unless somebody said otherwise.
    assert_eq!(decide(&client, "k", "small").await.denied, Some(Denial::Unavailable));
    // Each key alone gets its burst and no more.
    let mut allowed = 0;
    for _ in 0..2100 {
        allowed += u64::from(client.check("never seen", "read").is_some_and(|verdict| verdict.allowed()));
    }
    assert_eq!(allowed, 1999);
}

#[tokio::test]
async fn a_client_that_never_reached_the_service_does_as_it_was_configured() {
    let server = Tollgate::start(CLASSES).await;
    let mut relay = Relay::to(server.serving().await).await;
    relay.stop().await;
    let client = Client::builder(relay.url())
        .deadline(PATIENCE)
        .fallback(Fallback::Limit { rate_per_s: 0.001, burst: 3 })
        .class_fallback("login", Fallback::Deny)
        .class_fallback("health", Fallback::Allow)
        .build()
        .unwrap();
    assert_eq!(decide_many(&client, "k", "read", 10).await, 3);
    let verdict = decide(&client, "k", "read").await;
    assert_eq!((verdict.denied, verdict.degraded), (Some(Denial::OverLimit), true));
    assert_eq!(decide_many(&client, "k", "login", 3).await, 0);
    assert_eq!(decide_many(&client, "k", "health", 3).await, 3);

    relay.start().await;
    until_it_is_back(&client, "k", "read").await;
    assert!(!client.is_degraded());
    assert!(decide(&client, "k", "login").await.allowed());
}

#[tokio::test]
async fn it_heals_by_itself_however_often_the_service_comes_and_goes() {
    let (_server, caller) = serve().await;
    let mut relay = Relay::to(caller).await;
    let client = warm(&relay, PATIENCE).await;
    for round in 0..3 {
        if round % 2 == 0 {
            relay.stop().await;
        } else {
            relay.set(Mode::Refuse);
        }
        until_it_is_gone(&client).await;
        let calls = relay.calls();
        decide_many(&client, "whoever", "read", 1000).await;
        assert!(relay.calls() <= calls + 20, "nobody asks but who looks for it");
        if round % 2 == 0 {
            relay.start().await;
        } else {
            relay.set(Mode::Pass);
        }
        until_it_is_back(&client, &format!("round {round}"), "plenty").await;
        assert!(!client.is_degraded());
    }
}

#[tokio::test]
async fn a_wish_whose_answer_was_lost_is_sent_again_as_it_was() {
    let (_server, caller) = serve().await;
    let relay = Relay::to(caller).await;
    let client = warm(&relay, Duration::from_millis(100)).await;
    let of_it = || relay.borrows().into_iter().filter(|borrow| borrow.key == "lost").collect::<Vec<_>>();
    relay.set(Mode::LoseReplies);
    eventually("a wish is lost", async || {
        decide(&client, "lost", "plenty").await;
        (!of_it().is_empty()).then_some(())
    })
    .await;
    relay.set(Mode::Pass);
    eventually("it is sent again, or over", async || {
        decide(&client, "lost", "plenty").await;
        (of_it().len() >= 2).then_some(())
    })
    .await;
    let wishes = of_it();
    // Within a second it is the same one. On a busy machine it may be over by then, and then it is a new one.
    assert!(wishes[0] == wishes[1] || wishes[0].seq < wishes[1].seq, "{wishes:?}");
}

/// On every store: what was granted and not heard of is neither lost nor paid twice.
#[tokio::test]
async fn a_wish_whose_answer_was_lost_is_paid_once() {
    for backing in backings().await {
        let (_server, caller) = backing.serve("  read: { rate: 1/d, burst: 2000 }\n").await;
        let relay = Relay::to(caller.clone()).await;
        let mut tried = 0;
        eventually("a lease that lasts until it is heard of", async || {
            tried += 1;
            let key = format!("lost {tried}");
            let client = Client::builder(relay.url()).deadline(Duration::from_millis(100)).build().unwrap();
            let wishes = || relay.borrows().into_iter().filter(|wish| wish.key == key).collect::<Vec<_>>();
            let mut spent = decide_many(&client, &key, "read", 100).await;
            let before = wishes().len();
            relay.set(Mode::LoseReplies);
            // What is at hand is spent; the next wish is sent before it all is.
            while client.check(&key, "read").is_some_and(|verdict| verdict.allowed()) {
                spent += 1;
            }
            let lost = eventually("a wish", async || wishes().get(before).cloned()).await;
            relay.set(Mode::Pass);
            let again = eventually("another wish", async || {
                let verdict = decide(&client, &key, "read").await;
                spent += u64::from(verdict.allowed() && !verdict.degraded);
                wishes().get(before + 1).cloned()
            })
            .await;
            answer(client.shutdown()).await;
            if lost != again {
                // On a busy machine the lost one was over.
                return None;
            }
            let left = caller.remaining(&key, "read").await;
            (spent + left == 2000).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_stalled_service_costs_a_few_callers_their_patience_and_nobody_after_them() {
    let (_server, caller) = serve().await;
    let relay = Relay::to(caller).await;
    let client = warm(&relay, Duration::from_millis(100)).await;
    relay.set(Mode::LoseReplies);
    until_it_is_gone(&client).await;
    let started = tollgate_server::clock::instant();
    decide_many(&client, "whoever", "read", 1000).await;
    assert!(started.elapsed() < DEADLINE / 2, "no call waits");
}

/// The service is there and its Redis is not: who asks is told, and so is who spends what was lent meanwhile.
#[tokio::test]
async fn a_redis_that_is_gone_under_the_service_is_told_to_gateways() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let server = Tollgate::start(&format!("store: {}\n{CLASSES}", redis.url())).await;
        let caller = server.serving().await;
        let client = patient(&format!("http://{}", server.grpc())).build().unwrap();
        let spends = async |degraded: bool| {
            eventually("what is lent says how it was lent", async || {
                decide(&client, "alice", "plenty").await;
                let lent = client.check("alice", "plenty")?;
                (lent.allowed() && lent.degraded == degraded).then_some(())
            })
            .await;
        };
        spends(false).await;
        redis.stop();
        spends(true).await;
        let login = decide(&client, "alice", "login").await;
        assert_eq!((login.denied, login.degraded), (Some(Denial::Unavailable), true), "{engine:?}");
        // It is the service that decides so: the client has not given it up.
        assert!(!client.is_degraded(), "{engine:?}");
        assert!(caller.ask("alice", "plenty", None).await.degraded, "{engine:?}");
        redis.cont();
        spends(false).await;
        assert!(decide(&client, "alice", "login").await.allowed(), "{engine:?}");
    }
}
