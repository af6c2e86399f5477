//! The layout of an aligned copy: [`Layout`]. Pure, except for reading headers.
//!
//! A file is cut where a segment has to move; everything after the cut moves along. So the order of
//! bytes stays, and each offset in a header moves by the shift of its cut.
//!
//! Invariant: no address changes.

use std::ops::Range;

use object::elf::{self, ProgramHeader64, SectionHeader64};
use object::read::elf::{FileHeader as _, SectionHeader as _};
use object::{LittleEndian, ReadRef};

use super::elf::{Header, LE, Segment};
use super::{Error, Sizes};
use crate::units::{Bytes, Pages};

/// The headers of a file.
#[derive(Clone)]
pub(super) struct Headers {
    pub(super) file: Header,
    pub(super) programs: Vec<ProgramHeader64<LittleEndian>>,
    pub(super) sections: Vec<SectionHeader64<LittleEndian>>,
}

/// Headers of the copy, and the moves of its bytes.
pub(super) struct Layout {
    pub(super) headers: Headers,
    /// Offsets in the original, ascending, and the shift of the bytes from there on.
    pub(super) cuts: Vec<(u64, u64)>,
    /// Segments that became a part of adjacent text.
    pub(super) joined: Vec<Segment>,
}

impl Headers {
    pub(super) fn read<'data, R: ReadRef<'data>>(data: R) -> Result<Self, Error> {
        let file = Header::parse(data)?;
        let length = data.len().unwrap_or_default();
        let sections = file.section_headers(LE, data)?.to_vec();
        // Each is compared in the copy, byte by byte.
        for (offset, size) in sections.iter().filter_map(|it| it.file_range(LE)) {
            if offset.checked_add(size).is_none_or(|end| end > length) {
                let why = format!("the section at {offset:#x} ends behind the end of the file");
                return Err(Error::NotElf(why));
            }
        }
        Ok(Self {
            file: *file,
            programs: file.program_headers(LE, data)?.to_vec(),
            sections,
        })
    }

    /// Returns the offsets of the file header and the program headers.
    pub(super) fn places(&self) -> [Range<u64>; 2] {
        let programs = self.file.e_phoff(LE);
        let size = size_of_val(self.programs.as_slice()) as u64;
        [
            0..size_of::<Header>() as u64,
            programs..programs.saturating_add(size),
        ]
    }

    fn is_load(&self, index: usize) -> bool {
        self.programs[index].p_type.get(LE) == elf::PT_LOAD
    }
}

