//! What can be read off the sources and no compiler checks: who may know whom, and what is found nowhere.
//!
//! Each rule is a row of [`RULES`] with its reason and with an example that breaks it, so that a rule that no
//! longer catches anything is noticed. To add a room to the server, give it a place in [`ROOMS`].

use std::path::Path;

/// The rooms of the server, the lowest first. A room may use those of earlier lines: none of a later line, and
/// none of its own.
const ROOMS: &[&[&str]] = &[
    &["limit", "name", "tokens", "yaml"],
    &["algorithm", "penalty", "clock", "telemetry"],
    &["rules"],
    &["request"],
    &["config"],
    &["tls"],
    &["reload"],
    &["store"],
    &["lease"],
    &["engine"],
    &["shed", "listen"],
    &["rls"],
    &["grpc", "http"],
    &["app"],
    &["main", "ask", "banner", "check"],
];

/// Those of the client.
const CLIENT_ROOMS: &[&[&str]] = &[
    &["clock", "verdict"],
    &["leases", "headers"],
    &["error", "fallback"],
    &["service", "keys"],
    &["shared"],
    &["keeper"],
    &["client"],
    &["layer"],
];

/// The rooms that decide: functions of their arguments, and nothing else.
const PURE: &[&str] = &["algorithm", "penalty", "limit"];

/// The rooms that know of wires.
const WIRED: &[&str] = &["shed", "listen", "rls", "grpc", "http", "app", "main", "ask", "banner", "check"];

/// Lines and what is wrong with them.
type Findings = Vec<(usize, String)>;

struct Rule {
    name: &'static str,
    why: &'static str,
    /// Says of one file what is wrong with it, and in which line.
    look: fn(&Source, &[Source]) -> Findings,
    /// A file that breaks the rule: its path and its text.
    example: (&'static str, &'static str),
}

