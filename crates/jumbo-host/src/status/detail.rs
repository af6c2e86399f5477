//! All data of one process, for `jumbo status -p`: [`Detail`].

use std::collections::BTreeMap;

use serde::Serialize;

use crate::kernel::folios::Folios;
use crate::kernel::task::{self, Faults};
use crate::kernel::thp::Thp;
use crate::kernel::{FileError, Root, aside};
use crate::units::{Bytes, PageSize};

use super::process::Observer;
use super::{Covered, Kind, Missing, Usage, siblings};
use jumbo::status::HUGE;

/// Memory of a process, and the reasons why not more of it is huge.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Detail {
    /// Process ID.
    pub pid: u32,
    /// Name as in ps(1).
    pub name: String,
    /// Command line, quoted for a shell.
    pub command: String,
    /// Peak resident set without hugetlb.
    pub peak: Option<Bytes>,
    /// Page faults.
    pub faults: Option<Faults>,
    /// Memory according to status, which any user may read.
    pub memory: Option<task::Memory>,
    /// Memory by kind and folio size; `None` without permission.
    pub usage: Option<Usage>,
    /// Proportional set size (PSS).
    pub proportional: Option<Bytes>,
    /// Reason why memory of a kind is not huge.
    pub why_not: BTreeMap<Kind, String>,
    /// The living program whose memory this process shares as its reaper.
    pub reaper_of: Option<u32>,
    /// Counters of the preload library; `None` without the library or without permission.
    pub jumbo: Option<Covered>,
    /// All mappings, on request.
    pub mappings: Vec<MappingDetail>,
    /// Unavailable data with reasons.
    pub missing: Vec<Missing>,
}

/// One mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MappingDetail {
    /// First address.
    pub start: u64,
    /// End address, exclusive.
    pub end: u64,
    /// Kind of memory.
    pub kind: Kind,
    /// Permissions as in /proc/PID/maps: `rw-p`.
    pub permissions: String,
    /// File or name; empty for anonymous memory.
    pub path: String,
    /// Resident memory, including hugetlb.
    pub bytes: Bytes,
    /// Memory in THPs mapped by PMD, and in hugetlb pages of at least 2 MiB.
    pub huge: Bytes,
    /// Advised by MADV_HUGEPAGE.
    pub advised: bool,
    /// Advised by MADV_NOHUGEPAGE.
    pub declined: bool,
    /// True if a whole aligned huge page fits.
    pub fits: bool,
    /// `THPeligible` of smaps.
    pub eligible: bool,
}

/// Resident memory of a kind in mappings that a huge page fits in.
#[derive(Clone, Copy, Debug, Default)]
struct Fitting {
    all: Bytes,
    /// What is not huge, of mappings without advice.
    unadvised: Bytes,
    /// What is not huge, of mappings with MADV_NOHUGEPAGE.
    declined: Bytes,
}

/// Reads the details of processes.
#[derive(Debug)]
pub struct Inspector {
    root: Root,
    observer: Observer,
    folios: Option<Folios>,
    thp: Option<Thp>,
    pmd: PageSize,
    /// True to keep all mappings.
    pub mappings: bool,
    /// Data that is unavailable for all processes, with reasons.
    pub missing: Vec<Missing>,
}

/// Creates an observer whose reader processes cannot block.
///
/// # Errors
/// [`FileError`] where the PMD size is unknown.
pub fn observer(root: &Root) -> Result<Observer, FileError> {
    Ok(Observer::new(root)?.reading(aside::smaps, aside::entries))
}

impl Inspector {
    /// Creates an inspector of the processes of `root`, with folio sizes where they are readable.
    ///
    /// # Errors
    /// [`FileError`] where the PMD size is unknown.
    pub fn new(root: &Root) -> Result<Self, FileError> {
        let observer = observer(root)?;
        let mut missing = Vec::new();
        let folios = observer.folios().map_err(|error| {
            missing.push(Missing::for_lack_of(
                "folio sizes below the PMD size",
                &error,
                "root",
            ));
        });
        let thp = Thp::read(root).map_err(|error| {
            missing.push(Missing::new("reasons why memory is not huge", &error));
        });
        Ok(Self {
            root: root.clone(),
            pmd: observer.pmd_size(),
            observer,
            folios: folios.ok(),
            thp: thp.ok().flatten(),
            mappings: false,
            missing,
        })
    }

