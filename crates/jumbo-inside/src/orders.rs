//! [`Orders`]: what the launcher tells the preload library, in one environment variable.
//!
//! The text is `key=value` pairs with commas between them. It is written by the launcher with
//! its [`fmt::Display`] and read inside the program with [`Orders::decode`], which allocates nothing. `jumbo::policy` makes
//! them of its plan; `heap`, `reaper` and the constructor of the preload library obey them.
//!
//! Invariant: what is encoded is decoded to the same orders.

use core::fmt;
use core::ops::Range;

pub use crate::keep::{Keep, KeepError};
use crate::units::Bytes;

/// The most a pool can be, its overcommit included: what the addresses set aside for it have room for.
pub const MAX_POOL: Bytes = Bytes(256 << 30);

/// Makes [`Orders`] of lines `name: type = default, form;`. The name is the key in the text, and `form` is how the value is
/// read and shown there; what is shown as `None` is left out.
macro_rules! orders {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $default:expr, $form:ident;)*) => {
        /// What the preload library is to do.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Orders<'a> {
            $($(#[$doc])* pub $name: $type,)*
        }

        impl Default for Orders<'_> {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        impl<'a> Orders<'a> {
            /// The orders in `text`. A key that is not known, or a value that does not parse, keeps the default:
            /// a program must run whatever its environment says.
            pub fn decode(text: &'a str) -> Self {
                let mut orders = Self::default();
                for (key, value) in text.split(',').filter_map(|pair| pair.split_once('=')) {
                    match key {
                        $(stringify!($name) => {
                            orders.$name = orders!(read $form value).unwrap_or(orders.$name);
                        })*
                        _ => {}
                    }
                }
                orders
            }
        }

        /// The text for the environment.
        impl fmt::Display for Orders<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut comma = "";
                $(if let Some(shown) = orders!(show $form self.$name) {
                    let comma = core::mem::replace(&mut comma, ",");
                    write!(f, "{comma}{}={shown}", stringify!($name))?;
                })*
                Ok(())
            }
        }
    };
    (read number $text:ident) => { $text.parse().ok() };
    (show number $value:expr) => { Some($value) };
    // Written over in place, so always of ten digits.
    (read digits $text:ident) => { $text.parse().ok() };
    (show digits $value:expr) => { Some(format_args!("{:010}", $value)) };
    (read flag $text:ident) => { Some($text != "0") };
    (show flag $value:expr) => { Some(u8::from($value)) };
        (read mark $text:ident) => { Some($text != "0") };
    (show mark $value:expr) => { $value.then_some(1) };
    (read mode $text:ident) => { Mode::decode($text) };
    (show mode $value:expr) => { $value.encode() };
    (read pmd $text:ident) => { $text.parse().ok().filter(|pmd: &usize| pmd.is_power_of_two() && *pmd >= 1 << 16) };
    (show pmd $value:expr) => { Some($value) };
    (read some $text:ident) => { $text.parse().ok().map(Some) };
    (read pool $text:ident) => { PoolOrder::decode($text).map(Some) };
    (read text $text:ident) => { Some(Some($text)) };
    (show $form:ident $value:expr) => { $value };
}

orders! {
    /// Who serves `malloc`, and on what (`--heap`).
    heap: HeapMode = HeapMode::On, mode;
    /// Anonymous mappings are advised and packed (`--maps`).
    maps: bool = true, flag;
    /// The memory that may be huge and untouched (`--max-waste`).
    max_waste: MaxWaste = MaxWaste::USUAL, number;
    /// How much freed memory stays for the next large allocations (`--keep`); by the heap's own rule if nothing is said.
    keep: Option<Keep> = None, some;
    /// Children are covered too (`--follow`); otherwise the library takes itself out of the environment.
    follow: bool = true, flag;
    /// The launcher added `glibc.malloc.hugetlb=1` to GLIBC_TUNABLES (so it is to be taken out again
    /// where children are not covered).
    tunable: bool = false, flag;
    /// How large frees are done (`--free`).
    free: FreeMode = FreeMode::Sync, mode;
    /// How many threads may free at once, the caller among them (`--free-workers`); 0: as many as the
    /// process has CPUs, at most 4.
    free_workers: u32 = 0, number;
    /// Whether a sibling gives the memory back after the program's end (`--reaper`).
    reaper: ReaperMode = ReaperMode::Auto, mode;
    /// Orphans below the program go to a subreaper: see [`Orders::ORPHANS`].
    orphans: bool = false, flag;
    /// How many seccomp filters the program inherits, if the launcher found that giving memory back is
    /// harmless under them.
    filters: u32 = 0, number;
    /// The PMD size in bytes, so that the program need not open files in /sys to learn it.
    pmd: usize = 2 << 20, pmd;
    /// How many the launcher itself runs under, tried out or not: a program that it started lives with our advice under
    /// these as well as without, as far as is known. What comes later is another matter.
    launched_under: u32 = 0, digits;
    /// An engine starts the program in a container: see [`crate::sandbox::CONTAINER`].
    container: bool = false, mark;
    /// Memory comes in base pages here, whatever is advised (the host's THP `enabled` is `never`): so a smaller free
    /// is worth a look.
    small_pages: bool = false, mark;
    /// From which size on a free is large, in bytes, where it is not the usual one. Not on the command
    /// line: for tests.
    free_least: Option<usize> = None, some;
    /// Pages set aside for the heap (`--pool`).
    pool: Option<PoolOrder> = None, pool;
    /// How the program's text comes on huge pages (`--text`).
    text: TextMode = TextMode::Auto, mode;
    /// Whether its data and bss do (`--data`).
    data: DataMode = DataMode::Auto, mode;
    /// The libraries whose text does too (`--libs`): patterns of file names, with [`Orders::BETWEEN`] between them.
    libs: Option<&'a str> = None, text;
    /// How shared memory comes on huge pages (`--shm`).
    shm: ShmMode = ShmMode::Auto, mode;
    /// In which sizes (`--shm-sizes`): their sum in bytes, each a power of two. 0: what each way takes by itself.
    shm_sizes: usize = 0, number;
    /// Where the ledger is mapped from, if the launcher wants one.
    ledger: Option<&'a str> = None, text;
}

