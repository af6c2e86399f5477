//! Decisions as lines of text, for a bug report: `JUMBO_DEBUG=FD|FILE`, [`start`] and [`note`].
//!
//! Any thread and the process beside the program note decisions in memory. The program's threads
//! write them where no lock is held ([`flush`]): no descriptor stays open, and nothing is written
//! once a seccomp filter of the program is in force. Of more than 512 decisions between two
//! writes the oldest are lost.
#![expect(unsafe_code, reason = "a function is stored as a word")]

use core::ffi::CStr;
use core::fmt::{self, Write};
use core::mem::transmute;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd as _, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::{Errno, Result};

use crate::events::{Mechanism, Side};
use crate::{sandbox, sync, watch};

/// Decisions kept until they are written.
const RECORDS: usize = 512;
const PATH_BYTES: usize = 256;
const LINE_BYTES: usize = 160;

/// Writes the words of a decision.
pub type Words = fn(&mut Line, [usize; 3]) -> fmt::Result;

/// Line that is being written; what does not fit is cut off.
#[derive(Debug)]
pub struct Line {
    bytes: [u8; LINE_BYTES],
    length: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for (to, from) in self.bytes.iter_mut().skip(self.length).zip(text.bytes()) {
            *to = from;
            self.length += 1;
        }
        Ok(())
    }
}

/// A decision: its number, 0 while the others change; microseconds, whether the process beside the
/// program decided, the words, their values.
type Record = [AtomicUsize; 7];

static ALL: [Record; RECORDS] = [const { [const { AtomicUsize::new(0) }; 7] }; RECORDS];
/// Decisions noted, and those of them written.
static NOTED: AtomicUsize = AtomicUsize::new(0);
static WRITTEN: AtomicUsize = AtomicUsize::new(0);
static IS_WRITING: AtomicBool = AtomicBool::new(false);
/// The descriptor, or -1 with a file; the file's path, which ends with a zero.
static IS_ON: AtomicBool = AtomicBool::new(false);
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);
/// Device and inode of the descriptor's file: the program may use the number for another.
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);
static PATH: [AtomicU8; PATH_BYTES] = [const { AtomicU8::new(0) }; PATH_BYTES];

/// Starts with the value of the variable: an open descriptor of the program, or a file, to which lines
/// are added. Without a value, or with a path of more than 255 bytes, nothing is noted.
pub fn start(value: Option<&[u8]>) {
    let Some(value) = value.filter(|value| (1..PATH_BYTES).contains(&value.len())) else {
        return;
    };
    let number = core::str::from_utf8(value).ok();
    if let Some(number) = number.and_then(|text| text.parse::<u16>().ok()) {
        let number = i32::from(number);
        // SAFETY: for one call; a closed one is an error of that.
        let Ok(found) = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(number) }) else {
            return;
        };
        DEVICE.store(found.st_dev, Ordering::Relaxed);
        INODE.store(found.st_ino, Ordering::Relaxed);
        DESCRIPTOR.store(number, Ordering::Relaxed);
    }
    for (to, from) in PATH.iter().zip(value) {
        to.store(*from, Ordering::Relaxed);
    }
    IS_ON.store(true, Ordering::Release);
}

/// Notes a decision.
#[inline]
pub fn note(values: [usize; 3], words: Words) {
    if IS_ON.load(Ordering::Relaxed) {
        record(values, words);
    }
}

#[cold]
fn record([a, b, c]: [usize; 3], words: Words) {
    let number = NOTED.fetch_add(1, Ordering::Relaxed);
    let micros = usize::try_from(sync::now().as_micros()).unwrap_or(usize::MAX);
    let is_beside = usize::from(watch::is_caller_beside());
    let all = [micros, is_beside, words as usize, a, b, c];
    if let Some([state, rest @ ..]) = ALL.get(number % RECORDS) {
        state.store(0, Ordering::Release);
        for (to, from) in rest.iter().zip(all) {
            to.store(from, Ordering::Relaxed);
        }
        state.store(number + 1, Ordering::Release);
    }
}

/// Reports whether something was noted, and not written yet.
#[inline(always)]
pub fn is_due() -> bool {
    NOTED.load(Ordering::Relaxed) != WRITTEN.load(Ordering::Relaxed)
}

