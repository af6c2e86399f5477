//! A copy of text for this process alone, in anonymous huge pages: [`take`].

use rustix::mm::MprotectFlags;

use super::find::Segment;
use super::guard::alone;
use super::memory::Staging;
use super::{Looking, Stop};
use crate::density::{self, Policy};
use crate::ledger::text_reason as reason;
use crate::proc::Path;
use crate::sys::Pages;

/// Moves a segment onto a copy. The reason where it stays as it is.
pub(super) fn take(
    segment: &Segment,
    looking: &Looking,
    pmd: usize,
    stop: &Stop,
) -> Result<(), u32> {
    let range = segment.range();
    let staging = Staging::reserve(&range, pmd).map_err(|_| reason::NO_MEMORY)?;
    staging.map_anonymous().map_err(|_| reason::NO_MEMORY)?;
    for part in (0..range.len()).step_by(pmd) {
        stop.check()?;
        #[expect(unsafe_code, reason = "reads the program's text")]
        // SAFETY: the area stands in for the range, and was mapped to be written.
        let copied = unsafe { staging.copy(&range, part..range.len().min(part + pmd)) };
        copied.map_err(|_| reason::GONE)?;
    }
    let here = staging.range();
    let blocks = super::find::blocks(&here, pmd);
    let huge = |range| looking.pages(range, Pages::Huge).unwrap_or(0);
    if huge(blocks.clone()) < blocks.len() {
        // Where faults bring none (`never`), a collapse does.
        let _ = density::collapse(&blocks, Policy::Segment);
    }
    if huge(blocks.clone()) < blocks.len() / 2 {
        return Err(reason::NO_HUGE);
    }
    // Never writable and executable at once.
    staging
        .protect(MprotectFlags::READ | MprotectFlags::EXEC)
        .map_err(|_| reason::NOT_EXECUTABLE)?;
    staging.leave_out_of_dumps();
    let mut name = Path::<80>::new();
    if let Ok(file) = core::str::from_utf8(segment.name.bytes())
        && let Some(name) = name.write(format_args!("jumbo text {file}"))
    {
        staging.name(name);
    }
    alone(|| {
        looking.check(segment)?;
        stop.check()?;
        #[expect(unsafe_code, reason = "puts a copy in the place of text")]
        // SAFETY: the segment is mapped as it was, no page of it was changed since it was loaded, no thread changes that, and the area holds
        // a copy.
        unsafe { staging.take_place_of(&range) }.map_err(|_| reason::NO_MEMORY)
    })
}
