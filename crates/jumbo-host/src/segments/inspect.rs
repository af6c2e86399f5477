//! What each rung of the ladder would give a file, and why not: [`inspect`].

use std::path::{Path, PathBuf};

use object::read::ReadCache;
use serde::Serialize;

use super::elf::{Linker, Object, ObjectKind, Segment};
use super::file_system::{huge_folios, running_kernel};
use super::prime::{self, CachedText};
use super::{Error, Sizes, open};
use crate::kernel::Root;
use crate::kernel::thp::Thp;
use crate::units::{Bytes, Pages, counted};

/// The first Linux that maps large files at multiples of the PMD size, where the file system asks for it, as ext4, xfs and btrfs
/// do.
const ALIGNS_FILES: (u32, u32) = (5, 18);

/// A way to huge text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TextMethod {
    /// `file` or `shared`.
    pub name: &'static str,
    /// Why it is not to be had as things are; empty where it is.
    pub why_not: Vec<String>,
}

/// One segment, and what a PMD could map of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SegmentReport {
    /// The segment.
    #[serde(flatten)]
    pub segment: Segment,
    /// How many huge pages it holds at its addresses.
    pub whole: Pages,
    /// Whether address and offset are alike modulo the PMD size.
    pub congruent: bool,
    /// How those huge pages are cached; `None` where it is no text, or not congruent.
    pub cached: Option<CachedText>,
}

/// A file, as the ladder sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Inspection {
    /// The file.
    pub path: PathBuf,
    /// What kind of file it is.
    pub kind: ObjectKind,
    /// What linked it.
    pub linker: Linker,
    /// Its build-id.
    pub build_id: Option<String>,
    /// What one PMD maps.
    pub huge_page: Bytes,
    /// Its segments.
    pub segments: Vec<SegmentReport>,
    /// The rungs, highest first.
    #[serde(rename = "rungs")]
    pub methods: Vec<TextMethod>,
    /// The flags of the compiler that have it linked so that its text is huge once it is primed; `None` where it is so.
    pub flags: Option<String>,
}

/// Looks at a file.
///
/// # Errors
/// [`Error`] where it cannot be read or is not ELF.
pub fn inspect(root: &Root, path: &Path) -> Result<Inspection, Error> {
    let sizes = Sizes::read(root)?;
    let file = open(path)?;
    let object = Object::read(&ReadCache::new(&file))?;
    let (mut segments, mut text) = (Vec::new(), CachedText::default());
    for segment in &object.segments {
        let congruent = segment.is_congruent(sizes.pmd);
        let mut cached = None;
        if congruent && segment.execute {
            let offsets: Vec<u64> = segment.offsets(sizes).collect();
            let found = prime::look(&file, &offsets, sizes).map_err(Error::io("read", path))?;
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
    let mut of_file = every_rung(root, &object, sizes)?;
    if of_file.is_empty() {
        of_file.extend(misplaced.clone());
        of_file.extend(huge_folios(&file, path, sizes).err());
    }
    if of_file.is_empty() {
        of_file.extend(unprimed(text));
    }
    let mut shared = moved(root, &object, sizes)?;
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

/// Why a PMD cannot map the file's own text, by how it is linked.
pub(super) fn misplaced(object: &Object, sizes: Sizes) -> Option<String> {
    let pmd = sizes.pmd;
    if object
        .text()
        .all(|text| text.file_size < Pages(1).bytes(pmd))
    {
        return Some(small(object, sizes));
    }
    let large = || {
        object
            .text()
            .filter(|text| text.file_size >= Pages(1).bytes(pmd))
    };
    if let Some(text) = large().find(|text| !text.is_congruent(pmd)) {
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
    if large().all(|text| text.whole_pages(sizes) == Pages(0)) {
        return Some(format!(
            "no whole huge page of {pmd} is in its text at its addresses: `jumbo text align` makes a copy where the read-only data \
             beside it fills one"
        ));
    }
    None
}

fn small(object: &Object, sizes: Sizes) -> String {
    let text: Bytes = object.text().map(|text| text.file_size).sum();
    format!(
        "its text ({text}) is smaller than a huge page ({})",
        sizes.pmd
    )
}

/// True where it is loaded at a multiple of the PMD size: by its p_align, or because the kernel does so with large files. The
/// program itself has its address from its p_align alone.
pub(super) fn is_placed(object: &Object, sizes: Sizes) -> bool {
    let first = object.segments.first().map_or(0, |first| first.address);
    let end = object
        .segments
        .last()
        .map_or(0, |last| last.address.saturating_add(last.memory_size.0));
    let is_large = end - first >= sizes.pmd.bytes();
    object.load_align() >= sizes.pmd.bytes()
        || (object.kind == ObjectKind::Library && is_large && running_kernel() >= ALIGNS_FILES)
}

/// What stands in the way of all rungs.
fn every_rung(root: &Root, object: &Object, sizes: Sizes) -> Result<Vec<String>, Error> {
    let mut why_not = Vec::new();
    if Thp::read_controls(root)?.is_none() {
        why_not.push("this kernel has no transparent huge pages".to_owned());
    }
    if object
        .text()
        .all(|text| text.file_size < Pages(1).bytes(sizes.pmd))
    {
        why_not.push(small(object, sizes));
    }
    if object.text_relocations {
        why_not.push("it has text relocations: the loader writes into its text".to_owned());
    }
    Ok(why_not)
}

/// What stands in the way of text that is moved while the program runs.
fn moved(root: &Root, object: &Object, sizes: Sizes) -> Result<Vec<String>, Error> {
    let mut why_not = every_rung(root, object, sizes)?;
    let executable = &object.executable;
    let loader = match (object.kind, &executable.loader) {
        (ObjectKind::Library, _) => None,
        (_, None) => {
            Some("it is statically linked: the preload library does not get in".to_owned())
        }
        (_, Some(_)) if executable.has_known_loader() => None,
        (_, Some(loader)) => Some(format!(
            "the preload library takes the loader of glibc or musl, and this has {loader}"
        )),
    };
    why_not.extend(loader);
    Ok(why_not)
}

/// What the page cache lacks, and what mends it.
fn unprimed(text: CachedText) -> Option<String> {
    let prime = "`jumbo text prime` reads them in huge folios";
    let all = Pages(text.huge.0 + text.small.0 + text.absent.0);
    match text {
        CachedText {
            small: Pages(0),
            absent: Pages(0),
            ..
        } => None,
        CachedText {
            small: Pages(0),
            absent,
            ..
        } => Some(format!(
            "{} of {} are not in the page cache: {prime}",
            absent.0,
            counted(all.0, "huge page")
        )),
        CachedText { small, .. } => Some(format!(
            "the page cache holds {} of {} in small folios: {prime}, once no process maps it",
            small.0,
            counted(all.0, "huge page")
        )),
    }
}

/// What has text begin at a huge page of its own, at offsets that are alike.
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
