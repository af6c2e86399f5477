//! Configuration of [`jumbo_inside::segments`]: the program's text and data.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;

use jumbo_inside::orders::{DataMode, Orders, TextMode};
use jumbo_inside::segments::{self, Program, SegmentSettings};

use crate::system;

/// Value that the constructor writes once.
struct Once<T>(UnsafeCell<MaybeUninit<T>>);
// SAFETY: no other thread runs during the write, and all later accesses are reads.
unsafe impl<T> Sync for Once<T> {}

static SETTINGS: Once<SegmentSettings> = Once(UnsafeCell::new(MaybeUninit::uninit()));
static LIBS: Once<[u8; Orders::MAX_LIBS_BYTES]> = Once(UnsafeCell::new(MaybeUninit::uninit()));

/// Starts the mechanism as configured.
///
/// # Safety
/// The constructor calls it, once.
pub(crate) unsafe fn start(orders: &Orders<'_>) {
    if orders.text == TextMode::Off && orders.data == DataMode::Off {
        return;
    }
    let auxiliary = |kind| system::auxiliary(kind).map_or(0, |value| value as usize);
    let settings = SegmentSettings {
        mode: orders.text,
        data: orders.data,
        // SAFETY: the caller's promise.
        libs: unsafe { orders.libs.and_then(|libs| keep(libs)) },
        pmd: orders.pmd,
        program: Program {
            headers: auxiliary(libc::AT_PHDR),
            count: auxiliary(libc::AT_PHNUM),
            entry: auxiliary(libc::AT_ENTRY),
        },
        fixed: [keep as *const () as usize, auxiliary(libc::AT_BASE)],
    };
    // SAFETY: the caller's promise; the kernel passed the address of the headers. The settings are
    // static and not written again.
    unsafe { segments::start((*SETTINGS.0.get()).write(settings)) };
}

/// Copies the patterns: programs overwrite their environment (setproctitle(3)).
///
/// # Safety
/// As for [`start`].
unsafe fn keep(libs: &str) -> Option<&'static str> {
    // SAFETY: the caller's promise; the copy is static and not written again.
    let kept = unsafe { (*LIBS.0.get()).write([0; Orders::MAX_LIBS_BYTES]) };
    let kept = kept.get_mut(..libs.len())?;
    kept.copy_from_slice(libs.as_bytes());
    core::str::from_utf8(kept).ok()
}
