//! Tests of `jumbo run --pool`, `--overcommit` and `--warm`.
//!
//! The program's smaps show the hugetlb memory. The tests set the size of the kernel's pool and
//! restore it.

pub(crate) mod group;

use group::Group;

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::host::Knob;
use crate::support::{MIB, Program, Ran, Source, compile, host, wait};

const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

fn pooled() -> (crate::support::build::Compiled, Program) {
    let compiled = compile(&[Source::C("pooled", &[])]);
    let program = Program::new(compiled.path("pooled"));
    (compiled, program)
}

/// Sets the kernel's pool to `pages` 2 MiB pages; `None`, and a reported skip, if that fails.
#[track_caller]
fn kernel_pool(pages: u64) -> Option<Knob> {
    let knob = Knob::set(NR_HUGEPAGES, &pages.to_string())?;
    // A killed program may still be exiting, with its pages.
    let start = Instant::now();
    while free_pages() != pages && start.elapsed() < wait::TIMEOUT {
        std::thread::sleep(Duration::from_millis(5));
    }
    let got: u64 = std::fs::read_to_string(NR_HUGEPAGES)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    if got == pages && free_pages() == pages {
        return Some(knob);
    }
    host::skip(&format!(
        "the kernel's pool has {got} pages, not {pages} free ones"
    ));
    None
}

fn free_pages() -> u64 {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    std::fs::read_to_string(path)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

/// Returns the program's hugetlb memory at a moment, in MiB.
fn hugetlb(ran: &Ran, when: &str) -> u64 {
    ran.number(&format!("{when}_hugetlb"))
}

fn thp(ran: &Ran, when: &str) -> u64 {
    ran.number(&format!("{when}_thp"))
}

#[test]
fn a_pool_takes_hugetlb_pages_then_thps_then_what_malloc_gives() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(50) else { return };
    // 300 MiB requested: 100 of the kernel's pool, 100 of THPs, and the rest beyond.
    let program = program.args(["15", "free"]);
    let options = ["--pool=200M", "--max-waste=unbounded"];
    let (ran, report) = program.reported_with(&options);
    let ran = ran.ok();
    assert_eq!(hugetlb(&ran, "full"), 100, "{ran:?}");
    assert!(thp(&ran, "full") >= 180, "{ran:?}");
    let pool = |field: &str| report.number(&format!("/obtained/ledger/pool/{field}"));
    assert_eq!(pool("hugetlb"), f64::from(100 << 20), "{report:?}");
    assert_eq!(pool("thp"), f64::from(100 << 20), "{report:?}");
    assert!(pool("beyond") >= f64::from(100 << 20), "{report:?}");
    assert!(report.says("had no free page"), "{report:?}");
    assert_eq!(free_pages(), 50);
}

/// Four processes with 62 MiB each: in turn each can use the whole pool; in parallel all share it.
#[test]
fn a_pool_bounds_the_run_or_each_process() {
    if host::command("python3").is_none() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    const LOAD: &str = "a = [b'x' * (31 << 20) for _ in range(2)]; import time; time.sleep(WAIT)";
    let run = |pool: &str, wait: &str, line: &str| {
        let script = line.replace(
            "LOAD",
            &format!("python3 -c \"{}\"", LOAD.replace("WAIT", wait)),
        );
        let (ran, report) = Program::shell(&script).reported_with(&[pool]);
        ran.ok();
        report
    };
    let in_turn = "for i in 1 2 3 4; do LOAD || exit; done";
    let at_once = "for i in 1 2 3 4; do LOAD & done; wait";
    let bound = f64::from(64 << 20);
    for (wait, line) in [("0", in_turn), ("1", at_once)] {
        let report = run("--pool=64M", wait, line);
        let had = report.number("/obtained/ledger/pool/run");
        assert!((1.0..=bound).contains(&had), "{line}: {report:?}");
    }
    let report = run("--pool=64M", "1", at_once);
    let shortfalls = report.at("/shortfalls").to_string();
    assert!(shortfalls.contains("used up"), "{report:?}");
    assert!(
        report.number("/obtained/ledger/pool/beyond") > bound,
        "{report:?}"
    );
    // 62 MiB for each: none exceeds its pool.
    let report = run("--pool=64M,each", "1", at_once);
    assert_eq!(
        report.number("/obtained/ledger/pool/beyond"),
        0.0,
        "{report:?}"
    );
    assert!(
        report.number("/obtained/ledger/pool/thp") >= f64::from(60 << 20),
        "{report:?}"
    );
    // The pages of an ended process are available again.
    let report = run("--pool=64M", "0", in_turn);
    assert_eq!(
        report.number("/obtained/ledger/pool/beyond"),
        0.0,
        "{report:?}"
    );
}

