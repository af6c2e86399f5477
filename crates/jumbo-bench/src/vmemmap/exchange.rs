//! Pages of a pool, taken and given back: with descriptions of its pages, and without
//! ([`TAKE_GIVE`]).

use std::time::Duration;

use jumbo::pool::{Placement, Pool, Thp};
use jumbo::units::{Order, Pages};
use jumbo_host::kernel::Root;

use crate::Error;
use crate::figures::{Figures, with};
use crate::memory::had;
use crate::stats::least;
use crate::work::{Work, by_threads};

/// How many pages the pool has.
pub(super) const PAGES: Pages = Pages(16);

/// The number and the length of the spans in which pages are taken and given; the quickest counts,
/// because whatever disturbs makes it slower.
const TIMES: usize = 20;
const SPAN: Duration = Duration::from_millis(5);

/// How many between two looks at the clock.
const BATCH: u64 = 256;

/// Whether a page can be had in folios.
pub(super) const FOLIOS: &str = "folios_of_a_page";

/// Pages of a pool taken and given back by one thread; the pool describes them where that is set.
pub(crate) const TAKE_GIVE: Work<bool> = Work::new("take-give", take_give);

fn take_give(is_described: bool) -> Result<Figures, Error> {
    let root = Root::host();
    let (thp, placement) = (Thp::at(&root)?, Placement::of_thread()?);
    let pool = match is_described {
        true => Pool::new(thp, placement),
        false => Pool::without_folios(thp, placement),
    };
    if let Some(error) = pool.resize(PAGES).stopped {
        return Err(error.into());
    }
    let spans = (0..TIMES).map(|_| {
        by_threads(1, (SPAN, BATCH), || {
            pool.take()?.bytes_mut()[0] = 1;
            Ok(())
        })
    });
    let spans = spans.collect::<Result<Vec<_>, _>>()?;
    let folio = pool.take_folio(Order(0));
    let folios = folio.map_or(0, |_| pool.split().pages.0);
    let figures = [("page_ns", least(&spans)), (FOLIOS, folios as f64)];
    Ok(with(had(&root)?, figures))
}
