//! The client against the real server: what it decides by itself is never more than the bucket holds, what it does
//! not need comes back, and it lives through a service that comes and goes.

mod alone;
mod tls;

use crate::support::calls::{Caller, answer};
use crate::support::relay::Relay;
use crate::support::wire::Wire;
use crate::support::{DEADLINE, Tollgate, eventually};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tollgate_client::{Builder, Client, Denial, Verdict};
use tollgate_server::clock::instant;

/// Refills by nothing worth a thought while a test runs.
const CLASSES: &str = "classes:
  read: { rate: 1/d, burst: 2000 }
  small: { rate: 1/d, burst: 20 }
  search: { rate: 1/d, burst: 2000, cost: 10 }
  plenty: { rate: 200000/s, burst: 100000 }
  queue: { rate: 20/s, burst: 20, algorithm: leaky_bucket }
  login: { rate: 1/d, burst: 5, sensitive: true }
  strict: { rate: 1/d, burst: 20, penalty: { strikes: 3, window: 1h, base: 60s, cap: 1h } }
  health: { cost: 0 }
";

async fn serve() -> (Tollgate, Caller) {
    let server = Tollgate::start(CLASSES).await;
    let caller = server.serving().await;
    (server, caller)
}

/// A client that waits as long as the tests do: a busy machine is not a sick service.
fn patient(url: &str) -> Builder {
    Client::builder(url).deadline(DEADLINE)
}

fn of(server: &Tollgate) -> Client {
    patient(&format!("http://{}", server.grpc())).build().unwrap()
}

async fn decide(client: &Client, key: &str, class: &str) -> Verdict {
    answer(client.decide(key, class, None)).await.unwrap()
}

/// Decides one after the other; returns how many were allowed.
async fn decide_many(client: &Client, key: &str, class: &str, times: u64) -> u64 {
    let mut allowed = 0;
    for _ in 0..times {
        allowed += u64::from(decide(client, key, class).await.allowed());
    }
    allowed
}

async fn until_it_holds(caller: &Caller, key: &str, class: &str, tokens: u64) {
    let what = format!("{tokens} tokens of {key} {class}");
    eventually(&what, async || (caller.remaining(key, class).await == tokens).then_some(())).await;
}

