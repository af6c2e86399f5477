//! Tests of edge cases of `mmap`, `munmap`, `mremap`, `mprotect` and `brk`.

use crate::support::{MIB, Program, Source, assert_same, build, compile, host};

#[test]
fn mappings_keep_their_promises() {
    let files = compile(&[Source::C("maps", &[])]);
    assert_same(&Program::new(files.path("maps")));
}

/// A checkpoint's restore unmaps or moves the vDSO; a clock of ours would then read nothing.
#[test]
fn a_program_that_leaves_its_vdso_goes_on() {
    let files = compile(&[Source::C("without_vdso", &[])]);
    let program = Program::new(files.path("without_vdso"));
    for how in ["unmapped", "moved"] {
        assert_same(&program.clone().arg(how));
    }
    // Where a filter kills for the system call that reads it.
    for when in ["first", "then"] {
        assert_same(&program.clone().args(["unmapped", when]));
    }
}

#[test]
fn what_the_kernel_refuses_to_grow_stays_as_it_is() {
    let files = compile(&[Source::C("grown", &[])]);
    assert_same(&Program::new(files.path("grown")));
}

/// The list of mappings is long where pages are moved one by one.
#[test]
fn a_page_that_is_moved_reads_no_list_of_mappings() {
    let Some(strace) = host::command("strace") else {
        return;
    };
    let files = compile(&[Source::C("moves", &[])]);
    let program = Program::new(files.path("moves"));
    assert_same(&program);
    let folder = build::world_readable_folder();
    let log = folder.path().join("log");
    let words = [
        strace.as_os_str(),
        "-f".as_ref(),
        "-e".as_ref(),
        "trace=openat".as_ref(),
    ];
    let words = words.into_iter().chain(["-o".as_ref(), log.as_os_str()]);
    program.around(words).jumbo().ok();
    let log = std::fs::read_to_string(&log).unwrap();
    let lists = log.matches("/proc/self/maps").count();
    assert!(lists < 100, "{lists} of 1024 moves");
}

#[test]
fn a_mapping_with_advice_of_the_program_still_grows_and_moves() {
    let files = compile(&[Source::C("forbidden", &[])]);
    assert_same(&Program::new(files.path("forbidden")));
}

#[test]
fn a_thread_that_is_suspended_keeps_no_other_from_mapping() {
    let files = compile(&[Source::C("suspended", &[])]);
    let program = Program::new(files.path("suspended"));
    assert_same(&program);
    assert_same(&program.arg("forks"));
}

/// The same with jumbo's heap off, and with its maps off: the parts are independent.
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

/// The first thread starts when its stack has room to grow. jumbo maps nothing where the kernel
/// would place it.
#[test]
fn a_thread_has_the_room_below_its_growing_stack() {
    let files = compile(&[Source::C("grows_down", &[])]);
    for argument in ["", "aligned"] {
        let program = Program::new(files.path("grows_down")).arg(argument);
        let plain = program.plain().ok();
        for options in [
            &[][..],
            &["--pool=64M"],
            &["--heap=glibc"],
            &["--free=background"],
        ] {
            let ran = program.jumbo_with(options);
            crate::support::program::assert_alike(&plain, &ran, &options.join(" "));
        }
    }
}

/// jumbo advises dense memory, but not against the program's MADV_NOHUGEPAGE.
#[test]
fn what_the_program_takes_from_huge_pages_is_not_advised_again() {
    let files = compile(&[Source::C("unadvised", &[])]);
    let ran = Program::new(files.path("unadvised")).arg("60").jumbo().ok();
    // The program may act between the last scan and the advice.
    assert!(ran.number("after") <= 1, "{ran:?}");
}

/// A block in two mappings cannot be huge, nor one with a pinned page. The scans end nevertheless,
/// and a later touch of the rest uses base pages.
#[test]
fn what_the_kernel_refuses_to_collapse_is_not_tried_for_ever() {
    let files = compile(&[Source::C("not_collapsed", &[])]);
    for how in ["mappings", "pinned"] {
        let ran = Program::new(files.path("not_collapsed"))
            .arg(how)
            .jumbo()
            .ok();
        // Milliseconds of CPU time in a second. Repeated attempts took 300.
        assert!(ran.number("idle") <= 100, "{how}: {ran:?}");
        if !host::thp_is_always() {
            assert!(ran.number("resident") <= 24 * MIB, "{how}: {ran:?}");
        }
    }
}

/// A huge page has no missing page. Before the program serves the faults of a range itself, the pages
/// that it did not touch become missing again.
#[test]
fn a_page_that_was_not_touched_is_missing_when_it_is_registered() {
    let files = compile(&[Source::C("registered", &["-pthread"])]);
    for how in ["private", "shared"] {
        let program = Program::new(files.path("registered")).arg(how);
        let plain = program.plain().ok();
        for options in [&[][..], &["--max-waste=unbounded"]] {
            let ran = program.jumbo_with(options);
            crate::support::program::assert_alike(&plain, &ran, &format!("{how} {options:?}"));
        }
    }
}

/// Advice of the program is remembered for its range alone: MADV_SEQUENTIAL, MADV_DONTFORK and MADV_COLD
/// for another mapping. Tables of jumbo take no address that the program found free.
#[test]
fn a_mapping_grows_and_a_free_address_stays_free() {
    let files = compile(&[Source::C("found_free", &[])]);
    for how in ["2", "10", "20", "holes"] {
        let program = Program::new(files.path("found_free")).arg(how);
        let plain = program.plain().ok();
        crate::support::program::assert_alike(&plain, &program.jumbo(), how);
    }
}
