//! What `docs/envoy.md` shows works as pasted.

use crate::support::{Process, Tollgate, peer_unless_skipped};
use std::process::Command;

const DOCS: &str = include_str!("../../docs/envoy.md");

/// The blocks of that language, in order.
fn blocks(language: &str) -> Vec<&'static str> {
    let fence = format!("```{language}\n");
    DOCS.split(fence.as_str()).skip(1).map(|rest| rest.split_once("```").unwrap().0).collect()
}

#[test]
fn the_files_are_valid_and_said_to_be() {
    let yaml = blocks("yaml");
    let [edge, _, shop] = yaml.as_slice() else { panic!("{} blocks", yaml.len()) };
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("rules")).unwrap();
    let check = |arguments: &[&str]| {
        let mut command = Tollgate::command();
        let output = command.current_dir(folder.path()).arg("check").args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    std::fs::write(folder.path().join("shop.yaml"), shop).unwrap();
    check(&["shop.yaml"]);

    std::fs::write(folder.path().join("rules/edge.yaml"), edge).unwrap();
    let console = blocks("console");
    let shown = console.iter().find(|block| block.contains("--explain")).unwrap();
    let said = check(&["rules"]) + &check(&["rules", "--explain", "edge/user=bob"]);
    let said: Vec<_> = said.lines().collect();
    let shown: Vec<_> = shown.lines().filter(|line| !line.starts_with('$')).collect();
    assert_eq!(said, shown);
}

#[tokio::test]
async fn the_envoy_configuration_is_valid() {
    let Some(program) = peer_unless_skipped("envoy", "TOLLGATE_TEST_ENVOY") else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("envoy.yaml");
    std::fs::write(&file, blocks("yaml")[1]).unwrap();
    let mut command = Command::new(program);
    command.args(["--mode", "validate", "--disable-hot-restart", "-l", "warn", "-c"]).arg(file);
    let mut envoy = Process::spawn(&mut command);
    assert!(envoy.exit().await.success(), "{}", envoy.output());
}
