//! A program that puts a seccomp filter on itself: an allow-list of the calls of its own allocator, any other call is
//! the end. It lives under jumbo as it does without, in every way to run it.

use crate::support::program::assert_alike;
use crate::support::{Compiled, Program, Source, compile};

const WAYS: &[&[&str]] = &[
    &[],
    &["--heap=off"],
    &["--heap=glibc"],
    &["--heap=mimalloc", "--pool=64M"],
    &["--pool=64M"],
    &["--free=background"],
    &["--free=sync", "--free-workers=3"],
    &["--reaper=on"],
];

fn strict() -> Compiled {
    compile(&[Source::C("strict", &["-pthread"])])
}

#[track_caller]
fn assert_lives(files: &Compiled, how: &[&str]) {
    let program = Program::new(files.path("strict")).args(how);
    let plain = program.plain().ok();
    for options in WAYS {
        let jumbo = program.jumbo_with(options);
        assert_alike(&plain, &jumbo, &format!("{how:?} {options:?}"));
    }
}

#[test]
fn what_the_allocator_of_the_program_needs_is_enough_for_jumbo() {
    assert_lives(&strict(), &["prctl"]);
}

#[test]
fn a_filter_is_seen_however_it_is_installed() {
    let files = strict();
    assert_lives(&files, &["syscall"]);
    // A listener's answer is a descriptor.
    assert_lives(&files, &["listener"]);
}

#[test]
fn a_second_filter_is_installed_with_the_calls_of_the_first() {
    assert_lives(&strict(), &["prctl", "twice"]);
}

/// Where huge pages are off frees are looked at from a smaller size on, and workers are made ready.
#[test]
fn a_filter_is_obeyed_where_the_program_wants_no_huge_pages() {
    assert_lives(&strict(), &["prctl", "small"]);
}

/// The environment is inherited: glibc's tunable, which it obeys before any library of ours can say no.
#[test]
fn what_is_executed_under_the_filter_lives_too() {
    let files = strict();
    let path = files.path("strict");
    for first in [&["prctl"][..], &["prctl", "advice"], &["prctl", "all"]] {
        let how = [first, &["exec", path.to_str().unwrap(), "none"]].concat();
        assert_lives(&files, &how);
    }
}

/// And where the filter lets advice pass nothing is lost.
#[test]
fn advice_goes_on_where_the_filter_lets_it_pass() {
    let files = strict();
    let path = files.path("strict");
    let after = ["exec", path.to_str().unwrap(), "none"];
    for (how, advised) in [
        (&["prctl"][..], false),
        (&["syscall", "advice"], true),
        (&["listener", "all"], true),
        (&[&["prctl", "all"][..], &after].concat(), true),
        // What is not counted is not advised either.
        (&[&["prctl", "advice"][..], &after].concat(), false),
    ] {
        let program = Program::new(&path).args(how);
        let (ran, report) = program.reported();
        ran.ok();
        let number = |name: &str| report.number(&format!("/obtained/ledger/{name}"));
        // 350 MiB before the filter, and as much again after it.
        let all = number("refused") == 0.0 && number("advised") > 600e6;
        assert_eq!(all, advised, "{how:?}: {report:?}");
        let is_told = report.says("a seccomp filter may end who asks");
        assert_eq!(is_told, number("refused") > 0.0, "{how:?}: {report:?}");
    }
}

/// Its number, which looking after shared memory is done by, no process under that filter may ask for.
#[test]
fn shared_memory_is_mapped_and_unmapped_with_the_calls_of_the_program() {
    let files = compile(&[Source::C("filtered", &[])]);
    let program = Program::new(files.path("filtered")).args(["shared", "64"]);
    let plain = program.plain().ok();
    for options in [&[][..], &["--shm=user"], &["--shm=advise"]] {
        let jumbo = program.jumbo_with(options);
        assert_alike(&plain, &jumbo, &format!("{options:?}"));
    }
}
