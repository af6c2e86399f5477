//! Facilities of this kernel, with this privilege, in this container, each with the reason:
//! [`Probe`].
//!
//! Files are read where they state the answer. The other facilities are tried on memory of this
//! process. The calls ask the kernel that runs this process, whatever the [`Root`].

use std::collections::BTreeMap;

use jumbo_sys::{self as sys, ThpDisable, thp_disable};
use rustix::io::Errno;
use rustix::mm::MapFlags;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use rustix::thread::CapabilitySet;
use serde::Serialize;

use super::cgroup::{Limit, Limits};
use super::hugetlb::{self, Pool};
use super::thp::{Choice, Thp};
use super::{FileError, Root, base_page, hvo, task, thp};
use crate::units::{Bytes, PageSize, Pages};

/// Maximum PMD size for a trial of MADV_COLLAPSE, which takes that much memory for a moment (512
/// MiB with base pages of 64 KiB).
const MAX_TRIAL_BYTES: Bytes = Bytes(32 << 20);

/// Availability of a facility.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Available {
    /// Available as the kernel documents it.
    Yes,
    /// Available with a restriction that the reason names.
    Limited,
    /// Unavailable.
    No,
}

/// Availability of one facility, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Feature {
    /// Availability.
    pub available: Available,
    /// Evidence.
    pub reason: String,
    /// Errno of a call that the kernel refused.
    pub errno: Option<i32>,
}

/// Results of all trials.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Probe {
    /// Base page size.
    pub base_page: PageSize,
    /// Size of the memory that one PMD maps.
    pub pmd_size: PageSize,
    /// Hugetlb pages of each size.
    pub hugetlb: BTreeMap<PageSize, Feature>,
    /// Folios of each size in anonymous memory.
    pub anon: BTreeMap<PageSize, Feature>,
    /// Folios of each size in shared memory.
    pub shared: BTreeMap<PageSize, Feature>,
    /// THP for this process (PR_SET_THP_DISABLE is inherited by children and kept by execve).
    pub thp_for_process: Feature,
    /// MADV_COLLAPSE.
    pub collapse: Feature,
    /// process_madvise(2), as `jumbo` uses it on other processes.
    pub process_madvise: Feature,
    /// process_mrelease(2).
    pub process_mrelease: Feature,
    /// HVO: hugetlb pages without tail descriptors.
    pub vmemmap_optimization: Feature,
    /// Hotplugged memory that holds its own descriptors.
    pub memmap_on_memory: Feature,
    /// Hugetlb limits of the control group.
    pub cgroup_hugetlb: Feature,
}

impl Feature {
    fn new(available: Available, reason: impl Into<String>) -> Self {
        Self {
            available,
            reason: reason.into(),
            errno: None,
        }
    }

    fn yes(reason: impl Into<String>) -> Self {
        Self::new(Available::Yes, reason)
    }

    fn limited(reason: impl Into<String>) -> Self {
        Self::new(Available::Limited, reason)
    }

    fn no(reason: impl Into<String>) -> Self {
        Self::new(Available::No, reason)
    }

    fn refused(reason: impl Into<String>, errno: Errno) -> Self {
        let reason = reason.into();
        Self {
            errno: Some(errno.raw_os_error()),
            ..Self::no(format!("{reason}: {errno}"))
        }
    }
}

impl Probe {
    /// All features with the names to print.
    pub fn features(&self) -> impl Iterator<Item = (String, &Feature)> {
        let sized = [
            ("hugetlb", &self.hugetlb),
            ("anonymous", &self.anon),
            ("shared", &self.shared),
        ];
        let others = [
            ("THP for this process", &self.thp_for_process),
            ("MADV_COLLAPSE", &self.collapse),
            ("process_madvise", &self.process_madvise),
            ("process_mrelease", &self.process_mrelease),
            ("HVO", &self.vmemmap_optimization),
            ("memmap_on_memory", &self.memmap_on_memory),
            ("cgroup hugetlb", &self.cgroup_hugetlb),
        ];
        let sized = sized.into_iter().flat_map(|(name, features)| {
            let named = move |(size, feature)| (format!("{name} {size}"), feature);
            features.iter().map(named)
        });
        sized.chain(others.map(|(name, feature)| (name.to_owned(), feature)))
    }
}

