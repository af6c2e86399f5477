//! Rules about hugetlb pools, their metadata, and their limits in control groups.

use super::{Cost, Finding, LARGE_BYTES, Snapshot};
use crate::kernel::cgroup::Limit;
use crate::kernel::hugetlb::{self, Pool};
use crate::kernel::task::quoted;
use crate::kernel::{hvo, version};
use crate::units::{Bytes, PageSize};

/// Minimum savings of HVO for a finding: rebuilding the pools disturbs the programs that use them.
const MIN_SAVINGS_BYTES: Bytes = Bytes(16 << 20);

/// Counter of failed allocations of a pool's page of any size.
const GROWTH_FAILED: &str = "htlb_buddy_alloc_fail";

pub(super) fn rules(snapshot: &Snapshot) -> Vec<Finding> {
    snapshot
        .pools()
        .flat_map(|pool| {
            [
                unused(pool),
                exhausted(snapshot, pool),
                limited(snapshot, pool),
                larger(snapshot, pool),
            ]
        })
        .chain([
            unmapped(snapshot),
            grow_failed(snapshot),
            described(snapshot),
            slow_surplus(snapshot),
        ])
        .flatten()
        .collect()
}

fn file(size: PageSize, name: &str) -> String {
    format!("/{}", hugetlb::file(size, None, name))
}

fn unused(pool: &Pool) -> Option<Finding> {
    let bytes = pool.unused().bytes(pool.size);
    // The kernel frees unused surplus pages itself.
    let idle = pool.unused().0.min(pool.persistent().0);
    (bytes >= LARGE_BYTES && idle > 0).then(|| {
        let keep = pool.persistent().0 - idle;
        let may = pool.overcommit.0.max(idle);
        Finding::new(
            "pool-unused",
            Cost::Wasted(bytes),
            format!(
                "{} of {} {} pages lie in the pool, and no other program can use them",
                pool.unused(),
                pool.total,
                pool.size
            ),
        )
        .evidence(file(pool.size, "free_hugepages"), pool.free)
        .evidence(file(pool.size, "resv_hugepages"), pool.reserved)
        .hint(format!(
            "`jumbo pool set {} --overcommit {may} --persistent {keep}` gives them back, and lets the pool \
             grow again on demand",
            pool.size
        ))
    })
}

/// A pool without unused pages, as is normal for a pool of one user. It is a problem only if a
/// program requested more: the pool has grown up to its overcommit limit, or its growth failed.
fn exhausted(snapshot: &Snapshot, pool: &Pool) -> Option<Finding> {
    if pool.total.0 == 0 || pool.unused().0 > 0 || pool.may_grow_by().0 > 0 {
        return None;
    }
    let failed = snapshot.since_boot(GROWTH_FAILED);
    let reason = match failed {
        _ if pool.overcommit.0 > 0 => "has reached its overcommit limit",
        0 => return None,
        _ => "may not grow, and since boot a pool could not grow to its requested size",
    };
    let finding = Finding::new(
        "pool-exhausted",
        Cost::Fails,
        format!(
            "the pool of {} pages is used up and {reason}: the next mapping fails",
            pool.size
        ),
    )
    .evidence(file(pool.size, "free_hugepages"), pool.free)
    .evidence(file(pool.size, "resv_hugepages"), pool.reserved)
    .evidence(file(pool.size, "nr_overcommit_hugepages"), pool.overcommit)
    .hint(format!(
        "`jumbo pool set {} --overcommit {}` lets it grow on demand by as much again",
        pool.size,
        pool.surplus.0 + pool.total.0
    ));
    Some(match failed {
        0 => finding,
        failed => finding.since_boot(GROWTH_FAILED, failed),
    })
}

fn limited(snapshot: &Snapshot, pool: &Pool) -> Option<Finding> {
    let limits = &snapshot.host.limits;
    let of = |limit: &Limit| (limit.room() < pool.unused().bytes(pool.size)).then(|| limit.clone());
    let touch = limits.hugetlb.get(&pool.size).and_then(of);
    let reserve = limits.reservations.get(&pool.size).and_then(of);
    // A failed reservation is an error for the program; a failed touch kills it.
    let (limit, what) = match (&touch, &reserve) {
        (Some(touch), Some(reserve)) if reserve.room() <= touch.room() => {
            (reserve, "mapping more fails with ENOMEM")
        }
        (Some(touch), _) => (touch, "mapping more works and touching it is SIGBUS"),
        (None, Some(reserve)) => (reserve, "mapping more fails with ENOMEM"),
        (None, None) => return None,
    };
    Some(
        Finding::new(
            "cgroup-hugetlb",
            Cost::Fails,
            format!(
                "this control group may use {} more of the pool of {} pages, where {} are free: {what}",
                limit.room(),
                pool.size,
                pool.unused().bytes(pool.size)
            ),
        )
        .evidence(limit.file.display().to_string(), limit.limit)
        .evidence("in use", limit.usage)
        .hint(format!(
            "`echo {} > {}`",
            limit.usage.0 + pool.unused().bytes(pool.size).0,
            quoted([&*limit.file.to_string_lossy()])
        )),
    )
}

