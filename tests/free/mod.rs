//! Tests of large frees, by several threads and in the background. Results for the program are
//! those of the kernel ([`promises`]), from any caller ([`places`]), and at any memory limit.

mod group;
mod places;
mod promises;

use std::time::Duration;

use group::Group;

use crate::support::program::assert_alike;
use crate::support::{Compiled, MIB, Program, Source, build, compile, host};

/// Run time of the storms; `JUMBO_STORM_SECONDS` overrides it.
fn duration() -> Duration {
    let seconds = std::env::var("JUMBO_STORM_SECONDS").map_or(6, |text| text.parse().unwrap());
    Duration::from_secs(seconds)
}

fn compiled(name: &'static str) -> Compiled {
    compile(&[Source::C(name, &[])])
}

/// Runs under the preload library alone, with frees large from 1 MiB on, so that more frees are
/// concurrent.
fn with_small_frees(program: Program, mode: &str) -> Program {
    let orders = format!("free={mode},free_workers=3,free_least=1048576,reaper=off");
    program
        .env("LD_PRELOAD", build::preload())
        .env("JUMBO_ORDERS", orders)
}

#[track_caller]
fn assert_survives_storm(mode: &str) {
    let (files, duration) = (compiled("gather_storm"), duration());
    let storm = Program::new(files.path("gather_storm"))
        .args(["1", "6", &duration.as_secs().to_string()])
        .working_for(duration);
    let ran = with_small_frees(storm, mode).plain().ok();
    assert_eq!(ran.stdout, "nothing foreign, nothing lost\n", "{ran:?}");
    // Visible in long runs with --nocapture.
    eprint!("{mode}: {}", ran.stderr);
}

#[test]
fn nothing_is_foreign_and_nothing_lost_when_threads_free() {
    assert_survives_storm("sync");
}

#[test]
fn nothing_is_foreign_and_nothing_lost_when_memory_is_freed_later() {
    assert_survives_storm("background");
}

/// With the defaults, and counted.
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

/// `inline` counts frees that were scanned and left to the caller.
#[test]
fn what_was_not_looked_at_is_not_counted() {
    let files = compiled("merged");
    for (argument, counted) in [(None, 200.0 * 1048576.0), (Some("merged"), 0.0)] {
        let program = Program::new(files.path("merged")).args(argument);
        let (ran, report) = program.reported_with(&["--free-workers=2"]);
        ran.ok();
        let inline = report.number("/obtained/ledger/free/inline");
        assert_eq!(inline, counted, "{argument:?}: {report:?}");
    }
}

/// A pending free still counts as committed, and another program would be refused memory.
#[test]
fn nothing_is_freed_later_where_the_kernel_promises_no_more_than_there_is() {
    let Some(_knob) = host::Knob::set("/proc/sys/vm/overcommit_memory", "2") else {
        return;
    };
    let files = compiled("free_again");
    let program = Program::new(files.path("free_again")).args(["160", "2"]);
    let (ran, report) = program.reported_with(&["--free=background", "--free-workers=2"]);
    ran.ok();
    let free = |count: &str| report.number(&format!("/obtained/ledger/free/{count}"));
    assert!(free("gathered") > 0.0, "{report:?}");
    assert_eq!(free("background"), 0.0, "{report:?}");
    assert!(report.says("vm.overcommit_memory is 2"), "{report:?}");
}

/// Runs the program plain and with jumbo in both modes; checks that the results are the same.
#[track_caller]
fn assert_same_in_both_modes(program: &Program) {
    let plain = program.plain().ok();
    for mode in ["--free=sync", "--free=background"] {
        let jumbo = program.jumbo_with(&[mode, "--free-workers=3"]);
        assert_alike(&plain, &jumbo, mode);
    }
}

