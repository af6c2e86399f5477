//! Tests of a program that installs a seccomp filter: an allow-list of the calls of its own
//! allocator that kills on any other call. It must survive under jumbo in every mode.

use crate::support::program::assert_alike;
use crate::support::{Compiled, Program, Source, compile, sample};

const WAYS: &[&[&str]] = &[
    &[],
    &["--heap=off"],
    &["--heap=glibc"],
    &["--heap=glibc", "--pool=64M"],
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
    for options in sample(WAYS, 3) {
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
    // The listener variant of seccomp(2) returns a descriptor.
    assert_lives(&files, &["listener"]);
}

#[test]
fn a_second_filter_is_installed_with_the_calls_of_the_first() {
    assert_lives(&strict(), &["prctl", "twice"]);
}

/// Freed memory is returned before other memory is filled, but not by a call that only allocates
/// under a filter.
#[test]
fn a_call_that_allocates_unmaps_nothing_under_a_filter() {
    let files = compile(&[Source::C("no_munmap", &[])]);
    for size in ["5", "30"] {
        let program = Program::new(files.path("no_munmap")).args([size]);
        let plain = program.plain().ok();
        for options in [&[][..], &["--heap=glibc"], &["--max-waste=unbounded"]] {
            let jumbo = program.jumbo_with(options);
            assert_alike(&plain, &jumbo, &format!("{size} MiB {}", options.join(" ")));
        }
    }
}

/// With huge pages off the size threshold of frees is lower, and workers are started.
#[test]
fn a_filter_is_obeyed_where_the_program_wants_no_huge_pages() {
    assert_lives(&strict(), &["prctl", "small"]);
}

#[test]
fn what_is_executed_under_the_filter_lives_too() {
    let files = strict();
    let path = files.path("strict");
    for first in sample([&["prctl"][..], &["prctl", "advice"], &["prctl", "all"]], 3) {
        let how = [first, &["exec", path.to_str().unwrap(), "none"]].concat();
        assert_lives(&files, &how);
    }
}

/// If the filter allows advice, advice continues.
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
        // Memory that is not counted is not advised either.
        (&[&["prctl", "advice"][..], &after].concat(), false),
    ] {
        let program = Program::new(&path).args(how);
        // With a bound the credit limits advice while memory cannot be scanned.
        let (ran, report) = program.reported_with(&["--max-waste=unbounded"]);
        ran.ok();
        let number = |name: &str| report.number(&format!("/obtained/ledger/{name}"));
        // 350 MiB before the filter, and as much again after it.
        let all = number("refused") == 0.0 && number("advised") > 600e6;
        assert_eq!(all, advised, "{how:?}: {report:?}");
        let is_told = report.says("a seccomp filter refuses that, or may end who asks");
        assert_eq!(is_told, number("refused") > 0.0, "{how:?}: {report:?}");
    }
}

/// jumbo withdraws advice before a mapping moves or is dropped, and asks the filter about each
/// advice.
#[test]
fn a_filter_that_judges_by_the_advice_is_obeyed() {
    let files = compile(&[Source::C("judged", &[])]);
    // MADV_DONTNEED and MADV_FREE; all of jumbo's usual advice but MADV_NOHUGEPAGE.
    for filter in sample(["none", "4,8", "4,8,14,23,25", "all"], 2) {
        let own = ["drop", "free"];
        let moves = ["grow", "fixed", "keep"];
        let own = own.iter().filter(|_| filter != "none");
        for what in moves.iter().chain(own) {
            let program = Program::new(files.path("judged")).args([filter, what]);
            let plain = program.plain().ok();
            assert_alike(&plain, &program.jumbo(), &format!("{filter} {what}"));
        }
    }
}

/// The filter forbids getpid, which the scanner of shared memory needs.
#[test]
fn shared_memory_is_mapped_and_unmapped_with_the_calls_of_the_program() {
    let files = compile(&[Source::C("filtered", &[])]);
    let program = Program::new(files.path("filtered")).args(["shared", "64"]);
    let plain = program.plain().ok();
    for options in [&[][..], &["--shm=advise"]] {
        let jumbo = program.jumbo_with(options);
        assert_alike(&plain, &jumbo, &format!("{options:?}"));
    }
}

