//! Other circumstances: another user, /sys read-only, no /sys.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use crate::support::{LOOKED_AT, library, output, skip, stderr};

const SCRIPT: &str = "a = [bytes(1000 + i % 7) for i in range(50000)]";

/// Runs jumbo below `wrapper`, a shell fragment, with a JSON report on stderr.
fn below(name: &str, wrapper: &str, probe: &str) {
    if !Command::new("sh")
        .args(["-c", probe])
        .output()
        .unwrap()
        .status
        .success()
    {
        skip(name, &format!("`{probe}` does not work here"));
        return;
    }
    // Where every user can reach it.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let jumbo = folder.path().join("jumbo");
    // cp(1) makes them: a file that anybody writes cannot be run, and what another test starts inherits descriptors.
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_jumbo"))
        .args([library(), folder.path()])
        .status();
    assert!(copied.unwrap().success());
    let script = format!(
        "{wrapper} {} run --report=json -- /usr/bin/python3 -c \"$0\"",
        jumbo.display()
    );
    let python = format!("{SCRIPT}\n{LOOKED_AT}\nos._exit(3)");
    let output = output(
        Command::new("sh")
            .current_dir("/")
            .args(["-c", &script, &python]),
    );
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(report["reach"]["reached"], true, "{report:#}");
    assert!(
        report["peak"]["heap"]["bytes"].as_u64().unwrap() > 40_000_000,
        "{report:#}"
    );
}

#[test]
fn an_unprivileged_user_gets_the_same() {
    let wrapper = "setpriv --reuid=65534 --regid=65534 --clear-groups";
    below(
        "an_unprivileged_user_gets_the_same",
        wrapper,
        &format!("{wrapper} /usr/bin/python3 -V"),
    );
}

#[test]
fn a_read_only_sys_is_enough() {
    let wrapper = "unshare -m sh -c 'mount -o remount,ro,bind /sys && exec \"$@\"' -";
    below(
        "a_read_only_sys_is_enough",
        wrapper,
        &format!("{wrapper} /usr/bin/python3 -V"),
    );
}

#[test]
fn without_sys_it_runs() {
    let wrapper = "unshare -m sh -c 'mount -t tmpfs none /sys && exec \"$@\"' -";
    below(
        "without_sys_it_runs",
        wrapper,
        &format!("{wrapper} /usr/bin/python3 -V"),
    );
}
