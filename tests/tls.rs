//! gRPC by TLS: who is trusted, and who is served. By a client that shares no code with the server.

use crate::support::authority::Authority;
use crate::support::{DEADLINE, Tollgate, eventually, grpcurl};
use std::path::Path;
use tollgate_client::Client;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

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

/// `tollgate ask` and the client crate show what they are told to.
#[tokio::test]
async fn our_own_clients_show_certificates_and_tokens() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let folder = tempfile::tempdir().unwrap();
    let [ca, cert, key] = ours.files(folder.path(), "localhost").map(|file| text(&file));
    let [client_ca, client_cert, client_key] = theirs.files(folder.path(), "gateway").map(|file| text(&file));
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, "a secret of gateway 1\n").unwrap();
    let token_file = text(&token_file);
    let server = Tollgate::start(&format!(
        "server: {{ tls: {{ cert: \"{cert}\", key: \"{key}\", client_ca: \"{client_ca}\" }}, tokens: [ \"{token_file}\" ] }}\n{CLASSES}"
    ))
    .await;
    let url = format!("https://localhost:{}", server.grpc().port());
    let ask = async |how: &[&str]| {
        let mut command = Tollgate::command();
        command.args(["ask", "alice", "--class", "read", "--deadline", "10s", "--server", &url]).args(how);
        tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap()
    };
    let known = ["--ca", &ca, "--cert", &client_cert, "--key", &client_key];
    let told = eventually("it is served", async || {
        let told = ask(&[&known[..], &["--token-file", &token_file]].concat()).await;
        told.status.success().then_some(told)
    })
    .await;
    assert!(String::from_utf8_lossy(&told.stdout).starts_with("allowed: 1 taken"), "{told:?}");
    let told = ask(&known).await;
    assert!(
        !told.status.success() && String::from_utf8_lossy(&told.stderr).contains("no bearer token"),
        "{told:?}"
    );
    assert!(!ask(&["--ca", &ca, "--token-file", &token_file]).await.status.success(), "no certificate");
    assert!(!ask(&["--token-file", &token_file]).await.status.success(), "an authority that nobody knows");

    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ours.pem())).identity(
        Identity::from_pem(std::fs::read(client_cert).unwrap(), std::fs::read(client_key).unwrap()),
    );
    let client = |token: &str| Client::builder(&url).deadline(DEADLINE).tls(tls.clone()).token(token);
    let known = client("a secret of gateway 1").build().unwrap();
    assert!(known.decide("bob", "read", None).await.unwrap().allowed());
    let unknown = client("a secret of gateway 2");
    assert!(!format!("{unknown:?}").contains("secret"), "{unknown:?}");
    let error = unknown.build().unwrap().decide("bob", "read", None).await.unwrap_err();
    assert!(error.is_refusal() && error.to_string().contains("not a token that is known here"), "{error}");
    let error = client("a\nb").build().unwrap_err();
    assert_eq!(error.to_string(), "token: ***; expected printable characters of ASCII");
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
    let status = async |request: String| crate::support::http::exchange(http, &request).await.unwrap().status;
    assert_eq!(status(post("")).await, 401);
    assert_eq!(status(post("Authorization: bearer a secret of gateway 1\r\n")).await, 200);
    for (path, expected) in [("/rlconfig", 401), ("/metrics", 401), ("/healthcheck", 200), ("/ready", 200)] {
        let get = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        assert_eq!(status(get).await, expected, "{path}");
    }

    // A new one is taken and the old one is not, without a restart; what can not be one changes nothing.
    std::fs::write(&file, "a secret of gateway 2\n").unwrap();
    let by = |secret: &str| format!("Authorization: Bearer a secret of {secret}\r\n");
    eventually("the new token is known", async || {
        (status(post(&by("gateway 2"))).await == 200).then_some(())
    })
    .await;
    assert_eq!(status(post(&by("gateway 1"))).await, 401);
    std::fs::write(&file, "short\n").unwrap();
    server.says("a token of 5 bytes").await;
    assert_eq!(status(post(&by("gateway 2"))).await, 200);

    // Whose file is gone is not heard any more, and rules are read all the same.
    std::fs::remove_file(&file).unwrap();
    eventually("nobody is known", async || (status(post(&by("gateway 2"))).await == 401).then_some(())).await;
    std::fs::write(server.config(), config.replace("classes: {", "classes: { write: { rate: 1/h },"))
        .unwrap();
    server.says("2 classes are loaded").await;
    std::fs::write(&file, "a secret of gateway 3\n").unwrap();
    eventually("a new one is known", async || (status(post(&by("gateway 3"))).await == 200).then_some(()))
        .await;
    assert!(!server.process().output().contains("a secret of"), "{}", server.process().output());
}
