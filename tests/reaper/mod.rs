//! `jumbo run --reaper`: memory given back after the program's end.
//!
//! - [`ends`]: however the program ends, a parent that waits is answered, and the memory comes back.
//! - [`lifetime`]: it frees nothing while a process uses the memory.
//! - [`leftovers`]: what would outlive the program, and `auto`.
//! - [`confinement`]: it can do nothing that the program cannot.
//! - [`refusals`]: where it is not started, and calls that it is ended for.
//! - [`servers`]: PostgreSQL and Redis.
//! - [`waiting`]: `jumbo wait`, until the memory is back.
//!
//! The sibling of a program is found by its name and by the command line, which it shares with the
//! program: the folder of compiled programs is another one in each test.

mod confinement;
mod ends;
mod leftovers;
mod lifetime;
mod refusals;
mod servers;
mod waiting;

use std::fs;
use std::path::Path;

use rustix::process::Pid;

use crate::support::{Report, wait};

/// The sibling's name in ps(1).
const NAME: &str = "jumbo-reaper";

/// The living siblings of programs whose command line holds `path`.
fn siblings(path: &Path) -> Vec<Pid> {
    let path = path.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap();
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &i32| {
        let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let command = String::from_utf8_lossy(&read("cmdline")).into_owned();
        // One that has given its memory up has no command line any more.
        read("comm") == format!("{NAME}\n").as_bytes() && command.contains(path)
    })
    .filter_map(Pid::from_raw)
    .collect()
}

/// The one sibling.
#[track_caller]
fn sibling(path: &Path) -> Pid {
    wait::until("the sibling", wait::TIMEOUT, || {
        let found = siblings(path);
        assert!(found.len() <= 1, "{found:?}");
        found.first().copied()
    })
}

/// Waits until no sibling is left.
#[track_caller]
fn assert_no_sibling(path: &Path) {
    wait::until("the siblings' end", wait::TIMEOUT, || {
        siblings(path).is_empty().then_some(())
    });
}

/// What the report says of the reaper, process by process.
fn states(report: &Report) -> Vec<String> {
    let reapers = report.at("/obtained/reapers").as_array().unwrap();
    let state = |row: &serde_json::Value| row["state"].as_str().unwrap().to_owned();
    reapers.iter().map(state).collect()
}

/// What the report says of the first process's reaper, for people.
fn reason(report: &Report) -> &str {
    report.at("/obtained/reapers/0/reason").as_str().unwrap()
}

/// Whether there was a sibling. The report is written when the program has ended, which it may not have seen.
fn is_started(state: &str) -> bool {
    ["running", "done"].contains(&state)
}

/// A line of /proc/PID/status.
#[track_caller]
fn status(pid: Pid, key: &str) -> String {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    let text = fs::read_to_string(path).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(":\t"));
    line.unwrap_or_else(|| panic!("no {key} in {text}"))
        .to_owned()
}
