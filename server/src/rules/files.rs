//! The files of the domains: what was read of each, since when it holds, and what is wrong with it.
//!
//! A file that is wrong keeps the rules that it had when it was last right; all others are read as they are now.

use super::domain::Domain;
use super::domain::file::parse;
use crate::limit::Timestamp;
use crate::yaml;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
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
                let Some(before) = before.all.get(path).filter(|_| is_right) else { continue };
                (read.domain, read.since) = (before.domain.clone(), before.since);
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
        let text: Arc<[u8]> = match text(path) {
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

/// Nobody knows when a pipe ends, and whoever reads the rules would wait for it.
fn text(path: &Path) -> io::Result<Vec<u8>> {
    if !path.metadata()?.is_file() {
        return Err(io::Error::other("expected a regular file"));
    }
    yaml::text(path)
}

/// Are these the rules of a domain, rather than a configuration file, which has no such keys?
#[must_use]
pub fn is_domain(path: &Path) -> bool {
    let text = text(path).unwrap_or_default();
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text);
    text.split(|byte| *byte == b'\n')
        .any(|line| line.starts_with(b"domain:") || line.starts_with(b"descriptors:"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use tempfile::TempDir;

    struct Folder(TempDir, Files, u64);

    impl Folder {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap(), Files::default(), 0)
        }

        fn put(&self, file: &str, domain: &str, requests: u32) {
            let limit = format!("{{ unit: hour, requests_per_unit: {requests} }}");
            let text = format!("domain: {domain}\ndescriptors: [ {{ key: user, rate_limit: {limit} }} ]\n");
            std::fs::write(self.0.path().join(file), text).unwrap();
        }

        fn remove(&self, file: &str) {
            std::fs::remove_file(self.0.path().join(file)).unwrap();
        }

        /// Reads it a microsecond after the last time: file, domain and limit, since when, and `!` if it is wrong.
        fn read(&mut self) -> String {
            self.2 += 1;
            self.1 = Files::read(&[self.0.path().to_owned()], &self.1, Timestamp::from_micros(self.2));
            let file = |(path, read): (&Path, &Read)| {
                let name = path.file_name().unwrap().to_str().unwrap();
                let wrong = if read.wrong.is_empty() { "" } else { "!" };
                let Some(domain) = &read.domain else { return format!("{name}{wrong}") };
                let rule = domain.tree.find([("user", "x")]).unwrap();
                let requests = rule.meter.as_ref().unwrap().said.requests;
                format!("{name}{wrong} {} {requests} @{}", domain.name, read.since.as_micros())
            };
            self.1.iter().map(file).collect::<Vec<_>>().join(", ")
        }
    }

    #[test]
    fn of_two_files_for_a_domain_one_holds_and_the_other_keeps_what_it_had() {
        let mut folder = Folder::new();
        folder.put("a.yaml", "a", 1);
        folder.put("b.yaml", "b", 2);
        assert_eq!(folder.read(), "a.yaml a 1 @1, b.yaml b 2 @1");
        folder.put("b.yaml", "a", 3);
        assert_eq!(folder.read(), "a.yaml a 1 @1, b.yaml! b 2 @1");
        // However often it is looked at: these rules hold since they were read.
        assert_eq!(folder.read(), "a.yaml a 1 @1, b.yaml! b 2 @1");
        // A file before it by its name takes the domain over.
        folder.put("0.yaml", "a", 4);
        assert_eq!(folder.read(), "0.yaml a 4 @4, a.yaml!, b.yaml! b 2 @1");
        folder.remove("0.yaml");
        assert_eq!(folder.read(), "a.yaml a 1 @5, b.yaml! b 2 @1");
        folder.remove("a.yaml");
        assert_eq!(folder.read(), "b.yaml a 3 @6");
    }

    #[test]
    fn domains_move_from_file_to_file() {
        let mut folder = Folder::new();
        folder.put("a.yaml", "a", 1);
        folder.put("b.yaml", "b", 2);
        folder.read();
        folder.put("a.yaml", "b", 3);
        folder.put("b.yaml", "a", 4);
        assert_eq!(folder.read(), "a.yaml b 3 @2, b.yaml a 4 @2");
        folder.put("c.yaml", "a", 5);
        assert_eq!(folder.read(), "a.yaml b 3 @2, b.yaml a 4 @2, c.yaml!");
        folder.remove("b.yaml");
        assert_eq!(folder.read(), "a.yaml b 3 @2, c.yaml a 5 @4");
        // One that is wrong now gives way to one that is right.
        std::fs::write(folder.0.path().join("a.yaml"), "nonsense").unwrap();
        assert_eq!(folder.read(), "a.yaml! b 3 @2, c.yaml a 5 @4");
        folder.put("d.yaml", "b", 6);
        assert_eq!(folder.read(), "a.yaml!, c.yaml a 5 @4, d.yaml b 6 @6");
    }

    /// Opening it for reading waits until somebody writes.
    #[test]
    fn what_is_no_file_is_not_waited_for() {
        let mut folder = Folder::new();
        let pipe = folder.0.path().join("pipe.yaml");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        folder.put("a.yaml", "a", 1);
        assert_eq!(folder.read(), "a.yaml a 1 @1, pipe.yaml!");
        let wrong: Vec<_> = folder.1.wrong().collect();
        assert!(wrong[0].ends_with("pipe.yaml: can not be read: expected a regular file"), "{wrong:?}");
        assert!(!is_domain(&pipe) && is_domain(&folder.0.path().join("a.yaml")));
    }

    #[test]
    fn a_file_is_known_for_that_of_a_domain_by_its_keys() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yaml");
        for (text, is) in [
            ("domain: a", true),
            ("# Edge.\ndescriptors: []\ndomain: a", true),
            ("descriptors: []", true),
            ("\u{feff}domain: a\r\n", true),
            ("domains: [ a ]", false),
            ("classes:\n  domain: { rate: 1/s }", false),
            ("", false),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(is_domain(&path), is, "{text:?}");
        }
    }
}
