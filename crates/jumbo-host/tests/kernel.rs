//! Typed access and status on fake trees of other kernels.

mod fake;

use fake::Fake;
use jumbo::units::{Bytes, NodeId, PageSize, Pages};
use jumbo_host::kernel::cgroup::Limits;
use jumbo_host::kernel::hugetlb::pools;
use jumbo_host::kernel::probe::Available;
use jumbo_host::kernel::thp::Thp;
use jumbo_host::kernel::{Root, base_page, probe};
use jumbo_host::status::{Host, Tasks, is_sibling, reapers_of_the_ended, siblings_of};

const KIB_2M: u64 = 2048;

#[test]
fn pools_are_read_with_their_nodes() {
    let fake = Fake::new(4096);
    fake.pool(KIB_2M, [10, 6, 4, 2, 5]).pool(1 << 20, [0; 5]);
    fake.write(
        "sys/kernel/mm/hugepages/hugepages-1048576kB/demote_size",
        "2048kB\n",
    );
    for (node, pages) in [(0, [7, 4, 2]), (3, [3, 2, 0])] {
        let folder = format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB");
        for (file, pages) in ["nr_hugepages", "free_hugepages", "surplus_hugepages"]
            .iter()
            .zip(pages)
        {
            fake.write(&format!("{folder}/{file}"), format!("{pages}\n"));
        }
    }
    let pools = pools(&fake.root()).unwrap().unwrap();
    let (small, large) = (&pools[0], &pools[1]);
    assert_eq!(
        (small.size, large.size),
        (PageSize::SIZE_2M, PageSize::SIZE_1G)
    );
    assert_eq!(small.persistent(), Pages(8));
    assert_eq!(small.used(), Pages(4));
    assert_eq!(small.unused(), Pages(2));
    assert_eq!(small.may_grow_by(), Pages(3));
    assert_eq!(
        small.nodes.keys().copied().collect::<Vec<_>>(),
        [NodeId(0), NodeId(3)]
    );
    assert_eq!(small.nodes[&NodeId(3)].total, Pages(3));
    assert_eq!(large.demote_size, Some(PageSize::SIZE_2M));
}

#[test]
fn a_kernel_without_anything_is_told_from_a_sys_that_is_hidden() {
    let fake = Fake::new(4096);
    let bare = Host::read(&fake.root());
    assert!(bare.pools.is_none() && bare.thp.is_none() && bare.optimize_vmemmap.is_none());
    assert!(!bare.misses(Host::POOLS) && !bare.misses(Host::THP_CONTROLS));

    std::fs::remove_dir(fake.root().path("sys/kernel/mm")).unwrap();
    let hidden = Host::read(&fake.root());
    assert!(hidden.misses(Host::POOLS) && hidden.misses(Host::THP_CONTROLS));
}

#[test]
fn the_probe_of_a_bare_kernel_gives_reasons() {
    let probe = probe(&Fake::new(4096).root());
    assert!(probe.hugetlb.is_empty() && probe.anon.is_empty() && probe.shared.is_empty());
    assert_eq!(probe.thp_for_process.available, Available::No);
    assert_eq!(probe.vmemmap_optimization.available, Available::No);
}

#[test]
fn the_probe_says_which_sizes_can_be_had() {
    let fake = Fake::healthy();
    fake.pool(KIB_2M, [4, 2, 1, 0, 0])
        .pool(1 << 20, [1, 0, 0, 0, 2])
        .pool(64, [0; 5]);
    let probe = probe(&fake.root());
    let hugetlb: Vec<_> = probe
        .hugetlb
        .values()
        .map(|feature| feature.available)
        .collect();
    assert_eq!(hugetlb, [Available::No, Available::Yes, Available::Limited]);
    assert_eq!(
        probe.anon[&PageSize::SIZE_2M].reason,
        "where MADV_HUGEPAGE was given"
    );
    assert!(
        probe.shared[&PageSize::SIZE_2M]
            .reason
            .contains("shmem_enabled is `never`")
    );
}

#[test]
fn a_process_that_has_thp_switched_off() {
    let fake = Fake::healthy();
    fake.write("proc/self/status", "Name:\tx\nTHP_enabled:\t0\n");
    let feature = probe(&fake.root()).thp_for_process;
    assert_eq!(feature.available, Available::No);
    assert!(feature.reason.contains("PR_SET_THP_DISABLE"));
}

#[test]
fn before_linux_6_8_the_top_level_control_rules_the_pmd_size() {
    let fake = Fake::new(4096);
    fake.thp(2 << 20, "always", "advise");
    let thp = Thp::read(&fake.root()).unwrap().unwrap();
    assert!(thp.anon(PageSize::SIZE_2M).unwrap().is("always"));
    assert!(thp.shared(PageSize::SIZE_2M).unwrap().is("advise"));
    assert!(thp.anon(PageSize::new(64 << 10).unwrap()).is_none());
}

