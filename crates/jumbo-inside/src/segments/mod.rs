//! The program's own text on huge pages, and its data and bss: [`start`].
//!
//! Methods, in order, for each executable mapping of at least a PMD of the program and of the
//! configured libraries:
//!
//! 1. the mapping is PMD-mapped: nothing to do;
//! 2. the file's own mapping (*file*): where addresses and file offsets are congruent, the page
//!    cache maps its huge folios by PMDs. The mapping is advised, so an uncached file is read into
//!    huge folios; `jumbo files prime` and `jumbo text align` do the rest. It costs no memory,
//!    serves all processes, and tools see the file;
//! 3. a *shared* image ([`image`]): one copy for all processes of the user that run the file;
//! 4. unchanged.
//!
//! Advice is given at the start. `auto` pays for a copy only in a program that has used enough CPU
//! time and touched enough text (`scan`, on the thread of [`crate::watch`]).
//!
//! Text with a written page (relocations, breakpoints, a probe, a program that patches itself)
//! stays in place. A move is one system call, so a thread finds either the old mapping or the new
//! one, with the same bytes; nothing is writable and executable at once.
//!
//! Data is copied while the process has one thread, and bss is advised (`data`).
//!
//! Invariant: a mapping that replaces text holds the same bytes.

mod data;
mod find;
mod guard;
mod headers;
pub mod image;
mod memory;
mod scan;
#[cfg(test)]
#[expect(unsafe_code, reason = "runs code that it has mapped")]
mod tests;

pub use headers::Program;

use core::ops::Range;
use core::sync::atomic::Ordering;

use find::{Segment, Segments};
use rustix::process::{Resource, getrlimit};

use crate::events::Mechanism;
use crate::ledger::{Slot, stats, text_reason as reason};
use crate::orders::{DataMode, TextMode};
use crate::sync::now;
use crate::watch::{Stop, Stopped};
use crate::{headroom, sandbox};
use jumbo_sys::{Pagemap, Pages};

/// Configuration of [`start`].
#[derive(Clone, Copy, Debug)]
pub struct SegmentSettings {
    /// Mode of text.
    pub mode: TextMode,
    /// Mode of data and bss.
    pub data: DataMode,
    /// Copy of [`crate::orders::Orders::libs`].
    pub libs: Option<&'static str>,
    /// The PMD size.
    pub pmd: usize,
    /// The program that the kernel loaded.
    pub program: Program,
    /// An address in each file whose text must stay in place.
    pub fixed: [usize; 2],
}

impl SegmentSettings {
    fn find(&self) -> Option<Segments> {
        find::find(self.program.entry, &self.fixed, self.libs, self.pmd)
    }
}

/// Minimum touched text for a copy: no program was faster with less.
const MIN_TOUCHED_BYTES: usize = 32 << 20;

/// Advises and moves segments, and leaves the rest to a background scan.
///
/// # Safety
/// No other thread runs, and `settings` has the address of the program's headers.
#[expect(unsafe_code, reason = "reads headers, moves memory")]
pub unsafe fn start(settings: &'static SegmentSettings) {
    let pmd = settings.pmd;
    // SAFETY: the caller's promise.
    let Some(layout) = (unsafe { settings.program.layout() }) else {
        return;
    };
    if settings.data != DataMode::Off {
        // SAFETY: the caller's promise.
        unsafe { data::start(&layout, settings.data, pmd) };
    }
    if settings.mode == TextMode::Off {
        return;
    }
    let (mut has_text, mut shareable) = (false, 0);
    for text in layout.text() {
        if find::blocks(&text.range, pmd).is_empty() {
            continue;
        }
        Slot::add(&stats::slot().text, text.range.len() as u64);
        has_text = true;
        if text.is_shareable(pmd) {
            shareable = shareable.max(text.range.len());
        }
        if text.is_congruent(pmd) {
            let _ = memory::advise(&text.range);
        } else {
            record_reason(reason::NOT_CONGRUENT);
        }
    }
    let has_libs = settings.libs.is_some();
    let move_now = settings.mode == TextMode::Shared && has_text;
    if (move_now || has_libs)
        && let Some(found) = settings.find()
    {
        let is_program =
            |segment: &Segment| layout.text().any(|text| text.range == segment.range());
        for library in found.iter().filter(|segment| !is_program(segment)) {
            Slot::add(&stats::slot().text, library.len() as u64);
            if library.is_congruent(pmd) {
                let _ = memory::advise(&library.range());
            }
        }
        if settings.mode != TextMode::Auto && settings.mode != TextMode::File {
            move_all(&found, settings, &Stop::never(), false);
        }
    }
    // Libraries may be loaded later.
    let scans = match settings.mode {
        TextMode::Auto => shareable >= MIN_TOUCHED_BYTES || has_libs,
        TextMode::Shared => has_libs,
        TextMode::File | TextMode::Off => false,
    };
    if scans {
        if let Some(found) = settings.find() {
            let may_move = |segment: &&Segment| {
                segment.is_shareable(pmd) && segment.len() >= MIN_TOUCHED_BYTES
            };
            found.iter().filter(may_move).for_each(image::reserve);
        }
        scan::begin(settings);
    }
}

