//! The text segments of the process: [`Segment`], [`find`].

use core::ops::Range;

use jumbo_sys::maps::{File, MapsLine, Name};
use jumbo_sys::proc::each_mapping;

/// Prefix of the names of images, as long as a [`MapsLine`] keeps.
const IMAGE_PREFIX: &[u8] = b"/memfd:jumbo-tex";

/// Maximum number of segments: a program has one or a few, and each library one.
const MAX_SEGMENTS: usize = 64;

/// An executable mapping of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) start: usize,
    pub(super) end: usize,
    /// File offset.
    pub(super) offset: u64,
    pub(super) file: File,
    pub(super) name: Name,
}

impl Segment {
    pub(super) const fn range(&self) -> Range<usize> {
        self.start..self.end
    }

    pub(super) const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns the part of whole PMDs.
    pub(super) fn blocks(&self, pmd: usize) -> Range<usize> {
        blocks(&self.range(), pmd)
    }

    /// Reports whether the page cache can map it by PMDs.
    pub(super) fn is_congruent(&self, pmd: usize) -> bool {
        is_congruent(self.start, self.offset, pmd)
    }

    /// Reports whether its address modulo the PMD size is the same in each process, so that one
    /// image serves all: it is congruent to its file offset, or in a program linked to fixed
    /// addresses, which are low. A position-independent program that is not aligned differs in each
    /// process.
    pub(super) fn is_shareable(&self, pmd: usize) -> bool {
        is_shareable(&self.range(), self.offset, pmd)
    }

    /// Reports whether the mapping is the same as when it was found.
    pub(super) fn is_mapped(&self) -> bool {
        let is_this =
            |mapping: &MapsLine| text_segment(mapping).is_some_and(|segment| segment == *self);
        each_mapping(is_this).unwrap_or(false)
    }
}

/// Reports whether an address and a file offset are equal modulo the PMD size.
pub(super) const fn is_congruent(start: usize, offset: u64, pmd: usize) -> bool {
    (start as u64).wrapping_sub(offset) & (pmd as u64 - 1) == 0
}

/// See [`Segment::is_shareable`].
pub(super) fn is_shareable(range: &Range<usize>, offset: u64, pmd: usize) -> bool {
    is_congruent(range.start, offset, pmd) || u32::try_from(range.end).is_ok()
}

/// Returns the part of a range that has whole blocks of `pmd` bytes; may be empty.
pub(super) fn blocks(range: &Range<usize>, pmd: usize) -> Range<usize> {
    let (start, end) = (range.start.next_multiple_of(pmd), range.end & !(pmd - 1));
    start..end.max(start)
}

/// Executable segments in the order of their addresses.
pub(super) struct Segments {
    segments: [Segment; MAX_SEGMENTS],
    length: usize,
}

impl Segments {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().take(self.length)
    }
}

fn contains(mapping: &MapsLine, address: usize) -> bool {
    (mapping.start..mapping.end).contains(&address)
}

fn text_segment(mapping: &MapsLine) -> Option<Segment> {
    let is_text = mapping.executable && mapping.private && !mapping.writable && mapping.inode != 0;
    // An image is text that was already moved.
    let is_image = mapping.is_named(IMAGE_PREFIX);
    (is_text && !is_image).then(|| Segment {
        start: mapping.start,
        end: mapping.end,
        offset: mapping.offset,
        file: mapping.file(),
        name: mapping.last_name(),
    })
}

/// Finds text segments with a whole PMD of the program, whose file contains `entry`, and of files
/// whose names match `libs`. Skips the files that contain an address in `fixed`: this library,
/// which the reaper process executes when all else is unmapped, and the dynamic loader, which may
/// hold locks.
pub(super) fn find(
    entry: usize,
    fixed: &[usize],
    libs: Option<&str>,
    pmd: usize,
) -> Option<Segments> {
    let mut found = Segments {
        segments: [Segment::default(); MAX_SEGMENTS],
        length: 0,
    };
    let (mut program, mut skipped) = (None, [None; 2]);
    each_mapping(|mapping| {
        if contains(mapping, entry) {
            program = Some(mapping.file());
        }
        for (file, fixed) in skipped.iter_mut().zip(fixed) {
            if contains(mapping, *fixed) {
                *file = Some(mapping.file());
            }
        }
        let is_large = |segment: &Segment| !segment.blocks(pmd).is_empty();
        if let Some(segment) = text_segment(mapping).filter(is_large)
            && let Some(place) = found.segments.get_mut(found.length)
        {
            *place = segment;
            found.length += 1;
        }
        false
    })
    .ok()?;
    let wanted = |segment: &Segment| {
        let is_program = Some(segment.file) == program;
        let is_library = || libs.is_some_and(|libs| matches_any(libs, segment.name.bytes()));
        !skipped.contains(&Some(segment.file)) && (is_program || is_library())
    };
    let mut length = 0;
    for at in 0..found.length {
        let segment = *found.segments.get(at)?;
        if wanted(&segment) {
            *found.segments.get_mut(length)? = segment;
            length += 1;
        }
    }
    found.length = length;
    Some(found)
}

/// Reports whether one of the patterns matches a name.
fn matches_any(patterns: &str, name: &[u8]) -> bool {
    let mut patterns = patterns.split(crate::orders::Orders::LIBS_SEPARATOR);
    patterns.any(|pattern| matches(pattern.as_bytes(), name))
}

/// Reports whether a pattern matches a name; `*` stands for any bytes, `?` for one.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut end) = (0, 0);
    // Index of the last star, and end of the part of the name that it matches.
    let mut star = None;
    while end < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, end));
                at += 1;
            }
            Some(byte) if *byte == b'?' || name.get(end) == Some(byte) => {
                (at, end) = (at + 1, end + 1)
            }
            _ => {
                let Some((place, matched)) = star else {
                    return false;
                };
                star = Some((place, matched + 1));
                (at, end) = (place + 1, matched + 1);
            }
        }
    }
    pattern.iter().skip(at).all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name, expected) in [
            ("*", "libxul.so", true),
            ("libLLVM*", "libLLVM-14.so.1", true),
            ("lib?.so", "liba.so", true),
            ("lib?.so", "libab.so", false),
            ("*.so*", "libc.so.6", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("", "a", false),
            ("libc/libm*", "libm.so.6", true),
            ("libc/libm", "libm.so.6", false),
        ] {
            assert_eq!(
                matches_any(pattern, name.as_bytes()),
                expected,
                "{pattern} {name}"
            );
        }
    }

    #[test]
    fn finds_this_program_and_skips_fixed_files() {
        let here = find as *const () as usize;
        let all = |entry: usize, fixed: &[usize], libs| {
            let found = find(entry, fixed, libs, 4096).unwrap();
            found.iter().copied().collect::<Vec<_>>()
        };
        let own = all(here, &[], None);
        assert!(
            own.iter().any(|segment| segment.range().contains(&here)),
            "{own:?}"
        );
        assert!(own.iter().all(Segment::is_mapped));
        assert_eq!(all(here, &[here], None), []);
        let libs = all(here, &[here], Some("libc.so*"));
        assert!(
            libs.iter()
                .all(|segment| segment.name.bytes().starts_with(b"libc.so"))
        );
        assert_eq!(libs.is_empty(), cfg!(target_env = "musl"));
    }
}
