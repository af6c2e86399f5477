//! Large frees: with several threads, and later. What the program sees is what the kernel promises.

use crate::support::{Compiled, Program, Source, build, compile};

/// How long the storms last, in seconds; `JUMBO_STORM_SECONDS` for longer ones.
fn seconds() -> String {
    std::env::var("JUMBO_STORM_SECONDS").unwrap_or_else(|_| "6".to_owned())
}

fn compiled(name: &'static str) -> Compiled {
    compile(&[Source::C(name, &[])])
}

/// Under the preload library alone, with frees large from 1 MiB on: there is more of everything then.
fn with_small_frees(program: Program, mode: &str) -> Program {
    let orders = format!("free={mode},free_workers=3,free_least=1048576,reaper=off");
    program
        .env("LD_PRELOAD", build::preload())
        .env("JUMBO_ORDERS", orders)
}

#[test]
fn nothing_is_foreign_and_nothing_lost_when_threads_free() {
    let files = compiled("gather_storm");
    let storm = Program::new(files.path("gather_storm")).args(["1", "6", &seconds()]);
    let ran = with_small_frees(storm, "sync").plain().ok();
    assert_eq!(ran.stdout, "nothing foreign, nothing lost\n", "{ran:?}");
}

#[test]
fn nothing_is_foreign_and_nothing_lost_when_memory_is_freed_later() {
    let files = compiled("gather_storm");
    let storm = Program::new(files.path("gather_storm")).args(["1", "6", &seconds()]);
    let ran = with_small_frees(storm, "background").plain().ok();
    assert_eq!(ran.stdout, "nothing foreign, nothing lost\n", "{ran:?}");
}

/// As users have it, and counted.
#[test]
fn large_frees_are_done_by_threads_and_the_report_says_so() {
    let files = compiled("gather_storm");
    let storm = Program::new(files.path("gather_storm")).args(["128", "50", "2"]);
    for (mode, later) in [("--free=sync", false), ("--free=background", true)] {
        let (ran, report) = storm.reported_with(&[mode, "--free-workers=2"]);
        ran.ok();
        let free = |count: &str| report.number(&format!("/obtained/ledger/free/{count}"));
        assert!(
            free("gathered") > 0.0 && free("workers") > 1.0,
            "{report:?}"
        );
        assert_eq!(free("background") > 0.0, later, "{report:?}");
    }
    let (ran, report) = storm.reported_with(&["--free=off"]);
    ran.ok();
    assert_eq!(report.number("/obtained/ledger/free/gathered"), 0.0);
}
