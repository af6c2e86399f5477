//! Tests of `jumbo wait`, until the memory is free. A stopped reaper stands for a slow one.

use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::reaper;
use crate::support::{Compiled, Program, Running, Source, build, compile};

fn jumbo(arguments: &[&str]) -> Output {
    Command::new(build::jumbo())
        .args(arguments)
        .output()
        .unwrap()
}

/// Runs `jumbo wait` with timeout 0; returns its status, the processes waited for, and those left.
#[track_caller]
fn look(pids: &[Pid]) -> (Option<i32>, Vec<u64>, Vec<u64>) {
    let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
    let mut arguments = vec!["wait", "--timeout=0", "--json"];
    arguments.extend(pids.iter().map(String::as_str));
    let output = jumbo(&arguments);
    let page: Value = serde_json::from_slice(&output.stdout).unwrap();
    let list = |name: &str| page[name].as_array().unwrap().clone();
    let number = |value: &Value| value.as_u64().unwrap();
    let left: Vec<u64> = list("left").iter().map(|row| number(&row["pid"])).collect();
    assert_eq!(page["gone"].as_bool().unwrap(), left.is_empty(), "{page}");
    let seen = list("waited_for").iter().map(number).collect();
    (output.status.code(), seen, left)
}

fn number(pid: Pid) -> u64 {
    u64::try_from(pid.as_raw_nonzero().get()).unwrap()
}

/// A program that stays, and its reaper.
fn stays() -> (Compiled, Running, Pid) {
    let files = compile(&[Source::C("reaped", &[])]);
    let running = Program::new(files.path("reaped"))
        .args(["64", "stay"])
        .start_jumbo(&["--reaper=on"]);
    running.wait_for_line("ready");
    let reaper = reaper(&files.path("reaped"));
    (files, running, reaper)
}

#[test]
fn a_program_that_lives_is_waited_for_where_it_is_named() {
    let (_files, running, reaper) = stays();
    let (program, all) = (running.pid(), [number(running.pid()), number(reaper)]);
    let (status, mut seen, left) = look(&[program]);
    seen.sort_by_key(|pid| *pid != all[0]);
    assert_eq!((status, seen.as_slice()), (Some(124), &all[..]));
    assert!(all.iter().all(|pid| left.contains(pid)), "{left:?}");
    assert_eq!(look(&[reaper]), (Some(124), vec![all[1]], vec![all[1]]));
    // Without a PID the reaper of a living program is not waited for.
    assert!(!look(&[]).1.contains(&all[1]));
}

#[test]
fn a_reaper_at_work_is_waited_for_and_is_not_to_be_killed() {
    let (_files, running, reaper) = stays();
    let (program, own) = (running.pid(), number(reaper));

    let refused = jumbo(&["kill", &reaper.to_string()]);
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        printed.contains(&format!("the reaper of process {program}")),
        "{printed}"
    );
    assert_eq!(refused.status.code(), Some(1));

    kill_process(reaper, Signal::STOP).unwrap();
    let killed = jumbo(&["kill", "--signal=KILL", &program.to_string()]);
    let printed = String::from_utf8_lossy(&killed.stdout).into_owned();
    assert!(
        printed.contains("not back yet") && printed.contains("jumbo wait"),
        "{printed}"
    );
    assert_eq!(running.wait().shell_status(), 137);

    // Named by its own PID, by that of its ended program, or not at all.
    for named in [&[reaper][..], &[program], &[]] {
        let (status, _, left) = look(named);
        assert!(
            status == Some(124) && left.contains(&own),
            "{named:?}: {left:?}"
        );
    }
    let refused = jumbo(&["kill", &reaper.to_string()]);
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        printed.contains("has ended") && printed.contains("`jumbo wait`"),
        "{printed}"
    );

    let waits = Command::new(build::jumbo())
        .args(["wait", "--timeout=20", "--json", &program.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    kill_process(reaper, Signal::CONT).unwrap();
    let waited = waits.wait_with_output().unwrap();
    // The program of an ended reaper is unknown, and another reaper of this host may live on.
    let page: Value = serde_json::from_slice(&waited.stdout).unwrap();
    let left = page["left"].as_array().unwrap();
    assert!(left.iter().all(|row| row["pid"] != own), "{page}");
    assert_eq!(waited.status.success(), left.is_empty());
    assert_eq!(look(&[reaper]), (Some(0), vec![], vec![]));
}

#[test]
fn what_is_no_process_is_wrong_usage() {
    for pid in ["none", "0", "-9"] {
        let refused = jumbo(&["wait", pid]);
        let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(2), "{printed}");
        assert!(
            printed.contains("expected the number of a process"),
            "{printed}"
        );
    }
}