/// The most threads that can be asked for with `--free-workers`.
pub const MAX_FREE_WORKERS: u32 = 64;

/// The memory that may be huge and untouched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxWaste {
    /// In percent of the resident memory, [`MaxWaste::MAX_PERCENT`] at most; 0: none at all.
    Percent(u32),
    /// As much as there is: memory is advised as soon as the program has it.
    Unbounded,
}

impl MaxWaste {
    /// As much again as was touched.
    pub const MAX_PERCENT: u32 = 100;
    const UNBOUNDED: &str = "unbounded";
    /// The default.
    pub const USUAL: Self = Self::Percent(5);

    /// The percentage; the usual one where there is no bound.
    pub fn percent(self) -> usize {
        match self {
            Self::Percent(percent) => usize::try_from(percent).unwrap_or(usize::MAX),
            Self::Unbounded => Self::USUAL.percent(),
        }
    }
}

impl fmt::Display for MaxWaste {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => percent.fmt(f),
            Self::Unbounded => f.pad(Self::UNBOUNDED),
        }
    }
}

/// A text that is no [`MaxWaste`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected a percentage from 0 to {}, or `unbounded`",
    MaxWaste::MAX_PERCENT
)]
pub struct MaxWasteError;

impl core::str::FromStr for MaxWaste {
    type Err = MaxWasteError;

    fn from_str(text: &str) -> Result<Self, MaxWasteError> {
        if text == Self::UNBOUNDED {
            return Ok(Self::Unbounded);
        }
        let percent = text.parse().ok();
        let percent = percent.filter(|percent| *percent <= Self::MAX_PERCENT);
        percent.map(Self::Percent).ok_or(MaxWasteError)
    }
}

/// Options that take one of a few words: each mode with its name, and its code in the orders where that is another one.
macro_rules! modes {
    ($($(#[$doc:meta])* $mode:ident {
        $($(#[$variant_doc:meta])* $variant:ident $name:literal $(= $code:literal)?,)*
    })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
        pub enum $mode {
            $($(#[$variant_doc])* $variant,)*
        }

        impl Mode for $mode {
            const ALL: &'static [(&'static str, Self)] = &[$(($name, Self::$variant)),*];

            fn code(name: &'static str) -> &'static str {
                $($(if name == $name {
                    return $code;
                })?)*
                name
            }
        }
    )*};
}

modes! {
    /// The heap that serves `malloc`.
    HeapMode {
        /// Large allocations come from the window, small ones from mimalloc in threads that ask for much, the rest from glibc,
        /// whose heap and arenas are advised.
        On "on" = "1",
        /// The same without mimalloc.
        Glibc "glibc",
        /// As [`HeapMode::On`]; where there is a pool, all come from mimalloc, and it from the pool.
        Mimalloc "mimalloc",
        /// The program's allocator, as it is.
        Off "off" = "0",
    }

    /// When a large free returns.
    FreeMode {
        /// When all of it is free.
        Sync "sync",
        /// At once; the memory follows.
        Background "background",
        /// Large frees are the kernel's business, on the caller's thread.
        Off "off",
    }

    /// Whether a sibling process gives the memory back when the program has ended.
    ReaperMode {
        /// Once the program has much memory of its own, and nothing that hangs on it outlives the program.
        Auto "auto",
        /// From the start, whatever hangs on the memory.
        On "on",
        /// Never.
        Off "off",
    }

    /// The way in which a program's text comes on huge pages: the highest rung of the ladder that is tried.
    TextMode {
        /// Free rungs at once; a copy once the program has lived for as long as makes it worth while.
        Auto "auto",
        /// The file's own mapping, where the page cache has it in huge folios.
        File "file",
        /// One copy for all processes of the user that run the file, at the start.
        Shared "shared",
        /// As it is.
        Off "off",
    }

    /// The way in which a program's shared memory comes on huge pages.
    ShmMode {
        /// As with `Advise`; and what the program has touched is collapsed.
        Auto "auto",
        /// As the kernel's controls have it: the mappings are aligned and advised.
        Advise "advise",
        /// Hugetlb pages for anonymous mappings of whole ones, populated when they are made.
        Hugetlb "hugetlb",
        /// The first touch of a block brings in the whole block, by userfaultfd(2).
        User "user",
        /// As it is.
        Off "off",
    }

    /// Whether a program's data and bss come on huge pages.
    DataMode {
        /// Bss, and data that was written to before the program begins.
        Auto "auto",
        /// All.
        On "on",
        /// As they are.
        Off "off",
    }
}

/// One of the few words that an option takes.
pub trait Mode: Copy + PartialEq + 'static {
    /// All of them, as they are typed.
    const ALL: &'static [(&'static str, Self)];

    /// What is typed, as it stands in the orders.
    fn code(name: &'static str) -> &'static str;

    /// The mode of that code.
    fn decode(code: &str) -> Option<Self> {
        let mut all = Self::ALL.iter();
        all.find_map(|(name, mode)| (Self::code(name) == code).then_some(*mode))
    }

    /// Its code.
    fn encode(self) -> Option<&'static str> {
        let mut all = Self::ALL.iter();
        all.find_map(|(name, mode)| (*mode == self).then_some(Self::code(name)))
    }
}

