//! New rules while serving: whatever changes in the files of the rules holds within a second, for calls that come
//! from then on. So do new tokens, and a new certificate for connections.
//!
//! Files and folders are watched, and read anew when something happens in or beside them, on SIGHUP, and every
//! few seconds in case nothing was heard of it. What is wrong stays as it was when it was last right: each
//! domain for itself, and the classes. Calls are decided by the rules that held when they came and never wait.

use crate::clock::Clock;
use crate::config::{Config, Source};
use crate::rules::Live;
use crate::rules::files::Files;
use crate::telemetry::metric;
use crate::tls::Identity;
use crate::tokens::Tokens;
use crate::yaml;
use arc_swap::ArcSwap;
use metrics::gauge;
use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// After something happened, more of it may follow for that long: a file is written in several steps.
const QUIET: Duration = Duration::from_millis(50);
/// And for so many such steps at most.
const STEPS: usize = 6;
/// How often files are read when nothing is heard of them, and when nothing can be heard.
const LOOK: (Duration, Duration) = (Duration::from_secs(10), Duration::from_millis(500));

/// So many faults are told in the log at a time.
const MOST_TOLD: usize = 20;

/// The rules, and where they come from.
pub struct Reload {
    rules: Live,
    state: Mutex<State>,
    /// As they were last read. Whoever wants to see them does not wait until they are read again.
    files: ArcSwap<Files>,
    /// As who it is served.
    identity: Option<Arc<Identity>>,
    /// Who may ask.
    tokens: Arc<Tokens>,
    clock: Clock,
    asked: Arc<Notify>,
}

struct State {
    config: Config,
    /// Text of the configuration file when it was last read.
    text: Vec<u8>,
    /// What the log has told of what is wrong.
    told: BTreeSet<String>,
}

impl Reload {
    /// Reads the domains of that configuration. What is wrong with them goes to the log.
    #[must_use]
    pub fn new(config: Config, identity: Option<Arc<Identity>>, tokens: Arc<Tokens>, clock: Clock) -> Self {
        let rules = config.rules.clone().live();
        let text = text(&config.source);
        let state = State { config, text, told: BTreeSet::new() };
        let (state, files) = (Mutex::new(state), ArcSwap::default());
        let reload = Self { rules, state, files, identity, tokens, clock, asked: Arc::default() };
        reload.now();
        reload
    }

    /// The rules that hold.
    #[must_use]
    pub fn rules(&self) -> Live {
        self.rules.clone()
    }

    /// Whoever notifies this has the files read.
    #[must_use]
    pub fn asked(&self) -> Arc<Notify> {
        self.asked.clone()
    }

    /// The files of the domains as they were last read.
    #[must_use]
    pub fn files(&self) -> Arc<Files> {
        self.files.load_full()
    }

    /// Reads all files, and makes what is right in them the rules.
    pub fn now(&self) {
        let mut state = self.state.lock();
        let mut wrong = state.classes();
        let before = self.files();
        let files = Files::read(&state.config.domains, &before, self.clock.now());
        wrong.extend(files.wrong().map(str::to_owned));
        match self.identity.as_ref().map(|identity| identity.reload()) {
            Some(Ok(true)) => tracing::info!("a new certificate is loaded, for connections from now on"),
            Some(Err(error)) => wrong.extend([error]),
            Some(Ok(false)) | None => {}
        }
        let (changed, faults) = self.tokens.reload();
        for file in changed {
            tracing::info!("{}: another token, or none, for calls from now on", file.display());
        }
        wrong.extend(faults.into_iter().map(|fault| format!("server.tokens: {fault}")));
        tell(&before, &files);
        let mut news = wrong.difference(&state.told);
        for text in news.by_ref().take(MOST_TOLD) {
            tracing::error!("what is wrong does not hold, what held before does: {text}");
        }
        match news.count() {
            0 => {}
            more => tracing::error!("… and {more} more: `tollgate check` tells all"),
        }
        self.rules.store(Arc::new(state.config.rules.with(files.domains())));
        gauge!(metric::RULES_WRONG).set(metric::many(wrong.len()));
        if wrong.is_empty() && !state.told.is_empty() {
            tracing::info!("nothing is wrong with what is read any more");
        }
        state.told = wrong;
        self.files.store(Arc::new(files));
    }

    /// Watches the files. Runs until it is dropped.
    pub async fn watch(self: Arc<Self>) {
        let watcher = Arc::new(Mutex::new(watcher(self.asked.clone())));
        loop {
            let (reload, watcher) = (self.clone(), watcher.clone());
            let follow =
                move || watcher.lock().as_mut().is_some_and(|watcher| watcher.follow(&reload.folders()));
            let heard = aside(follow).await.unwrap_or_default();
            let look = if heard { LOOK.0 } else { LOOK.1 };
            if timeout(look, self.asked.notified()).await.is_ok() {
                for _ in 0..STEPS {
                    if timeout(QUIET, self.asked.notified()).await.is_err() {
                        break;
                    }
                    sleep(QUIET).await;
                }
            }
            let reload = self.clone();
            aside(move || reload.now()).await;
        }
    }

