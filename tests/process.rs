//! The program as its operator meets it: what it prints, what it takes, how it starts and how it ends.

mod ending;

use crate::support::calls::allowed;
use crate::support::{Engine, Process, Redis, Tollgate, grpcurl};
use rustix::process::Signal;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Output};
use tempfile::TempDir;

const CONFIG: &str = "
classes:
  read:  { rate: 100/s, burst: 200 }
  login: { rate: 5/m, burst: 5, sensitive: true, penalty: { strikes: 3 } }
  probe: { cost: 0 }
";

/// Runs the program to its end.
async fn run(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A file of that text, in a folder that goes with it.
fn file(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rules.yaml");
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

/// It ends by itself, says why, and does not panic.
fn fails(output: &Output, says: &[&str]) {
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
    for says in says {
        assert!(errors.contains(says), "{says:?} in:\n{errors}");
    }
}

#[tokio::test]
async fn the_banner_says_where_by_what_and_how_to_try() {
    let mut server = Tollgate::start(CONFIG).await;
    let address = server.grpc().to_string();
    let config = server.config().display().to_string();
    server.says("try ").await;
    let banner = server.process().output();
    for line in [
        format!("tollgate {}", env!("CARGO_PKG_VERSION")),
        format!("  grpc     {address}"),
        "  store    memory".to_owned(),
        format!("  rules    {config}"),
        "  class    read: 100 each 1s, burst 200, cost 1, token_bucket".to_owned(),
        "  class    login: 5 each 1m, burst 5, cost 1, token_bucket, sensitive, penalty".to_owned(),
        "  class    probe: never limited".to_owned(),
    ] {
        assert!(banner.lines().any(|said| said.trim_start() == line.trim_start()), "{line:?} in:\n{banner}");
    }
    server.says("  http     127.0.0.1:").await;
}

/// The line is for people to paste into a shell, so a shell runs it here.
#[tokio::test]
async fn the_printed_call_works_as_it_stands() {
    let server = Tollgate::start(CONFIG).await;
    let line = server.says("grpcurl").await;
    let (_, line) = line.split_once("grpcurl ").unwrap();
    let words = Command::new("sh").args(["-c", &format!("printf '%s\\n' {line}")]).output().unwrap();
    let words = text(&words.stdout);
    let output = grpcurl(&words.lines().collect::<Vec<_>>()).await;
    assert!(output.status.success(), "{line}: {output:?}");
    assert!(text(&output.stdout).contains("VERDICT_ALLOW"), "{output:?}");
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut command = Tollgate::command();
    let folder = tempfile::tempdir().unwrap();
    command.args(["--grpc", &address]).current_dir(folder.path());
    fails(&run(command).await, &[&address, "grpc", "Address already in use"]);
}

#[tokio::test]
async fn without_a_file_the_built_in_rules_hold_and_are_printed() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Tollgate::command();
    let process = Process::spawn(
        command.args(["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]).current_dir(folder.path()),
    );
    process.says("its rules", |line| line.trim() == "rules    <built-in>").await;
    process
        .says("a class of them", |line| line.contains("class    search: 100 each 1s, burst 200, cost 10"))
        .await;
}

#[tokio::test]
async fn check_says_whether_a_file_is_valid() {
    let (_folder, path) = file(CONFIG);
    let mut command = Tollgate::command();
    command.arg("check").arg(&path);
    let output = run(command).await;
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout), format!("{}: valid, 3 classes\n", path.display()));
}

/// What can be wrong with a file, and what is said of it besides its name and the line.
const FAULTS: &[(&str, &str, &[&str])] = &[
    ("an unknown key", "classes:\n  read: { rate: 1/s, brust: 5 }", &["2", "brust"]),
    ("an unknown section", "clases:\n  read: { rate: 1/s }", &["1", "clases"]),
    ("a wrong type", "classes:\n  read: { rate: 1/s, burst: many }", &["2", "classes.read.burst", "many"]),
    ("a wrong rate", "classes:\n  read:\n    rate: 1/fortnight", &["3", "classes.read.rate", "1/fortnight"]),
    ("an impossible cost", "classes:\n  read: { rate: 1/s, burst: 5, cost: 6 }", &["2", "6", "5"]),
    ("no rate", "classes:\n  read: { burst: 5 }", &["2", "classes.read", "rate"]),
    (
        "an unknown algorithm",
        "classes:\n  read: { rate: 1/s, algorithm: guess }",
        &["2", "classes.read.algorithm", "guess", "token_bucket"],
    ),
    (
        "an impossible penalty",
        "classes:\n  read: { rate: 1/s, penalty: { strikes: 1, base: 2h, cap: 1h } }",
        &["2", "classes.read.penalty", "2h", "1h"],
    ),
    ("no YAML", "classes: [", &["1"]),
    ("no classes", "server: { grpc: 127.0.0.1:0 }", &["classes"]),
    (
        "a wrong address",
        "server: { grpc: here }\nclasses:\n  read: { rate: 1/s }",
        &["1", "server.grpc", "here"],
    ),
    ("a wrong store", "store: postgres://x\nclasses:\n  read: { rate: 1/s }", &["1", "store"]),
    (
        "a wrong number",
        "server: { max_in_flight: 0 }\nclasses:\n  read: { rate: 1/s }",
        &["1", "max_in_flight"],
    ),
];

#[tokio::test]
async fn what_is_wrong_with_a_file_is_said_with_its_line() {
    for (case, config, says) in FAULTS {
        let (_folder, path) = file(config);
        let place = match says.first().filter(|says| says.parse::<u32>().is_ok()) {
            Some(line) => format!("{}:{line}:", path.display()),
            None => path.display().to_string(),
        };
        let says: Vec<_> = std::iter::once(place.as_str()).chain(says.iter().skip(1).copied()).collect();

        let mut check = Tollgate::command();
        check.arg("check").arg(&path);
        let checked = run(check).await;
        println!("{case}: {}", text(&checked.stderr));
        fails(&checked, &says);

        // Serving by it fails in the same words.
        let mut serve = Tollgate::command();
        serve.args(["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--config"]).arg(&path);
        let served = run(serve).await;
        fails(&served, &says);
        assert_eq!(text(&served.stderr), format!("tollgate: {}", text(&checked.stderr)), "{case}");
        assert_eq!(text(&served.stdout), "", "{case}: no banner of a server that does not serve");
    }
}

#[tokio::test]
async fn a_file_that_is_not_there_is_named() {
    let mut check = Tollgate::command();
    check.args(["check", "/nowhere/rules.yaml"]);
    fails(&run(check).await, &["/nowhere/rules.yaml", "No such file"]);
    let mut serve = Tollgate::command();
    serve.args(["--config", "/nowhere/rules.yaml"]);
    fails(&run(serve).await, &["/nowhere/rules.yaml", "No such file"]);
}

#[tokio::test]
async fn wrong_arguments_are_named() {
    for (arguments, says) in [
        (&["--grpc", "here"][..], "--grpc"),
        (&["--max-in-flight", "0"], "--max-in-flight"),
        (&["--store-deadline", "soon"], "--store-deadline"),
        (&["--nonsense"], "--nonsense"),
        (&["nonsense"], "nonsense"),
        (&["check"], "<FILE>"),
        (&["ask"], "<KEY>"),
    ] {
        let mut command = Tollgate::command();
        command.args(arguments);
        let output = run(command).await;
        // clap's own code for wrong usage.
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(text(&output.stderr).contains(says), "{arguments:?}: {output:?}");
    }
    for (arguments, says) in [(&["--store", "postgres://x"][..], "--store"), (&["--log", "=="], "log")] {
        let mut command = Tollgate::command();
        command
            .args(arguments)
            .args(["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"])
            .current_dir(std::env::temp_dir());
        fails(&run(command).await, &[says]);
    }
}

#[tokio::test]
async fn help_shows_the_defaults() {
    let mut command = Tollgate::command();
    command.arg("--help");
    let output = run(command).await;
    assert!(output.status.success());
    let help = text(&output.stdout);
    for says in ["127.0.0.1:8081", "127.0.0.1:8080", "TOLLGATE_STORE", "25ms", "512", "4096", "check", "ask"]
    {
        assert!(help.contains(says), "{says:?} in:\n{help}");
    }
}

#[tokio::test]
async fn ask_is_one_decision() {
    let server = Tollgate::start(CONFIG).await;
    let url = format!("http://{}", server.grpc());
    let ask = async |arguments: &[&str]| {
        let mut command = Tollgate::command();
        command.args(["ask", "alice", "--server", &url]).args(arguments);
        run(command).await
    };
    let allowed = ask(&["--class", "login", "--cost", "5"]).await;
    assert!(allowed.status.success(), "{allowed:?}");
    let said = text(&allowed.stdout);
    assert!(said.starts_with("allowed: 5 taken, 0 of 5 left") && said.ends_with("(class login)\n"), "{said}");

    let denied = text(&ask(&["--class", "login"]).await.stdout);
    assert!(denied.starts_with("denied: over the limit; would fit in "), "{denied}");
    let free = text(&ask(&["--class", "probe"]).await.stdout);
    assert_eq!(free, "allowed: class probe is never limited\n");

    fails(&ask(&["--class", "login", "--cost", "6"]).await, &["cost: 6 is above the burst of 5", &url]);
    fails(&ask(&[]).await, &["class: \"default\" has no rule"]);
    let mut nobody = Tollgate::command();
    nobody.args(["ask", "alice", "--server", "http://127.0.0.1:1"]);
    fails(&run(nobody).await, &["http://127.0.0.1:1"]);
}

#[tokio::test]
async fn variables_beat_the_file_and_arguments_beat_variables() {
    let redis = Redis::start(Engine::Valkey).await;
    let mut command = Tollgate::command();
    command
        .env("TOLLGATE_STORE", redis.url())
        .env("TOLLGATE_PREFIX", "by_variable")
        .env("TOLLGATE_MAX_KEY_BYTES", "10");
    let config = format!("server: {{ max_key_bytes: 5 }}\nstore: memory\n{CONFIG}");
    let server = Tollgate::run(&mut command, &config).await;
    server.says(&format!("store    {}", redis.url())).await;
    let caller = server.serving().await;
    assert!(allowed(&caller.ask("0123456789", "read", None).await));
    let status = caller.try_ask("0123456789a", "read", None).await.unwrap_err();
    assert_eq!(status.message(), "key: 11 bytes; expected at most 10");
    assert_eq!(redis.keys().await, ["by_variable:{0123456789}:read"]);

    // And where it listens, and which file it reads, when nothing else says so.
    let (_folder, path) = file("server: { grpc: 127.0.0.1:1 }\nclasses: { only: { rate: 1/s } }");
    let mut command = Tollgate::command();
    command
        .env("TOLLGATE_CONFIG", &path)
        .env("TOLLGATE_GRPC", "127.0.0.1:0")
        .env("TOLLGATE_HTTP", "127.0.0.1:0")
        .env("TOLLGATE_STORE", "nonsense");
    let process = Process::spawn(command.args(["--store", "memory"]));
    process.says("its rules", |line| line.ends_with(&path.display().to_string())).await;
    process.says("its class", |line| line.contains("class    only:")).await;
    process.says("its store", |line| line.trim() == "store    memory").await;
}

#[tokio::test]
async fn the_log_is_as_loud_as_it_is_told() {
    let (_folder, path) = file(CONFIG);
    let serve = |level: &str| {
        let mut command = Tollgate::command();
        command
            .env("TOLLGATE_LOG", level)
            .args(["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--config"])
            .arg(&path);
        Process::spawn(&mut command)
    };
    for (level, is_there) in [("info", true), ("error", false), ("tollgate_server=info", true)] {
        let mut process = serve(level);
        process.says("how to try it", |line| line.starts_with("try ")).await;
        process.signal(Signal::TERM);
        assert!(process.exit().await.success());
        let said = process.output();
        assert_eq!(said.contains("stopping: calls in flight finish"), is_there, "{level}:\n{said}");
    }
    let mut command = Tollgate::command();
    command
        .env("TOLLGATE_LOG", "error")
        .args(["--log", "info", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--config"])
        .arg(&path);
    let process = Process::spawn(&mut command);
    process.says("that it serves", |line| line.contains("the store is reached: serving")).await;
}

#[tokio::test]
async fn every_line_of_a_json_log_is_json() {
    let (_folder, path) = file(CONFIG);
    // The banner is for people and goes elsewhere.
    let mut command = Command::new("sh");
    command.args(["-c", r#"exec "$@" >/dev/null"#, "sh"]).arg(Tollgate::command().get_program());
    command
        .args([
            "--log-format",
            "json",
            "--log",
            "debug",
            "--grpc",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--config",
        ])
        .arg(&path);
    let mut process = Process::spawn(&mut command);
    process.says("that it serves", |line| line.contains("serving")).await;
    process.signal(Signal::TERM);
    assert!(process.exit().await.success());
    process.says("that it stops", |line| line.contains("stopping")).await;
    let said = process.output();
    for line in said.lines() {
        let event: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|why| panic!("{line}: {why}"));
        assert!(event["timestamp"].is_string() && event["level"].is_string(), "{line}");
        assert!(event["fields"]["message"].is_string(), "{line}");
    }
}

#[tokio::test]
async fn a_password_is_never_said() {
    const PASSWORD: &str = "hunter2-of-the-store";
    let (_folder, path) = file(CONFIG);
    for (store, works) in [
        ("redis://user:hunter2-of-the-store@127.0.0.1:1", true),
        ("redis://:hunter2-of-the-store@127.0.0.1:1/0", true),
        ("redis+unix:///nowhere.sock?pass=hunter2-of-the-store", true),
        ("redis://user:hunter2-of-the-store@127.0.0.1:1/not-a-number", false),
        ("postgres://user:hunter2-of-the-store@host", false),
        ("hunter2-of-the-store", false),
    ] {
        for as_variable in [false, true] {
            let mut command = Tollgate::command();
            command
                .args(["--log", "trace", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--config"])
                .arg(&path);
            if as_variable {
                command.env("TOLLGATE_STORE", store);
            } else {
                command.args(["--store", store]);
            }
            let mut process = Process::spawn(&mut command);
            if works {
                process.says("that it can not reach it", |line| line.contains("degraded: ")).await;
                process.signal(Signal::TERM);
            }
            assert_eq!(process.exit().await.success(), works, "{store}: {}", process.output());
            process.says("anything", |_| true).await;
            assert!(!process.output().contains(PASSWORD), "{store}:\n{}", process.output());
        }
    }
    // Nor of a file.
    let (_folder, path) = file(&format!("store: {{ url: \"redis://:{PASSWORD}@h/x\", port: 1 }}\n{CONFIG}"));
    let mut check = Tollgate::command();
    check.arg("check").arg(&path);
    let output = run(check).await;
    fails(&output, &["store"]);
    assert!(!text(&output.stderr).contains(PASSWORD), "{output:?}");
}
