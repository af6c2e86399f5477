//! Copies an executable or library so that huge folios can map its text: [`align()`].
//!
//! The copy has all bytes of the original at the same addresses. Offsets in the file, holes before
//! moved segments, and `p_align` differ. It is read back and compared before it gets its name.

use std::fs::{self, File, Permissions};
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use object::elf;
use object::pod::{bytes_of, bytes_of_slice};
use object::read::ReadCache;
use object::read::elf::{FileHeader as _, SectionHeader as _};
use serde::Serialize;

use super::elf::{LE, Object, Segment};
use super::inspect::is_placed;
use super::layout::{Headers, Layout};
use super::{Error, Sizes, open, same_bytes};
use crate::kernel::FileError;
use crate::units::{Bytes, Pages};
use crate::whole_file::{self, Existing};

/// Options of a copy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Join adjacent read-only segments to the text even if it has a huge page without them.
    pub join: bool,
    /// Replace an existing file.
    pub replace: bool,
}

/// Report on a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Aligned {
    /// The original was aligned; the copy is the same.
    pub was_aligned: bool,
    /// Huge pages of text that a PMD can map in the original.
    pub before: Pages,
    /// Huge pages of text that a PMD can map in the copy.
    pub after: Pages,
    /// Size of the holes that the copy adds.
    pub padding: Bytes,
    /// Read-only segments that are executable in the copy.
    pub joined: Vec<Segment>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// Writes the copy. It has the mode of `source` without set-user-ID and set-group-ID, and the owner
/// of `source` if this user may set it.
///
/// # Errors
/// [`Error`]; `target` is unchanged then.
pub fn align(
    source: &Path,
    target: &Path,
    sizes: Sizes,
    options: Options,
) -> Result<Aligned, Error> {
    let original = open(source)?;
    let read = FileError::io("read", source);
    let metadata = original.metadata().map_err(read)?;
    let id = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino());
    if fs::metadata(target).is_ok_and(|target| id(&target) == id(&metadata)) {
        return Err(Error::Itself);
    }
    let data = ReadCache::new(&original);
    let object = Object::read(&data)?;
    let before = Headers::read(&data)?;
    let layout = Layout::new(&before, sizes, options.join)?;
    let mut aligned = summary(&object, &before, &layout, sizes)?;
    let existing = match options.replace {
        true => Existing::Replace,
        false => Existing::Keep,
    };
    whole_file::fill(target, 0o600, existing, |copy| {
        fill(&original, copy, &layout)?;
        compare(&original, &before, copy, sizes)?;
        inherit(&original, &metadata, copy, &mut aligned.notes)
    })
    .map_err(|error| {
        let failed = |error| Error::File(FileError::io("write", target)(error));
        error.downcast().unwrap_or_else(failed)
    })?;
    Ok(aligned)
}

fn summary(
    object: &Object,
    before: &Headers,
    layout: &Layout,
    sizes: Sizes,
) -> Result<Aligned, Error> {
    let pages = |headers: &Headers| {
        let programs = headers.programs.iter();
        let loads = programs.filter(|program| program.p_type.get(LE) == elf::PT_LOAD);
        let text = loads.map(Segment::of).filter(|segment| segment.execute);
        Pages(text.map(|text| text.offsets(sizes).count() as u64).sum())
    };
    let after = pages(&layout.headers);
    if after == Pages(0) {
        let pmd = sizes.pmd;
        let why = format!("its text has no whole huge page of {pmd} at its addresses");
        return Err(Error::Layout(why));
    }
    let same = bytes_of_slice(&before.programs) == bytes_of_slice(&layout.headers.programs);
    let mut notes = Vec::new();
    if object.text_relocations {
        notes.push(String::from(
            "it has text relocations: the loader writes into its text, and what it writes to is on base pages",
        ));
    }
    Ok(Aligned {
        was_aligned: same,
        before: match is_placed(object, sizes) {
            true => pages(before),
            false => Pages(0),
        },
        after,
        padding: Bytes(layout.cuts.last().map_or(0, |(_, moved)| *moved)),
        joined: layout.joined.clone(),
        notes,
    })
}