#[tokio::test]
async fn most_calls_of_a_hot_key_are_decided_here() {
    let (_server, caller) = serve().await;
    let relay = Relay::to(caller).await;
    let client = patient(&relay.url()).build().unwrap();
    assert_eq!(client.check("hot", "plenty"), None, "nothing is known of it");
    assert_eq!(decide_many(&client, "hot", "plenty", 10_000).await, 10_000);
    let calls = relay.calls();
    assert!(calls <= 10_000 / 50, "{calls} calls to the service for 10000 decisions");
    // Each wish has its own number, and the client its own name.
    let borrows = relay.borrows();
    assert!(borrows.windows(2).all(|two| two[0].seq < two[1].seq && two[0].gateway == two[1].gateway));
    assert!(!borrows[0].gateway.is_empty() && borrows.last().unwrap().demand_per_s > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_gateways_admit_what_the_bucket_holds_and_give_the_rest_back() {
    let (server, caller) = serve().await;
    let tried = AtomicU64::new(0);
    // A lease may end on a busy machine: its tokens are lost, and never the other way round.
    let (key, left) = eventually("most calls are allowed", async || {
        let key = format!("tried {}", tried.fetch_add(1, Ordering::Relaxed));
        let clients: Vec<_> = (0..3).map(|_| of(&server)).collect();
        let callers = clients.iter().flat_map(|client| std::iter::repeat_n(client, 4)).cloned();
        let callers = callers.map(|client| {
            let key = key.clone();
            tokio::spawn(async move { decide_many(&client, &key, "read", 100).await })
        });
        let mut allowed = 0;
        for caller in callers.collect::<Vec<_>>() {
            allowed += caller.await.unwrap();
        }
        for client in &clients {
            answer(client.shutdown()).await;
        }
        let left = caller.remaining(&key, "read").await;
        assert!(allowed + left <= 2000, "{allowed} allowed and {left} left of 2000");
        (allowed >= 1000).then_some((key, left))
    })
    .await;

    let mut more = 0;
    for client in (0..3).map(|_| of(&server)) {
        more += decide_many(&client, &key, "read", 800).await;
    }
    assert!(more <= left, "{more} of {left}");
}

/// Runs a client until `spent` tokens of a fresh key are spent and some are held; none of its leases has ended then.
async fn holding(server: &Tollgate, caller: &Caller, spent: u64) -> (Client, String, u64) {
    let tried = AtomicU64::new(0);
    eventually("a lease that lasts", async || {
        let key = format!("tried {}", tried.fetch_add(1, Ordering::Relaxed));
        let client = of(server);
        let started = instant();
        assert_eq!(decide_many(&client, &key, "read", spent).await, spent);
        let held = 2000 - spent - caller.remaining(&key, "read").await;
        (held > 0 && started.elapsed() < Duration::from_millis(150)).then_some((client, key, held))
    })
    .await
}

#[tokio::test]
async fn what_is_not_spent_goes_back_when_the_client_is_shut_down() {
    let (server, caller) = serve().await;
    // It has 50 ms for that, which a busy machine may not give it each time.
    let (client, key) = eventually("all comes back", async || {
        let (client, key, _) = holding(&server, &caller, 5).await;
        answer(client.shutdown()).await;
        let left = caller.remaining(&key, "read").await;
        assert!(left <= 1995, "{left}");
        (left == 1995).then_some((client, key))
    })
    .await;
    // It still decides, by asking.
    assert!(client.check(&key, "read").is_none());
    assert_eq!(decide_many(&client, &key, "read", 3).await, 3);
    assert_eq!(caller.remaining(&key, "read").await, 1992);
}

#[tokio::test]
async fn what_is_not_spent_goes_back_when_the_client_is_dropped() {
    let (server, caller) = serve().await;
    let (client, key, _) = holding(&server, &caller, 5).await;
    drop(client.clone());
    assert!(client.check(&key, "read").is_some(), "a clone is not the last one");
    drop(client);
    until_it_holds(&caller, &key, "read", 1994).await;
}

#[tokio::test]
async fn what_is_not_spent_goes_back_when_the_key_is_idle() {
    let (server, caller) = serve().await;
    let (client, key, _) = holding(&server, &caller, 5).await;
    until_it_holds(&caller, &key, "read", 1995).await;
    assert!(client.check(&key, "read").is_none());
}

#[tokio::test]
async fn what_is_not_spent_goes_back_when_the_key_makes_room_for_others() {
    let (server, caller) = serve().await;
    let client = patient(&format!("http://{}", server.grpc())).max_keys(2).build().unwrap();
    decide_many(&client, "first", "read", 3).await;
    decide_many(&client, "second", "plenty", 1).await;
    decide_many(&client, "third", "plenty", 1).await;
    assert_eq!(client.keys(), 2);
    assert!(client.check("first", "read").is_none());
    until_it_holds(&caller, "first", "read", 1997).await;
}

#[tokio::test]
async fn a_denial_is_held_here_and_told_to_the_service() {
    let (_server, caller) = serve().await;
    let relay = Relay::to(caller.clone()).await;
    let client = patient(&relay.url()).build().unwrap();
    let mut allowed = 0;
    // What is little is lent to be spent over a while.
    eventually("half of the burst is spent", async || {
        allowed += decide_many(&client, "eve", "small", 1000).await;
        (allowed >= 10).then_some(())
    })
    .await;
    assert!(allowed <= 20, "{allowed} of 20");
    let verdict = decide(&client, "eve", "small").await;
    assert_eq!((verdict.denied, verdict.limit, verdict.degraded), (Some(Denial::OverLimit), 20, false));
    // Whether a lease with a token or two has ended meanwhile or not, nearly all denials were made here.
    assert!(relay.calls() < 100, "{} calls", relay.calls());

    // Each of them is a strike where the class has a penalty.
    decide_many(&client, "mallory", "strict", 200).await;
    eventually("the block reaches the gateway", async || {
        let verdict = decide(&client, "mallory", "strict").await;
        (verdict.denied == Some(Denial::Blocked)).then_some(())
    })
    .await;
    let verdict = decide(&client, "mallory", "strict").await;
    assert!(verdict.retry_after > Duration::from_secs(60), "{verdict:?}");
}

#[tokio::test]
async fn what_is_not_leasable_is_asked_for_each_time() {
    let (_server, caller) = serve().await;
    let relay = Relay::to(caller).await;
    let client = patient(&relay.url()).build().unwrap();
    for _ in 0..5 {
        assert!(decide(&client, "alice", "login").await.allowed());
        assert!(client.check("alice", "login").is_none());
    }
    assert_eq!(decide(&client, "alice", "login").await.denied, Some(Denial::OverLimit));
    assert_eq!(relay.asked(), 6);
    assert!(relay.borrows().len() <= 2, "{:?}", relay.borrows());
}

#[tokio::test]
async fn a_call_costs_what_its_class_does_or_what_it_says() {
    let (server, caller) = serve().await;
    let client = of(&server);
    for cost in [None, None, None, Some(3), Some(0)] {
        let verdict = answer(client.decide("a", "search", cost)).await.unwrap();
        assert_eq!((verdict.allowed(), verdict.cost), (true, cost.unwrap_or(10)));
    }
    answer(client.shutdown()).await;
    // On a busy machine a lease may have ended, and its tokens are lost; never the other way round.
    assert!(caller.remaining("a", "search").await <= 2000 - 33);
}

#[tokio::test]
async fn a_class_that_is_never_limited_is_not_asked_for_each_time() {
    let (_server, caller) = serve().await;
    let relay = Relay::to(caller).await;
    let client = patient(&relay.url()).build().unwrap();
    assert_eq!(decide_many(&client, "probe", "health", 500).await, 500);
    assert!(relay.calls() < 100, "{} calls", relay.calls());
}

#[tokio::test]
async fn a_request_that_can_not_be_is_an_error() {
    let (server, _caller) = serve().await;
    let client = of(&server);
    for (key, class) in [("", "read"), ("k", "nope"), (&*"k".repeat(513), "read")] {
        for _ in 0..3 {
            let error = answer(client.decide(key, class, None)).await.unwrap_err();
            assert!(error.is_refusal(), "{error:?}");
        }
    }
    assert!(!client.is_degraded());
}

#[tokio::test]
async fn who_can_wait_gets_a_turn() {
    let (server, _caller) = serve().await;
    let client = of(&server);
    // A queue of 20 a second: the third turn comes after 100 ms.
    let started = instant();
    let turn = async || answer(client.acquire("mail", "queue", None, DEADLINE)).await.unwrap();
    let (one, two, three) = tokio::join!(turn(), turn(), turn());
    assert!(one.allowed() && two.allowed() && three.allowed());
    assert!(started.elapsed() >= Duration::from_millis(99));

    // Nobody waits longer than he would.
    let started = instant();
    assert!(decide(&client, "short", "small").await.allowed());
    let verdict = answer(client.acquire("short", "small", Some(20), DEADLINE)).await.unwrap();
    assert_eq!(verdict.denied, Some(Denial::OverLimit));
    assert!(verdict.retry_after > DEADLINE && started.elapsed() < DEADLINE);
}

#[tokio::test]
async fn a_dead_instance_is_passed_over() {
    let (server, caller) = serve().await;
    let live = format!("http://{}", server.grpc());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for endpoints in [[format!("http://{free}"), live.clone()], [live.clone(), format!("http://{free}")]] {
        // Which one is first is by chance.
        for _ in 0..4 {
            let [one, other] = &endpoints;
            let client = patient(one).endpoint(other).build().unwrap();
            let verdict = decide(&client, "k", "plenty").await;
            assert!(verdict.allowed() && !verdict.degraded, "{verdict:?}");
        }
    }
    drop(caller);
}

#[tokio::test]
async fn settings_that_can_not_be_are_named() {
    for (builder, says) in [
        (Client::builder("no url"), "\"no url\" is no URL; expected one such as http://127.0.0.1:8081"),
        (Client::builder("http://h").deadline(Duration::ZERO), "deadline: 0ns; expected 1ms to 60s"),
        (Client::builder("http://h").max_keys(0), "max_keys: 0; expected 1 to 10000000"),
        (Client::builder("http://h").gateway(""), "gateway: 0 bytes; expected 1 to 128 bytes"),
    ] {
        assert_eq!(builder.build().unwrap_err().to_string(), says);
    }
}

/// A client of a relay that has been heard of `read` and `login`, holding some tokens of `key`.
async fn warm(relay: &Relay, deadline: Duration) -> Arc<Client> {
    let client = Client::builder(relay.url()).deadline(deadline).build().unwrap();
    for class in ["read", "login", "health"] {
        decide(&client, "warm", class).await;
    }
    eventually("all classes are heard of", async || (relay.borrows().len() >= 3).then_some(())).await;
    Arc::new(client)
}

/// The library below takes an answer to a call that was forgotten for a fault, and would end the connection for many.
#[tokio::test]
async fn late_answers_end_no_connection() {
    let (server, _) = serve().await;
    let wire = Wire::to(server.grpc().port()).await;
    let client = Client::builder(wire.http()).deadline(Duration::from_millis(40)).build().unwrap();
    let asked = async || client.decide("k", "login", None).await.ok().filter(|verdict| !verdict.degraded);
    eventually("it is asked", asked).await;
    let before = wire.connections();
    for round in 0..8 {
        wire.delay(Duration::from_millis(80));
        let mut hasty = JoinSet::new();
        for n in 0..500 {
            let client = client.clone();
            hasty.spawn(async move { client.decide(&format!("{round} {n}"), "login", None).await });
        }
        hasty.join_all().await;
        wire.delay(Duration::ZERO);
        eventually("it is asked again", asked).await;
    }
    assert_eq!(wire.connections(), before, "no other connection was made");
}
