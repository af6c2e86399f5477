//! The control groups of units, pods and containers, and their huge pages: [`groups`].
//!
//! A group's path names a systemd unit, a pod or a container ([`Workload`]). These names outlive
//! processes, so they suit metrics. The memory of a group includes that of its descendants. Only
//! the innermost named groups are listed, so that a sum over them counts no page twice.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::{FileError, Root};
use crate::units::Bytes;
use jumbo_sys::cgroup;

/// The names in a group's path; empty where it has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Workload {
    /// Systemd unit: a service, or a scope that is no container's.
    pub unit: String,
    /// UID of the pod.
    pub pod: String,
    /// ID of the container.
    pub container: String,
}

/// Memory of a group in huge folios according to memory.stat; `None` where the kernel does not
/// count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupHuge {
    /// Anonymous memory.
    pub anon: Option<Bytes>,
    /// Shared memory.
    pub shmem: Option<Bytes>,
    /// Page cache.
    pub file: Option<Bytes>,
}

/// Prefixes of the names of container groups, by runtime.
const RUNTIME_PREFIXES: [&str; 4] = ["cri-containerd-", "crio-", "docker-", "libpod-"];
/// Number of digits of a container ID.
const ID_DIGITS: usize = 64;
/// Maximum depth of the walk.
const MAX_DEPTH: usize = 32;

impl Workload {
    /// Parses the path of a group. The innermost name of each kind counts.
    fn of(path: &str) -> Self {
        let mut found = Self::default();
        let mut is_kube = false;
        for part in path.split('/') {
            let bare = part.trim_end_matches(".slice");
            is_kube |= bare.starts_with("kubepods");
            let (_, uid) = bare.rsplit_once("-pod").unwrap_or(("", ""));
            let uid = bare.strip_prefix("pod").unwrap_or(uid);
            if let Some(id) = container(part) {
                id.clone_into(&mut found.container);
                found.unit.clear();
            } else if part.ends_with(".service") || part.ends_with(".scope") {
                part.clone_into(&mut found.unit);
            } else if is_kube && !uid.is_empty() {
                found.pod = uid.replace('_', "-");
            }
        }
        found
    }

    /// Names in the paths of a process's groups, of the first hierarchy that has any.
    pub fn of_process(root: &Root, pid: u32) -> Result<Self, FileError> {
        let text = root.read_bytes(format!("proc/{pid}/cgroup"))?;
        let paths = cgroup::groups(&text).map(|group| String::from_utf8_lossy(group.path));
        let mut all = paths.map(|path| Self::of(&path));
        Ok(all.find(Self::is_named).unwrap_or_default())
    }

    /// Reports whether the path has any name.
    fn is_named(&self) -> bool {
        self != &Self::default()
    }
}

/// The container ID in the name of a group.
fn container(name: &str) -> Option<&str> {
    let bare = name.strip_suffix(".scope").unwrap_or(name);
    let mut prefixes = RUNTIME_PREFIXES.iter();
    let id = prefixes.find_map(|prefix| bare.strip_prefix(prefix));
    let is_hex = |id: &&str| id.bytes().all(|byte| byte.is_ascii_hexdigit()) && !id.is_empty();
    let whole = || Some(bare).filter(|bare| bare.len() == ID_DIGITS);
    id.or_else(whole).filter(is_hex)
}

/// Memory in huge folios of each named group. Groups of the same name are summed.
pub fn groups(root: &Root) -> Result<BTreeMap<Workload, GroupHuge>, FileError> {
    let mut all = BTreeMap::new();
    if let Some(mount) = super::cgroup::memory_mount(root)? {
        walk(root, &mount, "", MAX_DEPTH, &mut all);
    }
    Ok(all)
}

/// Adds the named groups at or below `path` whose memory is counted. Reports whether it found any.
fn walk(
    root: &Root,
    mount: &Path,
    path: &str,
    depth: usize,
    all: &mut BTreeMap<Workload, GroupHuge>,
) -> bool {
    let folder = mount.join(path.trim_start_matches('/'));
    let mut is_any = false;
    // A group may be removed meanwhile.
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let below = format!("{path}/{}", entry.file_name().to_string_lossy());
            is_any |= walk(root, mount, &below, depth - 1, all);
        }
    }
    let workload = Workload::of(path);
    if is_any || !workload.is_named() {
        return is_any;
    }
    // The memory of a group without the controller counts in its parent.
    let stat = root.read_bytes(folder.join("memory.stat"));
    let Ok(text) = stat else {
        return false;
    };
    all.entry(workload).or_default().add(&GroupHuge::of(&text));
    true
}