fn fill(original: &File, copy: &mut File, layout: &Layout) -> io::Result<()> {
    let length = original.metadata()?.len();
    let starts = std::iter::once(0).chain(layout.cuts.iter().map(|(from, _)| *from));
    let ends = layout.cuts.iter().map(|(from, _)| *from).chain([length]);
    for (start, end) in starts.zip(ends) {
        let mut part = original;
        part.seek(SeekFrom::Start(start))?;
        copy.seek(SeekFrom::Start(start + layout.moved(start)))?;
        io::copy(&mut io::Read::take(part, end.saturating_sub(start)), copy)?;
    }
    copy.set_len(length + layout.moved(length))?;
    let headers = &layout.headers;
    let [programs, sections] = [headers.file.e_phoff(LE), headers.file.e_shoff(LE)];
    copy.write_all_at(bytes_of(&headers.file), 0)?;
    copy.write_all_at(bytes_of_slice(&headers.programs), programs)?;
    copy.write_all_at(bytes_of_slice(&headers.sections), sections)
}

/// Compares the copy with the original, from its headers alone: the bytes of each segment by
/// address, each section, and the file's kind.
fn compare(original: &File, before: &Headers, copy: &File, sizes: Sizes) -> io::Result<()> {
    let (read, data) = (ReadCache::new(original), ReadCache::new(copy));
    let after = Headers::read(&data).map_err(io::Error::other)?;
    let old = Object::read(&read).map_err(io::Error::other)?;
    let new = Object::read(&data).map_err(io::Error::other)?;
    let differs = |what: &str, at: u64| {
        let what = format!("{what} at {at:#x}");
        Err(io::Error::other(Error::Differs(what)))
    };
    let without_segments = |object: &Object| Object {
        segments: Vec::new(),
        ..object.clone()
    };
    if without_segments(&old) != without_segments(&new)
        || before.sections.len() != after.sections.len()
    {
        return differs("other headers", 0);
    }
    // The headers have to differ.
    let skip = before.places();
    for segment in &old.segments {
        let (address, size) = (segment.address, segment.file_size);
        let Some(found) = new.segments.iter().find(|new| new.holds(segment)) else {
            return differs("no segment", address);
        };
        let is_text = segment.execute && size >= Pages(1).bytes(sizes.pmd);
        let align = if is_text { sizes.pmd.bytes() } else { 1 }.max(found.align);
        if found.address.wrapping_sub(found.offset) & (align - 1) != 0 {
            return differs("a misplaced segment", address);
        }
        let at = found.offset + (address - found.address);
        if !same_bytes((original, segment.offset), (copy, at), size.0, &skip)? {
            return differs("other bytes", address);
        }
    }
    for (old, new) in before.sections.iter().zip(&after.sections) {
        let (old, new) = (old.file_range(LE), new.file_range(LE));
        if let (Some((from, size)), Some((to, _))) = (old, new)
            && !same_bytes((original, from), (copy, to), size, &skip)?
        {
            return differs("another section", from);
        }
    }
    Ok(())
}

impl Segment {
    /// Reports whether all of `other` is within this segment.
    fn holds(&self, other: &Self) -> bool {
        let end = |segment: &Self| segment.address.saturating_add(segment.memory_size.0);
        self.address <= other.address && end(other) <= end(self)
    }
}

