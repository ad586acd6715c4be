//! gRPC by TLS: who is trusted, and who is served. By a client that shares no code with the server.

use crate::support::authority::Authority;
use crate::support::{Tollgate, eventually, grpcurl};
use std::path::Path;

const CLASSES: &str = "classes: { read: { rate: 1/h, burst: 5 } }";

fn text(file: &Path) -> String {
    file.display().to_string()
}

async fn ask(server: &Tollgate, how: &[&str]) -> Result<String, String> {
    let body = r#"{"key":"alice","class":"read"}"#;
    let address = format!("localhost:{}", server.grpc().port());
    let method = "tollgate.v1.RateLimiter/ShouldRateLimit";
    let told = grpcurl(&[how, &["-max-time", "10", "-d", body, &address, method]].concat()).await;
    let (out, error) =
        (String::from_utf8_lossy(&told.stdout).into(), String::from_utf8_lossy(&told.stderr).into());
    if told.status.success() { Ok(out) } else { Err(error) }
}

#[tokio::test]
async fn grpc_is_served_by_tls_and_to_those_with_a_certificate() {
    let (ours, theirs, other) = (Authority::new(), Authority::new(), Authority::new());
    let folder = tempfile::tempdir().unwrap();
    let [ca, cert, key] = ours.files(folder.path(), "localhost").map(|file| text(&file));
    let [client_ca, client_cert, client_key] = theirs.files(folder.path(), "gateway").map(|file| text(&file));
    let [other_ca, other_cert, other_key] = other.files(folder.path(), "other").map(|file| text(&file));
    let own = format!("cert: \"{cert}\", key: \"{key}\"");

    let open = Tollgate::start(&format!("server: {{ tls: {{ {own} }} }}\n{CLASSES}")).await;
    eventually("it serves", async || ask(&open, &["-cacert", &ca]).await.ok()).await;
    let answer = ask(&open, &["-cacert", &ca]).await.unwrap();
    assert!(answer.contains("VERDICT_ALLOW"), "{answer}");
    for wrong in [&["-cacert", other_ca.as_str()][..], &["-plaintext"]] {
        assert!(ask(&open, wrong).await.is_err(), "{wrong:?}");
    }

    let mutual = format!("server: {{ tls: {{ {own}, client_ca: \"{client_ca}\" }} }}\n{CLASSES}");
    let mutual = Tollgate::start(&mutual).await;
    let known = ["-cacert", &ca, "-cert", &client_cert, "-key", &client_key];
    eventually("it serves", async || ask(&mutual, &known).await.ok()).await;
    for wrong in [&["-cacert", ca.as_str()][..], &["-cacert", &ca, "-cert", &other_cert, "-key", &other_key]]
    {
        assert!(ask(&mutual, wrong).await.is_err(), "{wrong:?}");
    }
    assert!(ask(&mutual, &known).await.is_ok());
}

/// A certificate is replaced while it serves; one that can not be used is not.
#[tokio::test]
async fn a_new_certificate_is_shown_without_a_restart() {
    let (first, second) = (Authority::new(), Authority::new());
    let folder = tempfile::tempdir().unwrap();
    let [ca, cert, key] = first.files(folder.path(), "localhost");
    let second_ca = folder.path().join("second");
    std::fs::write(&second_ca, second.pem()).unwrap();
    let config =
        format!("server: {{ tls: {{ cert: \"{}\", key: \"{}\" }} }}\n{CLASSES}", text(&cert), text(&key));
    let mut server = Tollgate::start(&config).await;
    let (ca, second_ca) = (text(&ca), text(&second_ca));
    eventually("it serves", async || ask(&server, &["-cacert", &ca]).await.ok()).await;

    // Between the two files it is a certificate with the key of another.
    let (new_cert, new_key) = second.sign("localhost");
    std::fs::write(&cert, &new_cert).unwrap();
    server.says("what is wrong does not hold, what held before does: server.tls.").await;
    assert!(ask(&server, &["-cacert", &ca]).await.is_ok(), "what held before does");
    std::fs::write(&key, &new_key).unwrap();
    eventually("it shows the new one", async || ask(&server, &["-cacert", &second_ca]).await.ok()).await;
    assert!(ask(&server, &["-cacert", &ca]).await.is_err());

    std::fs::remove_file(&key).unwrap();
    server.says("server.tls.key: ").await;
    std::fs::write(&key, "hunter2\n").unwrap();
    server.says("expected a private key in PEM").await;
    assert!(ask(&server, &["-cacert", &second_ca]).await.is_ok());
    let told = server.process().output();
    assert!(!told.contains("hunter2") && !told.contains("panicked"), "{told}");
}

#[tokio::test]
async fn who_shows_no_token_is_not_heard() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gateway-1");
    std::fs::write(&file, "a secret of gateway 1\n").unwrap();
    let config = format!("server: {{ tokens: [ \"{}\" ] }}\n{CLASSES}", text(&file));
    let mut server = Tollgate::start(&config).await;
    let caller = server.serving().await;
    let shown = |token: &str| format!("authorization: Bearer {token}");
    let answer = ask(&server, &["-plaintext", "-H", &shown("a secret of gateway 1")]).await.unwrap();
    assert!(answer.contains("VERDICT_ALLOW"), "{answer}");
    for (how, told) in [
        (&["-plaintext"][..], "no bearer token"),
        (&["-plaintext", "-H", &shown("a secret of gateway 2")], "not a token that is known here"),
    ] {
        // Reflection is not for strangers either, so grpcurl has to show its token for that alone.
        let reflection = ["-reflect-header", &shown("a secret of gateway 1")];
        let error = ask(&server, &[how, &reflection].concat()).await.unwrap_err();
        assert!(error.contains("Unauthenticated") && error.contains(told), "{error}");
    }
    let error = caller.try_ask("alice", "read", None).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::Unauthenticated);
    assert_eq!(caller.health().await, tonic_health::pb::health_check_response::ServingStatus::Serving);

    let http = server.http().await;
    let body = r#"{"domain":"edge","descriptors":[{"entries":[{"key":"k"}]}]}"#;
    let post = |more: &str| {
        format!(
            "POST /json HTTP/1.1\r\nhost: x\r\n{more}content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )
    };
    let status = async |request: String| crate::envoy::exchange(http, &request).await.unwrap().status;
    assert_eq!(status(post("")).await, 401);
    assert_eq!(status(post("Authorization: bearer a secret of gateway 1\r\n")).await, 200);
    for (path, expected) in [("/rlconfig", 401), ("/healthcheck", 200), ("/ready", 200)] {
        let get = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        assert_eq!(status(get).await, expected, "{path}");
    }
    assert!(!server.process().output().contains("a secret of"), "{}", server.process().output());
}