    /// Reads the details of one process. [`Detail::missing`] lists unreadable data.
    pub fn inspect(&mut self, pid: u32) -> Result<Detail, FileError> {
        let memory = task::memory(&self.root, pid)?;
        let others = task::all(&self.root).unwrap_or_default();
        let reaper_of = siblings::program_of(&self.root, pid, others);
        let mut detail = Detail {
            pid,
            name: task::name(&self.root, pid)?,
            peak: task::vm_hwm(&self.root, pid)?,
            faults: task::faults(&self.root, pid).ok(),
            memory,
            reaper_of: reaper_of.map(|sibling| sibling.program),
            ..Detail::default()
        };
        let command = task::command(&self.root, pid);
        let result = command.and_then(|command| {
            detail.command = command;
            self.read_mappings(&mut detail)
        });
        match result {
            Ok(()) => {
                // Memory needs more permissions than smaps: those of a debugger.
                match Covered::read(&self.root, pid) {
                    Ok(covered) => detail.jumbo = covered,
                    Err(error) => detail.missing.push(Missing::for_lack_of(
                        "counters of jumbo in it",
                        &error,
                        "the right to trace it: CAP_SYS_PTRACE, or its user where Yama allows that",
                    )),
                }
                Ok(detail)
            }
            Err(error) if error.is_missing() => Err(error),
            Err(error) => {
                detail.missing.push(match error.is_held_back() {
                    true => Missing::new("its memory", &error),
                    false => Missing::for_lack_of(
                        "memory by kind and folio size",
                        &error,
                        "its user, or CAP_SYS_PTRACE",
                    ),
                });
                Ok(detail)
            }
        }
    }

    fn read_mappings(&mut self, detail: &mut Detail) -> Result<(), FileError> {
        let pid = detail.pid;
        let usage = match &mut self.folios {
            Some(folios) => self.observer.usage_with_folios(pid, folios)?,
            None => self.observer.usage(pid)?,
        };
        let mut fitting: BTreeMap<Kind, Fitting> = BTreeMap::new();
        let mut proportional = Bytes(0);
        let (pmd, wanted) = (self.pmd, self.mappings);
        self.observer.each(pid, |kind, mapping| {
            proportional += mapping.pss;
            let fits = pmd
                .align_up(mapping.start)
                .is_some_and(|start| start + pmd.bytes() <= mapping.end);
            if fits {
                let entry = fitting.entry(kind).or_default();
                entry.all += mapping.rss;
                let small = mapping.rss.0.saturating_sub(mapping.pmd_mapped().0);
                match (mapping.declined, mapping.advised) {
                    (true, _) => entry.declined += Bytes(small),
                    (false, false) => entry.unadvised += Bytes(small),
                    (false, true) => {}
                }
            }
            if wanted {
                let hugetlb = mapping.hugetlb();
                let is_huge = mapping.kernel_page_size.is_some_and(|size| size >= HUGE);
                let flag = |set, letter| if set { letter } else { '-' };
                detail.mappings.push(MappingDetail {
                    start: mapping.start,
                    end: mapping.end,
                    kind,
                    permissions: [
                        flag(mapping.read, 'r'),
                        flag(mapping.write, 'w'),
                        flag(mapping.execute, 'x'),
                        if mapping.shared { 's' } else { 'p' },
                    ]
                    .iter()
                    .collect(),
                    path: mapping.path.to_owned(),
                    bytes: mapping.rss + hugetlb,
                    huge: mapping.pmd_mapped() + if is_huge { hugetlb } else { Bytes(0) },
                    advised: mapping.advised,
                    declined: mapping.declined,
                    fits,
                    eligible: mapping.thp_eligible,
                });
            }
        })?;
        let disabled = detail
            .memory
            .as_ref()
            .is_some_and(|memory| memory.thp_enabled == Some(false));
        for (kind, of_kind) in &usage.0 {
            let small = Bytes(of_kind.bytes.0.saturating_sub(of_kind.huge.0));
            let fitting = fitting.get(kind).copied().unwrap_or_default();
            if small.0 >= pmd.bytes()
                && let Some(reason) = why_not(
                    *kind,
                    fitting,
                    of_kind.huge,
                    self.thp.as_ref(),
                    pmd,
                    disabled,
                )
            {
                detail.why_not.insert(*kind, reason);
            }
        }
        detail.usage = Some(usage);
        detail.proportional = Some(proportional);
        Ok(())
    }
}

