//! Pages of `jumbo status`, read in the background.

use std::cmp::Reverse;

use jumbo::units::Bytes;
use jumbo_host::kernel::{FileError, Root};
use jumbo_host::promote::{PromotePlan, Refusal, Selection, Target, left_out};
use jumbo_host::status::{Inspector, Kind, MappingDetail};
use jumbo_inside::orders::MaxWaste;

use crate::status::{HostPage, process};
use crate::view::View;

/// Number of processes on the page of the host.
const LARGEST: usize = 10;

/// Whose page is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    Host,
    Process(u32),
}

/// Reads a page. That of a process begins with the plan of `jumbo promote`, and has the largest
/// mappings first.
pub(super) fn read(whose: Whose) -> Result<View, FileError> {
    let (root, mut view) = (Root::host(), View::default());
    let Whose::Process(pid) = whose else {
        HostPage::read(&root, LARGEST).show(&mut view);
        return Ok(view);
    };
    let mut inspector = Inspector::new(&root)?;
    inspector.mappings = true;
    let mut detail = inspector.inspect(pid)?;
    detail.mappings.retain(|mapping| mapping.bytes > Bytes(0));
    let by_size = |mapping: &MappingDetail| (Reverse(mapping.bytes), mapping.start);
    detail.mappings.sort_by_key(by_size);
    let wish = Selection::of_heap(MaxWaste::DEFAULT);
    let target = Target::open(&root, pid);
    show_plan(
        &mut view,
        target.and_then(|target| PromotePlan::new(&target, &wish, Bytes(0))),
    );
    process::show_process(&mut view, &detail);
    view.missing("Not shown", &detail.missing);
    Ok(view)
}

/// Shows the plan of `jumbo promote`; or why it would do nothing.
fn show_plan(view: &mut View, plan: Result<PromotePlan, Refusal>) {
    let plan = match plan {
        Ok(plan) if plan.is_empty() => return view.fact("Promote", "would gain nothing"),
        Ok(plan) => plan,
        Err(refusal) => {
            let hint = refusal.hint().map(|hint| format!("; hint: {hint}"));
            return view.fact("Promote", format!("{refusal}{}", hint.unwrap_or_default()));
        }
    };
    let (gain, cost) = (plan.gain, plan.cost);
    let what = format!("{gain} would be huge, for {cost} more memory");
    view.fact("Promote", what);
    let left = plan
        .kinds
        .get(&Kind::Heap)
        .into_iter()
        .flat_map(|part| &part.left);
    view.lines(left.map(|(reason, bytes)| format!("  {bytes} stay {}", left_out(reason))));
}
