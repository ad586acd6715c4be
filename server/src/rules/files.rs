//! The files of the domains: what was read of each, since when it holds, and what is wrong with it.
//!
//! A file that is wrong keeps the rules that it had when it was last right; all others are read as they are now.

use super::domain::Domain;
use super::domain::file::parse;
use crate::limit::Timestamp;
use crate::yaml::MOST_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// No more files are read.
const MOST_FILES: usize = 10_000;

/// All files of some places.
#[derive(Clone, Debug, Default)]
pub struct Files {
    all: BTreeMap<PathBuf, Read>,
    /// What can not be read as a whole: a folder.
    unreadable: Vec<String>,
}

/// What was read of one file.
#[derive(Clone, Debug)]
pub struct Read {
    /// Empty if it could not be read.
    text: Arc<[u8]>,
    /// The rules, if it ever had some.
    pub domain: Option<Arc<Domain>>,
    /// Since when these rules hold.
    pub since: Timestamp,
    /// What is wrong with the file now: a line for each fault, which begins with its place.
    pub wrong: Vec<String>,
}

impl Files {
    /// Reads the files at these places: files, and folders with files that end in `.yaml` or `.yml`. What was
    /// read `before` holds where a file is wrong now, or is the same.
    #[must_use]
    pub fn read(places: &[PathBuf], before: &Self, now: Timestamp) -> Self {
        let mut paths = BTreeSet::new();
        let mut unreadable = Vec::new();
        for place in places {
            match list(place) {
                Ok(some) => paths.extend(some),
                Err(error) => {
                    unreadable.push(format!("{}: can not be read: {error}", place.display()));
                    // A folder that is away for a moment takes nothing with it.
                    paths.extend(before.all.keys().filter(|path| path.starts_with(place)).cloned());
                }
            }
        }
        if paths.len() > MOST_FILES {
            unreadable.push(format!("expected at most {MOST_FILES} files of domains, got {}", paths.len()));
        }
        let read = |path: PathBuf| {
            let read = Read::new(&path, before.all.get(&path), now);
            (path, read)
        };
        let mut files = Self { all: paths.into_iter().take(MOST_FILES).map(read).collect(), unreadable };
        files.one_file_a_domain(before);
        files
    }

    /// Of two files for one domain the first one in the order of their names holds, but rather one that is right
    /// now than one that was. The other is wrong, and keeps what it was before.
    fn one_file_a_domain(&mut self, before: &Self) {
        let mut owners: BTreeMap<String, PathBuf> = BTreeMap::new();
        for is_right in [true, false] {
            for (path, read) in self.all.iter_mut().filter(|(_, read)| read.wrong.is_empty() == is_right) {
                let Some(domain) = &read.domain else { continue };
                let Some(owner) = owners.get(&domain.name) else {
                    owners.insert(domain.name.clone(), path.clone());
                    continue;
                };
                let (path, name, owner) = (path.display(), &domain.name, owner.display());
                let twice = format!("{path}:1:1: domain: {name:?} is that of {owner} already");
                if read.wrong.is_empty() {
                    read.wrong.push(twice);
                }
                read.domain = None;
            }
            // Their turn comes with those that are wrong.
            for (path, read) in self.all.iter_mut().filter(|(_, read)| read.domain.is_none()) {
                read.domain = before.all.get(path).filter(|_| is_right).and_then(|read| read.domain.clone());
            }
        }
    }

    /// The rules that hold.
    pub fn domains(&self) -> impl Iterator<Item = Arc<Domain>> {
        self.all.values().filter_map(|read| read.domain.clone())
    }

    /// Each file and what was read of it.
    pub fn iter(&self) -> impl Iterator<Item = (&Path, &Read)> {
        self.all.iter().map(|(path, read)| (path.as_path(), read))
    }

    /// Everything that is wrong now.
    pub fn wrong(&self) -> impl Iterator<Item = &str> {
        let files = self.all.values().flat_map(|read| &read.wrong);
        self.unreadable.iter().chain(files).map(String::as_str)
    }
}

impl Read {
    fn new(path: &Path, before: Option<&Self>, now: Timestamp) -> Self {
        let name = path.display().to_string();
        let text: Arc<[u8]> = match bytes(path) {
            Ok(text) => text.into(),
            Err(error) => {
                let wrong = vec![format!("{name}: can not be read: {error}")];
                return Self { text: Arc::default(), wrong, ..Self::kept(before, now) };
            }
        };
        if let Some(before) = before.filter(|before| before.text == text && before.wrong.is_empty()) {
            return before.clone();
        }
        match parse(&name, &text) {
            Ok(domain) => Self { text, domain: Some(Arc::new(domain)), since: now, wrong: Vec::new() },
            Err(faults) => {
                let wrong = faults.iter().map(ToString::to_string).collect();
                Self { text, wrong, ..Self::kept(before, now) }
            }
        }
    }

    fn kept(before: Option<&Self>, now: Timestamp) -> Self {
        let nothing = || Self { text: Arc::default(), domain: None, since: now, wrong: Vec::new() };
        before.cloned().unwrap_or_else(nothing)
    }
}

/// The files at a place. Kubernetes keeps what the names of a folder lead to in others that begin with a dot.
fn list(place: &Path) -> io::Result<Vec<PathBuf>> {
    if !place.metadata()?.is_dir() {
        return Ok(vec![place.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in place.read_dir()? {
        let path = entry?.path();
        let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        let is_yaml = path.extension().is_some_and(|end| end == "yaml" || end == "yml");
        if !is_hidden && is_yaml && !path.is_dir() {
            files.push(path);
        }
    }
    Ok(files)
}

/// Reads no more than is needed to see that a file is too large.
fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let most = u64::try_from(MOST_BYTES).unwrap_or(u64::MAX);
    File::open(path)?.take(most.saturating_add(1)).read_to_end(&mut text)?;
    Ok(text)
}
