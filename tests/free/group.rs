//! A memory cgroup for one test, of either version.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::support::host;

/// A group below that of the test, removed on drop.
pub(super) struct Group {
    folder: PathBuf,
    events: &'static str,
}

impl Group {
    /// Creates a group with `limit` bytes of memory; `None`, and a reported skip, if that fails.
    #[track_caller]
    pub(super) fn new(limit: u64) -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("jumbo-e2e-{}-{number}", std::process::id());
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path = |line: &str| line.splitn(3, ':').nth(2).map(str::to_owned);
        let v1 = groups.lines().find(|line| line.contains(":memory:"));
        let (mount, path, file, events) = match v1 {
            Some(line) => (
                "memory",
                path(line),
                "memory.limit_in_bytes",
                "memory.oom_control",
            ),
            None => (
                "",
                groups
                    .lines()
                    .find(|line| line.starts_with("0::"))
                    .and_then(path),
                "memory.max",
                "memory.events",
            ),
        };
        let mount = PathBuf::from("/sys/fs/cgroup").join(mount);
        // In a container the path may be the host's.
        let own = mount.join(path.unwrap_or_default().trim_start_matches('/'));
        let parent = if own.is_dir() { own } else { mount };
        let folder = parent.join(name);
        let made = fs::create_dir(&folder);
        let group = Self { folder, events };
        let limited = fs::write(group.folder.join(file), limit.to_string());
        if let (Ok(()), Ok(())) = (&made, &limited) {
            return Some(group);
        }
        host::skip(&format!(
            "no memory cgroup can be made: {made:?}, {limited:?}"
        ));
        None
    }

    /// Returns a command that enters the group and executes the following command.
    pub(super) fn enter(&self) -> [String; 4] {
        let procs = self.folder.join("cgroup.procs");
        let script = format!("echo $$ > {} && exec \"$@\"", procs.display());
        ["sh".to_owned(), "-c".to_owned(), script, "sh".to_owned()]
    }

    /// Returns the number of OOM kills in the group.
    pub(super) fn kills(&self) -> u64 {
        let text = fs::read_to_string(self.folder.join(self.events)).unwrap_or_default();
        let count = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse().ok();
        text.lines().find_map(count).unwrap_or(0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel may not have finished the last process.
        host::remove_group(&self.folder);
    }
}
