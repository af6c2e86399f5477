//! Tests on the real kernel. Each runs in its own process, because the state is per process.

use std::fs;
use std::io::Write;
use std::panic::catch_unwind;
use std::ptr::{null_mut, with_exposed_provenance_mut as at};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;

use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use rustix::mm::{mmap_anonymous, mprotect, mremap, munmap};

use super::*;
use crate::ledger::Counts;

const BLOCK: usize = 64 << 10;
const MIB: usize = 1 << 20;

/// Runs `test` in the child of a fork, as an ordinary user.
fn in_a_process(test: fn()) {
    // SAFETY: glibc's malloc works in the child, and the forking thread holds no lock of std.
    match unsafe { libc::fork() } {
        0 => {
            std::panic::set_hook(Box::new(|info| {
                let _ = writeln!(std::io::stderr(), "{info}");
            }));
            // SAFETY: it is this process's own.
            unsafe {
                libc::setgid(65534);
                libc::setuid(65534);
                libc::alarm(60);
            }
            let code = i32::from(catch_unwind(test).is_err());
            // SAFETY: the parent waits for the code.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waitpid(2) writes the status.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(status, 0, "the test's process");
        }
    }
}

fn shared(length: usize) -> usize {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping replaces none.
    let mapped = unsafe { mmap_anonymous(null_mut(), length + BLOCK, prot, flags).unwrap() };
    mapped.expose_provenance().next_multiple_of(BLOCK)
}

fn registered(length: usize) -> usize {
    let address = shared(length);
    register(address, length, BLOCK).unwrap();
    address
}

fn byte(address: usize) -> &'static AtomicU8 {
    // SAFETY: mapped by the test, which touches it by atomics alone.
    unsafe { &*at::<AtomicU8>(address).cast_const() }
}

/// Ends the threads; returns the populated bytes and blocks.
fn counted() -> (u64, u64) {
    end();
    let counts = Counts::of(slot());
    (counts.shm_user, counts.shm_user_alloc)
}

