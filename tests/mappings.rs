//! `mmap`, `munmap`, `mremap`, `mprotect` and `brk` at their edges.

use crate::support::{Program, Source, assert_same, compile};

#[test]
fn mappings_keep_their_promises() {
    let files = compile(&[Source::C("maps", &[])]);
    assert_same(&Program::new(files.path("maps")));
}

#[test]
fn what_the_kernel_refuses_to_grow_stays_as_it_is() {
    let files = compile(&[Source::C("grown", &[])]);
    assert_same(&Program::new(files.path("grown")));
}

#[test]
fn a_thread_that_is_suspended_keeps_no_other_from_mapping() {
    let files = compile(&[Source::C("suspended", &[])]);
    assert_same(&Program::new(files.path("suspended")));
}

/// The same with jumbo's heap off, and with its maps off: each part stands alone.
#[test]
fn either_part_may_be_switched_off() {
    let files = compile(&[Source::C("maps", &[]), Source::C("family", &[])]);
    for name in ["maps", "family"] {
        let program = Program::new(files.path(name));
        for option in ["--heap=off", "--maps=off"] {
            program.jumbo_with(&[option]).ok();
        }
    }
}
