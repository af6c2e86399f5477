//! Settings of a pool for the next boot.
//!
//! A boot script may be too late for pages beyond the page allocator's largest block. They need the
//! kernel command line, which belongs to the boot loader and is only printed.

use super::plan::{PoolChange, PoolPlan};
use super::shortage::is_gigantic;
use crate::kernel::hugetlb::{self, Pool};
use crate::kernel::{FileError, Root};
use crate::knobs::{Boot, Group, Knob, boot};
use crate::units::{NodeId, PageSize, Pages};

/// Returns the files that repeat `plan` at boot, or the current values where `change` is empty.
///
/// # Errors
/// [`FileError`] where our files, or the pool's, cannot be read.
pub fn persist(
    root: &Root,
    pool: &Pool,
    change: &PoolChange,
    plan: &PoolPlan,
) -> Result<Boot, FileError> {
    let size = pool.size;
    let to = |knob: &Knob| {
        let step = plan.writes.steps.iter().find(|step| step.knob == *knob)?;
        step.to.number().map(Pages)
    };
    let of_node = |node: &NodeId| hugetlb::file(size, Some(*node), "nr_hugepages");
    let (mut values, mut replaced, mut pages) = (Vec::new(), Vec::new(), None);
    if change.persistent.is_some() || change.overcommit.is_none() {
        let here = change.node.and_then(|node| pool.nodes.get(&node));
        let now = here.map_or(pool.persistent(), hugetlb::NodePool::persistent);
        let to = to(&Knob::persistent(size, change.node)).unwrap_or(now);
        values.push((hugetlb::file(size, change.node, "nr_hugepages"), to.into()));
        pages = Some(to);
        // The order in which a total and a part of it are written is undefined.
        replaced = match change.node {
            Some(_) => vec![hugetlb::file(size, None, "nr_hugepages")],
            None => pool.nodes.keys().map(of_node).collect(),
        };
    }
    let both = change.persistent.is_none() && change.node.is_none() && pool.overcommit > Pages(0);
    if change.overcommit.is_some() || both {
        let to = to(&Knob::overcommit(size)).unwrap_or(pool.overcommit);
        let file = hugetlb::file(size, None, "nr_overcommit_hugepages");
        values.push((file, to.into()));
    }
    let mut boot = boot::persist(root, &Group::pool(size), &values, &replaced)?;
    if is_gigantic(root, size) || !boot.unset.is_empty() {
        boot.command_line = pages.map(|pages| command_line(size, &[(change.node, pages)]));
    }
    boot.notes.extend(command_line_sets(root, size));
    Ok(boot)
}

/// Returns the files without our settings of a pool, or of its part on `node`.
///
/// # Errors
/// [`FileError`] where our files cannot be read.
pub fn forget(root: &Root, size: PageSize, node: Option<NodeId>) -> Result<Boot, FileError> {
    let only = node.map(|node| [hugetlb::file(size, Some(node), "nr_hugepages")]);
    let only = only.as_ref().map(<[String; 1]>::as_slice);
    let mut boot = boot::forget(root, &Group::pool(size), only)?;
    boot.notes.extend(command_line_sets(root, size));
    Ok(boot)
}

/// Returns kernel arguments, as in `hugepagesz=1G hugepages=4`: the kernel makes these pages before
/// memory is fragmented. Linux 5.16 is the first that takes nodes.
pub fn command_line(size: PageSize, parts: &[(Option<NodeId>, Pages)]) -> String {
    let part = |(node, pages): &(Option<NodeId>, Pages)| match node {
        Some(node) => format!("{node}:{pages}"),
        None => pages.to_string(),
    };
    let parts: Vec<_> = parts.iter().map(part).collect();
    format!("hugepagesz={size} hugepages={}", parts.join(","))
}

fn command_line_sets(root: &Root, size: PageSize) -> Option<String> {
    let line = root.read("proc/cmdline").ok()?;
    line.contains(&format!("hugepagesz={size}")).then(|| {
        let line = line.trim();
        format!("the kernel command line sets {size} pages too: `{line}`")
    })
}

