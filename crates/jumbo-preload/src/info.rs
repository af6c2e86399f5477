//! Figures of the allocator: mallinfo(3), mallinfo2(3), malloc_stats(3).
//!
//! The slabs count as an arena, blocks of the window as mapped blocks.

use core::fmt::Write;

use jumbo_inside::heap;
use jumbo_inside::slab::{self, Totals};
use libc::c_int;

use crate::end::Stderr;
use crate::next;
use crate::own_stack::on;

/// Bytes of this library.
struct Ours {
    small: Totals,
    large: usize,
}

fn ours() -> Ours {
    on(|| Ours {
        small: slab::totals(),
        large: heap::allocated(),
    })
}

/// mallinfo2(3), glibc 2.33; a C library without it counts as empty.
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo2() -> libc::mallinfo2 {
    // SAFETY: the same call.
    let libcs = unsafe { (next::mallinfo2.get())() };
    let Ours { small, large } = ours();
    libc::mallinfo2 {
        arena: libcs.arena.wrapping_add(small.mapped),
        hblkhd: libcs.hblkhd.wrapping_add(large),
        uordblks: libcs.uordblks.wrapping_add(small.taken),
        fordblks: libcs.fordblks.wrapping_add(small.mapped - small.taken),
        ..libcs
    }
}

/// mallinfo(3): as [`mallinfo2`], in numbers that wrap.
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo() -> libc::mallinfo {
    // SAFETY: the same call.
    let libcs = unsafe { (next::mallinfo.get())() };
    let Ours { small, large } = ours();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "as glibc's numbers"
    )]
    let sum = |libcs: c_int, ours: usize| libcs.wrapping_add(ours as c_int);
    libc::mallinfo {
        arena: sum(libcs.arena, small.mapped),
        hblkhd: sum(libcs.hblkhd, large),
        uordblks: sum(libcs.uordblks, small.taken),
        fordblks: sum(libcs.fordblks, small.mapped - small.taken),
        ..libcs
    }
}

/// malloc_stats(3): the C library's lines, then those of this library.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_stats() {
    // SAFETY: the same call.
    unsafe { (next::malloc_stats.get())() };
    let Ours { small, large } = ours();
    on(|| {
        let _ = writeln!(
            Stderr,
            "jumbo:\nsystem bytes     = {:>10}\nin use bytes     = {:>10}\nlarge blocks     = {large:>10}",
            small.mapped, small.taken
        );
    });
}
