//! New rules while serving.

use super::{Served, descriptor};
use crate::stores::Kind;
use crate::support::calls::answer;
use crate::support::{Tollgate, eventually};
use rustix::process::Signal;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tollgate_proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate_server::clock::Clock;
use tollgate_server::limit::Timestamp;

/// A domain in which everybody has that limit.
fn domain(name: &str, requests: u32) -> String {
    format!(
        "domain: {name}\ndescriptors: [ {{ key: user, rate_limit: {{ unit: hour, requests_per_unit: {requests} }} }} ]\n"
    )
}

/// The limit that a user meets; `None` if no rule.
async fn limit(served: &Served, domain: &str) -> Option<u32> {
    let response = served.ask(domain, vec![descriptor("user=x")], 0).await;
    response.statuses[0].current_limit.as_ref().map(|limit| limit.requests_per_unit)
}

async fn becomes(served: &Served, domain: &str, expected: impl Into<Option<u32>>) {
    let expected = expected.into();
    let what = format!("the limit of {domain} is {expected:?}");
    eventually(&what, async || (limit(served, domain).await == expected).then_some(())).await;
}

async fn served(files: &[(&str, &str)]) -> Served {
    let clock = Clock::manual(Timestamp::from_micros(1_000_000_000));
    Served::start(Kind::Memory, &clock, files).await
}

#[tokio::test]
async fn files_come_change_and_go() {
    let served = served(&[("a.yaml", &domain("a", 10))]).await;
    let put = |name: &str, text: &str| std::fs::write(served.rules().join(name), text).unwrap();
    assert_eq!(limit(&served, "a").await, Some(10));
    put("a.yaml", &domain("a", 20));
    becomes(&served, "a", 20).await;
    put("b.yml", &domain("b", 7));
    becomes(&served, "b", 7).await;
    // By a rename over it, as editors do.
    put("new", &domain("b", 8));
    std::fs::rename(served.rules().join("new"), served.rules().join("b.yml")).unwrap();
    becomes(&served, "b", 8).await;
    std::fs::remove_file(served.rules().join("b.yml")).unwrap();
    becomes(&served, "b", None).await;
    assert_eq!(limit(&served, "a").await, Some(20));
}

#[tokio::test]
async fn a_bad_file_leaves_its_domain_on_its_last_good_rules() {
    let served = served(&[("a.yaml", &domain("a", 10)), ("b.yaml", &domain("b", 10))]).await;
    let put = |name: &str, text: &str| std::fs::write(served.rules().join(name), text).unwrap();
    for bad in ["domain: b\nnope: 1", "{", "", &domain("a", 1), "\u{0}", "domain: b\ndomain: b"] {
        put("b.yaml", bad);
        let good = if bad.is_empty() { 30 } else { 20 };
        put("a.yaml", &domain("a", good));
        becomes(&served, "a", good).await;
        assert_eq!(limit(&served, "b").await, Some(10), "{bad}");
        put("a.yaml", &domain("a", 10));
        becomes(&served, "a", 10).await;
    }
    put("b.yaml", &domain("b", 11));
    becomes(&served, "b", 11).await;
}

/// As Kubernetes does: names that lead through `..data`, which is swapped.
#[tokio::test]
async fn a_config_map_is_swapped() {
    use std::os::unix::fs::symlink;
    let served = served(&[]).await;
    let folder = served.rules();
    let version = |name: &str, requests: u32| {
        std::fs::create_dir(folder.join(name)).unwrap();
        std::fs::write(folder.join(name).join("edge.yaml"), domain("edge", requests)).unwrap();
    };
    let swap = |name: &str| {
        symlink(name, folder.join("..data_tmp")).unwrap();
        std::fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    };
    version("..2026_1", 10);
    swap("..2026_1");
    symlink("..data/edge.yaml", folder.join("edge.yaml")).unwrap();
    becomes(&served, "edge", 10).await;
    for n in 2..6 {
        version(&format!("..2026_{n}"), 10 * n);
        swap(&format!("..2026_{n}"));
        std::fs::remove_dir_all(folder.join(format!("..2026_{}", n - 1))).unwrap();
        becomes(&served, "edge", 10 * n).await;
    }
}

/// The real server: rules that change a thousand calls a second long, classes, SIGHUP.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_decision_is_lost_while_rules_change() {
    let folder = tempfile::tempdir().unwrap();
    let put = |requests: u32| {
        let file = folder.path().join("edge.yaml");
        std::fs::write(&file, domain("edge", requests)).unwrap();
    };
    put(1_000_000);
    let config = |rate: u32| {
        format!("domains: [ {} ]\nclasses: {{ a: {{ rate: {rate}/h }} }}\n", folder.path().display())
    };
    let mut server = Tollgate::start(&config(10)).await;
    let caller = server.serving().await;
    assert_eq!(caller.ask("k", "a", None).await.limit, 10);

    let (stop, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let channel = caller.channel();
    let callers: Vec<_> = (0..4)
        .map(|n| {
            let (stop, asked, channel) = (stop.clone(), asked.clone(), channel.clone());
            tokio::spawn(async move {
                let mut client = RateLimitServiceClient::new(channel);
                while !stop.load(Ordering::Relaxed) {
                    let descriptors = vec![descriptor(&format!("user={n}"))];
                    let request = RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 1 };
                    let response = answer(client.should_rate_limit(request)).await.unwrap().into_inner();
                    // By the old rules or the new ones, never by none.
                    let limit = response.statuses[0].current_limit.as_ref().unwrap().requests_per_unit;
                    assert!((1_000_000..1_000_020).contains(&limit));
                    asked.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let met = async |expected| {
        let mut client = RateLimitServiceClient::new(channel.clone());
        let what = format!("the limit is {expected}");
        eventually(&what, async || {
            let descriptors = vec![descriptor("user=x")];
            let request = RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 1 };
            let response = answer(client.should_rate_limit(request)).await.unwrap().into_inner();
            let limit = response.statuses[0].current_limit.as_ref().unwrap().requests_per_unit;
            (limit == expected).then_some(())
        })
        .await;
    };
    for n in 1..20 {
        put(1_000_000 + n);
        met(1_000_000 + n).await;
    }
    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    assert!(asked.load(Ordering::Relaxed) > 100);

    // Classes are read anew too, and what is wrong with them takes nothing with it.
    std::fs::write(server.config(), config(20)).unwrap();
    eventually("the class has its new rate", async || {
        (caller.ask("k", "a", 0).await.limit == 20).then_some(())
    })
    .await;
    std::fs::write(server.config(), "classes: { a: { rate: nonsense } }\n").unwrap();
    server.says("a.rate: expected N/s").await;
    assert_eq!(caller.ask("k", "a", 0).await.limit, 20);
    put(1_000_050);
    met(1_000_050).await;

    server.process().signal(Signal::HUP);
    server.says("SIGHUP: reading the rules").await;
    assert_eq!(caller.ask("k", "a", 0).await.limit, 20);
    assert!(Path::new(&server.config()).exists());
}
