//! A data file in the page cache: [`look`].
//!
//! Since Linux 5.18 ext4, xfs and btrfs are mapped at multiples of the PMD size by the kernel itself
//! (`thp_get_unmapped_area`), so a program that maps the file has by PMDs what the page cache has in
//! folios of that size.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::file_system::{huge_folios, running_kernel};
use super::prime::{
    CachedPages, Content, Mapper, Part, UNTOLD, mappers, obstacle, tells_what_is_cached,
};
use super::running::Running;
use super::{Error, Sizes, open};
use crate::kernel::folios::Folios;
use crate::kernel::memory::Memory;
use crate::kernel::page_cache::{Cached, PageCache};
use crate::kernel::{FileError, Root};
use crate::units::{Bytes, PageSize, Pages, counted};

/// First Linux that collapses files that processes map, whatever its configuration.
const COLLAPSING_KERNEL: (u32, u32) = (7, 0);

/// Largest file that is looked at, as a multiple of the memory: the rest of it cannot be cached.
const MAX_MEMORIES: u64 = 64;

/// Report on a data file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DataReport {
    /// Path of the file.
    #[serde(serialize_with = "super::in_text")]
    pub path: PathBuf,
    /// Size of the file.
    pub size: Bytes,
    /// Whole huge pages of it; the rest at its end is on base pages.
    pub whole: Pages,
    /// State of the whole huge pages in the page cache; `None` where the kernel does not tell this
    /// user.
    pub cached: Option<CachedPages>,
    /// Cached bytes of those that are not huge.
    pub small: Bytes,
    /// Cached bytes of them by folio size; `None` without CAP_SYS_ADMIN.
    #[serde(serialize_with = "by_bytes")]
    pub folios: Option<BTreeMap<PageSize, Bytes>>,
    /// Other processes that map the file, of those that this user may look into.
    pub mapped_by: Vec<Mapper>,
    /// Reasons why some of it is not in huge folios, each with the remedy.
    pub why_not: Vec<String>,
}

/// Writes folio sizes as numbers of bytes, which JSON has for keys as text.
fn by_bytes<S: serde::Serializer>(
    folios: &Option<BTreeMap<PageSize, Bytes>>,
    to: S,
) -> Result<S::Ok, S::Error> {
    let sizes = folios.iter().flatten();
    let sizes: BTreeMap<u64, Bytes> = sizes.map(|(size, bytes)| (size.bytes(), *bytes)).collect();
    folios.as_ref().map(|_| sizes).serialize(to)
}

/// Looks at a file in the page cache, and calls `progress` after each huge page. Reads nothing of it
/// from disk.
///
/// # Errors
/// [`Error`] where the file cannot be read.
pub fn look(
    root: &Root,
    path: &Path,
    running: &Running,
    progress: &mut dyn FnMut(Pages, Pages),
) -> Result<DataReport, Error> {
    let sizes = Sizes::read(root)?;
    let file = open(path)?;
    let read = |error| FileError::io("read", path)(error);
    let part = Part::of(&file, path, sizes)?;
    debug_assert_eq!(part.content, Content::Data);
    let whole = part.whole;
    let mut report = DataReport {
        path: path.to_owned(),
        size: Bytes(file.metadata().map_err(read)?.len()),
        whole,
        cached: None,
        small: Bytes(0),
        folios: None,
        mapped_by: mappers(root, &file, running),
        why_not: Vec::new(),
    };
    let obstacle = obstacle(root)
        .or(part.why_not)
        .or_else(|| huge_folios(&file, path, sizes).err());
    report.why_not.extend(obstacle);
    if !tells_what_is_cached(&file) {
        report.why_not.push(UNTOLD.to_owned());
        return Ok(report);
    }
    let memory = Memory::read(root)?.total;
    if report.size.0 / MAX_MEMORIES > memory.0 {
        let why = format!(
            "to look at {} takes too long with {memory} of memory",
            report.size
        );
        report.why_not.push(why);
        return Ok(report);
    }
    let cache = PageCache::new(&file, sizes.pmd).map_err(read)?;
    let mut folios = Folios::open(root, sizes.base, sizes.pmd).ok();
    let (mut cached, mut by_size) = (CachedPages::default(), BTreeMap::new());
    for (offset, done) in part.offsets.zip(1..) {
        let found = cache.look(offset).map_err(read)?;
        cached.count(found);
        if found == Cached::Small {
            report.small.0 += cache.bytes(offset).map_err(read)?.0;
        }
        if let Some(folios) = folios.as_mut().filter(|_| found != Cached::Absent) {
            for (size, bytes) in cache.folios(offset, folios).map_err(read)? {
                *by_size.entry(size).or_insert(Bytes(0)) += bytes;
            }
        }
        progress(Pages(done), whole);
    }
    report.cached = Some(cached);
    report.folios = folios.map(|_| by_size);
    if report.why_not.is_empty() {
        report
            .why_not
            .extend(unprimed(cached, &report.mapped_by, sizes));
    }
    Ok(report)
}

/// Describes what the page cache lacks, and what it costs to mend that.
fn unprimed(cached: CachedPages, mapped_by: &[Mapper], sizes: Sizes) -> Option<String> {
    let left = Pages(cached.small.0 + cached.absent.0);
    let bytes = left.bytes(sizes.pmd);
    match (left, cached.small, mapped_by.len()) {
        (Pages(0), ..) => None,
        (_, Pages(small), 1..) if small > 0 && running_kernel() >= COLLAPSING_KERNEL => {
            Some(format!(
                "{} are in small folios, in processes that map them: `jumbo promote --files` collapses them",
                counted(small, "huge page")
            ))
        }
        (_, Pages(small), 1..) if small > 0 => Some(format!(
            "{} stay in small folios while the processes that map them run: stop them, and `jumbo files prime` reads \
             {bytes} from disk",
            counted(small, "huge page")
        )),
        _ => Some(format!(
            "`jumbo files prime` reads {bytes} from disk, in huge folios"
        )),
    }
}
