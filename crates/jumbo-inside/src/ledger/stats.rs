//! Updates of the [`Slot`] of this process, in the ledger or private.

use core::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::Errno;

use super::{Ledger, Slot};

crate::one_page! {
    static PRIVATE_SLOT: Slot = Slot::new();
    pub(super) static SLOT: AtomicPtr<Slot> = AtomicPtr::new((&raw const PRIVATE_SLOT).cast_mut());
}

/// Returns the slot of this process.
pub(crate) fn slot() -> &'static Slot {
    #[expect(unsafe_code, reason = "an atomic reference has no safe form in core")]
    // SAFETY: SLOT only ever holds addresses of `'static` slots, which are shared by atomics alone.
    unsafe {
        &*SLOT.load(Ordering::Acquire)
    }
}

crate::one_page! {
    static LEDGER: AtomicPtr<Ledger> = AtomicPtr::new(core::ptr::null_mut());
}

/// Returns the ledger in which this process has a slot.
pub(crate) fn ledger() -> Option<&'static Ledger> {
    #[expect(unsafe_code, reason = "an atomic reference has no safe form in core")]
    // SAFETY: null, or the address of a `'static` ledger, which is shared by atomics alone.
    unsafe {
        LEDGER.load(Ordering::Acquire).as_ref()
    }
}

/// Claims a slot of `ledger`. If it is full, a private one: never the parent's.
pub(crate) fn attach(ledger: &'static Ledger, pid: u32) {
    let claimed = ledger.claim(pid);
    let slot = claimed.unwrap_or(&PRIVATE_SLOT);
    SLOT.store(core::ptr::from_ref(slot).cast_mut(), Ordering::Release);
    let joined = match claimed {
        Some(slot) => {
            ledger.begin_charging(slot);
            core::ptr::from_ref(ledger).cast_mut()
        }
        None => core::ptr::null_mut(),
    };
    LEDGER.store(joined, Ordering::Release);
}

/// Counts one MADV_HUGEPAGE over `length` bytes, and its result.
pub(crate) fn advised(length: usize, refused: Option<Errno>) {
    let slot = slot();
    match refused {
        None => Slot::add(&slot.advised, length as u64),
        Some(errno) => {
            Slot::add(&slot.refused, length as u64);
            slot.refused_errno.store(
                errno.raw_os_error().unsigned_abs().into(),
                Ordering::Relaxed,
            );
        }
    }
}

/// Counts one successful MADV_COLLAPSE.
pub(crate) fn collapsed(length: usize) {
    Slot::add(&slot().collapsed, length as u64);
}

/// Sets the live bytes, and raises the peak.
pub(crate) fn live(bytes: u64) {
    let slot = slot();
    slot.large_live.store(bytes, Ordering::Relaxed);
    // The caller holds the heap's lock: no other thread raises the peak.
    if slot.large_peak.load(Ordering::Relaxed) < bytes {
        slot.large_peak.store(bytes, Ordering::Relaxed);
    }
}
