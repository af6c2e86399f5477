//! The program's own text on huge pages, and its data and bss: [`start`].
//!
//! A ladder, for each executable mapping of the program and of the libraries that were asked for, of a PMD at least:
//!
//! 1. it is PMD-mapped: nothing to do;
//! 2. the file's own mapping (*file*): where its addresses are congruent to its place in the file, the page cache maps it by PMDs if
//!    it has it in huge folios. It is advised, which brings it in so where it is not cached yet; `jumbo text prime` and
//!    `jumbo text align` see to the rest. It costs nothing, serves every process and keeps what tools know;
//! 3. a *shared* image ([`image`]): one copy for all processes of the user that run the file;
//! 4. as it is.
//!
//! What costs nothing is done at the start. `auto` pays for a copy only in a program that has lived, and touched so much text that it can
//! gain (`later`): the thread of [`crate::watch`] looks.
//!
//! Text of which a page was written to (relocations, breakpoints, a probe, a program that patches itself) stays where it is. A move
//! is one system call, so that each thread finds either the old mapping or the new one, with the same bytes; nothing is
//! writable and executable at once.
//!
//! Data is copied while the process has one thread, and bss is advised (`data`).
//!
//! Invariant: what is mapped in place of text holds the same bytes.

mod data;
mod find;
mod guard;
mod headers;
pub mod image;
mod later;
mod memory;
#[cfg(test)]
#[expect(unsafe_code, reason = "runs code that it has mapped")]
mod tests;

pub use guard::{changing, forked};
pub use headers::Program;

use core::ops::Range;
use core::sync::atomic::Ordering;

use find::{Found, Segment};
use rustix::process::{Resource, getrlimit};

use crate::events::Mechanism;
use crate::ledger::{Slot, stats, text_reason as reason};
use crate::orders::{DataMode, TextMode};
use crate::sync::now;
use crate::sys::{Pagemap, Pages};
use crate::watch::{Stop, Stopped};
use crate::{headroom, sandbox};

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// For text.
    pub mode: TextMode,
    /// For data and bss.
    pub data: DataMode,
    /// Libraries: see [`crate::orders::Orders::libs`].
    pub libs: Option<&'static str>,
    /// The PMD size.
    pub pmd: usize,
    /// What the kernel loaded.
    pub program: Program,
    /// An address in each file whose text has to stay.
    pub fixed: [usize; 2],
}

impl Settings {
    fn find(&self) -> Option<Found> {
        find::find(self.program.entry, &self.fixed, self.libs, self.pmd)
    }
}

/// How much text a program has to have touched before a copy of it is worth while: below that none was faster for it.
const WORTH: usize = 32 << 20;

/// Does what can be done at the start, and leaves the rest to a thread that looks later.
///
/// # Safety
/// No other thread runs, and the program's headers are where `settings` say.
#[expect(unsafe_code, reason = "reads headers, moves memory")]
pub unsafe fn start(settings: &'static Settings) {
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
    let (mut most, mut shareable) = (0, 0);
    for text in layout.text() {
        let blocks = find::blocks(&text.range, pmd);
        if blocks.is_empty() {
            continue;
        }
        Slot::add(&stats::slot().text, text.range.len() as u64);
        most = most.max(text.range.len());
        if text.is_alike_everywhere(pmd) {
            shareable = shareable.max(text.range.len());
        }
        if text.is_congruent(pmd) {
            let _ = memory::advise(&text.range);
        } else {
            because(reason::NOT_CONGRUENT);
        }
    }
    let has_libs = settings.libs.is_some();
    let at_once = settings.mode == TextMode::Shared && most > 0;
    if (at_once || has_libs)
        && let Some(found) = settings.find()
    {
        let program = |segment: &Segment| layout.text().any(|text| text.range == segment.range());
        for library in found.iter().filter(|segment| !program(segment)) {
            Slot::add(&stats::slot().text, library.len() as u64);
            if library.is_congruent(pmd) {
                let _ = memory::advise(&library.range());
            }
        }
        if settings.mode != TextMode::Auto && settings.mode != TextMode::File {
            move_all(&found, settings, &Stop::never(), false);
        }
    }
    // Libraries that are loaded later come on huge pages later.
    let later = match settings.mode {
        TextMode::Auto => shareable >= WORTH || has_libs,
        TextMode::Shared => has_libs,
        TextMode::File | TextMode::Off => false,
    };
    if later {
        if let Some(found) = settings.find() {
            let worth =
                |segment: &&Segment| segment.is_alike_everywhere(pmd) && segment.len() >= WORTH;
            found.iter().filter(worth).for_each(image::reserve);
        }
        later::begin(settings);
    }
}