/// Reason why memory of `kind` beyond `huge` bytes is not huge, by controls, advice and layout.
fn why_not(
    kind: Kind,
    fitting: Fitting,
    huge: Bytes,
    thp: Option<&Thp>,
    pmd: PageSize,
    disabled: bool,
) -> Option<String> {
    let Some(thp) = thp else {
        return Some("the THP controls of this kernel are missing or cannot be read".to_owned());
    };
    if disabled {
        return Some("the process has THP switched off (PR_SET_THP_DISABLE)".to_owned());
    }
    if fitting.all == Bytes(0) {
        return Some(format!("no mapping holds a whole aligned {pmd} page"));
    }
    let (knob, choice) = match kind {
        Kind::Heap | Kind::Data | Kind::Stack => ("enabled", thp.anon(pmd)?),
        Kind::Shared => ("shmem_enabled", thp.shared(pmd)?),
        Kind::Text | Kind::File => {
            return Some(
                "the page cache holds the file in smaller folios, or the mapping is not aligned to it"
                    .to_owned(),
            );
        }
    };
    match choice.current.as_str() {
        // MADV_COLLAPSE and hugetlb are not subject to the knob.
        "never" | "deny" if huge > Bytes(0) => Some(format!(
            "{knob} is `{}`: a touch takes base pages, and the rest has not been collapsed",
            choice.current
        )),
        "never" | "deny" => Some(format!("{knob} is `{}` for {pmd} pages", choice.current)),
        _ if fitting.declined >= fitting.unadvised && fitting.declined.0 >= pmd.bytes() => Some(format!(
            "the program excludes {} of it (MADV_NOHUGEPAGE)",
            fitting.declined
        )),
        "madvise" | "advise" if fitting.unadvised > Bytes(0) => Some(format!(
            "{knob} is `{}` and {} have no MADV_HUGEPAGE",
            choice.current, fitting.unadvised
        )),
        _ => Some(
            "touched before it was advised, in mappings too small for a huge page, or when none was free"
                .to_owned(),
        ),
    }
}

/// Finds processes by a PID, or by the name of the program or of its main thread.
pub fn find(root: &Root, text: &str) -> Result<Vec<u32>, FileError> {
    let pids = task::all(root)?;
    if let Ok(pid) = text.parse::<u32>() {
        return Ok(pids.into_iter().filter(|known| *known == pid).collect());
    }
    let commands = task::arguments_of_each(root, &pids);
    let named = |(pid, arguments): &(u32, Vec<String>)| {
        // A title of the program may continue after a blank.
        let program = arguments.first().and_then(|first| first.split(' ').next());
        task::name(root, *pid).is_ok_and(|name| name == text)
            || program.and_then(|program| program.rsplit('/').next()) == Some(text)
    };
    let found = pids.into_iter().zip(commands).filter(named);
    Ok(found.map(|(pid, _)| pid).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_knob_is_no_reason_against_memory_that_is_huge_in_spite_of_it() {
        let thp = Thp::read_controls(&Root::host()).ok().flatten();
        let Some(mut thp) = thp else {
            return;
        };
        let mut never = thp.enabled.clone();
        never.current = "never".to_owned();
        thp.shmem_enabled = Some(never);
        thp.sizes.clear();
        let fitting = Fitting {
            all: Bytes(1 << 30),
            unadvised: Bytes(1 << 30),
            declined: Bytes(0),
        };
        let said = |huge| {
            let why = why_not(
                Kind::Shared,
                fitting,
                Bytes(huge),
                Some(&thp),
                thp.pmd_size,
                false,
            );
            why.unwrap_or_default()
        };
        assert!(said(0).contains("is `never` for "), "{}", said(0));
        assert!(
            said(2 << 20).contains("has not been collapsed"),
            "{}",
            said(2 << 20)
        );
    }
}
