//! Which text there is: [`Segment`], [`program`], [`each`].

use core::ops::Range;

use crate::proc::{File, MapsLine, Name, each_mapping};

/// How the names of images begin, as much of it as a [`MapsLine`] keeps.
const IMAGE: &[u8] = b"/memfd:jumbo-tex";

/// The most segments that are looked at: a program has one or a few, and each library one.
pub(super) const MOST: usize = 64;

/// An executable mapping of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) start: usize,
    pub(super) end: usize,
    /// Where in the file it begins.
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

    /// The whole PMDs in it.
    pub(super) fn blocks(&self, pmd: usize) -> Range<usize> {
        blocks(&self.range(), pmd)
    }

    /// Whether the page cache can map it by PMDs.
    pub(super) fn is_congruent(&self, pmd: usize) -> bool {
        is_congruent(self.start, self.offset, pmd)
    }

    /// Whether it is as far from a PMD's bounds in each process, so that one image serves all: congruent to its place in the
    /// file, or of a program that is linked to fixed addresses, which are low ones. A position-independent program that is not
    /// aligned is somewhere else in each process.
    pub(super) fn is_alike_everywhere(&self, pmd: usize) -> bool {
        is_alike_everywhere(&self.range(), self.offset, pmd)
    }

    /// Whether it is mapped as it was when it was found.
    pub(super) fn is_there(&self) -> bool {
        let is_this = |mapping: &MapsLine| of(mapping).is_some_and(|found| found == *self);
        each_mapping(is_this).unwrap_or(false)
    }
}

/// Whether an address is as far from a PMD's bounds as its place in the file.
pub(super) const fn is_congruent(start: usize, offset: u64, pmd: usize) -> bool {
    (start as u64).wrapping_sub(offset) & (pmd as u64 - 1) == 0
}

/// [`Segment::is_alike_everywhere`].
pub(super) fn is_alike_everywhere(range: &Range<usize>, offset: u64, pmd: usize) -> bool {
    is_congruent(range.start, offset, pmd) || u32::try_from(range.end).is_ok()
}

/// The whole blocks of `pmd` bytes in a range; empty where there is none.
pub(super) fn blocks(range: &Range<usize>, pmd: usize) -> Range<usize> {
    let (start, end) = (range.start.next_multiple_of(pmd), range.end & !(pmd - 1));
    start..end.max(start)
}

/// The executable segments that are found, in the order of their addresses.
pub(super) struct Found {
    segments: [Segment; MOST],
    length: usize,
}

impl Found {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().take(self.length)
    }
}

/// What must stay where it is: the file that an address lies in.
fn holds(mapping: &MapsLine, address: usize) -> bool {
    (mapping.start..mapping.end).contains(&address)
}

fn of(mapping: &MapsLine) -> Option<Segment> {
    let is_text = mapping.executable && mapping.private && !mapping.writable && mapping.inode != 0;
    // Text that was moved has arrived.
    let is_image = mapping.is_named(IMAGE);
    (is_text && !is_image).then(|| Segment {
        start: mapping.start,
        end: mapping.end,
        offset: mapping.offset,
        file: mapping.file(),
        name: mapping.last_name(),
    })
}

/// Text of the file that `entry` lies in, the program's own, and of those files whose names `libs` matches; in segments that have a
/// whole PMD. Never of the files that the addresses in `fixed` lie in: this library, which the reaper's sibling executes
/// when all else is unmapped, and the dynamic loader, which may hold locks.
pub(super) fn find(entry: usize, fixed: &[usize], libs: Option<&str>, pmd: usize) -> Option<Found> {
    let mut found = Found {
        segments: [Segment::default(); MOST],
        length: 0,
    };
    let (mut program, mut kept) = (None, [None; 2]);
    each_mapping(|mapping| {
        if holds(mapping, entry) {
            program = Some(mapping.file());
        }
        for (kept, fixed) in kept.iter_mut().zip(fixed) {
            if holds(mapping, *fixed) {
                *kept = Some(mapping.file());
            }
        }
        let large = |segment: &Segment| !segment.blocks(pmd).is_empty();
        if let Some(segment) = of(mapping).filter(large)
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
        let is_asked_for = || libs.is_some_and(|libs| matches_any(libs, segment.name.bytes()));
        !kept.contains(&Some(segment.file)) && (is_program || is_asked_for())
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

/// Whether one of the patterns matches a name.
fn matches_any(patterns: &str, name: &[u8]) -> bool {
    let mut patterns = patterns.split(crate::orders::Orders::BETWEEN);
    patterns.any(|pattern| matches(pattern.as_bytes(), name))
}

/// `*` stands for any bytes, `?` for one.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    // Where the last star was, and how much of the name it stands for so far.
    let (mut at, mut of) = (0, 0);
    let mut star = None;
    while of < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, of));
                at += 1;
            }
            Some(byte) if *byte == b'?' || name.get(of) == Some(byte) => {
                (at, of) = (at + 1, of + 1)
            }
            _ => {
                let Some((place, taken)) = star else {
                    return false;
                };
                star = Some((place, taken + 1));
                (at, of) = (place + 1, taken + 1);
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
    fn this_program_is_found_and_what_must_stay_is_not() {
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
        assert!(own.iter().all(Segment::is_there));
        assert_eq!(all(here, &[here], None), []);
        let libs = all(here, &[here], Some("libc.so*"));
        assert!(
            libs.iter()
                .all(|segment| segment.name.bytes().starts_with(b"libc.so"))
        );
        assert_eq!(libs.is_empty(), cfg!(target_env = "musl"));
    }
}