const RULES: &[Rule] = &[
    Rule {
        name: "a room of the server uses only rooms below it",
        why: "main -> app -> grpc, http -> engine -> lease -> store -> rules -> algorithm, penalty -> limit. \
              An arrow back would make two rooms into one that nobody can change alone",
        look: |source, _| source.room().map_or(vec![], |room| looks_up(source, room, ROOMS)),
        example: ("server/src/rules/file.rs", "use crate::{\n    limit::Limit,\n    engine::Engine,\n};"),
    },
    Rule {
        name: "a room of the client uses only rooms below it",
        why: "layer -> headers, client -> keeper -> shared -> service, keys -> leases, fallback -> verdict, clock. \
              Leases and fallbacks know no network, so that a simulator can drive them",
        look: |source, _| {
            source.room_in("client").map_or(vec![], |room| looks_up(source, room, CLIENT_ROOMS))
        },
        example: ("client/src/leases/books.rs", "use crate::shared::Shared;"),
    },
    Rule {
        name: "wire types stay in grpc/ and http/",
        why: "what decides must not change when a protocol does",
        look: |source, _| {
            let forbidden =
                &["tonic", "tonic_health", "tonic_types", "prost", "prost_types", "axum", "hyper"];
            let forbidden = [forbidden.as_slice(), &["tollgate_proto"]].concat();
            let knows_none = source.room().is_some_and(|room| !WIRED.contains(&room));
            if knows_none { source.lines_with_word(&forbidden) } else { vec![] }
        },
        example: ("server/src/engine.rs", "use tonic::Status;"),
    },
    Rule {
        name: "algorithm, penalty and limit are pure arithmetic on integers",
        why: "the same functions are told again in Lua and tried with any time there is: \
              without a clock, I/O or rounding of floats both give the same decisions",
        look: |source, _| {
            let forbidden = ["tokio", "async", "await", "f32", "f64", "Instant", "SystemTime"];
            let forbidden = [forbidden.as_slice(), &["std::fs", "std::net", "std::io", "std::env"]].concat();
            let is_pure = source.room().is_some_and(|room| PURE.contains(&room));
            if is_pure { source.lines_with_word(&forbidden) } else { vec![] }
        },
        example: ("server/src/algorithm/gcra.rs", "let rate = tokens as f64;"),
    },
    Rule {
        name: "an algorithm is named in its own file only",
        why: "an algorithm is a row of ALL; code that asks for a name would have to know the next one too",
        look: |source, all| {
            let elsewhere = source.room().is_some_and(|room| room != "algorithm");
            let names = all.iter().filter_map(Source::algorithm).map(|name| format!("\"{name}\""));
            names.filter(|_| elsewhere).flat_map(|name| source.lines_with(&name)).collect()
        },
        example: ("server/src/engine.rs", "match algorithm.name { \"token_bucket\" => 1, _ => 0 }"),
    },
    Rule {
        name: "an algorithm is told in Rust and in Lua, side by side",
        why: "the two are kept the same by reading them together, so each says where the other is",
        look: has_its_twin,
        example: ("server/src/algorithm/gcra.lua", "-- Twin of leaky_bucket.rs"),
    },
    Rule {
        name: "the client does not depend on the server",
        why: "a gateway that links the client must not get a server with it",
        look: |source, _| {
            let is_clients = source.path.starts_with("client/");
            if is_clients { source.lines_with_word(&["tollgate-server", "tollgate_server"]) } else { vec![] }
        },
        example: ("client/Cargo.toml", "tollgate-server.workspace = true"),
    },
    Rule {
        name: "a source file has at most 400 lines without its tests",
        why: "a longer one has two ideas in it: give the second one its own file",
        look: |source, _| {
            let lines = source.code().count();
            let is_long = source.is_shipped() && lines > 400;
            if is_long { vec![(lines, format!("{lines} lines"))] } else { vec![] }
        },
        example: ("server/src/engine.rs", LONG),
    },
    Rule {
        name: "no unwrap outside tests",
        why: "a panic answers nobody: handle it, or give the types no way to be wrong",
        look: |source, _| if source.is_shipped() { source.lines_with(".unwrap()") } else { vec![] },
        example: ("client/src/lib.rs", "let first = list.first().unwrap();"),
    },
    Rule {
        name: "tests do not sleep",
        why: "a length of time is too short on one machine and wasted on all others: \
              wait for a condition with support::eventually",
        look: |source, _| {
            let is_test = source.path.starts_with("tests/") && source.path != "tests/support.rs";
            let sleeps = source.lines_with_word(&["sleep"]).into_iter();
            // A program of that name is something else.
            sleeps.filter(|(_, line)| is_test && line.contains("sleep(")).collect()
        },
        example: ("tests/fault.rs", "tokio::time::sleep(Duration::from_secs(1)).await;"),
    },
    Rule {
        name: "no path of somebody's machine",
        why: "it leads nowhere on any other",
        look: |source, _| {
            let starts = |line: &str, place: &str| {
                line.match_indices(place).any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric()))
            };
            let places = ["home", "root", "Users"].map(|folder| format!("/{folder}/"));
            let is_bad = |line: &str| places.iter().any(|place| starts(line, place));
            let lines = source.text.lines().enumerate().filter(|(_, line)| is_bad(line));
            lines.map(|(at, line)| (at + 1, line.trim().to_owned())).collect()
        },
        example: ("README.md", "cargo run -- --config /Users/me/tollgate.yaml"),
    },
];

/// 401 lines.
const LONG: &str = match std::str::from_utf8(&[b'\n'; 401]) {
    Ok(lines) => lines,
    Err(_) => "",
};

#[test]
fn every_rule_holds() {
    let sources = sources();
    let breaches: String = RULES.iter().flat_map(|rule| breaches(rule, &sources)).collect();
    assert!(breaches.is_empty(), "\n{breaches}");
}

