//! Memory taken, touched, and given back, copied or held: the work of the tables `free`, `fork` and
//! `exit`.
//!
//! Who freed is read from the counters that the preload library shows to every process that may
//! look into this one.

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
use crate::memory::{Block, Watch, base_pages_only, had_in};
use crate::stats::median;
use crate::talk::say;
use crate::task::{End, Memory, Then};
use crate::work::shown;

/// The process IDs in the figures of a process that is to end: the worker, which a launcher may
/// stand in front of; and the sibling that will give the memory back, where there is one.
pub(crate) const PID: &str = "pid";
pub(crate) const REAPER: &str = "reaper_pid";

/// How often a process forks and writes nothing: the median of these counts.
const CALLS: usize = 5;

/// How many writes follow the last fork, all over the memory.
const WRITES: usize = 1000;

/// The time that giving back, or forking, takes: of each size the median, added; and the memory
/// that all of it was.
pub(crate) fn run(told: &Memory) -> Result<Figures, Error> {
    if told.base {
        base_pages_only()?;
    }
    let root = Root::host();
    let (mut all, mut call_ms) = (Figures::new(), 0.0);
    for &size in &told.sizes {
        let mut calls = Vec::with_capacity(told.times);
        for _ in 0..told.times {
            let mut block = Block::take(told.by, size)?;
            block.touch_by_two();
            let watch = Watch::new(&root, size)?;
            for (name, had) in had_in(&root, &[block.addresses()])? {
                *all.entry(name).or_default() += had;
            }
            match told.then {
                Then::Free | Then::FreeAndWatch => {}
                Then::Fork => return Ok(with(all, fork(&mut block)?)),
                // Its end is that of the process.
                Then::End(_, sibling) => {
                    all.extend(held(&root, sibling)?);
                    return Ok(all);
                }
            }
            let clock = Instant::now();
            block.give_back()?;
            calls.push(ms(clock.elapsed()));
            if told.then == Then::FreeAndWatch {
                match watch.wait(clock) {
                    Ok(back) => drop(all.insert("back_ms".to_owned(), ms(back))),
                    // Another program took it: that is no failure of this process, and the sample
                    // is worth another try.
                    Err(Error::NotBack(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        call_ms += median(&calls);
    }
    all.extend(counted(&root)?);
    Ok(with(
        all,
        [("call_ms", call_ms), ("unmap_us", call_ms * 1e3)],
    ))
}

/// The threads that freed, when nothing is left to be freed.
fn counted(root: &Root) -> Result<Figures, Error> {
    let freed = shown(root, |covered| {
        (covered.free.pending == Bytes(0)).then_some(covered.free)
    })?;
    Ok(freed.map_or_else(Figures::new, |freed| {
        figures([
            ("gathered_bytes", freed.gathered.0 as f64),
            ("background_bytes", freed.background.0 as f64),
            ("freeing_threads", freed.workers as f64),
        ])
    }))
}

/// How long fork(2) takes, and the first writes after it.
fn fork(block: &mut Block) -> Result<[(&'static str, f64); 2], Error> {
    let mut calls = Vec::new();
    let mut writes = 0.0;
    for nth in 0..=CALLS {
        let clock = Instant::now();
        // SAFETY: the child calls nothing but pause(2), which is safe there whatever other threads
        // were doing, and never returns from here.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            loop {
                // SAFETY: takes nothing.
                unsafe { libc::pause() };
            }
        }
        let child = Pid::from_raw(pid).filter(|_| pid > 0);
        let child = child.ok_or_else(io::Error::last_os_error)?;
        match nth {
            CALLS => {
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

/// The processes that are there when this one is to end.
fn held(root: &Root, sibling: bool) -> Result<Figures, Error> {
    // A crash shall measure the end and not the disk. Less than a page: no file. Where cores go to
    // a program the kernel looks at no other limit than 1 (core(5)).
    let limit = Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    setrlimit(Resource::Core, limit)?;
    let own = figures([(PID, f64::from(std::process::id()))]);
    let reaper = if sibling { reaper(root)? } else { None };
    Ok(match reaper {
        Some(reaper) => with(own, [(REAPER, f64::from(reaper))]),
        None => own,
    })
}

/// The sibling, once it sleeps.
fn reaper(root: &Root) -> Result<Option<u32>, Error> {
    shown(root, |covered| {
        let running = covered.reaper.state == State::Running.name();
        covered.reaper.pid.filter(|pid| {
            let stat = root.read(format!("proc/{pid}/stat"));
            running && stat.is_ok_and(|stat| state(&stat) == Some('S'))
        })
    })
}

/// The state that /proc/PID/stat shows, behind a name that may hold anything.
fn state(stat: &str) -> Option<char> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.chars().next()
}

/// Ends this process that way once its standard input says something, and says when that was.
pub(crate) fn end(end: End) -> Result<(), Error> {
    // Were the process that measures gone, this would be the end of the input.
    io::stdin().read_line(&mut String::new())?;
    say(&now_ns())?;
    if end == End::Crash {
        std::process::abort();
    }
    std::process::exit(0);
}

/// CLOCK_MONOTONIC, which is the same in all processes.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds * 1_000_000_000 + nanos
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_stands_behind_the_name() {
        assert_eq!(state("7 (a) R b) S 1 2"), Some('S'));
        assert_eq!(state("7"), None);
    }
}
