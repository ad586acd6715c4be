use super::*;

fn fault(line: u64, path: &str) -> Fault {
    Fault { file: "a.yaml".to_owned(), line, column: 3, path: path.to_owned(), message: "wrong".to_owned() }
}

#[test]
fn a_fault_is_a_line() {
    assert_eq!(fault(7, "server.grpc").to_string(), "a.yaml:7:3: server.grpc: wrong");
    assert_eq!(fault(7, "").to_string(), "a.yaml:7:3: wrong");
}

#[test]
fn faults_are_told_from_top_to_bottom_and_not_without_end() {
    let mut report = Report::new("a.yaml");
    report.faults = (1..=30).rev().map(|line| fault(line, "")).collect();
    let text = report.end(()).unwrap_err().to_string();
    assert!(text.starts_with("a.yaml:1:3: wrong\na.yaml:2:3: wrong\n"));
    assert!(text.ends_with("a.yaml:20:3: wrong\n… and 10 more"));
    assert_eq!(Faults(vec![fault(1, "")]).to_string(), "a.yaml:1:3: wrong");
}

#[test]
fn what_is_quoted_is_short_escaped_and_no_url() {
    assert_eq!(printable("a\nb\u{7f}"), "a\\nb\\u{7f}");
    assert_eq!(printable(&"ü".repeat(65)), format!("{}…", "ü".repeat(64)));
    assert_eq!(printable("redis://me:hunter2@cache"), "redis://…");
}

#[test]
fn an_argument_has_no_types() {
    assert_eq!(Scalar::argument("5").within(1..=5_u32), Ok(5));
    assert!(Scalar::argument("6").within(1..=5_u32).is_err());
    assert!(Scalar::argument("300").within(0..=u8::MAX).is_err());
    assert_eq!(Scalar::argument("5s").span(), Ok(std::time::Duration::from_secs(5)));
}
