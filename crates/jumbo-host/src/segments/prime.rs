//! Reads a program's text, or a data file, into the page cache in huge folios: [`prime`].
//!
//! Huge folios stay. Other pages are dropped, except mapped and dirty ones, and read again through
//! a mapping with MADV_HUGEPAGE. Then the page cache is checked again, because the kernel does not
//! report whether it followed the advice.
//!
//! Invariant: no page that a process maps is dropped.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use object::read::ReadCache;
use serde::Serialize;

use super::elf::Object;
use super::file_system::huge_folios;
use super::inspect::{is_placed, misplaced};
use super::running::Running;
use super::{Error, Sizes, open};
use crate::kernel::memory::Memory;
use crate::kernel::page_cache::{Cached, PageCache};
use crate::kernel::thp::Thp;
use crate::kernel::{FileError, Root, task};
use crate::units::{Bytes, Pages, counted};

/// Result for one file, or its forecast.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Primed {
    /// Path of the file.
    #[serde(serialize_with = "super::in_text")]
    pub path: PathBuf,
    /// The part that huge pages are of use to.
    pub content: Content,
    /// Some of it can be huge, by layout and file system.
    pub primable: bool,
    /// Huge pages of it that a PMD can map.
    pub whole: Pages,
    /// Number of them that were huge folios before.
    pub before: Pages,
    /// Number of them that are huge folios now.
    pub huge: Pages,
    /// Reason why some are not, and the remedy.
    pub why_not: Option<String>,
    /// Processes whose mappings of the file are the reason.
    pub mapped_by: Vec<Mapper>,
}

/// The part of a file that huge pages are of use to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    /// The executable segments of a program or a library.
    Text,
    /// All of a file of another kind, which programs map to read it.
    #[default]
    Data,
}

/// The huge pages of a file that [`prime`] brings.
pub(super) struct Part {
    pub(super) content: Content,
    /// Number of them.
    pub(super) whole: Pages,
    /// Their offsets in the file, not stored: a sparse file may have any size.
    pub(super) offsets: Box<dyn Iterator<Item = u64>>,
    /// Why none can be mapped by a PMD.
    pub(super) why_not: Option<String>,
}

impl Part {
    /// # Errors
    /// [`Error::File`] where the file cannot be read.
    pub(super) fn of(file: &File, path: &Path, sizes: Sizes) -> Result<Self, Error> {
        let read = FileError::io("read", path);
        let pmd = sizes.pmd;
        match Object::read(&ReadCache::new(file)) {
            Ok(object) => {
                let offsets: Vec<u64> =
                    object.text().flat_map(|text| text.offsets(sizes)).collect();
                // One aligned segment is enough.
                let is_well = !offsets.is_empty() && is_placed(&object, sizes);
                Ok(Self {
                    content: Content::Text,
                    whole: Pages(offsets.len() as u64),
                    offsets: Box::new(offsets.into_iter()),
                    why_not: misplaced(&object, sizes).filter(|_| !is_well),
                })
            }
            Err(Error::NotElf(_) | Error::Foreign(_) | Error::NotLoaded(_)) => {
                let size = Bytes(file.metadata().map_err(read)?.len());
                let pages = size.whole_pages(pmd).0;
                let small = || format!("it has {size}, and a huge page {pmd}");
                Ok(Self {
                    content: Content::Data,
                    whole: Pages(pages),
                    offsets: Box::new((0..pages).map(move |page| page * pmd.bytes())),
                    why_not: (pages == 0).then(small),
                })
            }
            Err(error) => Err(error),
        }
    }
}

/// A process that maps a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mapper {
    /// Process ID.
    pub pid: u32,
    /// Process name, as ps(1) shows it.
    pub name: String,
}

/// State of a part of a file in the page cache, in huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CachedPages {
    /// Folios of the PMD size.
    pub huge: Pages,
    /// Smaller folios, or a part of the page.
    pub small: Pages,
    /// Uncached pages.
    pub absent: Pages,
}

impl CachedPages {
    pub(super) fn count(&mut self, found: Cached) {
        let kind = match found {
            Cached::Huge => &mut self.huge,
            Cached::Small => &mut self.small,
            Cached::Absent => &mut self.absent,
        };
        kind.0 += 1;
    }
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

    /// Reports whether all of it is huge.
    pub fn is_whole(&self) -> bool {
        self.huge == self.whole && self.why_not.is_none()
    }
}

