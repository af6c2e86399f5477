//! The program's text and data: what [`jumbo_inside::segments`] is told.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;

use jumbo_inside::orders::{DataMode, Orders, TextMode};
use jumbo_inside::segments::{self, Program, SegmentSettings};

/// Written once, by the constructor.
struct Once<T>(UnsafeCell<MaybeUninit<T>>);
// SAFETY: no other thread runs while it is written, and it is only read from then on.
unsafe impl<T> Sync for Once<T> {}

static SETTINGS: Once<SegmentSettings> = Once(UnsafeCell::new(MaybeUninit::uninit()));
static LIBS: Once<[u8; LONGEST]> = Once(UnsafeCell::new(MaybeUninit::uninit()));
/// Longer lists of patterns are not taken by the launcher.
const LONGEST: usize = Orders::MAX_LIBS_BYTES;

/// Does what the orders say.
///
/// # Safety
/// Called by the constructor, once.
pub(crate) unsafe fn begin(orders: &Orders<'_>) {
    if orders.text == TextMode::Off && orders.data == DataMode::Off {
        return;
    }
    let auxiliary = |kind| {
        // SAFETY: getauxval(3) reads what the kernel passed at the start.
        usize::try_from(unsafe { libc::getauxval(kind) }).unwrap_or(0)
    };
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
    // SAFETY: the caller's promise, and the kernel's word for where the headers are. It is static, and not written again.
    unsafe { segments::start((*SETTINGS.0.get()).write(settings)) };
}

/// A copy that stays: programs write over their environment (setproctitle(3)).
///
/// # Safety
/// As for [`begin`].
unsafe fn keep(libs: &str) -> Option<&'static str> {
    // SAFETY: the caller's promise; it is static, and not written again.
    let kept = unsafe { (*LIBS.0.get()).write([0; LONGEST]) };
    let kept = kept.get_mut(..libs.len())?;
    kept.copy_from_slice(libs.as_bytes());
    core::str::from_utf8(kept).ok()
}
