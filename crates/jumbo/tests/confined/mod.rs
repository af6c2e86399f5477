//! A test in a process of its own, and in a cgroup.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::host::TIMEOUT;

/// Starts this test binary as a process that runs `test`, which waits for a line on stdin before it
/// begins.
pub(crate) fn start(test: &str, change: impl FnOnce(&mut Command)) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    change(&mut command);
    command.spawn().unwrap()
}

/// Lets the process begin and returns its output. A signal fails the test: SIGBUS and SIGKILL are
/// its subject.
pub(crate) fn finish(mut child: Child) -> String {
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), None, "{printed}{complained}");
    assert!(output.status.success(), "{printed}{complained}");
    printed
}

/// A cgroup below the mount of a controller, removed on drop.
pub(crate) struct Group {
    path: PathBuf,
    /// Controller enabled in the parent group, disabled again on drop.
    handed_down: Option<(PathBuf, String)>,
}

impl Group {
    /// Creates a cgroup; `None` without the controller or the right.
    pub(crate) fn new(controller: &str) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let fields = mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>());
        let mount = fields.into_iter().find(|field| {
            field[2] == "cgroup" && field[3].split(',').any(|option| option == controller)
                || field[2] == "cgroup2"
                    && fs::read_to_string(format!("{}/cgroup.controllers", field[1]))
                        .is_ok_and(|text| text.split_whitespace().any(|name| name == controller))
        })?;
        let mount = Path::new(mount[1]);
        // Version 2 has a controller in a group only if the parent enables it.
        let control = mount.join("cgroup.subtree_control");
        let handed_down = fs::read_to_string(&control)
            .is_ok_and(|text| text.split_whitespace().all(|name| name != controller))
            .then(|| (control, controller.to_owned()));
        if let Some((control, controller)) = &handed_down {
            fs::write(control, format!("+{controller}")).ok()?;
        }
        let mut group = Self {
            path: PathBuf::new(),
            handed_down,
        };
        let path = mount.join(format!("jumbo-test-{controller}-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        group.path = path;
        Some(group)
    }

    /// Sets the first of `names` that exists.
    pub(crate) fn set(&self, names: &[&str], value: u64) -> bool {
        let written = |name: &&str| {
            let path = self.path.join(name);
            path.exists() && fs::write(path, value.to_string()).is_ok()
        };
        names.iter().any(written)
    }

    pub(crate) fn add(&self, child: &Child) {
        fs::write(self.path.join("cgroup.procs"), child.id().to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A reaped process may stay in the group for a moment.
        let start = Instant::now();
        while matches!(fs::remove_dir(&self.path), Err(error) if error.kind() == ErrorKind::ResourceBusy)
            && start.elapsed() < TIMEOUT
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some((control, controller)) = &self.handed_down {
            let _ = fs::write(control, format!("-{controller}"));
        }
    }
}
