//! Splits huge pages, to revert a promotion: [`split()`].
//!
//! No call splits a huge page directly. MADV_COLD on one base page splits a THP that no other
//! process maps, since the kernel deactivates single base pages. Text and memory of several
//! processes need `split_huge_pages` of debugfs, for root, with a process ID and a range.
//!
//! jumbo keeps no record of promotions: it splits all huge pages of the selected kinds.

use std::ops::ControlFlow;
use std::time::Instant;

use serde::Serialize;

use super::access::cool;
use super::plan::{Survey, size};
use super::{Progress, Refusal, Selection, Target, Watcher};
use crate::kernel::{aside, base_page};
use crate::status::{Kind, process::Observer};
use crate::units::Bytes;

const DEBUGFS_FILE: &str = "sys/kernel/debug/split_huge_pages";
/// Maximum number of pages between calls of the watcher.
const MAX_BATCH_PAGES: usize = 64;

/// Result of [`split()`].
#[derive(Clone, Debug, Default, Serialize)]
pub struct Split {
    /// Memory mapped by PMD before.
    pub before: Bytes,
    /// Memory mapped by PMD after.
    pub after: Bytes,
    /// Methods used: `MADV_COLD`, `split_huge_pages`.
    pub means: Vec<&'static str>,
    /// Reason why some pages are still huge.
    pub left: Option<String>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Splits huge pages of `target`; with `dry_run` only counts them.
///
/// # Errors
/// [`Refusal`] where the process cannot be read.
pub fn split(
    target: &Target,
    selection: &Selection,
    dry_run: bool,
    watcher: &mut dyn Watcher,
) -> Result<Split, Refusal> {
    let started = Instant::now();
    let pmd = size(Observer::new(&target.root)?.pmd_size());
    let addresses = huge(target, selection, pmd)?;
    let bytes = |addresses: &[u64]| Bytes(addresses.len() as u64 * pmd as u64);
    let mut done = Split {
        before: bytes(&addresses),
        after: bytes(&addresses),
        ..Split::default()
    };
    if dry_run || addresses.is_empty() {
        return Ok(done);
    }
    let base = size(base_page(&target.root));
    let mut end = None;
    for (at, address) in addresses.iter().enumerate() {
        let progress = Progress {
            done: bytes(&addresses[..at]),
            of: done.before,
            pause: None,
        };
        let is_due = at % MAX_BATCH_PAGES == 0;
        if is_due && watcher.poll(&progress) == ControlFlow::Break(()) {
            end = Some(String::from("interrupted"));
        } else if let Err(why) = cool(target, *address, base) {
            end = Some(why.to_string());
        }
        if end.is_some() {
            break;
        }
    }
    done.means.push("MADV_COLD");
    let mut left = huge(target, selection, pmd)?;
    if !left.is_empty() && end.as_deref() != Some("interrupted") {
        match by_debugfs(target, &left, pmd) {
            Ok(()) => {
                done.means.push("split_huge_pages");
                left = huge(target, selection, pmd)?;
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

/// Returns the addresses of the selected huge pages.
fn huge(target: &Target, selection: &Selection, pmd: usize) -> Result<Vec<u64>, Refusal> {
    let observer = Observer::new(&target.root)?.reading(aside::smaps, aside::entries);
    let calls = target.pagemap()?;
    let base = base_page(&target.root);
    let survey = Survey::new(calls, base, observer.pmd_size());
    let (mut addresses, mut failed) = (Vec::new(), None);
    let each = observer.each(target.pid(), |kind, mapping| {
        let is_hugetlb = mapping.kernel_page_size.is_some_and(|size| size > base);
        let is_selected = selection.takes(kind, mapping) || kind == Kind::Stack && selection.heap;
        if is_hugetlb || !is_selected || mapping.pmd_mapped() == Bytes(0) {
            return;
        }
        let surveyed = calls.survey(survey.whole(mapping), pmd, |block| {
            // Without PAGEMAP_SCAN, before 6.7, all of the mapping may be huge.
            if block.is_huge || !calls.scans() {
                addresses.push(block.address as u64);
            }
        });
        failed = failed.take().or(surveyed.err());
    });
    each.map_err(|error| target.unreadable(error))?;
    if let Some(error) = failed {
        return Err(target.unreadable(target.unread("read", error)));
    }
    Ok(addresses)
}

/// Splits by debugfs. A process that reuses the ID would lose only its huge pages.
fn by_debugfs(target: &Target, addresses: &[u64], pmd: usize) -> Result<(), String> {
    for start in addresses {
        if target.process.is_gone() {
            return Err(String::from("it has ended"));
        }
        let end = start + pmd as u64;
        let request = format!("{},{start:#x},{end:#x}", target.pid());
        target.root.write(DEBUGFS_FILE, &request).map_err(|error| {
            format!(
                "the kernel splits text, and pages that several processes map, by debugfs alone: {error} (root; \
                 `mount -t debugfs none /sys/kernel/debug`)"
            )
        })?;
    }
    Ok(())
}
