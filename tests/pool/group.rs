//! A cgroup with a limit on hugetlb pages, on memory or on tasks, for one test.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::support::host;

/// A cgroup, removed on drop.
pub(crate) struct Group {
    folder: PathBuf,
    /// Controllers enabled in a parent group (cgroup2), disabled again on drop.
    handed_down: Option<(PathBuf, String)>,
}

impl Group {
    /// Creates a group with `limit` bytes of 2 MiB hugetlb pages; `None`, and a reported skip, if
    /// that fails.
    #[track_caller]
    pub(crate) fn new(limit: u64) -> Option<Self> {
        let files = ["hugetlb.2MB.max", "hugetlb.2MB.limit_in_bytes"];
        Self::limited("hugetlb", files, limit)
    }

    /// Creates a group with `limit` bytes of memory.
    #[track_caller]
    pub(crate) fn of_memory(limit: u64) -> Option<Self> {
        let files = ["memory.max", "memory.limit_in_bytes"];
        Self::limited("memory", files, limit)
    }

    /// Creates a group with `limit` bytes of memory and a name like systemd's for a service.
    #[track_caller]
    pub(crate) fn of_service(limit: u64) -> Option<Self> {
        let files = ["memory.max", "memory.limit_in_bytes"];
        Self::limited_as("memory", files, limit, ".service")
    }

    /// Creates a group with `limit` tasks.
    #[track_caller]
    pub(crate) fn of_pids(limit: u64) -> Option<Self> {
        Self::limited("pids", ["pids.max", "pids.max"], limit)
    }

    #[track_caller]
    fn limited(controller: &str, files: [&str; 2], limit: u64) -> Option<Self> {
        Self::limited_as(controller, files, limit, "")
    }

    /// Like `limited`, with the suffix `end` in its name.
    #[track_caller]
    fn limited_as(controller: &str, files: [&str; 2], limit: u64, end: &str) -> Option<Self> {
        let made =
            mount(controller).and_then(|mount| Self::below(&mount, controller, files, limit, end));
        if made.is_none() {
            host::skip(&format!(
                "no {controller} controller, or no right to make a group"
            ));
        }
        made
    }

    fn below(
        mount: &Path,
        controller: &str,
        files: [&str; 2],
        limit: u64,
        end: &str,
    ) -> Option<Self> {
        let control = mount.join("cgroup.subtree_control");
        let lacks = |text: String| text.split_whitespace().all(|name| name != controller);
        let hands_down = fs::read_to_string(&control).is_ok_and(lacks);
        if hands_down {
            fs::write(&control, format!("+{controller}")).ok()?;
        }
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!(
            "jumbo-e2e-{controller}-{}-{number}{end}",
            std::process::id()
        );
        let group = Self {
            folder: mount.join(name),
            handed_down: hands_down.then(|| (control, controller.to_owned())),
        };
        fs::create_dir(&group.folder).ok()?;
        fs::write(group.file(files)?, limit.to_string()).ok()?;
        Some(group)
    }

    /// Returns the last component of its path.
    pub(crate) fn name(&self) -> &str {
        self.folder.file_name().unwrap().to_str().unwrap()
    }

    /// Returns a command that enters the group and executes the following command.
    pub(crate) fn enter(&self) -> [String; 4] {
        self.enter_and("true")
    }

    /// Like `enter`, but runs `script` in the group first.
    pub(crate) fn enter_and(&self, script: &str) -> [String; 4] {
        let procs = self.folder.join("cgroup.procs");
        let script = format!("echo $$ > {} && {script} && exec \"$@\"", procs.display());
        ["sh".to_owned(), "-c".to_owned(), script, "sh".to_owned()]
    }

    /// Returns the peak memory of the group in bytes.
    pub(crate) fn peak(&self) -> Option<u64> {
        let file = self.file(["memory.peak", "memory.max_usage_in_bytes"])?;
        fs::read_to_string(file).ok()?.trim().parse().ok()
    }

    /// Returns the file with the current memory of the group in bytes.
    pub(crate) fn usage(&self) -> Option<PathBuf> {
        self.file(["memory.current", "memory.usage_in_bytes"])
    }

    /// Returns the first of `names`, one per cgroup version, that exists.
    fn file(&self, names: [&str; 2]) -> Option<PathBuf> {
        let mut files = names.iter().map(|name| self.folder.join(name));
        files.find(|file| file.exists())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        host::remove_group(&self.folder);
        if let Some((control, controller)) = &self.handed_down {
            let _ = fs::write(control, format!("-{controller}"));
        }
    }
}

/// Returns the mount point of the controller, of either version.
fn mount(controller: &str) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (mount, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let second = || {
            let names = fs::read_to_string(Path::new(mount).join("cgroup.controllers"));
            names.is_ok_and(|names| names.split_whitespace().any(|name| name == controller))
        };
        let has = match kind {
            "cgroup" => options.split(',').any(|option| option == controller),
            "cgroup2" => second(),
            _ => false,
        };
        has.then(|| PathBuf::from(mount))
    })
}
