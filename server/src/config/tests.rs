use super::*;
use clap::{CommandFactory, Parser};
use proptest::prelude::*;
use std::fs;
use std::time::Duration;

const CLASSES: &str = "classes: { a: { rate: 1/s } }\n";

fn parse(text: impl AsRef<[u8]>) -> Result<Config, ConfigError> {
    Config::parse(Source::File("a.yaml".into()), text.as_ref(), None)
}

/// The config of a file with these lines and a class.
fn with(lines: &str) -> Config {
    parse(format!("{lines}\n{CLASSES}")).unwrap_or_else(|error| panic!("{lines}: {error}"))
}

fn faults(text: impl AsRef<[u8]>) -> Vec<Fault> {
    match parse(text) {
        Err(ConfigError::Faults(faults)) => faults.iter().cloned().collect(),
        other => panic!("no faults: {other:?}"),
    }
}

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    overrides: Overrides,
}

fn arguments(line: &[&str]) -> Result<Overrides, clap::Error> {
    Line::try_parse_from(["tollgate"].iter().chain(line)).map(|line| line.overrides)
}

#[test]
fn what_is_not_said_has_a_default() {
    let config = with("");
    assert_eq!((config.server, config.store), (Server::default(), StoreConfig::default()));
    assert_eq!(config.source.to_string(), "a.yaml");
    let empty = with("server: {}\nstore: {}\ndomains: []");
    assert_eq!((empty.server, empty.store), (Server::default(), StoreConfig::default()));
}

#[test]
fn what_is_said_holds() {
    let config = with(
        "server: { grpc: 0.0.0.0:1, http: \"[::1]:2\", max_key_bytes: 65536, max_in_flight: 1,
                    max_connections: 2, max_connections_per_peer: 3, max_connection_age: 1s }\n\
         store: { url: redis://cache/1, prefix: \"a:é\", deadline: 1s 500ms, connections: 64, instances: 500,
                  max_keys: 100000000, max_bytes: 1000000 }",
    );
    let server = Server {
        grpc: "0.0.0.0:1".parse().unwrap(),
        http: "[::1]:2".parse().unwrap(),
        max_key_bytes: 65_536,
        max_in_flight: 1,
        max_connections: 2,
        max_connections_per_peer: 3,
        max_connection_age: Duration::from_secs(1),
        tls: None,
        tokens: Vec::new(),
    };
    let store = StoreConfig {
        url: StoreUrl::new("redis://cache/1").unwrap(),
        password_file: None,
        sentinel_password_file: None,
        tls: StoreTls::default(),
        prefix: "a:é".to_owned(),
        deadline: Duration::from_millis(1500),
        connections: 64,
        instances: 500,
        max_keys: 100_000_000,
        max_bytes: 1_000_000,
    };
    assert_eq!((config.server, config.store), (server, store));
    assert_eq!(with("store: memory").store.url, StoreUrl::Memory);
    assert_eq!(with("store: redis://cache").store.url, StoreUrl::new("redis://cache").unwrap());
    assert_eq!(with("\u{feff}store: memory").store.url, StoreUrl::Memory);
}

