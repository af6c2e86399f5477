//! The shared mappings that are looked after: [`REGIONS`]; and which of the processes that share one does it: [`Region::claim`].
//!
//! A mapping that the program makes is inherited by the processes that it forks. One of them is enough to look after it: the
//! one whose word stands in a page that they share as well.

use core::ops::Range;
use core::ptr::{null_mut, with_exposed_provenance};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::io::Errno;
use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::process::{Pid, test_kill_process};

use crate::sandbox;
use crate::sync::now;
use crate::watch::LONGEST;

/// A mapping.
#[derive(Debug)]
pub(super) struct Region {
    /// Its first address; 0: none.
    start: AtomicUsize,
    length: AtomicUsize,
    /// The address of its [`AtomicU64`] among the notes.
    note: AtomicUsize,
    /// When it was mapped: [`now`], in milliseconds.
    born: AtomicU64,
    /// Some of its pages may be missing from a block that is collapsed.
    lax: AtomicBool,
    /// Up to where blocks were counted, where the kernel does not say which are huge.
    pub(super) counted: AtomicUsize,
    /// Where the next look begins.
    pub(super) next: AtomicUsize,
}

/// More than that are left to the kernel.
pub(super) static REGIONS: [Region; 64] = [const { Region::new() }; 64];
/// Whether there were any.
static SOME: AtomicBool = AtomicBool::new(false);

/// What processes that share a mapping tell each other, in a page that they share.
#[derive(Debug)]
#[repr(C)]
struct Notes {
    /// A thread was made, the last time at so many milliseconds of [`now`]; how often.
    tried: AtomicU64,
    tries: AtomicU32,
    /// A hole was punched, by one of them.
    punched: AtomicU32,
    /// Whose each mapping is, the process in the upper half and in the lower the second in which it last said so; 0: no process's.
    owners: [AtomicU64; OWNERS],
}
const OWNERS: usize = 500;
const PAGE: usize = 4096;
const _: () = assert!(size_of::<Notes>() <= PAGE);

/// The notes of this process, and which process that is: a forked child makes its own for what it maps itself.
static NOTES: AtomicUsize = AtomicUsize::new(0);
static MAKER: AtomicU32 = AtomicU32::new(0);
/// So many words were given out.
static GIVEN: AtomicUsize = AtomicUsize::new(0);

/// A process that has said nothing for so long looks after nothing.
const SILENT: u64 = 3 * LONGEST.as_secs();
/// The most between two threads that are made for what is not looked after, in milliseconds.
const TRIES: u64 = 4000;

impl Region {
    const fn new() -> Self {
        Self {
            start: AtomicUsize::new(0),
            length: AtomicUsize::new(0),
            note: AtomicUsize::new(0),
            born: AtomicU64::new(0),
            lax: AtomicBool::new(false),
            counted: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
        }
    }

    /// Its address and length.
    pub(super) fn range(&self) -> Option<(usize, usize)> {
        let length = self.length.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        (length != 0).then_some((start, length))
    }

    /// How long it has been there.
    pub(super) fn age(&self) -> Duration {
        let born = Duration::from_millis(self.born.load(Ordering::Relaxed));
        now().saturating_sub(born)
    }

    /// Whether pages may be missing from a block of it: not of memory that has a name, in which another program may have punched a
    /// hole; and not where the program or one that shares it has.
    pub(super) fn is_lax(&self) -> bool {
        let note = self.note.load(Ordering::Relaxed);
        let notes = notes_at(note & !(PAGE - 1));
        let has_holes = notes.is_none_or(|notes| notes.punched.load(Ordering::Relaxed) != 0);
        self.lax.load(Ordering::Relaxed) && !has_holes
    }

    /// A part of it is unmapped: what is left of it goes on, the larger end.
    fn cut(&self, (start, length): (usize, usize), cut: Range<usize>) {
        let (before, after) = (
            start..cut.start.max(start),
            cut.end.min(start + length)..start + length,
        );
        let left = if before.len() >= after.len() {
            before
        } else {
            after
        };
        if left.is_empty() {
            return self.forget();
        }
        self.length.store(0, Ordering::Relaxed);
        self.start.store(left.start, Ordering::Relaxed);
        self.length.store(left.len(), Ordering::Release);
    }

    /// It is looked after no more, by this process.
    pub(super) fn forget(&self) {
        self.length.store(0, Ordering::Relaxed);
        // A filter may end who asks for its number. No process looks for the word of one that is gone.
        if !sandbox::is_entered() {
            self.release(process());
        }
        self.start.store(0, Ordering::Release);
    }

