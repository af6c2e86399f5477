//! Tests of `jumbo run --reaper`: memory freed after the program's end.
//!
//! - [`ends`]: a parent is notified at once, however the program ends, and the memory is freed.
//! - [`lifetime`]: the reaper frees nothing while a process uses the memory.
//! - [`leftovers`]: resources that would outlive the program, and `auto`.
//! - [`confinement`]: the reaper can do nothing that the program cannot.
//! - [`refusals`]: cases without a reaper, and calls that end it.
//! - [`servers`]: PostgreSQL and Redis.
//! - [`waiting`]: `jumbo wait`, until the memory is free.
//!
//! Tests find a program's reaper by its name and by the command line, which it shares with the
//! program: the folder of compiled programs differs in each test.

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

/// Name of reapers in ps(1).
const REAPER_COMM: &str = "jumbo-reaper";

/// Returns the living reapers of programs whose command line contains `path`.
fn reapers(path: &Path) -> Vec<Pid> {
    let path = path.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap();
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &i32| {
        let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let command = String::from_utf8_lossy(&read("cmdline")).into_owned();
        // A reaper that has freed its memory has no command line.
        read("comm") == format!("{REAPER_COMM}\n").as_bytes() && command.contains(path)
    })
    .filter_map(Pid::from_raw)
    .collect()
}

/// Waits for the one reaper and returns it.
#[track_caller]
fn reaper(path: &Path) -> Pid {
    wait::until("the reaper", wait::TIMEOUT, || {
        let found = reapers(path);
        assert!(found.len() <= 1, "{found:?}");
        found.first().copied()
    })
}

/// Waits until no reaper is left.
#[track_caller]
fn assert_no_reaper(path: &Path) {
    wait::until("the reapers' end", wait::TIMEOUT, || {
        reapers(path).is_empty().then_some(())
    });
}

/// Returns the states of reapers in the report, one per process.
fn states(report: &Report) -> Vec<String> {
    let reapers = report.at("/obtained/reapers").as_array().unwrap();
    let state = |row: &serde_json::Value| row["state"].as_str().unwrap().to_owned();
    reapers.iter().map(state).collect()
}

/// Returns the report's text about the reaper of the first process.
fn reason(report: &Report) -> &str {
    report.at("/obtained/reapers/0/reason").as_str().unwrap()
}

/// Reports whether there was a reaper. The report is written at the program's end, possibly before
/// the reaper notices it.
fn is_started(state: &str) -> bool {
    ["running", "done"].contains(&state)
}

/// Returns a field of /proc/PID/status.
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
