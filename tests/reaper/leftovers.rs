//! Tests of `auto`: a reaper for large programs, and none if something would outlive the program.

use rustix::process::Signal;

use super::{assert_no_reaper, is_started, reapers, reason, states};
use crate::support::{Program, Ran, Report, Source, build, compile, host};

struct Left {
    ran: Ran,
    report: Report,
    had_reaper: bool,
    folder: tempfile::TempDir,
}

/// Runs the program until it is large and has the resource `what`, and kills it.
fn killed(what: &str, when: &str, mode: &str) -> Left {
    let files = compile(&[Source::C("leftovers", &[])]);
    let path = files.path("leftovers");
    let folder = build::world_readable_folder();
    let program = Program::new(&path)
        .args([what, when])
        .arg(folder.path().join("file"));
    let (running, report) = program.start_reported(&[mode]);
    running.wait_for_line("ready");
    let had_reaper = !reapers(&path).is_empty();
    rustix::process::kill_process(running.child(), Signal::KILL).unwrap();
    let ran = running.wait();
    assert_eq!(ran.shell_status(), 137, "{ran:?}");
    let report = report.read(&ran);
    println!("{what}, {when}, {mode}: {}", reason(&report));
    if !had_reaper {
        assert_nothing_is_left(what, &ran, folder.path());
    }
    assert_no_reaper(&path);
    remove_segment(&ran);
    Left {
        ran,
        report,
        had_reaper,
        folder,
    }
}

/// Called right after the wait.
fn assert_nothing_is_left(what: &str, ran: &Ran, folder: &std::path::Path) {
    match what {
        "sysv" | "sysv-number" => {
            let id = ran.number("segment");
            let segments = std::fs::read_to_string("/proc/sysvipc/shm").unwrap();
            let attached = segments.lines().skip(1).find_map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                (words[1] == id.to_string()).then(|| words[6].to_owned())
            });
            assert_eq!(attached.as_deref(), Some("0"), "{segments}");
        }
        "flock" | "flock-number" | "flock-then-map" | "flock-child" | "ofd" | "lease" => {
            let file = std::fs::File::open(folder.join("file")).unwrap();
            rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        }
        // ETXTBSY, if it is still open for writing.
        "written" | "written-private" => {
            let status = std::process::Command::new(folder.join("file")).status();
            assert!(status.unwrap().success());
        }
        _ => {}
    }
}

fn remove_segment(ran: &Ran) {
    if ran.stdout.contains("segment=") {
        let id = ran.number("segment").to_string();
        Program::new("ipcrm").args(["-m", &id]).plain();
    }
}

#[test]
fn a_program_that_asks_for_much_gets_a_sibling() {
    let left = killed("none", "before", "--reaper=auto");
    assert!(left.had_reaper, "{:?}", left.report);
    assert!(left.folder.path().exists() && left.ran.stdout.contains("ready"));
}

#[test]
fn a_small_program_gets_none() {
    let files = compile(&[Source::C("reaped", &[])]);
    let (_, report) = Program::new(files.path("reaped"))
        .args(["600", "exit"])
        .reported_with(&["--reaper=auto"]);
    assert_eq!(states(&report), ["waiting"], "{report:?}");
}

#[test]
fn what_is_asked_in_any_size_counts() {
    let files = compile(&[Source::C("asks", &[])]);
    // In one block; in large blocks; in blocks that share a page.
    for kib in ["1228800", "1000", "48"] {
        let program = Program::new(files.path("asks"));
        let reaper = |mib: &str| {
            let program = program.clone().args([mib, kib]);
            let (ran, report) = program.reported_with(&["--reaper=auto"]);
            ran.ok();
            states(&report)[0].clone()
        };
        assert!(is_started(&reaper("1200")), "{kib}");
        assert_eq!(reaper("600"), "waiting", "{kib}");
    }
}

/// Memory that glibc's malloc maps is not counted.
#[test]
fn what_is_not_counted_is_said() {
    let files = compile(&[Source::C("asks", &[])]);
    let program = Program::new(files.path("asks")).args(["1200", "1000"]);
    let (ran, report) = program.reported_with(&["--heap=off", "--reaper=auto"]);
    ran.ok();
    assert_eq!(states(&report), ["uncounted"], "{report:?}");
}

#[test]
fn what_would_outlive_the_program_keeps_the_sibling_away() {
    let kinds = [
        ("aio", "aio"),
        ("sysv", "sysv-segment"),
        ("flock", "locked-file"),
        ("flock-then-map", "locked-file"),
        ("ofd", "locked-file"),
        ("lease", "locked-file"),
        ("sysv-number", "sysv-segment"),
        ("flock-number", "locked-file"),
        ("flock-child", "locked-file"),
        ("written", "written-file"),
        ("written-private", "written-file"),
        ("memfd", "written-file"),
    ];
    for (what, state) in kinds {
        for when in ["before", "after"] {
            let left = killed(what, when, "--reaper=auto");
            assert!(!left.had_reaper, "{what} {when} {:?}", left.report);
            // State of the program itself; a child reports nothing.
            assert_eq!(states(&left.report)[0], state, "{what} {when}");
        }
    }
}

#[test]
fn a_mapped_device_keeps_the_sibling_away() {
    if !host::root() {
        return;
    }
    for when in ["before", "after"] {
        let files = compile(&[Source::C("leftovers", &[])]);
        let program = Program::new(files.path("leftovers")).args(["device", when, "/dev/null"]);
        let (ran, report) = program.stdin("\n").reported_with(&["--reaper=auto"]);
        if ran.shell_status() == 42 {
            return host::skip("no device can be mapped here");
        }
        assert_eq!(states(&report), ["device"], "{when} {report:?}");
    }
}

#[test]
fn what_was_given_up_before_keeps_nothing_away() {
    for what in ["aio", "sysv", "flock", "written", "shared-anonymous"] {
        let left = killed(what, "never", "--reaper=auto");
        assert!(left.had_reaper, "{what} {:?}", left.report);
    }
}

/// Memory shared only by forks is no file that another process could find busy.
#[test]
fn shared_memory_without_a_name_keeps_nothing_away() {
    for when in ["before", "after"] {
        let left = killed("shared-anonymous", when, "--reaper=auto");
        assert!(left.had_reaper, "{when} {:?}", left.report);
    }
}

#[test]
fn on_overrides() {
    for what in ["aio", "sysv", "flock"] {
        let left = killed(what, "before", "--reaper=on");
        assert!(left.had_reaper, "{what} {:?}", left.report);
    }
}