/// Sets the owner and the mode of the copy, as far as permitted.
fn inherit(
    original: &File,
    metadata: &fs::Metadata,
    copy: &File,
    notes: &mut Vec<String>,
) -> io::Result<()> {
    let (uid, gid) = (metadata.uid(), metadata.gid());
    if std::os::unix::fs::fchown(copy, Some(uid), Some(gid)).is_err() {
        notes.push(format!(
            "it belongs to this user: the owner of the original is {uid}:{gid}"
        ));
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o6000 != 0 {
        notes.push(String::from(
            "it has neither set-user-ID nor set-group-ID: a copy must not gain what the original was given",
        ));
    }
    let capabilities: &mut [u8] = &mut [0; 64];
    if rustix::fs::fgetxattr(original, "security.capability", capabilities).is_ok() {
        notes.push("it has no file capabilities; the original has (setcap(8))".to_owned());
    }
    copy.set_permissions(Permissions::from_mode(mode & 0o777))
}

#[cfg(test)]
mod tests {
    use super::super::elf::Header;
    use super::super::fake::{file, segment};
    use super::*;
    use crate::units::PageSize;
    use proptest::prelude::*;

    const DYN: u16 = 3;
    const PMD: u64 = 1 << 16;

    /// Page sizes with small huge pages, for small files.
    fn sizes() -> Sizes {
        Sizes {
            base: PageSize::SIZE_4K,
            pmd: PageSize::new(PMD).unwrap(),
        }
    }

    /// Aligns a file with this content; returns the copy's content too.
    fn aligned(bytes: &[u8], options: Options) -> Result<(Aligned, Vec<u8>), Error> {
        let folder = tempfile::tempdir().unwrap();
        let [source, target] = ["source", "target"].map(|name| folder.path().join(name));
        fs::write(&source, bytes).unwrap();
        let aligned = align(&source, &target, sizes(), options);
        let left = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 1 + usize::from(aligned.is_ok()));
        Ok((aligned?, fs::read(target).unwrap_or_default()))
    }

    /// Returns the byte at each address, without the headers.
    fn memory(bytes: &[u8]) -> Vec<(u64, u8)> {
        let object = Object::read(bytes).unwrap();
        let skip = Headers::read(bytes).unwrap().places();
        let mut memory = Vec::new();
        for segment in &object.segments {
            let at = segment.offset..segment.offset + segment.file_size.0;
            let seen = at.filter(|at| !skip.iter().any(|range| range.contains(at)));
            let place = |at| segment.address + (at - segment.offset);
            memory.extend(seen.map(|at| (place(at), bytes[usize::try_from(at).unwrap()])));
        }
        memory
    }

    fn refused(loads: &[Segment]) -> String {
        refused_bytes(&file(DYN, loads))
    }

    #[test]
    fn text_moves_with_all_bytes_after_it() {
        // As lld lays files out: each segment a page further in memory than in the file.
        let loads = [
            segment("R", 0, 0, 0x1234, 0x1234, 0x1000),
            segment("RE", 0x2240, 0x1240, 0x30010, 0x30010, 0x1000),
            segment("RW", 0x33250, 0x31250, 0x800, 0x2000, 0x1000),
        ];
        let original = file(DYN, &loads);
        let (report, copy) = aligned(&original, Options::default()).unwrap();
        let object = Object::read(copy.as_slice()).unwrap();
        let (text, data) = (object.segments[1], object.segments[2]);
        assert_eq!((text.offset, text.align), (0x2240, PMD));
        assert_eq!((data.offset, data.align), (0x32250, 0x1000));
        assert_eq!((report.before, report.after), (Pages(0), Pages(2)));
        assert!(report.padding == Bytes(0x1000) && !report.was_aligned && report.joined.is_empty());
        assert_eq!(memory(&original), memory(&copy));
        let (again, same) = aligned(&copy, Options::default()).unwrap();
        assert!(again.was_aligned && same == copy);
    }

    #[test]
    fn read_only_data_completes_a_huge_page_of_text() {
        // As GNU ld lays Debian's python3 out.
        let loads = [
            segment("R", 0x40000, 0, 0x1e38, 0x1e38, 0x1000),
            segment("RE", 0x42000, 0x2000, 0x1b000, 0x1b000, 0x1000),
            segment("R", 0x5d000, 0x1d000, 0x10000, 0x10000, 0x1000),
            segment("RW", 0x7ddc8, 0x2ddc8, 0x138, 0x1830, 0x1000),
        ];
        let original = file(2, &loads);
        let (report, copy) = aligned(&original, Options::default()).unwrap();
        assert_eq!((report.before, report.after), (Pages(0), Pages(1)));
        assert_eq!(report.joined, [loads[0]]);
        // The joined segment also has the page padding in between.
        let bytes = memory(&copy);
        assert!(
            memory(&original)
                .iter()
                .all(|byte| bytes.binary_search(byte).is_ok())
        );
        let options = Options {
            join: true,
            replace: false,
        };
        let (report, copy) = aligned(&original, options).unwrap();
        assert_eq!((report.after, report.joined.len()), (Pages(2), 2));
        let object = Object::read(copy.as_slice()).unwrap();
        assert_eq!(object.segments.len(), 2);
        assert!(object.segments[1].write && !object.segments[1].execute);
    }

    #[test]
    fn impossible_layouts_are_refused_with_the_reason() {
        let text = |offset| segment("RE", 0x2000 + offset, offset, 0x30000, 0x30000, 0x1000);
        assert!(refused(&[text(0)]).contains("the header of the file"));
        let first = segment("R", 0, 0, 0x5000, 0x5000, 0x1000);
        assert!(refused(&[first, text(0x4000)]).contains("shares bytes"));
        let first = segment("R", 0, 0, 0x800, 0x800, 0x1000);
        assert!(refused(&[first, text(0x40)]).contains("shares bytes"));
        let small = segment("RE", 0x3000, 0x1000, 0x4000, 0x4000, 0x1000);
        assert!(refused(&[first, small]).contains("smaller than a huge page"));
        let apart = segment("RE", 0x3000, 0x1000, 0x12000, 0x12000, 0x1000);
        let data = segment("RW", 0, 0, 0x800, 0x800, 0x1000);
        assert!(refused(&[data, apart]).contains("no whole huge page"));
        let odd = segment("RE", 0x3000, 0x1000, 0x40000, 0x40000, 0x1800);
        assert!(refused(&[first, odd]).contains("p_align"));
        let mut object = file(1, &[first]);
        assert!(matches!(
            aligned(&object, Options::default()),
            Err(Error::NotLoaded(1))
        ));
        object[5] = 2;
        assert!(aligned(&object, Options::default()).is_err());
        assert!(refused_bytes(b"#!/bin/sh\n").contains("no ELF"));
    }

    fn refused_bytes(bytes: &[u8]) -> String {
        let result = aligned(bytes, Options::default());
        result.map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn a_section_behind_the_end_of_the_file_is_refused() {
        let mut bytes = file(DYN, &[segment("RE", 0, 0, 0x20000, 0x20000, 0x1000)]);
        let sections = Header::parse(bytes.as_slice()).unwrap().e_shoff(LE);
        // sh_size of the second: its lowest seven bytes are 1 << 55.
        let size = usize::try_from(sections).unwrap() + 64 + 0x20;
        bytes[size + 6] = 0x80;
        let refused = refused_bytes(&bytes);
        assert!(
            refused.contains("ends behind the end of the file"),
            "{refused}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Any copy has the same bytes at the same addresses, and congruent text.
        #[test]
        fn no_address_changes(
            kind in 2u16..4,
            join: bool,
            parts in prop::collection::vec((0..4usize, 0u64..40, 1u64..0x28000, 0u64..3, 0u64..0x1000), 1..6),
        ) {
            let mut loads: Vec<Segment> = Vec::new();
            let (mut address, mut offset) = (0x40_0000, 0u64);
            for (flags, pages, size, gap, within) in parts {
                let flags = ["R", "RE", "RW", "RE"][flags];
                // Offset and address are congruent; two segments may share a page of the file.
                let within = if loads.is_empty() { 0 } else { within & !15 };
                address = (address + pages * 0x1000).next_multiple_of(0x1000) + within;
                if !loads.is_empty() {
                    offset = offset.next_multiple_of(0x1000) + gap * 0x1000 + within;
                }
                let size = size.max(0x400);
                loads.push(segment(flags, address, offset, size, size, 0x1000));
                (address, offset) = (address + size, offset + size);
            }
            let original = file(kind, &loads);
            match aligned(&original, Options { join, replace: false }) {
                Ok((report, copy)) => {
                    prop_assert!(report.after >= report.before && report.after > Pages(0));
                    let bytes = memory(&copy);
                    prop_assert!(memory(&original).iter().all(|byte| bytes.binary_search(byte).is_ok()));
                    let object = Object::read(copy.as_slice()).unwrap();
                    for text in object.text().filter(|text| text.file_size.0 >= PMD) {
                        prop_assert!(text.is_congruent(sizes().pmd) && text.align >= PMD);
                    }
                }
                Err(Error::Layout(why)) => prop_assert!(why.contains("no whole huge page") || why.contains("header")),
                Err(Error::Small(_)) => prop_assert!(loads.iter().all(|load| !load.execute || load.file_size.0 < PMD)),
                Err(error) => prop_assert!(false, "{error}"),
            }
        }

        /// Corrupt files cause no panic.
        #[test]
        fn corrupt_files_cause_no_panic(changes in prop::collection::vec((0usize..0x200, any::<u8>()), 1..8)) {
            let loads = [
                segment("R", 0, 0, 0x1000, 0x1000, 0x1000),
                segment("RE", 0x3000, 0x1000, 0x20000, 0x20000, 0x1000),
            ];
            let mut bytes = file(DYN, &loads);
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            let _ = aligned(&bytes, Options::default());
        }
    }
}
