//! Watermarks and unmovable blocks of the page allocator: /proc/{zoneinfo,pagetypeinfo} (proc(5)).
//!
//! [`Zone`](super::memory::Zone) has the free blocks. Together they explain why the kernel could
//! not form a huge page.

use std::collections::BTreeMap;

use super::{FileError, Root};
use crate::units::{NodeId, Pages};

/// A value for each zone, by node and name (`DMA`, `DMA32`, `Normal`, `Movable`).
pub type ByZone<T> = BTreeMap<(NodeId, String), T>;

/// A zone in zoneinfo.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// Pages that an allocation that may wait leaves free.
    pub min: Pages,
    /// Pages of the zone without holes.
    pub present: Pages,
}

/// Pageblocks of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pageblocks {
    /// All pageblocks.
    pub total: u64,
    /// Pageblocks of unmovable kernel memory (`Unmovable`, `Reclaimable`, `HighAtomic`), which
    /// compaction cannot free.
    pub fixed: u64,
}

/// Reads all zones with memory from /proc/zoneinfo.
pub fn watermarks(root: &Root) -> Result<ByZone<Watermarks>, FileError> {
    let text = root.read("proc/zoneinfo")?;
    let (mut zones, mut current) = (ByZone::new(), None);
    for line in text.lines() {
        if let Some((node, zone)) = header(line) {
            current = Some((node, zone.to_owned()));
        }
        // Later fields of the same names belong to CPUs, and have a colon.
        let words: Vec<_> = line.split_whitespace().collect();
        if let (Some(zone), [name @ ("min" | "present"), value]) = (&current, &words[..]) {
            let zone: &mut Watermarks = zones.entry(zone.clone()).or_default();
            let value = Pages(value.parse().unwrap_or(0));
            match *name {
                "min" => zone.min = value,
                _ => zone.present = value,
            }
        }
    }
    zones.retain(|_, zone| zone.present > Pages(0));
    Ok(zones)
}

/// Reads /proc/pagetypeinfo, which only root can read.
///
/// # Errors
/// [`FileError::Io`], EACCES where this process is not root.
pub fn blocks(root: &Root) -> Result<ByZone<Pageblocks>, FileError> {
    let text = root.read("proc/pagetypeinfo")?;
    let mut lines = text.lines();
    let types = lines.find_map(|line| line.strip_prefix("Number of blocks type"));
    let types: Vec<_> = types.unwrap_or_default().split_whitespace().collect();
    let blocks = |line| {
        let (node, rest) = header(line)?;
        let (zone, counts) = rest.split_once(char::is_whitespace)?;
        let counts = counts.split_whitespace().map(|word| word.parse().ok());
        let counts: Vec<u64> = counts.collect::<Option<_>>()?;
        let fixed = types
            .iter()
            .zip(&counts)
            .filter(|(name, _)| matches!(**name, "Unmovable" | "Reclaimable" | "HighAtomic"));
        let (total, fixed) = (counts.iter().sum(), fixed.map(|(_, count)| count).sum());
        Some(((node, zone.to_owned()), Pageblocks { total, fixed }))
    };
    Ok(lines.filter_map(blocks).collect())
}

/// Parses `Node 0, zone   Normal …` into the node and the rest after `zone`.
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
        let expected = Watermarks {
            min: Pages(9),
            present: Pages(200),
        };
        let key = (NodeId(1), "Normal".to_owned());
        assert_eq!(watermarks(&root).unwrap(), [(key, expected)].into());
    }

    #[test]
    fn unmovable_blocks_are_counted() {
        let text = "Page block order: 9\n\
            Node    0, zone   Normal, type    Unmovable      0      1 \n\n\
            Number of blocks type     Unmovable      Movable  Reclaimable   HighAtomic      Isolate \n\
            Node 0, zone   Normal           41         2378           77            2            0 \n";
        let (_folder, root) = host(&[("proc/pagetypeinfo", text)]);
        let key = (NodeId(0), "Normal".to_owned());
        let expected = Pageblocks {
            total: 2498,
            fixed: 120,
        };
        assert_eq!(blocks(&root).unwrap(), [(key, expected)].into());
    }
}
