//! Tests of what the other tests stand on: if these fail, look here first.

use crate::support::{Process, Redis, Tollgate, engines, eventually, grpcurl};
use deadpool_redis::redis::Value;
use rustix::process::{Pid, Signal, test_kill_process};
use std::os::unix::process::ExitStatusExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;

fn pong() -> Value {
    Value::SimpleString("PONG".into())
}

#[tokio::test]
async fn a_redis_of_each_engine_can_be_stopped_killed_and_restarted() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        assert_eq!(redis.command(&["PING"]).await, pong(), "{engine:?}");
        assert_eq!(redis.command(&["SET", "a key", "a value"]).await, Value::Okay, "{engine:?}");

        redis.stop();
        let why = redis.try_command(&["PING"]).await.expect_err("it is stopped");
        assert!(why.is_timeout(), "{engine:?}: {why}");
        redis.cont();
        assert_eq!(
            redis.command(&["GET", "a key"]).await,
            Value::BulkString(b"a value".into()),
            "{engine:?}"
        );

        redis.kill();
        let why = redis.try_command(&["PING"]).await.expect_err("it is gone");
        assert!(why.is_connection_refusal(), "{engine:?}: {why}");
        let before = redis.url();
        redis.restart().await;
        assert_eq!(redis.url(), before);
        assert_eq!(redis.command(&["DBSIZE"]).await, Value::Int(0), "{engine:?}: it restarts empty");

        // A stopped process does not hear a request to end, and must go all the same.
        redis.stop();
        let pid = redis.process().pid();
        drop(redis);
        assert!(is_gone(pid), "{engine:?}");
    }
}

#[tokio::test]
async fn a_redis_of_each_engine_listens_on_a_port() {
    for engine in engines() {
        let mut one = Redis::start_on_port(engine).await;
        let other = Redis::start_on_port(engine).await;
        assert_ne!(one.url(), other.url());
        assert_eq!(other.command(&["SET", "whose", "other's"]).await, Value::Okay);
        one.restart().await;
        assert_eq!(one.command(&["GET", "whose"]).await, Value::Nil, "{engine:?}: each has its own keys");
    }
}

#[test]
fn a_process_is_gone_when_its_owner_panics() {
    let mut pid = None;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let process = Process::spawn(Command::new("sleep").arg("600"));
        pid = Some(process.pid());
        // Not `panic!`, which would print what looks like a failure.
        resume_unwind(Box::new("as a failed test does"));
    }));
    assert!(panicked.is_err());
    assert!(is_gone(pid.unwrap()));
}

#[tokio::test]
async fn the_last_words_of_a_process_are_kept() {
    let mut process = Process::spawn(Command::new("sh").args(["-c", "echo no >&2; exit 3"]));
    assert_eq!(process.exit().await.code(), Some(3));
    assert_eq!(process.says("no", |line| line == "no").await, "no");
    assert_eq!(process.output(), "    no\n");
}

/// A stand-in that does what the rig expects of the server.
const STAND_IN: &str = r#"
    trap 'echo ending >&2; exit 0' TERM
    echo "a stand-in for tollgate"
    echo "  grpc     127.0.0.1:43211 (a remark)"
    echo "  http     127.0.0.1:43212"
    echo "its rules: $(cat "$2")" >&2
    while :; do sleep 0.01; done
"#;

#[tokio::test]
async fn a_server_is_found_by_what_it_prints_and_ends_when_asked() {
    let mut server =
        Tollgate::run(Command::new("sh").args(["-c", STAND_IN, "tollgate"]), "store: memory").await;
    assert_eq!(server.grpc().to_string(), "127.0.0.1:43211");
    assert_eq!(server.http().await.to_string(), "127.0.0.1:43212");
    assert_eq!(server.says("rules").await, "its rules: store: memory");
    assert_eq!(std::fs::read_to_string(server.config()).unwrap(), "store: memory");
    assert!(server.terminate().await.success());
    assert_eq!(server.says("end").await, "ending");
}

#[tokio::test]
async fn a_server_that_crashes_says_by_which_signal() {
    let mut server = Process::spawn(Command::new("sh").args(["-c", STAND_IN, "tollgate", "", "/dev/null"]));
    server.says("its rules", |line| line.starts_with("its rules")).await;
    server.signal(Signal::KILL);
    assert_eq!(server.exit().await.signal(), Some(9));
}

#[tokio::test]
async fn grpcurl_runs() {
    let output = grpcurl(&["-version"]).await;
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(said.starts_with("grpcurl"), "{said}");
}

#[tokio::test]
async fn what_is_waited_for_is_asked_again_and_again() {
    let mut asked = 0;
    let found = eventually("the third time", async || {
        asked += 1;
        (asked == 3).then_some("here")
    })
    .await;
    assert_eq!(found, "here");
    assert_eq!(asked, 3);
}

fn is_gone(pid: Pid) -> bool {
    test_kill_process(pid).is_err()
}
