//! A file is loaded, and then decides, or it is said in which line it is wrong.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use tempfile::TempDir;
use tokio::runtime::Builder;
use tollgate_server::clock::Clock;
use tollgate_server::config::Config;
use tollgate_server::engine::{Engine, Refusal};
use tollgate_server::limit::Timestamp;
use tollgate_server::request::{Described, Descriptor, Request};
use tollgate_server::rules::Rules;
use tollgate_server::rules::files::Files;
use tollgate_server::store::memory::Memory;

/// Rules of one file that are asked.
const MOST_ASKED: usize = 8;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

/// As a configuration, and as the rules of a domain.
pub fn rules(data: &[u8]) {
    let file: PathBuf = FOLDER.path().join("rules.yaml");
    std::fs::write(&file, data).expect("a file");
    let classes = match Config::check(&file) {
        Ok(config) => Some(config.rules),
        Err(error) => {
            says_where(&error.to_string(), &file);
            None
        }
    };
    let files = Files::read(std::slice::from_ref(&file), &Files::default(), Timestamp::from_micros(1));
    files.wrong().for_each(|wrong| says_where(wrong, &file));
    assert!(files.domains().count() + files.wrong().count() > 0, "it is right or wrong");
    decides(&classes.unwrap_or_else(|| Rules::new([])).with(files.domains()));
}

fn says_where(error: &str, file: &Path) {
    assert!(!error.is_empty() && !error.contains("broke down"), "{error}");
    let place = format!("{}:", file.display());
    for line in error.lines().filter(|line| line.contains("rules.yaml")) {
        let told = line.split_once(&place).map(|(_, rest)| rest.trim_start_matches(' '));
        assert!(told.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())), "{error}");
    }
}

/// What is loaded can be asked: a class lets its first call in, and a rule of a domain is met by what it is for.
fn decides(rules: &Rules) {
    let clock = Clock::manual(Timestamp::from_micros(1_700_000_000_000_000));
    let store = Memory::new(1 << 10, 1 << 20, clock.clone());
    let engine = Engine::new(rules.clone().live(), Arc::new(store), 512, clock);
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    for (n, rule) in rules.iter().take(MOST_ASKED).enumerate() {
        assert!(!rule.to_string().is_empty());
        let request = Request { key: n.to_string(), class: rule.class.clone(), ..Request::default() };
        let verdict = runtime.block_on(engine.should_rate_limit(request)).expect("a call that can be");
        assert!(verdict.denied.is_none(), "{rule} denies its first call: {verdict:?}");
        assert!(verdict.remaining <= verdict.limit, "{rule}: {verdict:?}");
    }
    for domain in rules.domains() {
        for rule in domain.tree.rules().into_iter().take(MOST_ASKED) {
            assert!(rule.meter.as_ref().is_none_or(|meter| !meter.to_string().is_empty()));
            // As far as keys and values tell themselves apart in it.
            let entry = |part: &str| {
                let (key, value) = part.split_once('=').unwrap_or((part, "x"));
                (key.to_owned(), value.to_owned())
            };
            let descriptor =
                Descriptor { entries: rule.path.split(',').map(entry).collect(), ..Descriptor::default() };
            let asked =
                Described { domain: domain.name.clone(), descriptors: vec![descriptor], deadline: None };
            match runtime.block_on(engine.should_descriptors_pass(asked)) {
                Ok(joined) => assert_eq!(joined.statuses.len(), 1, "{}", rule.path),
                Err(refusal) => {
                    assert!(matches!(refusal, Refusal::Entries { .. }), "{}: {refusal}", rule.path);
                }
            }
        }
    }
}
