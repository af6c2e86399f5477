//! [`Orders`]: the configuration that the launcher passes to the preload library, in one
//! environment variable.
//!
//! The text is `key=value` pairs, separated by commas. The launcher writes it by [`fmt::Display`],
//! and the program reads it by [`Orders::decode`], which allocates nothing. `jumbo::policy` derives
//! the orders from its plan; `heap`, `reaper` and the constructor of the preload library obey them.
//!
//! Invariant: decoding an encoded configuration returns the same one.

use core::fmt;
use core::ops::Range;

pub use crate::keep::{Keep, KeepError};
use jumbo_sys::units::Bytes;

/// Maximum size of a pool with its overcommit: the size of the reserved address range.
pub const MAX_POOL: Bytes = Bytes(256 << 30);

/// Values of the environment variable `JUMBO` that switch jumbo off, in any case.
const OFF_WORDS: [&[u8]; 4] = [b"off", b"0", b"no", b"false"];

/// Reports whether this value of the environment variable `JUMBO` switches jumbo off.
pub fn is_off(value: &[u8]) -> bool {
    OFF_WORDS
        .iter()
        .any(|word| value.eq_ignore_ascii_case(word))
}

/// Defines [`Orders`] from lines `name: type = default, form;`. The name is the key in the text,
/// and `form` the format of the value; a value shown as `None` is omitted.
macro_rules! orders {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $default:expr, $form:ident;)*) => {
        /// Configuration of the preload library.
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
            /// Parses `text`. An unknown key is ignored, and an invalid value keeps the default: a
            /// program must run with any environment.
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
    // Overwritten in place, so always ten digits.
    (read digits $text:ident) => { $text.parse().ok() };
    (show digits $value:expr) => { Some(format_args!("{:010}", $value)) };
    (read flag $text:ident) => { Some($text != "0") };
    (show flag $value:expr) => { Some(u8::from($value)) };
    (read mark $text:ident) => { Some($text != "0") };
    (show mark $value:expr) => { $value.then_some(1) };
    (read mode $text:ident) => { Mode::decode($text) };
    (show mode $value:expr) => { $value.encode() };
    (read pmd $text:ident) => {
        $text.parse().ok().filter(|pmd: &usize| pmd.is_power_of_two() && *pmd >= 1 << 16)
    };
    (show pmd $value:expr) => { Some($value) };
    (read some $text:ident) => { $text.parse().ok().map(Some) };
    (read pool $text:ident) => { PoolOrder::decode($text).map(Some) };
    (read text $text:ident) => { Some(Some($text)) };
    (show $form:ident $value:expr) => { $value };
}

orders! {
    /// Allocator behind `malloc` (`--heap`).
    heap: HeapMode = HeapMode::On, mode;
    /// Advise and pack anonymous mappings (`--maps`).
    maps: bool = true, flag;
    /// Maximum memory that is huge and untouched (`--max-waste`).
    max_waste: MaxWaste = MaxWaste::DEFAULT, number;
    /// Maximum freed memory kept for later large allocations (`--keep`); `None`: the heap's own
    /// rule.
    keep: Option<Keep> = None, some;
    /// Begin on huge pages also where base pages take less time (`--first-touch=huge`).
    huge_at_once: bool = false, mark;
    /// Cover child processes (`--follow`); otherwise the library removes itself from the
    /// environment.
    follow: bool = true, flag;
    /// Mode of large frees (`--free`).
    free: FreeMode = FreeMode::Sync, mode;
    /// Maximum number of threads that free at once, the caller included (`--free-workers`); 0: the
    /// CPUs of the process, at most 4.
    free_workers: u32 = 0, number;
    /// Maximum number of threads that make memory resident at once, the caller included
    /// (`--populate-workers`); 0: the CPUs of the process, at most 4.
    populate_workers: u32 = 0, number;
    /// Mode of the reaper process, which frees memory after the program's end (`--reaper`).
    reaper: ReaperMode = ReaperMode::Auto, mode;
    /// A subreaper adopts the program's orphans: see [`Orders::ORPHANS_KEY`].
    orphans: bool = false, flag;
    /// Number of inherited seccomp filters, if the launcher found that frees are harmless under
    /// them.
    filters: u32 = 0, number;
    /// PMD size in bytes: the program does not read it from /sys.
    pmd: usize = 2 << 20, pmd;
    /// Number of seccomp filters of the launcher, tested or not: advice under these is assumed to
    /// be harmless, but not under later ones.
    launched_under: u32 = 0, digits;
    /// A container engine starts the program: see [`crate::sandbox::CONTAINER`].
    container: bool = false, mark;
    /// The host's THP `enabled` is `never`, so memory has base pages despite advice: a smaller free
    /// counts as large.
    small_pages: bool = false, mark;
    /// Minimum size of a large free in bytes, for tests; `None`: the usual one.
    free_least: Option<usize> = None, some;
    /// Huge page pool of the heap (`--pool`).
    pool: Option<PoolOrder> = None, pool;
    /// Method for the program's text (`--text`).
    text: TextMode = TextMode::Auto, mode;
    /// Method for its data and bss (`--data`).
    data: DataMode = DataMode::Auto, mode;
    /// Data files that it maps to read (`--files`).
    files: FilesMode = FilesMode::Auto, mode;
    /// Libraries whose text is covered too (`--libs`): patterns of file names, separated by
    /// [`Orders::LIBS_SEPARATOR`].
    libs: Option<&'a str> = None, text;
    /// Method for shared memory (`--shm`).
    shm: ShmMode = ShmMode::Auto, mode;
    /// Sizes for shared memory (`--shm-sizes`): the sum of powers of two, in bytes; 0: the method's
    /// default.
    shm_sizes: usize = 0, number;
    /// Path of the ledger, if the launcher has one.
    ledger: Option<&'a str> = None, text;
}

