//! Who may ask: bearer tokens, each in a file of its own, so that one caller's can be taken away alone.

use arc_swap::ArcSwap;
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use subtle::{Choice, ConstantTimeEq as _};

/// A token that can be guessed is none.
const SHORTEST: usize = 16;
/// Nor is a file that is larger than this, in bytes.
const LONGEST: u64 = 4096;

/// A token, as its hash: of any length alike, so that comparing takes as long for every guess.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token([u8; 32]);

impl Token {
    /// The token in a file, without the end of its line.
    ///
    /// # Errors
    /// A file that can not be read, or a token of less than 16 bytes or more than 4096. No error holds any of it.
    pub fn read(path: &Path) -> Result<Self, String> {
        let wrong = |why: &dyn fmt::Display| format!("{}: {why}", path.display());
        let mut text = Vec::new();
        let file = std::fs::File::open(path).map_err(|error| wrong(&format!("can not be read: {error}")))?;
        file.take(LONGEST + 1)
            .read_to_end(&mut text)
            .map_err(|error| wrong(&format!("can not be read: {error}")))?;
        let end = text.iter().rposition(|byte| !byte.is_ascii_whitespace()).map_or(0, |last| last + 1);
        text.truncate(end);
        if text.len() < SHORTEST || u64::try_from(text.len()).is_ok_and(|bytes| bytes > LONGEST) {
            return Err(wrong(&format!("a token of {end} bytes; expected {SHORTEST} to {LONGEST}")));
        }
        Ok(Self(Sha256::digest(&text).into()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Why a caller is not heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stranger {
    /// He shows nothing.
    #[error("authorization: no bearer token; expected `Bearer` and a token")]
    Silent,
    /// He shows a token that is none of ours.
    #[error("authorization: not a token that is known here")]
    Unknown,
}

/// The tokens of all who may ask, and the file of each. Calls are checked by those that held when they came.
#[derive(Debug)]
pub struct Tokens {
    files: Vec<PathBuf>,
    held: ArcSwap<Vec<Token>>,
}

impl Tokens {
    /// Those in these files.
    ///
    /// # Errors
    /// The first that is none.
    pub fn read(files: Vec<PathBuf>) -> Result<Self, String> {
        let held: Vec<Token> = files.iter().map(|file| Token::read(file)).collect::<Result<_, _>>()?;
        Ok(Self { files, held: ArcSwap::from_pointee(held) })
    }

    /// Reads the files again. True if there is something new.
    ///
    /// # Errors
    /// As [`read`](Self::read); then what held before does. A token is taken away by another in its place.
    pub fn reload(&self) -> Result<bool, String> {
        let read: Vec<Token> = self.files.iter().map(|file| Token::read(file)).collect::<Result<_, _>>()?;
        let is_new = read != **self.held.load();
        if is_new {
            self.held.store(Arc::new(read));
        }
        Ok(is_new)
    }

    /// The files that they are in.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(AsRef::as_ref)
    }

    /// Does a call come from somebody who is known, if this is its `authorization`? Everybody is where there are no
    /// tokens.
    ///
    /// # Errors
    /// No, and why.
    pub fn check(&self, shown: Option<&[u8]>) -> Result<(), Stranger> {
        if self.files.is_empty() {
            return Ok(());
        }
        let (scheme, token) = shown.and_then(|shown| shown.split_at_checked(7)).ok_or(Stranger::Silent)?;
        if !scheme.eq_ignore_ascii_case(b"bearer ") {
            return Err(Stranger::Silent);
        }
        let shown: [u8; 32] = Sha256::digest(token).into();
        // All of them, whichever it is.
        let known =
            self.held.load().iter().fold(Choice::from(0), |known, Token(token)| known | token.ct_eq(&shown));
        if bool::from(known) { Ok(()) } else { Err(Stranger::Unknown) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_shows_a_token_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let read = |name, text| Token::read(&file(name, text));
        let files = vec![file("a", "the token of one\n"), file("b", "the token of another")];
        let (tokens, none) = (Tokens::read(files).unwrap(), Tokens::read(vec![]).unwrap());
        for (text, heard) in [
            ("Bearer the token of one", Ok(())),
            ("bearer the token of another", Ok(())),
            ("Bearer the token of on", Err(Stranger::Unknown)),
            ("Bearer the token of one\t", Err(Stranger::Unknown)),
            ("Bearer ", Err(Stranger::Unknown)),
            ("Basic the token of one", Err(Stranger::Silent)),
            ("B", Err(Stranger::Silent)),
            ("", Err(Stranger::Silent)),
        ] {
            assert_eq!(tokens.check(Some(text.as_bytes())), heard, "{text:?}");
            assert_eq!(none.check(Some(text.as_bytes())), Ok(()));
        }
        assert_eq!(tokens.check(None), Err(Stranger::Silent));
        // Another in its place takes one away; what is none takes nothing.
        assert_eq!(tokens.reload(), Ok(false));
        file("a", "a new token of one");
        assert_eq!(tokens.reload(), Ok(true));
        file("b", "none");
        assert!(tokens.reload().unwrap_err().contains("a token of 4 bytes"));
        for (shown, heard) in [
            ("Bearer the token of one", Err(Stranger::Unknown)),
            ("Bearer a new token of one", Ok(())),
            ("Bearer the token of another", Ok(())),
        ] {
            assert_eq!(tokens.check(Some(shown.as_bytes())), heard, "{shown}");
        }
        for (name, text, wrong) in [("c", "short", "a token of 5 bytes"), ("d", "", "a token of 0 bytes")] {
            let error = read(name, text).unwrap_err();
            assert!(error.contains(wrong) && !error.contains("short"), "{error}");
        }
        assert!(read("e", &"x".repeat(5000)).is_err());
        assert!(Token::read(&folder.path().join("nowhere")).unwrap_err().contains("can not be read"));
    }
}
