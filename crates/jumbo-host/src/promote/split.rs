//! The way back: [`split()`].
//!
//! No call splits a huge page as such. MADV_COLD on one base page of a THP splits all of it, since the
//! kernel moves base pages to the list of inactive ones: of memory that no other process maps.
//! Text and memory of several processes are split by `split_huge_pages` of debugfs, for root. It takes
//! the ID of a process, and splits what of the range it can.
//!
//! jumbo keeps no record of what it promoted: what is split is all that is huge in the process, and of
//! the kinds that are meant.

use std::ops::ControlFlow;
use std::time::Instant;

use rustix::io::Errno;
use serde::Serialize;

use super::access::MemoryAdvice;
use super::plan::size;
use super::{Access, Pause, Progress, Refusal, Selection, Target, Watcher};
use crate::kernel::remote::End;
use crate::kernel::{aside, base_page};
use crate::status::{Kind, process::Observer};
use crate::units::Bytes;

const DEBUGFS: &str = "sys/kernel/debug/split_huge_pages";
/// The rest is left after so many searches for a thread in vain.
const MAX_IN_VAIN: u32 = 8;
/// The number of pages that are advised before the watcher is asked.
const BATCH: usize = 64;

/// The result of [`split()`].
#[derive(Clone, Debug, Default, Serialize)]
pub struct Split {
    /// Mapped by PMD before.
    pub before: Bytes,
    /// And after.
    pub after: Bytes,
    /// The means: `MADV_COLD`, `split_huge_pages`.
    pub means: Vec<&'static str>,
    /// Why not all is split.
    pub left: Option<String>,
    /// In seconds.
    pub seconds: f64,
}

/// Splits what is huge of `target`; with `dry_run` counts it.
///
/// # Errors
/// [`Refusal`] where the process cannot be looked into.
pub fn split(
    target: &Target,
    access: &Access,
    selection: &Selection,
    dry_run: bool,
    watcher: &mut dyn Watcher,
) -> Result<Split, Refusal> {
    let started = Instant::now();
    let pmd = size(Observer::new(&target.root)?.pmd_size());
    let huge = huge(target, selection, pmd)?;
    let bytes = |blocks: &[Block]| Bytes(blocks.len() as u64 * pmd as u64);
    let mut done = Split {
        before: bytes(&huge),
        after: bytes(&huge),
        ..Split::default()
    };
    if dry_run || huge.is_empty() {
        return Ok(done);
    }
    let base = size(base_page(&target.root));
    let (mut end, mut in_vain) = (None, 0);
    let mut addresses: Vec<u64> = huge.iter().map(|block| block.0).collect();
    while !addresses.is_empty() && end.is_none() {
        let progress = Progress {
            done: Bytes(done.before.0 - addresses.len() as u64 * pmd as u64),
            of: done.before,
            pause: None::<Pause>,
        };
        if watcher.poll(&progress) == ControlFlow::Break(()) {
            end = Some(String::from("interrupted"));
            break;
        }
        let now = addresses
            .get(..BATCH.min(addresses.len()))
            .unwrap_or_default();
        let advised = access.advise(target, now, MemoryAdvice::Cold, base);
        let reached = advised.answers.len();
        addresses.drain(..reached);
        in_vain = if reached > 0 { 0 } else { in_vain + 1 };
        match advised.end {
            End::Done | End::Signal | End::NoThread | End::Gone if in_vain < MAX_IN_VAIN => {}
            end_of => end = Some(end_of.to_string()),
        }
    }
    done.means.push("MADV_COLD");
    let mut left = self::huge(target, selection, pmd)?;
    if !left.is_empty() && end.as_deref() != Some("interrupted") {
        match by_debugfs(target, &left, pmd) {
            Ok(()) => {
                done.means.push("split_huge_pages");
                left = self::huge(target, selection, pmd)?;
                end = end.filter(|_| !left.is_empty());
            }
            Err(why) => end = Some(end.map_or(why.clone(), |end| format!("{end}; {why}"))),
        }
    }
    done.after = bytes(&left);
    let unsplit = || String::from("other processes map it, or pages of it are pinned");
    done.left = (!left.is_empty()).then(|| end.unwrap_or_else(unsplit));
    done.seconds = started.elapsed().as_secs_f64();
    Ok(done)
}

/// The address of a huge page.
struct Block(u64);

/// The huge pages of the kinds that are meant.
fn huge(target: &Target, selection: &Selection, pmd: usize) -> Result<Vec<Block>, Refusal> {
    let observer = Observer::new(&target.root)?.reading(aside::smaps);
    let pagemap = target.pagemap()?;
    let base = base_page(&target.root);
    let mut blocks = Vec::new();
    let each = observer.each(target.pid(), |kind, mapping| {
        let is_hugetlb = mapping.kernel_page_size.is_some_and(|size| size > base);
        let is_meant = selection.takes(kind, mapping) || kind == Kind::Stack && selection.heap;
        if is_hugetlb || !is_meant || mapping.pmd_mapped() == Bytes(0) {
            return;
        }
        let word = |address: u64| usize::try_from(address).unwrap_or(usize::MAX);
        let range = word(mapping.start)..word(mapping.end);
        let mut add = |run: std::ops::Range<usize>| {
            let first = run.start.next_multiple_of(pmd);
            let pages = (first..run.end).step_by(pmd);
            blocks.extend(pages.map(|at| Block(at as u64)));
        };
        let walked = pagemap.walk(range.clone(), |run, found| {
            if found.huge {
                add(run);
            }
        });
        // Before 6.7 all of the mapping may be huge.
        if walked == Err(Errno::NOTTY) {
            add(range);
        }
    });
    each.map_err(|error| target.unreadable(error))?;
    Ok(blocks)
}

/// By the ID: should it be another process's by now, that one keeps its memory, on base pages.
fn by_debugfs(target: &Target, blocks: &[Block], pmd: usize) -> Result<(), String> {
    for block in blocks {
        if target.process.is_gone() {
            return Err(String::from("it has ended"));
        }
        let (start, end) = (block.0, block.0 + pmd as u64);
        let request = format!("{},{start:#x},{end:#x}", target.pid());
        target.root.write(DEBUGFS, &request).map_err(|error| {
            format!(
                "the kernel splits text, and pages that several processes map, by debugfs alone: {error} (root; \
                 `mount -t debugfs none /sys/kernel/debug`)"
            )
        })?;
    }
    Ok(())
}
