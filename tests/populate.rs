//! Tests of memory that a program makes resident at once: several threads do it.

use crate::support::program::assert_alike;
use crate::support::{Program, Source, compile, host};

const WAYS: [&str; 8] = [
    "populate", "shared", "locked", "mlock", "mlock2", "mlockall", "write", "uring",
];

/// Runs the program in both ways, and returns how many bytes several threads made resident.
#[track_caller]
fn compare(program: &Program, how: &str) -> f64 {
    let (ran, report) = program.reported_with(&["--populate-workers=2"]);
    assert_alike(&program.plain().ok(), &ran, how);
    report.number("/obtained/ledger/populate/bytes")
}

/// Without a limit or a signal in the way, all of it is populated by two threads.
#[test]
fn memory_is_populated_by_several_threads_and_looks_the_same() {
    let files = compile(&[Source::C("populates", &["-pthread"])]);
    for how in WAYS {
        let program = Program::new(files.path("populates")).arg(how);
        let populated = compare(&program, how);
        assert!(populated >= f64::from(128 << 20), "{how}: {populated}");
        for what in ["fork", "user", "timer"] {
            compare(
                &Program::new(files.path("populates")).args([how, what]),
                &format!("{how} {what}"),
            );
        }
    }
    for what in ["touched", "hole", "closed"] {
        for how in ["mlock", "mlockall", "write", "uring"] {
            let program = Program::new(files.path("populates")).args([how, what]);
            compare(&program, &format!("{how} {what}"));
        }
    }
    // The file stays as it was: the kernel refuses to pin it, before it writes to a page.
    for how in [&["disk"][..], &["mlock", "wrap"]] {
        compare(&Program::new(files.path("populates")).args(how), how[0]);
    }
    let alone = Program::new(files.path("populates")).args(["populate"]);
    let (_, report) = alone.reported_with(&["--populate-workers=1"]);
    assert_eq!(report.number("/obtained/ledger/populate/bytes"), 0.0);
}

/// What a call populates whole needs no credit to be huge.
#[test]
fn populated_memory_is_huge() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("populates", &["-pthread"])]);
    for how in WAYS.into_iter().filter(|how| *how != "shared") {
        for workers in ["--populate-workers=1", "--populate-workers=2"] {
            let program = Program::new(files.path("populates")).args([how, "huge"]);
            let ran = program.jumbo_with(&[workers]).ok();
            // The mapping may begin and end within a block.
            assert!(ran.number("huge") >= 120, "{how} {workers}: {ran:?}");
        }
    }
}

/// A refused lock populates nothing, and the error is the kernel's.
#[test]
fn a_limit_of_locked_memory_holds() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("populates", &["-pthread"])]);
    for how in ["locked", "mlock", "mlock2", "mlockall", "uring"] {
        let program = Program::new(files.path("populates")).args([how, "limit"]);
        let populated = compare(&program.unprivileged(), how);
        assert_eq!(populated, 0.0, "{how}");
    }
}

/// What the kernel refuses at once makes no memory resident.
#[test]
fn a_refused_registration_with_a_ring_populates_nothing() {
    let files = compile(&[Source::C("refused_ring", &[])]);
    let program = Program::new(files.path("refused_ring"));
    let plain = program.plain();
    if plain.shell_status() == 77 {
        return crate::support::skip("no io_uring here");
    }
    assert_eq!(plain.ok().stdout, program.jumbo().ok().stdout);
}

/// The kernel charges the limit for the whole huge page of which a buffer is a part.
#[test]
fn buffers_in_huge_pages_are_registered_within_the_limit_of_locked_memory() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    if !host::root() {
        return;
    }
    let files = compile(&[
        Source::Library("rings"),
        Source::C("registers", &["-lrings"]),
    ]);
    for way in ["buffers", "buffers2", "library", "tags"] {
        let program = Program::new(files.path("registers")).arg(way);
        // Rings of one user share its limit, those of other tests among them.
        let program = program.installed().user("daemon");
        let plain = program.plain();
        if plain.shell_status() == 77 {
            return crate::support::skip("no io_uring here");
        }
        let plain = plain.ok();
        assert!(plain.stdout.contains(": 0\n"), "{way}: {plain:?}");
        assert_alike(&plain, &program.jumbo().ok(), way);
        let ran = program.arg("huge").jumbo().ok();
        let [before, after] = ["before", "after"].map(|name| ran.number(name));
        // Split, not given up: the rest of each block stays as it was.
        assert!(before >= 60 && after <= 4, "{way}: {ran:?}");
    }
}
