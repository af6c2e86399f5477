//! What the page allocator holds back and cannot move: /proc/{zoneinfo,pagetypeinfo} (proc(5)).
//!
//! Beside [`Zone`](super::memory::Zone), which counts the free blocks. Together they tell why a huge
//! page could not be made.

use serde::Serialize;

use super::{FileError, Root};
use crate::units::{NodeId, Pages};

/// How much of a zone is free, and how much of that stays so. In base pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Watermarks {
    /// The node it belongs to.
    pub node: NodeId,
    /// `DMA`, `DMA32`, `Normal`, `Movable`.
    pub zone: String,
    /// Free.
    pub free: Pages,
    /// What an allocation that may wait leaves free.
    pub min: Pages,
    /// What the page allocator manages.
    pub managed: Pages,
    /// What there is of memory, without the holes between.
    pub present: Pages,
}

/// The pageblocks of a zone by what may lie in them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Blocks {
    /// The node it belongs to.
    pub node: NodeId,
    /// The zone's name.
    pub zone: String,
    /// All of them.
    pub total: u64,
    /// Those of kernel memory that cannot be moved (`Unmovable`, `Reclaimable`, `HighAtomic`): no
    /// compaction makes a whole free block of them.
    pub fixed: u64,
}

impl Watermarks {
    /// Reads /proc/zoneinfo: every zone that has memory.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn read_all(root: &Root) -> Result<Vec<Self>, FileError> {
        let text = root.read("proc/zoneinfo")?;
        let mut zones: Vec<Self> = Vec::new();
        for line in text.lines() {
            if let Some((node, zone)) = header(line) {
                zones.push(Self {
                    node,
                    zone: zone.to_owned(),
                    free: Pages(0),
                    min: Pages(0),
                    managed: Pages(0),
                    present: Pages(0),
                });
            } else if let Some(zone) = zones.last_mut() {
                // Fields of the same names that come later belong to CPUs, and have a colon.
                let mut words = line
                    .trim_start()
                    .trim_start_matches("pages ")
                    .split_whitespace();
                let (name, value) = (words.next(), words.next());
                let value = Pages(value.and_then(|value| value.parse().ok()).unwrap_or(0));
                match name {
                    Some("free") => zone.free = value,
                    Some("min") => zone.min = value,
                    Some("managed") => zone.managed = value,
                    Some("present") => zone.present = value,
                    _ => {}
                }
            }
        }
        zones.retain(|zone| zone.managed > Pages(0));
        Ok(zones)
    }
}

impl Blocks {
    /// Reads /proc/pagetypeinfo, which is for root alone.
    ///
    /// # Errors
    /// [`FileError::Io`], EACCES where this process is not root.
    pub fn read_all(root: &Root) -> Result<Vec<Self>, FileError> {
        let text = root.read("proc/pagetypeinfo")?;
        let mut lines = text.lines();
        let Some(types) = lines.find_map(|line| line.strip_prefix("Number of blocks type")) else {
            return Ok(Vec::new());
        };
        let types: Vec<_> = types.split_whitespace().collect();
        let blocks = |line| {
            let (node, rest) = header(line)?;
            let mut words = rest.split_whitespace();
            let zone = words.next()?.to_owned();
            let counts: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
            let fixed = types
                .iter()
                .zip(&counts)
                .filter(|(name, _)| matches!(**name, "Unmovable" | "Reclaimable" | "HighAtomic"));
            Some(Self {
                node,
                zone,
                total: counts.iter().sum(),
                fixed: fixed.map(|(_, count)| count).sum(),
            })
        };
        Ok(lines.filter_map(blocks).collect())
    }
}

/// `Node 0, zone   Normal …`: the node, and what follows `zone`.
fn header(line: &str) -> Option<(NodeId, &str)> {
    let (node, rest) = line.strip_prefix("Node ")?.split_once(", zone")?;
    Some((NodeId(node.trim().parse().ok()?), rest.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake::host;

    #[test]
    fn zones_without_memory_are_left_out() {
        let zone = |name, free, managed| {
            format!(
                "Node 1, zone {name}\n  per-node stats\n      nr_free_cma 7\n  pages free     {free}\n        \
                 boost    0\n        min      9\n        present  {managed}\n        managed  {managed}\n  pagesets\n    cpu: 0\n              \
                 high:     27224\n              high_min: 8468\n"
            )
        };
        let text = zone("  Normal", 100, 200) + &zone(" Movable", 0, 0);
        let (_folder, root) = host(&[("proc/zoneinfo", &text)]);
        let zones = Watermarks::read_all(&root).unwrap();
        let expected = Watermarks {
            node: NodeId(1),
            zone: "Normal".to_owned(),
            free: Pages(100),
            min: Pages(9),
            managed: Pages(200),
            present: Pages(200),
        };
        assert_eq!(zones, [expected]);
    }

    #[test]
    fn blocks_that_cannot_be_moved_are_counted() {
        let text = "Page block order: 9\n\
            Node    0, zone   Normal, type    Unmovable      0      1 \n\n\
            Number of blocks type     Unmovable      Movable  Reclaimable   HighAtomic      Isolate \n\
            Node 0, zone   Normal           41         2378           77            2            0 \n";
        let (_folder, root) = host(&[("proc/pagetypeinfo", text)]);
        let blocks = Blocks::read_all(&root).unwrap();
        assert_eq!((blocks[0].total, blocks[0].fixed), (2498, 120));
        assert_eq!(blocks[0].zone, "Normal");
    }
}
