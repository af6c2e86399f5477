//! Pools in separate processes: at the limits of a cgroup, without privilege, and passed between
//! processes. Each process is this test binary, which runs [`role`].
#![allow(unsafe_code, reason = "takes a descriptor by its number")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;

use jumbo::pool::{Error, Page};
use jumbo::units::Pages;

use crate::confined::{self, Group, finish};
use crate::host::{kernel_counters, skip};
use crate::sources::{BYTES, KernelPool, anonymous_huge, hugetlb, thp, tuple, with_thp};

/// Threads that take pages at the same time.
const THREADS: usize = 64;

/// Starts this test binary in a role.
fn start(role: &str, change: impl FnOnce(&mut Command)) -> Child {
    confined::start("processes::role", |command| {
        command.env("JUMBO_POOL_ROLE", role);
        change(command);
    })
}

#[test]
fn a_cgroups_hugetlb_limits_are_errors() {
    let Some(_kernel) = KernelPool::with(12, 0) else {
        return;
    };
    for (role, names) in [
        ("hugetlb", ["hugetlb.2MB.max", "hugetlb.2MB.limit_in_bytes"]),
        (
            "hugetlb-rsvd",
            ["hugetlb.2MB.rsvd.max", "hugetlb.2MB.rsvd.limit_in_bytes"],
        ),
    ] {
        let Some(group) = Group::new("hugetlb") else {
            return skip("no hugetlb controller, or no right to make a cgroup");
        };
        assert!(group.set(&names, 4 * BYTES as u64), "{names:?}");
        let child = start(role, |_| {});
        group.add(&child);
        let printed = finish(child);
        assert!(printed.contains("four pages and no more"), "{printed}");
        assert_eq!(kernel_counters(), [12, 12, 0, 0], "nothing leaked");
    }
}

#[test]
fn a_memory_cgroups_limit_is_an_error_with_thp() {
    let Some(_alone) = with_thp() else {
        return;
    };
    let Some(group) = Group::new("memory") else {
        return skip("no memory controller, or no right to make a cgroup");
    };
    assert!(group.set(&["memory.max", "memory.limit_in_bytes"], 48 << 20));
    let child = start("memory", |_| {});
    group.add(&child);
    let printed = finish(child);
    assert!(printed.contains("an error and alive"), "{printed}");
}

/// Each thread checks for room before its touch: another may use the room first.
#[test]
fn a_memory_cgroups_limit_is_an_error_to_threads_at_once() {
    let Some(_alone) = with_thp() else {
        return;
    };
    let Some(group) = Group::new("memory") else {
        return skip("no memory controller, or no right to make a cgroup");
    };
    for _ in 0..5 {
        assert!(group.set(&["memory.max", "memory.limit_in_bytes"], 256 << 20));
        let child = start("memory-threads", |_| {});
        group.add(&child);
        let printed = finish(child);
        assert!(printed.contains("errors and alive"), "{printed}");
    }
}

#[test]
fn a_process_that_locks_its_memory_takes_no_page_by_that() {
    let Some(_kernel) = KernelPool::with(8, 0) else {
        return;
    };
    let printed = finish(start("locked", |_| {}));
    assert!(printed.contains("no page but its own"), "{printed}");
    assert_eq!(kernel_counters(), [8, 8, 0, 0]);
}

#[test]
fn a_thp_pool_takes_no_privilege() {
    let Some(_alone) = with_thp() else {
        return;
    };
    if !rustix::process::geteuid().is_root() {
        return skip("needs root, to become another user");
    }
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("pool");
    // cp(1) writes it: a child of another test could inherit our descriptor open for writing
    // (ETXTBSY).
    let copied = Command::new("cp")
        .arg(std::env::current_exe().unwrap())
        .arg(&copy)
        .status();
    assert!(copied.unwrap().success());
    let open = std::os::unix::fs::PermissionsExt::from_mode;
    fs::set_permissions(folder.path(), open(0o755)).unwrap();
    let mut command = Command::new(&copy);
    command
        .args(["--exact", "processes::role", "--nocapture"])
        .env("JUMBO_POOL_ROLE", "nobody")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .uid(65534)
        .gid(65534);
    let printed = finish(command.spawn().unwrap());
    assert!(
        printed.contains("four pages without privilege"),
        "{printed}"
    );
}

