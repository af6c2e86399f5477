//! [`Orders`]: what the launcher tells the preload library, in one environment variable.
//!
//! The text is `key=value` pairs with commas between them. It is written by the launcher with
//! its [`fmt::Display`] and read inside the program with [`Orders::decode`], which allocates nothing. `jumbo::policy` makes
//! them of its plan; `heap`, `reaper` and the constructor of the preload library obey them.
//!
//! Invariant: what is encoded is decoded to the same orders.

use core::fmt;
use core::ops::Range;

use serde::{Deserialize, Serialize};

use crate::units::Bytes;

/// The most a pool can be, its overcommit included: what the addresses set aside for it have room for.
pub const MAX_POOL: Bytes = Bytes(256 << 30);

/// What the preload library is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orders<'a> {
    /// Who serves `malloc`, and on what (`--heap`).
    pub heap: HeapMode,
    /// Pages set aside for the heap (`--pool`).
    pub pool: Option<PoolOrder>,
    /// Anonymous mappings are advised and packed (`--maps`).
    pub maps: bool,
    /// How much of the memory may be beyond what was asked for, in percent (`--max-waste`).
    pub max_waste: u32,
    /// Children are covered too (`--follow`); otherwise the library takes itself out of the environment.
    pub follow: bool,
    /// The launcher added `glibc.malloc.hugetlb=1` to GLIBC_TUNABLES (so it is to be taken out again
    /// where children are not covered).
    pub tunable: bool,
    /// How large frees are done (`--free`).
    pub free: FreeMode,
    /// How many threads may free at once, the caller among them (`--free-workers`); 0: as many as the
    /// process has CPUs, at most 4.
    pub free_workers: u32,
    /// From which size on a free is large, in bytes, where it is not the usual one. Not on the command
    /// line: for tests.
    pub free_least: Option<usize>,
    /// Memory comes in base pages here, whatever is advised (the host's THP `enabled` is `never`): so a smaller free
    /// is worth a look.
    pub small_pages: bool,
    /// Whether a sibling gives the memory back after the program's end (`--reaper`).
    pub reaper: ReaperMode,
    /// Orphans below the program go to a subreaper: see [`Self::ORPHANS`].
    pub orphans_are_taken: bool,
    /// How many seccomp filters the program inherits, if the launcher found that giving memory back is
    /// harmless under them.
    pub filters: u32,
    /// How many the launcher itself runs under, tried out or not: a program that it started lives with our advice under
    /// these as well as without, as far as is known. What comes later is another matter.
    pub launched_under: u32,
    /// The PMD size in bytes, so that the program need not open files in /sys to learn it.
    pub pmd: usize,
    /// Where the ledger is mapped from, if the launcher wants one.
    pub ledger: Option<&'a str>,
}

impl Default for Orders<'_> {
    fn default() -> Self {
        Self {
            heap: HeapMode::On,
            pool: None,
            maps: true,
            max_waste: 5,
            follow: true,
            tunable: false,
            free: FreeMode::Sync,
            free_workers: 0,
            free_least: None,
            small_pages: false,
            reaper: ReaperMode::Auto,
            orphans_are_taken: false,
            filters: 0,
            launched_under: 0,
            pmd: 2 << 20,
            ledger: None,
        }
    }
}

/// The key of [`Orders::launched_under`].
const LAUNCHED_UNDER: &str = "launched_under";

/// The most threads that can be asked for with `--free-workers`.
pub const MAX_FREE_WORKERS: u32 = 64;

/// Who serves `malloc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeapMode {
    /// Large allocations come from the window, the rest from glibc, whose heap and arenas are advised.
    #[default]
    On,
    /// The program's allocator, as it is.
    Off,
    /// mimalloc, for the whole program.
    Mimalloc,
}

/// When a large free returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FreeMode {
    /// When all of it is free.
    #[default]
    Sync,
    /// At once; the memory follows.
    Background,
    /// Large frees are the kernel's business, on the caller's thread.
    Off,
}

/// Whether a sibling process gives the memory back when the program has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReaperMode {
    /// Once the program has much memory of its own, and nothing that hangs on it outlives the program.
    #[default]
    Auto,
    /// From the start, whatever hangs on the memory.
    On,
    /// Never.
    Off,
}

impl HeapMode {
    const ALL: [Self; 3] = [Self::On, Self::Off, Self::Mimalloc];

    /// As it stands in the orders.
    const fn code(self) -> &'static str {
        match self {
            Self::On => "1",
            Self::Off => "0",
            Self::Mimalloc => "mimalloc",
        }
    }
}