/// Probes all features in a few milliseconds, with the memory of at most one huge page.
pub fn probe(root: &Root) -> Probe {
    let pools = hugetlb::pools(root).map(Option::unwrap_or_default);
    let sizes: Vec<_> = pools.iter().flatten().map(|pool| pool.size).collect();
    let limits = Limits::read(root, &sizes);
    let thp = Thp::read(root);
    let base_page = base_page(root);
    let pmd_size = thp::pmd_size(root).unwrap_or_else(|_| thp::reach_of_pmd(base_page));
    Probe {
        base_page,
        pmd_size,
        hugetlb: pools
            .iter()
            .flatten()
            .map(|pool| (pool.size, pool_feature(pool, limits.as_ref().ok())))
            .collect(),
        anon: by_size(&thp, Thp::anon, anon_feature, MapFlags::PRIVATE),
        shared: by_size(&thp, Thp::shared, shared_feature, MapFlags::SHARED),
        thp_for_process: thp_for_process(root, &thp),
        collapse: collapse(pmd_size),
        process_madvise: process_madvise(),
        process_mrelease: process_mrelease(),
        vmemmap_optimization: vmemmap_optimization(root),
        memmap_on_memory: memmap_on_memory(root),
        cgroup_hugetlb: or_no(limits.map(|limits| cgroup_feature(&limits))),
    }
}

fn or_no(feature: Result<Feature, FileError>) -> Feature {
    feature.unwrap_or_else(|error| Feature::no(error.to_string()))
}

fn pool_feature(pool: &Pool, limits: Option<&Limits>) -> Feature {
    let touch = limits.and_then(|limits| limits.hugetlb.get(&pool.size));
    let reserve = limits.and_then(|limits| limits.reservations.get(&pool.size));
    let binding = [touch, reserve].into_iter().flatten();
    if let Some(limit) = binding.min_by_key(|limit| limit.room())
        && limit.room().0 < pool.size.bytes()
    {
        let file = limit.file.display();
        return Feature::no(format!(
            "{file} is {} with {} in use",
            limit.limit, limit.usage
        ));
    }
    let total = pool.total;
    match (pool.unused(), pool.may_grow_by()) {
        (Pages(0), Pages(0)) => Feature::no(format!(
            "none of {total} pages free, and nr_overcommit_hugepages allows no surplus"
        )),
        (Pages(0), surplus) => Feature::limited(format!(
            "none of {total} pages free, up to {surplus} surplus pages if memory is not fragmented"
        )),
        (unused, _) => Feature::yes(format!("{unused} of {total} pages free and unreserved")),
    }
}

fn by_size(
    thp: &Result<Option<Thp>, FileError>,
    choice: impl Fn(&Thp, PageSize) -> Option<&Choice>,
    feature: impl Fn(&Choice) -> Feature,
    sharing: MapFlags,
) -> BTreeMap<PageSize, Feature> {
    let Ok(Some(thp)) = thp else {
        return BTreeMap::new();
    };
    let of = |size: PageSize| {
        let at_a_fault = feature(choice(thp, size)?);
        // MADV_COLLAPSE makes PMD-sized folios, and has conditions of its own.
        if size == thp.pmd_size
            && at_a_fault.available == Available::No
            && can_collapse(size, sharing)
        {
            let reason = format!("not at a fault: {}; MADV_COLLAPSE works", at_a_fault.reason);
            return Some(Feature::limited(reason));
        }
        Some(at_a_fault)
    };
    let sizes = thp.sizes.keys().copied().chain([thp.pmd_size]);
    sizes.filter_map(|size| Some((size, of(size)?))).collect()
}

fn try_collapse(pmd: PageSize, sharing: MapFlags) -> Result<(), Errno> {
    let memory = sys::Scratch::new(pmd, sharing)?;
    memory.touch()?;
    sys::collapse(memory.address(), memory.size())
}

fn can_collapse(pmd: PageSize, sharing: MapFlags) -> bool {
    pmd.bytes() <= MAX_TRIAL_BYTES.0 && try_collapse(pmd, sharing).is_ok()
}

fn anon_feature(choice: &Choice) -> Feature {
    match choice.current.as_str() {
        "always" => Feature::yes("always"),
        "madvise" => Feature::yes("where MADV_HUGEPAGE was given"),
        word => Feature::no(format!("enabled is `{word}`")),
    }
}

fn shared_feature(choice: &Choice) -> Feature {
    match choice.current.as_str() {
        "always" | "force" => Feature::yes(choice.current.clone()),
        "within_size" => Feature::yes("within the size of the object"),
        "advise" => Feature::yes("where MADV_HUGEPAGE was given"),
        word => Feature::no(format!("shmem_enabled is `{word}`")),
    }
}

