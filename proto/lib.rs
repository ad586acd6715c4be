//! The wire types of Tollgate's gRPC API, made from the `.proto` files beside this one.
//!
//! The comments of `tollgate/v1/tollgate.proto` are the API's reference; there is no logic here.

/// Every schema served, with its comments, as an encoded `FileDescriptorSet`: what reflection answers from.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Package `tollgate.v1`.
pub mod v1 {
    #![allow(
        missing_docs,
        unreachable_pub,
        unused_qualifications,
        clippy::all,
        clippy::pedantic,
        clippy::as_conversions,
        clippy::allow_attributes_without_reason,
        reason = "generated code; its documentation is the .proto file"
    )]
    tonic::include_proto!("tollgate.v1");
}
