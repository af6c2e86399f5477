//! Everything about one process, read in the background.

use std::cmp::Reverse;

use jumbo::units::Bytes;
use jumbo_host::kernel::{FileError, Root};
use jumbo_host::promote::{PromotePlan, Selection, Target};
use jumbo_host::status::{Detail, Inspector, MappingDetail};
use jumbo_inside::orders::MaxWaste;

#[derive(Debug)]
pub(super) struct ProcessDetails {
    pub(super) detail: Detail,
    /// The plan of `jumbo promote`; or why it would do nothing.
    pub(super) plan: Result<PromotePlan, String>,
}

pub(super) fn read_details(pid: u32) -> Result<ProcessDetails, FileError> {
    let root = Root::host();
    let mut inspector = Inspector::new(&root)?;
    inspector.mappings = true;
    let mut detail = inspector.inspect(pid)?;
    detail.mappings.retain(|mapping| mapping.bytes > Bytes(0));
    let by_size = |mapping: &MappingDetail| (Reverse(mapping.bytes), mapping.start);
    detail.mappings.sort_by_key(by_size);
    let wish = Selection::of_heap(MaxWaste::DEFAULT);
    let plan =
        Target::open(&root, pid).and_then(|target| PromotePlan::new(&target, &wish, Bytes(0)));
    let plan = plan.map_err(|refusal| match refusal.hint() {
        Some(hint) => format!("{refusal}; hint: {hint}"),
        None => refusal.to_string(),
    });
    Ok(ProcessDetails { detail, plan })
}
