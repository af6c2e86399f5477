//! A control group with a limit on hugetlb pages, for one test.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::host;

const CONTROLLER: &str = "hugetlb";

/// A group that goes when this is dropped.
pub(super) struct Group {
    folder: PathBuf,
    /// What had to be handed down for it (cgroup2), and is not any more in the end.
    handed_down: Option<PathBuf>,
}

impl Group {
    /// Makes one in which `limit` bytes of 2 MiB pages may be touched; `None`, with the skip announced, where that
    /// cannot be.
    #[track_caller]
    pub(super) fn new(limit: u64) -> Option<Self> {
        let made = mount().and_then(|mount| Self::below(&mount, limit));
        if made.is_none() {
            host::skip("no hugetlb controller, or no right to make a group");
        }
        made
    }

    fn below(mount: &Path, limit: u64) -> Option<Self> {
        let control = mount.join("cgroup.subtree_control");
        let lacks = |text: String| text.split_whitespace().all(|name| name != CONTROLLER);
        let hands_down = fs::read_to_string(&control).is_ok_and(lacks);
        if hands_down {
            fs::write(&control, format!("+{CONTROLLER}")).ok()?;
        }
        let group = Self {
            folder: mount.join(format!("jumbo-e2e-pool-{}", std::process::id())),
            handed_down: hands_down.then_some(control),
        };
        fs::create_dir(&group.folder).ok()?;
        let names = ["hugetlb.2MB.max", "hugetlb.2MB.limit_in_bytes"];
        let mut files = names.iter().map(|name| group.folder.join(name));
        let file = files.find(|file| file.exists())?;
        fs::write(file, limit.to_string()).ok()?;
        Some(group)
    }

    /// A command that enters it and becomes the one behind.
    pub(super) fn enter(&self) -> [String; 4] {
        let procs = self.folder.join("cgroup.procs");
        let script = format!("echo $$ > {} && exec \"$@\"", procs.display());
        ["sh".to_owned(), "-c".to_owned(), script, "sh".to_owned()]
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
        if let Some(control) = &self.handed_down {
            let _ = fs::write(control, format!("-{CONTROLLER}"));
        }
    }
}

/// Where the controller is mounted, of either version.
fn mount() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (mount, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let second = || {
            let names = fs::read_to_string(Path::new(mount).join("cgroup.controllers"));
            names.is_ok_and(|names| names.split_whitespace().any(|name| name == CONTROLLER))
        };
        let has = match kind {
            "cgroup" => options.split(',').any(|option| option == CONTROLLER),
            "cgroup2" => second(),
            _ => false,
        };
        has.then(|| PathBuf::from(mount))
    })
}
