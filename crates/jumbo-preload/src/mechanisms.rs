//! The list of mechanisms, in the order in which they hear what the program does: [`All`].
//!
//! Those of [`jumbo_inside`] hear by themselves; what hears of this crate is below. The order is that of the locks which
//! a fork holds together: glibc's streams, mimalloc, the heap with what it frees. [`jumbo_inside::events`] has the protocol.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use jumbo_inside::events::{self, Mapping, Mechanism, Side};
use jumbo_inside::heap::{self, maps};
use jumbo_inside::{density, gather, segments, shmem, watch};

use crate::reaper::auto;
use crate::{alloc, environment, glibc, mimalloc, next, streams};

/// All mechanisms.
pub(crate) type All = jumbo_inside::events::list![
    Streams,
    Mimalloc,
    watch::Events,
    Mappings,
    segments::Events,
    heap::Events,
    gather::Events,
    density::Events,
    shmem::Events,
    Reaper,
    Glibc,
    Environment,
    Trace,
];

/// glibc's list of streams.
pub(crate) struct Streams;

impl Mechanism for Streams {
    fn lock_for_fork() {
        streams::lock();
    }

    unsafe fn unlock_after_fork(side: Side) {
        match side {
            Side::Parent => streams::unlock(),
            Side::Child => streams::reset(),
        }
    }
}

/// mimalloc, which has the small objects.
pub(crate) struct Mimalloc;

impl Mechanism for Mimalloc {
    fn locking_all() {
        mimalloc::give_up_addresses();
    }

    fn before_thread() {
        mimalloc::before_thread();
    }

    fn confining(_is_first: bool) {
        mimalloc::confine();
    }

    fn confined(is_installed: bool) {
        if !is_installed {
            mimalloc::unconfine();
        }
    }

    fn lock_for_fork() {
        mimalloc::before_fork();
    }

    unsafe fn unlock_after_fork(_side: Side) {
        mimalloc::after_fork();
    }

    unsafe fn is_forked(_pid: u32) {
        mimalloc::forked();
    }
}

/// The program's own mappings.
pub(crate) struct Mappings;

/// The PMD size in bytes once mappings are covered; 0 before, and where they are not.
pub(crate) static PMD: AtomicUsize = AtomicUsize::new(0);

/// The program has advised memory in a way that a copy of it would lose (MADV_DONTFORK, MADV_DONTDUMP).
pub(crate) static ODDLY_ADVISED: AtomicBool = AtomicBool::new(false);

impl Mechanism for Mappings {
    fn advising(address: usize, _length: usize, advice: c_int) {
        if heap::is_sticky(advice) && maps::is_placed(address) {
            ODDLY_ADVISED.store(true, Ordering::Relaxed);
        }
    }

    fn locking(_address: usize, length: usize) {
        /// Less is no text that would be replaced.
        const LEAST_BYTES: usize = 1 << 20;
        // It may be text, which is not replaced then, for the lock would be lost.
        if length >= PMD.load(Ordering::Relaxed).max(LEAST_BYTES) {
            watch::end();
        }
    }
}

/// The sibling that gives memory back after the program's end.
pub(crate) struct Reaper;

impl Mechanism for Reaper {
    #[inline(always)]
    fn mapped(mapping: &Mapping) {
        if mapping.flags & libc::MAP_ANONYMOUS == 0 {
            auto::mapped_file(mapping);
        } else if mapping.length >= maps::MIN_PACKED_BYTES {
            auto::mapped(mapping);
        }
    }

    unsafe fn is_forked(_pid: u32) {
        // SAFETY: the caller's promise; the heap counts in a slot of the child's own by now.
        unsafe { crate::reaper::forked() };
    }
}

/// glibc's malloc.
pub(crate) struct Glibc;

impl Mechanism for Glibc {
    fn confining(_is_first: bool) {
        glibc::follow();
        if alloc::is_diverted() {
            next::start_malloc();
        }
    }

    fn confined(_is_installed: bool) {
        glibc::follow();
    }
}

/// The environment that the program's children inherit.
pub(crate) struct Environment;

impl Mechanism for Environment {
    fn rooted() {
        environment::rooted();
    }
}

/// Counts what the others hear, in debug builds, for tests.
#[cfg(debug_assertions)]
pub(crate) use trace::Trace;
#[cfg(not(debug_assertions))]
pub(crate) type Trace = ();

#[cfg(debug_assertions)]
mod trace {
    use super::*;
    use core::sync::atomic::AtomicU32;

    pub(crate) struct Trace;

    static COUNTS: [AtomicU32; 13] = [const { AtomicU32::new(0) }; 13];

    /// How often the event of that number was heard; -1 past the last one.
    #[unsafe(no_mangle)]
    extern "C" fn jumbo_events_heard(event: usize) -> i64 {
        COUNTS
            .get(event)
            .map_or(-1, |count| count.load(Ordering::Relaxed).into())
    }

    fn hear(event: usize) {
        if let Some(count) = COUNTS.get(event) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Mechanism for Trace {
        fn unmapping(_address: usize, _length: usize) {
            hear(0);
        }
        fn mapping_at(_address: usize, _length: usize) {
            hear(1);
        }
        fn around_change<T>(call: impl FnOnce() -> T) -> T {
            hear(2);
            call()
        }
        fn mapped(_mapping: &Mapping) {
            hear(3);
        }
        fn advising(_address: usize, _length: usize, _advice: c_int) {
            hear(4);
        }
        fn locking(_address: usize, _length: usize) {
            hear(5);
        }
        fn locking_all() {
            hear(6);
        }
        fn locked_all(_future: bool) {
            hear(7);
        }
        fn punching() {
            hear(8);
        }
        fn before_confinement() {
            hear(9);
        }
        fn changing_privilege() {
            hear(10);
        }
        fn confining(_is_first: bool) {
            hear(11);
        }
        fn rooted() {
            hear(12);
        }
    }
}

/// A handler of pthread_atfork(3).
pub(crate) unsafe extern "C" fn before_fork() {
    events::before_fork::<All>();
}

/// As [`before_fork`].
pub(crate) unsafe extern "C" fn after_fork() {
    // SAFETY: the C library calls both around fork(2), in one thread.
    unsafe { events::after_fork::<All>() };
}

/// As [`before_fork`].
pub(crate) unsafe extern "C" fn after_fork_child() {
    // SAFETY: as above; this is the child.
    unsafe { events::after_fork_child::<All>(glibc::thread()) };
}