/// Roles of the processes that the tests above start.
#[test]
fn role() {
    let Ok(role) = std::env::var("JUMBO_POOL_ROLE") else {
        return;
    };
    let mut line = String::new();
    BufReader::new(std::io::stdin())
        .read_line(&mut line)
        .unwrap();
    match role.as_str() {
        "hugetlb" => {
            let pool = hugetlb();
            let resized = pool.resize(Pages(3));
            assert_eq!(resized.stopped, None);
            pool.set_overcommit(Pages(5));
            let pages: Vec<Page> = (0..4).map(|_| pool.take().unwrap()).collect();
            assert!(matches!(pool.take(), Err(Error::Source(_))));
            // One more page would fit if memory did: all or nothing.
            assert!(matches!(pool.reserve(Pages(2)), Err(Error::Source(_))));
            drop(pages);
            assert_eq!(tuple(&pool), [3, 3, 0, 0]);
            assert!(pool.reserve(Pages(4)).is_ok());
            assert_eq!(pool.resize(Pages(8)).persistent, Pages(4));
            println!("four pages and no more");
        }
        "hugetlb-rsvd" => {
            let pool = hugetlb();
            pool.set_overcommit(Pages(8));
            assert!(matches!(pool.reserve(Pages(5)), Err(Error::Source(_))));
            assert_eq!(tuple(&pool), [0; 4]);
            let reserved = pool.reserve(Pages(4)).unwrap();
            assert!(matches!(pool.take(), Err(Error::Source(_))));
            drop(reserved);
            assert_eq!(tuple(&pool), [0; 4]);
            assert!(pool.take().is_ok());
            println!("four pages and no more");
        }
        "memory" => {
            let pool = thp(64);
            pool.set_overcommit(Pages(64));
            for _ in 0..3 {
                let mut pages = Vec::new();
                let error = loop {
                    match pool.take() {
                        Ok(mut page) => {
                            page.bytes_mut().fill(1);
                            pages.push(page);
                        }
                        Err(error) => break error,
                    }
                };
                assert!(matches!(error, Error::Source(_)), "{error}");
                assert!((12..24).contains(&pages.len()), "{} pages", pages.len());
                assert!(matches!(pool.reserve(Pages(8)), Err(Error::Source(_))));
            }
            assert_eq!(tuple(&pool), [0; 4]);
            println!("an error and alive");
        }
        "memory-threads" => {
            let pool = thp(256);
            pool.set_overcommit(Pages(256));
            let together = Barrier::new(THREADS);
            let take_all = || {
                together.wait();
                let mut pages = Vec::new();
                while let Ok(mut page) = pool.take() {
                    page.bytes_mut().fill(1);
                    pages.push(page);
                }
                // All threads keep their pages until no thread can take more.
                together.wait();
                pages.len()
            };
            let taken: usize = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(take_all)).collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap())
                    .sum()
            });
            assert!(taken < 128, "{taken} pages");
            assert_eq!(tuple(&pool), [0; 4]);
            println!("errors and alive");
        }
        "locked" => {
            let flags = rustix::mm::MlockAllFlags::CURRENT | rustix::mm::MlockAllFlags::FUTURE;
            let pool = hugetlb();
            pool.resize(Pages(2));
            drop(pool.reserve(Pages(3)));
            rustix::mm::mlockall(flags).unwrap();
            assert_eq!(tuple(&pool), [2, 2, 0, 0]);
            assert_eq!(kernel_counters(), [8, 6, 0, 0]);
            let second = hugetlb();
            assert_eq!(second.resize(Pages(1)).stopped, None);
            assert_eq!(kernel_counters(), [8, 5, 0, 0]);
            let transparent = thp(8);
            assert_eq!(transparent.resize(Pages(2)).stopped, None);
            transparent.resize(Pages(0));
            println!("no page but its own");
        }
        "nobody" => {
            assert!(!rustix::process::geteuid().is_root());
            let pool = thp(8);
            assert_eq!(pool.resize(Pages(4)).stopped, None);
            assert!(anonymous_huge() >= 4 * BYTES);
            println!("four pages without privilege");
        }
        other => panic!("no role {other}"),
    }
}