fn write_pages(address: usize, length: usize) {
    for page in (address..address + length).step_by(PAGE) {
        byte(page).fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn concurrent_readers_and_writers_find_zeroes_and_their_writes() {
    in_a_process(|| {
        const LENGTH: usize = 64 * MIB;
        let address = registered(LENGTH);
        thread::scope(|scope| {
            for writer in 0..4 {
                scope.spawn(move || {
                    // All threads write the same blocks, from different ends.
                    for page in 0..LENGTH / PAGE {
                        let page = if writer % 2 == 0 {
                            page
                        } else {
                            LENGTH / PAGE - 1 - page
                        };
                        byte(address + page * PAGE + writer).fetch_add(1, Ordering::Relaxed);
                        assert_eq!(byte(address + page * PAGE + 100).load(Ordering::Relaxed), 0);
                    }
                });
            }
        });
        for page in (address..address + LENGTH).step_by(PAGE) {
            let written = [0, 1, 2, 3, 4].map(|at| byte(page + at).load(Ordering::Relaxed));
            assert_eq!(written, [1, 1, 1, 1, 0]);
        }
        let (bytes, blocks) = counted();
        assert_eq!(bytes, LENGTH as u64);
        // Two threads may have brought in a part each.
        assert!(blocks * 8 <= (LENGTH / PAGE) as u64, "{blocks}");
    });
}

#[test]
fn pages_that_a_child_touched_are_kept() {
    in_a_process(|| {
        MAX_WASTE.store(0, Ordering::Relaxed);
        let address = registered(4 * MIB);
        // SAFETY: the child makes stores and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            assert_eq!(RANGES.load(Ordering::Relaxed), 0, "the child has none");
            for page in (address..address + 4 * MIB).step_by(3 * PAGE) {
                byte(page).store(7, Ordering::Relaxed);
            }
            // SAFETY: the child ends.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: waits for the child.
        unsafe { libc::waitpid(child, null_mut(), 0) };
        for (number, page) in (address..address + 4 * MIB).step_by(PAGE).enumerate() {
            let expected = if number % 3 == 0 { 7 } else { 0 };
            assert_eq!(byte(page).load(Ordering::Relaxed), expected);
        }
        let childs = (4 * MIB / PAGE).div_ceil(3) * PAGE;
        let expected = (4 * MIB - childs) as u64;
        assert_eq!(counted(), (expected, 64), "served over a fork");
    });
}

fn write(address: usize, length: usize) -> isize {
    // SAFETY: write(2) reads the range, or fails.
    unsafe {
        let file = libc::open(c"/dev/shm".as_ptr(), libc::O_TMPFILE | libc::O_RDWR, 0o600);
        assert!(file >= 0);
        let written = libc::write(file, at(address), length);
        libc::close(file);
        written
    }
}

#[test]
fn a_system_call_succeeds_after_touch() {
    in_a_process(|| {
        let address = registered(4 * MIB);
        assert_eq!(write(address, PAGE), -1, "EFAULT without `touch`");
        set_errno(5);
        touch(address + 100, 3 * PAGE);
        touch(usize::MAX - 4, 100);
        touch(address + MIB, MIB);
        assert_eq!(errno(), 5);
        assert_eq!(write(address + 100, 3 * PAGE), 3 * PAGE as isize);
        assert_eq!(write(address + MIB, MIB), MIB as isize);
        // SAFETY: the test's own.
        unsafe { munmap(at(address), 4 * MIB).unwrap() };
        touch(address, 4 * MIB);
        assert_eq!(write(address, PAGE), -1, "EFAULT: unmapped");
        forget(address, 1);
        assert_eq!(RANGES.load(Ordering::Relaxed), 0);
    });
}

fn set_errno(errno: i32) {
    // SAFETY: errno is this thread's own.
    unsafe { *libc::__errno_location() = errno };
}

fn errno() -> i32 {
    // SAFETY: errno is this thread's own.
    unsafe { *libc::__errno_location() }
}

#[test]
fn mappings_change_under_touches() {
    in_a_process(|| {
        const LENGTH: usize = 8 * MIB;
        let address = registered(LENGTH);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            // Threads touch the lower half all the time, and holes are punched into it.
            for _ in 0..3 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        write_pages(address, LENGTH / 2);
                    }
                });
            }
            let upper = address + LENGTH / 2;
            for turn in 0..300 {
                let from = address + turn % 64 * BLOCK;
                // SAFETY: the test's own memory, from here on.
                unsafe {
                    let advice = [libc::MADV_REMOVE, libc::MADV_DONTNEED][turn % 2];
                    assert_eq!(libc::madvise(at(from), 3 * PAGE, advice), 0);
                    let third = at(from + PAGE);
                    let flags = MprotectFlags::READ | MprotectFlags::WRITE;
                    mprotect(third, PAGE, flags | MprotectFlags::EXEC).unwrap();
                    mprotect(third, PAGE, flags).unwrap();
                }
            }
            // A moved mapping is unregistered.
            // SAFETY: as above.
            unsafe {
                write_pages(upper, PAGE);
                let moved = mremap(at(upper), 2 * MIB, 2 * MIB, MremapFlags::MAYMOVE).unwrap();
                munmap(at(upper + 2 * MIB + PAGE), BLOCK).unwrap();
                mprotect(at(upper + 3 * MIB), BLOCK, MprotectFlags::empty()).unwrap();
                mprotect(at(upper + 3 * MIB), BLOCK, MprotectFlags::READ).unwrap();
                assert_eq!(byte(moved.addr()).load(Ordering::Relaxed), 1);
            }
            assert_eq!(
                byte(upper + 2 * MIB).load(Ordering::Relaxed),
                0,
                "in a block with a hole"
            );
            assert_eq!(
                byte(upper + 3 * MIB).load(Ordering::Relaxed),
                0,
                "read only"
            );
            over.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn a_moved_mapping_is_unregistered() {
    in_a_process(|| {
        let address = registered(4 * MIB);
        let away = shared(8 * MIB);
        byte(address).store(5, Ordering::Relaxed);
        // SAFETY: both are the test's own.
        unsafe {
            let flags = MremapFlags::MAYMOVE;
            rustix::mm::mremap_fixed(at(address), 4 * MIB, 4 * MIB, flags, at(away)).unwrap();
        }
        assert_eq!(byte(away).load(Ordering::Relaxed), 5);
        write_pages(away + MIB, MIB);
        assert_eq!(counted(), (BLOCK as u64, 1));
    });
}

#[test]
fn the_end_unregisters_everything() {
    in_a_process(|| {
        const LENGTH: usize = 64 * MIB;
        let address = registered(LENGTH);
        let threads = || fs::read_dir("/proc/self/task").unwrap().count();
        assert!(threads() > 1);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| write_pages(address, LENGTH));
            }
            while byte(address + 8 * MIB).load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            end();
            end();
        });
        for page in (address..address + LENGTH).step_by(PAGE) {
            assert_eq!(byte(page).load(Ordering::Relaxed), 4);
        }
        assert_eq!(register(shared(MIB), MIB, BLOCK), Err(reason::ENDED));
        while threads() > 1 {
            thread::yield_now();
        }
    });
}

#[test]
fn blocked_signals_and_closed_descriptors_do_no_harm() {
    in_a_process(|| {
        let address = registered(4 * MIB);
        let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
        // SAFETY: descriptors 0 to 2 are left.
        let closed = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
        assert_eq!(closed, 0);
        assert_eq!(descriptors(), 4, "jumbo's are in another table");
        let blocked = Blocked::all();
        write_pages(address, 4 * MIB);
        drop(blocked);
        assert_eq!(counted().0, 4 << 20);
    });
}