/// Pages in use that no process maps. They belong to a file on hugetlbfs, such as of an ended
/// program, to a System V segment, or to a memfd. This is a lower bound: pages that several
/// processes map count several times.
fn unmapped(snapshot: &Snapshot) -> Option<Finding> {
    let used = hugetlb::used(snapshot.host.pools.as_deref()?);
    let unmapped = Bytes(used.0.saturating_sub(snapshot.tasks.hugetlb.0));
    let mounts: Vec<_> = snapshot
        .host
        .mounts
        .iter()
        .map(|mount| mount.path.as_str())
        .collect();
    (unmapped >= LARGE_BYTES && snapshot.tasks.count > 0).then(|| {
        let files = if mounts.is_empty() {
            String::new()
        } else {
            format!("`ls -l {}` shows files, ", quoted(mounts))
        };
        Finding::new(
            "pool-unmapped",
            Cost::Wasted(unmapped),
            format!("{unmapped} of hugetlb pages are in use, and no process that is seen here maps them"),
        )
        .evidence("/sys/kernel/mm/hugepages, pages that are not free", used)
        .evidence("/proc/*/status HugetlbPages", snapshot.tasks.hugetlb)
        .hint(format!(
            "{files}`ipcs -m` shows segments: remove with rm(1) and ipcrm(1) those whose program is gone"
        ))
    })
}

fn grow_failed(snapshot: &Snapshot) -> Option<Finding> {
    let (failed, done) = (GROWTH_FAILED, "htlb_buddy_alloc_success");
    (snapshot.since_boot(failed) > 0).then(|| {
        Finding::new(
            "pool-growth",
            Cost::Unknown,
            "since boot a hugetlb pool could not grow: no memory in one piece",
        )
        .since_boot(failed, snapshot.since_boot(failed))
        .since_boot(done, snapshot.since_boot(done))
        .hint("`jumbo pool grow SIZE N --compact` has the kernel move memory together first")
    })
}

fn described(snapshot: &Snapshot) -> Option<Finding> {
    if snapshot.host.optimize_vmemmap != Some(false) {
        return None;
    }
    let base = snapshot.host.base_page;
    let of = |pool: &Pool| Bytes(pool.persistent().0 * hvo::freed(pool.size, base).0);
    let saving: Bytes = snapshot.pools().map(of).sum();
    let pools = snapshot.pools().filter(|pool| pool.persistent().0 > 0);
    let pooled: Vec<_> = pools
        .map(|pool| format!("{} pages of {}", pool.persistent(), pool.size))
        .collect();
    (saving >= MIN_SAVINGS_BYTES).then(|| {
        Finding::new(
            "hvo-off",
            Cost::Wasted(saving),
            format!(
                "most descriptors of {} are redundant: HVO frees them",
                pooled.join(" and ")
            ),
        )
        .evidence("/proc/sys/vm/hugetlb_optimize_vmemmap", 0)
        .hint(
            "`jumbo vmemmap on --convert`, which also allocates the free pages of the pools again",
        )
    })
}

/// Surplus pages with HVO before Linux 7.1. Each allocation and free waits for an RCU grace period
/// of some milliseconds.
fn slow_surplus(snapshot: &Snapshot) -> Option<Finding> {
    if snapshot.host.optimize_vmemmap != Some(true) || version(&snapshot.host.kernel)? >= (7, 1) {
        return None;
    }
    let pool = snapshot.pools().find(|pool| pool.overcommit.0 > 0)?;
    let path = file(pool.size, "nr_overcommit_hugepages");
    Some(
        Finding::new(
            "hvo-surplus",
            Cost::Unknown,
            "every surplus page waits milliseconds for its descriptors to be freed",
        )
        .evidence("/proc/sys/vm/hugetlb_optimize_vmemmap", 1)
        .evidence(path, pool.overcommit)
        .evidence("kernel", &snapshot.host.kernel)
        .hint(format!(
            "`jumbo pool set {} --overcommit 0` and a persistent pool instead, or `jumbo vmemmap off`",
            pool.size
        )),
    )
}

/// A program with so much hugetlb memory that it can use larger pages.
fn larger(snapshot: &Snapshot, pool: &Pool) -> Option<Finding> {
    let next = snapshot.pools().find(|other| other.size > pool.size)?;
    let holder = snapshot.tasks.pool_holders.first()?;
    // The smallest second-level TLBs have 32 entries of the larger size.
    let min_bytes = next.size.bytes() * 32;
    (next.total.0 == 0
        && pool.used().bytes(pool.size).0 >= min_bytes
        && holder.memory.hugetlb.0 >= min_bytes)
        .then(|| {
            Finding::new(
                "larger-pages",
                Cost::Unknown,
                format!(
                    "{} ({}) maps {} of hugetlb in {} pages, where {} ones exist",
                    holder.name, holder.pid, holder.memory.hugetlb, pool.size, next.size
                ),
            )
            .process_evidence(holder.pid, "status HugetlbPages", holder.memory.hugetlb)
            .evidence(file(next.size, "nr_hugepages"), next.total)
            .hint(format!(
                "boot with `hugepagesz={} hugepages={}`: so large ones are hard to find later",
                next.size,
                holder.memory.hugetlb.whole_pages(next.size)
            ))
        })
}
