//! Tests of shared memory on huge pages.

use std::fs;

use crate::support::host::{self, Knob};
use crate::support::{Compiled, Program, Source, compile};

const SHARED: Source = Source::C("shared", &[]);
/// Kernel control of collapse; at its default on hosts.
const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled";
const NR_HUGEPAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// The program with a mapping of 64 MiB that waits until a part of it is huge; without privilege.
fn program(files: &Compiled, args: &[&str]) -> Program {
    Program::new(files.path("shared")).unprivileged().args(args)
}

/// Locks the host's state; requires THP and collapsible shared memory, without huge pages on fault.
pub(crate) fn ready() -> Option<host::Held> {
    let held = host::with_thp()?;
    let allowed = fs::read_to_string(SHMEM_ENABLED).is_ok_and(|text| text.contains("[inherit]"));
    if !allowed {
        host::skip("shmem_enabled of 2M is not inherit");
    }
    allowed.then_some(held)
}

#[test]
fn shared_memory_of_each_kind_is_collapsed_once_it_was_touched() {
    let Some(_held) = ready() else { return };
    let files = compile(&[SHARED]);
    for kind in ["anonymous", "memfd", "shm_open", "shmget"] {
        let (ran, report) = program(&files, &[kind, "64", "64", "60"]).reported_with(&[]);
        let ran = ran.ok();
        assert_eq!(ran.number("huge"), 64, "{kind}: {ran:?} {report:?}");
        assert_eq!(ran.number("place"), 0, "{kind}: {ran:?}");
        assert_eq!(report.at("/obtained/shmem/rung"), "collapse", "{kind}");
        let alloc = report.number("/obtained/shmem/stats/2M/shmem_alloc");
        // The program may end before the last call is counted.
        assert!(alloc >= 24.0, "{kind}: {report:?}");
    }
    let plain = program(&files, &["anonymous", "64", "64", "0"])
        .plain()
        .ok();
    assert_eq!(plain.number("huge"), 0, "{plain:?}");
}

/// Small folios from faults are collapsed to large ones later.
#[test]
fn folios_of_64_kib_become_huge() {
    let files = compile(&[SHARED]);
    let small = SHMEM_ENABLED.replace("2048", "64");
    let Some(_knob) = Knob::set(small, "always") else {
        return;
    };
    let (ran, report) = program(&files, &["anonymous", "64", "64", "60"]).reported_with(&[]);
    assert_eq!(ran.ok().number("huge"), 64, "{report:?}");
    assert_eq!(report.at("/obtained/shmem/rung"), "collapse", "{report:?}");
}

#[test]
fn a_hole_is_not_filled() {
    let Some(_held) = ready() else { return };
    let files = compile(&[SHARED]);
    let ran = program(&files, &["memfd", "64", "62", "60", "punch"]);
    let (ran, report) = ran.reported_with(&["--max-waste=50"]);
    let ran = ran.ok();
    assert_eq!(ran.number("huge"), 62, "{ran:?} {report:?}");
    assert_eq!(ran.number("there"), (64 << 10) - 64, "{ran:?}");
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn nothing_is_collapsed_that_was_not_asked_for() {
    let Some(_held) = ready() else { return };
    let files = compile(&[SHARED]);
    for (options, rung) in [
        (&["--shm=off"][..], "as it is"),
        (&["--shm=advise"][..], "controls"),
        (&["--shm-sizes=64K"][..], "controls"),
    ] {
        let (ran, report) = program(&files, &["memfd", "64", "64", "4"]).reported_with(options);
        assert_eq!(ran.ok().number("huge"), 0, "{options:?}: {report:?}");
        assert_eq!(report.at("/obtained/shmem/rung"), rung, "{options:?}");
    }
}

#[test]
fn anonymous_shared_memory_gets_hugetlb_pages_where_they_are_asked_for() {
    let files = compile(&[SHARED]);
    let options = ["--shm=hugetlb"];
    let run = |kind| program(&files, &[kind, "64", "64", "2"]).reported_with(&options);
    let Some(knob) = Knob::set(NR_HUGEPAGES, "40") else {
        return;
    };
    let (ran, report) = run("anonymous");
    assert_eq!(ran.ok().number("huge"), 64, "{report:?}");
    assert_eq!(report.at("/obtained/shmem/rung"), "hugetlb", "{report:?}");
    // Named memory is never replaced.
    let (ran, report) = run("memfd");
    ran.ok();
    assert_eq!(report.number("/obtained/shmem/hugetlb"), 0.0, "{report:?}");
    drop(knob);
    let Some(_knob) = Knob::set(NR_HUGEPAGES, "4") else {
        return;
    };
    let (ran, report) = run("anonymous");
    ran.ok();
    assert!(report.says("too few free pages"), "{report:?}");
    assert_eq!(report.number("/obtained/shmem/hugetlb_fallback"), 1.0);
}
