//! [`Machine`]: description of the machine, as far as it affects the figures.

use std::collections::BTreeMap;

use jumbo::units::Bytes;
use jumbo_host::kernel::memory::Memory;
use jumbo_host::kernel::thp::Thp;
use jumbo_host::kernel::{FileError, Root};
use serde::Serialize;

pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The machine and the settings of its kernel.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Name of the processor, if the kernel knows it (not on arm64).
    pub cpu: Option<String>,
    /// Number of CPUs that this process may use.
    pub cores: usize,
    /// Memory, in bytes.
    pub ram: Bytes,
    /// Kernel release.
    pub kernel: String,
    /// Load average of the minute before the measurement: above about 0.5, another program was
    /// running.
    pub load: f64,
    /// Current value of THP's `enabled`, `defrag` and `shmem_enabled`. Empty on a kernel without
    /// THP.
    pub thp: BTreeMap<&'static str, String>,
}

impl Machine {
    /// Reads the description of the machine under `root`.
    ///
    /// # Errors
    /// [`FileError`] if /proc cannot be read.
    pub fn read(root: &Root) -> Result<Self, FileError> {
        let load = root.read("proc/loadavg")?;
        let minute = load.split_whitespace().next();
        let thp = Thp::read_controls(root).ok().flatten().map(|thp| {
            [
                ("enabled", Some(thp.enabled)),
                ("defrag", thp.defrag),
                ("shmem_enabled", thp.shmem_enabled),
            ]
        });
        let thp = thp.into_iter().flatten();
        Ok(Self {
            cpu: field(&root.read("proc/cpuinfo")?, "model name").map(str::to_owned),
            cores: cpus(),
            ram: Memory::read(root)?.total,
            kernel: root.read("proc/sys/kernel/osrelease")?.trim().to_owned(),
            load: minute
                .and_then(|load| load.parse().ok())
                .unwrap_or_default(),
            thp: thp
                .filter_map(|(knob, choice)| Some((knob, choice?.current)))
                .collect(),
        })
    }
}

/// The kernel's version and its huge page settings, by path; without those that this kernel lacks
/// or this user may not read.
pub fn knobs(root: &Root) -> BTreeMap<String, String> {
    let folders = [
        "sys/kernel/mm/transparent_hugepage",
        "sys/kernel/mm/hugepages",
    ];
    let list = |folder: &str| -> Vec<String> {
        let names = root.list(folder).unwrap_or_default().into_iter();
        names.map(|name| format!("{folder}/{name}")).collect()
    };
    let listed = folders.into_iter().flat_map(list);
    let deep = listed.flat_map(|path| [list(&path), vec![path]].concat());
    let vm = [
        "compaction_proactiveness",
        "hugetlb_optimize_vmemmap",
        "overcommit_memory",
        "swappiness",
    ];
    let named = vm.iter().map(|name| format!("proc/sys/vm/{name}"));
    let named = named.chain(["proc/version".to_owned()]);
    let text = |path: String| Some((format!("/{path}"), root.read(&path).ok()?.trim().to_owned()));
    deep.chain(named).filter_map(text).collect()
}

/// Value of `name` in a file of `name: value` lines.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_thp_and_without_a_model_name() {
        let folder = tempfile::tempdir().unwrap();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        for (path, text) in [
            ("proc/meminfo", meminfo.as_str()),
            ("proc/loadavg", "0.25 0.1 0.0 1/99 1234\n"),
            ("proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.00\n"),
            ("proc/sys/kernel/osrelease", "6.18.0-arm64\n"),
            ("sys/kernel/mm/hugepages/hugepages-64kB/nr_hugepages", "3\n"),
        ] {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let machine = Machine::read(&Root::at(folder.path())).unwrap();
        assert_eq!(machine.cpu, None);
        assert_eq!(machine.kernel, "6.18.0-arm64");
        assert!((machine.load - 0.25).abs() < 1e-9);
        assert!(machine.thp.is_empty());
        let knobs = knobs(&Root::at(folder.path()));
        let pool = "/sys/kernel/mm/hugepages/hugepages-64kB/nr_hugepages";
        assert_eq!(
            knobs.into_iter().collect::<Vec<_>>(),
            [(pool.to_owned(), "3".to_owned())]
        );
    }
}
