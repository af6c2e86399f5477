//! Tests of what a program must not notice of the library at its start.

use std::process::Command;

use crate::support::{Program, Source, assert_same, compile, host};

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
