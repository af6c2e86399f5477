//! `jumbo vmemmap show --measure`: what HVO costs on this kernel, on pages that are added to a pool and go again.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use jumbo::units::{Bytes, PageSize, Pages};
use jumbo_host::host_pools::steer;
use jumbo_host::kernel::memory::{Events, Memory};
use jumbo_host::kernel::{self, Root, hugetlb};
use jumbo_host::knobs::{Group, Knob, Steering};
use serde::Serialize;

use crate::knobs::terminal::Terminal;
use crate::knobs::{command_line, failed, journal, refused, unrecorded};
use crate::view::{View, bytes, duration, tell};

const SIZE: PageSize = PageSize::SIZE_2M;
/// How many pages are added at once.
const PAGES: Pages = Pages(64);
/// How many come one by one, as surplus pages do.
const SINGLE: u64 = 8;

/// What resizes took with HVO off or on.
#[derive(Serialize)]
pub(super) struct Cost {
    hvo: bool,
    /// How many pages came, and went, at once.
    pages: Pages,
    grow: Duration,
    shrink: Duration,
    /// One page, on the average of several.
    single: Duration,
    /// What the counters of page metadata fell by while the pages were there; `None` where the kernel has none.
    saved: Option<Bytes>,
}

/// What it costs, off and on; the switch and the pool are put back, also when it is interrupted, in which case there is no answer.
pub(super) fn measure(root: &Root) -> anyhow::Result<Option<[Cost; 2]>> {
    Knob::hvo().writable(root).map_err(refused)?;
    let pools = hugetlb::pools(root)?.unwrap_or_default();
    let is_meant = |pool: &hugetlb::Pool| pool.size == SIZE;
    if !pools.iter().any(is_meant) {
        bail!("this kernel has no pool of {SIZE} pages to measure with");
    }
    let needed = PAGES.bytes(SIZE);
    let available = Memory::read(root)?.available;
    if available.0 / 4 < needed.0 {
        bail!("measuring takes {needed}, and {available} are available: too little to be sure");
    }
    let (journal, command) = (journal(root)?, command_line());
    let of_hvo = journal.lock(&Group::hvo(), &command).map_err(unrecorded)?;
    let of_pool = journal
        .lock(&Group::pool(SIZE), &command)
        .map_err(unrecorded)?;
    let pools = hugetlb::pools(root)?.unwrap_or_default();
    let before = pools.into_iter().find(is_meant);
    let before = before.with_context(|| format!("the pool of {SIZE} pages is gone"))?;
    let terminal = Terminal::new(root)?;
    let switch = Steering::of(root, &of_hvo, vec![Knob::hvo()], &command).map_err(failed)?;
    let pool = steer(root, &of_pool, &before, &command).map_err(failed)?;
    let mut work = Work {
        root,
        switch,
        pool,
        has: before.persistent(),
        terminal,
        stopped: false,
    };
    let costs = work.cost(false).and_then(|off| Ok([off, work.cost(true)?]));
    let Work {
        switch,
        pool,
        mut terminal,
        stopped,
        ..
    } = work;
    let back = pool.put_back(&mut terminal).map_err(failed);
    let back = back.and(switch.put_back(&mut terminal).map_err(failed));
    if stopped && back.is_ok() {
        tell("interrupted: everything was put back");
        terminal.end(ExitCode::FAILURE);
        return Ok(None);
    }
    terminal.done();
    back?;
    costs.map(Some)
}

/// The switch and the pool in hand.
struct Work<'a> {
    root: &'a Root,
    switch: Steering<'a>,
    pool: Steering<'a>,
    /// The persistent pages that the pool had.
    has: Pages,
    terminal: Terminal,
    stopped: bool,
}

impl Work<'_> {
    fn cost(&mut self, hvo: bool) -> anyhow::Result<Cost> {
        let to = u64::from(hvo);
        let written = self.switch.set(&Knob::hvo(), to, &mut self.terminal);
        self.stopped |= written.map_err(refused)?.stopped;
        let before = metadata(self.root);
        let grow = self.resize(PAGES)?;
        let after = metadata(self.root);
        let shrink = self.resize(Pages(0))?;
        let mut single = Duration::ZERO;
        for pages in 1..=SINGLE {
            single += self.resize(Pages(pages))?;
        }
        self.resize(Pages(0))?;
        let fall = |(before, after): (Bytes, Bytes)| Bytes(before.0.saturating_sub(after.0));
        Ok(Cost {
            hvo,
            pages: PAGES,
            grow,
            shrink,
            single: single / u32::try_from(SINGLE)?,
            saved: before.zip(after).map(fall),
        })
    }

    /// So many more pages than the pool had, and how long the kernel worked on it.
    fn resize(&mut self, more: Pages) -> anyhow::Result<Duration> {
        let to = Pages(self.has.0 + more.0);
        if self.stopped {
            bail!("interrupted");
        }
        let knob = Knob::persistent(SIZE, None);
        let written = self
            .pool
            .set(&knob, to, &mut self.terminal)
            .map_err(refused)?;
        self.stopped |= written.stopped;
        if written.step.missing() > 0 && !self.stopped {
            bail!(
                "the pool of {SIZE} pages did not get {more} more pages: there is nothing to measure"
            );
        }
        Ok(written.took)
    }
}

fn metadata(root: &Root) -> Option<Bytes> {
    let (events, memory) = (Events::read(root).ok()?, Memory::read(root).ok()?);
    let metadata = events.metadata(&memory, kernel::base_page(root));
    metadata.counted.then_some(metadata.bytes)
}

pub(super) fn show(view: &mut View, costs: &[Cost]) -> io::Result<()> {
    view.heading(&format!(
        "What it costs here, on {PAGES} more {SIZE} pages, which are gone again"
    ))?;
    let row = |cost: &Cost| {
        [
            (if cost.hvo { "on" } else { "off" }).to_owned(),
            duration(cost.grow),
            duration(cost.shrink),
            duration(cost.single),
            bytes(cost.saved),
        ]
    };
    view.table(
        "<HVO|>MADE AT ONCE|>GIVEN BACK AT ONCE|>ONE MADE|>SAVED",
        costs.iter().map(row),
    )
}