fn thp_for_process(root: &Root, thp: &Result<Option<Thp>, FileError>) -> Feature {
    match (thp, &task::own_thp_enabled(root)) {
        (Ok(None), _) => Feature::no("this kernel has no transparent huge pages"),
        (Ok(Some(_)), Ok(Some(false))) => {
            Feature::no("PR_SET_THP_DISABLE is set: THP_enabled is 0 in /proc/self/status")
        }
        (Ok(Some(_)), Ok(_)) => match thp_disable() {
            ThpDisable::No => Feature::yes("PR_SET_THP_DISABLE is not set"),
            _ => Feature::limited(
                "advised memory alone: PR_SET_THP_DISABLE is set with PR_THP_DISABLE_EXCEPT_ADVISED",
            ),
        },
        (Err(error), _) | (_, Err(error)) => Feature::no(error.to_string()),
    }
}

fn collapse(pmd: PageSize) -> Feature {
    if pmd.bytes() > MAX_TRIAL_BYTES.0 {
        return Feature::limited(format!("not tried: one huge page is {pmd} here"));
    }
    match try_collapse(pmd, MapFlags::PRIVATE) {
        Ok(()) => Feature::yes(format!("collapsed {pmd} of anonymous memory")),
        Err(errno @ Errno::INVAL) => {
            let why = match thp_disable() {
                ThpDisable::Completely => "PR_SET_THP_DISABLE is set",
                _ => "no MADV_COLLAPSE (Linux 6.1) or no THP",
            };
            Feature::refused(why, errno)
        }
        Err(errno) => {
            let reason = format!("MADV_COLLAPSE of {pmd} of anonymous memory failed");
            Feature::refused(reason, errno)
        }
    }
}

fn process_madvise() -> Feature {
    // An empty page is enough: the kernel first resolves the process and checks the permission.
    let tried = pidfd_open(getpid(), PidfdFlags::empty()).and_then(|this| {
        let memory = sys::Scratch::new(base_page(&Root::host()), MapFlags::PRIVATE)?;
        sys::collapse_in(this, memory.address(), 0)
    });
    match tried {
        Ok(_) if has(CapabilitySet::SYS_NICE) => Feature::yes("CAP_SYS_NICE is held"),
        Ok(_) => Feature::limited("this process only: others need CAP_SYS_NICE"),
        Err(Errno::NOSYS) => Feature::refused("no process_madvise (Linux 5.10)", Errno::NOSYS),
        Err(errno) => Feature::refused("process_madvise on this process failed", errno),
    }
}

fn process_mrelease() -> Feature {
    // This process is not dying, so a kernel that has the call refuses with EINVAL.
    match pidfd_open(getpid(), PidfdFlags::empty()).and_then(sys::release) {
        Ok(()) | Err(Errno::INVAL) => Feature::yes("for dying processes of this user"),
        Err(Errno::NOSYS) => Feature::refused("no process_mrelease (Linux 5.15)", Errno::NOSYS),
        Err(errno) => Feature::refused("process_mrelease on this process failed", errno),
    }
}

fn vmemmap_optimization(root: &Root) -> Feature {
    or_no(hvo::is_on(root).map(|is_on| match is_on {
        Some(true) => Feature::yes(hvo::in_words(is_on)),
        Some(false) => Feature::limited("off; root can switch it: `jumbo vmemmap on`"),
        None => Feature::no("not in this kernel (Linux 5.18)"),
    }))
}

fn memmap_on_memory(root: &Root) -> Feature {
    or_no(hvo::memmap_on_memory(root).map(|is_on| match is_on {
        Some(true) => {
            Feature::yes("hotplugged memory holds its own descriptors, which HVO leaves alone")
        }
        Some(false) => Feature::no("memory_hotplug.memmap_on_memory is N"),
        None => Feature::no("this kernel has no memory_hotplug.memmap_on_memory (Linux 5.13)"),
    }))
}

fn cgroup_feature(limits: &Limits) -> Feature {
    let Some(version) = limits.hugetlb_version else {
        return Feature::yes("no hugetlb controller here, so no limit");
    };
    let binding = limits.hugetlb.iter().chain(&limits.reservations);
    let text = |(size, of): (&PageSize, &Limit)| {
        let (room, limit, file) = (of.room(), of.limit, of.file.display());
        format!("{size}: {room} of {limit} left ({file})")
    };
    let texts: Vec<_> = binding.map(text).collect();
    if texts.is_empty() {
        Feature::yes(format!("no limit set (cgroup v{version})"))
    } else {
        Feature::limited(texts.join("; "))
    }
}

fn has(capability: CapabilitySet) -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_of_the_host_has_a_reason() {
        let probe = probe(&Root::host());
        for (name, feature) in probe.features() {
            assert!(!feature.reason.is_empty(), "{name}");
            assert!(
                feature.errno.is_none() || feature.available == Available::No,
                "{name}"
            );
        }
        serde_json::to_string(&probe).unwrap();
    }
}
