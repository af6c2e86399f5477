//! Callers of large frees: signal handlers, another malloc, children not created by fork(3).

use std::path::Path;

use super::{assert_same_in_both_modes, compiled};
use crate::support::{Program, Source, compile, host};

#[test]
fn a_handler_may_unmap_in_the_midst_of_malloc() {
    let files = compiled("in_handlers");
    assert_same_in_both_modes(&Program::new(files.path("in_handlers")).args(["malloc", "20"]));
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_handler_may_leave_by_a_jump_while_memory_is_freed() {
    let files = compiled("in_handlers");
    assert_same_in_both_modes(&Program::new(files.path("in_handlers")).args(["jump", "48"]));
}

#[test]
fn a_thread_that_frees_may_be_stopped_in_a_handler() {
    let files = compiled("in_handlers");
    assert_same_in_both_modes(&Program::new(files.path("in_handlers")).args(["stop", "20"]));
}

#[test]
fn a_malloc_of_the_programs_own_may_unmap_under_its_lock() {
    const MALLOC: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/programs/mapping_malloc.c"
    );
    let files = compile(&[Source::C("large_blocks", &[MALLOC])]);
    assert_same_in_both_modes(&Program::new(files.path("large_blocks")));
}

#[test]
fn a_malloc_in_a_library_may_unmap_under_its_lock() {
    let files = compile(&[
        Source::Library("mapping_malloc"),
        Source::C("large_blocks", &["-Wl,--no-as-needed", "-lmapping_malloc"]),
    ]);
    assert_same_in_both_modes(&Program::new(files.path("large_blocks")));
}

#[test]
fn a_malloc_that_is_preloaded_may_unmap_under_its_lock() {
    let files = compile(&[
        Source::Library("mapping_malloc"),
        Source::C("large_blocks", &[]),
    ]);
    let program = Program::new(files.path("large_blocks"));
    assert_same_in_both_modes(&program.env("LD_PRELOAD", files.path("libmapping_malloc.so")));
}

#[test]
fn jemalloc_may_give_back_large_blocks() {
    const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";
    if !Path::new(JEMALLOC).exists() {
        return host::skip(&format!("{JEMALLOC} is not installed"));
    }
    let files = compiled("large_blocks");
    let program = Program::new(files.path("large_blocks"));
    assert_same_in_both_modes(&program.env("LD_PRELOAD", JEMALLOC));
}

/// Frees in children of a process whose workers run, or have run (with and without privilege).
#[track_caller]
fn assert_children_free(kind: &str) {
    let files = compiled("bare_children");
    let program = Program::new(files.path("bare_children")).arg(kind);
    assert_same_in_both_modes(&program);
    assert_same_in_both_modes(&program.unprivileged());
}

#[test]
fn a_copy_by_a_bare_clone_frees_by_itself() {
    assert_children_free("copy");
}

/// The program may map at an address from which memory was moved for a pending free.
#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_program_may_map_where_it_likes_while_memory_is_freed() {
    assert_same_in_both_modes(&Program::new(compiled("mapped_over").path("mapped_over")));
}

/// Parent and child have the same PID.
#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_copy_that_is_the_first_of_a_namespace_as_its_parent_is_frees_by_itself() {
    if !host::root() {
        return;
    }
    let files = compiled("namespaced");
    let program = Program::new(files.path("namespaced")).around(["unshare", "--pid", "--fork"]);
    assert_same_in_both_modes(&program);
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_copy_by_a_bare_clone_waits_for_no_thread_of_its_parent() {
    assert_children_free("busy");
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_clone_that_shares_memory_may_unmap_and_end() {
    assert_children_free("clone");
}

#[test]
fn a_child_of_vfork_may_unmap_and_end() {
    assert_children_free("vfork");
}
