//! A fake host, the pool of this host, and programs that use its pages.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Timeout of operations that normally take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Folder of the pool of 2 MiB pages.
pub(crate) const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";

/// Reports that the calling test cannot run here. With `JUMBO_TEST_STRICT=1` that is a failure.
pub(crate) fn skip(test: &str, reason: &str) {
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP {test}: {reason} (JUMBO_TEST_STRICT=1)"
    );
    // Not eprintln!, which libtest captures when the test passes.
    let _ = writeln!(std::io::stderr(), "SKIP {test}: {reason}");
}

/// Polls `ask` until it returns a value.
pub(crate) fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < TIMEOUT, "waited in vain for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A /proc, /sys, /etc and /run in a folder.
pub(crate) struct Fake(tempfile::TempDir);

impl Fake {
    /// A host with 16 GiB, systemd, and empty pools.
    pub(crate) fn new() -> Self {
        let fake = Self(tempfile::tempdir().unwrap());
        let auxv: Vec<u8> = [6, 4096, 0, 0]
            .into_iter()
            .flat_map(u64::to_ne_bytes)
            .collect();
        fs::create_dir_all(fake.path("proc/self")).unwrap();
        fs::create_dir_all(fake.path("run")).unwrap();
        fs::write(fake.path("proc/self/auxv"), auxv).unwrap();
        const FIELDS: &str = "MemTotal MemFree MemAvailable Buffers Cached SwapCached Active Inactive \
            SwapTotal SwapFree Dirty Writeback Mapped Slab Committed_AS VmallocTotal VmallocUsed \
            VmallocChunk";
        let kib = |name: &str| if name.starts_with("Mem") { 16 << 20 } else { 0 };
        let line = |name: &str| format!("{name}: {} kB\n", kib(name));
        let meminfo: String = FIELDS.split_ascii_whitespace().map(line).collect();
        fake.write("proc/meminfo", &format!("{meminfo}Hugepagesize: 2048 kB\n"));
        fake.write(
            "proc/self/mountinfo",
            "22 27 0:21 / /proc rw,relatime - proc proc rw\n",
        );
        fake.write("proc/self/cgroup", "0::/\n");
        fake.write(
            "proc/self/status",
            "Name:\tjumbo\nMems_allowed_list:\t0-1\n",
        );
        fake.write("proc/1/status", "Name:\tinit\nVmSize: 9 kB\n");
        fake.write("proc/1/smaps", "");
        fake.write("proc/vmstat", "nr_free_pages 1\n");
        fake.write(
            "proc/buddyinfo",
            "Node 0, zone Normal 9 9 9 9 9 9 9 9 9 3 4\n",
        );
        fake.write("proc/sys/vm/hugetlb_optimize_vmemmap", "0\n");
        fake.write("usr/bin/systemd-tmpfiles", "");
        fake.pool(2048, [0; 5]);
        fake
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    pub(crate) fn write(&self, file: &str, text: &str) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn text(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.path(file)).ok()
    }

    /// Writes the pool's total, free, reserved, surplus and overcommit pages.
    pub(crate) fn pool(&self, kib: u64, pages: [u64; 5]) {
        self.fill(
            &format!("sys/kernel/mm/hugepages/hugepages-{kib}kB"),
            &pages,
        );
    }

    /// Writes the node's total, free, reserved and surplus pages.
    pub(crate) fn node(&self, node: u32, kib: u64, pages: [u64; 4]) {
        let folder = format!("sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB");
        self.fill(&folder, &pages);
    }

    fn fill(&self, folder: &str, pages: &[u64]) {
        let names = [
            "nr_hugepages",
            "free_hugepages",
            "resv_hugepages",
            "surplus_hugepages",
            "nr_overcommit_hugepages",
        ];
        for (name, pages) in names.iter().zip(pages) {
            self.write(&format!("{folder}/{name}"), &format!("{pages}\n"));
        }
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        self.any_command(&[&["pool"], arguments].concat())
    }

    /// Like `command`, but not only `pool`.
    pub(crate) fn any_command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jumbo"));
        command
            .args(words)
            .args(["--root", self.0.path().to_str().unwrap()])
            .env("XDG_RUNTIME_DIR", self.path("run"));
        command
    }

    pub(crate) fn jumbo(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Returns the standard output of a `pool` command that succeeds.
    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        self.any_ok(&[&["pool"], arguments].concat())
    }

    /// Returns the standard output of any command that succeeds.
    pub(crate) fn any_ok(&self, words: &[&str]) -> String {
        let output = self.any_command(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        stdout(&output)
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(arguments)).unwrap()
    }

    /// Returns every file of the host with its text.
    pub(crate) fn everything(&self) -> Vec<(PathBuf, String)> {
        let mut files = Vec::new();
        let mut folders = vec![self.0.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let bytes = fs::read(&path).unwrap();
                    files.push((path, String::from_utf8_lossy(&bytes).into_owned()));
                }
            }
        }
        files.sort();
        files
    }
}

/// Exclusive access to this host's pool of 2 MiB pages, restored on drop; the records of jumbo are
/// in a temporary folder.
pub(crate) struct Host {
    run: tempfile::TempDir,
    before: [u64; 2],
    _alone: File,
}

