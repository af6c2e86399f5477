//! One process, closely: [`Detail`], what `jumbo status -p` shows.

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

/// A process's memory, and why not more of it is huge.
#[derive(Clone, Debug, Serialize)]
pub struct Detail {
    /// The process.
    pub pid: u32,
    /// Its name, as ps(1) shows it.
    pub name: String,
    /// Its command line, quoted as for a shell.
    pub command: String,
    /// The largest resident set it ever had, without hugetlb.
    pub peak: Option<Bytes>,
    /// Its page faults.
    pub faults: Option<Faults>,
    /// What status says, which any user may see.
    pub memory: Option<task::Memory>,
    /// By kind and folio size; `None` where this user may not look.
    pub usage: Option<Usage>,
    /// Resident memory, each page divided by the number of processes that map it.
    pub proportional: Option<Bytes>,
    /// Why memory of a kind is not huge.
    pub why_not: BTreeMap<Kind, String>,
    /// The program whose memory this is, where this is the reaper of one that lives.
    pub reaper_of: Option<u32>,
    /// What jumbo does in it; `None` where the preload library is not in it, or this user may not look.
    pub jumbo: Option<Covered>,
    /// Every mapping, where that was asked for.
    pub mappings: Vec<MappingDetail>,
    /// What is not shown, and why.
    pub missing: Vec<Missing>,
}

/// One mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MappingDetail {
    /// The first address.
    pub start: u64,
    /// The first address behind it.
    pub end: u64,
    /// What it is to the program.
    pub kind: Kind,
    /// As in /proc/PID/maps: `rw-p`.
    pub permissions: String,
    /// The file or name; empty for anonymous memory.
    pub path: String,
    /// Resident, hugetlb included.
    pub bytes: Bytes,
    /// Of that in THPs mapped by PMD and in hugetlb pages of at least 2 MiB.
    pub huge: Bytes,
    /// The program gave MADV_HUGEPAGE.
    pub advised: bool,
    /// The program gave MADV_NOHUGEPAGE.
    pub declined: bool,
    /// One whole aligned huge page fits in.
    pub fits: bool,
    /// The kernel would put a THP here at a fault.
    pub eligible: bool,
}

/// What of a kind's memory a huge page could hold, by the program's advice.
#[derive(Clone, Copy, Debug, Default)]
struct Advice {
    fitting: Bytes,
    advised: Bytes,
}

/// Looks closely at processes, with everything that one look and the next share.
#[derive(Debug)]
pub struct Lens {
    root: Root,
    observer: Observer,
    folios: Option<Folios>,
    thp: Option<Thp>,
    pmd: PageSize,
    /// Keep every mapping.
    pub mappings: bool,
    /// What no look can show, and why.
    pub missing: Vec<Missing>,
}

/// Looks at processes by a reader that they cannot hold up.
///
/// # Errors
/// [`FileError`] where the PMD size cannot be told.
pub fn observer(root: &Root) -> Result<Observer, FileError> {
    Ok(Observer::new(root)?.reading(aside::smaps))
}

impl Lens {
    /// A lens on the processes behind `root`. Folio sizes are looked up where the kernel lets us.
    ///
    /// # Errors
    /// [`FileError`] where the PMD size cannot be told.
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
            missing.push(Missing::new("why memory is not huge", &error));
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

    /// Looks at one process.
    ///
    /// # Errors
    /// [`FileError::Io`] where it is gone. What this user may not see is in [`Detail::missing`].
    pub fn look(&mut self, pid: u32) -> Result<Detail, FileError> {
        let memory = task::memory(&self.root, pid)?;
        let mut detail = Detail {
            pid,
            name: task::name(&self.root, pid)?,
            command: String::new(),
            peak: task::vm_hwm(&self.root, pid)?,
            faults: task::faults(&self.root, pid).ok(),
            memory,
            usage: None,
            proportional: None,
            why_not: BTreeMap::new(),
            reaper_of: self.program_of(pid),
            jumbo: None,
            mappings: Vec::new(),
            missing: Vec::new(),
        };
        let command = task::command(&self.root, pid);
        let looked = command.and_then(|command| {
            detail.command = command;
            self.look_closely(&mut detail)
        });
        match looked {
            Ok(()) => {
                // It takes more than the look did: reading a process's memory is what a debugger may.
                match Covered::read(&self.root, pid) {
                    Ok(covered) => detail.jumbo = covered,
                    Err(error) => detail.missing.push(Missing::for_lack_of(
                        "what jumbo does in it",
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

    fn program_of(&self, pid: u32) -> Option<u32> {
        let others = task::all(&self.root).unwrap_or_default();
        siblings::program_of(&self.root, pid, others).map(|sibling| sibling.program)
    }

    fn look_closely(&mut self, detail: &mut Detail) -> Result<(), FileError> {
        let pid = detail.pid;
        let usage = match &mut self.folios {
            Some(folios) => self.observer.usage_with_folios(pid, folios)?,
            None => self.observer.usage(pid)?,
        };
        let mut advice: BTreeMap<Kind, Advice> = BTreeMap::new();
        let mut proportional = Bytes(0);
        let (pmd, wanted) = (self.pmd, self.mappings);
        self.observer.each(pid, |kind, mapping| {
            proportional += mapping.pss;
            let whole = pmd
                .align_up(mapping.start)
                .is_some_and(|start| start + pmd.bytes() <= mapping.end);
            if whole {
                let entry = advice.entry(kind).or_default();
                entry.fitting += mapping.rss;
                if mapping.advised {
                    entry.advised += mapping.rss;
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
                    fits: whole,
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
            let advice = advice.get(kind).copied().unwrap_or_default();
            if small.0 >= pmd.bytes()
                && let Some(why) = why_not(*kind, advice, self.thp.as_ref(), pmd, disabled)
            {
                detail.why_not.insert(*kind, why);
            }
        }
        detail.usage = Some(usage);
        detail.proportional = Some(proportional);
        Ok(())
    }
}

/// Why memory of `kind` that is not huge is not, as far as controls, advice and layout tell.
fn why_not(
    kind: Kind,
    advice: Advice,
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
    if advice.fitting == Bytes(0) {
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
        "never" | "deny" => Some(format!("{knob} is `{}` for {pmd} pages", choice.current)),
        "madvise" | "advise" if advice.advised < advice.fitting => {
            let unadvised = Bytes(advice.fitting.0 - advice.advised.0);
            Some(format!(
                "{knob} is `{}` and {unadvised} have no MADV_HUGEPAGE",
                choice.current
            ))
        }
        _ => Some(
            "touched before it was advised, in mappings too small for a huge page, or when none was free"
                .to_owned(),
        ),
    }
}

/// The processes that `text` names: a PID, or the name of the program or of its main thread.
///
/// # Errors
/// [`FileError`] where /proc cannot be listed.
pub fn find(root: &Root, text: &str) -> Result<Vec<u32>, FileError> {
    let pids = task::all(root)?;
    if let Ok(pid) = text.parse::<u32>() {
        return Ok(pids.into_iter().filter(|known| *known == pid).collect());
    }
    let commands = task::arguments_of_each(root, &pids);
    let named = |(pid, arguments): &(u32, Vec<String>)| {
        // A title that the program wrote there goes on after a blank.
        let program = arguments.first().and_then(|first| first.split(' ').next());
        task::name(root, *pid).is_ok_and(|name| name == text)
            || program.and_then(|program| program.rsplit('/').next()) == Some(text)
    };
    let found = pids.into_iter().zip(commands).filter(named);
    Ok(found.map(|(pid, _)| pid).collect())
}
