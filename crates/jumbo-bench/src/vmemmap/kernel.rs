//! The kernel's pool, grown and shrunk with HVO off and on: [`KernelPool`].
//!
//! Off is the baseline: HVO costs time. It saves as much as the kernel's two counters of page
//! metadata fall.

use jumbo::units::{Bytes, PageSize, Pages};
use jumbo_host::kernel::Root;
use jumbo_host::kernel::memory::{Events, Memory};
use jumbo_host::knobs::Knob;

use crate::claim::{self, Claim};
use crate::figures::{Figures, figures};
use crate::keeper::{Keeper, KernelKnobs, Needs, PAGE_2M};
use crate::launch::Launch;
use crate::task::KnobSet;
use crate::{Error, Settings};

/// Base pages of descriptors that the kernel frees, of eight per 2 MiB page.
const FREED_PER_HUGE_PAGE: u64 = 7;

const SAVED: &str = "metadata_saved_pages";

/// The kernel's pool of 2 MiB pages and its switch of HVO.
pub(super) struct KernelPool {
    pub(super) kernel: KernelKnobs,
    pages: Pages,
}

impl KernelPool {
    /// Takes the knobs, if the pool can grow by up to `max` pages.
    pub(super) fn take(settings: &Settings, max: Pages) -> Result<Self, Error> {
        let available = Memory::read(&Root::host())?.available;
        let pages = Pages(max.0.min(available.whole_pages(PAGE_2M).0 / 3));
        if metadata()?.is_none() {
            let why = "the kernel does not count its page metadata (before Linux 6.12)";
            return Err(Error::Kernel("HVO", why.to_owned()));
        }
        let knobs = Some(Keeper::take(settings, KnobSet::Hvo)?);
        let pool = Some(Keeper::of_pool(settings, pages)?);
        let kernel = KernelKnobs { pool, knobs };
        kernel.provide(&Needs::default())?;
        Ok(Self { kernel, pages })
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.pages.bytes(PAGE_2M)
    }

    /// Grows and shrinks the pool.
    pub(super) fn sample(&self, on: bool) -> Result<Figures, Error> {
        let resize = |pages| {
            self.kernel.provide(&Needs {
                knobs: vec![(Knob::hvo(), u64::from(on).into())],
                ..Needs::persistent(pages)
            })
        };
        resize(Pages(0))?;
        let before = metadata()?.unwrap_or_default();
        let grow = resize(self.pages)?;
        let saved = before.saturating_sub(metadata()?.unwrap_or_default());
        let shrink = resize(Pages(0))?;
        let of_8 = saved as f64 / self.pages.0.max(1) as f64;
        let figures = figures([
            ("grow_ms", grow),
            ("shrink_ms", shrink),
            ("saved_of_8_pages", of_8),
            (SAVED, saved as f64),
            ("preload_libraries", 0.0),
        ]);
        claim::check(&[self.claim(on)], &Launch::Plain, &figures)?;
        Ok(figures)
    }

    /// Claims that HVO has the state of the side: nearly all of its savings, or nearly none.
    fn claim(&self, on: bool) -> Claim {
        let freed = self.pages.0 * FREED_PER_HUGE_PAGE;
        let range = match on {
            true => freed / 100 * claim::MIN_PERCENT..=u64::MAX,
            false => 0..=freed / 20,
        };
        claim::within(SAVED, range)
    }
}

/// Size of the kernel's page metadata, in base pages; `None` if it is not counted.
fn metadata() -> Result<Option<u64>, Error> {
    let (root, base) = (Root::host(), PageSize::SIZE_4K);
    let metadata = Events::read(&root)?.metadata(&Memory::read(&root)?, base);
    let pages = metadata.bytes.whole_pages(base).0;
    Ok(metadata.counted.then_some(pages))
}