/// The limit permits the mapping and kills the touch: the library must probe first.
#[test]
fn a_control_groups_limit_on_hugetlb_kills_no_process() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(100) else {
        return;
    };
    let Some(group) = Group::new(60 << 20) else {
        return;
    };
    let program = program.args(["10", "fork"]).around(group.enter());
    let (ran, report) = program.reported_with(&["--pool=400M"]);
    let ran = ran.ok();
    assert_eq!(hugetlb(&ran, "full"), 60, "{ran:?}");
    assert_eq!(hugetlb(&ran, "then"), 0, "{ran:?}");
    assert!(report.says("hugetlb limit"), "{report:?}");
    assert_eq!(free_pages(), 100);
}

/// The kernel refuses parts of a hugetlb page, and may give whole ones to other processes.
#[test]
fn a_program_may_drop_what_a_part_of_a_block_holds() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(40) else { return };
    let program = program.args(["6", "drop"]);
    let ran = program.jumbo_with(&["--pool=400M"]).ok();
    assert_eq!(hugetlb(&ran, "then"), 80, "{ran:?}");
}

/// A server that forks a process for each client; the children do not fork and use the pool.
#[test]
fn a_child_has_hugetlb_pages_of_its_own() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(100) else {
        return;
    };
    let program = program.args(["4", "serve"]);
    let ran = program.jumbo_with(&["--pool=400M"]).ok();
    assert!(hugetlb(&ran, "full") >= 80, "{ran:?}");
    assert!(hugetlb(&ran, "child") >= 100, "{ran:?}");
    assert_eq!(hugetlb(&ran, "then"), 0, "{ran:?}");
    assert_eq!(free_pages(), 100);
}

/// A free by several threads leaves lingering workers; they do not prevent a move.
#[test]
fn threads_that_free_keep_no_page_from_moving() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(100) else {
        return;
    };
    for then in ["workers-fork", "workers-thread"] {
        // The workers of a privileged process do not linger.
        let program = program.clone().args(["10", then]).unprivileged();
        let (ran, report) =
            program.reported_with(&["--pool=400M", "--free=sync", "--free-workers=2"]);
        let ran = ran.ok();
        assert_eq!(hugetlb(&ran, "then"), 0, "{then}: {ran:?}");
        let stuck = report.number("/obtained/ledger/pool/stuck");
        assert_eq!(stuck, 0.0, "{then}: {report:?}");
        assert!(
            report.number("/obtained/ledger/free/gathered") > 0.0,
            "{then}: {report:?}"
        );
    }
}

#[test]
fn the_pool_stays_and_its_overcommit_goes() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(100) else {
        return;
    };
    let ran = program
        .args(["9", "free"])
        .jumbo_with(&["--pool=100M", "--overcommit=60M"])
        .ok();
    assert_eq!(hugetlb(&ran, "full"), 160, "{ran:?}");
    assert_eq!(hugetlb(&ran, "then"), 100, "{ran:?}");
}

/// A child that writes to a private hugetlb page needs another one, and none is free: without
/// precaution it dies.
#[test]
fn a_fork_with_an_empty_pool_kills_no_process() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(100) else {
        return;
    };
    let program = program.args(["10", "fork"]);
    let (ran, report) = program.reported_with(&["--pool=400M"]);
    let ran = ran.ok();
    assert_eq!(hugetlb(&ran, "full"), 200, "{ran:?}");
    assert_eq!(hugetlb(&ran, "then"), 0, "{ran:?}");
    assert!(report.says("a program that forks"), "{report:?}");
}

/// Hugetlb pages are not charged to a memory cgroup, but their copies are: there might be no room.
#[test]
fn a_fork_in_a_memory_cgroup_kills_no_process() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(32) else { return };
    let program = program.clone().args(["2", "fork"]);
    for (options, limit) in [("--pool=400M", 200), ("--pool=400M,nofork", 200)] {
        let Some(group) = Group::of_memory(limit << 20) else {
            return;
        };
        let program = program.clone().around(group.enter());
        let (ran, report) = program.reported_with(&[options]);
        let ran = ran.ok();
        let promised = options.ends_with("nofork");
        let full = hugetlb(&ran, "full");
        assert_eq!(full >= 40, promised, "{options}: {ran:?}");
        assert!(full == 0 || promised, "{options}: {ran:?}");
        assert_eq!(hugetlb(&ran, "then"), 0, "{options}: {ran:?}");
        assert!(
            promised || report.says("a memory cgroup's limit"),
            "{report:?}"
        );
    }
    assert_eq!(free_pages(), 32);
}