impl Layout {
    /// Makes segments of text congruent that are at least a huge page long. With `join`, or where
    /// the text has no whole huge page otherwise, adjacent read-only segments become a part of it.
    pub(super) fn new(before: &Headers, sizes: Sizes, join: bool) -> Result<Self, Error> {
        let loads: Vec<usize> = (0..before.programs.len())
            .filter(|index| before.is_load(*index))
            .collect();
        let old: Vec<Segment> = before.programs.iter().map(Segment::of).collect();
        let is_text =
            |segment: &Segment| segment.execute && segment.file_size >= Pages(1).bytes(sizes.pmd);
        if !loads.iter().any(|index| is_text(&old[*index])) {
            return Err(Error::Small(sizes.pmd));
        }
        if !loads.is_sorted_by_key(|index| old[*index].address) {
            let why = "its segments are not in the order of their addresses";
            return Err(Error::Layout(why.to_owned()));
        }
        let mut by_offset = loads.clone();
        by_offset.sort_by_key(|index| old[*index].offset);
        let mut layout = Self {
            headers: before.clone(),
            cuts: Vec::new(),
            joined: Vec::new(),
        };
        let [file, programs] = before.places();
        let (mut moved, mut reached) = (0, file.end);
        for index in by_offset {
            let segment = &old[index];
            let pmd = if is_text(segment) {
                sizes.pmd.bytes()
            } else {
                1
            };
            let align = segment.align.max(pmd);
            if !segment.align.max(1).is_power_of_two() {
                let why = format!(
                    "the segment at {:#x} has a p_align of {:#x}",
                    segment.address, segment.align
                );
                return Err(Error::Layout(why));
            }
            let offset = segment.offset.wrapping_add(moved);
            let more = segment.address.wrapping_sub(offset) & (align - 1);
            if more > 0 {
                let splits = programs.start < segment.offset && segment.offset < programs.end;
                movable(segment, reached.max(if splits { programs.end } else { 0 }))?;
                moved += more;
                layout.cuts.push((segment.offset, moved));
            }
            reached = reached.max(segment.offset.saturating_add(segment.file_size.0));
            if pmd > 1 {
                layout.headers.programs[index].p_align.set(LE, align);
            }
        }
        let end = before.file.e_shoff(LE).max(reached).checked_add(moved);
        if end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(Error::Layout("its offsets are too large".to_owned()));
        }
        layout.move_headers(before, &old);
        for at in 0..loads.len() {
            if is_text(&old[loads[at]]) && layout.headers.is_load(loads[at]) {
                layout.join(&loads, at, sizes, join);
            }
        }
        Ok(layout)
    }

    /// Returns the shift of the byte at `offset`.
    pub(super) fn moved(&self, offset: u64) -> u64 {
        let cuts = self.cuts.iter().take_while(|(from, _)| *from <= offset);
        cuts.last().map_or(0, |(_, moved)| *moved)
    }

    /// Updates the offsets in the headers.
    fn move_headers(&mut self, before: &Headers, old: &[Segment]) {
        // Loaded sections move with their segment: an empty last one has the next segment's offset.
        let of = |offset: u64, address: u64| {
            let mut loads = (0..old.len()).filter(|index| before.is_load(*index));
            let load = loads.rfind(|index| {
                let load = &old[*index];
                let at = address.wrapping_sub(load.address);
                at <= load.memory_size.0 && at == offset.wrapping_sub(load.offset)
            });
            self.moved(load.map_or(offset, |load| old[load].offset))
        };
        let programs = old
            .iter()
            .map(|segment| of(segment.offset, segment.address));
        let programs: Vec<u64> = programs.collect();
        let sections = before.sections.iter().map(|section| {
            let (offset, address) = (section.sh_offset(LE), section.sh_addr(LE));
            match section.sh_flags(LE).0 & elf::SHF_ALLOC.0 {
                0 => self.moved(offset),
                _ => of(offset, address),
            }
        });
        let sections: Vec<u64> = sections.collect();
        let [phoff, shoff] = [before.file.e_phoff(LE), before.file.e_shoff(LE)];
        let [phoff, shoff] = [phoff, shoff].map(|offset| offset + self.moved(offset));
        let headers = &mut self.headers;
        headers.file.e_phoff.set(LE, phoff);
        headers.file.e_shoff.set(LE, shoff);
        for (program, moved) in headers.programs.iter_mut().zip(programs) {
            program
                .p_offset
                .set(LE, program.p_offset.get(LE).wrapping_add(moved));
        }
        for (section, moved) in headers.sections.iter_mut().zip(sections) {
            let offset = section.sh_offset.get(LE).wrapping_add(moved);
            section.sh_offset.set(LE, offset);
        }
    }

    /// Joins the neighbours of the text `loads[at]`, where that adds huge pages.
    fn join(&mut self, loads: &[usize], at: usize, sizes: Sizes, always: bool) {
        for neighbour in [at.checked_sub(1), Some(at + 1)] {
            let Some(&other) = neighbour.and_then(|neighbour| loads.get(neighbour)) else {
                continue;
            };
            if !self.headers.is_load(other) {
                continue;
            }
            let text = Segment::of(&self.headers.programs[loads[at]]);
            let beside = Segment::of(&self.headers.programs[other]);
            let Some(whole) = united(&text, &beside) else {
                continue;
            };
            let pages = text.whole_pages(sizes);
            if !(always || pages == Pages(0)) || whole.whole_pages(sizes) == pages {
                continue;
            }
            let program = &mut self.headers.programs[loads[at]];
            program.p_offset.set(LE, whole.offset);
            program.p_vaddr.set(LE, whole.address);
            program.p_paddr.set(LE, whole.address);
            program.p_filesz.set(LE, whole.file_size.0);
            program.p_memsz.set(LE, whole.memory_size.0);
            // The table keeps its length, so PT_PHDR and the bytes after it stay valid.
            self.headers.programs[other].p_type.set(LE, elf::PT_NULL);
            self.joined.push(beside);
        }
    }
}

/// Checks that a segment can move away from the first `reached` bytes of the file.
fn movable(segment: &Segment, reached: u64) -> Result<(), Error> {
    let why = match segment.offset {
        0 => "it begins with the header of the file, which cannot move",
        offset if offset < reached => "it shares bytes of the file with what lies before it",
        _ => return Ok(()),
    };
    let at = segment.address;
    let why = format!("the segment at {at:#x} would have to move in the file, and {why}");
    Err(Error::Layout(why))
}

/// Returns the union of two segments. Both must be read-only, whole in the file, and have the same
/// distance there as in memory.
fn united(text: &Segment, beside: &Segment) -> Option<Segment> {
    let (first, last) = match text.address < beside.address {
        true => (text, beside),
        false => (beside, text),
    };
    let place = |segment: &Segment| segment.address.wrapping_sub(segment.offset);
    let is_whole = |segment: &Segment| segment.file_size == segment.memory_size && segment.read;
    let fits = place(first) == place(last)
        && first.address.saturating_add(first.file_size.0) <= last.address
        && [first, last].into_iter().all(is_whole)
        && !text.write
        && !beside.write;
    let size = Bytes((last.address - first.address).checked_add(last.file_size.0)?);
    fits.then_some(Segment {
        offset: first.offset,
        address: first.address,
        file_size: size,
        memory_size: size,
        ..*text
    })
}