/// Maximum of `--free-workers`.
pub const MAX_FREE_WORKERS: u32 = 64;
/// Maximum of `--populate-workers`.
pub const MAX_POPULATE_WORKERS: u32 = 64;

/// Maximum memory that is huge and untouched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxWaste {
    /// Percentage of the resident memory, at most [`MaxWaste::MAX_PERCENT`].
    Percent(u32),
    /// No bound: memory is advised when the program maps it.
    Unbounded,
}

impl MaxWaste {
    /// Maximum percentage: as much untouched memory as touched.
    pub const MAX_PERCENT: u32 = 100;
    const UNBOUNDED: &str = "unbounded";
    /// Default bound.
    pub const DEFAULT: Self = Self::Percent(5);

    /// Returns the percentage; the default one without a bound.
    pub fn percent(self) -> usize {
        match self {
            Self::Percent(percent) => usize::try_from(percent).unwrap_or(usize::MAX),
            Self::Unbounded => Self::DEFAULT.percent(),
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

/// Error for a text that is not a [`MaxWaste`].
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

/// Defines options with a few values: each with its name, and its code in the orders if that
/// differs.
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
    /// Allocator behind `malloc`.
    HeapMode {
        /// jumbo's heap: slabs below 128 KiB, the window above.
        On "on" = "1",
        /// The C library's allocator below 128 KiB, the window above.
        Glibc "glibc",
        /// The program's own allocator.
        Off "off" = "0",
    }

    /// Return time of a large free.
    FreeMode {
        /// After all of the memory is free.
        Sync "sync",
        /// At once; the memory is freed later.
        Background "background",
        /// The caller's thread frees, as without jumbo.
        Off "off",
    }

    /// Start of the reaper process.
    ReaperMode {
        /// Once the program has much memory, unless a resource bound to the memory would outlive
        /// the program.
        Auto "auto",
        /// At the program's start, despite such resources.
        On "on",
        /// Never.
        Off "off",
    }

    /// Last method to try for text.
    TextMode {
        /// The free methods at once, a copy once the program has used enough CPU time.
        Auto "auto",
        /// The file's own mapping, by huge folios of the page cache.
        File "file",
        /// One copy for all processes of the user that run the file, at the start.
        Shared "shared",
        /// Unchanged.
        Off "off",
    }

    /// Method for shared memory.
    ShmMode {
        /// Same as `Advise`; touched memory is also collapsed.
        Auto "auto",
        /// Aligned and advised mappings, subject to the kernel's controls.
        Advise "advise",
        /// Populated hugetlb pages, for anonymous mappings of whole ones.
        Hugetlb "hugetlb",
        /// Unchanged.
        Off "off",
    }

    /// Data files that the program maps to read and that come in by huge folios.
    FilesMode {
        /// Those that it populates as it maps them: it reads them whole.
        Auto "auto",
        /// All of at least a huge page.
        On "on",
        /// None.
        Off "off",
    }

    /// Method for data and bss.
    DataMode {
        /// Bss, and data written before the program begins.
        Auto "auto",
        /// All data and bss.
        On "on",
        /// Unchanged.
        Off "off",
    }
}

/// A value of an option with a few values.
pub trait Mode: Copy + PartialEq + 'static {
    /// All values with their names on the command line.
    const ALL: &'static [(&'static str, Self)];

    /// Returns the code in the orders for a name.
    fn code(name: &'static str) -> &'static str;

    /// Returns the value of a code.
    fn decode(code: &str) -> Option<Self> {
        let mut all = Self::ALL.iter();
        all.find_map(|(name, mode)| (Self::code(name) == code).then_some(*mode))
    }

    /// Returns the code of a value.
    fn encode(self) -> Option<&'static str> {
        let mut all = Self::ALL.iter();
        all.find_map(|(name, mode)| (*mode == self).then_some(Self::code(name)))
    }
}

