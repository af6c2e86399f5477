//! Tests that mechanisms see the same calls by function name and by system call number.

use std::time::{Duration, Instant};

use crate::support::program::assert_alike;
use crate::support::{Program, Source, compile, host};

/// Tests run the debug build of the library, which counts the calls that its mechanisms see.
#[test]
fn a_name_and_its_number_are_heard_alike() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("doors", &[])]);
    let ran = Program::new(files.path("doors"))
        .jumbo_with(&["--shm=auto"])
        .ok();
    let lines: Vec<_> = ran.stdout.lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 23, "{lines:?}");
    for line in lines {
        let words: Vec<_> = line.split(' ').collect();
        // Some mechanism saw each call; otherwise the comparison would be void.
        assert_eq!((words[1], words.last()), ("same", Some(&"heard")), "{line}");
    }
}

/// A descriptor of jumbo's own would take the place of the program's.
#[test]
fn a_thread_that_allocates_leaves_the_lowest_descriptor_free() {
    let files = compile(&[Source::C("lowest", &[])]);
    let ran = Program::new(files.path("lowest")).jumbo().ok();
    assert_eq!(ran.number("descriptor"), 0, "{ran:?}");
}

#[test]
fn a_call_by_its_number_answers_as_the_kernel_does() {
    let files = compile(&[Source::C("by_number", &[])]);
    for (case, status) in [("slack", 0), ("filter", 0), ("exit", 7)] {
        let program = Program::new(files.path("by_number")).arg(case);
        let plain = program.plain();
        assert_eq!(plain.shell_status(), status, "{plain:?}");
        for mode in ["--free=sync", "--free=background"] {
            let began = Instant::now();
            assert_alike(
                &plain,
                &program.jumbo_with(&[mode, "--free-workers=3"]),
                case,
            );
            // A lingering thread of jumbo would delay the exit.
            assert!(began.elapsed() < Duration::from_secs(30), "{case} {mode}");
        }
    }
}