/// A group with page cache: the kernel reclaims it on demand.
#[test]
fn a_memory_cgroup_full_of_page_cache_has_room() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let (_files, program) = pooled();
    let Some(group) = Group::of_memory(160 << 20) else {
        return;
    };
    // On a disk: tmpfs pages cannot be reclaimed.
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = file.path().display();
    let fill = format!("head -c 180M /dev/zero > {file} && sync {file}");
    let program = program.args(["2", "free"]).around(group.enter_and(&fill));
    let (ran, report) = program.reported_with(&["--pool=40M"]);
    ran.ok();
    let thp = report.number("/obtained/ledger/pool/thp");
    assert!(thp >= f64::from(40 << 20), "{report:?}");
}

/// At a fork no memory can be probed, or the kernel refuses another mapping.
#[test]
fn a_fork_of_a_confined_program_kills_no_process() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(32) else { return };
    let root = tempfile::tempdir().unwrap();
    let root = root.path().to_str().unwrap();
    for how in ["filter-fork", "root-fork", "crowded-fork"] {
        let program = program.clone().args(["2", how, root]);
        for options in ["--pool=400M", "--pool=400M,nofork"] {
            let (ran, report) = program.reported_with(&[options]);
            let ran = ran.ok();
            assert!(hugetlb(&ran, "full") >= 40, "{how}: {ran:?}");
            let stuck = report.number("/obtained/ledger/pool/stuck");
            assert_eq!(stuck, 0.0, "{how}, {options}: {report:?}");
        }
    }
    assert_eq!(free_pages(), 32);
}

/// The kernel refuses both for a part of a hugetlb page.
#[test]
fn pages_of_blocks_aligned_to_pages_can_be_protected() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(100) else {
        return;
    };
    let ran = program.args(["1", "pages"]);
    ran.jumbo_with(&["--pool=200M"]).ok();
}

#[test]
fn threads_move_to_thps_unless_the_program_promises_not_to_fork() {
    let (_files, program) = pooled();
    let Some(_pool) = kernel_pool(100) else {
        return;
    };
    for how in ["thread", "c11"] {
        let program = program.clone().args(["10", how]);
        let ran = program.jumbo_with(&["--pool=400M"]).ok();
        assert_eq!(hugetlb(&ran, "full"), 200, "{how}: {ran:?}");
        assert_eq!(hugetlb(&ran, "then"), 0, "{how}: {ran:?}");
        let ran = program.jumbo_with(&["--pool=400M,nofork"]).ok();
        assert_eq!(hugetlb(&ran, "then"), 200, "{how}: {ran:?}");
    }
}

/// Like in a small container: no privilege, and an empty kernel pool.
#[test]
fn a_user_without_privilege_has_a_pool_of_thps() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let (_files, program) = pooled();
    let program = program.args(["10", "stay"]).unprivileged();
    let (ran, report) = program.reported_with(&["--pool=1G"]);
    let ran = ran.ok();
    assert!(thp(&ran, "full") >= 200, "{ran:?}");
    let thp = report.number("/obtained/ledger/pool/thp");
    assert!(thp >= f64::from(200 << 20), "{report:?}");
    assert_eq!(
        report.number("/obtained/ledger/pool/beyond"),
        0.0,
        "{report:?}"
    );
}

/// Like V8's mappings. The pool ignores what a program does to its own memory.
#[test]
fn mappings_of_the_program_between_blocks_do_not_end_the_pool() {
    let (_files, program) = pooled();
    let program = program.args(["5", "free", "stray"]);
    let (ran, report) = program.reported_with(&["--pool=200M"]);
    ran.ok();
    let beyond = report.number("/obtained/ledger/pool/beyond");
    assert_eq!(beyond, 0.0, "{report:?}");
}

/// A pool of that size takes at least about a second.
#[test]
fn a_signal_ends_the_warming() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    const POOL: u64 = 6 << 30;
    let program = Program::new("echo").arg("started");
    let running = program.start_jumbo(&["--pool=6G,each", "--warm"]);
    let resident = || {
        let statm =
            std::fs::read_to_string(format!("/proc/{}/statm", running.pid().as_raw_nonzero()));
        let pages = statm.ok()?.split_whitespace().nth(1)?.parse::<u64>().ok()?;
        Some(pages * 4096)
    };
    wait::until("a part of the pool", Duration::from_secs(60), || {
        assert!(!running.has_ended());
        resident().filter(|bytes| *bytes > POOL / 64)
    });
    running.signal(Signal::TERM);
    // However late the signal came.
    let before = resident().unwrap_or(0);
    let mut most = 0;
    while !running.has_ended() {
        most = most.max(resident().unwrap_or(0));
    }
    let ran = running.wait();
    assert_eq!(ran.shell_status(), 128 + 15, "{ran:?}");
    assert_eq!(ran.stdout, "");
    let more = most.saturating_sub(before);
    assert!(more < POOL / 16, "{} MiB more", more / MIB);
}