impl Orders<'_> {
    /// What stands between two patterns of [`Orders::libs`]. No file's name has it.
    pub const BETWEEN: char = '/';
    /// How long [`Orders::libs`] may be, in bytes.
    pub const LONGEST_LIBS: usize = 256;
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
        const KEY: &str = "launched_under=";
        digits(text, text.find(KEY)? + KEY.len())
    }
}

/// Where in `text` ten digits are, from `start` on.
fn digits(text: &str, start: usize) -> Option<Range<usize>> {
    let range = start..start.checked_add(10)?;
    let digits = text.get(range.clone())?;
    let whole = digits.bytes().all(|byte| byte.is_ascii_digit());
    whole.then_some(range)
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
        digits(orders, end.checked_sub(10)?)
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
            "keep=101%",
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
            heap in 0usize..3, maps: bool, follow: bool, tunable: bool, percent in proptest::option::of(0u32..101), shift in 16u32..30,
            pages in proptest::option::of((1usize..1000, 0usize..1000, 16u32..24, any::<Option<u32>>(), any::<bool>(), any::<bool>())),
            free_least: Option<usize>, small_pages: bool, orphans: bool, kept in proptest::option::of((any::<bool>(), 0usize..101)),
            text in 0usize..4, data in 0usize..3, shm in 0usize..5, shm_sizes: usize, libs in proptest::option::of("[a-z*?.]{1,9}(/[a-z*]{1,9}){0,2}"),
            free in 0usize..3, free_workers in 0u32..300, reaper in 0usize..3, filters in 0u32..9, launched_under: u32, container: bool,
            ledger in proptest::option::of("/proc/[0-9]{1,5}/fd/[0-9]{1,3}"),
        ) {
            let (free, reaper) = (FreeMode::ALL[free].1, ReaperMode::ALL[reaper].1);
            let (heap, text) = (HeapMode::ALL[heap].1, TextMode::ALL[text].1);
            let (data, shm) = (DataMode::ALL[data].1, ShmMode::ALL[shm].1);
            let pool = pages.map(|(size, overcommit, shift, warm, nofork, each)| PoolOrder {
                size: size << shift, page: 1 << shift, overcommit: overcommit << shift, warm, nofork, each,
            });
            let keep = kept.map(|(size, amount)| match size {
                true => Keep::Size(amount << 20),
                false => Keep::Percent(u32::try_from(amount).unwrap()),
            });
            let max_waste = percent.map_or(MaxWaste::Unbounded, MaxWaste::Percent);
            let orders = Orders {
                heap, pool, maps, max_waste, keep, follow, tunable, free, free_workers, free_least, small_pages, reaper,
                orphans, filters, launched_under, container, text, data, shm, shm_sizes, libs: libs.as_deref(), pmd: 1 << shift, ledger: ledger.as_deref(),
            };
            let text = orders.to_string();
            prop_assert_eq!(Orders::decode(&text), orders.clone());
            let digits = Orders::launched_digits(&text).and_then(|digits| text.get(digits));
            prop_assert_eq!(digits.and_then(|digits| digits.parse().ok()), Some(launched_under));
            let digit = Orders::orphans_digit(&text).unwrap();
            let mut changed = text.clone();
            changed.replace_range(digit..=digit, "1");
            prop_assert_eq!(Orders::decode(&changed), Orders { orphans: true, ..orders });
        }

        #[test]
        fn any_text_is_survived(text in ".*") {
            let _ = Orders::decode(&text);
        }
    }
}
