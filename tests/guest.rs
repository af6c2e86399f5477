//! Tests of what a program must not notice of the library at its start.

use crate::support::{Program, Source, assert_same, compile};

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
