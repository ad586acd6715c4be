//! The names of what a store keeps, the same in every store.
//!
//! A bucket is `{<key>}:<class>`; strikes and block of the key are filed under its *subject*, `{<key>}`;
//! a lease is `{<key>}:<class>:<nonce>`. Braces, colons, percent signs, spaces, control and non-ASCII bytes
//! of a key or class are percent-encoded, so a name has one reading and no two pairs ever meet. The braces
//! around the key are real: in a Redis Cluster they put everything about a key into one slot.
//!
//! The bucket of a descriptor is `{<domain>:<key>:<value>:<key>:<value>…}:rule`. The colons inside of the braces
//! are real, and no key of a class has one there, so the two never meet, nor do two domains. Each such bucket
//! has a subject, and so a slot, of its own: what is limited there is the descriptor, and so is what strikes
//! count for. A value that has no bucket of its own is `%*` and the wildcard that all of its kind share, and of
//! a text that is too long for a name there is `%#` and its SHA-256; a percent sign that is part of a text is
//! always followed by two digits. A limit that came with the request ends in `:limit-<seconds>`, its window.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::time::Duration;

const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'{').add(b'}').add(b':').add(b'%');

/// A text of a descriptor that is longer than this, in bytes, stands as a hash in the name.
const LONGEST_TEXT: usize = 128;

/// No class has a longer name, in bytes.
pub const LONGEST_CLASS: usize = 128;

/// What tells a lease from others on the same bucket, in hexadecimal digits.
const NONCE: usize = 32;

/// Names a bucket: `{<key>}:<class>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BucketName {
    text: String,
    subject: usize,
}

impl BucketName {
    /// The bucket of a key for a class.
    #[must_use]
    pub fn new(key: &str, class: &str) -> Self {
        let mut text = String::with_capacity(key.len() + class.len() + 3);
        text.push('{');
        text.extend(utf8_percent_encode(key, ESCAPED));
        text.push('}');
        let subject = text.len();
        text.push(':');
        text.extend(utf8_percent_encode(class, ESCAPED));
        Self { text, subject }
    }

    /// The bucket of a descriptor: its entries' keys and values, and beside each the wildcard that stands for
    /// the value if all values of it share the bucket. `window` is that of a limit of the request's own.
    #[must_use]
    pub fn of_descriptor<'a>(
        domain: &str,
        entries: impl IntoIterator<Item = (&'a str, &'a str, Option<&'a str>)>,
        window: Option<Duration>,
    ) -> Self {
        let mut text = String::with_capacity(96);
        text.push('{');
        put(&mut text, domain);
        for (key, value, shared) in entries {
            text.push(':');
            put(&mut text, key);
            text.push(':');
            if let Some(wildcard) = shared {
                text.push_str("%*");
                put(&mut text, wildcard);
            } else {
                put(&mut text, value);
            }
        }
        text.push('}');
        let subject = text.len();
        match window {
            // Writing to a string can not fail.
            Some(window) => write!(text, ":limit-{}", window.as_secs()).unwrap_or_default(),
            None => text.push_str(":rule"),
        }
        Self { text, subject }
    }

    /// The whole name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The part that all buckets of a key share: `{<key>}`.
    #[must_use]
    pub fn subject(&self) -> &str {
        self.text.get(..self.subject).unwrap_or_default()
    }
}

fn put(name: &mut String, text: &str) {
    if text.len() <= LONGEST_TEXT {
        name.extend(utf8_percent_encode(text, ESCAPED));
    } else {
        name.push_str("%#");
        for byte in Sha256::digest(text) {
            write!(name, "{byte:02x}").unwrap_or_default();
        }
    }
}

/// Names a lease: its bucket, and a number that nobody can guess who does not know who asked and with which number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseId {
    text: String,
    bucket: BucketName,
}

impl LeaseId {
    /// A lease on that bucket that never was before.
    #[must_use]
    pub fn fresh(bucket: &BucketName) -> Self {
        let mut text = bucket.text.clone();
        // Writing to a string can not fail.
        write!(text, ":{:032x}", rand::random::<u128>()).unwrap_or_default();
        Self { text, bucket: bucket.clone() }
    }