/// Reports whether collapsed shared memory and a heap are huge, once the former is or after PATIENCE s.
const MEASURE_HUGE: &str = "import mmap, os, time
shared = mmap.mmap(-1, 64 << 20)
heap = bytearray(64 << 20)
for memory in shared, heap:
    for i in range(0, len(memory), 4096): memory[i] = 1
def huge(kind):
    lines = [line.split() for line in open('/proc/self/smaps')]
    return sum(int(line[1]) for line in lines if line[0] == kind)
end = time.monotonic() + float(os.environ['PATIENCE'])
while not huge('ShmemPmdMapped:') and time.monotonic() < end: time.sleep(0.1)
print(huge('ShmemPmdMapped:') > 0, huge('AnonHugePages:') > 50_000)";

/// Runs `command` in a shell below the filter `kind`, like most programs of a container.
fn below(files: &Compiled, kind: &str, command: &str, seconds: &str) -> String {
    let jumbo = env!("CARGO_BIN_EXE_jumbo");
    let mut sh = std::process::Command::new(files.path("under_filter"));
    sh.args([kind, "sh", "-c", &format!("{command}; exit $?")]);
    sh.env("COMMAND", jumbo).env("SCRIPT", MEASURE_HUGE);
    sh.env("PATIENCE", seconds);
    sh.env(
        "LIBRARY",
        std::path::Path::new(jumbo).with_file_name("libjumbo_preload.so"),
    );
    let output = sh.output().unwrap();
    assert!(output.status.success(), "{kind}: {output:?}");
    assert_eq!(output.stderr, b"", "{kind}");
    String::from_utf8(output.stdout).unwrap()
}

/// A container's filter refuses calls and kills for none: every mechanism stays active. A filter
/// that kills is detected without harm.
#[test]
fn an_inherited_filter_is_asked_and_obeyed() {
    if crate::support::host::command("python3").is_none() {
        return;
    }
    let files = compile(&[Source::C("under_filter", &[])]);
    let Some(_thp) = crate::support::host::with_thp() else {
        return;
    };
    // With a bound memory becomes huge only after a scan, which some filters refuse.
    let run = "\"$COMMAND\" run --quiet --max-waste=unbounded -- /usr/bin/python3 -c \"$SCRIPT\"";
    // As set by an image or a pod, without a launcher.
    let fixed =
        "LD_PRELOAD=\"$LIBRARY\" JUMBO_ORDERS=max_waste=unbounded /usr/bin/python3 -c \"$SCRIPT\"";
    for command in [run, fixed] {
        for (kind, huge) in [
            ("allow", "True True\n"),
            ("container", "True True\n"),
            // Memory that was moved could not be moved back.
            ("mremap", "False True\n"),
            ("madvise", "False False\n"),
        ] {
            // Most shared memory is huge after half a second.
            let seconds = if huge.starts_with("True") { "30" } else { "3" };
            let found = below(&files, kind, command, seconds);
            assert_eq!(found, huge, "{kind}: {command}");
        }
    }
}

/// One thread installs a filter on all, while another one is in calls for which jumbo makes others.
#[test]
fn a_filter_for_all_threads_meets_no_call_of_jumbo() {
    let files = compile(&[Source::C("filters_all", &["-pthread", "-O2"])]);
    let program = Program::new(files.path("filters_all")).args(["300"]);
    for options in sample(WAYS, 3) {
        let ran = program.jumbo_with(options).ok();
        assert_eq!(ran.stdout, "bad 0\n", "{options:?}");
    }
}

/// What the C library serves behind a filter needs no call that it did not need without jumbo.
#[test]
fn threads_allocate_behind_a_filter_that_kills() {
    let files = compile(&[Source::C("arenas", &[])]);
    let program = Program::new(files.path("arenas"));
    let plain = program.plain().ok();
    for _ in 0..4 {
        assert_alike(&plain, &program.jumbo(), "a filter for all threads");
    }
}
