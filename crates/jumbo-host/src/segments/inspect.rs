//! The methods that can put a file's text on huge pages, and their obstacles: [`inspect`].

use std::path::{Path, PathBuf};

use object::read::ReadCache;
use serde::Serialize;

use super::elf::{Linker, Object, ObjectKind, Segment};
use super::file_system::{huge_folios, running_kernel};
use super::prime::{self, CachedPages};
use super::{Error, Sizes, open};
use crate::kernel::thp::Thp;
use crate::kernel::{FileError, Root};
use crate::units::{Bytes, Pages, counted};

/// First Linux that maps large files at multiples of the PMD size, if the file system supports it,
/// as ext4, xfs and btrfs do.
const FILE_ALIGNMENT_KERNEL: (u32, u32) = (5, 18);

/// Method to put text on huge pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TextMethod {
    /// `file` or `shared`.
    pub name: &'static str,
    /// Obstacles; empty where the method works.
    pub why_not: Vec<String>,
}

/// One segment, and the part of it that a PMD can map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SegmentReport {
    /// The segment.
    #[serde(flatten)]
    pub segment: Segment,
    /// Number of whole huge pages at its addresses.
    pub whole: Pages,
    /// Address and offset are equal modulo the PMD size.
    pub congruent: bool,
    /// State in the page cache; `None` unless text and congruent.
    pub cached: Option<CachedPages>,
}

/// Report on a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Inspection {
    /// Path of the file.
    #[serde(serialize_with = "super::in_text")]
    pub path: PathBuf,
    /// Kind of the file.
    pub kind: ObjectKind,
    /// Linker that made the file.
    pub linker: Linker,
    /// Build ID.
    pub build_id: Option<String>,
    /// PMD size.
    pub huge_page: Bytes,
    /// Segments of the file.
    pub segments: Vec<SegmentReport>,
    /// Methods, the best first.
    #[serde(rename = "rungs")]
    pub methods: Vec<TextMethod>,
    /// Compiler flags that align the text for `jumbo files prime`; `None` where it is aligned.
    pub flags: Option<String>,
}

/// Reports on a file.
///
/// # Errors
/// [`Error`] where it cannot be read or is not ELF.
pub fn inspect(root: &Root, path: &Path) -> Result<Inspection, Error> {
    let sizes = Sizes::read(root)?;
    let file = open(path)?;
    let object = Object::read(&ReadCache::new(&file))?;
    let (mut segments, mut text) = (Vec::new(), CachedPages::default());
    for segment in &object.segments {
        let congruent = segment.is_congruent(sizes.pmd);
        let mut cached = None;
        if congruent && segment.execute {
            let offsets: Vec<u64> = segment.offsets(sizes).collect();
            let found =
                prime::cached(&file, &offsets, sizes).map_err(FileError::io("read", path))?;
            text.huge.0 += found.huge.0;
            text.small.0 += found.small.0;
            text.absent.0 += found.absent.0;
            cached = Some(found);
        }
        segments.push(SegmentReport {
            segment: *segment,
            whole: segment.whole_pages(sizes),
            congruent,
            cached,
        });
    }
    let misplaced = misplaced(&object, sizes);
    let mut of_file = common_obstacles(root, &object, sizes)?;
    let mut shared = of_file.clone();
    shared.extend(loader_obstacle(&object));
    if of_file.is_empty() {
        of_file.extend(misplaced.clone());
        of_file.extend(huge_folios(&file, path, sizes).err());
    }
    if of_file.is_empty() {
        of_file.extend(unprimed(text));
    }
    if !is_placed(&object, sizes) {
        let align = Bytes(object.load_align());
        shared.push(format!(
            "its load address is a multiple of {align} only: each process has it elsewhere within a huge page"
        ));
    }
    let method = |name, why_not| TextMethod { name, why_not };
    Ok(Inspection {
        path: path.to_owned(),
        kind: object.kind,
        linker: object.linker,
        build_id: object.build_id.clone(),
        huge_page: Bytes(sizes.pmd.bytes()),
        segments,
        methods: vec![method("file", of_file), method("shared", shared)],
        flags: misplaced.map(|_| flags(object.linker, sizes)),
    })
}

