//! Who may ask: bearer tokens, each in a file of its own, so that one caller's can be taken away alone.

use arc_swap::ArcSwap;
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::io::{ErrorKind, Read as _};
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
        if !text.iter().all(|byte| matches!(byte, b' '..=b'~')) {
            return Err(wrong(&"a token that nobody can show; expected printable characters of ASCII"));
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

/// Somebody who may ask: a file, and the token in it. Whose file is gone may not, as long as it is. Two are the same if
/// their files are.
#[derive(Clone, Debug)]
pub struct Known {
    file: PathBuf,
    token: Option<Token>,
}

impl PartialEq for Known {
    fn eq(&self, other: &Self) -> bool {
        self.file == other.file
    }
}

impl Eq for Known {}

impl Known {
    /// Who shows the token in that file.
    ///
    /// # Errors
    /// As [`Token::read`].
    pub fn read(file: PathBuf) -> Result<Self, String> {
        let token = Some(Token::read(&file)?);
        Ok(Self { file, token })
    }

    /// The same, as the file is now.
    fn again(&self) -> Result<Self, String> {
        let token = match std::fs::metadata(&self.file) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            // What was a pipe has been read to its end: whoever reads it again waits.
            Ok(there) if !there.is_file() => self.token,
            _ => Some(Token::read(&self.file)?),
        };
        Ok(Self { file: self.file.clone(), token })
    }
}

/// All who may ask. Calls are checked by what held when they came.
#[derive(Debug)]
pub struct Tokens(ArcSwap<Vec<Known>>);

impl Tokens {
    /// Those; everybody if there are none.
    #[must_use]
    pub fn new(known: Vec<Known>) -> Self {
        Self(ArcSwap::from_pointee(known))
    }

    /// Reads the files again, each for itself; returns what changed. A file that is gone takes its token with it.
    ///
    /// What is wrong with others is told beside it; their tokens are held as they were.
    pub fn reload(&self) -> (Vec<PathBuf>, Vec<String>) {
        let (mut changed, mut wrong) = (Vec::new(), Vec::new());
        let before = self.0.load_full();
        let now = before.iter().map(|known| {
            let now = known.again().unwrap_or_else(|error| {
                wrong.push(error);
                known.clone()
            });
            if now.token != known.token {
                changed.push(now.file.clone());
            }
            now
        });
        let now = now.collect();
        if !changed.is_empty() {
            self.0.store(Arc::new(now));
        }
        (changed, wrong)
    }

    /// The files that they are in.
    pub fn files(&self) -> Vec<PathBuf> {
        self.0.load().iter().map(|known| known.file.clone()).collect()
    }

    /// Does a call come from somebody who is known, if this is its `authorization`? Everybody is where there are no
    /// tokens.
    ///
    /// # Errors
    /// No, and why.
    pub fn check(&self, shown: Option<&[u8]>) -> Result<(), Stranger> {
        let all = self.0.load();
        if all.is_empty() {
            return Ok(());
        }
        let (scheme, token) = shown.and_then(|shown| shown.split_at_checked(7)).ok_or(Stranger::Silent)?;
        if !scheme.eq_ignore_ascii_case(b"bearer ") {
            return Err(Stranger::Silent);
        }
        let shown: [u8; 32] = Sha256::digest(token).into();
        // All of them, whichever it is.
        let tokens = all.iter().filter_map(|known| known.token);
        let known = tokens.fold(Choice::from(0), |known, Token(token)| known | token.ct_eq(&shown));
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
        let files = [file("a", "the token of one\n"), file("b", "the token of another")];
        let known = files.map(|file| Known::read(file).unwrap());
        let (tokens, none) = (Tokens::new(known.to_vec()), Tokens::new(vec![]));
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
        // Each file for itself: another token in it, none, or what can not be one.
        let all = || ["the token of one", "a new token of one", "the token of another"];
        let heard = || all().map(|shown| tokens.check(Some(format!("Bearer {shown}").as_bytes())).is_ok());
        assert_eq!(tokens.reload(), (vec![], vec![]));
        let a = file("a", "a new token of one");
        let b = file("b", "none");
        let (changed, wrong) = tokens.reload();
        assert_eq!((changed, wrong.len()), (vec![a.clone()], 1));
        assert!(wrong[0].contains("a token of 4 bytes"), "{wrong:?}");
        assert_eq!(heard(), [false, true, true]);
        std::fs::remove_file(&b).unwrap();
        assert_eq!(tokens.reload(), (vec![b], vec![]));
        assert_eq!(heard(), [false, true, false]);
        std::fs::remove_file(&a).unwrap();
        assert_eq!(tokens.reload(), (vec![a], vec![]));
        assert_eq!(heard(), [false; 3], "who had a token once is not everybody");
        for (name, text, wrong) in [
            ("c", "short", "a token of 5 bytes"),
            ("d", "", "a token of 0 bytes"),
            ("f", "one of two lines\nand the other", "that nobody can show"),
        ] {
            let error = read(name, text).unwrap_err();
            assert!(error.contains(wrong) && !error.contains("short") && !error.contains("lines"), "{error}");
        }
        assert!(read("e", &"x".repeat(5000)).is_err());
        assert!(Token::read(&folder.path().join("nowhere")).unwrap_err().contains("can not be read"));
    }
}