    #[expect(unsafe_code, reason = "an atomic reference has no safe form in core")]
    fn owner(&self) -> Option<&'static AtomicU64> {
        let note = with_exposed_provenance::<AtomicU64>(self.note.load(Ordering::Relaxed));
        // SAFETY: null, or a word of a page of notes, which is never unmapped.
        unsafe { note.as_ref() }
    }

    /// Whether this process looks after it, or does from now on.
    pub(super) fn claim(&self) -> bool {
        let Some(word) = self.owner() else {
            return false;
        };
        let owner = word.load(Ordering::Relaxed);
        let mine = u64::from(process()) << 32 | seconds();
        (owner >> 32 == mine >> 32 || is_free(owner))
            && word
                .compare_exchange(owner, mine, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    fn release(&self, process: u32) {
        if let Some(word) = self.owner() {
            let owner = word.load(Ordering::Relaxed);
            if owner >> 32 == u64::from(process) {
                let _ = word.compare_exchange(owner, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }
}

/// Whether the process of that word looks after nothing: none, one that is gone, or one that went without a word and whose
/// number another has.
fn is_free(owner: u64) -> bool {
    let process = i32::try_from(owner >> 32).ok().and_then(Pid::from_raw);
    let Some(process) = process else { return true };
    let silent = seconds().saturating_sub(owner & u64::from(u32::MAX));
    silent > SILENT || test_kill_process(process) == Err(Errno::SRCH)
}

fn seconds() -> u64 {
    now().as_secs() & u64::from(u32::MAX)
}

fn process() -> u32 {
    rustix::process::getpid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs()
}

fn notes() -> Option<&'static Notes> {
    notes_at(NOTES.load(Ordering::Acquire))
}

#[expect(unsafe_code, reason = "an atomic reference has no safe form in core")]
fn notes_at(page: usize) -> Option<&'static Notes> {
    // SAFETY: null, or a page that was mapped for them, of zeroes then, and is never unmapped.
    unsafe { with_exposed_provenance::<Notes>(page).as_ref() }
}

/// A page that forked children share.
fn make_notes() -> Option<&'static Notes> {
    if MAKER.load(Ordering::Relaxed) != process() {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        #[expect(unsafe_code, reason = "maps memory")]
        // SAFETY: a new mapping, where the kernel likes, replaces none.
        let page = unsafe { mm::mmap_anonymous(null_mut(), PAGE, prot, flags) }.ok()?;
        NOTES.store(page.expose_provenance(), Ordering::Release);
        GIVEN.store(0, Ordering::Relaxed);
        MAKER.store(process(), Ordering::Relaxed);
    }
    notes()
}

/// Has a mapping looked after; false where there are too many. `lax`: see [`Region::is_lax`].
pub(super) fn add(address: usize, length: usize, lax: bool) -> bool {
    let Some(notes) = make_notes() else {
        return false;
    };
    let free = REGIONS.iter().find(|region| {
        let take = region
            .start
            .compare_exchange(0, address, Ordering::Acquire, Ordering::Relaxed);
        take.is_ok()
    });
    let Some(region) = free else { return false };
    // Few programs make so many that a word would be another mapping's again.
    let given = GIVEN.fetch_add(1, Ordering::Relaxed) % OWNERS;
    if let Some(word) = notes.owners.get(given) {
        let word = core::ptr::from_ref(word).expose_provenance();
        region.note.store(word, Ordering::Relaxed);
    }
    let born = u64::try_from(now().as_millis()).unwrap_or(u64::MAX);
    region.born.store(born, Ordering::Relaxed);
    region.lax.store(lax, Ordering::Relaxed);
    region.counted.store(0, Ordering::Relaxed);
    region.next.store(0, Ordering::Relaxed);
    region.length.store(length, Ordering::Release);
    SOME.store(true, Ordering::Release);
    true
}

/// Whether there was a mapping to look after.
#[inline(always)]
pub(super) fn is_any() -> bool {
    SOME.load(Ordering::Relaxed)
}

/// The program is about to unmap a range, or to map something else there.
#[inline(always)]
pub(super) fn unmapped(address: usize, length: usize) {
    if is_any() {
        forget(address, length);
    }
}

#[cold]
fn forget(address: usize, length: usize) {
    let end = address.saturating_add(length);
    for region in &REGIONS {
        let overlaps =
            |(start, length): &(usize, usize)| *start < end && address < *start + *length;
        match region.range().filter(overlaps) {
            // Of which only the first address is known.
            Some(_) if length <= 1 => region.forget(),
            Some(range) => region.cut(range, address..end),
            None => {}
        }
    }
}

/// The program has punched a hole in memory, which may be shared: blocks with holes are left alone from now on.
#[inline(always)]
pub fn punched() {
    if is_any() {
        for region in &REGIONS {
            let note = region.note.load(Ordering::Relaxed);
            if let Some(notes) = notes_at(note & !(PAGE - 1)) {
                notes.punched.store(1, Ordering::Relaxed);
            }
        }
    }
}

/// This process looks after nothing from now on.
pub(super) fn release_all() {
    if !is_any() {
        return;
    }
    let process = process();
    REGIONS.iter().for_each(|region| region.release(process));
}

/// Whether a mapping is there that no process looks after, and it is time to try: the more seldom, the more often that was
/// tried.
pub(super) fn is_neglected() -> bool {
    if !is_any() {
        return false;
    }
    let Some(notes) = notes() else { return false };
    let now = u64::try_from(now().as_millis()).unwrap_or(u64::MAX);
    let tried = notes.tried.load(Ordering::Relaxed);
    let tries = notes.tries.load(Ordering::Relaxed).min(10);
    if now.saturating_sub(tried) < (10 << tries).min(TRIES) {
        return false;
    }
    let neglected = REGIONS.iter().any(|region| {
        region.range().is_some()
            && region
                .owner()
                .is_some_and(|owner| is_free(owner.load(Ordering::Relaxed)))
    });
    if neglected {
        notes.tried.store(now, Ordering::Relaxed);
        notes.tries.fetch_add(1, Ordering::Relaxed);
    }
    neglected
}

/// Between two looks of a process that has nothing to do.
pub(super) const SELDOM: Duration = LONGEST;