#[test]
fn every_rule_catches_its_example() {
    for rule in RULES {
        let mut sources = sources();
        let (path, text) = rule.example;
        sources.retain(|source| source.path != path);
        sources.push(Source::new(path.into(), text.into()));
        let breaches = breaches(rule, &sources);
        assert!(breaches.iter().any(|breach| breach.contains(path)), "not caught: {}", rule.name);
    }
}

#[test]
fn every_room_has_its_place() {
    // A room that is in the list and not in the sources yet is no harm, the other way round is.
    for source in sources() {
        for (house, rooms) in [("server", ROOMS), ("client", CLIENT_ROOMS)] {
            let Some(room) = source.room_in(house) else { continue };
            assert!(
                place(rooms, room).is_some(),
                "{}: where does it stand? Put {room:?} in ROOMS",
                source.path
            );
        }
    }
}

fn breaches(rule: &Rule, sources: &[Source]) -> Vec<String> {
    let look = |source: &Source| {
        let found = (rule.look)(source, sources).into_iter();
        let tell = |(line, what)| {
            format!("{}:{line}: {what}\n    rule: {}\n    why: {}\n", source.path, rule.name, rule.why)
        };
        found.map(tell).collect::<Vec<_>>()
    };
    sources.iter().flat_map(look).collect()
}

fn looks_up(source: &Source, room: &str, rooms: &[&[&str]]) -> Findings {
    let code = source.code().map(|(_, line)| line).collect::<Vec<_>>().join("\n");
    let is_below = |other: &str| place(rooms, other).is_none_or(|other| Some(other) < place(rooms, room));
    let is_wrong = |used: &(usize, String)| used.1 != room && !is_below(&used.1);
    let used = rooms_used(&code).into_iter().filter(is_wrong);
    used.map(|(line, other)| (line, format!("{room} uses {other}"))).collect()
}

fn place(rooms: &[&[&str]], room: &str) -> Option<usize> {
    rooms.iter().position(|line| line.contains(&room))
}

