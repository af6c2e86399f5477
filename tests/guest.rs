//! Tests of what a program must not notice of the library at its start.

use std::process::Command;

use crate::pool::group::Group;
use crate::support::{MIB, Program, Ran, Source, assert_same, build, compile, host, sample, wait};

/// glibc's malloc is initialised on a stack of the library, and what needs much stack runs on one.
#[test]
fn memory_calls_keep_to_a_small_stack() {
    let files = compile(&[Source::C("small_stack", &["-pthread"])]);
    let program = Program::new(files.path("small_stack"));
    for arguments in [&[][..], &["thread"], &["local"]] {
        let program = program.clone().args(arguments);
        assert_same(&program);
        for option in ["--heap=off", "--heap=glibc"] {
            program.jumbo_with(&[option]).ok();
        }
    }
}

/// A conservative garbage collector takes a library's data for pointers.
#[test]
fn the_data_of_the_library_holds_no_words_of_the_program() {
    let files = compile(&[Source::C("roots", &["-pthread"])]);
    assert_same(&Program::new(files.path("roots")));
}

#[test]
fn a_thread_has_its_stack_to_itself() {
    let files = compile(&[Source::C("room", &["-pthread"])]);
    assert_same(&Program::new(files.path("room")));
}

/// The kernel takes an alternate stack that is left for another one as free.
#[test]
fn a_handler_keeps_its_stack_while_a_library_uses_another() {
    let files = compile(&[Source::C("stacks", &["-pthread"])]);
    for how in ["fault", "filter", "refuse", "many", "local"] {
        assert_same(&Program::new(files.path("stacks")).arg(how));
    }
    // The room of a group is read from more files.
    if let Some(group) = Group::of_memory(256 * MIB) {
        let local = Program::new(files.path("stacks")).arg("local");
        local.around(group.enter()).jumbo().ok();
    }
}

/// Functions that `stack_use` does not call: each is the code of another one, whose name follows, or
/// ends the thread or writes.
const NOT_CALLED: [(&str, &str); 20] = [
    ("pkey_mprotect", "as mprotect; musl lacks it"),
    ("mseal", "as mprotect; C libraries lack it"),
    ("io_uring_register_buffers", "no function of a C library"),
    (
        "io_uring_register_buffers_tags",
        "as io_uring_register_buffers",
    ),
    ("dlmopen", "dlopen"),
    ("fallocate64", "fallocate"),
    ("fcntl64", "fcntl"),
    ("free_aligned_sized", "free"),
    ("free_sized", "free"),
    ("malloc_stats", "writes to standard error"),
    ("mmap64", "mmap"),
    ("syscall", "mmap_by_number"),
    ("wait3", "waitpid"),
    ("wait4", "waitpid"),
    ("waitid", "waitpid"),
    ("pthread_exit", "ends the thread"),
    ("_exit", "ends the program"),
    ("_Exit", "ends the program"),
    ("quick_exit", "ends the program"),
    ("thrd_exit", "ends the thread"),
];

/// What needs more of the stack runs on one of the library: the caller's may be a coroutine's.
#[test]
fn no_function_takes_much_of_the_callers_stack() {
    const MAX_BYTES: u64 = 512;
    let files = compile(&[Source::C("stack_use", &["-Wl,-z,now", "-pthread"])]);
    let program = Program::new(files.path("stack_use"));
    let plain = used(&program.plain().ok().stdout);
    let filtered = program.clone().env("FILTERED", "1");
    let off = program.clone().env("JUMBO", "off");
    let runs = [
        (&program, &[][..]),
        (&program, &["--heap=off"]),
        (&program, &["--heap=glibc"]),
        (&program, &["--heap=glibc", "--pool=64M"]),
        (&program, &["--free=background", "--reaper=on"]),
        (&filtered, &[]),
        (&filtered, &["--shm=advise"]),
        (&off, &[]),
    ];
    for (program, options) in sample(runs, 4) {
        let jumbo = used(&program.jumbo_with(options).ok().stdout);
        assert_eq!(jumbo.len(), plain.len());
        for ((name, jumbo), (_, plain)) in jumbo.iter().zip(&plain) {
            for (bytes, plain) in jumbo.iter().zip(plain) {
                assert!(
                    *bytes <= plain + MAX_BYTES,
                    "{name} {options:?}: {bytes} bytes of stack, {plain} in plain"
                );
            }
        }
    }
    let library = std::fs::read(build::preload()).unwrap();
    let exported = exported(&library);
    for (name, _) in NOT_CALLED {
        assert!(exported.iter().any(|there| there == name), "{name} is gone");
    }
    for name in exported {
        let is_measured = plain.iter().any(|(measured, _)| *measured == name);
        let is_known = NOT_CALLED.iter().any(|(known, _)| *known == name);
        assert!(is_measured || is_known, "{name} is in neither list");
    }
}

/// Returns the lines of `stack_use`: name, bytes of the first call, of later ones.
fn used(stdout: &str) -> Vec<(String, [u64; 2])> {
    let lines = stdout.lines().map(|line| {
        let mut words = line.split(' ');
        let mut number = || words.next_back().unwrap().parse().unwrap();
        let (later, first) = (number(), number());
        (words.next().unwrap().to_owned(), [first, later])
    });
    lines.collect()
}

