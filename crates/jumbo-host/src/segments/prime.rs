//! Reads a file's text into the page cache in huge folios: [`prime`].
//!
//! Huge folios stay. Other pages are dropped, except mapped and dirty ones, and read again through
//! a mapping with MADV_HUGEPAGE. Then the page cache is checked again, because the kernel does not
//! report whether it followed the advice.
//!
//! Invariant: no page that a process maps is dropped.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use object::read::ReadCache;
use serde::Serialize;

use super::elf::Object;
use super::file_system::huge_folios;
use super::inspect::{is_placed, misplaced};
use super::running::Running;
use super::{Error, Sizes, open};
use crate::kernel::page_cache::{Cached, PageCache};
use crate::kernel::thp::Thp;
use crate::kernel::{FileError, Root, task};
use crate::units::{Pages, counted};

/// Result for one file, or its forecast.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Primed {
    /// Path of the file.
    pub path: PathBuf,
    /// Some text can be huge, by layout and file system.
    pub primable: bool,
    /// Huge pages of text that a PMD can map.
    pub text: Pages,
    /// Number of them that were huge folios before.
    pub before: Pages,
    /// Number of them that are huge folios now.
    pub huge: Pages,
    /// Reason why some are not, and the remedy.
    pub why_not: Option<String>,
    /// Processes whose mappings of the file are the reason.
    pub mapped_by: Vec<Mapper>,
}

/// A process that maps a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mapper {
    /// Process ID.
    pub pid: u32,
    /// Process name, as ps(1) shows it.
    pub name: String,
}

/// State of a file's text in the page cache, in huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CachedText {
    /// Folios of the PMD size.
    pub huge: Pages,
    /// Smaller folios, or a part of the page.
    pub small: Pages,
    /// Uncached pages.
    pub absent: Pages,
}

impl Primed {
    /// Returns the result for a file that could not be read.
    pub fn failed(path: &Path, why_not: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            why_not: Some(why_not.into()),
            ..Self::default()
        }
    }

    /// Reports whether all of the text is huge.
    pub fn is_whole(&self) -> bool {
        self.huge == self.text && self.why_not.is_none()
    }
}

/// Reads the state of the huge pages at these offsets.
///
/// # Errors
/// Errors of [`PageCache::look`].
pub(super) fn cached(file: &File, offsets: &[u64], sizes: Sizes) -> io::Result<CachedText> {
    let cache = PageCache::new(file, sizes.pmd)?;
    let mut text = CachedText::default();
    for offset in offsets {
        let kind = match cache.look(*offset)? {
            Cached::Huge => &mut text.huge,
            Cached::Small => &mut text.small,
            Cached::Absent => &mut text.absent,
        };
        kind.0 += 1;
    }
    Ok(text)
}

/// Reads the text of `path` into huge folios, and calls `progress` after each; `dry_run`: only
/// checks.
///
/// # Errors
/// [`Error`] where the file cannot be read or is not ELF.
pub fn prime(
    root: &Root,
    path: &Path,
    running: &Running,
    dry_run: bool,
    progress: &mut dyn FnMut(Pages, Pages),
) -> Result<Primed, Error> {
    let sizes = Sizes::read(root)?;
    let file = open(path)?;
    let object = Object::read(&ReadCache::new(&file))?;
    let offsets: Vec<u64> = object.text().flat_map(|text| text.offsets(sizes)).collect();
    let text = Pages(offsets.len() as u64);
    let mut primed = Primed {
        path: path.to_owned(),
        text,
        ..Primed::default()
    };
    primed.why_not = obstacle(root).or_else(|| match text {
        // One aligned segment is enough.
        Pages(1..) if is_placed(&object, sizes) => huge_folios(&file, path, sizes).err(),
        _ => misplaced(&object, sizes),
    });
    if primed.why_not.is_some() {
        return Ok(primed);
    }
    primed.primable = true;
    let read = |error| FileError::io("read", path)(error);
    if !dry_run {
        // Dirty pages, as of a new file, cannot be dropped. Some file systems lack this call.
        let _ = file.sync_data();
    }
    let cache = PageCache::new(&file, sizes.pmd).map_err(read)?;
    for (offset, done) in offsets.into_iter().zip(1..) {
        let before = cache.look(offset).map_err(read)?;
        let after = match before {
            Cached::Huge => before,
            _ if dry_run => before,
            _ => reread(&cache, offset).map_err(read)?,
        };
        primed.before.0 += u64::from(before == Cached::Huge);
        primed.huge.0 += u64::from(after == Cached::Huge);
        progress(Pages(done), text);
    }
    if primed.huge < text {
        explain(root, &file, running, dry_run, &mut primed);
    }
    Ok(primed)
}

/// Drops a huge page of the file, and reads it again.
fn reread(cache: &PageCache<'_>, offset: u64) -> io::Result<Cached> {
    cache.drop_clean(offset)?;
    cache.bring(offset)
}

/// Describes an obstacle to huge text of any file.
fn obstacle(root: &Root) -> Option<String> {
    let why = match (Thp::read_controls(root), task::own_thp_enabled(root)) {
        (Ok(None), _) => "this kernel has no transparent huge pages",
        (_, Ok(Some(false))) => "THP is disabled for this process (PR_SET_THP_DISABLE)",
        _ => return None,
    };
    Some(why.to_owned())
}

/// Adds the reason why some text is not huge.
fn explain(root: &Root, file: &File, running: &Running, dry_run: bool, primed: &mut Primed) {
    let left = counted(primed.text.0 - primed.huge.0, "huge page");
    let mapper = |pid| {
        let name = task::name(root, pid).unwrap_or_default();
        Mapper { pid, name }
    };
    let mapped_by = running.mapping(file).into_iter().map(mapper);
    primed.mapped_by = mapped_by.collect();
    let processes = primed
        .mapped_by
        .iter()
        .map(|m| format!("{} ({})", m.name, m.pid));
    let processes: Vec<String> = processes.take(5).collect();
    let count = primed.mapped_by.len();
    let more = match count.saturating_sub(processes.len()) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let processes = format!("{}{more}", processes.join(", "));
    primed.why_not = Some(match (count, dry_run) {
        (0, true) => format!("{left} to be read"),
        (_, true) => {
            format!("{left} to be read, but what {processes} touched stays: stop that first")
        }
        (0, false) => format!(
            "{left} came in small folios: no free memory in one piece (`jumbo doctor`){}",
            match running.hidden {
                0 => ", or the file system gave none",
                _ => ", or a process maps the file that this user may not look into",
            }
        ),
        (_, false) => format!(
            "{left} stayed in small folios, which {processes} maps: stop that, prime, and start it again"
        ),
    });
}
