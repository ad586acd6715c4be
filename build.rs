//! Compiles every `.proto` to wire types and a descriptor set, in Rust alone: no `protoc` to install.

use prost::Message as _;

const FILES: [&str; 2] = ["tollgate/v1/tollgate.proto", "envoy/service/ratelimit/v3/rls.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // One tree of modules, because the packages of Envoy refer to each other.
    tonic_prost_build::configure().include_file("packages.rs").compile_fds(descriptors)?;
    Ok(())
}