impl GroupHuge {
    /// Parses memory.stat of either version.
    fn of(text: &[u8]) -> Self {
        let value = |name: &[u8]| cgroup::field(text, name).map(|bytes| Bytes(bytes as u64));
        Self {
            // Version 2 has anon_thp. Version 1 has rss_huge, and total_rss_huge with descendants.
            anon: (value(b"anon_thp").or_else(|| value(b"total_rss_huge")))
                .or_else(|| value(b"rss_huge")),
            shmem: value(b"shmem_thp"),
            file: value(b"file_thp"),
        }
    }

    fn add(&mut self, other: &Self) {
        let sum = |one: Option<Bytes>, other| one.into_iter().chain(other).reduce(|a, b| a + b);
        self.anon = sum(self.anon, other.anon);
        self.shmem = sum(self.shmem, other.shmem);
        self.file = sum(self.file, other.file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake::host;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn a_path_names_unit_pod_and_container() {
        let uid = "1b4e28ba-2fa1-11d2-883f-0016d3cca427";
        // Path, unit, pod, container. U_ID is the pod's UID in systemd's spelling.
        let rows = "\
            /system.slice/redis-server.service redis-server.service - -
            /system.slice/foo.service/worker foo.service - -
            /user.slice/user-0.slice/session-1.scope session-1.scope - -
            /user.slice/user-1000.slice - - -
            / - - -
            /app.slice/app-podman.service app-podman.service - -
            /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podU_ID.slice - POD -
            /kubepods.slice/kubepods-burstable-podU_ID.slice/cri-containerd-HEX.scope - POD HEX
            /kubepods.slice/kubepods-podU_ID.slice/crio-HEX.scope/system.slice/a.service a.service POD HEX
            /kubepods.slice/kubepods-podU_ID.slice - POD -
            /kubepods/besteffort/podPOD/HEX - POD HEX
            /system.slice/docker-HEX.scope - - HEX
            /docker/HEX - - HEX
            /machine.slice/libpod-HEX.scope/container - - HEX
            /machine.slice/libpod-conmon-12.scope libpod-conmon-12.scope - -";
        let rows = rows.replace("U_ID", &uid.replace('-', "_"));
        for row in rows.replace("POD", uid).replace("HEX", ID).lines() {
            let [path, unit, pod, container] = row.split_whitespace().collect::<Vec<_>>()[..]
            else {
                panic!("{row}");
            };
            let expected = [unit, pod, container].map(|word| match word {
                "-" => "",
                name => name,
            });
            let found = Workload::of(path);
            assert_eq!([found.unit, found.pod, found.container], expected, "{path}");
        }
    }

    #[test]
    fn the_innermost_named_groups_are_listed() {
        let stat = "anon 9\nanon_thp 4096\nfile_thp 8192\nshmem_thp 0\n";
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let (_folder, root) = host(&[
            ("proc/self/cgroup", "0::/system.slice/a.service\n"),
            ("proc/self/mountinfo", mounts),
            ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
            ("sys/fs/cgroup/system.slice/memory.stat", stat),
            ("sys/fs/cgroup/system.slice/a.service/memory.stat", stat),
            (
                "sys/fs/cgroup/system.slice/a.service/part/memory.stat",
                stat,
            ),
            ("sys/fs/cgroup/user@1.service/memory.stat", stat),
            (
                "sys/fs/cgroup/user@1.service/app.slice/b.service/memory.stat",
                stat,
            ),
            ("sys/fs/cgroup/user@2.service/b.service/memory.stat", stat),
            ("sys/fs/cgroup/c.service/memory.stat", stat),
            ("sys/fs/cgroup/c.service/d.service/cgroup.procs", ""),
        ]);
        let found = groups(&root).unwrap();
        let anon: Vec<_> = (found.iter())
            .map(|(workload, huge)| (&*workload.unit, huge.anon.unwrap().0))
            .collect();
        let expected = [
            ("a.service", 4096),
            ("b.service", 2 * 4096),
            ("c.service", 4096),
        ];
        assert_eq!(anon, expected);
        let v1 = GroupHuge::of(b"rss_huge 1\ntotal_rss_huge 2\n");
        assert_eq!((v1.anon, v1.shmem), (Some(Bytes(2)), None));
    }
}