/// State of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolState {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) reserved: u64,
    pub(crate) surplus: u64,
    pub(crate) overcommit: u64,
}

impl PoolState {
    pub(crate) fn persistent(&self) -> u64 {
        self.total - self.surplus
    }
}

impl Host {
    /// Returns `None`, and reports the skip, if the pool cannot be changed.
    pub(crate) fn take(test: &str) -> Option<Self> {
        // Lock of all tests that change the host's state.
        let lock = std::env::temp_dir().join("jumbo-e2e.lock");
        let alone = File::create(&lock).or_else(|_| File::open(&lock)).unwrap();
        alone.lock().unwrap();
        let writable = fs::OpenOptions::new()
            .write(true)
            .open(Path::new("/").join(POOL).join("nr_hugepages"));
        if let Err(error) = writable {
            skip(test, &format!("cannot resize a pool: {error}"));
            return None;
        }
        // Counters are compared, so no other program may use the pool. Programs of a killed test
        // free their pages a moment later.
        let start = Instant::now();
        let in_use = || now().total != now().free || now().reserved > 0;
        while in_use() && start.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(5));
        }
        if in_use() {
            skip(test, "another program uses the pool of 2 MiB pages");
            return None;
        }
        let run = tempfile::tempdir().unwrap();
        let now = now();
        let host = Self {
            run,
            before: [now.persistent(), now.overcommit],
            _alone: alone,
        };
        if !host.command(&["true"]).status().unwrap().success() {
            skip(test, "cannot make a mount namespace");
            return None;
        }
        Some(host)
    }

    /// A command that sees a temporary /run.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "sh",
                "-c",
                "mount --bind \"$0\" /run && exec \"$@\"",
            ])
            .arg(self.run.path())
            .args(words);
        command
    }

    pub(crate) fn jumbo(&self, arguments: &[&str]) -> Command {
        self.any_command(&[&["pool"], arguments].concat())
    }

    /// Like `jumbo`, but not only `pool`.
    pub(crate) fn any_command(&self, words: &[&str]) -> Command {
        self.command(&[&[env!("CARGO_BIN_EXE_jumbo")], words].concat())
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.jumbo(arguments).output().unwrap()
    }

    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        stdout(&output)
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(arguments)).unwrap()
    }

    /// Counts the recorded changes of the pool that were not undone.
    pub(crate) fn records(&self) -> usize {
        let file = self.run.path().join("jumbo/knobs/pool-2M/changes.toml");
        let text = fs::read_to_string(file).unwrap_or_default();
        let heads = text.lines().filter(|line| *line == "[[changes]]");
        heads.count()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for (name, value) in ["nr_hugepages", "nr_overcommit_hugepages"]
            .into_iter()
            .zip(self.before)
        {
            fs::write(Path::new("/").join(POOL).join(name), value.to_string()).unwrap();
        }
    }
}

pub(crate) fn now() -> PoolState {
    let read = |name: &str| {
        let text = fs::read_to_string(Path::new("/").join(POOL).join(name)).unwrap();
        text.trim().parse().unwrap()
    };
    PoolState {
        total: read("nr_hugepages"),
        free: read("free_hugepages"),
        reserved: read("resv_hugepages"),
        surplus: read("surplus_hugepages"),
        overcommit: read("nr_overcommit_hugepages"),
    }
}

/// Waits until pool and /proc/meminfo are as before, then checks. Pages that another user's program
/// got meanwhile are freed when it ends.
#[track_caller]
pub(crate) fn assert_unchanged(before: &Snapshot, what: &str) {
    let start = Instant::now();
    while Snapshot::now() != *before && start.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(Snapshot::now(), *before, "{what}");
}

/// State to compare before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) pool: PoolState,
    meminfo: String,
}

impl Snapshot {
    pub(crate) fn now() -> Self {
        Self {
            pool: now(),
            meminfo: meminfo(),
        }
    }
}

/// Returns the lines of /proc/meminfo about the pools.
fn meminfo() -> String {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let of_pools = |line: &&str| line.starts_with("Huge");
    text.lines().filter(of_pools).collect::<Vec<_>>().join("\n")
}

/// A program that uses pages; it ends and frees them on drop.
pub(crate) struct PageUser(Child);

const PROGRAM: &str = "
import mmap, sys
page = 2 << 20
mapped, touched = (int(word) * page for word in sys.argv[1:])
try:
    memory = mmap.mmap(-1, mapped, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x40000)
    for at in range(0, touched, page):
        memory[at] = 1
    print('ready', flush=True)
except OSError as error:
    print(error, flush=True)
sys.stdin.readline()
";

impl PageUser {
    /// Starts a program that maps (and so reserves) and touches pages; returns its error if it
    /// cannot.
    pub(crate) fn of(mapped: u64, touched: u64) -> Result<Self, String> {
        let mut child = Command::new("python3")
            .args(["-c", PROGRAM, &mapped.to_string(), &touched.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let user = Self(child);
        if line == "ready\n" {
            Ok(user)
        } else {
            Err(line)
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for PageUser {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}
