//! `hugeadm`: `jumbo pool`, `jumbo thp` and `jumbo doctor`, and three lists in hugeadm's format.

use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::{Context as _, bail};
use jumbo::units::{Bytes, PageSize, Pages};
use jumbo_host::kernel::{Root, hugetlb};

use super::{Refusals, Words, words};
use crate::view::Stdout;

/// Show and set the kernel's pools of huge pages: jumbo pool and jumbo thp, by hugeadm's options
#[derive(Debug, clap::Parser)]
#[command(name = "hugeadm", arg_required_else_help = true)]
#[command(
    after_help = "See docs/libhugetlbfs.md for each option. `jumbo pool --undo` reverts a change."
)]
#[expect(clippy::struct_excessive_bools, reason = "the options of hugeadm")]
pub(super) struct Args {
    /// List the mounts of hugetlbfs
    #[arg(long)]
    list_all_mounts: bool,
    /// List the pools
    #[arg(long)]
    pool_list: bool,
    /// List the page sizes whose pool has pages
    #[arg(long)]
    page_sizes: bool,
    /// List all sizes of huge pages
    #[arg(long)]
    page_sizes_all: bool,
    /// Show what keeps memory off huge pages
    #[arg(long)]
    explain: bool,
    /// Set or change the number of persistent pages
    #[arg(long, value_name = "SIZE|DEFAULT:[+|-]PAGES|MEMORY")]
    pool_pages_min: Vec<String>,
    /// Set or change the number of pages with surplus ones
    #[arg(long, value_name = "SIZE|DEFAULT:[+|-]PAGES|MEMORY")]
    pool_pages_max: Vec<String>,
    /// Have the kernel compact memory first
    #[arg(long)]
    hard: bool,
    /// Use THPs always
    #[arg(long, group = "thp")]
    thp_always: bool,
    /// Use THPs where programs ask for them
    #[arg(long, group = "thp")]
    thp_madvise: bool,
    /// Use no THPs
    #[arg(long, group = "thp")]
    thp_never: bool,
    /// Print the plan and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Accepted: a plan is always printed
    #[arg(long, value_name = "LEVEL")]
    verbose: Option<u8>,
    /// Accepted
    #[arg(short, action = clap::ArgAction::Count)]
    v: u8,
}

const KHUGEPAGED: &str = "jumbo collapses memory itself, and does not set khugepaged\nhint: /sys/kernel/mm/transparent_hugepage/khugepaged";
const SWAP: &str = "--hard has the kernel compact memory first, without swap";
const MOUNTS: &str = "no mount is needed: programs have memfds, and get_huge_pages too\nhint: `mount -t hugetlbfs -o pagesize=2M none FOLDER`";
const ZONE: &str = "Linux 4.16 removed vm.hugepages_treat_as_movable";

/// The options without a counterpart, with the reasons.
pub(super) const REFUSED: Refusals = &[
    (
        "obey-mempolicy",
        "a node is named\nhint: `jumbo pool set --node N`",
    ),
    ("thp-khugepaged-pages=PAGES", KHUGEPAGED),
    ("thp-khugepaged-scan-sleep=MILLISECONDS", KHUGEPAGED),
    ("thp-khugepaged-alloc-sleep=MILLISECONDS", KHUGEPAGED),
    (
        "set-recommended-min_free_kbytes",
        "khugepaged sets it when it starts",
    ),
    ("set-recommended-shmmax", "it is unlimited since Linux 3.16"),
    (
        "set-shm-group=GROUP",
        "memfds need no group; only SHM_HUGETLB does\nhint: `sysctl vm.hugetlb_shm_group=GID`",
    ),
    ("add-temp-swap", SWAP),
    ("add-ramdisk-swap", SWAP),
    ("persist", SWAP),
    ("enable-zone-movable", ZONE),
    ("disable-zone-movable", ZONE),
    ("create-mounts", MOUNTS),
    ("create-user-mounts=USER", MOUNTS),
    ("create-group-mounts=GROUP", MOUNTS),
    ("create-global-mounts", MOUNTS),
    ("max-size=SIZE", MOUNTS),
    ("max-inodes=NUMBER", MOUNTS),
];

/// The wanted pages of a pool: persistent ones, and with surplus ones.
#[derive(Clone, Copy, Debug)]
struct Wish {
    min: u64,
    max: u64,
    is_min: bool,
}

impl Args {
    pub(super) fn commands(&self) -> anyhow::Result<Vec<Words>> {
        let root = Root::host();
        let mut commands = self.pools(&root)?;
        let thp = [
            (self.thp_always, "enabled=always"),
            (self.thp_madvise, "enabled=madvise"),
            (self.thp_never, "enabled=never"),
        ];
        commands.extend(
            thp.iter()
                .filter(|(given, _)| *given)
                .map(|(_, knob)| words(["thp", "set", knob])),
        );
        if self.dry_run {
            commands
                .iter_mut()
                .for_each(|command| command.push("--dry-run".into()));
        }
        if self.explain {
            commands.push(words(["doctor"]));
        }
        self.print(&root)?;
        Ok(commands)
    }

