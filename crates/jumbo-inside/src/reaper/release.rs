//! Giving the memory back: [`all`].
//!
//! The sibling is alone with the memory here. First goes what others may wait for: files, shared memory,
//! devices. Then threads zap the private anonymous memory; what refuses to be zapped, and the page tables,
//! goes with the sibling's own end. Only this library, the kernel's own pages and the ledger stay mapped.

#![expect(unsafe_code, reason = "unmaps what is not used any more")]

use core::sync::atomic::Ordering;
use core::time::Duration;

use super::State;
use super::control::CONTROL;
use super::raw::{self, plain};
use super::zap::Round;
use crate::proc::{Lines, MapsLine};

/// From so much memory on the bulk is put off for a moment that it does not show beside. Before Linux 6.12, which lets a
/// waiter preempt (`Batch`), the sibling's threads would have the CPUs at the moment at which the waiter is woken.
const LARGE: u64 = 1 << 30;
const MOMENT: Duration = Duration::from_millis(2);

/// The descriptors, as the sibling opened them.
const MAPS: usize = 0;
const STATM: usize = 1;

/// Gives everything back and counts it.
///
/// # Safety
/// No other task uses the memory, and the caller needs nothing of it but the image.
pub(super) unsafe fn all() {
    let start = raw::now();
    let before = resident();
    let keep = Keep::new();
    each_mapping(|mapping| {
        if !mapping.is_private_anonymous() && !mapping.is_kernels() && !keep.holds(&mapping) {
            let length = mapping.end - mapping.start;
            // SAFETY: the caller's promise: what it needs is in the image, which is kept.
            unsafe { raw::unmap(mapping.start, length) };
        }
    });
    if before >= LARGE {
        raw::wait(
            &CONTROL.retire,
            CONTROL.retire.load(Ordering::Relaxed),
            MOMENT,
        );
    }
    let mut round = Round::new(CONTROL.workers.load(Ordering::Relaxed));
    each_mapping(|mapping| {
        if mapping.is_private_anonymous() {
            for (start, end) in keep.around(&mapping) {
                // SAFETY: as above.
                unsafe { round.add(start, end) };
            }
        }
    });
    round.run();
    if let Some(slot) = keep.slot() {
        let freed = before.saturating_sub(resident());
        slot.reaper_freed.store(freed, Ordering::Relaxed);
        slot.reaper_ns
            .store(raw::now().saturating_sub(start), Ordering::Relaxed);
        slot.reaper.store(State::Done as u32, Ordering::Release);
    }
}

/// What stays mapped.
struct Keep {
    image: (usize, usize),
    slot: usize,
}

impl Keep {
    fn new() -> Self {
        let [start, end] = &CONTROL.image;
        Self {
            image: (start.load(Ordering::Relaxed), end.load(Ordering::Relaxed)),
            slot: CONTROL.slot.load(Ordering::Relaxed).expose_provenance(),
        }
    }

    fn slot(&self) -> Option<&'static crate::ledger::Slot> {
        // SAFETY: null, or the address of a `'static` slot, in the image or in the ledger: both are kept.
        unsafe { CONTROL.slot.load(Ordering::Relaxed).as_ref() }
    }

    fn holds(&self, mapping: &MapsLine) -> bool {
        let image = mapping.start < self.image.1 && self.image.0 < mapping.end;
        image || (mapping.start..mapping.end).contains(&self.slot)
    }

    /// The parts of a mapping in front of the image and behind it: its bss may be one with a neighbour.
    fn around(&self, mapping: &MapsLine) -> [(usize, usize); 2] {
        let (start, end) = (mapping.start, mapping.end);
        let front = (start, end.min(self.image.0.max(start)));
        (front, (start.max(self.image.1.min(end)), end)).into()
    }
}

/// Calls `each` with every mapping, in the order of addresses. What it unmaps disturbs nothing: the kernel
/// goes on behind the last address that it told.
fn each_mapping(mut each: impl FnMut(MapsLine)) {
    rewind(MAPS);
    let mut lines = Lines::default();
    let mut buffer = [0u8; 4096];
    while let Some(length) = raw::read(MAPS, &mut buffer).filter(|length| *length > 0) {
        for byte in buffer.iter().take(length) {
            if let Some(mapping) = lines.push(*byte) {
                each(mapping);
            }
        }
    }
}

/// To the beginning of a file.
fn rewind(descriptor: usize) {
    let start = libc::SEEK_SET.cast_unsigned() as usize;
    // SAFETY: it writes nothing.
    unsafe { plain(libc::SYS_lseek, [descriptor, 0, start]) };
}

/// Resident memory in bytes that is not a file's: the second number of /proc/PID/statm without the third.
fn resident() -> u64 {
    rewind(STATM);
    let mut buffer = [0u8; 256];
    let length = raw::read(STATM, &mut buffer).unwrap_or(0);
    let mut numbers = [0u64; 3];
    let mut at = 0;
    for byte in buffer.iter().take(length) {
        match (byte, numbers.get_mut(at)) {
            (b'0'..=b'9', Some(number)) => {
                *number = number.wrapping_mul(10).wrapping_add(u64::from(byte - b'0'));
            }
            _ => at += 1,
        }
    }
    let pages = numbers[1].saturating_sub(numbers[2]);
    pages.saturating_mul(CONTROL.page.load(Ordering::Relaxed) as u64)
}
