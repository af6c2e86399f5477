//! Obstacles to a pool's growth, before it is tried: [`obstacles`].
//!
//! Huge pages are made of free blocks, best in a zone of movable memory. A host without free blocks
//! of that size has to move memory first.

use super::shortage::{ZoneRoom, is_gigantic, zones};
use crate::kernel::Root;
use crate::units::{NodeId, PageSize, Pages, counted};

/// Describes the obstacles to `more` pages, on `node` or on all. Skips unreadable files.
pub fn obstacles(root: &Root, size: PageSize, node: Option<NodeId>, more: Pages) -> Vec<String> {
    if more == Pages(0) {
        return Vec::new();
    }
    if is_gigantic(root, size) {
        // ZONE_MOVABLE has none of these.
        return vec![format!(
            "a page of {size} is larger than the largest free block; the kernel has to clear a range for each"
        )];
    }
    let zones = zones(root, size, node);
    let whole = |zone: &ZoneRoom| zone.whole.map_or(0, |pages| pages.0);
    let open = || zones.iter().filter(|zone| zone.closed.is_none());
    let pages = counted(more.0, "page");
    let mut obstacles = Vec::new();
    let free: u64 = open().map(whole).sum();
    if free < more.0 {
        obstacles.push(format!(
            "free blocks hold {free} of {pages}; for the rest the kernel has to move memory, and may fail"
        ));
    }
    let movable = open().filter(|zone| zone.zone == "Movable");
    let movable: u64 = movable.map(whole).sum();
    if movable < more.0 {
        obstacles.push(format!(
            "movable memory (ZONE_MOVABLE) has blocks for {movable} of {pages}; the others come out of \
             memory that can be pinned, where pages are hard to form again once they were given back"
        ));
    }
    obstacles
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake;

    /// A host with eleven orders of free blocks: pages of 2 MiB are the last but one.
    fn host(buddyinfo: &str) -> (tempfile::TempDir, Root) {
        let (folder, root) = fake::host(&[("proc/buddyinfo", buddyinfo)]);
        let auxv = [6u64, 4096, 0, 0].map(u64::to_ne_bytes).concat();
        fake::write(&root, "proc/self/auxv", auxv);
        (folder, root)
    }

    #[test]
    fn free_blocks_and_movable_memory_are_required() {
        let (_folder, root) = host(
            "Node 0, zone Normal 0 0 0 0 0 0 0 0 0 3 4\n\
             Node 0, zone Movable 0 0 0 0 0 0 0 0 0 1 2\n\
             Node 1, zone Movable 0 0 0 0 0 0 0 0 0 0 9\n",
        );
        let size = PageSize::SIZE_2M;
        let growth = |more| obstacles(&root, size, Some(NodeId(0)), Pages(more));
        assert_eq!(growth(0), [""; 0]);
        assert_eq!(growth(5), [""; 0]);
        let movable = growth(16);
        assert_eq!(movable.len(), 1, "{movable:?}");
        assert!(movable[0].contains("has blocks for 5 of 16 pages"));
        let both = growth(17);
        assert_eq!(both.len(), 2, "{both:?}");
        assert!(both[0].starts_with("free blocks hold 16 of 17 pages"));
        assert_eq!(obstacles(&root, size, None, Pages(23)), [""; 0]);
    }

    #[test]
    fn gigantic_pages_are_an_obstacle() {
        let (_folder, root) = host("Node 0, zone Movable 0 0 0 0 0 0 0 0 0 0 9000\n");
        let gigantic = obstacles(&root, PageSize::SIZE_1G, None, Pages(1));
        assert!(gigantic.len() == 1 && gigantic[0].contains("larger than the largest free block"));
    }
}