    fn print(&self, root: &Root) -> anyhow::Result<()> {
        let mut out = Stdout::lock();
        let pools = hugetlb::pools(root)?.unwrap_or_default();
        if self.list_all_mounts {
            writeln!(out, "{:<20} Options", "Mount Point")?;
            for mount in hugetlb::mounts(root)? {
                let option = |(name, value): (&String, &Option<String>)| match value {
                    Some(value) => format!("{name}={value}"),
                    None => name.clone(),
                };
                let options: Vec<_> = mount.options.iter().map(option).collect();
                writeln!(out, "{:<20} {}", mount.path, options.join(","))?;
            }
        }
        if self.pool_list {
            let default = hugetlb::default_size(root)?;
            writeln!(
                out,
                "{:>10} {:>8} {:>8} {:>8} {:>8}",
                "Size", "Minimum", "Current", "Maximum", "Default"
            )?;
            for pool in &pools {
                let (min, mark) = (
                    pool.persistent().0,
                    if default == Some(pool.size) { "*" } else { "" },
                );
                let (size, max) = (pool.size.bytes(), min.saturating_add(pool.overcommit.0));
                writeln!(
                    out,
                    "{size:>10} {min:>8} {:>8} {max:>8} {mark:>8}",
                    pool.total.0
                )?;
            }
        }
        for pool in &pools {
            if self.page_sizes_all || self.page_sizes && (pool.total.0 > 0 || pool.overcommit.0 > 0)
            {
                writeln!(out, "{}", pool.size.bytes())?;
            }
        }
        Ok(out.flush()?)
    }

    /// Returns one command for each pool that is to change.
    fn pools(&self, root: &Root) -> anyhow::Result<Vec<Words>> {
        let mut wishes: BTreeMap<PageSize, Wish> = BTreeMap::new();
        let all = [(&self.pool_pages_min, true), (&self.pool_pages_max, false)];
        for (text, is_min) in all
            .iter()
            .flat_map(|(texts, is_min)| texts.iter().map(move |text| (text, *is_min)))
        {
            let (size, amount) = text
                .split_once(':')
                .with_context(|| format!("`{text}`: expected SIZE:PAGES"))?;
            let pool = pool(root, size)?;
            let wish = wishes.entry(pool.size).or_insert(Wish {
                min: pool.persistent().0,
                max: pool.persistent().0.saturating_add(pool.overcommit.0),
                is_min: false,
            });
            if is_min {
                let before = wish.min;
                wish.min = changed(before, amount, pool.size)?;
                wish.is_min = true;
                // As hugeadm: the maximum is at least the minimum.
                wish.max = wish.max.max(wish.min);
            } else {
                wish.max = changed(wish.max, amount, pool.size)?;
                if wish.max < wish.min {
                    bail!(
                        "`{text}`: the pool keeps {} pages\nhint: lower --pool-pages-min too",
                        Pages(wish.min)
                    );
                }
            }
        }
        let hard = self.hard && !wishes.is_empty();
        if self.hard && !hard {
            bail!("--hard without --pool-pages-min has no effect");
        }
        let command = |(size, wish): (PageSize, Wish)| {
            let mut command = words(["pool", "set", &size.to_string()]);
            if wish.is_min {
                command.extend(words(["--persistent", &wish.min.to_string()]));
            }
            command.extend(words(["--overcommit", &(wish.max - wish.min).to_string()]));
            command.extend(hard.then(|| "--compact".into()));
            command
        };
        Ok(wishes.into_iter().map(command).collect())
    }
}

fn pool(root: &Root, size: &str) -> anyhow::Result<hugetlb::Pool> {
    let size = match size {
        "DEFAULT" => {
            hugetlb::default_size(root)?.context("this kernel has no pool of huge pages")?
        }
        size => size.parse().with_context(|| format!("`{size}`"))?,
    };
    let pools = hugetlb::pools(root)?.unwrap_or_default();
    let pool = pools.into_iter().find(|pool| pool.size == size);
    pool.with_context(|| {
        format!("this kernel has no pool of {size} pages\nhint: hugeadm --page-sizes-all")
    })
}

/// Applies an amount, `N`, `+N` or `-N`, of pages or of memory with a unit.
fn changed(before: u64, amount: &str, size: PageSize) -> anyhow::Result<u64> {
    let number = amount.trim_start_matches(['+', '-']);
    if amount.len() > number.len() + 1 {
        bail!("`{amount}`: expected a number, with + or - if need be");
    }
    let pages = match number.parse::<u64>() {
        Ok(pages) => pages,
        // hugeadm rounds memory up.
        Err(_) => {
            let memory: Bytes = number.parse().with_context(|| format!("`{amount}`"))?;
            memory.0.div_ceil(size.bytes())
        }
    };
    let after = match amount.chars().next() {
        Some('+') => before.checked_add(pages),
        Some('-') => Some(before.saturating_sub(pages)),
        _ => Some(pages),
    };
    after.with_context(|| format!("`{amount}` is more than any machine has"))
}

#[cfg(test)]
mod tests {
    use super::super::tests::translated;
    use super::*;

    #[test]
    fn amounts_are_pages_or_memory() {
        let change = |amount: &str| changed(10, amount, PageSize::SIZE_2M).map_err(|_| ());
        for (amount, after) in [
            ("5", Ok(5)),
            ("+5", Ok(15)),
            ("-5", Ok(5)),
            ("-20", Ok(0)),
            ("+1G", Ok(522)),
            ("3M", Ok(2)),
            ("+-5", Err(())),
            ("", Err(())),
            ("x", Err(())),
            ("+18446744073709551615", Err(())),
        ] {
            assert_eq!(change(amount), after, "{amount}");
        }
    }

    #[test]
    fn pools_that_do_not_exist_and_options_without_a_counterpart_are_refused() {
        for (line, why) in [
            ("hugeadm --pool-pages-min 3M:1", "`3M`"),
            ("hugeadm --pool-pages-min 4K:1", "no pool of 4K"),
            ("hugeadm --pool-pages-min 5", "expected SIZE:PAGES"),
            ("hugeadm --create-mounts", "--create-mounts is refused"),
            ("hugeadm --add-temp-swap", "--add-temp-swap is refused"),
            ("hugeadm --hard", "no effect"),
            ("hugeadm --thp-always --thp-never", "cannot be used with"),
        ] {
            let error = translated(line, REFUSED, Args::commands).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