/// Describes the obstacle in the file's layout to mapping its text by PMD.
pub(super) fn misplaced(object: &Object, sizes: Sizes) -> Option<String> {
    let pmd = sizes.pmd;
    if let Some(why) = too_small(object, sizes) {
        return Some(why);
    }
    if let Some(text) = large_text(object, sizes).find(|text| !text.is_congruent(pmd)) {
        return Some(format!(
            "`vaddr - offset` of the text at {:#x} is no multiple of {pmd}: `jumbo text align` makes a copy where it is",
            text.address
        ));
    }
    if !is_placed(object, sizes) {
        return Some(format!(
            "its p_align is {}, so its load address is no multiple of {pmd}: `jumbo text align` makes a copy whose address is",
            Bytes(object.load_align())
        ));
    }
    if large_text(object, sizes).all(|text| text.whole_pages(sizes) == Pages(0)) {
        return Some(format!(
            "no whole huge page of {pmd} is in its text at its addresses: `jumbo text align` makes a copy where the read-only data \
             beside it fills one"
        ));
    }
    None
}

/// Returns the executable segments of at least a huge page.
fn large_text(object: &Object, sizes: Sizes) -> impl Iterator<Item = &Segment> {
    let huge_page = Pages(1).bytes(sizes.pmd);
    object
        .text()
        .filter(move |text| text.file_size >= huge_page)
}

fn too_small(object: &Object, sizes: Sizes) -> Option<String> {
    let is_small = large_text(object, sizes).next().is_none();
    let text: Bytes = object.text().map(|text| text.file_size).sum();
    let pmd = sizes.pmd;
    is_small.then(|| format!("its text ({text}) is smaller than a huge page ({pmd})"))
}

/// Reports whether a file is loaded at a multiple of the PMD size: by its p_align, or because the
/// kernel aligns large files. For the program itself p_align alone counts.
pub(super) fn is_placed(object: &Object, sizes: Sizes) -> bool {
    let first = object.segments.first().map_or(0, |first| first.address);
    let end = object
        .segments
        .last()
        .map_or(0, |last| last.address.saturating_add(last.memory_size.0));
    let is_large = end - first >= sizes.pmd.bytes();
    object.load_align() >= sizes.pmd.bytes()
        || (object.kind == ObjectKind::Library
            && is_large
            && running_kernel() >= FILE_ALIGNMENT_KERNEL)
}

/// Describes the obstacles to all methods.
fn common_obstacles(root: &Root, object: &Object, sizes: Sizes) -> Result<Vec<String>, Error> {
    let mut why_not = Vec::new();
    if Thp::read_controls(root)?.is_none() {
        why_not.push("this kernel has no transparent huge pages".to_owned());
    }
    why_not.extend(too_small(object, sizes));
    if object.text_relocations {
        why_not.push("it has text relocations: the loader writes into its text".to_owned());
    }
    Ok(why_not)
}

/// Describes the obstacle to loading the preload library, which moves text.
fn loader_obstacle(object: &Object) -> Option<String> {
    let executable = &object.executable;
    match (object.kind, &executable.loader) {
        (ObjectKind::Library, _) => None,
        (_, None) => {
            Some("it is statically linked: the preload library does not get in".to_owned())
        }
        (_, Some(_)) if executable.has_known_loader() => None,
        (_, Some(loader)) => Some(format!(
            "the preload library takes the loader of glibc or musl, and this has {loader}"
        )),
    }
}

/// Describes the text that the page cache lacks, and the remedy.
fn unprimed(text: CachedPages) -> Option<String> {
    let prime = "`jumbo files prime` reads them in huge folios";
    let CachedPages {
        huge: Pages(huge),
        small: Pages(small),
        absent: Pages(absent),
    } = text;
    let all = counted(huge + small + absent, "huge page");
    match (small, absent) {
        (0, 0) => None,
        (0, _) => Some(format!(
            "{absent} of {all} are not in the page cache: {prime}"
        )),
        _ => Some(format!(
            "the page cache holds {small} of {all} in small folios: {prime}, once no process maps it"
        )),
    }
}

/// Returns the flags that align text in the file and in memory.
fn flags(linker: Linker, sizes: Sizes) -> String {
    let pmd = sizes.pmd.bytes();
    let max = format!("-Wl,-z,max-page-size={pmd}");
    let both = format!("{max} -Wl,-z,common-page-size={pmd}");
    match linker {
        Linker::Gnu | Linker::Gold => both,
        Linker::Lld | Linker::Mold => format!("{max} -Wl,-z,separate-loadable-segments"),
        Linker::Go => format!("-ldflags='-linkmode=external \"-extldflags={both}\"'"),
    }
}
