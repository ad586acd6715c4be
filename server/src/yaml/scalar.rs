//! A scalar as it stands in the file, and what it can be read as.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// A value of any type, so that a wrong one is met where it is known what was expected.
///
/// No `Debug`: it may be a URL with a password.
pub(crate) enum Scalar {
    /// Nothing, `null`, `~`.
    Null,
    /// `true` or `false`.
    Flag(bool),
    /// A whole number, not below zero.
    Whole(u64),
    /// Text, quoted or not like anything else.
    Text(String),
    /// What is never expected, as errors call it.
    Other(String),
}

impl Scalar {
    /// An argument or an environment variable, which has no types.
    pub(crate) fn argument(text: &str) -> Self {
        text.parse().map_or_else(|_| Self::Text(text.to_owned()), Self::Whole)
    }

    /// A whole number; `expected` says which, for the error.
    pub(crate) fn whole(&self, expected: &str) -> Result<u64, String> {
        match self {
            Self::Whole(n) => Ok(*n),
            other => Err(other.instead_of(expected)),
        }
    }

    /// A whole number in these bounds.
    pub(crate) fn within<T>(&self, bounds: RangeInclusive<T>) -> Result<T, String>
    where
        T: TryFrom<u64> + PartialOrd + fmt::Display,
    {
        let expected = format!("a whole number from {} to {}", bounds.start(), bounds.end());
        T::try_from(self.whole(&expected)?)
            .ok()
            .filter(|n| bounds.contains(n))
            .ok_or_else(|| self.instead_of(&expected))
    }

    /// `true` or `false`.
    pub(crate) fn flag(&self) -> Result<bool, String> {
        match self {
            Self::Flag(flag) => Ok(*flag),
            other => Err(other.instead_of("true or false")),
        }
    }

    /// Text; `expected` says which, for the error.
    pub(crate) fn text(&self, expected: &str) -> Result<&str, String> {
        match self {
            Self::Text(text) => Ok(text),
            other => Err(other.instead_of(expected)),
        }
    }

    /// What stands beside the name that this is.
    pub(crate) fn one_of<T: Copy>(&self, names: &[(&str, T)]) -> Result<T, String> {
        let all: Vec<_> = names.iter().map(|(name, _)| *name).collect();
        let expected = format!("one of {}", all.join(", "));
        let given = self.text(&expected)?;
        let found = names.iter().find(|(name, _)| *name == given).map(|(_, value)| *value);
        found.ok_or_else(|| self.instead_of(&expected))
    }

    /// Text that is a `T`; `expected` says what that is.
    pub(crate) fn parse<T: FromStr>(&self, expected: &str) -> Result<T, String> {
        self.text(expected)?.parse().map_err(|_| self.instead_of(expected))
    }

    /// A span of time; whoever takes it knows its bounds.
    pub(crate) fn span(&self) -> Result<Duration, String> {
        self.duration("a duration such as 30s, 5m or 1h30m")
    }

    /// A span of time in these bounds.
    pub(crate) fn span_within(&self, bounds: &RangeInclusive<Duration>) -> Result<Duration, String> {
        let [from, to] = [bounds.start(), bounds.end()].map(|bound| humantime::format_duration(*bound));
        let expected = format!("a duration from {from} to {to}");
        self.duration(&expected)
            .and_then(|span| bounds.contains(&span).then_some(span).ok_or_else(|| self.instead_of(&expected)))
    }

    fn duration(&self, expected: &str) -> Result<Duration, String> {
        humantime::parse_duration(self.text(expected)?).map_err(|_| self.instead_of(expected))
    }

    /// The error that this is not what was expected. Quotes the value: not for what may hold a password.
    pub(crate) fn instead_of(&self, expected: &str) -> String {
        format!("expected {expected}, got {self}")
    }
}

/// A text, whatever it looks like: `80`, `1.10` and `true` are read as they are written, and nothing is empty.
#[derive(Deserialize)]
#[serde(transparent)]
pub(crate) struct Text(String);

impl Text {
    /// The text, if it is not longer or shorter, in bytes.
    pub(crate) fn bounded(&self, bounds: RangeInclusive<usize>) -> Result<String, String> {
        let Self(text) = self;
        if bounds.contains(&text.len()) {
            return Ok(text.clone());
        }
        Err(format!("expected a text of {} to {} bytes, got {}", bounds.start(), bounds.end(), text.len()))
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("nothing"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Whole(n) => write!(f, "{n}"),
            Self::Text(text) => write!(f, "\"{}\"", super::printable(text)),
            Self::Other(what) => f.write_str(what),
        }
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(yaml: D) -> Result<Self, D::Error> {
        yaml.deserialize_any(ScalarVisitor)
    }
}

pub(super) struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Scalar, E> {
        Ok(Scalar::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Scalar, E> {
        Ok(Scalar::Flag(flag))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Scalar, E> {
        Ok(Scalar::Whole(n))
    }

    fn visit_i64<E>(self, n: i64) -> Result<Scalar, E> {
        Ok(u64::try_from(n).map_or_else(|_| Scalar::Other(n.to_string()), Scalar::Whole))
    }

    fn visit_f64<E>(self, n: f64) -> Result<Scalar, E> {
        Ok(Scalar::Other(n.to_string()))
    }

    fn visit_str<E>(self, text: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Scalar, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other("a list".to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other("a mapping".to_owned()))
    }
}