impl FreeMode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Sync, Self::Background, Self::Off];

    /// As it is typed.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Background => "background",
            Self::Off => "off",
        }
    }
}

impl ReaperMode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Auto, Self::On, Self::Off];

    /// As it is typed.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

impl<'a> Orders<'a> {
    /// The environment variable that carries them.
    pub const VARIABLE: &'static str = "JUMBO_ORDERS";
    /// How it says whether orphans are taken, before a digit that a program changes which takes them.
    pub const ORPHANS: &'static str = ",orphans=";

    /// Where in the text that digit stands.
    pub fn orphans_digit(text: &str) -> Option<usize> {
        let at = text.find(Self::ORPHANS)? + Self::ORPHANS.len();
        text.as_bytes()
            .get(at)
            .is_some_and(u8::is_ascii_digit)
            .then_some(at)
    }

    /// Where in `text` the ten digits of [`Orders::launched_under`] are, to be written over.
    pub fn launched_digits(text: &str) -> Option<Range<usize>> {
        let key = text.find(LAUNCHED_UNDER)?;
        let start = key + LAUNCHED_UNDER.len() + 1;
        let digits = text.get(start..start + 10)?;
        let whole = digits.bytes().all(|byte| byte.is_ascii_digit());
        whole.then_some(start..start + 10)
    }

    /// The orders in `text`. A key that is not known, or a value that does not parse, keeps the default:
    /// a program must run whatever its environment says.
    pub fn decode(text: &'a str) -> Self {
        let mut orders = Self::default();
        for (key, value) in text.split(',').filter_map(|pair| pair.split_once('=')) {
            match key {
                "heap" => {
                    let known = HeapMode::ALL.into_iter().find(|mode| mode.code() == value);
                    orders.heap = known.unwrap_or(orders.heap);
                }
                "pool" => orders.pool = PoolOrder::decode(value),
                "maps" => orders.maps = value != "0",
                "tunable" => orders.tunable = value != "0",
                "follow" => orders.follow = value != "0",
                "max_waste" => orders.max_waste = value.parse().unwrap_or(orders.max_waste),
                "free" => {
                    let known = FreeMode::ALL.into_iter().find(|mode| mode.name() == value);
                    orders.free = known.unwrap_or(orders.free);
                }
                "free_workers" => {
                    orders.free_workers = value.parse().unwrap_or(orders.free_workers);
                }
                "free_least" => {
                    orders.free_least = value.parse().ok().or(orders.free_least);
                }
                "small_pages" => orders.small_pages = value != "0",
                "orphans" => orders.orphans_are_taken = value != "0",
                "filters" => orders.filters = value.parse().unwrap_or(orders.filters),
                LAUNCHED_UNDER => {
                    orders.launched_under = value.parse().unwrap_or(orders.launched_under);
                }
                "reaper" => {
                    let known = ReaperMode::ALL
                        .into_iter()
                        .find(|mode| mode.name() == value);
                    orders.reaper = known.unwrap_or(orders.reaper);
                }
                "pmd" => {
                    orders.pmd = value
                        .parse()
                        .ok()
                        .filter(|pmd: &usize| pmd.is_power_of_two() && *pmd >= 1 << 16)
                        .unwrap_or(orders.pmd);
                }
                "ledger" => orders.ledger = Some(value),
                _ => {}
            }
        }
        orders
    }
}

/// The text for the environment.
impl fmt::Display for Orders<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "heap={},maps={},max_waste={},follow={},tunable={},free={},free_workers={},reaper={}{}{},filters={},pmd={}",
            self.heap.code(),
            u8::from(self.maps),
            self.max_waste,
            u8::from(self.follow),
            u8::from(self.tunable),
            self.free.name(),
            self.free_workers,
            self.reaper.name(),
            Self::ORPHANS,
            u8::from(self.orphans_are_taken),
            self.filters,
            self.pmd
        )?;
        write!(f, ",{LAUNCHED_UNDER}={:010}", self.launched_under)?;
        if self.small_pages {
            f.write_str(",small_pages=1")?;
        }
        if let Some(least) = self.free_least {
            write!(f, ",free_least={least}")?;
        }
        if let Some(pool) = self.pool {
            write!(f, ",pool={pool}")?;
        }
        if let Some(ledger) = self.ledger {
            write!(f, ",ledger={ledger}")?;
        }
        Ok(())
    }
}

