//! The program that forks.

use std::io;
use std::time::Instant;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::Error;
use crate::figures::{Figures, ms, with};
use crate::memory::{Block, base_pages_only, had_in};
use crate::stats::median;
use crate::work::Work;

/// How often it forks and writes nothing: the median of these counts.
const CALLS: usize = 5;

/// How many writes follow the last one, all over the memory.
const WRITES: usize = 1000;

/// A process with so many bytes, on base pages where that is set, that forks, and writes to some
/// of them while the child has them too.
pub(crate) const FORK: Work<(Bytes, bool)> = Work::new("fork", fork);

fn fork((size, base): (Bytes, bool)) -> Result<Figures, Error> {
    if base {
        base_pages_only()?;
    }
    let mut block = Block::allocate(size)?;
    block.touch();
    let had = had_in(&Root::host(), &[block.addresses()])?;
    let mut calls = Vec::new();
    for _ in 0..CALLS {
        let (took, child) = fork_once()?;
        calls.push(took);
        end(child)?;
    }
    let (_, child) = fork_once()?;
    let clock = Instant::now();
    block.write_to(WRITES);
    let writes = ms(clock.elapsed());
    end(child)?;
    let took = [("call_ms", median(&calls)), ("writes_ms", writes)];
    Ok(with(had, took))
}

/// How long the call took, and a child that sleeps.
fn fork_once() -> Result<(f64, Pid), Error> {
    let clock = Instant::now();
    // SAFETY: the child calls nothing but pause(2), which is safe there whatever other threads were doing, and never returns
    // from here.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        loop {
            // SAFETY: takes nothing.
            unsafe { libc::pause() };
        }
    }
    let took = ms(clock.elapsed());
    let child = Pid::from_raw(pid).filter(|_| pid > 0);
    Ok((took, child.ok_or_else(io::Error::last_os_error)?))
}

fn end(child: Pid) -> Result<(), Error> {
    kill_process(child, Signal::KILL)?;
    waitpid(Some(child), WaitOptions::empty())?;
    Ok(())
}
