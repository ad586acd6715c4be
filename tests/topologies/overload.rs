//! One node of a cluster gets more than it can decide.

use crate::stores::{Ask, at_once, config, once};
use crate::support::several::Cluster;
use crate::support::wire::Wire;
use crate::support::{engines, eventually, say};
use deadpool_redis::redis::Value;
use std::fmt::Write as _;
use std::time::Duration;
use tollgate_server::clock::Clock;
use tollgate_server::config::StoreConfig;
use tollgate_server::store::connect;

/// What it could not answer in time is not sent to it, so all that it charges somebody hears of; other nodes decide theirs.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_node_charges_only_what_it_can_answer() {
    const CALLS: usize = 3000;
    for engine in engines() {
        let cluster = Cluster::start(engine, false).await;
        // The first node is known by the other end of a wire.
        let wire = Wire::to(cluster.nodes[0].port()).await;
        let port = wire.url().rsplit_once(':').unwrap().1.to_owned();
        let set = ["CONFIG", "SET", "cluster-announce-port", &port];
        assert_eq!(cluster.nodes[0].command(&set).await, Value::Okay, "{engine:?}");
        for node in &cluster.nodes {
            eventually("all know of it", async || {
                let mut slots = String::new();
                write!(slots, "{:?}", node.command(&["CLUSTER", "SLOTS"]).await).unwrap();
                slots.contains(&format!("int({port})")).then_some(())
            })
            .await;
        }
        let store = StoreConfig { deadline: Duration::from_secs(8), ..config(&cluster.url()) };
        let store = connect(&store, Clock::system()).unwrap();
        let ask = |key: String| {
            let (store, hit) = (store.clone(), Ask::new(&key, "c", once(10), 1).hit());
            async move { store.decide(vec![hit], None).await.is_ok() }
        };
        for n in 0..10 {
            assert!(ask(format!("first {n}")).await, "{engine:?}");
        }
        wire.delay(Duration::from_millis(500));
        let decided = at_once((0..CALLS).map(|n| ask(format!("then {n}")))).await;
        let decided = decided.into_iter().filter(|is| *is).count();
        wire.delay(Duration::ZERO);
        let charged = async || cluster.keys().await.iter().filter(|key| key.contains("then")).count();
        // What is on its way comes now, if anything is.
        eventually("it is quick again", async || ask("last".into()).await.then_some(())).await;
        let charged = charged().await;
        say(&format!("{engine:?}, a slow node: {CALLS} calls, {decided} decided, {charged} charged"));
        assert!((CALLS / 2..CALLS).contains(&decided), "{engine:?}: {decided} decided");
        assert_eq!(charged, decided, "{engine:?}: charged, and nobody heard of it");
    }
}