/// A pool for the program, in bytes. `size` and `overcommit` are multiples of `page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOrder {
    /// What stays, once it is there.
    pub size: usize,
    /// The size of a page: at least what a PMD maps, and a power of two.
    pub page: usize,
    /// What there may be beyond `size`, and goes back when it is free.
    pub overcommit: usize,
    /// All of `size` is made resident before the program starts: in the process that is launched, whatever
    /// it execs, and not in its children. Which one that is the first to read it writes down: 0 before.
    pub warm: Option<u32>,
    /// Hugetlb pages are kept although the program has several threads.
    pub nofork: bool,
    /// Each process may have so much; else all processes of the run together.
    pub each: bool,
}

impl PoolOrder {
    /// Where in the text of the [`Orders`] the process stands that warms the pool: ten digits.
    pub fn warm_digits(orders: &str) -> Option<Range<usize>> {
        let start = orders.find("pool=")?;
        let rest = &orders[start..];
        let end = start + rest.find(',').unwrap_or(rest.len());
        let digits = end.checked_sub(10)?..end;
        let text = orders.get(digits.clone())?;
        text.bytes()
            .all(|byte| byte.is_ascii_digit())
            .then_some(digits)
    }

    /// `None` for a text that no [`PoolOrder`] displays as.
    pub fn decode(text: &str) -> Option<Self> {
        let (numbers, warm) = text.rsplit_once(':')?;
        let mut fields = numbers.split(':').map(|field| field.parse::<usize>().ok());
        let mut next = || fields.next().flatten();
        let order = Self {
            size: next()?,
            page: next()?,
            overcommit: next()?,
            nofork: next()? != 0,
            each: next()? != 0,
            warm: match warm {
                "-" => None,
                process => Some(process.parse().ok()?),
            },
        };
        let whole = order.size.checked_add(order.overcommit)?;
        let pages = order.page.is_power_of_two()
            && (1 << 16..=1 << 30).contains(&order.page)
            && order.size.is_multiple_of(order.page)
            && order.overcommit.is_multiple_of(order.page);
        // One page more than allowed may come of rounding up.
        let fits = whole as u64 <= MAX_POOL.0 + 2 * order.page as u64;
        (order.size > 0 && pages && fits).then_some(order)
    }
}

/// As it stands in [`Orders`].
impl fmt::Display for PoolOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (nofork, each) = (u8::from(self.nofork), u8::from(self.each));
        write!(
            f,
            "{}:{}:{}:{nofork}:{each}:",
            self.size, self.page, self.overcommit
        )?;
        match self.warm {
            None => f.write_str("-"),
            Some(process) => write!(f, "{process:010}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nonsense_keeps_the_defaults() {
        for text in [
            "",
            ",,",
            "pmd=3",
            "pmd=x",
            "what=1",
            "max_waste=-1",
            "=",
            "free=maybe",
            "reaper=",
        ] {
            assert_eq!(Orders::decode(text), Orders::default(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            heap in 0usize..3, maps: bool, follow: bool, tunable: bool, max_waste in 0u32..1000, shift in 16u32..30,
            pages in proptest::option::of((1usize..1000, 0usize..1000, 16u32..24, any::<Option<u32>>(), any::<bool>(), any::<bool>())),
            free_least: Option<usize>, small_pages: bool, orphans_are_taken: bool,
            free in 0usize..3, free_workers in 0u32..300, reaper in 0usize..3, filters in 0u32..9, launched_under: u32,
            ledger in proptest::option::of("/proc/[0-9]{1,5}/fd/[0-9]{1,3}"),
        ) {
            let (free, reaper) = (FreeMode::ALL[free], ReaperMode::ALL[reaper]);
            let heap = HeapMode::ALL[heap];
            let pool = pages.map(|(size, overcommit, shift, warm, nofork, each)| PoolOrder {
                size: size << shift, page: 1 << shift, overcommit: overcommit << shift, warm, nofork, each,
            });
            let orders = Orders {
                heap, pool, maps, max_waste, follow, tunable, free, free_workers, free_least, small_pages, reaper,
                orphans_are_taken, filters, launched_under, pmd: 1 << shift, ledger: ledger.as_deref(),
            };
            let text = orders.to_string();
            prop_assert_eq!(Orders::decode(&text), orders.clone());
            let digits = Orders::launched_digits(&text).and_then(|digits| text.get(digits));
            prop_assert_eq!(digits.and_then(|digits| digits.parse().ok()), Some(launched_under));
            let digit = Orders::orphans_digit(&text).unwrap();
            let mut changed = text.clone();
            changed.replace_range(digit..=digit, "1");
            prop_assert_eq!(Orders::decode(&changed), Orders { orphans_are_taken: true, ..orders });
        }

        #[test]
        fn any_text_is_survived(text in ".*") {
            let _ = Orders::decode(&text);
        }
    }
}