/// Returns the functions of the C library that a library defines.
fn exported(library: &[u8]) -> Vec<String> {
    use object::{Object as _, ObjectSymbol as _};
    let file = object::File::parse(library).unwrap();
    let defined = file
        .dynamic_symbols()
        .filter(|symbol| symbol.is_definition());
    let names = defined.map(|symbol| symbol.name().unwrap().to_owned());
    names.filter(|name| !name.starts_with("jumbo_")).collect()
}

#[test]
fn a_function_that_the_program_defines_waits_for_its_start() {
    let files = compile(&[Source::C("own_iterate", &["-rdynamic"])]);
    let program = Program::new(files.path("own_iterate"));
    assert_same(&program);
    program.env("JUMBO", "off").jumbo().ok();
    // A library, or the program, that wraps the program's start is not the C library.
    let wrapper = compile(&[Source::C(
        "own_iterate",
        &["-DWRAPPED", "-shared", "-fPIC", "-ldl"],
    )]);
    let wrapped = Program::shell("echo started").env("LD_PRELOAD", wrapper.path("own_iterate"));
    assert_same(&wrapped);
}

/// ThreadSanitizer ends a program that has memory at an address of jumbo's choice.
#[test]
fn a_program_with_a_sanitizer_runs_as_it_is() {
    if !gcc_has("libtsan.so") {
        return;
    }
    const STATIC: &[&str] = &["-fsanitize=thread", "-DPLAIN", "-static-libtsan"];
    for options in [&STATIC[..2], STATIC] {
        let files = compile(&[Source::C("own_iterate", options)]);
        let program = Program::new(files.path("own_iterate"));
        let (_, report) = assert_same(&program);
        assert!(report.says("ThreadSanitizer"), "{options:?}: {report:?}");
    }
}

/// AddressSanitizer demands to be the first library, and its stacks begin with the program's frames.
#[test]
fn a_program_with_a_shared_address_sanitizer_reports_as_it_is() {
    if !gcc_has("libasan.so") {
        return;
    }
    let files = compile(&[Source::C("sanitized", &["-g", "-fsanitize=address"])]);
    let program = Program::new(files.path("sanitized"));
    // Frames without their addresses, which are random.
    let stacks = |ran: &Ran| -> Vec<String> {
        let frames = ran.stderr.lines().filter(|line| line.contains('#'));
        let words = frames.map(|line| {
            line.split_whitespace()
                .skip(2)
                .collect::<Vec<_>>()
                .join(" ")
        });
        words.collect()
    };
    let (plain, jumbo) = (program.plain(), program.jumbo());
    assert_eq!(plain.stdout, "leaked\n", "{plain:?}");
    assert_eq!(plain.stdout, jumbo.stdout, "{jumbo:?}");
    assert_eq!(plain.shell_status(), jumbo.shell_status(), "{jumbo:?}");
    assert!(stacks(&plain).len() > 7, "{plain:?}");
    assert_eq!(stacks(&plain), stacks(&jumbo));
}

/// Reports whether gcc has a library of its own; says that the test is skipped if not.
fn gcc_has(library: &str) -> bool {
    let argument = format!("-print-file-name={library}");
    let found = Command::new("gcc").arg(argument).output();
    // gcc prints the bare name of a file that it does not have.
    let has = found.is_ok_and(|found| found.stdout.starts_with(b"/"));
    if !has {
        host::skip(&format!("gcc has no {library}"));
    }
    has
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
    for number in ["0", "1", "2", "3", "4", "5"] {
        let any = alone.clone().args(["any", number]);
        assert_eq!(any.jumbo().ok().stdout, "none\n", "{number}");
    }
    assert_eq!(alone.clone().arg("core").jumbo().ok().stdout, "limit 1\n");
    // A container may forbid user namespaces.
    let namespace = alone.clone().arg("namespace");
    assert_eq!(namespace.plain().ok().stdout, namespace.jumbo().ok().stdout);
    let threaded = alone.clone().arg("thread").jumbo().ok();
    assert_eq!(threaded.stdout, "left=0\nhuge=1\n");
    if host::root() {
        assert_eq!(alone.clone().arg("drop").jumbo().ok().stdout, "state=Z\n");
        let folder = tempfile::tempdir().unwrap();
        let rooted = alone.arg("root").arg(folder.path()).jumbo().ok();
        assert_eq!(rooted.stdout, "left=0\n");
    }
}

/// A process that does not end is killed before the program drops a privilege or its memory.
#[test]
fn a_process_that_is_held_ends_with_its_program() {
    let (Some(_held), true) = (host::with_thp(), host::root()) else {
        return;
    };
    let files = compile(&[Source::C("alone", &["-pthread"])]);
    for how in ["user", "exec"] {
        let program = Program::new(files.path("alone")).args(["held", how]);
        assert_eq!(program.jumbo().ok().stdout, "left=0\n", "{how}");
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
