//! Memory allocated, touched, and freed, forked or held: the work of the tables `free`, `fork` and
//! `exit`.
//!
//! The preload library's counters, readable by other processes, say which threads freed.

use std::io;
use std::time::Instant;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_inside::reaper::State;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, kill_process, setrlimit, waitpid,
};
use rustix::time::{ClockId, clock_gettime};

use crate::Error;
use crate::figures::{Figures, figures, ms, with};
use crate::json_child::send;
use crate::memory::{FreeWatch, RawBlock, base_pages_only, own_memory_in};
use crate::stats::median;
use crate::task::{Action, MemoryTask};
use crate::work::wait_for_status;

/// Process IDs in the figures of a process that will end: of the worker, and of its reaper.
pub(crate) const WORKER_PID: &str = "pid";
pub(crate) const REAPER_PID: &str = "reaper_pid";

/// Number of forks without writes; their median counts.
const FORKS: usize = 5;

/// Number of writes after the last fork, all over the memory.
const WRITES: usize = 1000;

/// Times of free or fork: per size the median, summed over sizes; and the memory of all blocks.
pub(crate) fn run(task: &MemoryTask) -> Result<Figures, Error> {
    if task.base {
        base_pages_only()?;
    }
    let (mut all, mut call_ms) = (Figures::new(), 0.0);
    for &size in &task.sizes {
        let mut calls = Vec::with_capacity(task.times);
        for _ in 0..task.times {
            let mut block = RawBlock::take(task.by, size)?;
            block.touch_by_two();
            let watch = FreeWatch::new(&Root::host(), size)?;
            for (name, figure) in own_memory_in(&[block.addresses()])? {
                *all.entry(name).or_default() += figure;
            }
            match task.then {
                Action::Free | Action::FreeAndWatch => {}
                Action::Fork => return Ok(with(all, fork(&mut block)?)),
                // The process frees it by its end.
                Action::End { by_reaper: sibling } => {
                    all.extend(held(sibling)?);
                    return Ok(all);
                }
            }
            let clock = Instant::now();
            block.give_back()?;
            calls.push(ms(clock.elapsed()));
            if task.then == Action::FreeAndWatch {
                match watch.wait(clock) {
                    Ok(back) => drop(all.insert("back_ms".to_owned(), ms(back))),
                    // Another program took the memory: the sample is repeated.
                    Err(Error::NotBack(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        call_ms += median(&calls);
    }
    all.extend(freeing_counters()?);
    Ok(with(
        all,
        [("call_ms", call_ms), ("unmap_us", call_ms * 1e3)],
    ))
}

/// Counters of the freeing threads, once nothing is left to free.
fn freeing_counters() -> Result<Figures, Error> {
    let freed =
        wait_for_status(|covered| (covered.free.pending == Bytes(0)).then_some(covered.free))?;
    Ok(freed.map_or_else(Figures::new, |freed| {
        figures([
            ("gathered_bytes", freed.gathered.0 as f64),
            ("background_bytes", freed.background.0 as f64),
            ("freeing_threads", freed.workers as f64),
        ])
    }))
}

/// Times of fork(2) and of the first writes after it.
fn fork(block: &mut RawBlock) -> Result<[(&'static str, f64); 2], Error> {
    let mut calls = Vec::new();
    let mut writes = 0.0;
    for nth in 0..=FORKS {
        let clock = Instant::now();
        // SAFETY: the child only calls pause(2), which is async-signal-safe, and never returns.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            loop {
                // SAFETY: no arguments.
                unsafe { libc::pause() };
            }
        }
        let child = Pid::from_raw(pid).filter(|_| pid > 0);
        let child = child.ok_or_else(io::Error::last_os_error)?;
        match nth {
            FORKS => {
                let clock = Instant::now();
                block.write_to(WRITES);
                writes = ms(clock.elapsed());
            }
            _ => calls.push(ms(clock.elapsed())),
        }
        kill_process(child, Signal::KILL)?;
        waitpid(Some(child), WaitOptions::empty())?;
    }
    Ok([("call_ms", median(&calls)), ("writes_ms", writes)])
}

fn held(sibling: bool) -> Result<Figures, Error> {
    // A crash shall measure the end, not the disk. Less than a page: no core file. If cores go to a
    // program, the kernel respects only the limit 1 (core(5)).
    let limit = Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    setrlimit(Resource::Core, limit)?;
    let own = figures([(WORKER_PID, f64::from(std::process::id()))]);
    let reaper = if sibling { reaper()? } else { None };
    Ok(match reaper {
        Some(reaper) => with(own, [(REAPER_PID, f64::from(reaper))]),
        None => own,
    })
}

/// Process ID of the reaper, once it sleeps.
fn reaper() -> Result<Option<u32>, Error> {
    wait_for_status(|covered| {
        let running = covered.reaper.state == State::Running.name();
        covered.reaper.pid.filter(|pid| {
            let stat = Root::host().read(format!("proc/{pid}/stat"));
            running && stat.is_ok_and(|stat| state(&stat) == Some('S'))
        })
    })
}

/// State in /proc/PID/stat, after a name that may contain anything.
fn state(stat: &str) -> Option<char> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.chars().next()
}

/// Ends this process as soon as its input has a line, and reports the time.
pub(crate) fn end() -> Result<(), Error> {
    // The input also ends when the measuring process ends.
    io::stdin().read_line(&mut String::new())?;
    send(&now_ns())?;
    std::process::exit(0);
}

/// CLOCK_MONOTONIC, the same in all processes.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds * 1_000_000_000 + nanos
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_follows_the_name() {
        assert_eq!(state("7 (a) R b) S 1 2"), Some('S'));
        assert_eq!(state("7"), None);
    }
}
