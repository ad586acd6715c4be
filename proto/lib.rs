//! The wire types of the gRPC APIs, made from the `.proto` files beside this one.
//!
//! The comments of `tollgate/v1/tollgate.proto` are the reference of Tollgate's own API; the files under
//! `envoy/` are wire-compatible with the messages of Envoy that are used. There is no logic here.

/// Every schema served, with its comments, as an encoded `FileDescriptorSet`: what reflection answers from.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

pub use packages::envoy;
/// Package `tollgate.v1`.
pub use packages::tollgate::v1;

mod packages {
    #![allow(
        missing_docs,
        unreachable_pub,
        unused_qualifications,
        clippy::all,
        clippy::pedantic,
        clippy::as_conversions,
        clippy::allow_attributes_without_reason,
        reason = "generated code; its documentation is the .proto files"
    )]
    include!(concat!(env!("OUT_DIR"), "/packages.rs"));
}