#[test]
fn deny_overrules_every_size() {
    let fake = Fake::new(4096);
    fake.thp(2 << 20, "always", "deny")
        .thp_size(64, "inherit", "always");
    let thp = Thp::read(&fake.root()).unwrap().unwrap();
    let size = PageSize::new(64 << 10).unwrap();
    assert!(thp.shared(size).unwrap().is("deny"));
    assert!(thp.anon(size).unwrap().is("always"));
}

#[test]
fn force_leaves_the_sizes_that_inherit() {
    let fake = Fake::new(4096);
    fake.thp(2 << 20, "always", "force")
        .thp_size(64, "never", "always")
        .thp_size(2048, "never", "inherit");
    let thp = Thp::read(&fake.root()).unwrap().unwrap();
    let size = PageSize::new(64 << 10).unwrap();
    assert!(thp.shared(size).unwrap().is("never"));
    assert!(thp.shared(PageSize::SIZE_2M).unwrap().is("force"));
}

#[test]
fn base_pages_of_64_kib() {
    let fake = Fake::new(64 << 10);
    fake.thp(512 << 20, "madvise", "never")
        .thp_size(512 << 10, "inherit", "inherit");
    fake.pool(KIB_2M, [8, 8, 0, 0, 0])
        .pool(512 << 10, [0; 5])
        .meminfo(&[]);
    // Orders 0 to 13: the largest block is one huge page.
    fake.write(
        "proc/buddyinfo",
        "Node 0, zone Normal 0 0 0 0 0 3 0 0 0 0 0 0 0 2\n",
    );
    let host = Host::read(&fake.root());
    let pmd = PageSize::new(512 << 20).unwrap();
    assert_eq!(
        (host.base_page, host.pmd_size),
        (PageSize::new(64 << 10).unwrap(), pmd)
    );
    assert_eq!(host.formable_of(pmd), (Pages(2), true));
    assert_eq!(
        host.formable_of(PageSize::SIZE_2M),
        (Pages(3 + 2 * 256), true)
    );
    // Without the kernel's counter: 64 bytes for each of 256 Ki base pages.
    let metadata = host.metadata.unwrap();
    assert_eq!((metadata.bytes, metadata.counted), (Bytes(16 << 20), false));
    assert_eq!(probe(&fake.root()).collapse.available, Available::Limited);
}

#[test]
fn the_pmd_size_of_a_kernel_without_thp_follows_from_the_base_page() {
    for (base, pmd) in [
        (4 << 10, 2 << 20),
        (16 << 10, 32 << 20),
        (64 << 10, 512 << 20),
    ] {
        let host = Host::read(&Fake::new(base).root());
        assert_eq!((host.base_page.bytes(), host.pmd_size.bytes()), (base, pmd));
    }
}

#[test]
fn pages_larger_than_the_largest_block_are_bounded_only() {
    let fake = Fake::healthy();
    fake.pool(1 << 20, [0; 5]);
    fake.write(
        "proc/buddyinfo",
        "Node 0, zone Normal 0 0 0 0 0 0 0 0 0 100 600\n",
    );
    let host = Host::read(&fake.root());
    assert_eq!(
        host.formable_of(PageSize::SIZE_1G),
        (Pages(600 * 4 / 1024), false)
    );
    assert_eq!(
        host.formable_of(PageSize::SIZE_2M),
        (Pages(100 + 1200), true)
    );
}

#[test]
fn metadata_is_what_the_kernel_counts() {
    let fake = Fake::healthy();
    let metadata = Host::read(&fake.root()).metadata.unwrap();
    assert_eq!(
        (metadata.bytes, metadata.counted),
        (Bytes(60_100 * 4096), true)
    );
}

#[test]
fn a_limit_in_a_container_that_sees_a_part_of_the_hierarchy() {
    let fake = Fake::new(4096);
    let mounted = "35 31 0:32 /docker/c1 /sys/fs/cgroup/hugetlb ro - cgroup cgroup rw,hugetlb\n";
    fake.write("proc/self/cgroup", "4:hugetlb:/docker/c1/sub\n0::/\n")
        .write("proc/self/mountinfo", mounted)
        .write(
            "sys/fs/cgroup/hugetlb/hugetlb.2MB.limit_in_bytes",
            "4194304\n",
        )
        .write(
            "sys/fs/cgroup/hugetlb/hugetlb.2MB.usage_in_bytes",
            "2097152\n",
        )
        .write(
            "sys/fs/cgroup/hugetlb/sub/hugetlb.2MB.limit_in_bytes",
            "8388608\n",
        );
    let limits = Limits::read(&fake.root(), &[PageSize::SIZE_2M]).unwrap();
    assert_eq!(limits.hugetlb_version, Some(1));
    let limit = &limits.hugetlb[&PageSize::SIZE_2M];
    assert_eq!(
        (limit.limit, limit.room()),
        (Bytes(4 << 20), Bytes(2 << 20))
    );
    assert!(limits.reservations.is_empty() && limits.memory.is_none());
}

