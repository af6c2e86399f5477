//! Tests of the `malloc` family: the guarantees of each call, from any thread, at any moment,
//! beside any other allocator.

use std::path::Path;

use crate::support::{Program, Ran, Source, assert_same, compile, host};

/// Compiles `tests/programs/NAME.c`.
fn program(name: &'static str) -> (crate::support::build::Compiled, Program) {
    let compiled = compile(&[Source::C(name, &[])]);
    let program = Program::new(compiled.path(name));
    (compiled, program)
}

#[test]
fn every_call_of_the_family_keeps_its_promises() {
    let (_files, family) = program("family");
    assert_same(&family);
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn threads_free_what_other_threads_allocated() {
    let (_files, churn) = program("churn");
    let (_, report) = assert_same(&churn.args(["64", "300"]));
    // The run tests jumbo's heap only if the heap was active.
    assert!(report.at("/obtained").is_object(), "{report:?}");
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn children_forked_amid_allocating_threads_can_allocate() {
    let (_files, storm) = program("forkstorm");
    assert_same(&storm);
}

/// The C library initialises its malloc without a lock, in a cancellation point.
#[test]
fn threads_may_be_the_first_to_want_a_block_of_the_c_library() {
    let (_files, late) = program("late_malloc");
    assert_same(&late.args(["100"]));
}

#[test]
fn a_handler_that_forks_amid_malloc_goes_on() {
    let (_files, program) = program("handler_forks");
    assert_same(&program);
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn children_forked_beside_a_thread_that_frees_give_memory_back() {
    let (_files, program) = program("forks_while_freeing");
    assert_same(&program);
}

/// Page protection and fault handlers that stay with the pages of a block, and a stack of 8 KiB.
#[test]
fn blocks_that_were_freed_with_odd_pages_are_plain_memory_later() {
    let (_files, program) = program("freed_as_it_was");
    assert_same(&program);
}

/// A fork writes to one page (`jumbo_inside::one_page`), which parent and child copy. The child
/// also faults on the library's code and names. Without that page there were 22 faults more than
/// plain, and 31 in an unoptimised build.
#[test]
fn a_fork_faults_on_few_pages_more() {
    // Unoptimised code spans more pages.
    const MAX_EXTRA_FAULTS: f64 = 20.0;
    let (_files, program) = program("forks");
    let program = program.args(["200"]);
    let faults = |ran: Ran| -> f64 {
        let figures = ran.stdout.split_whitespace().skip(1);
        figures.map(|figure| figure.parse::<f64>().unwrap()).sum()
    };
    let (plain, jumbo) = (faults(program.plain()), faults(program.jumbo_with(&[])));
    assert!(
        jumbo <= plain + MAX_EXTRA_FAULTS,
        "plain {plain}, under jumbo {jumbo}"
    );
}

/// The child has one thread: it must not wait for threads of its parent.
#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_child_of_a_fork_beside_threads_that_take_memory_over_frees_it() {
    let (_files, program) = program("fork_takes_over");
    assert_same(&program);
}

/// fork(2) takes glibc's list of streams. Its holder may wait for a thread that waits for the heap.
#[test]
fn a_fork_beside_threads_that_flush_and_read_goes_on() {
    let (_files, program) = program("list_lock");
    let plain = program.plain();
    for options in [&[][..], &["--heap=glibc"], &["--heap=glibc", "--pool=256M"]] {
        crate::support::program::assert_alike(
            &plain,
            &program.jumbo_with(options),
            &options.join(" "),
        );
    }
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_handler_may_allocate_between_calls() {
    let (_files, handler) = program("handler");
    assert_same(&handler.arg("between"));
}

/// glibc does not promise this (the plain program crashes), so there is no comparison.
#[test]
fn a_handler_may_allocate_large_blocks_within_a_call() {
    let (_files, handler) = program("handler");
    let ran = handler.arg("within").jumbo().ok();
    assert_eq!(ran.stdout, "2000 handlers\n", "{ran:?}");
}

/// Modes in which blocks come from different places.
const HEAPS: [&[&str]; 4] = [
    &[],
    &["--heap=glibc"],
    &["--heap=glibc", "--pool=64M"],
    &["--heap=off"],
];

/// PHP loads its extensions this way: their `free` would be glibc's.
#[test]
fn libraries_that_are_bound_deeply_free_the_programs_blocks() {
    let files = compile(&[Source::Library("bound_deeply"), Source::C("deepbind", &[])]);
    let program = Program::new(files.path("deepbind")).arg(files.path("libbound_deeply.so"));
    let plain = program.plain().ok();
    for options in HEAPS {
        let ran = program.jumbo_with(options);
        crate::support::program::assert_alike(&plain, &ran, &options.join(" "));
    }
}

/// A thread's free blocks stay its own: in the child of a fork, after a vfork, and under a handler.
#[test]
fn no_other_thread_or_handler_takes_the_free_blocks_of_a_thread() {
    let (_files, program) = program("caches");
    for how in ["fork", "vfork", "handler"] {
        for _ in 0..3 {
            let ran = program.clone().arg(how).jumbo().ok();
            assert_eq!(ran.stdout, "right\n", "{how}");
        }
    }
}

/// Pages that the program has mapped into a block are not served again: their file would be written.
#[test]
fn a_freed_block_with_foreign_pages_is_not_served_again() {
    let (_files, program) = program("replaced");
    for how in [
        "file", "private", "moved", "unmapped", "sealed", "attached", "shrunk",
    ] {
        let program = program.clone().arg(how);
        let plain = program.plain();
        if plain.shell_status() == 77 {
            crate::support::skip(how);
            continue;
        }
        let plain = plain.ok();
        assert_eq!(plain.stdout, "file precious, segment precious\n", "{how}");
        crate::support::program::assert_alike(&plain, &program.jumbo(), how);
    }
}

/// A server that forks for each request would wait for a scanner in each child.
#[test]
fn a_child_of_a_fork_that_allocates_little_has_no_scanner() {
    let (_files, program) = program("small_child");
    if crate::support::host::with_thp().is_none() {
        return;
    }
    let ran = program.jumbo().ok();
    assert_eq!(ran.number("children"), 0, "{ran:?}");
}

/// Programs of GCL and others need the program break at its original place until they allocate.
#[test]
fn the_program_break_is_moved_by_the_program_alone() {
    let (_files, program) = program("program_break");
    let plain = program.plain().ok();
    for options in HEAPS.into_iter().chain([&["--heap=off", "--maps=off"][..]]) {
        let ran = program.jumbo_with(options);
        crate::support::program::assert_alike(&plain, &ran, &options.join(" "));
    }
}

#[test]
fn malloc_works_before_our_constructor() {
    let files = compile(&[
        Source::Library("early"),
        Source::C("needs_early", &["-Wl,--no-as-needed", "-learly"]),
    ]);
    // A dependency of the program: its constructors run before those of preloaded libraries.
    assert_same(&Program::new(files.path("needs_early")));
}

#[test]
fn malloc_works_in_constructors_of_other_preloaded_libraries() {
    let files = compile(&[Source::Library("early"), Source::C("needs_early", &[])]);
    let early = files.path("libearly.so");
    assert_same(&Program::new(files.path("needs_early")).env("LD_PRELOAD", early));
}

#[test]
fn a_program_with_its_own_malloc_keeps_it() {
    let (_files, own) = program("own_malloc");
    assert_same(&own);
}

/// Such a stub is no malloc of the program. Node is linked this way.
#[test]
fn a_program_with_stubs_of_malloc_is_served() {
    let compiled = compile(&[Source::C("stubs", &["-no-pie", "-fno-pic"])]);
    let (ran, report) = Program::new(compiled.path("stubs")).reported();
    ran.ok();
    assert!(
        report.number("/obtained/ledger/large_calls") >= 2.0,
        "{report:?}"
    );
}

#[test]
fn an_allocator_that_the_user_preloads_is_kept() {
    const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";
    if !Path::new(JEMALLOC).exists() {
        return host::skip(&format!("{JEMALLOC} is not installed"));
    }
    let (_files, churn) = program("churn");
    let churn = churn.args(["16", "300"]).env("LD_PRELOAD", JEMALLOC);
    assert_same(&churn);
    let (_files, heap) = program("heap");
    let (running, report) = heap
        .env("LD_PRELOAD", JEMALLOC)
        .args(["200", "stay"])
        .start_reported(&[]);
    running.wait_for_line("ready");
    // jemalloc is in use, beside jumbo.
    let maps = format!("/proc/{}/maps", running.child().as_raw_nonzero());
    let maps = std::fs::read_to_string(maps).unwrap();
    assert!(
        maps.contains("libjemalloc") && maps.contains("libjumbo_preload"),
        "{maps}"
    );
    report.read(&running.wait().ok());
}

#[test]
fn the_statistics_of_malloc_count_the_blocks_of_the_library() {
    let (_files, program) = program("family");
    let ran = program.arg("stats").jumbo().ok();
    assert!(ran.stderr.contains("Total (incl. mmap)"), "{ran:?}");
    assert!(ran.stderr.contains("jumbo:\nsystem bytes"), "{ran:?}");
}

/// A thread that is killed keeps its locks, and a child of vfork(2) goes on with the memory.
#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_vfork_child_that_outlives_its_parent_waits_for_no_lock_of_it() {
    let files = compile(&[Source::C("vforks_on", &["-pthread"])]);
    let ran = Program::new(files.path("vforks_on")).arg("15").jumbo().ok();
    assert_eq!(ran.stdout, "lost 0\n", "{ran:?}");
}

/// A write into a freed object has no effect: nothing of the heap is in there.
#[test]
fn a_write_into_a_freed_object_does_not_choose_what_malloc_returns() {
    let files = compile(&[Source::C("overwritten", &[])]);
    let ran = Program::new(files.path("overwritten")).jumbo().ok();
    assert_eq!(ran.stdout, "no such address\n", "{ran:?}");
}
