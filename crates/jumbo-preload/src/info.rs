//! Figures of the allocator: mallinfo(3), mallinfo2(3), malloc_stats(3).
//!
//! The slabs count as an arena, blocks of the window as mapped blocks.

use core::fmt::Write;

use jumbo_inside::{heap, slab};
use libc::c_int;

use crate::end::Stderr;
use crate::next;
use crate::own_stack::on;

/// mallinfo2(3), glibc 2.33; zeroes of a C library without it.
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo2() -> libc::mallinfo2 {
    // SAFETY: the same call.
    with_ours(unsafe { (next::mallinfo2.get())() })
}

/// mallinfo(3): as [`mallinfo2`], in numbers that may wrap.
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo() -> libc::mallinfo {
    // SAFETY: the same call.
    let libcs = unsafe { (next::mallinfo.get())() };
    let wide = |value: c_int| value.cast_unsigned() as usize;
    let all = with_ours(libc::mallinfo2 {
        arena: wide(libcs.arena),
        ordblks: wide(libcs.ordblks),
        smblks: wide(libcs.smblks),
        hblks: wide(libcs.hblks),
        hblkhd: wide(libcs.hblkhd),
        usmblks: wide(libcs.usmblks),
        fsmblks: wide(libcs.fsmblks),
        uordblks: wide(libcs.uordblks),
        fordblks: wide(libcs.fordblks),
        keepcost: wide(libcs.keepcost),
    });
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "as glibc's numbers"
    )]
    let narrow = |value: usize| value as c_int;
    libc::mallinfo {
        arena: narrow(all.arena),
        hblkhd: narrow(all.hblkhd),
        uordblks: narrow(all.uordblks),
        fordblks: narrow(all.fordblks),
        ..libcs
    }
}

/// Adds this library's blocks to the figures of the C library.
fn with_ours(libcs: libc::mallinfo2) -> libc::mallinfo2 {
    let small = slab::totals();
    let large = on(heap::allocated);
    libc::mallinfo2 {
        arena: libcs.arena.wrapping_add(small.mapped),
        hblkhd: libcs.hblkhd.wrapping_add(large),
        uordblks: libcs.uordblks.wrapping_add(small.taken),
        fordblks: libcs.fordblks.wrapping_add(small.mapped - small.taken),
        ..libcs
    }
}

/// malloc_stats(3): the C library's lines, then those of this library.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_stats() {
    // SAFETY: the same call.
    unsafe { (next::malloc_stats.get())() };
    on(|| {
        let (small, large) = (slab::totals(), heap::allocated());
        let _ = writeln!(
            Stderr,
            "jumbo:\nsystem bytes     = {:>10}\nin use bytes     = {:>10}\nlarge blocks     = {large:>10}",
            small.mapped, small.taken
        );
    });
}
