//! `jumbo pool watch`.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use jumbo::units::PageSize;
use jumbo_host::host_pools::{Holder, Holders};
use jumbo_host::kernel::Root;
use jumbo_host::kernel::hugetlb::Pool;
use serde::Serialize;

use super::show::PoolRow;
use crate::value::{interval, whole};
use crate::view::{self, Stdout};

/// Show a pool's use over time, and who has the pages
///
/// One line a sample, with the largest holders. Ends by Ctrl-C, or after --count samples.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The page size: 2M, 1G
    #[arg(value_name = "SIZE")]
    size: PageSize,

    /// Seconds between two samples
    #[arg(long, value_name = "SECONDS", value_parser = interval, allow_hyphen_values = true, default_value = "1")]
    interval: Duration,

    /// Number of samples
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    count: Option<u64>,
}

/// Sample of a pool, for JSON.
#[derive(Serialize)]
struct PoolSample {
    seconds: f64,
    #[serde(flatten)]
    page: PoolRow,
    holders: Vec<Holder>,
}

/// Maximum number of holders in a sample; the largest.
const MAX_HOLDERS: usize = 3;

/// Number of samples between two headings.
const LINES_PER_HEADING: u64 = 20;

pub(super) fn main(root: &Root, args: &Args, json: bool) -> anyhow::Result<ExitCode> {
    let begin = Instant::now();
    let mut before: Option<Pool> = None;
    let mut next = begin;
    for index in 0..args.count.unwrap_or(u64::MAX) {
        // An absolute schedule: the duration of a sample does not add up.
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        next += args.interval;
        let pool = super::pool(root, args.size)?;
        let sample = PoolSample::new(root, &pool, begin.elapsed());
        if json {
            view::json_line(&sample)?;
        } else {
            let mut out = Stdout::lock();
            if index % LINES_PER_HEADING == 0 {
                let titles = TITLES
                    .map(|title| format!("{title:>COLUMN_WIDTH$}"))
                    .concat();
                writeln!(out, "{titles}  HOLDERS")?;
            }
            writeln!(out, "{}", sample.line(before.as_ref()))?;
            out.flush()?;
        }
        before = Some(pool);
    }
    Ok(ExitCode::SUCCESS)
}

/// Width of a column: the longest title and a blank.
const COLUMN_WIDTH: usize = 11;

const TITLES: [&str; 7] = [
    "SECONDS",
    "PERSISTENT",
    "SURPLUS",
    "USED",
    "RESERVED",
    "FREE",
    "CHANGE",
];

impl PoolSample {
    fn new(root: &Root, pool: &Pool, at: Duration) -> Self {
        // Unreadable holders do not stop the samples of the pool.
        let all = Holders::read(root, std::slice::from_ref(pool)).unwrap_or_default();
        let known = |holder: &&Holder| holder.size.is_none_or(|size| size == pool.size);
        let holders = all
            .processes
            .iter()
            .filter(known)
            .take(MAX_HOLDERS)
            .cloned()
            .collect();
        Self {
            seconds: at.as_secs_f64(),
            page: pool.clone().into(),
            holders,
        }
    }

    fn line(&self, before: Option<&Pool>) -> String {
        let page = &self.page;
        let pool = &page.pool;
        let demand = |pool: &Pool| i128::from(pool.used().0 + pool.reserved.0);
        let change = before.map_or(0, |before| demand(pool) - demand(before));
        let change = if change == 0 {
            String::new()
        } else {
            format!("{change:+}")
        };
        let cells = [
            format!("{:.1}", self.seconds),
            page.persistent.to_string(),
            pool.surplus.to_string(),
            page.used.to_string(),
            pool.reserved.to_string(),
            pool.free.to_string(),
            change,
        ];
        let holders: Vec<_> = self.holders.iter().map(super::describe).collect();
        let cells = cells.map(|cell| format!("{cell:>COLUMN_WIDTH$}")).concat();
        format!("{cells}  {}", holders.join(", "))
            .trim_end()
            .to_owned()
    }
}
