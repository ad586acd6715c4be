//! Strict reading of a YAML file: one document, no unknown or repeated key, no value silently taken for
//! another, and a place for everything that is wrong.
//!
//! A file is read in two steps. [`read`] gives its shape: mappings, whose keys are known, and scalars of
//! any type. Its owner then asks a [`Section`] for each scalar as the type that it has to be. So a wrong
//! value does not hide the next one: whoever fixes a file sees everything that is wrong with its values.
//!
//! Errors quote no line of the file, because the line could be the one with the store's password.

mod scalar;
mod shape;
#[cfg(test)]
mod tests;

pub(crate) use scalar::{Scalar, Text};
use shape::Known;
pub(crate) use shape::{List, Mapping};

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer};
use serde_path_to_error::{Path, Segment};
use serde_saphyr::{Location, MessageFormatter, Spanned, UserMessageFormatter};
use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path as FilePath;

/// No file is larger, in bytes.
pub(crate) const MOST_BYTES: usize = 4 << 20;

/// No file has more mappings and lists in each other: enough for 16 levels of descriptors.
const DEEPEST: usize = 40;

/// Bytes that reading the deepest file may use of a stack, with much to spare.
const STACK: usize = 32 << 20;

/// An error names at most this many faults.
const MOST_SHOWN: usize = 20;

/// One thing that is wrong with a file, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// The file, as it was named.
    pub file: String,
    /// The line, from 1.
    pub line: u64,
    /// The column in characters, from 1.
    pub column: u64,
    /// Which setting: the keys that lead to it, with dots; empty for the file as a whole.
    pub path: String,
    /// What is wrong, and what is expected.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, path, message } = self;
        write!(f, "{file}:{line}:{column}: ")?;
        if !path.is_empty() {
            write!(f, "{path}: ")?;
        }
        f.write_str(message)
    }
}

/// Everything that is wrong with a file, at least one thing, from top to bottom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults(Vec<Fault>);

impl Faults {
    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.0.iter()
    }
}

/// A line for each.
impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.0.iter().take(MOST_SHOWN).enumerate() {
            write!(f, "{}{fault}", if i == 0 { "" } else { "\n" })?;
        }
        match self.0.len().saturating_sub(MOST_SHOWN) {
            0 => Ok(()),
            more => write!(f, "\n… and {more} more"),
        }
    }
}

impl std::error::Error for Faults {}

/// The text of a file, and no more of it than is needed to see that it is too large.
pub(crate) fn text(file: &FilePath) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let most = u64::try_from(MOST_BYTES).unwrap_or(u64::MAX);
    File::open(file)?.take(most.saturating_add(1)).read_to_end(&mut text)?;
    Ok(text)
}

/// The shape of a file.
pub(crate) fn read<T: DeserializeOwned + Send>(file: &str, text: &[u8]) -> Result<T, Faults> {
    // Levels of a file are calls in each other, and of those a thread of the runtime has few to spare.
    let reader = std::thread::Builder::new().name("yaml".to_owned()).stack_size(STACK);
    let broken = |message: String| {
        let (file, path) = (file.to_owned(), String::new());
        Err(Faults(vec![Fault { file, line: 1, column: 1, path, message }]))
    };
    std::thread::scope(|scope| match reader.spawn_scoped(scope, || shape(file, text)) {
        Ok(reader) => reader.join().unwrap_or_else(|_| broken("reading it broke down".to_owned())),
        Err(error) => broken(format!("no thread to read it: {error}")),
    })
}

fn shape<T: DeserializeOwned>(file: &str, text: &[u8]) -> Result<T, Faults> {
    let fault = |line, column, path, message| {
        Faults(vec![Fault { file: file.to_owned(), line, column, path, message }])
    };
    if text.len() > MOST_BYTES {
        return Err(fault(1, 1, String::new(), format!("expected a file of at most {MOST_BYTES} bytes")));
    }
    let text = std::str::from_utf8(text).map_err(|error| {
        let (line, column) = end(text.get(..error.valid_up_to()).unwrap_or_default());
        fault(line, column, String::new(), "expected UTF-8 text".to_owned())
    })?;
    let options = serde_saphyr::options! {
        strict_booleans: true,
        leading_zero_numbers_as_strings: true,
        underscored_numbers_as_strings: true,
        reject_unsupported_tags: true,
        with_snippet: false,
        // What the bound in bytes lets through, and no less.
        budget: serde_saphyr::budget! {
            max_nodes: MOST_BYTES,
            max_events: 2 * MOST_BYTES,
            max_depth: DEEPEST,
        },
    };
    let mut path = String::new();
    serde_saphyr::with_deserializer_from_str_with_options(text, options, |yaml| {
        serde_path_to_error::deserialize(yaml).map_err(|error| {
            path = keys(error.path());
            error.into_inner()
        })
    })
    .map_err(|error| {
        let place = error.location().filter(|place| *place != Location::UNKNOWN);
        let (line, column) = place.map_or((1, 1), |place| (place.line(), place.column()));
        fault(line, column, path, message(&error))
    })
}