/// Writes what was noted. The caller holds no lock, and has a stack with room.
pub fn flush() {
    if is_due()
        && !sandbox::is_entered()
        && !watch::is_foreign()
        && !IS_WRITING.swap(true, Ordering::Acquire)
    {
        // A descriptor that was closed, a file that cannot be opened: there is no place to say so.
        if let Some(Err(_)) = jumbo_sys::unfiltered(write_all) {
            IS_ON.store(false, Ordering::Relaxed);
            WRITTEN.store(NOTED.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        IS_WRITING.store(false, Ordering::Release);
    }
}

#[cold]
fn write_all() -> Result<()> {
    let file: OwnedFd;
    let descriptor = match DESCRIPTOR.load(Ordering::Relaxed) {
        -1 => {
            let byte = |at: usize| PATH.get(at).map_or(0, |byte| byte.load(Ordering::Relaxed));
            let path: [u8; PATH_BYTES] = core::array::from_fn(byte);
            let path = CStr::from_bytes_until_nul(&path).map_err(|_| Errno::INVAL)?;
            let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW;
            let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
            file = rustix::fs::openat(CWD, path, flags, Mode::RUSR | Mode::WUSR)?;
            file.as_fd()
        }
        number => {
            // SAFETY: for these calls; a closed one is an error of theirs.
            let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
            let found = rustix::fs::fstat(descriptor)?;
            let is_same = found.st_dev == DEVICE.load(Ordering::Relaxed)
                && found.st_ino == INODE.load(Ordering::Relaxed);
            if !is_same {
                return Err(Errno::BADF);
            }
            descriptor
        }
    };
    let end = NOTED.load(Ordering::Acquire);
    let first = WRITTEN
        .load(Ordering::Relaxed)
        .max(end.saturating_sub(RECORDS));
    for number in first..end {
        let line = ALL
            .get(number % RECORDS)
            .and_then(|record| line(record, number));
        if let Some(line) = line {
            // No signal for a pipe without a reader, and no wait for a full one.
            let mut ready = [PollFd::new(&descriptor, PollFlags::OUT)];
            rustix::event::poll(&mut ready, Some(&Timespec::default()))?;
            if ready.iter().any(|one| one.revents() != PollFlags::OUT) {
                return Err(Errno::PIPE);
            }
            rustix::io::write(
                descriptor,
                line.bytes.get(..line.length).unwrap_or_default(),
            )?;
        }
    }
    WRITTEN.store(end, Ordering::Relaxed);
    Ok(())
}

/// Returns the line of a decision; `None` if the record has another by now.
fn line(record: &Record, number: usize) -> Option<Line> {
    let read = |at: usize| {
        record
            .get(at)
            .map_or(0, |word| word.load(Ordering::Acquire))
    };
    let [before, micros, is_beside, words, a, b, c] = core::array::from_fn(read);
    if before != number + 1 || read(0) != before {
        return None;
    }
    let mut line = Line {
        bytes: [0; LINE_BYTES],
        length: 0,
    };
    let who = ["program", "scanner"].get(is_beside)?;
    let (seconds, rest) = (micros / 1_000_000, micros % 1_000_000);
    let process = jumbo_sys::process();
    write!(line, "jumbo[{process}] {seconds}.{rest:06} {who}: ").ok()?;
    // SAFETY: the word of this decision is such a function.
    let words = unsafe { transmute::<usize, Words>(words) };
    words(&mut line, [a, b, c]).ok()?;
    line.length = line.length.min(LINE_BYTES - 1);
    writeln!(line).ok()?;
    Some(line)
}

/// Protocol of a fork: the child has its own decisions.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    fn lock_for_fork() {
        flush();
    }

    unsafe fn unlock_after_fork(side: Side) {
        if matches!(side, Side::Child) {
            WRITTEN.store(NOTED.load(Ordering::Relaxed), Ordering::Relaxed);
            IS_WRITING.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_is_a_line_and_a_long_one_is_cut() {
        IS_ON.store(true, Ordering::Relaxed);
        note([1, 2, 0xabc000], |line, [a, b, at]| {
            write!(line, "{a} of {b} at {at:#x}")
        });
        let number = NOTED.load(Ordering::Relaxed) - 1;
        let text = |line: Line| String::from_utf8(line.bytes[..line.length].to_vec()).unwrap();
        let shown = text(line(&ALL[number % RECORDS], number).unwrap());
        assert!(shown.ends_with("program: 1 of 2 at 0xabc000\n"), "{shown}");
        note([0; 3], |line, _| write!(line, "{:>400}", 7));
        let shown = text(line(&ALL[(number + 1) % RECORDS], number + 1).unwrap());
        assert!(
            shown.len() == LINE_BYTES && shown.ends_with(" \n"),
            "{shown}"
        );
        assert!(line(&ALL[number % RECORDS], number + RECORDS).is_none());
    }
}