#[test]
fn files_that_make_no_sense_are_named() {
    let fake = Fake::healthy();
    fake.pool(KIB_2M, [1, 1, 0, 0, 0])
        .write(
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
            "many\n",
        )
        .write("proc/buddyinfo", "nonsense\n");
    let host = Host::read(&fake.root());
    let why: String = host
        .missing
        .into_iter()
        .map(|missing| missing.why)
        .collect();
    assert!(
        why.contains("free_hugepages: `many` where a number was expected"),
        "{why}"
    );
    assert!(why.contains("buddyinfo: `nonsense`"), "{why}");
}

#[test]
fn the_largest_processes_and_who_holds_pools() {
    let fake = Fake::healthy();
    fake.process(7, "heap", &[("RssAnon", 4096)], &[("AnonHugePages", 2048)])
        .process(8, "pool", &[("HugetlbPages", 2048)], &[])
        .process(9, "small", &[("RssAnon", 1)], &[]);
    let tasks = Tasks::read(&fake.root(), 2);
    let names = |tasks: &[jumbo_host::status::Task]| {
        tasks
            .iter()
            .map(|task| task.name.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&tasks.largest), ["heap", "pool"]);
    assert_eq!(names(&tasks.pool_holders), ["pool"]);
    assert_eq!(tasks.largest[0].huge.unwrap().anon, Bytes(2 << 20));
    assert_eq!(tasks.count, 4);
}

/// A reaper has its program's memory and command line.
#[test]
fn a_reaper_is_not_counted_beside_its_program() {
    let reaper = |fake: &Fake, pid: u32, confined: u32| {
        let memory = [("RssAnon", 4096), ("HugetlbPages", 2048)];
        fake.process(pid, "jumbo-reaper", &memory, &[]);
        let status = fake.root().read(format!("proc/{pid}/status")).unwrap();
        // Its mappings are unreadable.
        let own = rustix::process::geteuid().as_raw();
        let status = status.replace("Uid:\t0\t0", &format!("Uid:\t{own}\t{own}"));
        let more = format!("NSpid:\t{pid}\t5\nNoNewPrivs:\t{confined}\nSeccomp:\t2\n");
        fake.write(&format!("proc/{pid}/status"), status + &more)
            .write(&format!("proc/{pid}/cmdline"), "/usr/bin/heap\0--flag\0");
    };
    let fake = Fake::healthy();
    let memory = [("RssAnon", 4096), ("HugetlbPages", 2048)];
    fake.process(7, "heap", &memory, &[]);
    reaper(&fake, 8, 1);
    let tasks = Tasks::read(&fake.root(), 9);
    assert_eq!((tasks.count, tasks.hugetlb), (2, Bytes(2 << 20)));
    assert_eq!(tasks.pool_holders.len(), 1);
    assert!(tasks.largest.iter().all(|task| task.pid != 8));
    assert_eq!((tasks.siblings[0].pid, tasks.siblings[0].program), (8, 7));

    let ended = || reapers_of_the_ended(&fake.root()).unwrap();
    let siblings = || {
        let found = siblings_of(&fake.root(), &[7]).into_iter();
        found.map(|it| (it.pid, it.role)).collect::<Vec<_>>()
    };
    assert_eq!((siblings(), ended()), (vec![(8, "reaper")], vec![]));

    // The scanner is a child of the program.
    fake.process(6, "jumbo-watch", &[], &[]);
    let status = fake.root().read("proc/6/status").unwrap() + "PPid:\t7\n";
    fake.write("proc/6/status", status)
        .write("proc/6/cmdline", "/usr/bin/heap\0--flag\0");
    assert_eq!(siblings(), [(6, "scanner"), (8, "reaper")]);
    assert_eq!(Tasks::read(&fake.root(), 9).siblings.len(), 2);

    // A program of that name, which is not confined.
    reaper(&fake, 9, 0);
    assert_eq!(Tasks::read(&fake.root(), 9).count, 3);
    assert!(is_sibling(&fake.root(), 8) && !is_sibling(&fake.root(), 9));
    // The program has ended: the remaining process with the memory is its reaper.
    fake.write("proc/7/status", "Name: heap\n")
        .write("proc/7/cmdline", "");
    let tasks = Tasks::read(&fake.root(), 9);
    assert_eq!((tasks.siblings.len(), tasks.hugetlb), (0, Bytes(4 << 20)));
    assert_eq!((siblings(), ended()), (vec![], vec![8]));
}

#[test]
fn a_proc_that_is_not_mounted_is_missing() {
    let tasks = Tasks::read(&Root::at("/nonexistent"), 10);
    assert_eq!(tasks.count, 0);
    assert!(tasks.missing[0].why.contains("/nonexistent/proc"));
}

#[test]
fn the_host_is_read_without_a_gap() {
    let root = Root::host();
    let host = Host::read(&root);
    assert_eq!(base_page(&root).bytes(), rustix::param::page_size() as u64);
    assert!(host.memory.unwrap().total > host.metadata.unwrap().bytes);
}
