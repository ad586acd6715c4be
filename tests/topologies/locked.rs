//! A Redis that lets in whom it knows: by TLS, by certificates, by user and password.

use crate::support::authority::Authority;
use crate::support::{Redis, Tollgate, engines, free_port, say};
use std::path::Path;
use tempfile::TempDir;

/// A Redis by TLS alone. Some engines are built without.
async fn by_tls(server: &Authority, clients: &Authority) -> Option<(Redis, u16)> {
    for engine in engines() {
        let (port, plain) = (free_port(), free_port());
        let folder = tempfile::tempdir().unwrap();
        let [_, cert, key] = server.files(folder.path(), "127.0.0.1").map(|file| file.display().to_string());
        let ca = folder.path().join("clients.pem");
        std::fs::write(&ca, clients.pem()).unwrap();
        let more = [
            "--tls-port",
            &port.to_string(),
            "--tls-cert-file",
            &cert,
            "--tls-key-file",
            &key,
            "--tls-ca-cert-file",
            &ca.display().to_string(),
        ];
        if let Some(redis) = Redis::start_with(engine, plain, folder, &more).await {
            return Some((redis, port));
        }
    }
    assert!(
        !std::env::var("CI").is_ok_and(|ci| ci == "true"),
        "no engine has TLS, and in CI nothing is skipped"
    );
    say("skipped: no engine here is built with TLS");
    None
}

async fn serve(port: u16, tls: &str) -> Tollgate {
    let store = format!("{{ url: \"rediss://127.0.0.1:{port}\", deadline: 2s, tls: {{ {tls} }} }}");
    Tollgate::start(&format!("store: {store}\nclasses: {{ read: {{ rate: 1/h, burst: 5 }} }}")).await
}

fn named(name: &str, file: &Path) -> String {
    format!("{name}: \"{}\"", file.display())
}

#[tokio::test]
async fn redis_is_asked_by_tls_if_it_is_trusted_and_trusts() {
    let (server, clients, other) = (Authority::new(), Authority::new(), Authority::new());
    let Some((_redis, port)) = by_tls(&server, &clients).await else { return };
    let folder = tempfile::tempdir().unwrap();
    let [client_ca, cert, key] = clients.files(folder.path(), "tollgate.test");
    let [ca, ..] = server.files(folder.path(), "server");
    let [unknown, other_cert, other_key] = other.files(folder.path(), "other");
    let own = format!("{}, {}", named("cert", &cert), named("key", &key));

    let good = serve(port, &format!("{}, {own}", named("ca", &ca))).await;
    let answer = good.serving().await.ask("alice", "read", None).await;
    assert!(!answer.degraded && answer.remaining == 4, "{answer:?}");

    let strange = format!("{}, {}", named("cert", &other_cert), named("key", &other_key));
    for wrong in [
        format!("{}, {own}", named("ca", &unknown)),
        format!("{}, {own}", named("ca", &client_ca)),
        // It is not shown who asks, or by whom he is not known.
        named("ca", &ca),
        format!("{}, {strange}", named("ca", &ca)),
        own.clone(),
    ] {
        let server = serve(port, &wrong).await;
        server.says("degraded: ").await;
        let answer = server.caller().await.ask("alice", "read", None).await;
        assert!(answer.degraded, "{wrong}: {answer:?}");
    }
}

#[tokio::test]
async fn a_user_of_redis_has_a_password_in_a_file() {
    for engine in engines() {
        let redis = Redis::start_on_port(engine).await;
        let may = ["ACL", "SETUSER", "gate", "on", ">of the gate", "~rl:*", "&rl:*"];
        let commands = "+eval +evalsha +get +set +del +mget +exists +expire +pexpireat +time +subscribe +pubsub +ping +hello +client";
        redis.command(&[&may[..], &commands.split(' ').collect::<Vec<_>>()].concat()).await;
        redis.command(&["ACL", "SETUSER", "default", "off"]).await;
        let folder: TempDir = tempfile::tempdir().unwrap();
        let password = folder.path().join("password");
        for (text, right) in [("of the gate\n", true), ("of another", false)] {
            std::fs::write(&password, text).unwrap();
            let store = format!(
                "{{ url: \"redis://gate:overridden@127.0.0.1:{}\", deadline: 2s, {} }}",
                redis.port(),
                named("password_file", &password)
            );
            let classes = "classes: { read: { rate: 1/h, burst: 5 } }";
            let mut server = Tollgate::start(&format!("store: {store}\n{classes}")).await;
            if right {
                let answer = server.serving().await.ask("alice", "read", None).await;
                assert!(!answer.degraded && answer.remaining == 4, "{engine:?}: {answer:?}");
            } else {
                server.says("degraded: ").await;
                assert!(server.caller().await.ask("alice", "read", None).await.degraded, "{engine:?}");
            }
            let said = server.process().output();
            assert!(!said.contains("of the gate") && !said.contains("of another"), "{said}");
        }
    }
}
