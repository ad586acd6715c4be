//! Who may ask: bearer tokens, each in a file of its own, so that one caller's can be taken away alone.

use sha2::{Digest as _, Sha256};
use std::fmt;
use std::io::Read as _;
use std::path::Path;
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

/// Does a call come from somebody who is known, if this is its `authorization`? Everybody is where there are no tokens.
///
/// # Errors
/// No, and why.
pub fn check(tokens: &[Token], shown: Option<&[u8]>) -> Result<(), Stranger> {
    if tokens.is_empty() {
        return Ok(());
    }
    let (scheme, token) = shown.and_then(|shown| shown.split_at_checked(7)).ok_or(Stranger::Silent)?;
    if !scheme.eq_ignore_ascii_case(b"bearer ") {
        return Err(Stranger::Silent);
    }
    let shown: [u8; 32] = Sha256::digest(token).into();
    // All of them, whichever it is.
    let known = tokens.iter().fold(Choice::from(0), |known, Token(token)| known | token.ct_eq(&shown));
    if bool::from(known) { Ok(()) } else { Err(Stranger::Unknown) }
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
        let tokens = [read("a", "the token of one\n").unwrap(), read("b", "the token of another").unwrap()];
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
            assert_eq!(check(&tokens, Some(text.as_bytes())), heard, "{text:?}");
            assert_eq!(check(&[], Some(text.as_bytes())), Ok(()));
        }
        assert_eq!(check(&tokens, None), Err(Stranger::Silent));
        for (name, text, wrong) in [("c", "short", "a token of 5 bytes"), ("d", "", "a token of 0 bytes")] {
            let error = read(name, text).unwrap_err();
            assert!(error.contains(wrong) && !error.contains("short"), "{error}");
        }
        assert!(read("e", &"x".repeat(5000)).is_err());
        assert!(Token::read(&folder.path().join("nowhere")).unwrap_err().contains("can not be read"));
    }
}