#[test]
fn a_child_can_register_too() {
    in_a_process(|| {
        let _parents = registered(MIB);
        // SAFETY: glibc's malloc is whole in the child.
        let child = unsafe { libc::fork() };
        if child == 0 {
            write_pages(registered(MIB), MIB);
            let (bytes, _) = counted();
            // SAFETY: the child ends.
            unsafe { libc::_exit(i32::from(bytes != 1 << 20)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    });
}

#[test]
fn too_many_ranges_are_refused() {
    in_a_process(|| {
        let ranges: Vec<usize> = (0..64).map(|_| registered(BLOCK)).collect();
        let one_more = shared(BLOCK);
        assert_eq!(register(one_more, BLOCK, BLOCK), Err(reason::TOO_MANY));
        forget(ranges[3], BLOCK);
        register(one_more, BLOCK, BLOCK).unwrap();
        // A range in place of another.
        register(ranges[4], BLOCK, BLOCK).unwrap();
        for range in ranges {
            write_pages(range, BLOCK);
        }
    });
}

#[test]
fn a_growing_mapping_is_unregistered() {
    in_a_process(|| {
        let address = registered(4 * MIB);
        write_pages(address, MIB);
        forget(address, 4 * MIB);
        // SAFETY: the test's own.
        let grown = unsafe { mremap(at(address), 4 * MIB, 3 * MIB, MremapFlags::MAYMOVE) };
        write_pages(grown.unwrap().addr(), 3 * MIB);
        assert_eq!(counted().0, 1 << 20);
        assert_eq!(RANGES.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn parts_of_a_range_can_be_unmapped() {
    in_a_process(|| {
        let address = registered(8 * MIB);
        for (start, length) in [(0, MIB), (7 * MIB, MIB), (3 * MIB, MIB)] {
            forget(address + start, length);
            // SAFETY: the test's own.
            unsafe { munmap(at(address + start), length).unwrap() };
        }
        write_pages(address + MIB, 2 * MIB);
        write_pages(address + 4 * MIB, 3 * MIB);
        assert_eq!(counted(), (5 << 20, 80));
    });
}

#[test]
fn the_rest_of_a_large_buffer_is_unregistered() {
    in_a_process(|| {
        let address = registered(16 * MIB);
        touch(address + 2 * MIB, 8 * MIB);
        assert_eq!(write(address + 2 * MIB, 8 * MIB), 8 * MIB as isize);
        assert_eq!(RANGES.load(Ordering::Relaxed), 2, "before and after");
        assert_eq!(write(address, PAGE), -1, "registered");
        assert_eq!(write(address + 10 * MIB, PAGE), -1, "registered");
        touch(0, usize::MAX);
        assert_eq!(write(address, 16 * MIB), 16 * MIB as isize);
        assert_eq!(RANGES.load(Ordering::Relaxed), 0);
        assert_eq!(counted().0, 1 << 20);
    });
}

#[test]
fn a_buffer_that_cannot_be_filled_is_unregistered() {
    in_a_process(|| {
        let address = registered(16 * MIB);
        // Splits the mapping there.
        // SAFETY: the test's own.
        let advised = unsafe { libc::madvise(at(address + 2 * MIB), MIB, libc::MADV_DONTDUMP) };
        assert_eq!(advised, 0);
        touch(address + 2 * MIB - BLOCK, 2 * BLOCK);
        assert_eq!(
            write(address + 2 * MIB - BLOCK, 2 * BLOCK),
            2 * BLOCK as isize
        );
        // A hole in the buffer: the call writes the part before it.
        // SAFETY: as above.
        unsafe { munmap(at(address + 8 * MIB), PAGE).unwrap() };
        touch(address + 8 * MIB - BLOCK, 2 * BLOCK);
        assert_eq!(write(address + 8 * MIB - BLOCK, 2 * BLOCK), BLOCK as isize);
        write_pages(address, 8 * MIB);
    });
}

#[test]
fn a_range_whose_unmapping_failed_is_unregistered() {
    in_a_process(|| {
        let address = registered(16 * MIB);
        for (start, length) in [(0, PAGE + 1), (12 * MIB, 4 * MIB), (6 * MIB + 100, MIB)] {
            assert_eq!(write(address + start, length), -1, "EFAULT");
            forget(address + start, length);
            assert_eq!(write(address + start, length), length as isize);
        }
        write_pages(address, 16 * MIB);
    });
}

#[test]
fn a_full_table_drops_the_range_after_a_hole() {
    in_a_process(|| {
        let ranges: Vec<usize> = (0..64).map(|_| registered(MIB)).collect();
        for _ in 0..2 {
            forget(ranges[0] + BLOCK, BLOCK);
            assert_eq!(
                write(ranges[0] + BLOCK, MIB - BLOCK),
                (MIB - BLOCK) as isize
            );
            assert_eq!(write(ranges[0], BLOCK), -1, "registered");
            assert_eq!(RANGES.load(Ordering::Relaxed), 64);
        }
        forget(ranges[0], 1);
        assert_eq!(write(ranges[0], MIB), MIB as isize);
        assert_eq!(RANGES.load(Ordering::Relaxed), 63);
    });
}
