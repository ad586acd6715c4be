//! How long it takes to find the rule of a descriptor and to name its bucket, among ten rules and among ten
//! thousand, by value and by wildcard. By hand: `cargo bench -p tollgate-server --bench rules`.

#![allow(clippy::unwrap_used, missing_docs, reason = "a bench")]

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use std::fmt::Write as _;
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use tollgate_server::limit::Timestamp;
use tollgate_server::name::BucketName;
use tollgate_server::rules::domain::Domain;
use tollgate_server::rules::files::Files;

/// So many requests, over and over: as many as the smaller set has rules, so that both are as warm.
const REQUESTS: usize = 10;

fn domain(rules: usize, value: impl Fn(usize) -> String) -> Arc<Domain> {
    let mut text = "domain: edge\ndescriptors:\n- key: tenant\n  descriptors:\n".to_owned();
    for n in 0..rules {
        let limit = "{ unit: hour, requests_per_unit: 9 }";
        writeln!(text, "  - {{ key: path, value: '{}', rate_limit: {limit} }}", value(n)).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let file: PathBuf = folder.path().join("edge.yaml");
    std::fs::write(&file, text).unwrap();
    let files = Files::read(&[file], &Files::default(), Timestamp::default());
    files.domains().next().unwrap_or_else(|| unreachable!("{:?}", files.wrong().collect::<Vec<_>>()))
}

fn bench(c: &mut Criterion) {
    let value = |n: usize| format!("/api/v1/things/{n:06}");
    let wildcard = |n: usize| format!("/api/v1/things/{n:06}/*");
    let mut group = c.benchmark_group("match and name");
    for rules in [10, 10_000] {
        for (by, domain) in [("value", domain(rules, value)), ("wildcard", domain(rules, wildcard))] {
            let step = rules / REQUESTS;
            let asked: Vec<_> = (0..REQUESTS)
                .map(|n| if by == "value" { value(n * step) } else { format!("{}/x", value(n * step)) })
                .collect();
            let mut next = asked.iter().cycle();
            group.bench_function(BenchmarkId::new(by, rules), |b| {
                b.iter(|| {
                    let path = next.next().unwrap().as_str();
                    let entries = [("tenant", "acme"), ("path", path)];
                    let rule = black_box(&domain.tree).find(entries).unwrap();
                    let shared = rule.shared.iter().map(Option::as_deref);
                    let entries = entries.into_iter().zip(shared).map(|((key, value), s)| (key, value, s));
                    BucketName::of_descriptor(&domain.name, entries, None)
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
