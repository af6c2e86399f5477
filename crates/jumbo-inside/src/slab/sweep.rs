//! Base pages without blocks go back to the kernel: [`sweep`].
//!
//! The heap may hold a part of the allowance of [`density`] beyond the blocks that are taken, and
//! what it has held before. Once it grows beyond that, or other memory of the program grows, a sweep
//! drops the free units; where no [`run`] fits between the blocks either, also the base pages there,
//! of slabs that have not served since the last sweep: the next blocks would need them again.
#![expect(unsafe_code, reason = "drops memory by address")]

use core::mem::replace;
use core::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

use super::blocks::BASE_BYTES;
use super::central;
use super::chunks::CHUNKS;
use super::class::{CHUNK_BYTES, CLASSES, UNIT_BYTES, UNITS};
use super::unit::{self, Unit};
use crate::density;
use crate::sandbox;
use jumbo_sys as sys;

/// Part of the allowance that the heap may hold.
const ALLOWANCE_DIVISOR: usize = 4;

/// Part of its resident memory that the heap keeps while nothing grows.
const KEPT_DIVISOR: isize = 4;
/// Idle memory at which a sweep is never due.
const MIN_IDLE_BYTES: isize = 256 << 10;
/// Growth at which the heap checks what it holds, and part of what it may hold.
const GROWTH_STEP_BYTES: isize = 1 << 20;
const GROWTH_STEP_DIVISOR: isize = 8;

/// Part of the idle memory that a sweep drops at least, or the next one waits for more growth.
const DROPPED_DIVISOR: isize = 8;

/// Idle memory that a sweep has left which dropped little.
static LEFT_BYTES: AtomicIsize = AtomicIsize::new(isize::MIN);
/// Idle memory at which the next sweep without growth is due: more than the last one has left.
static NEXT_BYTES: AtomicIsize = AtomicIsize::new(0);

crate::one_page! {
    static IS_SWEEPING: AtomicBool = AtomicBool::new(false);
}

/// Returns the bytes that the heap may hold.
fn max() -> isize {
    let max = density::allowance() / ALLOWANCE_DIVISOR;
    max.min(isize::MAX.unsigned_abs()).cast_signed()
}

/// Reports whether the heap holds so much that it is to reuse it before it grows.
pub(super) fn is_sparse() -> bool {
    central::idle() > max() / 2
}

/// Reports whether the heap holds more than it may.
pub(super) fn is_full() -> bool {
    central::idle() > max()
}

/// Reports whether the heap may hold `bytes` more.
pub(super) fn has_room_for(bytes: usize) -> bool {
    central::idle().saturating_add_unsigned(bytes) <= max()
}

/// Memory that a sweep drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sweep {
    /// Free units.
    Free,
    /// Also base pages between blocks, of slabs that do not serve.
    Idle,
    /// Also those of the others.
    All,
}

/// Returns the sweep that is due: the heap holds more than it may.
pub(super) fn due() -> Option<Sweep> {
    let (idle, max) = (central::idle(), max());
    let mut step = GROWTH_STEP_BYTES.max(max / GROWTH_STEP_DIVISOR);
    // What the last sweep could not drop, the next one could not, either.
    if idle <= LEFT_BYTES.load(Ordering::Relaxed).saturating_add(max / 2) {
        step = step.max(central::resident() / KEPT_DIVISOR);
    }
    let has_grown = central::has_grown(step);
    if idle <= max.max(MIN_IDLE_BYTES) {
        return None;
    }
    if has_grown {
        return Some(Sweep::Idle);
    }
    let next = NEXT_BYTES.load(Ordering::Relaxed);
    if idle + max / 2 < next {
        NEXT_BYTES.store(idle + max / 2, Ordering::Relaxed);
    }
    (idle > next.max(central::resident() / KEPT_DIVISOR)).then_some(Sweep::Free)
}

/// Does a sweep that is [`due`].
pub(super) fn do_due(due: Sweep) {
    let max = max();
    let left = match due {
        Sweep::Free => max.max(central::resident() / KEPT_DIVISOR) / 2,
        _ => max / 2,
    };
    let before = central::idle();
    sweep(left, due);
    let after = central::idle();
    let is_little = before - after < before / DROPPED_DIVISOR;
    let left = if is_little { after } else { isize::MIN };
    LEFT_BYTES.store(left, Ordering::Relaxed);
    NEXT_BYTES.store(after + max / 2, Ordering::Relaxed);
}

/// Drops base pages of free units, and those between blocks, until at most `max` bytes are idle.
/// Reports whether it dropped any.
pub(super) fn sweep(max: isize, kind: Sweep) -> bool {
    if IS_SWEEPING.swap(true, Ordering::Acquire) {
        return false;
    }
    let before = central::idle();
    for class in 1..CLASSES {
        central::with(class, central::Slabs::release_empty);
    }
    sweep_free(max);
    for class in (1..CLASSES).rev() {
        if kind == Sweep::Free || central::idle() <= max {
            break;
        }
        central::with(class, |slabs| {
            slabs.each(|slab| {
                // SAFETY: a slab of the class, whose lock is held.
                let serves = unsafe { replace(&mut (*slab.header).serves, false) };
                if central::idle() > max && (!serves || kind == Sweep::All) {
                    let dropped = slab.drop_pages(discard);
                    central::drop_resident(dropped);
                }
            });
        });
    }
    IS_SWEEPING.store(false, Ordering::Release);
    central::idle() < before
}

/// Forgets the sweep of a thread that the child of a fork does not have.
pub(super) fn forked() {
    IS_SWEEPING.store(false, Ordering::Relaxed);
}

fn sweep_free(max: isize) {
    CHUNKS.with(|chunks| {
        chunks.each_with_free(|chunk, header| {
            if central::idle() > max {
                central::drop_resident(drop_free(chunk, header));
            }
        });
    });
}

/// Drops the free units of a chunk, run by run. Returns the bytes that were resident.
fn drop_free(chunk: u32, header: *mut Unit) -> usize {
    // SAFETY: a chunk, whose lock is held.
    let free = unsafe { (*header).free };
    let is_free = |at: usize| at < UNITS && free >> at & 1 == 1;
    let (mut at, mut dropped) = (0, 0);
    while at < UNITS {
        let first = at;
        let mut resident = 0;
        while is_free(at) {
            // SAFETY: a unit of the chunk.
            resident += unsafe { (*header.add(at)).gone }.count_zeros() as usize;
            at += 1;
        }
        if at == first {
            at += 1;
            continue;
        }
        let address = unit::address_of(chunk) + first * UNIT_BYTES;
        if resident > 0 && discard(address, (at - first) * UNIT_BYTES) {
            dropped += resident * BASE_BYTES;
            for unit in first..at {
                // SAFETY: as above.
                unsafe { (*header.add(unit)).gone = u8::MAX };
            }
        }
    }
    dropped
}

/// Discards base pages without blocks, whose huge pages must be earned again. False if they stay:
/// behind a filter, or locked.
fn discard(address: usize, length: usize) -> bool {
    if !sandbox::allows_advice() || sandbox::is_entered_later() {
        return false;
    }
    let (start, end) = (
        address & !(CHUNK_BYTES - 1),
        (address + length).next_multiple_of(CHUNK_BYTES),
    );
    density::dropped_by_sparse(&(start..end));
    // SAFETY: no block is there.
    unsafe { sys::discard_parts(address, length, CHUNK_BYTES) }.is_ok()
}
