//! The one table from a refusal to a gRPC status.

use crate::engine::Refusal;
use crate::shed::{self, Full};
use crate::store::{RETRY_UNAVAILABLE, StoreError};
use std::time::Duration;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use tower::BoxError;

/// What a refusal is called in gRPC.
pub(super) fn refused(refusal: &Refusal) -> Status {
    refusal.count();
    let text = refusal.to_string();
    match refusal {
        Refusal::EmptyKey
        | Refusal::KeyTooLong { .. }
        | Refusal::UnknownClass { .. }
        | Refusal::NeverFits { .. }
        | Refusal::TooManyReturns { .. }
        | Refusal::EmptyDomain
        | Refusal::Descriptors { .. }
        | Refusal::Entries { .. }
        | Refusal::Override { .. }
        | Refusal::NothingWished => {
            // Every one of these says "field: what is wrong".
            let (field, wrong) = text.split_once(": ").unwrap_or(("", &text));
            let details = ErrorDetails::with_bad_request_violation(field, wrong);
            Status::with_error_details(Code::InvalidArgument, text.as_str(), details)
        }
        Refusal::DeadlinePassed | Refusal::Store(StoreError::DeadlinePassed) => {
            Status::deadline_exceeded(text)
        }
        Refusal::Store(_) => unavailable(text, RETRY_UNAVAILABLE),
    }
}

/// Refused by load.
pub(super) fn shed(full: Full) -> Status {
    unavailable(full.to_string(), shed::RETRY_AFTER)
}

/// Why a message did not come in.
pub(super) fn broken(error: BoxError) -> Status {
    error.downcast().map_or_else(Status::from_error, |full| shed(*full))
}

fn unavailable(text: String, retry_after: Duration) -> Status {
    let mut trailers = MetadataMap::new();
    trailers.insert("retry-after", retry_after.as_secs().max(1).into());
    let details = ErrorDetails::with_retry_info(Some(retry_after));
    Status::with_error_details_and_metadata(Code::Unavailable, text, details, trailers)
}
