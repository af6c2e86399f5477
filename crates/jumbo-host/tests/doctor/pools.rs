//! What `doctor` finds of the hugetlb pools.

use super::*;

#[test]
fn a_pool_that_no_process_uses() {
    let finding = only(|fake| {
        mapper(fake, 100).pool(2048, [1000, 900, 100, 0, 0]);
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("pool-unused", Cost::Wasted(Bytes(1600 << 20)))
    );
    let command = "`jumbo pool set 2M --overcommit 800 --persistent 200`";
    assert!(finding.hint.contains(command), "{}", finding.hint);
}

#[test]
fn a_pool_that_is_used_up() {
    let finding = only(|fake| {
        mapper(fake, 120).pool(2048, [150, 30, 30, 50, 50]);
    });
    assert_eq!((finding.id, finding.cost), ("pool-exhausted", Cost::Fails));
    assert!(
        finding
            .hint
            .contains("`jumbo pool set 2M --overcommit 200`")
    );
    let fake = Fake::healthy();
    mapper(&fake, 70).pool(2048, [100, 30, 30, 0, 50]);
    assert_eq!(findings(&fake), [], "it may grow");
    let fake = Fake::healthy();
    mapper(&fake, 70).pool(2048, [100, 30, 30, 0, 0]);
    assert_eq!(findings(&fake), [], "it is as large as its user needs");
    fake.write("proc/vmstat", "htlb_buddy_alloc_fail 3\n");
    assert_eq!(ids(&fake), ["pool-exhausted", "pool-growth"]);
    assert!(findings(&fake)[0].title.contains("since boot"));
}

#[test]
fn pages_that_a_dead_program_left_behind() {
    let ail = |fake: &Fake| {
        fake.pool(2048, [100, 0, 0, 0, 50]).write(
            "proc/self/mountinfo",
            "40 30 0:40 / /mnt/huge rw - hugetlbfs none rw,pagesize=2M\n",
        );
    };
    let finding = only(ail);
    assert_eq!(
        (finding.id, finding.cost),
        ("pool-unmapped", Cost::Wasted(Bytes(200 << 20)))
    );
    assert!(finding.hint.contains("ls -l /mnt/huge"), "{}", finding.hint);
    let fake = Fake::healthy();
    ail(&fake);
    fake.process(7, "qemu", &[("HugetlbPages", 200 << 10)], &[]);
    assert_eq!(findings(&fake), []);
}

#[test]
fn a_pool_that_could_not_grow() {
    let finding = only(|fake| {
        fake.write(
            "proc/vmstat",
            "htlb_buddy_alloc_success 9\nhtlb_buddy_alloc_fail 3\n",
        );
    });
    assert_eq!((finding.id, finding.cost), ("pool-growth", Cost::Unknown));
}

#[test]
fn descriptors_that_hold_nothing() {
    let finding = only(|fake| {
        mapper(fake, 4086)
            .pool(2048, [4096, 10, 0, 0, 0])
            .write("proc/sys/vm/hugetlb_optimize_vmemmap", "0\n");
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("hvo-off", Cost::Wasted(Bytes(4096 * 7 * 4096)))
    );
    assert!(finding.hint.contains("`jumbo vmemmap on --convert`"));
}

#[test]
fn surplus_and_hvo_do_not_go_together_before_7_1() {
    let ail = |fake: &Fake| {
        fake.pool(2048, [8, 8, 0, 0, 50])
            .write("proc/sys/vm/hugetlb_optimize_vmemmap", "1\n");
    };
    let finding = only(ail);
    assert_eq!(finding.id, "hvo-surplus");
    for command in ["`jumbo pool set 2M --overcommit 0`", "`jumbo vmemmap off`"] {
        assert!(finding.hint.contains(command), "{}", finding.hint);
    }
    let fake = Fake::healthy();
    ail(&fake);
    fake.write("proc/sys/kernel/osrelease", "7.1.0\n");
    assert_eq!(findings(&fake), []);
}

#[test]
fn a_control_group_that_may_not_use_the_pool() {
    let ail = |fake: &Fake, file: &str| {
        fake.pool(2048, [20, 20, 0, 0, 0])
            .write("proc/self/cgroup", "0::/job\n")
            .write(
                "proc/self/mountinfo",
                "30 23 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
            )
            .write("sys/fs/cgroup/cgroup.controllers", "cpu hugetlb memory\n")
            .write(&format!("sys/fs/cgroup/job/{file}"), "2097152\n")
            .write("sys/fs/cgroup/job/hugetlb.2MB.current", "0\n");
    };
    let finding = only(|fake| ail(fake, "hugetlb.2MB.max"));
    assert_eq!((finding.id, finding.cost), ("cgroup-hugetlb", Cost::Fails));
    assert!(finding.title.contains("SIGBUS"), "{}", finding.title);
    let finding = only(|fake| ail(fake, "hugetlb.2MB.rsvd.max"));
    assert!(finding.title.contains("ENOMEM"), "{}", finding.title);
}