/// What stands after each `crate::`, one by one or in braces, and its line.
fn rooms_used(code: &str) -> Vec<(usize, String)> {
    let mut rooms = vec![];
    for (at, root) in code.match_indices("crate::").chain(code.match_indices("tollgate_server::")) {
        let after = &code[at + root.len()..];
        let mut depth = 0_usize;
        let mut word = String::new();
        // At a depth of zero or one, a word that follows the start, `{` or `,` is a room.
        let mut is_room = true;
        for (offset, c) in after.char_indices() {
            if c.is_alphanumeric() || c == '_' {
                word.push(c);
                continue;
            }
            if is_room && !word.is_empty() && depth <= 1 {
                let line = code[..at + root.len() + offset].matches('\n').count() + 1;
                rooms.push((line, std::mem::take(&mut word)));
                is_room = false;
            }
            word.clear();
            match c {
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                ',' if depth == 1 => is_room = true,
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
    }
    rooms
}

#[test]
fn rooms_used_are_read_from_any_form_of_use() {
    let used = |code| rooms_used(code).into_iter().map(|(_, room)| room).collect::<Vec<_>>();
    assert_eq!(used("use crate::limit::Cost;"), ["limit"]);
    assert_eq!(used("use crate::limit::{Cost, micros};"), ["limit"]);
    assert_eq!(used("use crate::{limit::{Cost, micros}, store, rules::Rule};"), ["limit", "store", "rules"]);
    assert_eq!(
        used("use tollgate_server::{app, telemetry};\nfn f() { crate::clock::now() }"),
        ["clock", "app", "telemetry"]
    );
}

fn has_its_twin(source: &Source, all: &[Source]) -> Findings {
    let twin = if source.algorithm().is_some() {
        source.path.replace(".rs", ".lua")
    } else if source.path.starts_with("server/src/algorithm/") && source.is("lua") {
        source.path.replace(".lua", ".rs")
    } else {
        return vec![];
    };
    if !all.iter().any(|other| other.path == twin) {
        return vec![(1, format!("there is no {twin}"))];
    }
    let name = twin.rsplit('/').next().unwrap();
    let says = source.text.lines().next().unwrap_or_default();
    let is_said = source.is("rs") || says.starts_with(&format!("-- Twin of {name}"));
    if is_said { vec![] } else { vec![(1, format!("the first line does not begin: -- Twin of {name}"))] }
}

/// A file of the project.
struct Source {
    /// From the project's root, with `/`.
    path: String,
    text: String,
    /// Compiled for tests only.
    is_test: bool,
}

impl Source {
    fn new(path: String, text: String) -> Self {
        let is_test = path.ends_with("/tests.rs") || path.contains("/tests/") || path.contains("/benches/");
        Self { path, text, is_test }
    }

    fn is(&self, extension: &str) -> bool {
        Path::new(&self.path).extension().is_some_and(|its| its == extension)
    }

    /// Its lines and their numbers, without comments and without the tests at the end.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let end = self.text.find("#[cfg(test)]\nmod tests {").unwrap_or(self.text.len());
        let comment = if self.is("rs") { "//" } else { "#" };
        let without_comment = move |line: &'_ str| line.find(comment).unwrap_or(line.len());
        self.text[..end]
            .lines()
            .map(move |line| &line[..without_comment(line)])
            .enumerate()
            .map(|(at, line)| (at + 1, line))
    }

    /// The part of the server that it belongs to: `rules` for `server/src/rules/file.rs`.
    fn room(&self) -> Option<&str> {
        self.room_in("server")
    }

    fn room_in(&self, house: &str) -> Option<&str> {
        let path = self.path.strip_prefix(house)?.strip_prefix("/src/")?.strip_suffix(".rs")?;
        let room = path.split('/').next()?;
        (room != "lib" && !self.is_test).then_some(room)
    }

    /// The algorithm that it tells in Rust.
    fn algorithm(&self) -> Option<&str> {
        let name = self.path.strip_prefix("server/src/algorithm/")?.strip_suffix(".rs")?;
        // What several share beside them is no algorithm.
        (!self.is_test && self.text.contains(": Algorithm = Algorithm {")).then_some(name)
    }

    /// Whether it is Rust that becomes part of the programs.
    fn is_shipped(&self) -> bool {
        let places = ["server/src/", "client/src/", "proto/"];
        !self.is_test && self.is("rs") && places.iter().any(|place| self.path.starts_with(place))
    }

    fn lines_with(&self, text: &str) -> Findings {
        let found = self.code().filter(|(_, line)| line.contains(text));
        found.map(|(at, line)| (at, line.trim().to_owned())).collect()
    }

    /// The lines with any of these words, and not only as a part of a longer one.
    fn lines_with_word(&self, words: &[&str]) -> Findings {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let has = |line: &str, word: &str| {
            line.match_indices(word).any(|(at, _)| {
                !line[..at].ends_with(is_part) && !line[at + word.len()..].starts_with(is_part)
            })
        };
        let found = self.code().filter(|(_, line)| words.iter().any(|word| has(line, word)));
        found.map(|(at, line)| (at, line.trim().to_owned())).collect()
    }
}

/// Every text file of the project, but this one: it quotes what it forbids.
fn sources() -> Vec<Source> {
    let mut sources = vec![];
    collect(Path::new(env!("CARGO_MANIFEST_DIR")), "", &mut sources);
    sources.retain(|source| source.path != "tests/tidy.rs");
    assert!(
        sources.iter().any(|source| source.path == "server/src/limit.rs"),
        "the sources are not where they were"
    );
    sources
}

fn collect(folder: &Path, path: &str, sources: &mut Vec<Source>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        // What git and cargo keep there is not the project's.
        if name == "target" || name.starts_with('.') && name != ".ci" {
            continue;
        }
        let path = if path.is_empty() { name } else { format!("{path}/{name}") };
        if entry.file_type().unwrap().is_dir() {
            collect(&entry.path(), &path, sources);
        } else if let Ok(text) = std::fs::read_to_string(entry.path()) {
            sources.push(Source::new(path, text));
        }
    }
}
