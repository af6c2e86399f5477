//! Effects of a large free equal the kernel's: results, errors, and the state afterwards.

use super::{assert_same_in_both_modes, compiled};
use crate::support::Program;
use crate::support::program::assert_alike;

#[test]
fn every_kind_of_range_is_freed_as_the_kernel_frees_it() {
    let files = compiled("freed_ranges");
    for operation in ["munmap", "discard"] {
        let program = Program::new(files.path("freed_ranges")).arg(operation);
        let plain = program.plain().ok();
        for mode in ["--free=sync", "--free=background"] {
            let (ran, report) = program.reported_with(&[mode, "--free-workers=3"]);
            assert_alike(&plain, &ran, mode);
            // The amount is small, so one thread may free all of it. A background free always
            // counts.
            let background = report.number("/obtained/ledger/free/background");
            let later = operation == "munmap" && mode == "--free=background";
            assert_eq!(background > 0.0, later, "{report:?}");
        }
    }
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn what_another_thread_maps_meanwhile_is_not_unmapped() {
    let files = compiled("mapped_between");
    assert_same_in_both_modes(&Program::new(files.path("mapped_between")).arg("20"));
}

/// The user has a limit on locked memory. One worker: the C library keeps the stacks of ended
/// threads, and they count.
#[test]
fn what_was_freed_neither_counts_as_locked_nor_can_be() {
    let files = compiled("locked");
    let program = Program::new(files.path("locked")).unprivileged();
    let plain = program.plain().ok();
    for mode in ["--free=sync", "--free=background"] {
        let jumbo = program.jumbo_with(&[mode, "--free-workers=2"]);
        assert_alike(&plain, &jumbo, mode);
    }
}

#[test]
fn a_limit_of_addresses_that_comes_later_finds_freed_ones_free() {
    let files = compiled("limited_later");
    assert_same_in_both_modes(&Program::new(files.path("limited_later")));
}
