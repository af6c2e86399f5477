//! `mmap`, `munmap`, `mremap`, `mprotect` and `brk` at their edges.

use crate::support::{Program, Source, assert_same, compile};

#[test]
fn mappings_keep_their_promises() {
    let files = compile(&[Source::C("maps", &[])]);
    assert_same(&Program::new(files.path("maps")));
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