/// Line and column after `text`, which is UTF-8.
fn end(text: &[u8]) -> (u64, u64) {
    let text = String::from_utf8_lossy(text);
    let line = text.rsplit('\n').next().unwrap_or_default();
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX).saturating_add(1);
    (count(text.matches('\n').count()), count(line.chars().count()))
}

/// The path without what [`Given`] adds: every second step is a `value` of its own.
fn keys(path: &Path) -> String {
    let keys = path.iter().step_by(2).filter(|step| !matches!(step, Segment::Unknown));
    keys.map(|key| printable(&key.to_string())).collect::<Vec<_>>().join(".")
}

/// What the library says, in the words of this one.
fn message(error: &serde_saphyr::Error) -> String {
    use serde_saphyr::Error;
    match error.without_snippet() {
        Error::AliasError { error, .. } => message(error),
        Error::SerdeUnknownField { field, expected, .. } => {
            format!("unknown key `{}`; expected one of {}", printable(field), expected.join(", "))
        }
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("the key `{}` is here twice; expected it once", printable(key))
        }
        Error::MultipleDocuments { .. } => "a second document begins here; expected one".to_owned(),
        Error::Unexpected { expected: "mapping start", .. } => "expected a mapping".to_owned(),
        Error::Unexpected { expected: "sequence start", .. } => "expected a list".to_owned(),
        Error::Unexpected { expected: "string scalar", .. } => "expected a text".to_owned(),
        other => scheme_only(&UserMessageFormatter.format_message(other)).into_owned(),
    }
}

/// The text fit for one line of an error: escaped, no longer than helps, and cut where a URL begins, because
/// the store's may stand where another value or a key should, and errors quote those.
pub(crate) fn printable(text: &str) -> String {
    const MOST: usize = 64;
    let shown = scheme_only(text);
    let mut chars = shown.chars();
    let mut shown: String = chars.by_ref().take(MOST).flat_map(char::escape_debug).collect();
    if chars.next().is_some() {
        shown.push('…');
    }
    shown
}

fn scheme_only(text: &str) -> Cow<'_, str> {
    text.split_once("://").map_or(text.into(), |(scheme, _)| format!("{scheme}://…").into())
}

/// A setting that a file may have, and where.
pub(crate) struct Given<T>(Option<Spanned<T>>);

impl<T> Given<T> {
    /// Its value.
    pub(crate) fn value(&self) -> Option<&T> {
        self.0.as_ref().map(|given| &given.value)
    }

    /// Where it is.
    pub(crate) fn place(&self) -> Option<Location> {
        self.0.as_ref().map(|given| given.referenced)
    }
}

impl<T> Default for Given<T> {
    fn default() -> Self {
        Self(None)
    }
}

/// Not that of an `Option`: a key without a value is not taken for a key that is not there.
impl<'de, T: Deserialize<'de>> Deserialize<'de> for Given<T> {
    fn deserialize<D: Deserializer<'de>>(yaml: D) -> Result<Self, D::Error> {
        Spanned::deserialize(yaml).map(|given| Self(Some(given)))
    }
}

/// What was found wrong with the values of one file.
pub(crate) struct Report {
    file: String,
    text: String,
    faults: Vec<Fault>,
}

impl Report {
    /// Nothing yet.
    pub(crate) fn new(file: &str) -> Self {
        Self { file: file.to_owned(), text: String::new(), faults: Vec::new() }
    }

    /// Nothing yet of a file with this text, in which the places of unknown keys are looked up.
    pub(crate) fn of(file: &str, text: &[u8]) -> Self {
        Self { text: String::from_utf8_lossy(text).into_owned(), ..Self::new(file) }
    }

