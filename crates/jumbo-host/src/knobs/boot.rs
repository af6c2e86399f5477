//! Names of knobs for the next boot: every knob is a file of /proc or /sys, which `tmpfiles.d` can
//! write (tmpfiles.d(5)); some have a name in `sysctl.d`.

use crate::kernel::{Root, hugetlb};

/// Returns the sysctl of the knob: `vm.nr_hugepages` for the pool of the default size.
pub fn sysctl(root: &Root, knob: &str) -> Option<String> {
    if let Some(name) = knob.strip_prefix("proc/sys/") {
        return Some(name.replace('/', "."));
    }
    let (size, node) = hugetlb::of_file(knob)?;
    let is_default = node.is_none() && hugetlb::default_size(root).ok()? == Some(size);
    let name = knob.rsplit('/').next().unwrap_or_default();
    // The folders of THP have the same names.
    (is_default && name.starts_with("nr_")).then(|| format!("vm.{name}"))
}

#[cfg(test)]
mod tests {
    use super::super::knob::Knob;
    use super::*;
    use crate::kernel::fake::host;
    use crate::units::{NodeId, PageSize};

    #[test]
    fn the_default_pool_and_hvo_have_sysctls() {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let others = meminfo
            .lines()
            .filter(|line| !line.starts_with("Hugepagesize"));
        let others = others.map(|line| format!("{line}\n")).collect::<String>();
        let meminfo = format!("{others}Hugepagesize: 2048 kB\n");
        let (_folder, root) = host(&[("proc/meminfo", &meminfo)]);
        let name = |knob: Knob| sysctl(&root, &knob.file);
        let pool = |size, node| name(Knob::persistent(size, node));
        assert_eq!(pool(PageSize::SIZE_2M, None).unwrap(), "vm.nr_hugepages");
        assert_eq!(pool(PageSize::SIZE_2M, Some(NodeId(1))), None);
        assert_eq!(pool(PageSize::SIZE_1G, None), None);
        let overcommit = name(Knob::overcommit(PageSize::SIZE_2M));
        assert_eq!(overcommit.unwrap(), "vm.nr_overcommit_hugepages");
        assert_eq!(name(Knob::hvo()).unwrap(), "vm.hugetlb_optimize_vmemmap");
        for size in [None, Some(PageSize::SIZE_2M)] {
            assert_eq!(name(Knob::thp(size, "shmem_enabled")), None);
        }
    }
}
