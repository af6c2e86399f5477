//! Commands killed and interrupted at every step of a change.
//!
//! strace(1) delivers the signal when the command enters its Nth call of a kind, for every kind and
//! every N. No step is left out and the test does not depend on time.

use std::process::Command;

use crate::support::{Host, Snapshot, assert_unchanged, now, skip, stderr};

/// System calls that change state, and the exit.
const CALLS: [&str; 8] = [
    "mkdir",
    "ftruncate",
    "write",
    "fsync",
    "rename",
    "unlink",
    "clone3",
    "exit_group",
];

/// Upper bound of the calls of one kind in a change.
const MAX_CALLS: usize = 60;

/// Runs jumbo with `signal` at its `nth` call; returns true if it made fewer calls and so was not
/// disturbed.
pub(crate) fn cut(host: &Host, arguments: &[&str], call: &str, nth: usize, signal: &str) -> bool {
    let trace = tempfile::NamedTempFile::new().unwrap();
    let inject = format!("inject={call}:signal={signal}:when={nth}");
    let mut words = vec![
        "strace",
        "-f",
        "-qq",
        "-o",
        trace.path().to_str().unwrap(),
        "-e",
        &inject,
    ];
    words.push(env!("CARGO_BIN_EXE_jumbo"));
    words.extend(arguments);
    let output = host.command(&words).output().unwrap();
    let traced = std::fs::read_to_string(trace.path()).unwrap();
    // The bare signal name occurs in other traced calls, too.
    let delivered = ["--- SIG", "+++ killed by SIG"]
        .iter()
        .any(|end| traced.contains(&format!("{end}{signal}")));
    assert!(delivered || output.status.success(), "{output:?}");
    !delivered
}

pub(crate) fn can_trace(test: &str) -> bool {
    let traced = Command::new("strace")
        .args(["-qq", "-o", "/dev/null", "true"])
        .status();
    let can = traced.is_ok_and(|status| status.success());
    if !can {
        skip(test, "strace cannot trace here");
    }
    can
}

/// Calls `check` after each cut; ends when no call of any kind is left.
pub(crate) fn at_every_step(host: &Host, arguments: &[&str], signal: &str, check: impl Fn(&str)) {
    let mut cuts = 0;
    for call in CALLS {
        let mut last = false;
        for nth in 1..MAX_CALLS {
            if last {
                break;
            }
            last = cut(host, arguments, call, nth, signal);
            cuts += usize::from(!last);
            check(&format!(
                "SIG{signal} at {call} number {nth} of {arguments:?}"
            ));
        }
        assert!(last, "{call} never ends");
    }
    // A change writes its record twice and its knobs: fewer steps mean that the trace failed.
    assert!(cuts > 12, "only {cuts} steps were cut");
}

#[test]
fn killed_at_any_step_a_change_can_be_undone() {
    const TEST: &str = "killed_at_any_step_a_change_can_be_undone";
    let Some(host) = Host::take(TEST).filter(|_| can_trace(TEST)) else {
        return;
    };
    host.ok(&["grow", "2M", "3"]);
    let (before, records) = (Snapshot::now(), host.records());
    let to = (before.pool.persistent() + 5).to_string();
    let change = [
        "pool",
        "set",
        "2M",
        "--persistent",
        &to,
        "--overcommit",
        "7",
    ];
    let check = |step: &str| {
        // A change that had not begun left no record: the last record is that of the change before.
        if host.records() > records {
            host.ok(&["set", "2M", "--undo"]);
        }
        assert_unchanged(&before, step);
        assert_eq!(host.records(), records, "{step}");
    };
    at_every_step(&host, &change, "KILL", check);
    at_every_step(&host, &["pool", "shrink", "2M", "2"], "KILL", check);
    host.ok(&["--undo"]);
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn killed_at_any_step_an_undo_can_be_repeated() {
    const TEST: &str = "killed_at_any_step_an_undo_can_be_repeated";
    let Some(host) = Host::take(TEST).filter(|_| can_trace(TEST)) else {
        return;
    };
    let before = Snapshot::now();
    let to = (before.pool.persistent() + 5).to_string();
    let again = || {
        if host.records() == 0 {
            host.ok(&["set", "2M", "--persistent", &to, "--overcommit", "7"]);
        }
    };
    again();
    at_every_step_of_undo(&host, || {
        host.ok(&["--undo"]);
        assert_unchanged(&before, "undone");
        again();
    });
    host.ok(&["--undo"]);
    assert_unchanged(&before, "undone");
    assert_eq!(host.records(), 0);
}

fn at_every_step_of_undo(host: &Host, check: impl Fn()) {
    for call in ["write", "unlink", "fsync", "clone3", "exit_group"] {
        for nth in 1..MAX_CALLS {
            let last = cut(host, &["pool", "--undo"], call, nth, "KILL");
            check();
            if last {
                break;
            }
        }
    }
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn interrupted_at_any_step_a_change_is_put_back_or_done() {
    const TEST: &str = "interrupted_at_any_step_a_change_is_put_back_or_done";
    let Some(host) = Host::take(TEST).filter(|_| can_trace(TEST)) else {
        return;
    };
    let before = Snapshot::now();
    let to = before.pool.persistent() + 5;
    let asked = to.to_string();
    let change = ["pool", "set", "2M", "--persistent", &asked];
    at_every_step(&host, &change, "INT", |step| {
        match host.records() {
            // The signal came too late: the change is complete.
            1 => {
                assert_eq!(now().persistent(), to, "{step}");
                host.ok(&["--undo"]);
            }
            // The signal came in time: nothing remains to undo.
            records => assert_eq!(records, 0, "{step}"),
        }
        assert_unchanged(&before, step);
    });
}

#[test]
fn what_was_interrupted_ends_as_interrupted() {
    const TEST: &str = "what_was_interrupted_ends_as_interrupted";
    let Some(host) = Host::take(TEST).filter(|_| can_trace(TEST)) else {
        return;
    };
    let words = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "inject=rename:signal=INT:when=1",
    ];
    let jumbo = [env!("CARGO_BIN_EXE_jumbo"), "pool", "grow", "2M", "5"];
    let before = Snapshot::now();
    let output = host
        .command(&[&words[..], &jumbo[..]].concat())
        .output()
        .unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    assert_eq!(signal, Some(2), "{output:?}");
    assert!(
        stderr(&output).contains("interrupted: everything was put back"),
        "{output:?}"
    );
    assert_unchanged(&before, "undone");
    assert_eq!(host.records(), 0);
}