#[test]
fn a_warm_pool_is_there_before_the_program_and_only_in_it() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let (_files, program) = pooled();
    let ran = program
        .args(["0", "go"])
        .jumbo_with(&["--pool=128M", "--warm"])
        .ok();
    assert!(thp(&ran, "full") >= 128, "{ran:?}");
    // A child has a pool, too, but a cold one.
    let (files, _) = pooled();
    let script = format!("{} 0 go; true", files.path("pooled").display());
    let ran = Program::shell(&script)
        .jumbo_with(&["--pool=128M", "--warm"])
        .ok();
    assert!(thp(&ran, "full") < 64, "{ran:?}");
}

/// A 1 GiB THP would be resident as a whole, however little of it the program uses.
#[test]
fn pages_larger_than_thps_are_hugetlb_or_none() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let (_files, program) = pooled();
    let program = program.args(["2", "go"]);
    let free = "/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages";
    if std::fs::read_to_string(free).is_ok_and(|free| free.trim() != "0") {
        return host::skip("the kernel's pool has pages of 1 GiB");
    }
    let (ran, report) = program.reported_with(&["--pool=2G:1G", "--max-waste=unbounded"]);
    let ran = ran.ok();
    assert!((40..200).contains(&thp(&ran, "full")), "{ran:?}");
    let pool = report.number("/obtained/ledger/pool/thp");
    assert!(pool >= f64::from(40 << 20), "{report:?}");
    assert!(report.says("none of 1G free"), "{report:?}");
    // Pages were free at the start and are gone now.
    let preload = crate::support::build::preload();
    let orders = "heap=1,pmd=2097152,max_waste=unbounded,pool=2147483648:1073741824:0:0:-";
    let program = program.env("LD_PRELOAD", preload);
    let ran = program.env("JUMBO_ORDERS", orders).plain().ok();
    assert!((40..200).contains(&thp(&ran, "full")), "{ran:?}");
}

#[test]
fn a_block_larger_than_the_pool_is_named_as_the_reason() {
    let (_files, program) = pooled();
    let (ran, report) = program.args(["2", "go"]).reported_with(&["--pool=10M"]);
    ran.ok();
    assert!(report.says("a block larger than the pool"), "{report:?}");
    assert!(!report.says("were used up"), "{report:?}");
}

#[test]
fn what_makes_no_sense_is_refused_with_a_hint() {
    let program = Program::new("true");
    for (options, words) in [
        (&["--warm"][..], "--pool SIZE"),
        (&["--overcommit=1G"], "--pool SIZE"),
        (&["--pool=1G", "--heap=off"], "--heap=off"),
        (&["--pool=9T"], "at most"),
        (&["--pool=1G:3M"], "power of two"),
        (&["--pool=4G:2G"], "hint: 2M"),
        (&["--pool=1G:4M"], "hint: 2M"),
        (&["--pool=1G,spoon"], "nofork"),
        (&["--pool=1K"], "less than one page"),
        (&["--pool=64M:1G"], "less than one page"),
        (&["--pool=64M", "--overcommit=4K"], "less than one page"),
        (&["--pool=1G:4K"], "hint: 2M"),
    ] {
        let ran = program.jumbo_with(options);
        assert_eq!(ran.shell_status(), 2, "{options:?}: {ran:?}");
        assert!(ran.stderr.contains(words), "{options:?}: {ran:?}");
    }
}

#[test]
fn a_dry_run_says_what_the_pool_would_be() {
    let program = Program::new("true");
    let ran = program
        .jumbo_with(&["--dry-run", "--pool=64M", "--overcommit=2M"])
        .ok();
    for words in ["a pool of 64 MiB", "2 MiB more on demand", "hugetlb"] {
        assert!(ran.stdout.contains(words), "{words}: {ran:?}");
    }
}

#[test]
fn programs_are_the_same_on_a_pool() {
    // Other tests may count the pages of the kernel's pool.
    let Some(_held) = host::with_thp() else {
        return;
    };
    for name in ["family", "churn", "forkstorm"] {
        let compiled = compile(&[Source::C(name, &[])]);
        let program = Program::new(compiled.path(name));
        let program = match name {
            "churn" => program.args(["16", "300"]),
            _ => program,
        };
        let plain = program.plain();
        crate::support::program::assert_alike(&plain, &program.jumbo_with(&["--pool=64M"]), name);
    }
}
