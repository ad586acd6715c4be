//! `tollgate check` on the rules of domains, as the CI of a repository of rules runs it.

use crate::support::Tollgate;
use std::path::Path;
use std::process::Output;

const EDGE: &str = "
domain: edge
descriptors:
  - key: user
    rate_limit: { unit: minute, requests_per_unit: 5, algorithm: token_bucket, burst: 9, sensitive: true }
    descriptors:
      - { key: path, value: /api/*, rate_limit: { unit: hour, requests_per_unit: 7, name: api } }
  - { key: user, value: bob }
  - { key: admin, rate_limit: { unlimited: true } }
";

fn check(folder: &Path, arguments: &[&str]) -> (bool, String, String) {
    let Output { status, stdout, stderr } =
        Tollgate::command().current_dir(folder).arg("check").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.success(), text(stdout), text(stderr))
}

#[test]
fn every_error_of_every_file_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    std::fs::create_dir(folder.path().join("rules")).unwrap();
    put("rules/edge.yaml", EDGE);
    let valid = "rules/edge.yaml: valid, domain \"edge\", 3 rules\n";
    assert_eq!(check(folder.path(), &["rules"]), (true, valid.to_owned(), String::new()));
    assert!(check(folder.path(), &["rules/edge.yaml"]).0);
    put("tollgate.yaml", "domains: [ rules ]\n");
    let (valid, said, _) = check(folder.path(), &["tollgate.yaml"]);
    assert!(valid && said.lines().count() == 2, "{said}");

    let bad = "- { key: k, rate_limit: { unit: nope, requests_per_unit: 1 } }\n";
    put("rules/bad.yaml", &format!("domain: bad\ndescriptors:\n{}", bad.repeat(30)));
    put("rules/twice.yml", "domain: edge\n");
    put("rules/no.yaml", "descriptors: [\n");
    put("rules/.hidden.yaml", "nonsense");
    put("rules/readme.txt", "nonsense");
    for place in ["rules", "tollgate.yaml"] {
        let (valid, said, wrong) = check(folder.path(), &[place]);
        assert!(!valid && said.contains("rules/edge.yaml: valid"), "{said}");
        let lines: Vec<_> = wrong.lines().collect();
        // All 30, and that it is one descriptor again and again.
        assert!(lines.iter().filter(|line| line.contains("rate_limit.unit: expected one of")).count() == 30);
        assert!(
            lines.iter().any(|line| line.starts_with("rules/bad.yaml:3:33: descriptors.0.rate_limit.unit"))
        );
        assert!(lines.iter().any(|line| line.starts_with("rules/no.yaml:")), "{wrong}");
        assert!(
            lines.iter().any(|line| line.starts_with("rules/twice.yml:1:1: domain: \"edge\" is that of"))
        );
        assert!(!wrong.contains("hidden") && !wrong.contains("readme"));
    }
    let (valid, _, wrong) = check(folder.path(), &["nowhere"]);
    assert!(!valid && wrong.contains("nowhere: can not be read"), "{wrong}");
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    assert!(!check(folder.path(), &["empty"]).0);
}

#[test]
fn a_descriptor_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("edge.yaml"), EDGE).unwrap();
    for (descriptor, expected) in [
        (
            "edge/user=eve",
            "user=eve: by its key, whatever the value\n\
             rule user: 5 each minute, token_bucket, burst 9, sensitive\n",
        ),
        (
            "edge/user=eve,path=/api/v1",
            "user=eve: by its key, whatever the value\npath=/api/v1: by the wildcard \"/api/*\"\n\
             rule user,path=/api/* (api): 7 each hour, fixed_window\n",
        ),
        (
            "edge/user=bob,path=/api/v1",
            "user=bob: by its value\npath=/api/v1: no rule has this key here\nnot limited\n",
        ),
        (
            "edge/user=eve,path=/x",
            "user=eve: by its key, whatever the value\npath=/x: no rule has this value\nnot limited\n",
        ),
        (
            "edge/user=bob",
            "user=bob: by its value\nthe entries end at a node without a rate_limit: not limited\n",
        ),
        ("edge/admin=", "admin=: by its key, whatever the value\nrule admin: unlimited\n"),
        ("else/admin=", "no file is for the domain \"else\": not limited\n"),
    ] {
        let (valid, said, wrong) = check(folder.path(), &[".", "--explain", descriptor]);
        let said = said.split_once('\n').unwrap().1;
        assert_eq!((valid, said, wrong.as_str()), (true, expected, ""), "{descriptor}");
    }
    let (valid, _, wrong) = check(folder.path(), &[".", "--explain", "edge"]);
    assert!(!valid && wrong.starts_with("--explain: expected DOMAIN/KEY=VALUE"), "{wrong}");
}