#[cfg(test)]
mod tests {
    use super::super::plan::Amount;
    use super::*;
    use crate::kernel::fake::{self, host, write};
    use crate::kernel::hugetlb::NodePool;

    fn persisted(root: &Root, size: PageSize, node: Option<u32>, pages: u64) -> Boot {
        let pool = pool(size);
        let change = PoolChange {
            persistent: Some(Amount::To(Pages(pages))),
            overcommit: None,
            node: node.map(NodeId),
        };
        let plan = PoolPlan::new(&pool, &change).unwrap();
        apply(root, persist(root, &pool, &change, &plan))
    }

    fn apply(root: &Root, boot: Result<Boot, FileError>) -> Boot {
        let boot = boot.unwrap();
        for file in &boot.files {
            file.put(root, file.after.as_deref()).unwrap();
        }
        boot
    }

    fn set(root: &Root) -> Vec<(String, String)> {
        let groups = [PageSize::SIZE_2M, PageSize::SIZE_1G].map(Group::pool);
        let settings = boot::settings(root, &groups).unwrap().into_iter();
        settings.map(|line| (line.knob, line.value)).collect()
    }

    const READER: &[(&str, &str)] = &[("usr/bin/systemd-tmpfiles", "")];

    /// An empty pool on two nodes.
    fn pool(size: PageSize) -> Pool {
        Pool {
            size,
            nodes: [0, 1]
                .map(|node| (NodeId(node), NodePool::default()))
                .into(),
            ..fake::pool(0, 0, 0, 0)
        }
    }

    #[test]
    fn total_and_node_are_set_by_file() {
        let (_folder, root) = host(READER);
        assert_eq!(
            persisted(&root, PageSize::SIZE_2M, None, 512).command_line,
            None
        );
        persisted(&root, PageSize::SIZE_1G, Some(1), 7);
        let set = set(&root);
        assert!(
            set[0]
                .0
                .ends_with("/mm/hugepages/hugepages-2048kB/nr_hugepages")
        );
        assert_eq!(set[0].1, "512");
        assert!(
            set[1]
                .0
                .ends_with("/node1/hugepages/hugepages-1048576kB/nr_hugepages")
        );
    }

    #[test]
    fn gigantic_pages_need_the_command_line() {
        let (_folder, root) = host(READER);
        let boot = persisted(&root, PageSize::SIZE_1G, Some(1), 4);
        let arguments = boot.command_line.unwrap();
        assert_eq!(arguments, "hugepagesz=1G hugepages=1:4");
        write(&root, "proc/cmdline", "quiet hugepagesz=1G hugepages=2\n");
        let notes = persisted(&root, PageSize::SIZE_1G, None, 1).notes;
        assert!(
            notes.iter().any(|note| note.contains("command line")),
            "{notes:?}"
        );
    }

    #[test]
    fn command_line_is_the_fallback() {
        let (_folder, root) = host(&[]);
        let boot = persisted(&root, PageSize::SIZE_2M, None, 4);
        assert!(boot.files.is_empty() && boot.notes.len() == 1, "{boot:?}");
        let arguments = boot.command_line.unwrap();
        assert_eq!(arguments, "hugepagesz=2M hugepages=4");
    }

    #[test]
    fn node_replaces_the_total_and_forget_removes_all() {
        let (_folder, root) = host(READER);
        persisted(&root, PageSize::SIZE_2M, None, 512);
        persisted(&root, PageSize::SIZE_1G, None, 1);
        let boot = persisted(&root, PageSize::SIZE_2M, Some(0), 3);
        assert_eq!(boot.notes.len(), 1, "{boot:?}");
        persisted(&root, PageSize::SIZE_2M, Some(1), 4);
        assert_eq!(set(&root).len(), 3);
        let forget = |size, node| {
            apply(&root, forget(&root, size, node));
            set(&root).len()
        };
        assert_eq!(forget(PageSize::SIZE_2M, Some(NodeId(1))), 2);
        assert_eq!(forget(PageSize::SIZE_2M, None), 1);
        assert_eq!(forget(PageSize::SIZE_1G, None), 0);
    }
}
