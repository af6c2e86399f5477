//! Tests of shared memory that is populated in blocks from user space, with every kernel control at
//! `never`.

use crate::pool::group::Group;
use crate::support::host::{self, Knob};
use crate::support::{Program, Source, compile};

const USER_SHMEM: &[&str] = &["--shm=user"];
const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled";
/// Base pages mapped by `ten_lines` and `sparse`.
const BASE_PAGES: f64 = 65536.0;

#[test]
fn a_program_of_ten_lines_enters_the_kernel_for_blocks_alone() {
    let files = compile(&[Source::C("ten_lines", &[])]);
    let Some(_never) = Knob::set(SHMEM_ENABLED, "never") else {
        return;
    };
    let program = Program::new(files.path("ten_lines")).unprivileged();
    let plain = program.plain().ok();
    let (ran, report) = program.reported_with(USER_SHMEM);
    let ran = ran.ok();
    assert_eq!(ran.number("sum"), plain.number("sum"));
    assert!(
        ran.number("faults") * 16 <= plain.number("faults"),
        "{ran:?}"
    );
    assert_eq!(report.at("/obtained/shmem/rung"), "user", "{report:?}");
    assert_eq!(report.number("/obtained/shmem/user"), BASE_PAGES * 4096.0);
    let blocks = report.number("/obtained/shmem/stats/64K/shmem_alloc");
    assert!(blocks > 0.0 && blocks * 16.0 <= BASE_PAGES, "{report:?}");
}

/// The kernel refuses to collapse a range whose holes a userfaultfd could fill.
#[test]
fn a_program_may_collapse_what_it_has_touched_in_part() {
    let files = compile(&[Source::C("collapses", &[])]);
    let Some(_inherit) = Knob::set(SHMEM_ENABLED, "inherit") else {
        return;
    };
    let program = Program::new(files.path("collapses"));
    let (ran, report) = program.reported_with(USER_SHMEM);
    let advised = program.jumbo_with(&["--shm=advise"]).ok();
    assert_eq!(ran.ok().stdout, advised.stdout);
    assert!(
        advised.stdout.contains("collapsed 0 errno 0"),
        "{advised:?}"
    );
    assert_eq!(report.at("/obtained/shmem/rung"), "user", "{report:?}");
}

#[test]
fn what_programs_do_with_such_memory_is_as_ever() {
    let files = compile(&[Source::C("into_shared", &["-pthread"])]);
    let program = Program::new(files.path("into_shared")).unprivileged();
    let plain = program.plain().ok();
    for turn in 0..5 {
        let (ran, report) = program.reported_with(USER_SHMEM);
        assert_eq!(ran.ok().stdout, plain.stdout, "{turn}");
        assert_eq!(report.at("/obtained/shmem/rung"), "user", "{report:?}");
    }
}

/// The memory cgroup has room for the touched pages, but not for all touched blocks.
#[test]
fn a_program_that_touches_little_lives_where_it_lives_without() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("sparse", &[])]);
    let Some(group) = Group::of_memory(96 << 20) else {
        return;
    };
    let program = Program::new(files.path("sparse")).around(group.enter());
    program.plain().ok();
    let (ran, report) = program.reported_with(USER_SHMEM);
    ran.ok();
    assert_eq!(report.number("/obtained/shmem/user"), 0.0, "{report:?}");
    // With room for all of it.
    let program = Program::new(files.path("sparse"));
    let (ran, report) = program.reported_with(USER_SHMEM);
    ran.ok();
    assert_eq!(report.number("/obtained/shmem/user"), BASE_PAGES * 4096.0);
}

/// The memory cgroup has room for the touched pages, but not for the buffer.
#[test]
fn a_read_of_little_into_much_takes_little() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("short_read", &[])]);
    let Some(group) = Group::of_memory(300 << 20) else {
        return;
    };
    let program = Program::new(files.path("short_read")).around(group.enter());
    program.plain().ok();
    let (ran, report) = program.reported_with(USER_SHMEM);
    assert!(ran.ok().number("shared") <= 4 << 20);
    assert_eq!(report.at("/obtained/shmem/rung"), "user", "{report:?}");
}
