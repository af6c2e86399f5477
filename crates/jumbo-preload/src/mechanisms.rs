//! The list of mechanisms, in the order in which they receive events: [`All`].
//!
//! The mechanisms of this crate are below, the others in [`jumbo_inside`]. The order is that of the
//! locks that a fork holds: glibc's streams, the slabs, the heap, pending frees.
//! [`jumbo_inside::events`] has the protocol.

use core::sync::atomic::{AtomicUsize, Ordering};

use jumbo_inside::events::{self, Mapping, Mechanism, Side};
use jumbo_inside::heap::{self, maps};
use jumbo_inside::{debug, density, gather, populate, segments, slab, watch};

use crate::own_stack::{self, on};
use crate::reaper::auto;
use crate::{alloc, environment, glibc, next, small, streams, threads};

/// List of all mechanisms.
pub(crate) type All = jumbo_inside::events::list![
    Streams,
    Slabs,
    debug::Events,
    watch::Events,
    Mappings,
    segments::Events,
    heap::Events,
    gather::Events,
    populate::Events,
    density::Events,
    Reaper,
    Glibc,
    ChildEnvironment,
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

/// Slabs of small blocks.
pub(crate) struct Slabs;

impl Mechanism for Slabs {
    fn lock_for_fork() {
        small::before_fork();
    }

    unsafe fn unlock_after_fork(_side: Side) {
        small::after_fork();
    }

    unsafe fn is_forked(process: u32) {
        small::forked(process);
    }
}

/// The program's own mappings.
pub(crate) struct Mappings;

/// PMD size in bytes; 0 until mappings are covered.
pub(crate) static PMD: AtomicUsize = AtomicUsize::new(0);

impl Mechanism for Mappings {
    #[inline(always)]
    fn unmapping(address: usize, length: usize) {
        jumbo_sys::unmapping(address, length);
    }

    fn locking(_address: usize, length: usize) {
        /// Minimum size of text that is replaced.
        const MIN_TEXT_BYTES: usize = 1 << 20;
        // Text that is replaced would lose the lock.
        if length >= PMD.load(Ordering::Relaxed).max(MIN_TEXT_BYTES) {
            watch::end();
        }
    }
}

/// Reaper process, which frees the memory after the program's end.
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
        // SAFETY: the caller's promise; the heap counts in a slot of the child by now.
        unsafe { crate::reaper::forked() };
    }
}

/// glibc's malloc.
pub(crate) struct Glibc;

impl Mechanism for Glibc {
    fn before_thread() {
        next::initialise_malloc();
    }

    fn confining(_is_first: bool) {
        if alloc::is_diverted() {
            next::start_malloc();
        }
        // Another arena shrinks for the first time behind the filter, and glibc opens a file of /proc
        // for that (malloc/arena.c).
        if slab::is_on() {
            next::use_one_arena();
        }
    }
}

/// Environment that the program's children inherit.
pub(crate) struct ChildEnvironment;

impl Mechanism for ChildEnvironment {
    fn rooted() {
        environment::rooted();
    }
}

/// Counter of events in debug builds, for tests.
#[cfg(debug_assertions)]
pub(crate) use trace::Trace;
#[cfg(not(debug_assertions))]
pub(crate) type Trace = ();

#[cfg(debug_assertions)]
mod trace {
    use super::*;
    use core::ffi::c_int;
    use core::sync::atomic::AtomicU32;

    pub(crate) struct Trace;

    static COUNTS: [AtomicU32; 13] = [const { AtomicU32::new(0) }; 13];

    /// Returns the count of an event by its number; -1 past the last one.
    #[unsafe(no_mangle)]
    extern "C" fn jumbo_events_heard(event: usize) -> i64 {
        COUNTS
            .get(event)
            .map_or(-1, |count| count.load(Ordering::Relaxed).into())
    }

    fn count_event(event: usize) {
        if let Some(count) = COUNTS.get(event) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Defines handlers that count their event.
    macro_rules! count {
        ($($event:literal $name:ident($($type:ty),*);)*) => {
            $(fn $name($(_: $type),*) {
                count_event($event);
            })*
        };
    }

    impl Mechanism for Trace {
        fn around_change<T>(call: impl FnOnce() -> T) -> T {
            count_event(2);
            call()
        }

        count! {
            0 unmapping(usize, usize);
            1 mapping_at(usize, usize);
            3 mapped(&Mapping);
            4 advising(usize, usize, c_int);
            5 locking(usize, usize);
            6 locking_all();
            7 locked_all(bool);
            8 punching();
            9 before_confinement();
            10 changing_privilege();
            11 confining(bool);
            12 rooted();
        }
    }
}

/// Handler of pthread_atfork(3) before the fork.
pub(crate) unsafe extern "C" fn before_fork() {
    on(events::before_fork::<All>);
}

/// Handler of pthread_atfork(3) in the parent.
pub(crate) unsafe extern "C" fn after_fork() {
    // SAFETY: the C library calls both around fork(2), in one thread.
    on(|| unsafe { events::after_fork::<All>() });
}

/// Handler of pthread_atfork(3) in the child.
pub(crate) unsafe extern "C" fn after_fork_child() {
    // This is the child.
    own_stack::forked();
    threads::forked();
    // SAFETY: as above.
    on(|| unsafe { events::after_fork_child::<All>(glibc::thread()) });
}