    /// A part of the file: the mapping at this path and place.
    pub(crate) fn section(&mut self, path: &str, place: Option<Location>) -> Section<'_> {
        Section { report: self, path: path.to_owned(), place }
    }

    /// How many faults so far.
    pub(crate) fn len(&self) -> usize {
        self.faults.len()
    }

    /// Where the key is that has this value: the last such text before it.
    fn place_of_key(&self, key: &str, value: &Location) -> (u64, u64) {
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let offset = value.span().byte_offset().and_then(|offset| usize::try_from(offset).ok());
        let before = offset.and_then(|offset| self.text.get(..offset)).unwrap_or_default();
        let Some(start) = before.rfind(key) else { return (value.line(), value.column()) };
        let (line, rest) = before.split_at(start);
        let line = line.rsplit('\n').next().unwrap_or_default();
        let below = count(rest.matches('\n').count());
        (value.line().saturating_sub(below), count(line.chars().count()).saturating_add(1))
    }

    /// `value`, if nothing was wrong.
    pub(crate) fn end<T>(mut self, value: T) -> Result<T, Faults> {
        if self.faults.is_empty() {
            return Ok(value);
        }
        self.faults.sort_by_key(|fault| (fault.line, fault.column));
        Err(Faults(self.faults))
    }
}

/// A mapping in a file, whose scalars are read one by one.
pub(crate) struct Section<'a> {
    report: &'a mut Report,
    path: String,
    place: Option<Location>,
}

impl Section<'_> {
    /// The mapping at `key` of this one.
    pub(crate) fn section(&mut self, key: &str, place: Option<Location>) -> Section<'_> {
        let path = self.path(key);
        Section { report: self.report, path, place }
    }

    /// The fields of this section; nothing if it is no mapping, which is then noted, as unknown keys are.
    pub(crate) fn fields<'g, T>(&mut self, Mapping(given): &'g Mapping<T>) -> Option<&'g T> {
        let Known { fields, others } =
            given.as_ref().map_err(|instead| self.fault("", None, instead.instead_of("a mapping"))).ok()?;
        for (key, value) in &others.keys {
            let (line, column) = self.report.place_of_key(key, value);
            let (shown, expected) = (printable(key), others.expected.join(", "));
            let message = format!("unknown key `{shown}`; expected one of {expected}");
            self.note(line, column, key, message);
        }
        Some(fields)
    }

    /// What is in this section; nothing if it is no list, which is then noted.
    pub(crate) fn items<'g, T>(&mut self, List(given): &'g List<T>) -> &'g [T] {
        let noted = |instead: &Scalar| self.fault("", None, instead.instead_of("a list"));
        given.as_ref().map_err(noted).map_or(&[], Vec::as_slice)
    }

    /// The value of a setting; nothing if it is not there or wrong, which is then noted.
    pub(crate) fn get<S, T>(
        &mut self,
        key: &str,
        given: &Given<S>,
        read: impl FnOnce(&S) -> Result<T, String>,
    ) -> Option<T> {
        read(given.value()?).map_err(|message| self.fault(key, given.place(), message)).ok()
    }

    /// Notes that `key` is wrong; with an empty key, the section. Without a place it is that of the section.
    pub(crate) fn fault(&mut self, key: &str, place: Option<Location>, message: impl Into<String>) {
        let place = place.or(self.place).filter(|place| *place != Location::UNKNOWN);
        let (line, column) = place.map_or((1, 1), |place| (place.line(), place.column()));
        self.note(line, column, key, message.into());
    }

    fn note(&mut self, line: u64, column: u64, key: &str, message: String) {
        let (file, path) = (self.report.file.clone(), self.path(key));
        self.report.faults.push(Fault { file, line, column, path, message });
    }

    /// Whether nothing was wrong since there were `before` faults.
    pub(crate) fn sound_since(&self, before: usize) -> bool {
        self.report.len() == before
    }

    /// How many faults so far.
    pub(crate) fn len(&self) -> usize {
        self.report.len()
    }

    fn path(&self, key: &str) -> String {
        let key = printable(key);
        match (self.path.as_str(), key.as_str()) {
            ("", _) => key,
            (path, "") => path.to_owned(),
            (path, key) => format!("{path}.{key}"),
        }
    }
}
