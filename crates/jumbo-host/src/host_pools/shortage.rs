//! Reasons for pages that a pool did not get: [`Shortage`].
//!
//! The kernel reports none. Derived from the available memory, its fragmentation, the unmovable
//! part, and the unusable zones, all read right after the failure.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::kernel::memory::{Memory, Zone};
use crate::kernel::task::Status;
use crate::kernel::zones;
use crate::kernel::{self, Root, hugetlb};
use crate::knobs::Step;
use crate::units::{Bytes, NodeId, PageSize, Pages, counted};

/// Missing pages and their reasons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shortage {
    /// The page size.
    pub size: PageSize,
    /// Number of pages to make.
    pub asked: Pages,
    /// Number of pages made.
    pub came: Pages,
    /// Memory available without swapping.
    pub available: Option<Bytes>,
    /// Usable and unusable zones.
    pub zones: Vec<ZoneRoom>,
    /// Reasons in words, the main one first.
    pub reasons: Vec<String>,
    /// Remedies, the mildest first.
    pub hints: Vec<String>,
}

/// Free memory of one zone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ZoneRoom {
    /// Node of the zone.
    pub node: NodeId,
    /// Name of the zone.
    pub zone: String,
    /// Free memory.
    pub free: Bytes,
    /// Part of it below the min watermark, which the kernel keeps.
    pub kept: Option<Bytes>,
    /// Number of whole free pages; `None` where the page allocator's largest block is smaller.
    pub whole: Option<Pages>,
    /// Pageblocks with unmovable memory, and all pageblocks; readable for root alone.
    pub fixed_blocks: Option<(u64, u64)>,
    /// Reason why the zone has no pages for the pool.
    pub closed: Option<String>,
}

/// Reports whether a page is larger than the page allocator's largest block: the kernel has to find
/// a range whose pages can all be migrated.
pub fn is_gigantic(root: &Root, size: PageSize) -> bool {
    let base = kernel::base_page(root);
    let zones = Zone::read_all(root).unwrap_or_default();
    let largest = zones.iter().filter_map(|zone| zone.largest(base)).max();
    match largest {
        Some(largest) => size > largest,
        None => size >= PageSize::SIZE_1G,
    }
}

pub(super) fn zones(root: &Root, size: PageSize, node: Option<NodeId>) -> Vec<ZoneRoom> {
    let base = kernel::base_page(root);
    let gigantic = is_gigantic(root, size);
    let allowed = allowed_nodes(root);
    let marks = zones::watermarks(root).unwrap_or_default();
    let blocks = zones::blocks(root).unwrap_or_default();
    let room = |zone: Zone| {
        let here = (zone.node, zone.name.clone());
        let (marks, blocks) = (marks.get(&here), blocks.get(&here));
        let is_allowed = |nodes: &BTreeSet<NodeId>| nodes.contains(&zone.node);
        let closed = if !allowed.as_ref().is_none_or(is_allowed) {
            Some("not in this process's cpuset".to_owned())
        } else {
            let why = || format!("ZONE_MOVABLE has no {size} pages: they could not be moved");
            (gigantic && zone.name == "Movable").then(why)
        };
        ZoneRoom {
            node: zone.node,
            free: zone.free(base),
            kept: marks.map(|marks| marks.min.bytes(base)),
            whole: zone.whole(size, base),
            fixed_blocks: blocks.map(|blocks| (blocks.fixed, blocks.total)),
            closed,
            zone: zone.name,
        }
    };
    let zones = Zone::read_all(root).unwrap_or_default().into_iter();
    zones
        .filter(|zone| node.is_none_or(|node| node == zone.node))
        .map(room)
        // A zone smaller than a page is irrelevant.
        .filter(|zone| {
            zone.free.0 >= size.bytes() || zone.fixed_blocks.is_some_and(|(_, all)| all > 16)
        })
        .collect()
}

