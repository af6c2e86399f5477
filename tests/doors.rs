//! The calls that mechanisms hear of reach the same ones by the name of a function and by the number of the system call.

use crate::support::{Program, Source, compile, host};

/// Tests run the debug build of the library, which counts what its list of mechanisms hears.
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
        // Each was heard by some mechanism, or this would compare nothing with nothing.
        assert_eq!((words[1], words.last()), ("same", Some(&"heard")), "{line}");
    }
}
