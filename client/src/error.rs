//! Why there is no answer.

use std::time::Duration;
use tonic::{Code, Status};

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No URL.
    #[error("{0:?} is no URL; expected one such as http://127.0.0.1:8081")]
    Url(String),
    /// A client of no service.
    #[error("endpoints: none; expected at least 1")]
    NoEndpoint,
    /// A setting that can not be.
    #[error("{setting}: {value}; expected {expected}")]
    Setting {
        /// Its name in [`Builder`](crate::Builder).
        setting: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// The certificates or names for TLS can not be used.
    #[error("tls: {0}")]
    Tls(String),
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The service can not be reached, or can not decide now.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// The service says that the request can not be.
    #[error("{0}")]
    Invalid(String),
    /// Anything else that a service may answer.
    #[error("{code:?}: {message}")]
    Other {
        /// The status code.
        code: Code,
        /// What the service says.
        message: String,
    },
}

impl Error {
    /// Whether it is the request that is wrong. Asking again, or somebody else, would be no better, and no local
    /// decision stands in for such an answer.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Invalid(_) => true,
            Self::Other { code, .. } => {
                matches!(code, Code::OutOfRange | Code::Unauthenticated | Code::PermissionDenied)
            }
            _ => false,
        }
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        let message = status.message().to_owned();
        match status.code() {
            Code::Unavailable => Self::Unavailable(message),
            Code::InvalidArgument => Self::Invalid(message),
            code => Self::Other { code, message },
        }
    }
}
