//! `jumbo status -p` of programs that jumbo covers: what is read out of their memory.

use std::process::Command;

use rustix::process::Pid;
use serde_json::Value;

use crate::support::{Program, build};

/// What `jumbo status` says of a process.
fn status(pid: Pid) -> Value {
    let pid = pid.as_raw_nonzero().to_string();
    let output = Command::new(build::jumbo())
        .args(["status", "--json", "-p", &pid])
        .output()
        .unwrap();
    let mut page: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    page["processes"][0].take()
}

#[test]
fn what_jumbo_does_in_a_running_program_is_shown_without_a_launcher() {
    // In place, so there is no ledger; and as a child, which counts in one.
    let report = ["--report=json", "--report-file", "/dev/null"];
    for (options, reported) in [(&[][..], false), (&report, true)] {
        let mut running = Program::new("cat").start_jumbo(options);
        running.write("ready\n");
        running.wait_for_line("ready");
        let process = status(if reported {
            running.child()
        } else {
            running.pid()
        });
        let free = &process["jumbo"]["free"];
        for count in [
            "threads",
            "pending",
            "gathered",
            "inline",
            "background",
            "workers",
            "waits",
        ] {
            assert!(free[count].is_u64(), "{count}: {process:#}");
        }
        assert!(
            process["jumbo"]["reaper"]["state"].is_string(),
            "{process:#}"
        );
        assert_eq!(process["missing"], Value::Array(Vec::new()));
        running.wait();
    }
}

#[test]
fn a_program_that_jumbo_does_not_cover_shows_none() {
    let mut running = Program::new("cat").start_plain();
    running.write("ready\n");
    running.wait_for_line("ready");
    let process = status(running.pid());
    assert_eq!(process["name"], "cat");
    assert!(process["jumbo"].is_null(), "{process:#}");
    running.wait();
}
