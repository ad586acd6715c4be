//! What fuzzing begins with and what it found, without a fuzzer: each target on each of its inputs in `fuzz/corpus`.

#[path = "../fuzz/src/lib.rs"]
#[expect(unreachable_pub, reason = "it is a library where it is fuzzed")]
mod targets;

use std::path::PathBuf;

fn each(target: &str, run: fn(&[u8])) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut inputs = 0;
    for entry in std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        run(&std::fs::read(entry.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs > 1, "{target} has {inputs} inputs");
}

#[test]
fn rules() {
    each("rules", targets::rules);
}

#[test]
fn matcher() {
    each("matcher", targets::matcher);
}

#[test]
fn requests() {
    each("requests", targets::requests);
}

#[test]
fn leases() {
    each("leases", targets::leases);
}
