//! Completions and manual pages: there for every command.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::process::Command;

fn jumbo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_jumbo"))
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_shell_completes_the_options_of_run() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = jumbo(&["completions", shell]);
        assert!(script.contains("max-waste"), "{shell}");
    }
}

#[test]
fn there_is_a_page_for_every_command() {
    let folder = tempfile::tempdir().unwrap();
    jumbo(&["man", "--dir", folder.path().to_str().unwrap()]);
    for command in [
        "run",
        "status",
        "doctor",
        "kill",
        "pool",
        "pool-set",
        "bench",
        "completions",
        "man",
    ] {
        let page = folder.path().join(format!("jumbo-{command}.1"));
        assert!(page.exists(), "{}", page.display());
    }
    let run = std::fs::read_to_string(folder.path().join("jumbo-run.1")).unwrap();
    assert!(run.contains("Exit status"), "{run}");
    assert!(jumbo(&["man"]).contains(".TH jumbo"));
}
