//! Tests that the reaper frees nothing while a process uses the memory, and ends when it is not
//! needed.

use rustix::process::Signal;

use super::{assert_no_reaper, reaper, reapers, states};
use crate::support::{Program, Ran, Source, compile};

fn reaped(how: &str) -> Ran {
    let files = compile(&[Source::C("waiter", &[]), Source::C("reaped", &[])]);
    let program = Program::new(files.path("waiter")).arg(files.path("reaped"));
    let ran = program.args(["200", how]).jumbo_with(&["--reaper=on"]);
    assert_no_reaper(&files.path("reaped"));
    ran
}

#[test]
fn threads_that_go_on_without_the_main_thread_keep_their_memory() {
    for how in ["last-thread", "join-main"] {
        let ran = reaped(how);
        assert_eq!(ran.shell_status(), 4, "{how} {ran:?}");
        assert!(ran.stdout.contains("checked"), "{how} {ran:?}");
    }
}

#[test]
fn children_that_outlive_their_parents_keep_their_memory() {
    for how in ["orphan", "daemon"] {
        let ran = reaped(how);
        assert_eq!(ran.shell_status(), 3, "{how} {ran:?}");
        assert!(ran.stdout.contains("checked"), "{how} {ran:?}");
    }
}

#[test]
fn children_that_are_spawned_leave_it_where_it_is() {
    for how in ["spawn", "system"] {
        let ran = reaped(how);
        assert_eq!(ran.shell_status(), 3, "{how} {ran:?}");
    }
}

#[test]
fn a_vfork_child_that_outlives_its_killed_parent_keeps_its_memory() {
    let files = compile(&[Source::C("waiter", &[]), Source::C("vforked", &[])]);
    let program = Program::new(files.path("waiter")).arg(files.path("vforked"));
    let (ran, report) = program.reported_with(&["--reaper=on"]);
    assert_eq!(ran.shell_status(), 137, "{ran:?}");
    // States of the waiter's reaper and of the program's, which freed its memory after the child's
    // end.
    println!("vfork: {}", states(&report).join(", "));
    assert_eq!(states(&report)[1], "done", "{report:?}");
    assert!(ran.stdout.contains("checked"), "{ran:?}");
    assert_no_reaper(&files.path("vforked"));
}

/// A stopped reaper frees nothing and blocks no process; once continued it goes on.
#[test]
fn a_sibling_that_was_stopped_goes_on() {
    let files = compile(&[Source::C("reaped", &[])]);
    let path = files.path("reaped");
    let program = Program::new(&path).args(["100", "stay"]);
    let mut running = program.start_jumbo(&["--reaper=on"]);
    running.wait_for_line("ready");
    let pid = reaper(&path);
    rustix::process::kill_process(pid, Signal::STOP).unwrap();
    running.write("q");
    assert_eq!(running.wait().shell_status(), 6);
    assert_eq!(reapers(&path), [pid]);
    rustix::process::kill_process(pid, Signal::CONT).unwrap();
    assert_no_reaper(&path);
}

/// Without its reaper the program ends as in plain.
#[test]
fn a_program_whose_sibling_was_killed_runs_on() {
    let files = compile(&[Source::C("reaped", &[])]);
    let path = files.path("reaped");
    let program = Program::new(&path).args(["100", "stay"]);
    let mut running = program.start_jumbo(&["--reaper=on"]);
    running.wait_for_line("ready");
    rustix::process::kill_process(reaper(&path), Signal::KILL).unwrap();
    assert_no_reaper(&path);
    running.write("q");
    let ran = running.wait();
    assert_eq!(ran.shell_status(), 6, "{ran:?}");
    assert!(ran.stdout.contains("checked"), "{ran:?}");
}

/// The kernel cannot notify the reaper of the end, which polls for it.
#[test]
fn a_sibling_that_is_not_told_of_the_end_finds_it() {
    let files = compile(&[Source::C("moved", &[])]);
    let path = files.path("moved");
    for how in ["address", "page"] {
        let ran = Program::new(&path)
            .arg(how)
            .jumbo_with(&["--reaper=on"])
            .ok();
        assert_no_reaper(&path);
        assert_eq!(ran.stdout, "", "{how}");
    }
}