/// Nodes that this process may allocate from: its cpuset also restricts writes to a knob.
fn allowed_nodes(root: &Root) -> Option<BTreeSet<NodeId>> {
    let status = Status::read(root, "self").ok()?;
    let mut nodes = BTreeSet::new();
    for range in status.get("Mems_allowed_list")?.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        nodes.extend((first..=last).map(NodeId));
    }
    Some(nodes)
}

impl Shortage {
    /// Explains the missing pages of `steps`; `None` where none are missing.
    pub fn of(root: &Root, steps: &[Step], compacted: bool) -> Option<Self> {
        let step = steps.iter().find(|step| step.missing() > 0)?;
        let (size, node) = hugetlb::of_file(&step.knob.file)?;
        let asked = step.to.number()? - step.before.number()?;
        let missing = Pages(step.missing());
        let mut shortage = Self {
            size,
            asked: Pages(asked),
            came: Pages(asked.saturating_sub(missing.0)),
            available: Memory::read(root).ok().map(|memory| memory.available),
            zones: zones(root, size, node),
            reasons: Vec::new(),
            hints: Vec::new(),
        };
        shortage.explain(root, missing, compacted);
        Some(shortage)
    }

    fn explain(&mut self, root: &Root, missing: Pages, compacted: bool) {
        let size = self.size;
        let wanted = missing.bytes(size);
        let gigantic = is_gigantic(root, size);
        let open = || self.zones.iter().filter(|zone| zone.closed.is_none());
        let free: Bytes = open().map(|zone| zone.free).sum();
        let kept: Bytes = open().filter_map(|zone| zone.kept).sum();
        let whole: Option<u64> = open().map(|zone| Some(zone.whole?.0)).sum();
        let (fixed, blocks) = open()
            .filter_map(|zone| zone.fixed_blocks)
            .fold((0, 0), |(f, b), (fixed, all)| (f + fixed, b + all));

        let (mut reasons, mut hints) = (Vec::new(), Vec::new());
        let scarce = self.available.is_some_and(|available| available < wanted);
        if let Some(available) = self.available.filter(|_| scarce) {
            reasons.push(format!(
                "memory: {} would be {wanted}, and {available} are available",
                counted(missing.0, "more page")
            ));
            hints.push("`jumbo status` shows who has the memory".to_owned());
        }
        let spare = Bytes(free.0.saturating_sub(kept.0));
        if gigantic {
            reasons.push(format!(
                "fragmentation: a {size} page takes {} in one aligned piece in which all can be moved",
                Bytes(size.bytes())
            ));
        } else if let Some(whole) = whole.filter(|whole| *whole < missing.0) {
            reasons.push(format!(
                "fragmentation: {free} are free, with {} in them",
                counted(whole, &format!("whole {size} page"))
            ));
        } else if spare < wanted && !scarce {
            reasons.push(format!(
                "watermarks: {free} are free, and the kernel keeps {kept} of it for itself"
            ));
        }
        if fixed > 0 {
            reasons.push(format!(
                "kernel memory, which cannot be moved, is in {fixed} of {blocks} pageblocks"
            ));
        }
        for zone in self.zones.iter().filter(|zone| zone.free.0 >= size.bytes()) {
            if let Some(why) = &zone.closed {
                let ZoneRoom {
                    node, zone, free, ..
                } = zone;
                reasons.push(format!(
                    "{free} free on node {node} in zone {zone} do not count: {why}"
                ));
            }
        }
        if !compacted {
            hints.push("`--compact` has the kernel compact memory first".to_owned());
        } else if !scarce {
            hints.push(
                "page cache and kernel caches may be in the way: `sync; echo 3 > \
                 /proc/sys/vm/drop_caches` drops them, and makes files slow until they are read again"
                    .to_owned(),
            );
        }
        hints.push(if gigantic {
            format!("memory is in one piece at boot: `hugepagesz={size} hugepages=N` on the kernel command line")
        } else {
            "memory is in one piece after a boot: `--print-boot` has the lines that set the pool up then".to_owned()
        });
        (self.reasons, self.hints) = (reasons, hints);
    }
}
