//! Which of the processes that share a mapping scans it: [`Owner`].
//!
//! A mapping that the program makes is inherited by the processes that it forks. One of them is
//! enough to scan it: the one whose word stands in a page that they share as well.
#![expect(unsafe_code, reason = "maps a page, and refers to words in it")]

use core::ptr::{null_mut, with_exposed_provenance};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::process::{Pid, test_kill_process};

use super::RANGES;
use super::table::PAGE_BYTES;
use crate::sandbox;
use crate::sync::{millis, now};
use crate::sys::process;
use crate::watch::LONGEST;

/// The words by which processes that share a mapping tell each other, in a page that they share.
#[derive(Debug)]
#[repr(C)]
struct Notes {
    /// When a thread was last made for a mapping without an owner, in milliseconds of [`now`]; how
    /// often.
    tried: AtomicU64,
    tries: AtomicU32,
    /// A hole was punched, by one of them.
    punched: AtomicU32,
    /// The owner of each mapping: the process in the upper half, and in the lower the second in
    /// which it last said so. 0: none.
    owners: [AtomicU64; MAX_OWNERS],
}
const MAX_OWNERS: usize = 500;
const _: () = assert!(size_of::<Notes>() <= PAGE_BYTES);

/// The notes of this process, and which process that is: a forked child makes its own for what it
/// maps itself.
static NOTES: AtomicUsize = AtomicUsize::new(0);
static MAKER: AtomicI32 = AtomicI32::new(0);
/// How many words were given out.
static GIVEN: AtomicUsize = AtomicUsize::new(0);

/// A process that has said nothing for so long owns nothing.
const SILENT_SECONDS: u64 = 3 * LONGEST.as_secs();
/// The most between two threads that are made for mappings without an owner.
const MAX_RETRY_MILLIS: u64 = 4000;

/// The address of a mapping's word among the notes; 0 where no process has to own it.
#[derive(Debug)]
pub(super) struct Owner(AtomicUsize);

impl Owner {
    pub(super) const fn none() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Takes a word for a new mapping, where [`are_known`].
    pub(super) fn assign(&self) {
        let Some(notes) = own_notes() else { return };
        // Few programs make so many that a word would be another mapping's again.
        let given = GIVEN.fetch_add(1, Ordering::Relaxed) % MAX_OWNERS;
        let word = notes.owners.get(given).map(core::ptr::from_ref);
        let word = word.map_or(0, <*const _>::expose_provenance);
        self.0.store(word, Ordering::Relaxed);
    }

    pub(super) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    fn word(&self) -> Option<&'static AtomicU64> {
        let word = with_exposed_provenance::<AtomicU64>(self.0.load(Ordering::Relaxed));
        // SAFETY: null, or a word of a page of notes, which is never unmapped.
        unsafe { word.as_ref() }
    }

    fn notes(&self) -> Option<&'static Notes> {
        notes_at(self.0.load(Ordering::Relaxed) & !(PAGE_BYTES - 1))
    }

    /// Whether the program, or one that shares the mapping, may have punched a hole in it.
    pub(super) fn has_holes(&self) -> bool {
        let is_punched = |notes: &Notes| notes.punched.load(Ordering::Relaxed) != 0;
        self.notes().is_none_or(is_punched)
    }

    /// Whether this process is the owner, or is from now on.
    pub(super) fn claim(&self) -> bool {
        let Some(word) = self.word() else {
            return false;
        };
        let owner = word.load(Ordering::Relaxed);
        let mine = u64::from(process().unsigned_abs()) << 32 | seconds();
        (owner >> 32 == mine >> 32 || is_free(owner))
            && word
                .compare_exchange(owner, mine, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Gives it up, where this process is the owner. A filter may end a program that asks for its
    /// number; and no process looks for the word of one that is gone.
    pub(super) fn release(&self) {
        if let Some(word) = self.word()
            && !sandbox::is_entered()
        {
            let owner = word.load(Ordering::Relaxed);
            if owner >> 32 == u64::from(process().unsigned_abs()) {
                let _ = word.compare_exchange(owner, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    fn is_missing(&self) -> bool {
        let is_free = |word: &AtomicU64| is_free(word.load(Ordering::Relaxed));
        self.word().is_some_and(is_free)
    }
}

/// Whether the process of a word owns nothing: none, one that is gone, or one that went without a
/// word and whose number another has.
fn is_free(owner: u64) -> bool {
    let process = i32::try_from(owner >> 32).ok().and_then(Pid::from_raw);
    let Some(process) = process else { return true };
    let silent = seconds().saturating_sub(owner & u64::from(u32::MAX));
    silent > SILENT_SECONDS || test_kill_process(process) == Err(Errno::SRCH)
}

fn seconds() -> u64 {
    now().as_secs() & u64::from(u32::MAX)
}

fn notes_at(page: usize) -> Option<&'static Notes> {
    // SAFETY: null, or a page that was mapped for them, of zeroes then, and is never unmapped.
    unsafe { with_exposed_provenance::<Notes>(page).as_ref() }
}

fn own_notes() -> Option<&'static Notes> {
    notes_at(NOTES.load(Ordering::Acquire))
}

/// Whether this process has a page of notes, which the children that it forks share: mapped here,
/// once.
pub(super) fn are_known() -> bool {
    if MAKER.load(Ordering::Relaxed) == process() {
        return true;
    }
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping, where the kernel likes, replaces none.
    let Ok(page) = (unsafe { mm::mmap_anonymous(null_mut(), PAGE_BYTES, prot, flags) }) else {
        return false;
    };
    NOTES.store(page.expose_provenance(), Ordering::Release);
    GIVEN.store(0, Ordering::Relaxed);
    MAKER.store(process(), Ordering::Relaxed);
    true
}

/// The program has punched a hole in memory, which may be shared: blocks with holes are left alone
/// from now on.
#[inline(always)]
pub(super) fn punched() {
    if super::is_any() {
        for notes in RANGES.slots().filter_map(|slot| slot.note.owner.notes()) {
            notes.punched.store(1, Ordering::Relaxed);
        }
    }
}

/// This process owns nothing from now on.
pub(super) fn release_all() {
    if super::is_any() {
        RANGES.slots().for_each(|slot| slot.note.owner.release());
    }
}

/// Whether a mapping is there that no process owns, and it is time to try: the more seldom, the
/// more often that was tried.
pub(super) fn is_neglected() -> bool {
    let Some(notes) = own_notes() else {
        return false;
    };
    let now = millis(now());
    let tried = notes.tried.load(Ordering::Relaxed);
    let tries = notes.tries.load(Ordering::Relaxed).min(10);
    if now.saturating_sub(tried) < (10 << tries).min(MAX_RETRY_MILLIS) {
        return false;
    }
    let is_neglected = RANGES.each().any(|(slot, _)| slot.note.owner.is_missing());
    if is_neglected {
        notes.tried.store(now, Ordering::Relaxed);
        notes.tries.fetch_add(1, Ordering::Relaxed);
    }
    is_neglected
}
