//! `jumbo pool wait`.

use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use jumbo::units::{PageSize, Pages, counted};
use jumbo_host::host_pools::{Holder, Holders};
use jumbo_host::kernel::Root;
use jumbo_host::kernel::hugetlb::Pool;

use super::amount::Amount;
use crate::value::seconds;
use crate::view::{self, tell};

/// Wait until pages of a pool are free
///
/// The pages of a VM or database may be freed long after its exit. Pages count as free if no
/// program maps or has reserved them. Exit status: 0 they are free, 124 timeout.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The page size: 2M, 1G
    #[arg(value_name = "SIZE")]
    size: PageSize,

    /// Number of pages, or size of memory
    #[arg(value_name = "PAGES|BYTES", allow_negative_numbers = true)]
    pages: Amount,

    /// Timeout in seconds; 0 checks once
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_hyphen_values = true, default_value = "60")]
    timeout: Duration,
}

/// Exit status after a timeout, as of timeout(1).
pub(crate) const EXIT_TIMED_OUT: u8 = 124;

/// First interval between polls. The kernel reports no freed page; a poll takes microseconds.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(5);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(200);

pub(super) fn main(root: &Root, args: &Args, json: bool) -> anyhow::Result<ExitCode> {
    let (size, begin) = (args.size, Instant::now());
    let wanted = args.pages.pages(size);
    let pool = super::pool(root, size)?;
    if pool.total < wanted {
        tell(&format!(
            "the pool has {} of {size}: for {wanted} to be free it must grow",
            counted(pool.total.0, "page")
        ));
    }
    let (pool, free) = wait(root, args, wanted, begin, pool)?;
    if json {
        view::json(&serde_json::json!({
            "size": size,
            "wanted": wanted,
            "unused": pool.unused(),
            "seconds": begin.elapsed().as_secs_f64(),
            "free": free,
        }))?;
    }
    if free {
        return Ok(ExitCode::SUCCESS);
    }
    tell(&format!(
        "{} of {wanted} {size} pages are free after {:.1} s: the pool has {}, {} in use and {} reserved{}",
        pool.unused(),
        begin.elapsed().as_secs_f64(),
        pool.total,
        pool.used(),
        pool.reserved,
        holders(root, &pool),
    ));
    Ok(ExitCode::from(EXIT_TIMED_OUT))
}

fn wait(
    root: &Root,
    args: &Args,
    wanted: Pages,
    begin: Instant,
    mut pool: Pool,
) -> anyhow::Result<(Pool, bool)> {
    let mut pause = MIN_POLL_INTERVAL;
    loop {
        if pool.unused() >= wanted {
            return Ok((pool, true));
        }
        let left = args.timeout.saturating_sub(begin.elapsed());
        if left.is_zero() {
            return Ok((pool, false));
        }
        sleep(pause.min(left));
        pause = (pause * 2).min(MAX_POLL_INTERVAL);
        pool = super::pool(root, args.size)?;
    }
}

fn holders(root: &Root, pool: &Pool) -> String {
    let all = Holders::read(root, std::slice::from_ref(pool)).unwrap_or_default();
    let named: Vec<_> = all.of(pool.size).take(3).map(describe).collect();
    if named.is_empty() {
        String::new()
    } else {
        format!("; {}", named.join(", "))
    }
}

/// Name, PID and memory of a holder.
fn describe(holder: &Holder) -> String {
    let name = holder.name.replace(char::is_control, "\u{fffd}");
    let all = holder.resident() + holder.untouched;
    format!("{name} ({}) {all}", holder.pid)
}