/// Reads the state of the huge pages at these offsets.
///
/// # Errors
/// Errors of [`PageCache::look`].
pub(super) fn cached(file: &File, offsets: &[u64], sizes: Sizes) -> io::Result<CachedPages> {
    let cache = PageCache::new(file, sizes.pmd)?;
    let mut pages = CachedPages::default();
    for offset in offsets {
        pages.count(cache.look(*offset)?);
    }
    Ok(pages)
}

/// Reads the text of the program or library `path`, or all of a file of another kind, into huge
/// folios, and calls `progress` after each; `dry_run`: only checks.
///
/// # Errors
/// [`Error`] where the file cannot be read.
pub fn prime(
    root: &Root,
    path: &Path,
    running: &Running,
    dry_run: bool,
    progress: &mut dyn FnMut(Pages, Pages),
) -> Result<Primed, Error> {
    let sizes = Sizes::read(root)?;
    let file = open(path)?;
    let part = Part::of(&file, path, sizes)?;
    let whole = part.whole;
    let mut primed = Primed {
        path: path.to_owned(),
        content: part.content,
        whole,
        ..Primed::default()
    };
    primed.why_not = obstacle(root)
        .or(part.why_not)
        .or_else(|| beyond_memory(root, whole.bytes(sizes.pmd)))
        .or_else(|| huge_folios(&file, path, sizes).err());
    if part.content == Content::Data && dry_run && !tells_what_is_cached(&file) {
        primed.why_not.get_or_insert_with(|| UNTOLD.to_owned());
    }
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
    for (offset, done) in part.offsets.zip(1..) {
        let before = cache.look(offset).map_err(read)?;
        let after = match before {
            Cached::Huge => before,
            _ if dry_run => before,
            _ => reread(&cache, offset).map_err(read)?,
        };
        primed.before.0 += u64::from(before == Cached::Huge);
        primed.huge.0 += u64::from(after == Cached::Huge);
        progress(Pages(done), whole);
    }
    if primed.huge < whole {
        explain(root, &file, running, dry_run, &mut primed);
    }
    Ok(primed)
}

/// Drops a huge page of the file, and reads it again.
fn reread(cache: &PageCache<'_>, offset: u64) -> io::Result<Cached> {
    cache.drop_clean(offset)?;
    cache.bring(offset)
}

/// Describes why a file is not read that memory cannot hold: its end would push out its beginning.
fn beyond_memory(root: &Root, needed: Bytes) -> Option<String> {
    let available = Memory::read(root).ok()?.available;
    (needed > available)
        .then(|| format!("it has {needed} in huge pages, and {available} of memory are available"))
}

/// Why the state of another user's file is not shown: to look at it would read all of it.
pub(super) const UNTOLD: &str = "the kernel tells what is cached of it to its owner, to who may write to it, and to root \
     (mincore(2))";

/// Reports whether mincore(2) tells this user the truth about a file.
pub(super) fn tells_what_is_cached(file: &File) -> bool {
    let user = rustix::process::geteuid();
    let is_owner = file.metadata().is_ok_and(|it| it.uid() == user.as_raw());
    let own_path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let is_writable = rustix::fs::access(own_path, rustix::fs::Access::WRITE_OK).is_ok();
    // Root of a user namespace is not the owner's.
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let is_host = map.split_whitespace().eq(["0", "0", "4294967295"]);
    user.is_root() && is_host || is_owner || is_writable
}

/// Describes an obstacle to huge folios of any file.
pub(super) fn obstacle(root: &Root) -> Option<String> {
    let why = match (Thp::read_controls(root), task::own_thp_enabled(root)) {
        (Ok(None), _) => "this kernel has no transparent huge pages",
        (_, Ok(Some(false))) => "THP is disabled for this process (PR_SET_THP_DISABLE)",
        _ => return None,
    };
    Some(why.to_owned())
}

/// Returns the other processes that map a file.
pub(super) fn mappers(root: &Root, file: &File, running: &Running) -> Vec<Mapper> {
    let mapper = |pid| {
        let name = task::name(root, pid).unwrap_or_default();
        Mapper { pid, name }
    };
    running.mapping(file).into_iter().map(mapper).collect()
}

/// Adds the reason why some of it is not huge.
fn explain(root: &Root, file: &File, running: &Running, dry_run: bool, primed: &mut Primed) {
    let left = counted(primed.whole.0 - primed.huge.0, "huge page");
    primed.mapped_by = mappers(root, file, running);
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