/// The group has room for 1.5 blocks: pending frees must not reduce it.
#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_memory_cgroup_at_its_limit_holds_as_much_as_before() {
    let files = compiled("free_again");
    for (limit, size) in [(300, "200"), (300, "135"), (420, "140")] {
        let Some(group) = Group::new(limit * MIB) else {
            return;
        };
        let program = Program::new(files.path("free_again")).args([size, "4"]);
        assert_same_in_both_modes(&program.around(group.enter()));
        assert_eq!(group.kills(), 0, "{size} MiB in {limit} MiB");
    }
}

/// Page faults do not flush pending frees. Here they come as soon as the call has returned, and
/// from threads that leave the workers no CPU.
#[test]
fn a_memory_cgroup_has_room_for_what_is_touched_meanwhile() {
    let files = compiled("crowded");
    let Some(group) = Group::new(480 * MIB) else {
        return;
    };
    let program = Program::new(files.path("crowded")).args(["144", "400"]);
    assert_same_in_both_modes(&program.around(group.enter()));
    assert_eq!(group.kills(), 0);
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_limit_of_addresses_is_not_reached_by_what_was_freed() {
    let files = compiled("free_again");
    let program = Program::new(files.path("free_again")).args(["200", "2"]);
    for limit in ["--as=419430400", "--data=314572800"] {
        assert_same_in_both_modes(&program.clone().around(["prlimit", limit]));
    }
}

/// If no thread can be created the caller frees everything.
#[test]
fn a_user_who_may_have_no_more_threads_can_free() {
    if !crate::support::host::root() {
        return;
    }
    let files = compiled("free_again");
    let program = Program::new(files.path("free_again")).args(["140", "2", "alone"]);
    assert_same_in_both_modes(&program.unprivileged());
}

/// A worker is a thread of the process: it must not be the last one.
#[test]
fn the_process_ends_with_its_own_last_thread() {
    let files = compiled("last_thread");
    // Without privilege workers linger for a moment.
    assert_same_in_both_modes(&Program::new(files.path("last_thread")).unprivileged());
    assert_same_in_both_modes(&Program::new(files.path("last_thread")));
}

/// A container installs a filter on all its programs. The launcher probes it in a process that may
/// die.
#[test]
fn an_inherited_filter_is_tried_out_first() {
    let files = compile(&[
        Source::C("gather_storm", &[]),
        Source::C("under_filter", &[]),
    ]);
    for (filter, gathers) in [("allow", true), ("mremap", false)] {
        let storm = Program::new(files.path("gather_storm")).args(["128", "50", "1"]);
        let filtered = files.path("under_filter");
        let (ran, report) = storm
            .around([filtered.as_os_str(), filter.as_ref()])
            .reported_with(&["--free-workers=2", "--reaper=off"]);
        ran.ok();
        let gathered = report.number("/obtained/ledger/free/gathered");
        assert_eq!(gathered > 0.0, gathers, "{filter}: {report:?}");
    }
}

/// A worker is started before its first use, and ends before a fork.
#[test]
fn a_worker_is_ready_for_a_background_free_and_gone_before_a_fork() {
    let files = compiled("ready");
    let program = Program::new(files.path("ready"));
    let plain = program.plain().ok();
    assert_eq!(plain.stdout, "1 allocated, 1 forked\n");
    let sync = program
        .jumbo_with(&["--free=sync", "--free-workers=2", "--reaper=off"])
        .ok();
    assert_eq!(sync.stdout, plain.stdout);
    let later = program
        .jumbo_with(&["--free=background", "--free-workers=2", "--reaper=off"])
        .ok();
    assert_eq!(later.stdout, "2 allocated, 1 forked\n");
}

/// If huge pages are possible, a free of that size is left to the kernel without a scan; otherwise
/// it is large.
#[test]
fn blocks_are_freed_by_threads_where_the_host_has_no_thp() {
    let Some(_knob) = host::Knob::set(host::THP_ENABLED, "never") else {
        return;
    };
    let files = compiled("blocks");
    let (ran, report) = Program::new(files.path("blocks"))
        .arg("6")
        .reported_with(&["--free-workers=2"]);
    ran.ok();
    let gathered = report.number("/obtained/ledger/free/gathered");
    assert!(gathered > 600e6, "{report:?}");
}
