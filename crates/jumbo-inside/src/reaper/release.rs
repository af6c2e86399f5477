//! Release of the memory: [`all`].
//!
//! The reaper is the only user of the memory here. It first unmaps files, shared memory and
//! devices, which other processes may wait for. Then threads zap the private anonymous memory. The
//! kernel frees the rest and the page tables at the reaper's end. Only this library, the kernel's
//! own pages and the ledger stay mapped.

#![expect(unsafe_code, reason = "unmaps unused memory")]

use core::sync::atomic::Ordering;
use core::time::Duration;

use super::State;
use super::control::CONTROL;
use super::raw::{self, plain};
use super::zap::ZapBatch;
use jumbo_sys::maps::{Lines, MapsLine};

/// Minimum resident memory for a [`ZAP_DELAY`], which is negligible then. Before Linux 6.12, where
/// the program's waiter preempts (`sys::stand_back`), the reaper's threads would occupy the CPUs
/// when it wakes.
const MIN_DELAY_BYTES: u64 = 1 << 30;
const ZAP_DELAY: Duration = Duration::from_millis(2);

/// Descriptors that the reaper has open.
const MAPS: usize = 0;
const STATM: usize = 1;

/// Frees all memory and counts it.
///
/// # Safety
/// No other task uses the memory, and the caller uses only the image.
pub(super) unsafe fn all() {
    let start = raw::now();
    let before = resident();
    let keep = Keep::new();
    each_mapping(|mapping| {
        if !mapping.is_private_anonymous() && !mapping.is_kernels() && !keep.holds(&mapping) {
            let length = mapping.end - mapping.start;
            // SAFETY: the caller's promise: it uses only the image, which is kept.
            unsafe { raw::unmap(mapping.start, length) };
        }
    });
    if before >= MIN_DELAY_BYTES {
        let retire = &CONTROL.retire;
        raw::wait(retire, retire.load(Ordering::Relaxed), ZAP_DELAY);
    }
    let mut batch = ZapBatch::new(CONTROL.workers.load(Ordering::Relaxed));
    each_mapping(|mapping| {
        if mapping.is_private_anonymous() {
            for (start, end) in keep.around(&mapping) {
                // SAFETY: as above.
                unsafe { batch.add(start, end) };
            }
        }
    });
    batch.run();
    if let Some(slot) = keep.slot() {
        let freed = before.saturating_sub(resident());
        slot.reaper_freed.store(freed, Ordering::Relaxed);
        slot.reaper_ns
            .store(raw::now().saturating_sub(start), Ordering::Relaxed);
        slot.reaper.store(State::Done as u32, Ordering::Release);
    }
}

/// Addresses that stay mapped.
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
        // SAFETY: null, or the address of a `'static` slot in the image or the ledger; both are
        // kept.
        unsafe { CONTROL.slot.load(Ordering::Relaxed).as_ref() }
    }

    fn holds(&self, mapping: &MapsLine) -> bool {
        let image = mapping.start < self.image.1 && self.image.0 < mapping.end;
        image || (mapping.start..mapping.end).contains(&self.slot)
    }

    /// Returns the parts of a mapping before and after the image: the kernel may merge its bss with
    /// a neighbour.
    fn around(&self, mapping: &MapsLine) -> [(usize, usize); 2] {
        let (start, end) = (mapping.start, mapping.end);
        let front = (start, end.min(self.image.0.max(start)));
        (front, (start.max(self.image.1.min(end)), end)).into()
    }
}

/// Calls `each` with every mapping, in address order. `each` may unmap: the kernel continues after
/// the last reported address.
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

/// Seeks to the beginning of a file.
fn rewind(descriptor: usize) {
    let start = libc::SEEK_SET.cast_unsigned() as usize;
    // SAFETY: the call writes nothing.
    unsafe { plain(libc::SYS_lseek, [descriptor, 0, start]) };
}

/// Returns the resident memory without that of files: the second number of /proc/PID/statm minus
/// the third.
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