    /// The folders in which something happens when a file changes: where files are, and where links to them are.
    fn folders(&self) -> BTreeSet<PathBuf> {
        let state = self.state.lock();
        let mut places: Vec<PathBuf> = state.config.domains.clone();
        places.extend(self.identity.iter().flat_map(|identity| identity.files()).map(Path::to_owned));
        places.extend(self.tokens.files());
        places.extend(self.files().iter().map(|(path, _)| path.to_owned()));
        if let Source::File(path) = &state.config.source {
            places.push(path.clone());
        }
        let mut folders = BTreeSet::new();
        for place in places {
            let real = place.canonicalize().unwrap_or_default();
            for place in [place, real] {
                let parent = place
                    .parent()
                    .map(|parent| if parent == Path::new("") { Path::new(".") } else { parent });
                folders.extend(parent.filter(|parent| parent.is_dir()).map(Path::to_owned));
                if place.is_dir() {
                    folders.insert(place);
                }
            }
        }
        folders
    }
}

/// Off the threads that decide, as a disk may not answer. It panics only if reading does, and then what held holds.
async fn aside<T: Send + 'static>(read: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let done = tokio::task::spawn_blocking(read).await;
    done.inspect_err(|_| tracing::error!("reading the rules broke down; what held before does")).ok()
}

impl State {
    /// Reads the configuration file again if it changed; returns what is wrong with it.
    fn classes(&mut self) -> BTreeSet<String> {
        match &self.config.source {
            // What was a pipe has been read to its end: whoever reads it again waits.
            Source::File(path) if !path.exists() || path.is_file() => {}
            Source::File(_) | Source::BuiltIn => return BTreeSet::new(),
        }
        let text = text(&self.config.source);
        if text == self.text && self.told.is_empty() {
            return BTreeSet::new();
        }
        match self.config.again() {
            Ok(config) => {
                if text != self.text {
                    let now = Config::load(&self.config.overrides);
                    let Config { server, store, .. } = &config;
                    if now.is_ok_and(|now| now.server != *server || now.store != *store) {
                        tracing::warn!("{}: `server` and `store` are read at the start only", config.source);
                    }
                    tracing::info!("{}: {} classes are loaded", config.source, config.rules.iter().count());
                }
                self.text = text;
                (self.config.rules, self.config.domains) = (config.rules, config.domains);
                BTreeSet::new()
            }
            Err(error) => BTreeSet::from([error.to_string()]),
        }
    }
}

/// The configuration file; empty if there is none or it can not be read, which reading it properly will tell.
fn text(source: &Source) -> Vec<u8> {
    match source {
        Source::File(path) if path.is_file() => yaml::text(path).unwrap_or_default(),
        Source::File(_) | Source::BuiltIn => Vec::new(),
    }
}

/// Says in the log what is new and what is gone.
fn tell(before: &Files, now: &Files) {
    let domains = |files: &Files| -> BTreeSet<String> { files.domains().map(|it| it.name.clone()).collect() };
    for (path, read) in now.iter() {
        let was =
            before.iter().find(|(before, _)| *before == path).and_then(|(_, read)| read.domain.as_ref());
        if let Some(domain) = &read.domain
            && was.is_none_or(|was| !Arc::ptr_eq(was, domain))
        {
            let rules = domain.tree.rules().len();
            tracing::info!("{}: domain {:?} is loaded, {rules} rules", path.display(), domain.name);
        }
    }
    for domain in domains(before).difference(&domains(now)) {
        tracing::warn!("domain {domain:?} is gone: its descriptors are not limited any more");
    }
}

struct Watching {
    watcher: RecommendedWatcher,
    folders: BTreeSet<PathBuf>,
}

fn watcher(asked: Arc<Notify>) -> Option<Watching> {
    let tell = move |event: notify::Result<notify::Event>| match event.map(|event| event.kind) {
        // Reading them is not a change.
        Ok(EventKind::Access(kind)) if kind != AccessKind::Close(AccessMode::Write) => {}
        _ => asked.notify_one(),
    };
    match notify::recommended_watcher(tell) {
        Ok(watcher) => Some(Watching { watcher, folders: BTreeSet::new() }),
        Err(error) => {
            tracing::warn!("files can not be watched, so they are read every {:?}: {error}", LOOK.1);
            None
        }
    }
}

impl Watching {
    /// Watches these folders and no others; returns whether it can.
    fn follow(&mut self, folders: &BTreeSet<PathBuf>) -> bool {
        for gone in self.folders.difference(folders) {
            // It may not be there any more, and then it is not watched either.
            self.watcher.unwatch(gone).unwrap_or_default();
        }
        // Also those that are watched already: under the same name there may be another folder now.
        let watched = |folder: &&PathBuf| self.watcher.watch(folder, RecursiveMode::NonRecursive).is_ok();
        self.folders = folders.iter().filter(watched).cloned().collect();
        self.folders.len() == folders.len()
    }
}