    /// The lease on that bucket that a gateway asks for with that number, however often it does.
    #[must_use]
    pub fn of(bucket: &BucketName, gateway: &str, seq: u64) -> Self {
        let mut text = bucket.text.clone();
        text.push(':');
        let hash = Sha256::new().chain_update(seq.to_le_bytes()).chain_update(gateway).finalize();
        for byte in hash.iter().take(16) {
            // Writing to a string can not fail.
            write!(text, "{byte:02x}").unwrap_or_default();
        }
        Self { text, bucket: bucket.clone() }
    }

    /// The longest name of a lease, in bytes, with keys that are no longer than so many: each may be three in a name.
    #[must_use]
    pub const fn longest(key_bytes: usize) -> usize {
        const MARKS: usize = "{}::".len();
        MARKS + 3 * (key_bytes + LONGEST_CLASS) + NONCE
    }

    /// Reads back what [`as_str`](Self::as_str) gave; `None` if it is no lease's name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (bucket, nonce) = text.rsplit_once(':')?;
        let (subject, class) = bucket.rsplit_once(':')?;
        let key = subject.strip_prefix('{')?.strip_suffix('}')?;
        let wrong = |c: char| !c.is_ascii() || c.is_ascii_control() || matches!(c, ' ' | '{' | '}' | ':');
        if key.is_empty() || key.contains(wrong) || class.is_empty() || class.contains(wrong) {
            return None;
        }
        if nonce.len() != NONCE || !nonce.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        let bucket = BucketName { text: bucket.to_owned(), subject: subject.len() };
        Some(Self { text: text.to_owned(), bucket })
    }

    /// The whole name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Of 256 parts one, the same for the same lease and as good as random among others.
    #[must_use]
    pub fn part(&self) -> u8 {
        self.text
            .get(self.text.len().saturating_sub(2)..)
            .and_then(|last| u8::from_str_radix(last, 16).ok())
            .unwrap_or(0)
    }

    /// The bucket that the tokens came from.
    #[must_use]
    pub const fn bucket(&self) -> &BucketName {
        &self.bucket
    }

    /// The class of the bucket, as the rules name it.
    #[must_use]
    pub fn class(&self) -> Cow<'_, str> {
        let class = self.bucket.text.get(self.bucket.subject + 1..).unwrap_or_default();
        percent_decode_str(class).decode_utf8_lossy()
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_name_reads_as_the_contract_says() {
        let name = BucketName::new("alice", "read");
        assert_eq!((name.as_str(), name.subject()), ("{alice}:read", "{alice}"));
        let odd = BucketName::new("a{b}:c %\u{1}é", "x:y");
        assert_eq!(odd.as_str(), "{a%7Bb%7D%3Ac%20%25%01%C3%A9}:x%3Ay");
    }

    #[test]
    fn what_joining_would_confuse_stays_apart() {
        for (one, other) in [
            (("a:b", "c"), ("a", "b:c")),
            (("a}:b", "c"), ("a", "b}:c")),
            (("a%3Ab", "c"), ("a:b", "c")),
            (("a", "b%20"), ("a", "b ")),
        ] {
            assert_ne!(BucketName::new(one.0, one.1), BucketName::new(other.0, other.1));
        }
    }

    fn descriptor(domain: &str, entries: &[(&str, &str)]) -> BucketName {
        BucketName::of_descriptor(domain, entries.iter().map(|(key, value)| (*key, *value, None)), None)
    }

    #[test]
    fn the_bucket_of_a_descriptor_reads_as_it_is_said_above() {
        let name = descriptor("edge", &[("path", "/a b"), ("user", "bob")]);
        assert_eq!(name.as_str(), "{edge:path:/a%20b:user:bob}:rule");
        assert_eq!(name.subject(), "{edge:path:/a%20b:user:bob}");
        let shared = BucketName::of_descriptor("edge", [("path", "/a/b", Some("/a/*"))], None);
        assert_eq!(shared.as_str(), "{edge:path:%*/a/*}:rule");
        let own = BucketName::of_descriptor("edge", [("user", "bob", None)], Some(Duration::from_secs(60)));
        assert_eq!(own.as_str(), "{edge:user:bob}:limit-60");
        let long = descriptor("edge", &[("token", &"x".repeat(1_000_000))]);
        assert!(long.as_str().starts_with("{edge:token:%#") && long.as_str().len() < 100);
    }

    #[test]
    fn no_bucket_of_a_descriptor_is_that_of_another_or_of_a_class() {
        let long = |last: char| format!("{}{last}", "x".repeat(200));
        let (one, other) = (long('a'), long('b'));
        let mut names = vec![
            BucketName::new("edge:user:bob", "rule"),
            BucketName::new("edge", "rule"),
            BucketName::new("edge:user:bob}", "rule"),
            BucketName::of_descriptor("edge", [("user", "bob", Some("bo*"))], None),
            BucketName::of_descriptor("edge", [("user", "bob", None)], Some(Duration::from_secs(1))),
        ];
        for (domain, entries) in [
            ("edge", vec![("user", "bob")]),
            ("edge:user", vec![("bob", "")]),
            ("edge", vec![("user:bob", "")]),
            ("edge", vec![("user", ""), ("bob", "")]),
            ("edge", vec![("user", "bob:")]),
            ("edge", vec![("user", "%*bo*")]),
            ("edge", vec![("user", "bo*")]),
            ("edge", vec![("user", one.as_str())]),
            ("edge", vec![("user", other.as_str())]),
            ("ed", vec![("ge:user", "bob")]),
            ("edge", vec![("user", "bob"), ("", "")]),
            ("edge", vec![("user", "bob\0")]),
        ] {
            names.push(descriptor(domain, &entries));
        }
        let different: std::collections::HashSet<_> = names.iter().map(BucketName::as_str).collect();
        assert_eq!(different.len(), names.len(), "{names:?}");
    }

    #[test]
    fn a_lease_is_named_once_and_read_back() {
        let bucket = BucketName::new("k:1", "search it");
        let (one, other) = (LeaseId::fresh(&bucket), LeaseId::fresh(&bucket));
        assert_ne!(one, other);
        assert_eq!(LeaseId::parse(one.as_str()).as_ref(), Some(&one));
        assert_eq!((one.bucket(), &*one.class()), (&bucket, "search it"));
        let of_gateways = ["a", "b"].map(|gateway| [1, 2].map(|seq| LeaseId::of(&bucket, gateway, seq)));
        let parts: std::collections::HashSet<_> =
            (0..1000).map(|n| LeaseId::of(&bucket, "a", n).part()).collect();
        assert!(parts.len() > 200, "{} of 256 parts", parts.len());
        let names: std::collections::HashSet<_> = of_gateways.iter().flatten().map(LeaseId::as_str).collect();
        assert_eq!(names.len(), 4);
        assert_eq!(LeaseId::of(&bucket, "a", 1), of_gateways[0][0]);
        assert_eq!(LeaseId::parse(of_gateways[1][1].as_str()).as_ref(), Some(&of_gateways[1][1]));
    }

    #[test]
    fn what_is_no_lease_is_not_read() {
        let nonce = "0".repeat(32);
        for text in [
            "",
            ":",
            "::",
            "nope",
            "{a}:b",
            "{a}:b:short",
            "a:b:c",
            &format!("{{}}:b:{nonce}"),
            &format!("{{a}}::{nonce}"),
            &format!("a:b:{nonce}"),
            &format!("{{a:x}}:b:{nonce}"),
            &format!("{{é}}:b:{nonce}"),
            &format!("{{a}}:b:{nonce}0"),
        ] {
            assert_eq!(LeaseId::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_two_pairs_meet(a in "[ab:%{}\\PC]{1,6}", b in "[ab:%{}\\PC]{1,6}", c in "[ab:%{}\\PC]{1,6}", d in "[ab:%{}\\PC]{1,6}") {
            let (one, other) = (BucketName::new(&a, &b), BucketName::new(&c, &d));
            prop_assert_eq!(one == other, (&a, &b) == (&c, &d));
            prop_assert_eq!(one.subject() == other.subject(), a == c);
            let clean = |c: char| c.is_ascii_graphic();
            prop_assert!(one.as_str().chars().all(clean));
        }

        #[test]
        fn no_lease_id_panics(text in "\\PC{0,80}") {
            if let Some(id) = LeaseId::parse(&text) {
                prop_assert_eq!(id.as_str(), &text);
            }
        }
    }
}