impl Orders<'_> {
    /// Separator of the patterns in [`Orders::libs`]: no file name contains it.
    pub const LIBS_SEPARATOR: char = '/';
    /// Maximum length of [`Orders::libs`].
    pub const MAX_LIBS_BYTES: usize = 256;
    /// The environment variable of the orders.
    pub const VARIABLE: &'static str = "JUMBO_ORDERS";
    /// Text before the digit of [`Orders::orphans`], which a program that adopts orphans
    /// overwrites.
    pub const ORPHANS_KEY: &'static str = ",orphans=";

    /// Returns the index of that digit in `text`.
    pub fn orphans_digit(text: &str) -> Option<usize> {
        let at = text.find(Self::ORPHANS_KEY)? + Self::ORPHANS_KEY.len();
        text.as_bytes()
            .get(at)
            .is_some_and(u8::is_ascii_digit)
            .then_some(at)
    }

    /// Returns the range of the ten digits of [`Orders::launched_under`] in `text`, to overwrite
    /// them.
    pub fn launched_digits(text: &str) -> Option<Range<usize>> {
        const KEY: &str = "launched_under=";
        digits(text, text.find(KEY)? + KEY.len())
    }
}

/// Returns the range of the ten digits at `start`.
fn digits(text: &str, start: usize) -> Option<Range<usize>> {
    let range = start..start.checked_add(10)?;
    let digits = text.get(range.clone())?;
    let whole = digits.bytes().all(|byte| byte.is_ascii_digit());
    whole.then_some(range)
}

/// A pool for the program, in bytes. `size` and `overcommit` are multiples of `page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOrder {
    /// Bytes that are kept once they are resident.
    pub size: usize,
    /// Page size: a power of two, at least the PMD size.
    pub page: usize,
    /// Maximum bytes beyond `size`, which are released when free.
    pub overcommit: usize,
    /// Make all of `size` resident before the program starts: in the launched process and after its
    /// execs, not in its children. The first process that reads it writes its PID there: 0 before.
    pub warm: Option<u32>,
    /// Keep hugetlb pages although the program has several threads.
    pub nofork: bool,
    /// The sizes are for each process, else for all processes of the run together.
    pub each: bool,
}

impl PoolOrder {
    /// Returns the range of the ten digits of [`PoolOrder::warm`] in the text of [`Orders`].
    pub fn warm_digits(orders: &str) -> Option<Range<usize>> {
        let start = orders.find("pool=")?;
        let rest = &orders[start..];
        let end = start + rest.find(',').unwrap_or(rest.len());
        digits(orders, end.checked_sub(10)?)
    }

    /// Parses the text of a valid [`PoolOrder`].
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
        // Rounding up may add one page to each.
        let fits = whole as u64 <= MAX_POOL.0 + 2 * order.page as u64;
        (order.size > 0 && pages && fits).then_some(order)
    }
}

/// The text in [`Orders`].
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
    use proptest::option::of;
    use proptest::prelude::*;

    #[test]
    fn invalid_values_keep_the_defaults() {
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
        fn decoding_inverts_encoding(
            heap in 0usize..3, maps: bool, follow: bool, huge_at_once: bool, percent in of(0u32..101),
            pages in of((1usize..1000, 0usize..1000, 16u32..24, any::<Option<u32>>())),
            nofork: bool, each: bool, shift in 16u32..30, free_least: Option<usize>,
            small_pages: bool, orphans: bool, kept in of((any::<bool>(), 0usize..101)),
            text in 0usize..4, data in 0usize..3, files in 0usize..3, shm in 0usize..4,
            shm_sizes: usize, libs in of("[a-z*?.]{1,9}(/[a-z*]{1,9}){0,2}"), free in 0usize..3,
            free_workers in 0u32..300, populate_workers in 0u32..300, reaper in 0usize..3, filters in 0u32..9,
            launched_under: u32, container: bool,
            ledger in of("/proc/[0-9]{1,5}/fd/[0-9]{1,3}"),
        ) {
            let (free, reaper) = (FreeMode::ALL[free].1, ReaperMode::ALL[reaper].1);
            let (heap, text) = (HeapMode::ALL[heap].1, TextMode::ALL[text].1);
            let (data, shm) = (DataMode::ALL[data].1, ShmMode::ALL[shm].1);
            let files = FilesMode::ALL[files].1;
            let pool = pages.map(|(size, overcommit, shift, warm)| PoolOrder {
                size: size << shift,
                page: 1 << shift,
                overcommit: overcommit << shift,
                warm,
                nofork,
                each,
            });
            let keep = kept.map(|(size, amount)| match size {
                true => Keep::Size(amount << 20),
                false => Keep::Percent(u32::try_from(amount).unwrap()),
            });
            let max_waste = percent.map_or(MaxWaste::Unbounded, MaxWaste::Percent);
            let orders = Orders {
                heap, pool, maps, max_waste, keep, huge_at_once, follow, free, free_workers, populate_workers, free_least,
                small_pages, reaper, orphans, filters, launched_under, container, text, data, files, shm,
                shm_sizes, libs: libs.as_deref(), pmd: 1 << shift, ledger: ledger.as_deref(),
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
        fn accepts_any_text(text in ".*") {
            let _ = Orders::decode(&text);
        }
    }
}
