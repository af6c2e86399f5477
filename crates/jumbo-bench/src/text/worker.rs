//! The program with much text, from inside: [`text`].

use std::mem::transmute;
use std::ptr::with_exposed_provenance;
use std::time::Instant;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::smaps::{Mapping, Smaps};

use super::program::FUNCTION_BYTES;
use crate::Error;
use crate::figures::{Figures, figures, ms, with};
use crate::memory::{base_pages_only, own_usage, preload_figure};
use crate::task::TextTask;

struct Functions {
    first: *const u8,
    count: u64,
}

/// Weyl constant, 2^64 / golden ratio: the upper halves of its multiples have no pattern.
const WEYL: u64 = 0x9e37_79b9_7f4a_7c15;

/// [`Task::Text`](crate::task::Task::Text): times and faults of the calls, page types.
pub(crate) fn text(what: &TextTask) -> Result<Figures, Error> {
    let faults = || own_usage().map(|usage| (usage.ru_minflt + usage.ru_majflt) as f64);
    if what.base {
        base_pages_only()?;
    }
    let functions = Functions::find(what)?;

    let before = faults()?;
    let in_page = rustix::param::page_size() as u64 / FUNCTION_BYTES;
    let pages = functions.count / in_page;
    // An irregular place in the page: a regular one would share a few cache sets.
    let of_page = |page: u64| page * in_page + (page.wrapping_mul(WEYL) >> 32) % in_page;
    let mut wrong = (0..pages).fold(0, |wrong, page| wrong | functions.call(of_page(page)));
    let touch_faults = faults()? - before;

    let clock = Instant::now();
    let mut random = 1u64;
    for _ in 0..what.calls {
        // Knuth's MMIX generator; its upper half is random enough.
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let below = |count: u64| ((random >> 32) * count) >> 32;
        wrong |= functions.call(of_page(below(pages)));
    }
    let called = clock.elapsed();
    if wrong != 0 {
        return Err(Error::Corrupt(
            "a function returned a wrong number".to_owned(),
        ));
    }

    Ok(with(
        mapped_as(&functions)?,
        [
            ("touch_faults", touch_faults),
            ("calls_ms", ms(called)),
            ("faults", faults()?),
        ],
    ))
}

fn mapped_as(functions: &Functions) -> Result<Figures, Error> {
    let address = functions.first.addr() as u64;
    let smaps = Smaps::read(&Root::host(), std::process::id())?;
    let mut mappings = smaps.mappings();
    let text = mappings.find(|mapping| (mapping.start..mapping.end).contains(&address));
    let text = text.unwrap_or_default();
    Ok(figures([
        ("text_resident_bytes", text.rss.0 as f64),
        ("text_huge_bytes", text.pmd_mapped().0 as f64),
        ("text_file_huge_bytes", text.file_pmd_mapped.0 as f64),
        ("text_shared_huge_bytes", text.shmem_pmd_mapped.0 as f64),
        preload_figure()?,
    ]))
}

/// Reports whether this is the mapping of `size` bytes of generated text.
pub(super) fn is_text(mapping: &Mapping<'_>, size: Bytes) -> bool {
    mapping.execute && mapping.end - mapping.start == size.0
}

impl Functions {
    fn find(what: &TextTask) -> Result<Self, Error> {
        let maps = Smaps::read_maps(&Root::host(), std::process::id())?;
        let text = maps.mappings().find(|mapping| is_text(mapping, what.size));
        let text =
            text.ok_or_else(|| Error::Corrupt("the program lacks its generated text".to_owned()))?;
        let start = usize::try_from(text.start).unwrap_or(usize::MAX);
        Ok(Self {
            first: with_exposed_provenance(start),
            count: what.touched.0.min(what.size.0) / FUNCTION_BYTES,
        })
    }

    /// Calls a function; returns 0 if its result is right.
    #[inline(always)]
    fn call(&self, number: u64) -> u64 {
        debug_assert!(number < self.count);
        let address = self
            .first
            .wrapping_add(usize::try_from(number * FUNCTION_BYTES).unwrap_or(0));
        // SAFETY: the program was built with such functions in the whole mapping that `find` found,
        // and no caller passes a number beyond it.
        let function = unsafe { transmute::<*const u8, extern "C" fn() -> u32>(address) };
        u64::from(function()) ^ number
    }
}
