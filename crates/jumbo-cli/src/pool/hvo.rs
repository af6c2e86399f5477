//! `jumbo pool hvo`.

use std::process::ExitCode;

use clap::ValueEnum;
use jumbo::kernel::{Root, hugetlb};
use jumbo::knobs::{Group, Knob, Plan};

use crate::knobs::{How, change};

/// Switch HVO, which frees most of the metadata of huge pages, on or off
///
/// Of the metadata of each hugetlb page the kernel then keeps one base page: 4 of 32 KiB for a 2 MiB page, 4 KiB
/// of 16 MiB for one of 1 GiB. Pages that are made from now on have it so; those that are there stay as they are. Before
/// Linux 7.3 each surplus page waits milliseconds for it.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("wish").required(true).multiple(true).args(["state", "forget", "undo"]))]
#[command(mut_arg("persist", |persist| persist.requires("state")))]
#[command(mut_arg("force", |force| force.requires("undo")))]
#[command(after_help = "Examples:
  jumbo pool hvo on --dry-run
  jumbo pool hvo on --persist
  jumbo pool hvo --undo")]
pub(crate) struct Args {
    /// For the pages that are made from now on
    #[arg(value_enum, conflicts_with = "undo")]
    state: Option<State>,

    #[command(flatten)]
    how: How,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum State {
    On,
    Off,
}

pub(super) fn main(root: &Root, args: &Args) -> anyhow::Result<ExitCode> {
    let to = args
        .state
        .map(|state| u64::from(matches!(state, State::On)));
    let values: Vec<_> = to.map(|to| (Knob::hvo(), to.into())).into_iter().collect();
    change::set(root, &Group::hvo(), &args.how, &values, note)
}

fn note(root: &Root, plan: &Plan) -> Option<String> {
    let pools = hugetlb::pools(root).ok().flatten().unwrap_or_default();
    let there = pools.iter().any(|pool| pool.persistent().0 > 0);
    (there && !plan.steps.is_empty()).then(|| {
        "pages that are there stay as they are: `jumbo pool set SIZE --persistent 0` and then as many as before \
         makes them anew"
            .to_owned()
    })
}
