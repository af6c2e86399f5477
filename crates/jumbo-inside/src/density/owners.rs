//! Selects the process that scans a shared mapping: [`Owner`].
//!
//! Forked processes inherit a mapping. One of them scans it: the process in the mapping's word, on
//! a page that they share, too.
#![expect(unsafe_code, reason = "maps a page, and refers to its words")]

use core::ptr::with_exposed_provenance;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Pid, test_kill_process};

use super::RANGES;
use super::table::PAGE_BYTES;
use crate::sandbox;
use crate::sync::{millis, now};
use crate::watch::{MAX_WAIT, program};
use jumbo_sys::map_own;

/// Page by which the processes that share mappings agree on their owners.
#[derive(Debug)]
#[repr(C)]
struct OwnerPage {
    /// Time of the last thread made for a mapping without an owner, and their number.
    attempt_millis: AtomicU64,
    attempts: AtomicU32,
    has_holes: AtomicU32,
    /// Owner of each mapping, 0: none. Upper half: process ID; lower half: second of its claim.
    owners: [AtomicU64; MAX_OWNERS],
}
const MAX_OWNERS: usize = 500;
const _: () = assert!(size_of::<OwnerPage>() <= PAGE_BYTES);

/// Page of this process, and the process that mapped it. A forked child maps its own.
static OWN_PAGE: AtomicUsize = AtomicUsize::new(0);
static OWN_PAGE_PROCESS: AtomicI32 = AtomicI32::new(0);
static ASSIGNED_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Time without a claim after which a process owns nothing.
const OWNER_TIMEOUT_SECONDS: u64 = 3 * MAX_WAIT.as_secs();
/// Maximum time between two threads made for mappings without an owner.
const MAX_RETRY_MILLIS: u64 = 4000;

/// Address of a mapping's word in an [`OwnerPage`]; 0: no owner needed.
#[derive(Debug)]
pub(super) struct Owner(AtomicUsize);

impl Owner {
    pub(super) const fn none() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Assigns a word to a new mapping, if there is a page ([`has_page`]).
    pub(super) fn assign(&self) {
        let Some(page) = own_page() else { return };
        // Words wrap around; few programs make so many mappings.
        let index = ASSIGNED_COUNT.fetch_add(1, Ordering::Relaxed) % MAX_OWNERS;
        let word = page.owners.get(index).map(core::ptr::from_ref);
        let word = word.map_or(0, <*const _>::expose_provenance);
        self.0.store(word, Ordering::Relaxed);
    }

    pub(super) fn copy(&self, from: &Self) {
        self.0
            .store(from.0.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(super) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    fn word(&self) -> Option<&'static AtomicU64> {
        let word = with_exposed_provenance::<AtomicU64>(self.0.load(Ordering::Relaxed));
        // SAFETY: null, or a word of an owner page, which is never unmapped.
        unsafe { word.as_ref() }
    }

    fn page(&self) -> Option<&'static OwnerPage> {
        page_at(self.0.load(Ordering::Relaxed) & !(PAGE_BYTES - 1))
    }

    /// Reports whether a process that shares the mapping may have punched a hole in it.
    pub(super) fn has_holes(&self) -> bool {
        let is_punched = |page: &OwnerPage| page.has_holes.load(Ordering::Relaxed) != 0;
        self.page().is_none_or(is_punched)
    }

    /// Claims or renews ownership; true if this process is the owner.
    pub(super) fn claim(&self) -> bool {
        let Some(word) = self.word() else {
            return false;
        };
        let owner = word.load(Ordering::Relaxed);
        let mine = u64::from(program().unsigned_abs()) << 32 | seconds();
        (owner >> 32 == mine >> 32 || is_free(owner))
            && word
                .compare_exchange(owner, mine, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Releases ownership. Makes no call under a filter, which may kill for getpid(2); the word of
    /// a dead process is free anyway.
    pub(super) fn release(&self) {
        if let Some(word) = self.word()
            && !sandbox::is_entered()
        {
            let owner = word.load(Ordering::Relaxed);
            if owner >> 32 == u64::from(program().unsigned_abs()) {
                let _ = word.compare_exchange(owner, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    fn is_missing(&self) -> bool {
        let is_free = |word: &AtomicU64| is_free(word.load(Ordering::Relaxed));
        self.word().is_some_and(is_free)
    }
}

/// Reports whether a word has no living owner: empty, a dead process, or one silent for so long
/// that its ID may be reused.
fn is_free(owner: u64) -> bool {
    let process = i32::try_from(owner >> 32).ok().and_then(Pid::from_raw);
    let Some(process) = process else { return true };
    let silent = seconds().saturating_sub(owner & u64::from(u32::MAX));
    silent > OWNER_TIMEOUT_SECONDS || test_kill_process(process) == Err(Errno::SRCH)
}

fn seconds() -> u64 {
    now().as_secs() & u64::from(u32::MAX)
}

fn page_at(page: usize) -> Option<&'static OwnerPage> {
    // SAFETY: null, or a zeroed page that was mapped for this use and is never unmapped.
    unsafe { with_exposed_provenance::<OwnerPage>(page).as_ref() }
}

fn own_page() -> Option<&'static OwnerPage> {
    page_at(OWN_PAGE.load(Ordering::Acquire))
}

/// Maps the page of this process, which forked children share, once; false on failure.
pub(super) fn has_page() -> bool {
    if OWN_PAGE_PROCESS.load(Ordering::Relaxed) == program() {
        return true;
    }
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    let Ok(page) = map_own(PAGE_BYTES, prot, flags) else {
        return false;
    };
    OWN_PAGE.store(page.expose_provenance(), Ordering::Release);
    ASSIGNED_COUNT.store(0, Ordering::Relaxed);
    OWN_PAGE_PROCESS.store(program(), Ordering::Relaxed);
    true
}

/// Notes a hole punched in memory that may be shared: blocks with holes are no longer collapsed.
#[inline(always)]
pub(super) fn punched() {
    if super::has_ranges() {
        for page in RANGES.slots().filter_map(|slot| slot.note.owner.page()) {
            page.has_holes.store(1, Ordering::Relaxed);
        }
    }
}

pub(super) fn release_all() {
    if super::has_ranges() {
        RANGES.slots().for_each(|slot| slot.note.owner.release());
    }
}

/// Reports whether a mapping without an owner is due for an attempt, at doubling intervals.
pub(super) fn is_neglected() -> bool {
    let Some(page) = own_page() else {
        return false;
    };
    let now = millis(now());
    let attempted = page.attempt_millis.load(Ordering::Relaxed);
    let attempts = page.attempts.load(Ordering::Relaxed).min(10);
    if now.saturating_sub(attempted) < (10 << attempts).min(MAX_RETRY_MILLIS) {
        return false;
    }
    let is_neglected = RANGES.each().any(|(slot, _)| slot.note.owner.is_missing());
    if is_neglected {
        page.attempt_millis.store(now, Ordering::Relaxed);
        page.attempts.fetch_add(1, Ordering::Relaxed);
    }
    is_neglected
}
