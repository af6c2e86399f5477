//! Freed memory under a block that fits into no free extent: its pages move there.
//!
//! Blocks of many sizes leave free extents that the next block is too large for. To give their memory
//! back and fault it in anew costs a page fault and zeroes for each page. mremap(2) moves whole chunks
//! by their page tables instead, and the process becomes no larger.
//!
//! A piece that has moved is a mapping of its own. So pieces are no smaller than what keeps a heap to
//! [`MAX_MAPPINGS`] of them (vm.max_map_count is 65 530).
#![expect(unsafe_code, reason = "moves memory that is free")]

use core::ops::Range;

use super::Window;
use crate::heap::BASE_PAGE;
use crate::heap::backing::Backing;
use crate::heap::extents::State;
use crate::{density, sandbox, sys};

const MAX_MAPPINGS: usize = 8192;

/// The block has lost its memory, and there is none to map anew.
pub(super) struct Lost;

impl Window {
    /// Moves free memory under the block of so many pages at `page`, which is mapped, and whose
    /// content is of no interest. Returns the bytes that have moved.
    ///
    /// # Errors
    /// [`Lost`]: a part of the block is not mapped any more.
    pub(super) fn recycle(&mut self, page: u32, pages: u32) -> Result<usize, Lost> {
        // Behind a seccomp filter malloc(3) makes no call that glibc's would not make.
        if self.site.backing == Backing::Pool
            || sandbox::is_entered()
            || sandbox::is_entered_later()
        {
            return Ok(0);
        }
        let unit = (self.most_live / MAX_MAPPINGS)
            .next_power_of_two()
            .max(self.pmd);
        let mut to = units(&self.range(page, pages), unit);
        let all = to.len();
        while !to.is_empty() {
            let Some((free, count)) = self.extents.take_largest(State::Dirty) else {
                break;
            };
            self.dirty -= count as usize * BASE_PAGE;
            let mut from = units(&self.range(free, count), unit);
            from.end = from.end.min(from.start + to.len());
            let has_moved = match from.is_empty() {
                true => Ok(false),
                false => self.move_free(&from, to.start),
            };
            if !matches!(has_moved, Ok(true)) {
                self.add_dirty(free, count);
                has_moved?;
                break;
            }
            to.start += from.len();
            self.carve(free, count, &from, Self::add_dirty);
        }
        Ok(all - to.len())
    }

    /// Moves memory that is free to mapped addresses of a block. False where it has not moved.
    fn move_free(&self, from: &Range<usize>, to: usize) -> Result<bool, Lost> {
        let length = from.len();
        // SAFETY: the caller has taken both, nothing uses what they hold, and the heap's lock is held.
        if unsafe { sys::move_units(from.start, to, length, self.pmd) }.is_ok() {
            density::moved(from.start, to, length);
            return Ok(true);
        }
        // What was there before may be unmapped, or a part of it.
        // SAFETY: as above.
        let unmapped = unsafe { self.site.backing.unmap(to, length, None) };
        match unmapped.and_then(|()| self.site.backing.map(to, length)) {
            Ok(_) => Ok(false),
            Err(_) => Err(Lost),
        }
    }
}

fn units(range: &Range<usize>, unit: usize) -> Range<usize> {
    let start = range.start.next_multiple_of(unit);
    start..start.max(range.end & !(unit - 1))
}