/// One wrong line, and the column, the path and a piece of what is said of it.
#[test]
fn a_wrong_setting_is_named_with_its_place() {
    let mut wrong = Vec::new();
    let address = "expected an IP address and a port, such as 127.0.0.1:8081 or \"[::1]:8081\", got ";
    for (line, column, path, message) in [
        ("sever: {}", 1, "sever", "unknown key `sever`; expected one of server, store, classes, domains"),
        ("classes: {}", 1, "", "the key `classes` is here twice"),
        ("server: 5", 9, "server", "expected a mapping"),
        ("server: [a]", 9, "server", "expected a mapping"),
        ("server:", 7, "server", "expected a mapping"),
        (
            "server: { port: 5 }",
            11,
            "server.port",
            "unknown key `port`; expected one of grpc, http, max_key_bytes, ",
        ),
        ("server: { http: ::1, http: ::1 }", 22, "server", "the key `http` is here twice"),
        ("server: { grpc: 8081 }", 17, "server.grpc", &format!("{address}8081")),
        ("server: { grpc: localhost:8081 }", 17, "server.grpc", &format!("{address}\"localhost:8081\"")),
        ("server: { grpc: }", 15, "server.grpc", &format!("{address}nothing")),
        ("server: { http: 127.0.0.1 }", 17, "server.http", &format!("{address}\"127.0.0.1\"")),
        ("server: { http: 127.0.0.1:65536 }", 17, "server.http", address),
        ("server: { max_key_bytes: 0 }", 26, "server.max_key_bytes", "from 1 to 65536, got 0"),
        ("server: { max_key_bytes: 65537 }", 26, "server.max_key_bytes", "from 1 to 65536, got 65537"),
        ("server: { max_key_bytes: 1k }", 26, "server.max_key_bytes", "from 1 to 65536, got \"1k\""),
        ("server: { max_in_flight: 0 }", 26, "server.max_in_flight", "from 1 to 1000000, got 0"),
        ("server: { max_in_flight: 1000001 }", 26, "server.max_in_flight", "from 1 to 1000000, got 1000001"),
        ("server: { max_connections: 0 }", 28, "server.max_connections", "from 1 to 1000000, got 0"),
        (
            "server: { max_connections_per_peer: -1 }",
            37,
            "server.max_connections_per_peer",
            "from 1 to 1000000, got -1",
        ),
        (
            "server: { max_connection_age: 0s }",
            31,
            "server.max_connection_age",
            "from 1s to 30days, got \"0s\"",
        ),
        ("store: [a]", 8, "store", "not a store; expected `memory` or a URL: redis://"),
        ("store: 5", 8, "store", "not a store"),
        ("store: -5", 8, "store", "not a store"),
        ("store: 1.5", 8, "store", "not a store"),
        ("store: true", 8, "store", "not a store"),
        ("store:", 6, "store", "not a store"),
        ("store: disk", 8, "store", "not a store"),
        ("store: http://cache", 8, "store", "unknown scheme `http://`; expected `memory` or a URL: redis://"),
        (
            "store: redis-sentinel://cache",
            8,
            "store",
            "not a valid redis-sentinel:// URL (no name of a primary",
        ),
        ("server: { tokens: [ nowhere ] }", 21, "server.tokens.0", "nowhere: can not be read"),
        ("server: { tls: { cert: . } }", 16, "server.tls", "no cert or no key; expected both"),
        ("server: { tls: { cert: nowhere, key: . } }", 24, "server.tls.cert", "nowhere: can not be read"),
        ("store: { password_file: nowhere }", 25, "store.password_file", "nowhere: can not be read"),
        ("store: { tls: { ca: nowhere } }", 21, "store.tls.ca", "nowhere: can not be read"),
        ("store: { tls: { cert: . } }", 15, "store.tls", "one of cert and key; expected both or none"),
        ("store: { tls: { nope: . } }", 17, "store.tls.nope", "unknown"),
        (
            "store: { uri: memory }",
            10,
            "store.uri",
            "unknown key `uri`; expected one of url, password_file, ",
        ),
        ("store: { url: memory, url: memory }", 23, "store", "the key `url` is here twice"),
        ("store: { url: 5 }", 15, "store.url", "not a store"),
        ("store: { url: redis:// }", 15, "store.url", "not a valid redis:// URL (Missing hostname)"),
        (
            "store: { prefix: 5 }",
            18,
            "store.prefix",
            "expected a text of 1 to 64 bytes without braces, spaces",
        ),
        ("store: { prefix: \"\" }", 18, "store.prefix", "got \"\""),
        ("store: { prefix: \"a{b\" }", 18, "store.prefix", "got \"a{b\""),
        ("store: { prefix: a b }", 18, "store.prefix", "got \"a b\""),
        ("store: { prefix: \"a\\0b\" }", 18, "store.prefix", "got \"a\\0b\""),
        ("store: { deadline: 25 }", 20, "store.deadline", "expected a duration from 1ms to 10s, got 25"),
        ("store: { deadline: soon }", 20, "store.deadline", "from 1ms to 10s, got \"soon\""),
        ("store: { deadline: 999us }", 20, "store.deadline", "from 1ms to 10s, got \"999us\""),
        ("store: { deadline: 10s 1ms }", 20, "store.deadline", "from 1ms to 10s, got \"10s 1ms\""),
        ("store: { connections: 0 }", 23, "store.connections", "from 1 to 64, got 0"),
        ("store: { connections: 65 }", 23, "store.connections", "from 1 to 64, got 65"),
        ("store: { max_keys: 0 }", 20, "store.max_keys", "from 1 to 100000000, got 0"),
        ("store: { max_bytes: 999999 }", 21, "store.max_bytes", "from 1000000 to 1000000000000, got 999999"),
        ("store: { max_keys: 100000001 }", 20, "store.max_keys", "from 1 to 100000000, got 100000001"),
        ("domains: [ edge.yaml ]", 12, "domains.0", "edge.yaml: can not be read: "),
        ("domains: edge.yaml", 10, "domains", "expected a list"),
        ("domains:", 8, "domains", "expected a list"),
    ] {
        let found = faults(format!("# Two lines before.\n{CLASSES}{line}\n"));
        let [fault] = found.as_slice() else { panic!("{line}: {found:?}") };
        if (fault.line, fault.column, fault.path.as_str()) != (3, column, path)
            || !fault.message.contains(message)
        {
            wrong.push(format!("{line} -> {fault}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A file that is wrong as a whole.
#[test]
fn a_broken_file_is_told_where() {
    let mut wrong = Vec::new();
    let huge = format!("{CLASSES}{}", "#".repeat(yaml::MOST_BYTES));
    let deep = format!("classes: {}", "[".repeat(100_000));
    for (text, line, column, message) in [
        (b"".as_slice(), 1, 1, "expected at least one class"),
        (b"# Nothing.\n", 1, 1, "expected at least one class"),
        (b"store: memory\n", 1, 1, "expected at least one class"),
        (b"store: memory\nclasses: {}\n", 2, 10, "expected at least one class"),
        (b"---\n", 1, 4, "expected a mapping"),
        (b"5", 1, 1, "expected a mapping"),
        (b"- a\n", 1, 1, "expected a mapping"),
        (b"classes:\n", 1, 8, "expected a mapping"),
        (b"classes: []\n", 1, 10, "expected a mapping"),
        (b"classes: { [a]: { rate: 1/s } }\n", 1, 12, "expected a text"),
        (b"classes: { a: { rate: 1/s }, a: { rate: 1/s } }\n", 1, 30, "the key `a` is here twice"),
        (b"classes: { a: { rate: 1/s } }\n---\nclasses: {}\n", 3, 1, "a second document begins here"),
        (b"classes: { a: { rate: 1/s } }\n...\nmore\n", 3, 1, "a second document begins here"),
        (b"classes:\n  a: { rate: 1/s\n", 2, 6, "unclosed bracket"),
        (b"classes:\n  a: { rate: \"1/s }\n", 2, 14, "unclosed quote"),
        (b"classes:\n\ta: { rate: 1/s }\n", 2, 2, "tabs"),
        (b"classes:\n  a: { rate: 1/s }\n b: { rate: 1/s }\n", 3, 2, ""),
        (b"classes: { a: *b }\n", 1, 15, "unknown"),
        (b"store: memory: 5\n", 1, 14, "mapping values are not allowed"),
        (b"store: memory\nclasses: { \xc3\xbc\xff: 5 }\n", 2, 13, "expected UTF-8 text"),
        (huge.as_bytes(), 1, 1, "expected a file of at most 4194304 bytes"),
        (deep.as_bytes(), 1, 10, ""),
    ] {
        let shown = String::from_utf8_lossy(text.get(..60).unwrap_or(text));
        let found = faults(text);
        let [fault] = found.as_slice() else { panic!("{shown}: {found:?}") };
        let one_line = !fault.to_string().contains('\n');
        if (fault.line, fault.column) != (line, column) || !fault.message.contains(message) || !one_line {
            wrong.push(format!("{shown} -> {fault}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_file_that_is_not_there_is_an_error_only_if_it_was_named() {
    let directory = tempfile::tempdir().unwrap();
    let load = |line: &[&str]| Config::load_in(directory.path(), &arguments(line).unwrap());
    assert_eq!(load(&[]).unwrap().source, Source::BuiltIn);

    let named = directory.path().join("named.yaml");
    let line = ["--config", named.to_str().unwrap()];
    let error = load(&line).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: can not be read: No such file", named.display())), "{error}");

    fs::write(&named, "classes: { b: { rate: 1/s } }").unwrap();
    fs::write(directory.path().join(DEFAULT_FILE), CLASSES).unwrap();
    assert_eq!(load(&line).unwrap().source, Source::File(named));
    assert!(load(&[]).unwrap().rules.class("a").is_some());

    let error = Config::check(directory.path()).unwrap_err().to_string();
    assert!(error.contains("can not be read: "), "{error}");
}

#[test]
fn a_huge_file_is_not_read_to_its_end() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 40).unwrap();
    let error = Config::check(file.path()).unwrap_err().to_string();
    assert!(error.contains("at most 4194304 bytes"), "{error}");
}

#[test]
fn overrides_beat_the_file() {
    let overrides = arguments(&[
        "--grpc=[::1]:1",
        "--http=127.0.0.1:2",
        "--max-key-bytes=3",
        "--max-in-flight=4",
        "--max-connections=5",
        "--max-connections-per-peer=6",
        "--max-connection-age=7m",
        "--tls-cert=c",
        "--tls-key=k",
        "--tls-client-ca=a",
        "--store=redis://:hunter2@cache",
        "--store-password-file=pw",
        "--store-tls-ca=ca",
        "--store-tls-cert=cert",
        "--store-tls-key=key",
        "--prefix=123",
        "--store-deadline=5ms",
        "--store-connections=6",
        "--store-instances=9",
        "--max-keys=7",
        "--max-bytes=8000000",
    ])
    .unwrap();
    let mut config =
        with("server: { grpc: 127.0.0.1:9, max_in_flight: 9 }\nstore: { prefix: nine, deadline: 9ms }");
    overrides.apply(&mut config).unwrap();
    let server = Server {
        grpc: "[::1]:1".parse().unwrap(),
        http: "127.0.0.1:2".parse().unwrap(),
        max_key_bytes: 3,
        max_in_flight: 4,
        max_connections: 5,
        max_connections_per_peer: 6,
        max_connection_age: Duration::from_secs(420),
        tls: Some(ServerTls { cert: "c".into(), key: "k".into(), client_ca: Some("a".into()) }),
        tokens: Vec::new(),
    };
    let store = StoreConfig {
        url: StoreUrl::new("redis://:hunter2@cache").unwrap(),
        password_file: Some("pw".into()),
        sentinel_password_file: None,
        tls: StoreTls { ca: Some("ca".into()), cert: Some("cert".into()), key: Some("key".into()) },
        prefix: "123".to_owned(),
        deadline: Duration::from_millis(5),
        connections: 6,
        instances: 9,
        max_keys: 7,
        max_bytes: 8_000_000,
    };
    assert_eq!((&config.server, &config.store), (&server, &store));
    arguments(&[]).unwrap().apply(&mut config).unwrap();
    assert_eq!((config.server, config.store), (server, store));
}

#[test]
fn a_wrong_override_is_named() {
    for (argument, message) in [
        ("--grpc=localhost:1", "expected an IP address and a port"),
        ("--http=1", "expected an IP address and a port"),
        ("--max-key-bytes=0", "expected a whole number from 1 to 65536, got 0"),
        ("--max-in-flight=x", "expected a whole number from 1 to 1000000, got \"x\""),
        ("--prefix={", "without braces"),
        ("--store-deadline=11s", "expected a duration from 1ms to 10s, got \"11s\""),
        ("--store-connections=65", "from 1 to 64, got 65"),
        ("--store-instances=501", "from 1 to 500, got 501"),
        ("--max-bytes=9", "from 1000000 to 1000000000000, got 9"),
        ("--max-keys=-1", "from 1 to 100000000, got \"-1\""),
    ] {
        let error = arguments(&[argument]).unwrap_err().to_string();
        let name = argument.split('=').next().unwrap();
        assert!(error.contains(name) && error.contains(message), "{argument}: {error}");
    }
    let error = arguments(&["--store=disk"]).unwrap().apply(&mut with("")).unwrap_err().to_string();
    assert!(error.starts_with("--store or TOLLGATE_STORE: not a store; expected"), "{error}");
}

#[test]
fn help_shows_the_defaults_that_hold() {
    let help = Line::command().render_long_help().to_string();
    let (server, store) = (Server::default(), StoreConfig::default());
    for (name, default) in [
        ("CONFIG", format!("./{DEFAULT_FILE}, or else a built-in set of rules")),
        ("GRPC", server.grpc.to_string()),
        ("HTTP", server.http.to_string()),
        ("MAX_KEY_BYTES", server.max_key_bytes.to_string()),
        ("MAX_IN_FLIGHT", server.max_in_flight.to_string()),
        ("MAX_CONNECTIONS", server.max_connections.to_string()),
        ("MAX_CONNECTIONS_PER_PEER", server.max_connections_per_peer.to_string()),
        ("MAX_CONNECTION_AGE", humantime::format_duration(server.max_connection_age).to_string()),
        ("TLS_CERT", "none, so without TLS".to_owned()),
        ("TLS_KEY", "none".to_owned()),
        ("TLS_CLIENT_CA", "none, so all are".to_owned()),
        ("TOKEN_FILES", "none, so all are".to_owned()),
        ("STORE", store.url.to_string()),
        ("STORE_PASSWORD_FILE", "none".to_owned()),
        ("STORE_TLS_CA", "the system's".to_owned()),
        ("STORE_TLS_CERT", "none".to_owned()),
        ("STORE_TLS_KEY", "none".to_owned()),
        ("PREFIX", store.prefix),
        ("STORE_DEADLINE", humantime::format_duration(store.deadline).to_string()),
        ("STORE_CONNECTIONS", store.connections.to_string()),
        ("STORE_INSTANCES", store.instances.to_string()),
        ("MAX_KEYS", store.max_keys.to_string()),
        ("MAX_BYTES", store.max_bytes.to_string()),
    ] {
        assert!(help.contains(&format!("[env: TOLLGATE_{name}")), "{name}: {help}");
        assert!(help.contains(&format!("[default: {default}]")), "{name}: {help}");
    }
}

#[test]
fn a_password_is_printed_nowhere() {
    let config = with("store: redis://me:hunter2@cache");
    let overrides = arguments(&["--store", "redis://me:hunter2@cache"]).unwrap();
    let mut printed = vec![format!("{config:?}"), config.store.url.to_string(), format!("{overrides:?}")];

    for url in [
        "http://me:hunter2@cache",
        "redis://me:hunter2@cache:port",
        "rediss-cluster://:hunter2@cache/7",
        ":hunter2@cache",
    ] {
        let error = arguments(&["--store", url]).unwrap().apply(&mut with("")).unwrap_err();
        printed.extend([error.to_string(), format!("{error:?}")]);
    }
    for text in [
        "store: http://me:hunter2@cache",
        "store: redis://me:hunter2@cache:port",
        "store: redis://me:hunter2@cache: 5",
        "store: \"redis://me:hunter2@cache",
        "store: 'redis://me:hunter2@cache'x",
        "store: [redis://me:hunter2@cache]",
        "store: { redis://me:hunter2@cache: 5 }",
        "store: { deadline: redis://me:hunter2@cache }",
        "store: { url: redis://me:hunter2@cache, url: 5 }",
        "store: redis://me:hunter2@cache\nstore: redis://me:hunter2@cache",
        "store:\n  redis://me:hunter2@cache: 5\n  redis://me:hunter2@cache: 5",
        "store: redis://me:hunter2@cache\nclasses: 5",
        "store: *redis://me:hunter2@cache",
        "store: !redis://me:hunter2@cache memory",
        "redis://me:hunter2@cache",
        "redis://me:hunter2@cache: {}",
        "server: redis://me:hunter2@cache",
        "classes: { redis://me:hunter2@cache: { rate: redis://me:hunter2@cache } }",
        "classes: { a: { algorithm: redis://me:hunter2@cache } }",
    ] {
        let error = parse(text).unwrap_err();
        printed.extend([error.to_string(), format!("{error:?}")]);
    }
    for text in printed {
        assert!(!text.contains("hunter2"), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_refused_without_a_panic(text in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(parse(text).is_err());
    }

    /// Pieces of YAML and of rules in any order come closer to what the parser has to bear.
    #[test]
    fn any_yaml_is_read_without_a_panic(
        pieces in proptest::collection::vec(
            proptest::sample::select(vec![
                "classes:", "server:", "store:", "a:", "rate:", "burst:", "cost:", "penalty:", "strikes:", "value:",
                "1/s", "5", "0", "-1", "1.5", "true", "~", "1h", "memory", "\n", "\n  ", "\n    ", " ", "{", "}", "[",
                "]", ",", "\"", "'", "&x ", "*x", "<<:", "!t ", "|", ">", "---", "...", "?", "- ", "#", "%", "\t", "\u{0}",
                "ü", "\u{feff}",
            ]),
            0..40,
        )
    ) {
        if let Err(error) = parse(pieces.concat()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn a_mutated_file_is_read_without_a_panic(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8)
    ) {
        let mut text = BUILT_IN.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(text.len());
            text[at] = byte;
        }
        if let Err(ConfigError::Faults(faults)) = parse(&text) {
            let lines = u64::try_from(text.iter().filter(|byte| matches!(byte, b'\n' | b'\r')).count()).unwrap();
            for fault in faults.iter() {
                prop_assert!((1..=lines + 1).contains(&fault.line), "{fault}");
            }
        }
    }
}

#[test]
fn the_example_in_the_readme_is_the_one_that_is_valid() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
    assert!(read("README.md").contains(&read("tollgate.example.yaml")));
    let config = Config::check(root.join("tollgate.example.yaml")).unwrap();
    // What it shows of server and store are the defaults.
    assert_eq!((config.server, config.store), (Server::default(), StoreConfig::default()));
    assert!(config.rules.iter().count() > 5);
}