/// Moves each segment by the best available method; true if one may be moved later. With `evidence`
/// only those that the program has touched enough.
fn move_all(found: &Segments, settings: &SegmentSettings, stop: &Stop, evidence: bool) -> bool {
    if sandbox::is_entered() {
        record_reason(reason::FILTER);
        return false;
    }
    let Ok(pagemap) = Pagemap::open() else {
        record_reason(reason::UNKNOWN);
        return false;
    };
    let mut later = false;
    for segment in found.iter() {
        match move_one(segment, &pagemap, settings, stop, evidence) {
            Ok(()) => {}
            Err(reason::NOT_YET) => later = true,
            Err(why) => record_reason(why),
        }
    }
    later
}

fn move_one(
    segment: &Segment,
    pagemap: &Pagemap,
    settings: &SegmentSettings,
    stop: &Stop,
    evidence: bool,
) -> Result<(), u32> {
    let pmd = settings.pmd;
    check(pagemap, segment)?;
    let blocks = segment.blocks(pmd);
    if segment.is_congruent(pmd) {
        if !evidence {
            memory::touch(&blocks, pmd);
        }
        let huge = count(pagemap, blocks.clone(), Pages::Huge)?;
        if huge >= blocks.len() / 2 {
            return Ok(());
        }
        record_reason(reason::SMALL_FOLIOS);
    }
    // No other process could share the image's memory.
    if evidence && !segment.is_shareable(pmd) {
        return Err(reason::NOT_CONGRUENT);
    }
    if evidence && count(pagemap, segment.range(), Pages::Present)? < MIN_TOUCHED_BYTES {
        return Err(reason::NOT_YET);
    }
    if !has_room(segment.len()) {
        return Err(reason::NO_MEMORY);
    }
    let start = now();
    let slot = stats::slot();
    let length = segment.len() as u64;
    let moved = image::install(segment, pagemap, pmd, stop).map(|made| {
        slot.text_images
            .fetch_add(u32::from(made), Ordering::Relaxed);
        Slot::add(&slot.text_shared, length);
    });
    let elapsed = u64::try_from(now().saturating_sub(start).as_nanos()).unwrap_or(u64::MAX);
    Slot::add(&slot.text_ns, elapsed);
    moved
}

/// Reports whether jumbo may touch `length` bytes: at a cgroup's limit the touch would trigger the
/// OOM killer.
fn has_room(length: usize) -> bool {
    // A move takes addresses for a moment, which the program could lack.
    let is_limited = |resource| getrlimit(resource).current.is_some();
    if is_limited(Resource::As) || is_limited(Resource::Data) {
        return false;
    }
    // Twice: the program allocates meanwhile.
    headroom::has_room(length.saturating_mul(2))
}

/// Records a reason for text that stays in place.
fn record_reason(why: u32) {
    stats::slot().text_reasons.fetch_or(why, Ordering::Relaxed);
}

/// Counts the bytes of a range whose pages are in a state.
fn count(pagemap: &Pagemap, range: Range<usize>, pages: Pages) -> Result<usize, u32> {
    pagemap.count(range, pages).map_err(|_| reason::UNKNOWN)
}

/// Checks that a segment may be replaced: it is still mapped, and no page of it was written.
fn check(pagemap: &Pagemap, segment: &Segment) -> Result<(), u32> {
    if !segment.is_mapped() {
        return Err(reason::GONE);
    }
    match count(pagemap, segment.range(), Pages::Changed)? {
        0 => Ok(()),
        _ => Err(reason::CHANGED),
    }
}

impl From<Stopped> for u32 {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Ended => reason::ENDED,
            Stopped::NotYet => reason::NOT_YET,
        }
    }
}

/// Events that concern the program's text.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    #[inline(always)]
    fn around_change<T>(call: impl FnOnce() -> T) -> T {
        guard::changing(call)
    }

    #[expect(unsafe_code, reason = "the caller's promise is passed on")]
    unsafe fn is_forked(_pid: u32) {
        // SAFETY: the caller's promise.
        unsafe { guard::forked() };
    }
}