/// Takes each segment as far up the ladder as it goes; true where there is one that may be moved later. With `evidence` those
/// alone that the program has shown to be worth it.
fn move_all(found: &Found, settings: &Settings, stop: &Stop, evidence: bool) -> bool {
    if sandbox::is_entered() {
        because(reason::FILTER);
        return false;
    }
    let Ok(looking) = Looking::open() else {
        because(reason::UNKNOWN);
        return false;
    };
    let mut later = false;
    for segment in found.iter() {
        match climb(segment, &looking, settings, stop, evidence) {
            Ok(()) => {}
            Err(reason::NOT_YET) => later = true,
            Err(why) => because(why),
        }
    }
    later
}

fn climb(
    segment: &Segment,
    looking: &Looking,
    settings: &Settings,
    stop: &Stop,
    evidence: bool,
) -> Result<(), u32> {
    let pmd = settings.pmd;
    looking.check(segment)?;
    let blocks = segment.blocks(pmd);
    if segment.is_congruent(pmd) {
        if !evidence {
            memory::touch(&blocks, pmd);
        }
        let huge = looking.pages(blocks.clone(), Pages::Huge)?;
        if huge >= blocks.len() / 2 {
            return Ok(());
        }
        because(reason::SMALL_FOLIOS);
    }
    // An image of it would be this process's alone, and its memory a price that others do not share.
    if evidence && !segment.is_alike_everywhere(pmd) {
        return Err(reason::NOT_CONGRUENT);
    }
    if evidence && looking.pages(segment.range(), Pages::Present)? < WORTH {
        return Err(reason::NOT_YET);
    }
    if !has_room(segment.len()) {
        return Err(reason::NO_MEMORY);
    }
    let began = now();
    let slot = stats::slot();
    let length = segment.len() as u64;
    let moved = image::take(segment, looking, pmd, stop).map(|made| {
        slot.text_images
            .fetch_add(u32::from(made), Ordering::Relaxed);
        Slot::add(&slot.text_shared, length);
    });
    let took = u64::try_from(now().saturating_sub(began).as_nanos()).unwrap_or(u64::MAX);
    Slot::add(&slot.text_ns, took);
    moved
}

/// Whether so much memory can be touched that the program did not touch: at a cgroup's limit that fails for nothing but kills.
fn has_room(length: usize) -> bool {
    // Twice: the program goes on to allocate meanwhile.
    let wanted = length.saturating_mul(2);
    // The program could miss the addresses that a move takes for a moment.
    let is_limited = |resource| getrlimit(resource).current.is_some();
    if is_limited(Resource::As) || is_limited(Resource::Data) {
        return false;
    }
    headroom::has_room(wanted)
}

/// Writes down why there is not more.
fn because(why: u32) {
    stats::slot().text_reasons.fetch_or(why, Ordering::Relaxed);
}

/// What can be asked about the mappings of this process.
#[derive(Debug)]
struct Looking {
    pagemap: Pagemap,
}

impl Looking {
    fn open() -> rustix::io::Result<Self> {
        Pagemap::open().map(|pagemap| Self { pagemap })
    }

    fn pages(&self, range: Range<usize>, pages: Pages) -> Result<usize, u32> {
        self.pagemap
            .count(range, pages)
            .map_err(|_| reason::UNKNOWN)
    }

    /// The reason why a segment may not be replaced, if there is one.
    fn check(&self, segment: &Segment) -> Result<(), u32> {
        if !segment.is_there() {
            return Err(reason::GONE);
        }
        match self.pages(segment.range(), Pages::Changed)? {
            0 => Ok(()),
            _ => Err(reason::CHANGED),
        }
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

/// The events that concern the program's text.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    #[inline(always)]
    fn around_change<T>(call: impl FnOnce() -> T) -> T {
        changing(call)
    }

    #[expect(unsafe_code, reason = "the caller's promise is passed on")]
    unsafe fn is_forked(_pid: u32) {
        // SAFETY: the caller's promise.
        unsafe { guard::forked() };
    }
}
