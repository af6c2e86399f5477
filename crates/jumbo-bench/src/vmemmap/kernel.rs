//! The kernel's own pool, grown and shrunk with HVO off and on: [`OfKernel`].
//!
//! Off is the baseline: HVO costs time. What it saves is what the kernel's two counters of page metadata fall by.

use jumbo::units::{Bytes, PageSize, Pages};
use jumbo_host::kernel::Root;
use jumbo_host::kernel::memory::{Events, Memory};
use jumbo_host::knobs::Knob;

use crate::claim::{self, Claim};
use crate::figures::{Figures, figures};
use crate::keeper::{Keeper, Kernel, Needs, SIZE};
use crate::launch::Launch;
use crate::stats::quantile;
use crate::task::Kept;
use crate::{Error, Settings};

/// Of the eight base pages of descriptors of a 2 MiB page the kernel frees so many.
const FREED: u64 = 7;

/// How many pages come and go one by one.
const SINGLE: u64 = 32;

/// The fall of the metadata counters, in base pages.
const SAVED: &str = "metadata_saved_pages";

/// The kernel, its pool of 2 MiB pages and the switch of HVO.
pub(super) struct OfKernel {
    kernel: Kernel,
    pages: Pages,
}

impl OfKernel {
    /// Takes them, if the pool can have up to `most` pages more; [`Error::Kernel`] says why not.
    pub(super) fn take(settings: &Settings, most: Pages) -> Result<Self, Error> {
        let root = Root::host();
        let available = Memory::read(&root)?.available;
        let pages = Pages(most.0.min(available.whole_pages(SIZE).0 / 3));
        if metadata(&root)?.is_none() {
            let why = "the kernel does not count its page metadata (before Linux 6.12)";
            return Err(Error::Kernel("HVO", why.to_owned()));
        }
        let knobs = Some(Keeper::take(settings, Kept::Hvo)?);
        let pool = Some(Keeper::of_pool(settings, pages)?);
        let kernel = Kernel { pool, knobs };
        kernel.provide(&Needs::default())?;
        Ok(Self { kernel, pages })
    }

    /// The memory of a sample.
    pub(super) fn bytes(&self) -> Bytes {
        self.pages.bytes(SIZE)
    }

    /// The pool grown and shrunk at once, and then page by page.
    pub(super) fn sample(&self, on: bool) -> Result<Figures, Error> {
        let root = Root::host();
        let resize = |pages| {
            self.kernel.provide(&Needs {
                knobs: vec![(Knob::hvo(), u64::from(on).into())],
                ..Needs::persistent(pages)
            })
        };
        resize(Pages(0))?;
        let before = metadata(&root)?.unwrap_or_default();
        let grow = resize(self.pages)?;
        let saved = before.saturating_sub(metadata(&root)?.unwrap_or_default());
        let shrink = resize(Pages(0))?;
        let singly = |to: &mut dyn Iterator<Item = u64>| {
            let times = to.map(|pages| Ok(resize(Pages(pages))? * 1e3));
            times.collect::<Result<Vec<_>, Error>>()
        };
        let grows = singly(&mut (1..=SINGLE))?;
        let shrinks = singly(&mut (0..SINGLE).rev())?;
        let of_8 = saved as f64 / self.pages.0.max(1) as f64;
        let figures = figures([
            ("grow_ms", grow),
            ("shrink_ms", shrink),
            ("grow_p50_us", quantile(&grows, 0.5)),
            ("grow_p99_us", quantile(&grows, 0.99)),
            ("shrink_p50_us", quantile(&shrinks, 0.5)),
            ("shrink_p99_us", quantile(&shrinks, 0.99)),
            ("saved_of_8_pages", of_8),
            (SAVED, saved as f64),
            ("preload_libraries", 0.0),
        ]);
        claim::check(&[self.claim(on)], &Launch::Plain, &figures)?;
        Ok(figures)
    }

    /// The claim that HVO is what the side's name says: all but a few of what it frees, or next to
    /// nothing.
    fn claim(&self, on: bool) -> Claim {
        let freed = self.pages.0 * FREED;
        let range = match on {
            true => freed / 100 * claim::MOST..=u64::MAX,
            false => 0..=freed / 20,
        };
        claim::within(SAVED, range)
    }

    /// Has both put back.
    pub(super) fn give_back(self) -> Result<(), Error> {
        self.kernel.give_back()
    }
}

/// The size of the kernel's page metadata, in base pages; `None` where it does not count that.
fn metadata(root: &Root) -> Result<Option<u64>, Error> {
    let base = PageSize::SIZE_4K;
    let metadata = Events::read(root)?.metadata(&Memory::read(root)?, base);
    let pages = metadata.bytes.whole_pages(base).0;
    Ok(metadata.counted.then_some(pages))
}
