//! Tests of what a program must not notice of the library at its start.

use std::process::Command;

use crate::support::{Program, Source, assert_same, compile, host, wait};

/// glibc's malloc is initialised on a stack of the library.
#[test]
fn the_first_allocation_keeps_to_a_small_stack() {
    let files = compile(&[Source::C("small_stack", &[])]);
    let program = Program::new(files.path("small_stack"));
    assert_same(&program);
    for option in ["--heap=off", "--heap=glibc"] {
        program.jumbo_with(&[option]).ok();
    }
}

#[test]
fn a_function_that_the_program_defines_waits_for_its_start() {
    let files = compile(&[Source::C("own_iterate", &["-rdynamic"])]);
    let program = Program::new(files.path("own_iterate"));
    assert_same(&program);
    program.env("JUMBO", "off").jumbo().ok();
}

/// ThreadSanitizer ends a program that has memory at an address of jumbo's choice.
#[test]
fn a_program_with_a_sanitizer_runs_as_it_is() {
    let tsan = Command::new("gcc")
        .arg("-print-file-name=libtsan.so")
        .output();
    // gcc prints the bare name of a file that it does not have.
    if !tsan.is_ok_and(|found| found.stdout.starts_with(b"/")) {
        return host::skip("gcc has no libtsan");
    }
    let files = compile(&[Source::C("own_iterate", &["-fsanitize=thread", "-DPLAIN"])]);
    let program = Program::new(files.path("own_iterate"));
    let (_, report) = assert_same(&program);
    assert!(report.says("ThreadSanitizer"), "{report:?}");
}

/// A process beside the program scans its memory, as long as it has one thread.
#[test]
fn a_program_of_one_thread_sees_no_other() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("alone", &["-pthread"])]);
    let alone = Program::new(files.path("alone"));
    for what in ["count", "pipe", "wait", "free"] {
        let (plain, jumbo) = (alone.clone().arg(what), alone.clone().arg(what));
        assert_eq!(plain.plain().ok().stdout, jumbo.jumbo().ok().stdout);
    }
    let scanned = alone.clone().arg("count").jumbo().ok();
    assert!(!scanned.stderr.contains("scanned 0"), "{scanned:?}");
    // A container may forbid user namespaces.
    let namespace = alone.clone().arg("namespace");
    assert_eq!(namespace.plain().ok().stdout, namespace.jumbo().ok().stdout);
    let threaded = alone.clone().arg("thread").jumbo().ok();
    assert_eq!(threaded.stdout, "left=0\nhuge=1\n");
    if host::root() {
        let folder = tempfile::tempdir().unwrap();
        let rooted = alone.arg("root").arg(folder.path()).jumbo().ok();
        assert_eq!(rooted.stdout, "left=0\n");
    }
}

#[test]
fn a_program_leaves_no_process_behind() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("alone", &["-pthread"])]);
    for (how, is_seen) in [
        ("exit", true),
        ("return", true),
        ("_exit", true),
        ("exec", true),
        ("raw", false),
        ("abort", false),
        ("kill", false),
    ] {
        let program = Program::new(files.path("alone")).args(["leave", how]);
        let ran = program.jumbo();
        let beside = ran.number("beside");
        assert_ne!(beside, 0, "{how}: {ran:?}");
        assert!(!ran.stdout.contains("left=1"), "{how}: {ran:?}");
        let stat = format!("/proc/{beside}/stat");
        // Ended, and maybe not waited for by init.
        let is_gone = || match std::fs::read_to_string(&stat) {
            Ok(text) => text.contains(") Z") || !text.contains("(jumbo-watch)"),
            Err(_) => true,
        };
        if is_seen {
            assert!(is_gone(), "{how}: {stat} exists");
        } else {
            wait::until(how, wait::TIMEOUT, || is_gone().then_some(()));
        }
    }
}
