//! Placement of a process's memory according to smaps, independent of jumbo's report.

use std::fs;

use rustix::process::Pid;

/// Resident memory, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Resident {
    /// Private anonymous memory outside the stack: the heap of the report.
    pub(crate) heap: u64,
    /// PMD-mapped part of `heap`.
    pub(crate) huge: u64,
}

impl Resident {
    pub(crate) fn huge_share(self) -> f64 {
        self.huge as f64 / self.heap as f64
    }
}

/// Sums up the smaps of a process.
pub(crate) fn resident(pid: Pid) -> Resident {
    let path = format!("/proc/{}/smaps", pid.as_raw_nonzero());
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    add_up(&text)
}

fn add_up(smaps: &str) -> Resident {
    let mut sum = Resident::default();
    let mut counts = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        if !first.ends_with(':') {
            // ADDRESS PERMISSIONS OFFSET DEVICE INODE [NAME]
            let name = words.nth(3).unwrap_or("");
            counts = second.ends_with('p') && !name.starts_with('/') && !name.starts_with("[stack");
        } else if counts {
            let bytes = || second.parse::<u64>().unwrap() * 1024;
            match first {
                "Rss:" => sum.heap += bytes(),
                "AnonHugePages:" => sum.huge += bytes(),
                _ => {}
            }
        }
    }
    sum
}

#[test]
fn smaps_are_added_up() {
    let smaps = "\
200000000000-200000400000 rw-p 00000000 00:00 0 
Rss:                4096 kB
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me ac sd hg 
7ffd40000000-7ffd40021000 rw-p 00000000 00:00 0                          [stack]
Rss:                 100 kB
7f0000000000-7f0000021000 r--p 00000000 fe:00 1234                       /usr/lib/a b.so
Rss:                 100 kB
7f0000100000-7f0000200000 rw-s 00000000 00:01 99                         /dev/zero (deleted)
Rss:                1024 kB
555500000000-555500021000 rw-p 00000000 00:00 0                          [heap]
Rss:                   4 kB
";
    let sum = add_up(smaps);
    assert_eq!((sum.heap, sum.huge), (4100 << 10, 2048 << 10));
}
