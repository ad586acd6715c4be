//! A descriptor is matched without allocations, however many entries it has; its bucket's name is one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says no by a panic")]

use std::fmt::Write as _;
use tollgate_server::limit::Timestamp;
use tollgate_server::name::BucketName;
use tollgate_server::rules::files::Files;

#[test]
fn a_descriptor_is_matched_without_allocations() {
    // A path of eight entries, met by values, by keys and by wildcards.
    let (mut text, mut indent) = ("domain: edge\ndescriptors:\n".to_owned(), String::new());
    let levels = ["value: v", "", "value: 'v*'", "value: 'v'", "", "value: '*'", "value: v", ""];
    for (level, value) in levels.iter().enumerate() {
        let comma = if value.is_empty() { "" } else { ", " };
        writeln!(
            text,
            "{indent}- {{ key: k{level}{comma}{value}, rate_limit: {{ unit: day, requests_per_unit: 9 }} }}"
        )
        .unwrap();
        // A level below it, beside the rule of its own.
        writeln!(text, "{indent}- key: d{level}\n{indent}  descriptors:").unwrap();
        indent.push_str("  ");
    }
    writeln!(text, "{indent}- {{ key: end, rate_limit: {{ unit: day, requests_per_unit: 9 }} }}").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("edge.yaml");
    std::fs::write(&file, text).unwrap();
    let files = Files::read(&[file], &Files::default(), Timestamp::default());
    let domain = files.domains().next().unwrap_or_else(|| panic!("{:?}", files.wrong().collect::<Vec<_>>()));

    for depth in 0..levels.len() {
        let path: Vec<(String, String)> = (0..depth)
            .map(|level| (format!("d{level}"), format!("x{level}")))
            .chain([(format!("k{depth}"), "v".to_owned())])
            .collect();
        let entries = || path.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let mut found = None;
        let counted = allocation_counter::measure(|| found = domain.tree.find(entries()));
        let rule = found.unwrap_or_else(|| panic!("{path:?} meets no rule"));
        assert_eq!(counted.count_total, 0, "{} entries: {counted:?}", path.len());

        let shared = || rule.shared.iter().map(Option::as_deref).chain(std::iter::repeat(None));
        let named = || entries().zip(shared()).map(|((key, value), shared)| (key, value, shared));
        let counted = allocation_counter::measure(|| {
            drop(BucketName::of_descriptor(&domain.name, named(), None));
        });
        assert_eq!(counted.count_total, 1, "{} entries: {counted:?}", path.len());
    }
}
